"""Structured output: a typed answer, held to its schema by the provider or asked for as a call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, cast, get_origin

from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter, create_model
from pydantic_core import CoreSchema
from typing_extensions import is_typeddict

from handrail.context import ToolContext
from handrail.errors import ToolValidationError
from handrail.schema import Schema
from handrail.tools import Tool, ToolResult

ANSWER_TOOL = "final_answer"
"""The tool by which a model answers where its provider can't hold it to a schema."""
REPAIRS = 2
"""How often an answer that does not fit may be corrected."""

_FENCED = re.compile(r"\A\s*```[a-zA-Z]*\s*\n(.*?)\n?\s*```\s*\Z", re.DOTALL)


class Output:
    """What a run's answer must be."""

    __slots__ = ("_unwraps", "schema")

    def __init__(self, schema: Schema[Any]) -> None:
        self._unwraps = schema.json_schema.get("type") != "object" or not _can_be_params(schema.annotation)
        self.schema: Schema[Any] = _wrapped(schema) if self._unwraps else schema

    def parse(self, text: str) -> Any:
        """The answer that this text is, or `ToolValidationError` with every problem."""
        fenced = _FENCED.match(text)
        return self.value_of(self.schema.parse(fenced[1] if fenced else text))

    def value_of(self, answer: Any) -> Any:
        """What was asked for, out of what the model was asked to write."""
        return answer.value if self._unwraps else answer

    def tool(self) -> Tool[Any, Any]:
        """The tool whose call is the answer; the gate checks it like any other."""

        async def handler(params: Any, *, context: ToolContext) -> ToolResult[Any]:
            return ToolResult.ok(params, "The answer was taken.", exclude_value_from_context=True)

        return Tool(
            ANSWER_TOOL,
            "Give the final answer. Call this once, when everything else is done.",
            handler,
            params=self.schema.annotation,
            result=Any,
            accepts_overrides=False,
            effect="pure",
        )


def what_to_correct(error: ToolValidationError, by_call: bool = False) -> str:
    """What a model is told about an answer that does not fit."""
    problems = "\n".join(f"- {problem}" for problem in error.problems) or f"- {error}"
    how = f"Call {ANSWER_TOOL} with it." if by_call else "Answer again, with nothing but the corrected JSON."
    return f"Your answer does not fit:\n{problems}\n{how}"


def _can_be_params(annotation: Any) -> bool:
    """Can a tool take it as its arguments? A mapping can only be one of them."""
    kind = get_origin(annotation) or annotation
    return not (is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, Mapping)))


def _wrapped(schema: Schema[Any]) -> Schema[Any]:
    """An object with one value: providers hold models to objects only."""
    value: Any = schema.annotation
    if isinstance(value, TypeAdapter):
        value = _by_adapter(cast("TypeAdapter[Any]", value))
    made = create_model("Answer", __config__=ConfigDict(frozen=True), value=(value, ...))
    return Schema(made)


def _by_adapter(adapter: TypeAdapter[Any]) -> type:
    """A type that is what the adapter says it is."""

    class ByAdapter:
        core: ClassVar[CoreSchema] = adapter.core_schema

        @classmethod
        def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
            return cls.core

    return ByAdapter
