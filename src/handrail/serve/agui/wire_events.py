"""`Event`: an AG-UI event as it is sent, for clients of protocol 1.0 and for older ones.

Rare events are built with the classes of the `ag_ui` package, which check their fields. The events of every answer and every
call are built as plain dicts, which the tests compare with `ag_ui`'s: building one with a class takes up to fifty times as long.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import pydantic_core
from ag_ui.core import BaseEvent

from handrail.tools.result import clean_text

PROTOCOL = "1.0"
"""The protocol version that this server implements."""


class Event(NamedTuple):
    """An event that is ready to be encoded.

    Older clients, from before protocol 1.0, do not know nested runs. They are sent `older`.
    """

    data: dict[str, Any]
    nested: bool = False
    """Whether the event belongs to a nested run. Such an event is not sent to older clients, unless it has a `plain`."""
    plain: dict[str, Any] | None = None
    """The event that older clients are sent instead, or None if there is no replacement."""

    @property
    def older(self) -> dict[str, Any] | None:
        """The event for older clients, from before protocol 1.0, or None if they are sent nothing."""
        if self.plain is not None:
            return self.plain
        return None if self.nested else self.data


def wire_event(event: BaseEvent, subagent: str | None = None) -> Event:
    """Build an event of the outermost run, or of the nested run `subagent`."""
    data = dump(event)
    if subagent is None:
        return Event(data)
    data["subagentRunId"] = subagent
    return Event(data, True)


def dump(event: BaseEvent) -> dict[str, Any]:
    """Return an event as plain JSON data."""
    return event.model_dump(mode="json", by_alias=True)


def plain_event(kind: str, subagent: str | None, **fields: Any) -> Event:
    """Build an event without checks, from the fields as the protocol spells them. A field without a value is left out by the caller."""
    if subagent is None:
        return Event({"type": kind, **fields})
    return Event({"type": kind, **fields, "subagentRunId": subagent}, True)


def custom(name: str, value: Any, subagent: str | None = None) -> Event:
    """Build a custom event, whose name and value the protocol does not define. The value is plain JSON data."""
    return plain_event("CUSTOM", subagent, name=name, value=value)


def plain_json(value: object) -> Any:
    """Return any value as plain JSON data that every client can read.

    Secrets are masked, infinities and NaN become null, and an object of an unknown type becomes its `str`. If any
    part can't be encoded, such as a lone surrogate, the whole value becomes its `repr`.
    """
    try:
        written = pydantic_core.to_json(value, inf_nan_mode="null", fallback=_unknown)
    except (pydantic_core.PydanticSerializationError, ValueError, RecursionError):
        return clean_text(repr(value))
    return pydantic_core.from_json(written)


def _unknown(value: object) -> Any:
    return msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else str(value)


def state_patch(before: Any, after: Any) -> list[dict[str, Any]]:
    """Return the JSON Patch from one state to another. It is empty if they are equal.

    A state is `{type name: [items]}`. If items were appended to a list, which is the usual change, the patch appends
    them. For any other change to a list, it replaces the list. If one of the states is None, it replaces the whole state.
    """
    if before == after:
        return []
    if not isinstance(before, dict) or not isinstance(after, dict):
        return [{"op": "replace", "path": "", "value": after}]
    old: dict[str, Any] = before  # pyright: ignore[reportUnknownVariableType]  # plain JSON
    new: dict[str, Any] = after  # pyright: ignore[reportUnknownVariableType]  # plain JSON
    operations: list[dict[str, Any]] = []
    for name in old:
        if name not in new:
            operations.append({"op": "remove", "path": _pointer(name)})
    for name, items in new.items():
        if name not in old:
            operations.append({"op": "add", "path": _pointer(name), "value": items})
        elif old[name] != items:
            operations += _list_patch(_pointer(name), old[name], items)
    return operations


def _list_patch(path: str, old: Any, new: Any) -> list[dict[str, Any]]:
    if isinstance(old, list) and isinstance(new, list):
        grown: list[Any] = new  # pyright: ignore[reportUnknownVariableType]  # plain JSON
        count = len(old)  # pyright: ignore[reportUnknownArgumentType]  # plain JSON
        if grown[:count] == old:
            return [{"op": "add", "path": f"{path}/-", "value": item} for item in grown[count:]]
    return [{"op": "replace", "path": path, "value": new}]


def _pointer(name: str) -> str:
    return "/" + name.replace("~", "~0").replace("/", "~1")


def format_time(at: float) -> str:
    """Return a time, in seconds since 1970, as text in ISO 8601."""
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
