"""Deadlines: stored as wall-clock time, and enforced by a monotonic clock."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from handrail import Deadline
from handrail.clock import Clock, SystemClock
from handrail.errors import DeadlineExceededError, DefinitionError, LimitError

START = datetime(2030, 1, 1, 12, tzinfo=UTC)


class FakeClock:
    """A clock whose wall time and monotonic time are moved by hand, together or separately."""

    def __init__(self) -> None:
        self.wall = START
        self.ticks = 1000.0

    def now(self) -> datetime:
        return self.wall

    def monotonic(self) -> float:
        return self.ticks

    def pass_time(self, seconds: float) -> None:
        self.wall += timedelta(seconds=seconds)
        self.ticks += seconds

    def set_wall(self, wall: datetime) -> None:
        self.wall = wall


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_it_is_kept_in_utc(clock: FakeClock):
    """A deadline's `at` is in UTC, whichever time zone it was given in."""
    at = datetime(2030, 1, 1, 15, tzinfo=timezone(timedelta(hours=2)))
    deadline = Deadline(at, clock=clock)
    assert deadline.at == at
    assert deadline.at.tzinfo is UTC
    assert deadline.remaining() == 3600


def test_a_time_without_a_zone_is_refused_with_a_hint(clock: FakeClock):
    """A time without a zone is refused, because it can mean different moments on different machines."""
    with pytest.raises(
        DefinitionError, match=r"2030-01-01T00:00:00 has no time zone.*`Deadline.after\(300\)`"
    ):
        Deadline(datetime(2030, 1, 1), clock=clock)


def test_after_counts_from_now(clock: FakeClock):
    """`Deadline.after` counts its seconds from the clock's current time."""
    deadline = Deadline.after(90, clock=clock)
    assert deadline.at == START + timedelta(seconds=90)
    assert deadline.remaining() == 90


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("-inf")])
def test_after_no_time_is_refused(seconds: float, clock: FakeClock):
    """`Deadline.after` refuses a duration that is not positive."""
    with pytest.raises(DefinitionError, match=f"after {seconds} seconds is invalid. Pass a positive number"):
        Deadline.after(seconds, clock=clock)


@pytest.mark.parametrize("seconds", [float("inf"), 1e12, 1e300])
def test_after_the_end_of_the_calendar_is_refused(seconds: float, clock: FakeClock):
    """`Deadline.after` refuses a time so far away that no date can represent it."""
    with pytest.raises(DefinitionError, match=r"too far in the future\. Leave it out"):
        Deadline.after(seconds, clock=clock)


def test_one_in_the_past_has_passed(clock: FakeClock):
    """A deadline in the past is accepted, because it may come from a record. It has expired."""
    deadline = Deadline(START - timedelta(seconds=5), clock=clock)
    assert deadline.expired
    assert deadline.remaining() == -5


def test_it_expires_at_its_moment(clock: FakeClock):
    """A deadline expires exactly at its time, not before."""
    deadline = Deadline.after(10, clock=clock)
    clock.pass_time(9.5)
    assert not deadline.expired
    assert deadline.remaining() == 0.5
    clock.pass_time(0.5)
    assert deadline.expired
    clock.pass_time(2)
    assert deadline.remaining() == -2


@pytest.mark.parametrize("wall", [START + timedelta(days=400), START - timedelta(days=400)])
def test_setting_the_machines_clock_changes_nothing(wall: datetime, clock: FakeClock):
    """Setting the wall clock in either direction does not change how much time is left."""
    deadline = Deadline.after(10, clock=clock)
    clock.set_wall(wall)
    assert deadline.remaining() == 10
    deadline.check("anything")
    clock.pass_time(10)
    assert deadline.expired
    assert deadline.at == START + timedelta(seconds=10)


def test_check_says_which_deadline_and_what_did_not_happen(clock: FakeClock):
    """Once the deadline has passed, `check` raises a `TimeoutError` that names the deadline and what it prevented."""
    deadline = Deadline.after(1, clock=clock)
    deadline.check("calling search")
    clock.pass_time(1)
    with pytest.raises(DeadlineExceededError) as caught:
        deadline.check("calling search")
    assert str(caught.value) == "the deadline 2030-01-01T12:00:01+00:00 passed before calling search"
    assert (caught.value.deadline, caught.value.doing) == (deadline.at, "calling search")
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, LimitError)


def test_a_pause_does_not_count_where_people_are_waited_for(clock: FakeClock):
    """With `pauses_for_people`, a pause takes no time from the deadline, which moves by the length of the pause."""
    deadline = Deadline.after(10, clock=clock, pauses_for_people=True)
    clock.pass_time(4)
    deadline.pause()
    clock.pass_time(3600)
    assert deadline.remaining() == 6
    assert not deadline.expired
    deadline.resume()
    assert deadline.remaining() == 6
    assert deadline.at == START + timedelta(seconds=3610)
    clock.pass_time(6)
    assert deadline.expired


def test_pauses_nest(clock: FakeClock):
    """When two pauses overlap, the deadline continues only after both have ended."""
    deadline = Deadline.after(10, clock=clock, pauses_for_people=True)
    deadline.pause()
    clock.pass_time(5)
    deadline.pause()
    clock.pass_time(5)
    deadline.resume()
    clock.pass_time(5)
    assert deadline.remaining() == 10
    deadline.resume()
    assert deadline.at == START + timedelta(seconds=25)
    clock.pass_time(4)
    assert deadline.remaining() == 6


def test_it_can_be_paused_again(clock: FakeClock):
    """A deadline can be paused repeatedly, and the lengths of the pauses add up."""
    deadline = Deadline.after(10, clock=clock, pauses_for_people=True)
    for _ in range(3):
        deadline.pause()
        clock.pass_time(100)
        deadline.resume()
        clock.pass_time(1)
    assert deadline.remaining() == 7
    assert deadline.at == START + timedelta(seconds=310)


def test_a_pause_does_not_follow_the_time_of_day(clock: FakeClock):
    """A pause moves the deadline by the elapsed time, even if the wall clock is set meanwhile."""
    deadline = Deadline.after(10, clock=clock, pauses_for_people=True)
    deadline.pause()
    clock.set_wall(START + timedelta(days=3))
    clock.ticks += 20
    deadline.resume()
    assert deadline.remaining() == 10
    assert deadline.at == START + timedelta(seconds=30)


def test_without_that_a_pause_changes_nothing(clock: FakeClock):
    """A deadline that does not pause for people is not moved by `pause`."""
    deadline = Deadline.after(10, clock=clock)
    deadline.pause()
    clock.pass_time(10)
    assert deadline.expired
    deadline.resume()
    assert deadline.expired
    assert deadline.at == START + timedelta(seconds=10)


def test_a_resume_too_many_does_nothing(clock: FakeClock):
    """A `resume` without a `pause` neither raises nor adds time."""
    deadline = Deadline.after(10, clock=clock, pauses_for_people=True)
    deadline.resume()
    clock.pass_time(3)
    deadline.pause()
    deadline.resume()
    deadline.resume()
    assert deadline.remaining() == 7


def test_its_repr_says_when_and_how_long(clock: FakeClock):
    """A deadline's repr shows its time and the seconds left."""
    deadline = Deadline.after(1.5, clock=clock)
    assert repr(deadline) == "Deadline(2030-01-01T12:00:01.500000+00:00, 1.500 s left)"


def test_the_machines_clock_tells_utc_and_never_goes_back():
    """`SystemClock` gives wall time in UTC, and a monotonic time that never decreases."""
    clock: Clock = SystemClock()
    assert clock.now().tzinfo is UTC
    readings = [clock.monotonic() for _ in range(100)]
    assert readings == sorted(readings)
    before = datetime.now(UTC)
    assert before <= clock.now() <= datetime.now(UTC)


def test_a_deadline_follows_the_machines_clock_by_default():
    """A deadline made without a clock argument follows the system clock."""
    deadline: Any = Deadline.after(3600)
    assert 3590 < deadline.remaining() <= 3600
    assert not deadline.expired
