"""Calls whose arguments arrive in pieces from the Gemini API, as with `streamFunctionCallArguments`.

The first piece has the name. A piece may have values of arguments, each with a JSON path that says where the value belongs.
Every piece but the last has `willContinue`.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is validated.

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_STEP = re.compile(r"""\.([^.\[\]]+)|\[(\d{1,9})\]|\['((?:[^'\\]|\\.)*)'\]|\["((?:[^"\\]|\\.)*)"\]""")
_ESCAPED = re.compile(r"\\(.)")
_VALUES = ("stringValue", "numberValue", "boolValue", "nullValue")


class PartialCall:
    """One call, put together from its pieces."""

    def __init__(self) -> None:
        self._part: dict[str, Any] = {}
        self._call: dict[str, Any] = {}
        self._arguments: dict[str, Any] = {}

    def take(self, part: Mapping[str, Any]) -> bool:
        """Add one piece, and return whether it was the last. Raises `ValueError` or `LookupError` for an invalid path."""
        call = part["functionCall"]
        self._part |= part
        self._call |= {name: call[name] for name in ("id", "name") if call.get(name)}
        for piece in call.get("partialArgs") or ():
            self._put(piece)
        self._arguments |= call.get("args") or {}
        return call.get("willContinue") is not True

    def part(self) -> dict[str, Any]:
        """Return the call as if it had arrived in one piece."""
        return {**self._part, "functionCall": {**self._call, "args": self._arguments}}

    def _put(self, piece: Mapping[str, Any]) -> None:
        *before, last = _steps(piece["jsonPath"])
        into: Any = self._arguments
        for step, after in zip(before, [*before, last][1:], strict=True):
            into = _entered(into, step, [] if isinstance(after, int) else {})
        value = next((piece[name] for name in _VALUES if name in piece), "")
        value = None if "nullValue" in piece else value
        found = _entered(into, last, value)
        if found is not value and isinstance(found, str) and isinstance(value, str):
            into[last] = found + value


def _entered(into: Any, step: str | int, new: Any) -> Any:
    """Return the member of a list or object at this step. If there is none yet, `new` is added and returned.

    Raises `ValueError` if a name does not lead into an object, or an index into a list, and `IndexError` if an
    index is beyond the end of a list.
    """
    if isinstance(step, str):
        return _of(into, dict).setdefault(step, new)
    if step == len(_of(into, list)):
        into.append(new)
    return into[step]


def _of(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"the path leads into a {type(value).__name__}")
    return value


def _steps(path: str) -> list[str | int]:
    """Split a path such as `$.foo.bar[0]["a b"]` into names and indexes. Raises `ValueError` if it is invalid."""
    steps: list[str | int] = []
    at = 1
    while at < len(path):
        found = _STEP.match(path, at)
        if found is None:
            break
        name, index, *quoted = found.groups()
        text = next((each for each in quoted if each is not None), None)
        steps.append(int(index) if index else name if text is None else _ESCAPED.sub(r"\1", text))
        at = found.end()
    if not path.startswith("$") or at < len(path) or not steps:
        raise ValueError(f"{path[:80]!r} is not the path of an argument")
    return steps
