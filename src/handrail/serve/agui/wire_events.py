"""AG-UI events as the wire has them, and the two kinds of clients they go to.

They are built by the models of the protocol's own package, so that their fields are checked. Only the
deltas are built by hand: there is one for each token, and a model costs fifty times as much.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pydantic_core
from ag_ui.core import BaseEvent, CustomEvent

PROTOCOL = "1.0"
"""The version of the protocol that is spoken here."""


class Event(NamedTuple):
    """One event, ready to be encoded.

    Clients from before protocol 1.0 know no nested runs. They are given what `older` says.
    """

    data: dict[str, Any]
    nested: bool = False
    """Does it belong to a nested run? Then older clients do not see it."""
    plain: dict[str, Any] | None = None
    """What older clients get in its place, where it is to be something else."""

    @property
    def older(self) -> dict[str, Any] | None:
        """The event for a client from before 1.0; None where it gets nothing."""
        if self.plain is not None:
            return self.plain
        return None if self.nested else self.data


def sent(event: BaseEvent, subagent: str | None = None) -> Event:
    """An event of the outermost run, or of the nested one named."""
    data = event.model_dump(mode="json", by_alias=True)
    if subagent is None:
        return Event(data)
    data["subagentRunId"] = subagent
    return Event(data, True)


def delta(kind: str, key: str, id: str, text: str, subagent: str | None) -> Event:
    """A piece of text, arguments or reasoning: the one event there are many of."""
    if subagent is None:
        return Event({"type": kind, key: id, "delta": text})
    return Event({"type": kind, key: id, "delta": text, "subagentRunId": subagent}, True)


def custom(name: str, value: Any, subagent: str | None = None) -> Event:
    """Something the protocol has no event for."""
    return sent(CustomEvent(name=name, value=value), subagent)


def plain_json(value: object) -> Any:
    """Any value as JSON that every client can read: secrets masked, no infinities, nothing that is no text."""
    try:
        written = pydantic_core.to_json(value, inf_nan_mode="null", fallback=_unknown)
    except (pydantic_core.PydanticSerializationError, ValueError, RecursionError):
        return clean(repr(value))
    return pydantic_core.from_json(written)


def clean(text: str) -> str:
    """The text without half characters, as names of files may have them, which no encoder takes."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unknown(value: object) -> Any:
    return msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else str(value)
