"""`Place`: where something happened in a run.

A place is a path of steps from the run to what happened in it. Steps are numbered in order and have no
random ids, so a resumed run finds its records under the same places.

    run           (nothing)   the run itself
    call          .2          second call of a run, or second verb of a handler
    attempt       ~1          first attempt at a call
    nested run    /3          run started by the third verb of a handler
    question      ?3          question asked by the third verb; `?once pay` is asked by a `once`
    approval      !1          first approval the gate asked for in an attempt
    compensation  -           call that undoes a call
    probe         =           call that finds out whether an interrupted call took effect
    answer        #4          fourth answer of the model; `#4?pause-1` is a pause before it
    advice        @2          second time the run asked its advisers

For example, `.2~1/3.1` is the second call of a run, its first attempt, the run that the attempt's third verb
started, and that run's first call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

PlaceKind = Literal[
    "run", "call", "attempt", "question", "approval", "compensation", "probe", "answer", "advice"
]

_SIGNS: dict[PlaceKind, str] = {
    "run": "/",
    "call": ".",
    "attempt": "~",
    "question": "?",
    "approval": "!",
    "compensation": "-",
    "probe": "=",
    "answer": "#",
    "advice": "@",
}
_KINDS: dict[str, PlaceKind] = {sign: kind for kind, sign in _SIGNS.items()}

_INSIDE: dict[PlaceKind, tuple[PlaceKind, ...]] = {
    "run": ("call", "answer", "advice"),
    "call": ("attempt", "compensation", "probe"),
    "compensation": ("attempt",),
    "probe": ("attempt",),
    "attempt": ("call", "run", "question", "approval"),
    "question": (),
    "approval": (),
    "answer": ("question",),
    "advice": (),
}
"""The kinds of steps that a place of each kind may contain."""

_STEP = re.compile(r"([./~!#@])([1-9][0-9]*)|([-=])|\?(?:([1-9][0-9]*)\Z|([\s\S]+))")
_NESTED_RUN = re.compile(r"(?:(?:\.[1-9][0-9]*[-=]?~[1-9][0-9]*)+/[1-9][0-9]*)+\Z")
_LEADING_CALL = re.compile(r"\.([1-9][0-9]*)")


class Place(msgspec.Struct, frozen=True):
    """A step in a run, linked to the places that contain it. `Place()` is the run itself."""

    parent: Place | None = None
    kind: PlaceKind = "run"
    number: int = 0
    """The 1-based number of the step within its parent; 0 for a step without a number."""
    name: str = ""
    """The name of a question that has a name instead of a number; "" for every other step."""

    # Text forms.

    def __str__(self) -> str:
        """Return the text of the place, including attempts, for journal keys and question ids."""
        return self._text(attempts=True)

    def __repr__(self) -> str:
        return f"Place({str(self)!r})"

    @property
    def key(self) -> str:
        """The text of the place without attempts, which is the same for every attempt."""
        return self._text(attempts=False)

    def _text(self, attempts: bool) -> str:
        parts: list[str] = []
        place = self
        while place.parent is not None:
            if attempts or place.kind != "attempt":
                parts.append(f"{_SIGNS[place.kind]}{place.name or place.number or ''}")
            place = place.parent
        parts.reverse()
        return "".join(parts)

    @classmethod
    def parse(cls, text: str) -> Place:
        """Parse the text of a place. Raises `ValueError` if it is invalid."""
        place, at = RUN, 0
        while at < len(text):
            step = _STEP.match(text, at)
            if step is None:
                raise ValueError(f"{text!r} is not a place")
            sign, number, beside, asked, name = step.groups()
            if sign is not None:
                place = place._step(_KINDS[sign], int(number))
            elif beside is not None:
                place = place._step(_KINDS[beside], 0)
            else:
                place = place.question(name if asked is None else int(asked))
            at = step.end()
        return place

    def id(self, run_id: str) -> str:
        """Return the id of the question, nested run or ticket at this place."""
        return f"{run_id}{self}"

    @classmethod
    def from_id(cls, id: str, run_id: str) -> Place:
        """Return the place that `id` names in the run `run_id`. Raises `ValueError` if it names no place in that run."""
        if not id.startswith(run_id):
            raise ValueError(f"{id!r} is not in the run {run_id!r}")
        return cls.parse(id[len(run_id) :])

    def prefix(self, run_id: str = "") -> str:
        """Return the common prefix of all ids inside this call's attempts. No other id starts with it."""
        return f"{run_id}{self}{_SIGNS['attempt']}"

    # Steps.

    def child(self, number: int) -> Place:
        """Return the place of call `number` of a run, or of verb `number` of an attempt."""
        return self._step("call", number)

    def attempt(self, number: int) -> Place:
        """Return the place of attempt `number` at a call, a compensation or a probe."""
        return self._step("attempt", number)

    def nested_run(self, number: int) -> Place:
        """Return the place of the run started by verb `number` of an attempt."""
        return self._step("run", number)

    def question(self, which: int | str) -> Place:
        """Return the place of a question, given the number of the verb that asked it or the question's name.

        Raises `ValueError` if the name is empty or a number.
        """
        if isinstance(which, int):
            return self._step("question", which)
        if not which or which.isdecimal():
            raise ValueError(f"a question can't be named {which!r}. Its name must not be empty or a number")
        return self._step("question", 0, which)

    def approval(self, number: int) -> Place:
        """Return the place of approval `number` that the gate asked for in an attempt."""
        return self._step("approval", number)

    def answer(self, number: int) -> Place:
        """Return the place of answer `number` of a run's model."""
        return self._step("answer", number)

    def advice(self, number: int) -> Place:
        """Return the place of the `number`th time that the run asked its advisers."""
        return self._step("advice", number)

    @property
    def compensation(self) -> Place:
        """The place of the compensation that undoes the call at this place."""
        return self._step("compensation", 0)

    @property
    def probe(self) -> Place:
        """The place of the probe that finds out whether the interrupted call at this place took effect."""
        return self._step("probe", 0)

    def _step(self, kind: PlaceKind, number: int, name: str = "") -> Place:
        if kind not in _INSIDE[self.kind]:
            raise ValueError(f"there is no {kind} in the {self.kind} at {str(self)!r}")
        return Place(self, kind, number, name)

    # Containing places.

    @property
    def parents(self) -> Iterator[Place]:
        """The places that contain this one, nearest first, ending with the run itself."""
        place = self.parent
        while place is not None:
            yield place
            place = place.parent

    def within(self, other: Place) -> bool:
        """Return whether this place is `other` or inside it."""
        return self == other or other in self.parents

    def attempt_at(self, call: Place) -> int | None:
        """Return the number of the attempt at `call` that is or contains this place; None if there is none."""
        found: int | None = None
        place: Place | None = self
        while place is not None:
            if place == call:
                return found
            found = place.number if place.kind == "attempt" else None
            place = place.parent
        return None

    @property
    def run(self) -> Place:
        """The nearest run that contains this place: a nested run, or the run itself."""
        return next((each for each in self.parents if each.kind == "run"), RUN)

    @property
    def outer(self) -> Place | None:
        """The nearest call or nested run that contains this place; None if only the run itself does."""
        around = next(
            (each for each in self.parents if each.kind in ("call", "compensation", "probe", "run")), RUN
        )
        return None if around.parent is None else around

    @property
    def outermost_call(self) -> Place | None:
        """The run's own call that is or contains this place; None if no call contains it."""
        place = self
        while place.parent is not None and place.parent.parent is not None:
            place = place.parent
        return place if place.kind == "call" else None


RUN = Place()
"""The place of a run itself."""


# Ids that consist of a run's id and a place.


def is_in_run(id: str, run_id: str) -> bool:
    """Return whether `id` is the run's own id, or the id of something in one of its calls or before one of its answers."""
    return id == run_id or id.startswith((f"{run_id}{_SIGNS['call']}", f"{run_id}{_SIGNS['answer']}"))


def split_run_id(id: str) -> tuple[str, Place]:
    """Split a run's id into the outermost run's id and the run's place in that run."""
    found = _NESTED_RUN.search(id)
    at = len(id) if found is None else found.start()
    return id[:at], Place.parse(id[at:])


def leading_call(text: str) -> int | None:
    """Return the number of the outermost call in a key or in the text of a place; None if it is in no call."""
    found = _LEADING_CALL.match(text)
    return None if found is None else int(found[1])


# Ids of inner calls. They extend the id of the outer call.


def inner_call_id(call_id: str, attempt: int, number: int) -> str:
    """Return the id of inner call `number` in an attempt at the call `call_id`."""
    return f"{call_id}.{number}" if attempt == 1 else f"{call_id}~{attempt}.{number}"


def outer_call_ids(call_id: str) -> Iterator[tuple[str, int, int]]:
    """Yield the calls that may contain the call `call_id`, as `(id, attempt, number of this call in the attempt)`.

    There may be two: `x~2.3` is call 3 of attempt 2 at `x`, or call 3 of attempt 1 at a call whose id is `x~2`, since models
    choose the ids of outermost calls.
    """
    head, dot, number = call_id.rpartition(".")
    if not dot or not number.isdecimal():
        return
    yield head, 1, int(number)
    outer, tilde, attempt = head.rpartition("~")
    if tilde and attempt.isdecimal():
        yield outer, int(attempt), int(number)
