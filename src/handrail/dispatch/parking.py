"""Parking: a run in which everything waits for answers that nobody here gives is left to its journal."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from handrail.deadline import Deadline
    from handrail.dispatch.call import LiveCall
    from handrail.dispatch.frame import Frame
    from handrail.dispatch.watchdog import Timer


_GRACE = 0.1
"""How many seconds a handler that was given one of several answers has before its run is parked for the others."""

asker: ContextVar[LiveCall | None] = ContextVar("the call that asks", default=None)
"""For an environment that leaves a question open: who waits for it."""


@contextmanager
def waiting_for_a_person(asks: LiveCall) -> Generator[None]:
    """Time a person takes counts neither towards the timeout nor, where it pauses, the deadline."""
    timers: list[Timer] = []
    deadlines: list[Deadline] = []
    call: LiveCall | None = asks
    while call is not None:
        if call.timer is not None:
            timers.append(call.timer)
        deadline = call.frame.deadline
        if deadline is not None and deadline not in deadlines:
            deadlines.append(deadline)  # of the runs around this one too: they wait as well
        call = call.parent
    for timer in timers:
        timer.hold()
    for deadline in deadlines:
        deadline.pause()
    token = asker.set(asks)
    asks.asking += 1
    _has_gone_on(asks)
    try:
        yield
    finally:
        asks.asking -= 1
        asker.reset(token)
        if asks.frame.parking is not None:
            asks.frame.parking.let_go_on(asks)
        for deadline in deadlines:
            deadline.resume()
        for timer in timers:
            timer.go_on()


async def wait_for_later() -> bool:
    """In an environment's `ask`: the question is recorded, and its answer will come some other time.

    It ends with the question, and the run may be parked meanwhile. False: there is no record to leave it in.
    """
    call = asker.get()
    if call is None or call.frame.parking is None:
        return False
    call.waiting += 1
    try:
        call.frame.parking.consider()
        return await asyncio.get_running_loop().create_future()
    finally:
        call.waiting -= 1


class Parking:
    """Watches one run and what is nested in it.

    The run is parked once nothing in it is at work: every call waits for an answer, or for a call
    inside it that does, and can be entered again. It then ends as if its process had: nothing is
    undone, nothing is recorded, and whoever resumes it goes on from the record.
    """

    __slots__ = ("_frames", "_root", "parked")

    def __init__(self, root: Frame) -> None:
        self._root = root
        self._frames: WeakSet[Frame] = WeakSet((root,))
        self.parked = False

    def add(self, frame: Frame) -> None:
        """A run was nested in this one."""
        self._frames.add(frame)

    def consider(self) -> None:
        """Something began to wait, or is over: is anything still at work?"""
        if self.parked:
            return
        live = [call for frame in self._frames for call in frame.live]
        around = {call.parent for call in live if call.parent is not None}
        if live and all(_rests(call, call in around) for call in live):
            self._park()

    def let_go_on(self, call: LiveCall) -> None:
        """A question of this call is over: its handler may go on without the others, and has time to."""

        def over() -> None:
            call.grace = None
            self.consider()

        _has_gone_on(call)
        with suppress(RuntimeError):  # closed from outside, with no loop to go on in
            call.grace = asyncio.get_running_loop().call_later(_GRACE, over)

    def _park(self) -> None:
        self.parked = True
        log = self._root.log
        assert log is not None, "only a run with a record is parked"
        log.closed = True
        self._root.cancellation.cancel("parked")


def _has_gone_on(call: LiveCall) -> None:
    """What asks something new has heard what there was to hear."""
    if call.grace is not None:
        call.grace.cancel()
        call.grace = None


def _rests(call: LiveCall, is_around: bool) -> bool:
    """Does this call wait, and can it be entered again?"""
    if not call.waiting and not is_around:
        return False
    if call.asking > call.waiting or call.grace is not None:
        return False  # another of its questions has an answer or may have one, and that may be enough
    if call.token is None:
        return True  # its handler has not begun: it is being approved
    return call.tool.enters_again
