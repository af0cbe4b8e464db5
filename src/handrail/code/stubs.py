"""Stubs: Python signatures of tools, from their JSON Schemas, against which a script is checked before it runs."""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Iterable, Mapping
from typing import Any, cast

from handrail.tools import Tool

_SIMPLE = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
_LONGEST_CHOICE = 30
_OS_ERRORS = (
    "FileExistsError FileNotFoundError IsADirectoryError NotADirectoryError PermissionError UnboundLocalError"
)
_PREAMBLE = "\n".join(
    [
        "from typing import Any, Literal",
        *(f"class {name}(OSError): ..." for name in _OS_ERRORS.split()),
        "class ImportError(Exception): ...",
        "class ModuleNotFoundError(ImportError): ...",
        *(
            f"def {name}(*a: Any, **k: Any) -> Any: ..."
            for name in ["filter", "format", "getattr", "map", "setattr"]
        ),
        "def hasattr(object: Any, name: str) -> bool: ...",
    ]
)
"""What the interpreter has and its type checker does not know."""

Schema = Mapping[str, Any]


def function_names(tools: Iterable[Tool[Any, Any]]) -> dict[str, Tool[Any, Any]]:
    """Return the tools by the names that they have in scripts. If two would have one name, the first has it.

    The names are identifiers, and take none from Python: a script needs `list` even if a tool is called that.
    """
    named: dict[str, Tool[Any, Any]] = {}
    for tool in tools:
        name = tool.name.replace("-", "_")
        taken = keyword.iskeyword(name) or hasattr(builtins, name)
        if taken or not name.isidentifier() or name.startswith("_"):  # a stub exports no `_name`
            name = f"tool_{name}"
        named.setdefault(name, tool)
    return named


def stubs_of(functions: Mapping[str, Tool[Any, Any]]) -> str:
    """Return the stubs of these functions, which are async and take keyword arguments."""
    return "\n".join([_PREAMBLE, *(signature(name, tool) for name, tool in functions.items())]) + "\n"


def signature(name: str, tool: Tool[Any, Any]) -> str:
    """Return the signature of a tool as an async function."""
    schema = tool.json_schema
    properties: Schema = schema.get("properties", {})
    if not all(each.isidentifier() and not keyword.iskeyword(each) for each in properties):
        parameters = "**arguments: Any"
    else:
        required = schema.get("required", ())
        definitions = schema.get("$defs", {})
        each = [
            f"{key}: {annotation(value, definitions)}{'' if key in required else ' = ...'}"
            for key, value in properties.items()
        ]
        if schema.get("additionalProperties", True) is not False or "patternProperties" in schema:
            each.append("**arguments: Any")
        parameters = ", ".join(["*", *each] if properties else each)
    result = tool.result_schema
    if result is None or result.json_schema.get("type") == "null":
        returns = "Any"
    else:
        returns = annotation(result.json_schema, result.json_schema.get("$defs", {}), is_result=True)
    return f"async def {name}({parameters}) -> {returns}: ..."


def annotation(schema: Any, definitions: Schema, depth: int = 0, *, is_result: bool = False) -> str:
    """Return the Python type for a JSON Schema: `Any` for what types can't say, and for a result that may be one of several."""
    if not isinstance(schema, Mapping) or depth > 5:
        return "Any"
    found = cast(Schema, schema)

    def inner(each: Any) -> str:
        return annotation(each, definitions, depth + 1, is_result=is_result)

    if "$ref" in found:
        return inner(definitions.get(str(found["$ref"]).rpartition("/")[2]))
    choices: list[Any] | None = [found["const"]] if "const" in found else found.get("enum")
    if choices is not None:
        plain = all(type(each) in (str, int, bool) for each in choices) and len(choices) <= _LONGEST_CHOICE
        return f"Literal[{', '.join(map(repr, choices))}]" if plain and choices else "Any"
    several = found.get("anyOf") or found.get("oneOf")
    kind = found.get("type")
    if several is None and isinstance(kind, list):
        several = [{**found, "type": each} for each in cast("list[Any]", kind)]
    if several is not None:
        types = list(dict.fromkeys(map(inner, several)))
        is_open = "Any" in types or (is_result and len([each for each in types if each != "None"]) > 1)
        return "Any" if is_open else " | ".join(types)
    if kind == "array":
        return f"list[{inner(found.get('items'))}]"
    if kind == "object":
        values = found.get("additionalProperties")
        return f"dict[str, {inner(values) if values and not found.get('properties') else 'Any'}]"
    return _SIMPLE.get(kind, "Any") if isinstance(kind, str) else "Any"
