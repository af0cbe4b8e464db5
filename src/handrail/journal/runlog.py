"""`RunLog`: one run as its journal has it, for whoever goes through it the first time or again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from handrail.clock import Clock
from handrail.errors import Diverged, RunBusy
from handrail.journals import Journal
from handrail.records import Asked, CommitUnit, Entry, EntryKind

T = TypeVar("T")

_TRY = re.compile(r"~(\d+)")


class _Verb(msgspec.Struct):
    verb: str


class RunLog:
    """What was recorded of a run, found by its place in it, and what is added.

    A place is counted, never made up: `.2` is the second call of the run, `.2~1.1` the first verb of
    the first try at it. So a run that is gone through again finds what it did before, and a verb
    that finds another verb's record in its place has diverged.
    """

    __slots__ = (
        "_clock",
        "_finished",
        "_found",
        "_nested",
        "_tickets",
        "_verbs",
        "asked",
        "closed",
        "journal",
        "resumed",
        "run_id",
        "untold",
    )

    def __init__(
        self,
        journal: Journal,
        run_id: str,
        clock: Clock,
        entries: Iterable[Entry] = (),
        units: Iterable[CommitUnit] = (),
        *,
        asked: Iterable[Asked] = (),
        resumed: bool = False,
    ) -> None:
        self.journal = journal
        self.run_id = run_id
        self.resumed = resumed
        self.closed = False
        """Parked, or another process has it: nothing more is recorded."""
        self.untold: Mapping[str, Any] = {}
        """The calls of the session that were undone, and of which its model has not heard."""
        self.asked: Mapping[str, Asked] = {each.question.id: each for each in asked}
        """The questions that lay open when the record was loaded, or had been answered."""
        self._clock = clock
        self._found: dict[tuple[EntryKind, str], bytes] = {
            (each.kind, each.key): each.body for each in entries
        }
        self._finished = {unit.place: unit for unit in units}
        self._verbs: dict[str, str] = {
            key: body.decode() if kind == "verb" else msgspec.msgpack.decode(body, type=_Verb).verb
            for (kind, key), body in self._found.items()
            if kind in ("verb", "inner call")
        }
        self._tickets = [place for place, verb in self._verbs.items() if verb == "ticket"]

        self._nested: dict[str, list[tuple[str, bytes]]] = {}
        """The model's answers in nested runs, by the call of the run itself that they are under."""
        for (kind, key), body in self._found.items():
            if kind == "model answer" and "~" in key:
                self._nested.setdefault(key.partition("~")[0], []).append((key, body))

    def answers_under(self, place: str, before: int | None = None) -> Iterator[bytes]:
        """What the model said in runs nested in the call at this place; only in tries before this one."""
        for key, body in self._nested.get(place.partition("~")[0], ()):
            tried = _TRY.match(key, len(place)) if key.startswith(f"{place}~") else None
            if tried is not None and (before is None or int(tried[1]) < before):
                yield body

    def find(self, kind: EntryKind, key: str, type: type[T]) -> T | None:
        """What was recorded there before."""
        body = self._found.get((kind, key))
        return None if body is None else msgspec.msgpack.decode(body, type=type)

    def has(self, kind: EntryKind, key: str) -> bool:
        """Was something recorded there?"""
        return (kind, key) in self._found

    def has_begun(self, place: str) -> bool:
        """Had the run nested at this place begun, or the run itself, when the record was loaded?"""
        around, slash, number = place.rpartition("/")
        return self.resumed and (not slash or self.has("verb", f"{around}.{number}"))

    def is_over(self, place: str) -> bool:
        """Was the call at this place over when the record was loaded?"""
        return place in self._finished or ("inner call", place) in self._found

    def finished(self, place: str) -> CommitUnit | None:
        """The call that is over, at this place of the run."""
        return self._finished.get(place)

    def under(self, place: str) -> Mapping[str, bytes]:
        """The finished inner calls of the call at this place, and of what is nested in it."""
        return {
            key: body
            for (kind, key), body in self._found.items()
            if kind == "inner call" and key.startswith(f"{place}~")
        }

    def tickets_under(self, place: str) -> list[str]:
        """Where the call at this place, and what is nested in it, gave out tickets before."""
        return [each for each in self._tickets if each.startswith(f"{place}~")]

    async def note(self, kind: EntryKind, key: str, value: Any) -> bool:
        """Record something. When this returns, it is there for whoever resumes; False: nothing is any more."""
        if self.closed:
            return False
        await self._add(kind, key, msgspec.msgpack.encode(value))
        return True

    def check_verb(self, place: str, verb: str) -> None:
        """A verb that is used at a place where the record has another is not the same run any more."""
        was = self._verbs.get(place)
        if was is not None and was != verb:
            raise Diverged(self.run_id, place, was, verb)

    async def note_verb(self, place: str, verb: str) -> None:
        """Record which verb is used at a place, before its value is."""
        if not self.closed and place not in self._verbs:
            self._verbs[place] = verb
            await self._add("verb", place, verb.encode())

    async def _add(self, kind: EntryKind, key: str, body: bytes) -> None:
        try:
            await self.journal.calls.note(self.run_id, Entry(kind, key, self.now(), body))
        except RunBusy:
            self.closed = True
            raise

    def now(self) -> float:
        return self._clock.now().timestamp()
