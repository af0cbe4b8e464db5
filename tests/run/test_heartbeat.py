"""Heartbeats: automatic while a handler runs, manual after the handler's first own beat, and stopped at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from handrail.errors import DefinitionError
from handrail.run.limits import Heartbeat
from handrail.testing import VirtualClock, VirtualTimeLoop, run_virtual


class Lease:
    """A lease that records when it was extended, and can be made to fail."""

    def __init__(self, interval: float = 10.0) -> None:
        self.interval = interval
        self.extended: list[float] = []
        self.broken = False

    def extend(self) -> None:
        if self.broken:
            raise OSError("the store is away")
        self.extended.append(asyncio.get_running_loop().time())


def played(script: Callable[[Heartbeat, Lease], Awaitable[None]]) -> tuple[Heartbeat, Lease]:
    """Run a script in virtual time with an automatic heartbeat, and return the heartbeat and its lease."""
    lease = Lease()
    made: list[Heartbeat] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        heartbeat = Heartbeat(lease, VirtualClock(loop))
        made.append(heartbeat)
        heartbeat.keep(loop)
        await script(heartbeat, lease)

    run_virtual(main)
    return made[0], lease


def test_a_handler_that_never_beats_is_beaten_for():
    """While a handler runs without beating, the lease is extended at once and then at every interval."""

    async def script(heartbeat: Heartbeat, lease: Lease) -> None:
        await asyncio.sleep(35)
        heartbeat.stop()
        await asyncio.sleep(100)

    heartbeat, lease = played(script)
    assert lease.extended == [0, 10, 20, 30]
    assert heartbeat.last_beat is not None
    assert not heartbeat.beats_itself


def test_from_its_first_own_beat_on_only_its_own_count():
    """After a handler's first own beat, only its own beats count, so the lease expires if the handler hangs."""

    async def script(heartbeat: Heartbeat, lease: Lease) -> None:
        await asyncio.sleep(15)
        heartbeat.beat()
        assert heartbeat.beats_itself
        await asyncio.sleep(3)
        heartbeat.beat()
        await asyncio.sleep(100)

    assert played(script)[1].extended == [0, 10, 15, 18]


def test_stopping_is_final_and_harmless():
    """A stopped heartbeat no longer extends the lease. It can be stopped twice, and without having been started."""

    async def script(heartbeat: Heartbeat, lease: Lease) -> None:
        heartbeat.stop()
        heartbeat.stop()
        await asyncio.sleep(50)

    assert played(script)[1].extended == [0]
    Heartbeat().stop()


def test_a_beat_after_the_end_keeps_nothing():
    """A beat after the call's end does not extend the lease."""

    async def script(heartbeat: Heartbeat, lease: Lease) -> None:
        heartbeat.stop()
        await asyncio.sleep(5)
        heartbeat.beat()

    heartbeat, lease = played(script)
    assert lease.extended == [0]
    assert not heartbeat.beats_itself


def test_keeping_twice_is_keeping_once():
    """Starting a heartbeat again extends the lease at once and restarts the timer, instead of adding a second one."""

    async def script(heartbeat: Heartbeat, lease: Lease) -> None:
        await asyncio.sleep(5)
        heartbeat.keep(asyncio.get_running_loop())
        await asyncio.sleep(12)
        heartbeat.stop()
        await asyncio.sleep(50)

    assert played(script)[1].extended == [0, 5, 15]


def test_a_lease_that_cannot_be_extended_is_tried_again(caplog: pytest.LogCaptureFixture):
    """If an automatic beat can't extend the lease, the error is logged, and the next beat tries again. A handler's own beat raises the error."""

    async def script(heartbeat: Heartbeat, lease: Lease) -> None:
        lease.broken = True
        await asyncio.sleep(25)
        assert heartbeat.last_beat == 0
        lease.broken = False
        await asyncio.sleep(10)
        lease.broken = True
        with pytest.raises(OSError, match="the store is away"):
            heartbeat.beat()
        heartbeat.stop()

    assert played(script)[1].extended == [0, 30]
    assert [record.getMessage()[:32] for record in caplog.records] == ["the lease could not be extended;"] * 2


@pytest.mark.virtual_time
async def test_a_beat_without_a_lease_is_noted():
    """Without a lease, a beat only records its time."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    heartbeat = Heartbeat(clock=VirtualClock(loop))
    heartbeat.keep(loop)
    assert heartbeat.last_beat is None
    await asyncio.sleep(3)
    heartbeat.beat()
    assert heartbeat.last_beat == 3


@pytest.mark.parametrize("interval", [0, -1.0, float("nan")])
def test_a_lease_without_an_interval_is_refused(interval: float):
    """A lease without a positive interval is refused, because it would be extended without a pause."""
    with pytest.raises(DefinitionError, match=f"interval is {interval!r} seconds.*positive number"):
        Heartbeat(Lease(interval))
