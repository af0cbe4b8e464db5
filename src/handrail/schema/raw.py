"""`RawSchema`: a JSON Schema that is not made from a Python type, and a parser for what a model sends.

Arguments that match it stay plain JSON: a dict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import pydantic_core

from handrail.errors import ToolValidationError
from handrail.schema import Problem, Schema, clear_json, infinities_in, to_json
from handrail.schema.misfits import Misfit, misfits
from handrail.schema.problems import asks_for_secrets
from handrail.schema.read_only import read_only
from handrail.schema.references import without_anchors
from handrail.schema.secrets import WITHHELD, masked, masks_in


class Check(Protocol):
    """A function that checks a value against a JSON Schema and returns the mistakes."""

    def __call__(
        self, schema: Mapping[str, Any], value: object, /, *, secret: bool = False
    ) -> Sequence[Misfit]: ...


class RawSchema(Schema[dict[str, Any]]):
    """The JSON Schema of an object, given as plain data. `check` finds the mistakes in a value.

    By default, `check` finds only definite mistakes. The code that runs the tool, such as a server, checks the rest.
    """

    __slots__ = ("_check", "_plain")

    def __init__(self, json_schema: Mapping[str, Any], check: Check = misfits) -> None:
        self.annotation = dict
        # Providers require a type and properties at the top level.
        whole = {**json_schema, "type": "object", "properties": json_schema.get("properties", {})}
        self.json_schema = read_only(whole)
        self._plain = without_anchors(self.json_schema)
        self.secret = asks_for_secrets(self._plain, self._plain)
        self.quick = None
        self._check = check

    def parse(self, data: str | bytes) -> dict[str, Any]:
        try:
            value: Any = pydantic_core.from_json(data, allow_inf_nan=False)
        except ValueError as error:
            raise ToolValidationError(f"the arguments are not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise ToolValidationError("the arguments are not a JSON object. Send an object: {...}.")
        wrong = [f"{where} {what}" for where, what in infinities_in(data, self.json_schema)]
        if not wrong:
            found = self._check(self._plain, cast("object", value), secret=self.secret)
            wrong = [f"{each.where or 'the arguments'} {each.what}" for each in found]
        if wrong:
            raise ToolValidationError("; ".join(wrong), [Problem("", each) for each in wrong])
        return cast("dict[str, Any]", value)

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict) and not self._check(self._plain, cast("object", value))

    def clear(self, value: object) -> bytes:
        return clear_json(value)

    def dump(self, value: dict[str, Any]) -> bytes:
        return to_json(masked(value, self._plain) if self.secret else value)

    def mask(self, data: str | bytes) -> str:
        try:
            value: Any = pydantic_core.from_json(data)
        except ValueError:
            return WITHHELD
        wrong = {each.where for each in self._check(self._plain, value, secret=True)}
        return self.dump(value).decode() if wrong <= set(masks_in(value)) else WITHHELD
