"""Templates: text with placeholders such as `$name`, and the params whose fields replace them."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, cast, get_args, get_origin

import msgspec
from pydantic import BaseModel

from handrail.errors import DefinitionError, PromptDefinitionError, PromptRenderError, ToolValidationError
from handrail.schema import Schema
from handrail.schema.problems import describe, describe_kind

_DOLLAR = re.compile(r"\$(?:(?P<dollar>\$)|(?P<bare>[^\W\d]\w*)|\{(?P<braced>[^\W\d]\w*)\}|(?P<wrong>))")


class Template(msgspec.Struct, frozen=True):
    """A text with placeholders. Values are inserted unchanged, so a `$` in a value is literal."""

    parts: tuple[str, ...]
    """Pieces of text alternating with placeholder names. The first and last items are text."""
    names: frozenset[str]

    def fill(self, values: Mapping[str, Any]) -> str:
        """Return the text with every placeholder replaced by the `str()` of its value."""
        if not self.names:
            return self.parts[0]
        filled = [str(values[part]) if odd % 2 else part for odd, part in enumerate(self.parts)]
        return "".join(filled)


@lru_cache(maxsize=1024)
def template_of(text: str) -> Template:
    """Parse a template. Raises `PromptDefinitionError` for a `$` that is neither a placeholder nor `$$`.

    Common indentation, empty lines at the beginning and whitespace at the end are dropped, so that a template can be
    indented like the code in which it is written.
    """
    whole = textwrap.dedent(text).rstrip()
    text = whole.lstrip("\n")
    parts: list[str] = []
    piece = ""
    at = 0
    for match in _DOLLAR.finditer(text):
        piece += text[at : match.start()]
        at = match.end()
        if match["wrong"] is not None:
            raise _wrong(text, match.start(), len(whole) - len(text) + 1)
        if match["dollar"]:
            piece += "$"
        else:
            parts += (piece, match["bare"] or match["braced"])
            piece = ""
    parts.append(piece + text[at:])
    return Template(tuple(parts), frozenset(parts[1::2]))


def _wrong(text: str, at: int, first: int) -> PromptDefinitionError:
    line = text.count("\n", 0, at) + first
    shown = text[at : at + 12].split("\n", 1)[0]
    return PromptDefinitionError(
        "template",
        f"{shown!r} in line {line} is not a placeholder",
        "Write `$name` or `${name}` for a field, and `$$` for a dollar sign.",
    )


# --- params --------------------------------------------------------------------------------------


def fields_of(kind: Any) -> frozenset[str]:
    """Return the names that a template may use: the fields of the params type. Empty if there is no params type."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    origin = get_origin(kind) or kind
    if origin is None:
        return frozenset()
    if issubclass(origin, BaseModel):
        return frozenset(origin.model_fields)
    return frozenset(field.name for field in dataclasses.fields(origin))


class ParamsReader:
    """Checks the params with which a prompt is rendered."""

    __slots__ = ("_kind", "_namespace", "_prompt", "_schema")

    def __init__(self, prompt: str, kind: Any, namespace: Mapping[str, Any]) -> None:
        self._prompt = prompt
        self._kind = kind
        self._namespace = namespace
        self._schema: Schema[Any] | None = None

    def read(self, given: object) -> Any:
        """Return the params as an instance of the prompt's params type, or None if the prompt has no params.

        Raises `PromptRenderError` if params are invalid, missing, or given to a prompt that has none.
        """
        kind = self._kind
        if kind is None:
            if given is not None:
                problem = f"params were passed ({describe_kind(given)}), but its sections use none"
                raise self._error(problem, "Leave them out, or write MarkdownSection[Params](...).")
            return None
        name = describe(kind)
        hint = f"Pass `{name}(...)`, or a mapping with its fields."
        if given is None:
            raise self._error("no params were passed", hint)
        if isinstance(given, get_origin(kind) or kind):
            return given
        if not isinstance(given, Mapping):
            raise self._error(f"its params are {describe_kind(given)}", hint)
        try:
            if self._schema is None:
                self._schema = Schema(kind, self._namespace)
            return self._schema.parse_value(cast("Mapping[str, Any]", given))
        except ToolValidationError as error:
            raise self._error(f"its params do not fit {name}: {error}", "Correct the mapping.") from None
        except DefinitionError as error:
            raise self._error(f"a mapping can't be checked: {error}", f"Pass `{name}(...)` itself.") from None

    def _error(self, problem: str, hint: str) -> PromptRenderError:
        return PromptRenderError(self._prompt, problem.rstrip("."), hint)
