"""Recorded logs: what the calls of a run have logged, how they ended, and what models answered, read from the run's record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from handrail.context import RunContext
from handrail.events import ModelResponded, PromptExecuted, ToolInvoked
from handrail.ids import span_of, trace_of
from handrail.journal.records import CommitUnit, Entry
from handrail.messages import StopPart, Usage
from handrail.run.place import RUN, Place
from handrail.run.record.format import Begun, InnerCall, Tried, end_of
from handrail.session import Session
from handrail.session.serialization import decode_item, encode_item
from handrail.tools import Tool


class _Answer(msgspec.Struct, frozen=True):
    """The facts about a recorded model answer."""

    model: str
    attempt: int
    stop: StopPart
    seconds: float
    usage: Usage | None = None
    cost: Decimal | None = None


_End = CommitUnit | InnerCall | _Answer


class RecordedLogs:
    """The logs of one run, in the order in which the calls that logged them ended.

    Within one call they have the order in which it logged them. The logs of calls that were cut off come last.
    """

    def __init__(
        self, run_id: str, session_id: str, trace_id: str, records: Iterable[CommitUnit | Entry]
    ) -> None:
        self._run_id = run_id
        self._session_id = session_id
        self._trace_id = trace_id or trace_of(run_id)
        self._ends: list[tuple[Place, _End]] = []
        self._tried: dict[Place, Tried] = {}
        self._begun: dict[Place, Begun] = {}
        """What calls had logged when their handlers began, by the place of the attempt."""
        for each in records:
            if isinstance(each, CommitUnit):
                self._ends.append((Place.parse(each.place), each))
            elif each.kind == "inner call":
                end = msgspec.msgpack.decode(each.body, type=InnerCall)
                self._ends.append((Place.parse(each.key), end))
            elif each.kind == "model answer":
                self._ends.append((Place.parse(each.key), msgspec.msgpack.decode(each.body, type=_Answer)))
            elif each.kind == "call tried":
                self._tried[Place.parse(each.key)] = msgspec.msgpack.decode(each.body, type=Tried)
            elif each.kind == "call begun":
                self._begun[Place.parse(each.key)] = msgspec.msgpack.decode(each.body, type=Begun)
        self._over = {place for place, end in self._ends if not isinstance(end, _Answer)}

    def restore(self, session: Session, tools: Mapping[str, Tool[Any, Any]] = {}, *, is_over: bool) -> None:
        """Add the run's logs to a session, without publishing anything.

        Unless the run is over, calls that were cut off may be entered again, and log again then, and answers of the model
        are left out where they are replayed. The values in the results of `tools` have their types; those of other tools are
        plain data.
        """
        for each in self._read(is_over, tools):
            session.relog(decode_item(each, session.id) if isinstance(each, bytes) else each)

    def copied(self) -> list[bytes]:
        """Return the logs of a run that is over, in the form in which a journal records them."""
        return [
            each if isinstance(each, bytes) else encode_item(each, self._session_id)
            for each in self._read(True, {})
        ]

    def _read(
        self, is_over: bool, tools: Mapping[str, Tool[Any, Any]]
    ) -> Iterator[bytes | ToolInvoked | ModelResponded]:
        for place, end in self._ends:
            if not (is_over or self._is_inside_ended(place)) and _is_repeated(end):
                continue
            context = self._context(place)
            if isinstance(end, _Answer):
                usage = end.usage or Usage(requests=1)
                yield ModelResponded(
                    end.model, end.stop.reason, usage, end.cost, end.seconds, end.attempt, context
                )
            else:
                yield from end.logged
                yield end_of(end, context, tools)
        calls = dict.fromkeys(
            [*self._tried, *(each.parent for each in self._begun if each.parent is not None)]
        )
        for call in calls:
            if call not in self._over:
                yield from self._cut_off(call, is_over or self._is_inside_ended(call))

    def _cut_off(self, call: Place, is_final: bool) -> Sequence[bytes]:
        """Return what a call without an end has logged. Unless this `is_final`, only what its earlier attempts have logged."""
        tried = self._tried.get(call)
        begun = self._begun.get(call.attempt(1 if tried is None else tried.number)) if is_final else None
        if begun is not None:
            return begun.logged
        return () if tried is None else tried.logged

    def _is_inside_ended(self, call: Place) -> bool:
        return any(each in self._over for each in call.parents)

    def _context(self, place: Place) -> RunContext:
        """Return the context of the run that contains a place. Which leg and which worker it was is not recorded."""
        run_id = place.run.id(self._run_id)
        return RunContext(run_id, self._run_id, self._session_id, 1, "", self._trace_id, span_of(run_id))

    def run_ended(self, prompt: str, ended: str, usage: Usage, cost: Decimal | None) -> PromptExecuted:
        """Return the end of the run itself."""
        return PromptExecuted(prompt, ended, usage, cost, self._context(RUN))


def _is_repeated(end: _End) -> bool:
    """Return whether a resumed run logs this again: it replays a model's answer, and asks again for a lost secret."""
    return isinstance(end, _Answer) or (isinstance(end, InnerCall) and end.lost)
