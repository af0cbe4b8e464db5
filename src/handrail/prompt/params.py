"""The params of a prompt: which fields there are, and whether what was given fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast, get_origin

from pydantic import BaseModel

from handrail.errors import DefinitionError, PromptRenderError, ToolValidationError
from handrail.schema import Schema
from handrail.schema.wording import describe


def is_record(kind: Any) -> bool:
    """Is it a dataclass or a pydantic model with named fields?"""
    origin = get_origin(kind) or kind
    if isinstance(origin, type) and issubclass(origin, BaseModel):
        return not getattr(origin, "__pydantic_root_model__", False)
    return isinstance(origin, type) and dataclasses.is_dataclass(cast("type[Any]", origin))


def fields_of(kind: Any) -> frozenset[str]:
    """The names that a template may use; none where there is no type."""
    origin = get_origin(kind) or kind
    if origin is None:
        return frozenset()
    if issubclass(origin, BaseModel):
        return frozenset(origin.model_fields)
    return frozenset(field.name for field in dataclasses.fields(origin))


class ParamsTaker:
    """Takes in what is given for the params of one prompt."""

    __slots__ = ("_kind", "_namespace", "_prompt", "_schema")

    def __init__(self, prompt: str, kind: Any, namespace: Mapping[str, Any]) -> None:
        self._prompt = prompt
        self._kind = kind
        self._namespace = namespace
        self._schema: Schema[Any] | None = None

    def take(self, given: object) -> Any:
        """An instance of the params type, or `PromptRenderError`."""
        kind = self._kind
        if kind is None:
            if given is not None:
                problem = f"params are given ({_shown(given)}) and its sections use none"
                raise self._refuse(problem, "Leave them out, or write MarkdownSection[Params](...).")
            return None
        name = describe(kind)
        mend = f"Give `{name}(...)`, or a mapping with its fields."
        if given is None:
            raise self._refuse("it has no params", mend)
        if isinstance(given, get_origin(kind) or kind):
            return given
        if not isinstance(given, Mapping):
            raise self._refuse(f"its params are {_shown(given)}", mend)
        try:
            if self._schema is None:
                self._schema = Schema(kind, self._namespace)
            return self._schema.parse_value(cast("Mapping[str, Any]", given))
        except ToolValidationError as error:
            raise self._refuse(f"its params do not fit {name}: {error}", "Correct the mapping.") from None
        except DefinitionError as error:
            raise self._refuse(
                f"a mapping can't be checked: {error}", f"Give `{name}(...)` itself."
            ) from None

    def _refuse(self, problem: str, mend: str) -> PromptRenderError:
        return PromptRenderError(self._prompt, problem.rstrip("."), mend)


def _shown(given: object) -> str:
    return f"a {type(given).__name__}"
