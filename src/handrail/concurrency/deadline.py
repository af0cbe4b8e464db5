"""Deadlines: stored as UTC times, measured by a clock that never runs backwards, and paused while people answer."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DeadlineExceededError, DefinitionError
from handrail.text.spelling import checked_arguments

_CENTURIES = 1000 * 365.25 * 24 * 3600.0
"""The longest allowed span, in seconds. A date further away may not be representable."""


def is_span(seconds: object) -> bool:
    """Return whether a value is a positive number of seconds, no longer than the longest allowed span."""
    return not isinstance(seconds, bool) and isinstance(seconds, int | float) and 0 < seconds <= _CENTURIES


@checked_arguments
class Deadline:
    """The time by which a run must have ended.

    `at` is in UTC, for records and tickets. When the deadline is created, the time until then is converted to the
    monotonic clock once. So setting the machine's clock later neither shortens nor lengthens a run. With
    `pauses_for_people`, time between `pause()` and `resume()` does not count. Pauses nest. Raises `DefinitionError` unless
    `at` is a datetime with a time zone.
    """

    __slots__ = ("_clock", "_ends", "_paused_at", "_pauses", "at", "pauses_for_people")

    def __init__(self, at: datetime, *, clock: Clock = SYSTEM_CLOCK, pauses_for_people: bool = False) -> None:
        if not isinstance(at, datetime):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
            raise DefinitionError(
                f"the deadline {at!r} is not a datetime. Pass one, or use `Deadline.after(300)`."
            )
        if at.tzinfo is None:
            raise DefinitionError(
                f"deadline {at.isoformat()} has no time zone. Pass a datetime with one, for example "
                "`datetime.now(UTC) + timedelta(minutes=5)`, or use `Deadline.after(300)`."
            )
        self.at = at.astimezone(UTC)
        self.pauses_for_people = pauses_for_people
        self._clock = clock
        self._ends = clock.monotonic() + (self.at - clock.now()).total_seconds()
        self._pauses = 0
        self._paused_at = 0.0

    @classmethod
    def after(
        cls, seconds: float, *, clock: Clock = SYSTEM_CLOCK, pauses_for_people: bool = False
    ) -> Deadline:
        """Return a deadline this many seconds from now. With `pauses_for_people`, it pauses while people are asked.

        Raises `DefinitionError` if `seconds` is not a positive number, or is more than a thousand years.
        """
        if not is_span(seconds):
            if type(seconds) in (int, float) and seconds > _CENTURIES:
                raise DefinitionError(
                    f"a deadline after {seconds} seconds is too far in the future. "
                    "Leave it out for a run without a deadline."
                )
            raise DefinitionError(f"a deadline after {seconds} seconds is invalid. Pass a positive number.")
        at = clock.now() + timedelta(seconds=seconds)
        return cls(at, clock=clock, pauses_for_people=pauses_for_people)

    def remaining(self) -> float:
        """Return the number of seconds left, which is negative once the deadline has passed."""
        now = self._paused_at if self._pauses else self._clock.monotonic()
        return self._ends - now

    @property
    def paused(self) -> bool:
        """Whether the deadline is paused now. Without `pauses_for_people`, it never is."""
        return self._pauses > 0

    @property
    def expired(self) -> bool:
        return self.remaining() <= 0

    def check(self, doing: str) -> None:
        """Raise `DeadlineExceededError` if the deadline has passed. `doing` completes its message: "passed before ..."."""
        if self.remaining() <= 0:
            raise DeadlineExceededError(self.at, doing)

    def pause(self) -> None:
        """Pause the deadline until `resume` is called. Does nothing unless `pauses_for_people` is true."""
        if not self.pauses_for_people:
            return
        if self._pauses == 0:
            self._paused_at = self._clock.monotonic()
        self._pauses += 1

    def resume(self) -> None:
        """Undo one `pause`. The deadline runs again once each `pause` is undone. Does nothing if it is not paused."""
        if self._pauses == 0:
            return
        self._pauses -= 1
        if self._pauses == 0:
            away = self._clock.monotonic() - self._paused_at
            self._ends += away
            self.at += timedelta(seconds=away)

    def __repr__(self) -> str:
        return f"Deadline({self.at.isoformat()}, {self.remaining():.3f} s left)"
