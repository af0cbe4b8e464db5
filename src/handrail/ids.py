"""Random ids and random numbers, and the ids of traces and spans, which go on across processes in the form of W3C's `traceparent`."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from contextvars import ContextVar
from hashlib import blake2b
from typing import TYPE_CHECKING

from handrail.errors import DefinitionError

if TYPE_CHECKING:
    from handrail.context import Extras, RunContext

NewId = Callable[[], str]
"""A function that returns a new id. Tests pass one that numbers its ids."""


def random_id() -> str:
    """Return 128 random bits as hexadecimal digits, which are safe in URLs and file names."""
    return secrets.token_hex(16)


MOST_ID = 512
"""Maximum number of characters in the id of a session or a run, and in the name of a principal."""


def why_unfit(id: object) -> str:
    """Return what is wrong with the id of a session or a run, or with the name of a principal; "" if it can be used."""
    if not isinstance(id, str):
        return f"{id!r:.80} is not a string"
    if not id or id.isspace():
        return f"{id!r:.80} is blank"
    if len(id) > MOST_ID:
        return f"{id[:40]!r}… has {len(id)} characters"
    if not id.isprintable():
        bad = next(each for each in id if not each.isprintable())
        return f"{id!r:.80} contains {bad!r}, which can't be printed"
    return ""


def check_id(what: str, id: object) -> None:
    """Raise `DefinitionError` if an id can't be used. `what` says whose id it is, such as "session id"."""
    problem = why_unfit(id)
    if problem:
        raise DefinitionError(
            f"the {what} {problem}. Pass 1 to {MOST_ID} printable characters, such as 'conv-1'."
        )


Chance = Callable[[], float]
"""A function that returns a number from 0 to 1. Tests pass one that returns a number of their choice."""


def random_fraction() -> float:
    """Return a random number from 0 up to, but not including, 1."""
    return secrets.randbits(53) / (1 << 53)


def spawned_id(place_id: str) -> str:
    """Return the id of the background run that is begun at a place in a run. It is derived, so it stays the same after a crash."""
    return _digest(place_id, b"spawned", 16)


# --- traces and spans: the ids are derived, so that every process can name the span of any leg of a run and of any call ---


TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
"""Matches a `traceparent`, with the trace id, the span id and the flags as groups."""


def trace_of(run_id: str, traceparent: str = "") -> str:
    """Return the trace id of a run: that of the `traceparent` it was given, or else one that follows from its id."""
    return traceparent[3:35] or _digest(run_id, b"trace", 16)


def span_of(run_id: str, leg: int) -> str:
    """Return the id of the span of one leg of a run, root or nested."""
    return _digest(f"{run_id}/{leg}", b"span", 8)


def call_span_of(run_id: str, call_id: str, leg: int) -> str:
    """Return the id of the span of a call in one leg of its run."""
    return _digest(f"{run_id}/{leg}/{call_id}", b"call", 8)


def traceparent_of(run: RunContext, call_id: str) -> str:
    """Return the `traceparent` of a call, for what it starts: its span in the current leg of its run."""
    flags = run.traceparent[-2:] or "01"
    return f"00-{run.trace_id}-{call_span_of(run.run_id, call_id, run.attempt)}-{flags}"


inbound: ContextVar[str] = ContextVar(
    "the `traceparent` of the authenticated request that is being handled", default=""
)


def started_from() -> str:
    """Return the `traceparent` of what starts a run here: the app's current span, or else the request's; "" if there is none."""
    return tracing.ambient() or inbound.get()


def _digest(text: str, person: bytes, size: int) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=size, person=person).hexdigest()


class Tracing:
    """What telemetry lends to runs while it is on. Without it, nothing is computed."""

    __slots__ = ("ambient", "extras", "outbound")

    def __init__(self) -> None:
        self.ambient: Callable[[], str] = _nothing
        """Returns the `traceparent` of the app's current span; "" if there is none."""
        self.outbound: Callable[[str], str] = _nothing
        """Returns the `traceparent` to send to a host; "" to send none."""
        self.extras: Extras | None = None
        """Extras of every call, such as its span; None if there are none."""


def _nothing(host: str = "") -> str:
    return ""


tracing = Tracing()
"""The tracing of this process."""
