"""The rules of what a tool may be. Whatever is wrong with one is found when it is defined."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union, cast, get_args, get_origin

from pydantic import BaseModel
from typing_extensions import is_typeddict

from handrail.context import AgentContext, ToolContext, UserContext, WorkerContext
from handrail.errors import DefinitionError, ToolDefinitionError, ToolValidationError
from handrail.schema import JsonSchema, Schema
from handrail.schema.wording import describe
from handrail.tools.copying import quick_copy
from handrail.tools.effect import EFFECTS
from handrail.tools.example import Need, RunMode, ToolExample
from handrail.tools.naming import is_name, mend_for
from handrail.tools.paths import PathFinder
from handrail.tools.signature import (
    MISSING,
    caller_namespace,
    context_parameter,
    positional,
    read,
    result_of,
)

if TYPE_CHECKING:
    from handrail.tools.definition import Tool

LONGEST_DESCRIPTION = 200

_CAPABILITY = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*\Z")
_NO_ARGUMENTS: JsonSchema = {"type": "object", "properties": {}, "additionalProperties": False}


def check(tool: Tool[Any, Any]) -> None:
    """Fill in what follows from a new tool's handler, and refuse it with the mend if it is wrong."""
    _Check(tool).all()


def check_words(tool: Tool[Any, Any]) -> None:
    """Look again at what a model reads of a tool, after only that was changed."""
    check = _Check(tool)
    check.description()
    check.examples()


class _Check:
    """Fills in and checks one new tool. Each method is one rule of what a tool may be."""

    def __init__(self, tool: Tool[Any, Any]) -> None:
        self.tool = tool
        self.namespace = caller_namespace()

    def all(self) -> None:
        self.name()
        self.description()
        self.flags()
        self.timeout()
        self.capabilities()
        self.handler()
        self.schemas()
        self.effect()
        self.examples()

    def refuse(self, problem: str, mend: str) -> ToolDefinitionError:
        return ToolDefinitionError(str(self.tool.name), problem, mend)

    def fill(self, field: str, value: Any) -> None:
        object.__setattr__(self.tool, field, value)

    def name(self) -> None:
        name: Any = self.tool.name
        if not is_name(name):
            raise self.refuse(f"the name {name!r} is not allowed", mend_for(name))

    def description(self) -> None:
        text: Any = self.tool.description
        if not isinstance(text, str) or not text.strip():
            raise self.refuse("it has no description", "Say in one sentence what it does, for the model.")
        if len(text) > LONGEST_DESCRIPTION:
            raise self.refuse(
                f"its description has {len(text)} characters and {LONGEST_DESCRIPTION} are allowed",
                "Say it in one sentence; details belong in the prompt's section or the parameters' descriptions.",
            )

    def flags(self) -> None:
        tool = self.tool
        for flag in ("accepts_overrides", "alone"):
            if not isinstance(getattr(tool, flag), bool):
                raise self.refuse(f"{flag} is {getattr(tool, flag)!r}", f"{flag} is True or False.")
        if tool.run_mode is not None and tool.run_mode not in get_args(RunMode):
            raise self.refuse(
                f"run_mode is {tool.run_mode!r}",
                "Use 'user', 'agent', 'headless', or None for the session's.",
            )
        if not isinstance(cast(object, tool.effect), str) or tool.effect not in EFFECTS:
            near = difflib.get_close_matches(str(tool.effect), EFFECTS, n=1)
            raise self.refuse(
                f"effect is {tool.effect!r}",
                f"Did you mean {near[0]!r}?" if near else f"Use one of {', '.join(map(repr, EFFECTS))}.",
            )

    def timeout(self) -> None:
        timeout: Any = self.tool.timeout
        if timeout is None:
            return
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
            raise self.refuse(
                f"timeout is {timeout!r}", "Give a positive number of seconds, or None for no timeout."
            )

    def capabilities(self) -> None:
        given: Any = self.tool.capabilities
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise self.refuse(
                f"capabilities is {given!r}",
                f"Give a set of words, for example {{{given if isinstance(given, str) else 'fs.read'!r}}}.",
            )
        words = list(cast("Iterable[Any]", given))
        for word in words:
            if not isinstance(word, str) or not _CAPABILITY.match(word):
                raise self.refuse(
                    f"the capability {word!r} is not a word",
                    "Write it in small letters with dots, as in 'fs.read'.",
                )
        self.fill("capabilities", frozenset(words))

    def handler(self) -> None:
        tool = self.tool
        if tool.handler is None:
            self.fill("is_async", False)
            self.fill("context_type", ToolContext)
            self.fill("needs", frozenset[Need]())
            self.fill("params", None if tool.params is MISSING else tool.params)
            self.fill("result", Any if tool.result is MISSING else tool.result)
            return
        signature = read(tool.name, tool.handler, self.namespace, "handler")
        context_type = context_parameter(tool.name, signature, "handler")
        form = "(params, *, context: ToolContext) -> ToolResult[...]"
        (name,) = positional(tool.name, signature, 1, "handler", form)
        self.fill("is_async", signature.is_async)
        self.fill("context_type", context_type)
        self.fill("needs", _needs(context_type))
        if tool.params is MISSING:
            annotation = signature.annotation(name)
            if annotation is MISSING:
                raise self.refuse(
                    f"{name!r} of its handler has no annotation",
                    "Annotate it with a dataclass or a pydantic model, or give `params=`.",
                )
            self.fill("params", None if annotation is type(None) else annotation)
        else:
            self.agree("params", tool.params, "its handler", name, signature.annotation(name))
        result = result_of(tool.name, signature)
        if tool.result is MISSING:
            self.fill("result", result)
        elif _disagree(result, tool.result):
            raise self.refuse(
                f"`result` is {describe(tool.result)} and its handler gives {describe(result)}",
                "Drop `result=`, or make them the same type.",
            )
        self.mode_against_needs()

    def agree(self, what: str, given: Any, whose: str, parameter: str, annotation: Any) -> None:
        if _disagree(given, annotation):
            raise self.refuse(
                f"`{what}` is {describe(given)} and {parameter!r} of {whose} is annotated {describe(annotation)}",
                "Make them the same type.",
            )

    def mode_against_needs(self) -> None:
        tool = self.tool
        has: dict[RunMode, set[Need]] = {
            "user": {"user", "worker"},
            "agent": {"model", "worker"},
            "headless": {"worker"},
        }
        if tool.run_mode is not None and not tool.needs <= has[tool.run_mode]:
            raise self.refuse(
                f"its handler requires {tool.context_type.__name__}, which run_mode {tool.run_mode!r} never has",
                "Change the one or the other.",
            )

    def schemas(self) -> None:
        tool = self.tool
        try:
            _check_params_type(tool.params)
            schema = None if tool.params is None else Schema[Any](tool.params, self.namespace)
            result = None if tool.result is Any else Schema[Any](tool.result, self.namespace)
            paths = PathFinder(tool.params, self.namespace)
        except DefinitionError as error:
            problem, mend = error.in_two
            raise self.refuse(problem, mend) from error.__cause__
        self.fill("_schema", schema)
        self.fill("result_class", _class_of(tool.result))
        self.fill("_copy", quick_copy(tool.params, self.namespace))
        self.fill("secret", schema is not None and schema.secret)
        self.fill("_quick", None if schema is None or schema.secret else schema.quick)
        self.fill("_result_schema", result)
        self.fill("_paths", paths)
        self.fill("json_schema", dict(_NO_ARGUMENTS) if schema is None else schema.json_schema)

    def effect(self) -> None:
        tool = self.tool
        rules = EFFECTS[tool.effect]
        if (tool.effect == "compensable") != (tool.compensate is not None):
            raise self.refuse(
                "effect='compensable' and a `compensate` handler go together, and only one of them is given",
                "Give both, or neither.",
            )
        if tool.compensate is not None:
            form = "(params, value, *, context: ToolContext) -> None"
            self.companion(tool.compensate, "compensate", 2, form)
        if tool.probe is not None:
            if tool.effect not in ("compensable", "irreversible"):
                raise self.refuse(
                    f"a `probe` is given and effect is {tool.effect!r}, after which nobody probes",
                    "Drop it, or say effect='compensable' or 'irreversible'.",
                )
            self.companion(tool.probe, "probe", 1, "(params, *, context: ToolContext) -> bool | None")
        writes = sorted(word for word in tool.capabilities if word.endswith(".write"))
        if not rules.writes and (writes or "write" in self.tool._paths.declared):  # pyright: ignore[reportPrivateUsage]  # our own tool
            what = f"the capability {writes[0]!r}" if writes else "a PathArg('write')"
            raise self.refuse(
                f"effect is {tool.effect!r} but it has {what}", "Say effect='staged', or drop the write."
            )

    def companion(self, function: Callable[..., Any], what: str, count: int, form: str) -> None:
        signature = read(self.tool.name, function, self.namespace, what)
        context_parameter(self.tool.name, signature, what)
        names = positional(self.tool.name, signature, count, what, form)
        self.agree("params", self.tool.params, f"its {what}", names[0], signature.annotation(names[0]))

    def examples(self) -> None:
        given: Any = self.tool.examples
        if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
            raise self.refuse(f"examples is {given!r}", "Give a tuple of ToolExample.")
        self.fill("examples", tuple(cast("Iterable[Any]", given)))
        for index, example in enumerate(self.tool.examples):
            self.example(index, example)

    def example(self, index: int, example: ToolExample[Any, Any]) -> None:
        if not isinstance(cast(object, example), ToolExample):
            raise self.refuse(
                f"examples[{index}] is {example!r}",
                "Give ToolExample(description=..., input=..., output=...).",
            )
        text: Any = example.description
        if not isinstance(text, str) or not 0 < len(text) <= LONGEST_DESCRIPTION:
            found = f"{len(text)} characters" if isinstance(text, str) else repr(text)
            raise self.refuse(
                f"examples[{index}] has a description of {found}",
                f"Say in 1 to {LONGEST_DESCRIPTION} characters what it shows.",
            )
        tool = self.tool
        params_type = get_origin(tool.params) or tool.params
        if isinstance(params_type, type) and not isinstance(example.input, params_type | Mapping):
            raise self.refuse(
                f"the input of examples[{index}] is {example.input!r}",
                f"Give a {describe(tool.params)}, or a mapping with its fields.",
            )
        for part, schema in (("input", tool._schema), ("output", tool._result_schema)):  # pyright: ignore[reportPrivateUsage]  # our own tool
            value: Any = getattr(example, part)
            try:
                if schema is not None:
                    schema.parse_value(value)
                elif part == "input" and value is not None and value != {}:
                    raise ToolValidationError("the tool takes no arguments")
            except ToolValidationError as error:
                raise self.refuse(
                    f"the {part} of examples[{index}] does not fit: {error}",
                    f"Make it fit the {part}'s type.",
                ) from None


def _disagree(given: Any, wanted: Any) -> bool:
    """Is a value of the one type certainly none of the other? Only classes are compared."""
    if not isinstance(given, type) or not isinstance(wanted, type) or {given, wanted} & {Any, MISSING}:
        return False
    return not getattr(wanted, "_is_protocol", False) and not issubclass(given, wanted)


def _class_of(result: Any) -> type | tuple[type, ...] | None:
    """What `isinstance` can ask of a result: its class, or that of its container; of a union, those of all of it."""
    if result is Any:
        return None
    if get_origin(result) is Annotated:
        return _class_of(get_args(result)[0])
    if get_origin(result) in (Union, types.UnionType):
        return _classes_of(get_args(result))
    if result is None or result is type(None):
        return type(None)
    origin = get_origin(result) or result
    if origin is float:
        return (float, int)
    if (
        not isinstance(origin, type)
        or origin is object
        or is_typeddict(origin)
        or getattr(origin, "_is_protocol", False)
    ):
        return None
    return origin


def _classes_of(results: Iterable[Any]) -> tuple[type, ...] | None:
    found: list[type] = []
    for each in map(_class_of, results):
        if each is None:
            return None
        found += each if isinstance(each, tuple) else (each,)
    return tuple(found)


def _needs(context_type: type[ToolContext]) -> frozenset[Need]:
    needs: set[Need] = set()
    if issubclass(context_type, UserContext):
        needs.add("user")
    if issubclass(context_type, AgentContext):
        needs.add("model")
    if issubclass(context_type, WorkerContext):
        needs.add("worker")
    return frozenset(needs)


def _check_params_type(params: Any) -> None:
    origin = get_origin(params) or params
    is_class = isinstance(origin, type)
    if params is None or (is_class and dataclasses.is_dataclass(origin)):
        return
    if is_class and issubclass(origin, BaseModel) and not hasattr(origin, "__pydantic_root_model__"):
        return
    if is_class and issubclass(origin, BaseModel) and not origin.__pydantic_root_model__:
        return
    raise DefinitionError(
        f"its params are {describe(params)}, and arguments are always an object with named fields. "
        "Make them a dataclass, a pydantic model, or None; mappings and TypedDicts can be fields of one."
    )
