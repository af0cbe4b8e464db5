"""The signal of a call: it fires for each reason to stop, in async and sync handlers, before the handler is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from handrail import Deadline, Handoff, Tool, ToolContext, ToolResult, open_gate
from handrail.clock import Clock
from handrail.concurrency import user_code as isolation
from handrail.errors import ContextExpired
from handrail.run.gate import Gate
from handrail.testing import VirtualClock, run_virtual
from handrail.tools.toolbox import NO_TOOLS

REASONS = ["cancel", "timeout", "deadline"]
OUTSIDE = [*REASONS, "the caller's task"]
"""`REASONS`, and the cancellation of the caller's own task from outside."""


@pytest.fixture(params=["watched", "unwatched"])
def waits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How tasks with listeners wait: for a `Watched`, or, on an asyncio without the detail that this takes, for the future itself."""
    monkeypatch.setattr(isolation, "CAN_WATCH", isolation.CAN_WATCH and request.param == "watched")
    return request.param


class Stopped:
    """A record of what a handler saw while it was stopped."""

    def __init__(self) -> None:
        self.seen: list[str] = []


def gate_of(handler: Any, reason: str, clock: Clock) -> Gate:
    """Open a gate with one tool. If the reason is a timeout or a deadline, it stops the tool after five seconds."""
    made = Tool[None, Any](
        "work", "Works.", handler, effect="read", timeout=5 if reason == "timeout" else None
    )
    deadline = Deadline.after(5, clock=clock) if reason == "deadline" else None
    return open_gate([made], clock=clock, deadline=deadline)


async def stop(gate: Gate, reason: str, name: str = "work") -> None:
    """Call a tool and wait until it has ended. For a cancellation, cancel the gate or the caller's task after five seconds."""
    calling = asyncio.ensure_future(gate.invoke(name))
    if reason == "cancel":
        await asyncio.sleep(5)
        gate.cancel()
    elif reason == "the caller's task":
        await asyncio.sleep(5)
        calling.cancel()
    await asyncio.wait({calling})
    if not calling.cancelled():
        calling.exception()


def run(make: Callable[[Stopped], Any], reason: str) -> list[str]:
    """Call the handler that `make` returns, stop it in virtual time, and return what it saw."""
    stopped = Stopped()

    async def main() -> None:
        await stop(gate_of(make(stopped), reason, VirtualClock()), reason)

    run_virtual(main)
    return stopped.seen


@pytest.mark.parametrize("reason", OUTSIDE)
def test_a_handler_that_waits_for_its_signal_runs_before_it_is_cancelled(reason: str) -> None:
    """When a call is stopped, `context.signal.wait()` returns in its async handler, which is then cancelled at its next `await`."""

    def make(stopped: Stopped) -> Any:
        async def work(params: None, *, context: ToolContext) -> ToolResult[None]:
            assert not context.signal.cancelled
            await context.signal.wait()
            stopped.seen.append(f"signal {context.signal.cancelled}")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                stopped.seen.append("cancelled")
                raise
            return ToolResult.ok(None)

        return work

    assert run(make, reason) == ["signal True", "cancelled"]


@pytest.mark.parametrize("reason", REASONS)
def test_a_task_beside_the_work_runs_before_the_work_is_cancelled(reason: str) -> None:
    """In a task group, a task that waits for the signal runs before the work is cancelled, so that it can clean up."""

    def make(stopped: Stopped) -> Any:
        async def work(params: None, *, context: ToolContext) -> ToolResult[None]:
            async def clean_up() -> None:
                await context.signal.wait()
                stopped.seen.append("cleaned up")

            async with asyncio.TaskGroup() as group:
                group.create_task(clean_up())
                try:
                    await asyncio.sleep(60)
                finally:
                    stopped.seen.append(f"cancelled {context.signal.cancelled}")
            return ToolResult.ok(None)

        return work

    assert run(make, reason) == ["cleaned up", "cancelled True"]


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("reason", OUTSIDE)
def test_a_handler_that_polls_its_signal_sees_it(reason: str) -> None:
    """An async handler that is cancelled sees that its signal has fired."""

    def make(stopped: Stopped) -> Any:
        async def work(params: None, *, context: ToolContext) -> ToolResult[None]:
            signal = context.signal
            try:
                await asyncio.sleep(60)
            finally:
                stopped.seen.append(f"signal {signal.cancelled}")
            return ToolResult.ok(None)

        return work

    assert run(make, reason) == ["signal True"]


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("reason", OUTSIDE)
@pytest.mark.parametrize("nested", [False, True])
def test_a_handler_that_first_reads_its_signal_when_it_is_cancelled_sees_it(
    reason: str, nested: bool
) -> None:
    """A signal that is first read inside `except CancelledError` has fired, also for a cancellation of a call around it."""

    def make(stopped: Stopped) -> Any:
        async def inner(params: None, *, context: ToolContext) -> ToolResult[None]:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                stopped.seen.append(f"signal {context.signal.cancelled}")
                if context.signal.cancelled:
                    await context.signal.wait()  # returns at once
                stopped.seen.append(f"again {context.signal.cancelled}")
                raise
            return ToolResult.ok(None)

        async def outer(params: None, *, context: ToolContext) -> ToolResult[None]:
            gate = open_gate([Tool[None, Any]("inner", "Waits.", inner, effect="read")])
            return await gate.invoke("inner")

        return outer if nested else inner

    assert run(make, reason) == ["signal True", "again True"]


def test_a_timeout_of_the_handlers_own_is_not_its_signal() -> None:
    """Once a timeout inside the handler is over, a signal that is first read then has not fired, and fires when the call is stopped."""

    def make(stopped: Stopped) -> Any:
        async def work(params: None, *, context: ToolContext) -> ToolResult[None]:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    try:
                        await asyncio.sleep(60)
                    finally:
                        _ = context.signal  # reading it here does not make it fire
            stopped.seen.append(f"own {context.signal.cancelled}")
            await context.signal.wait()
            stopped.seen.append(f"signal {context.signal.cancelled}")
            return ToolResult.ok(None)

        return work

    assert run(make, "the caller's task") == ["own False", "signal True"]


@pytest.mark.parametrize("reason", REASONS)
async def test_a_sync_handler_sees_its_signal(reason: str) -> None:
    """In a sync handler, the signal fires for each reason to stop."""
    seen, started, over = list[str](), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def work(params: None, *, context: ToolContext) -> ToolResult[None]:
        signal = context.signal
        loop.call_soon_threadsafe(started.set)
        with contextlib.suppress(ContextExpired):  # the call may be over before the thread waits
            signal.wait().wait()
        seen.append(f"signal {signal.cancelled}")
        loop.call_soon_threadsafe(over.set)
        return ToolResult.ok(None)

    made = Tool[None, Any](
        "work", "Works.", work, effect="read", timeout=0.2 if reason == "timeout" else None
    )
    gate = open_gate([made], deadline=Deadline.after(0.2) if reason == "deadline" else None)
    calling = asyncio.ensure_future(gate.invoke("work"))
    if reason == "cancel":
        await started.wait()
        gate.cancel()
    await asyncio.wait({calling})
    if not calling.cancelled():
        calling.exception()
    await over.wait()
    assert seen == ["signal True"]


@pytest.mark.parametrize("reason", OUTSIDE)
@pytest.mark.virtual_time
async def test_the_signal_of_an_inner_call_fires_with_the_outer_one(reason: str) -> None:
    """When a call is stopped, the signal of a handoff's act inside it fires too."""
    stopped = Stopped()
    ask = Handoff("ask", "Ask.", answer=str, effect="read")

    @ask.client
    async def answer(public: None, *, context: ToolContext) -> str:
        await context.signal.wait()
        stopped.seen.append("inner")
        await asyncio.sleep(60)
        return ""

    async def work(params: None, *, context: ToolContext) -> ToolResult[None]:
        await context.call("ask")
        return ToolResult.ok(None)

    gate = gate_of(work, reason, VirtualClock())
    gate.run.show(NO_TOOLS.plus([*gate.run.tools.values(), ask]), ())
    await stop(gate, reason)
    assert stopped.seen == ["inner"]


@pytest.mark.parametrize("reason", OUTSIDE)
@pytest.mark.virtual_time
async def test_a_call_that_returns_at_its_signal_is_stopped_and_its_caller_is_cancelled_once(
    reason: str,
) -> None:
    """A call whose handler returns as soon as its signal fires is still stopped, and its caller is not cancelled later."""
    after = list[str]()

    async def work(params: None, *, context: ToolContext) -> ToolResult[None]:
        await context.signal.wait()
        return ToolResult.ok(None)

    async def call(gate: Gate) -> None:
        try:
            result = await gate.invoke("work")
            after.append(str(result.success))
        except (asyncio.CancelledError, Exception) as error:
            after.append(type(error).__name__)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        after.append("went on")

    gate = gate_of(work, reason, VirtualClock())
    calling = asyncio.ensure_future(call(gate))
    if reason == "cancel":
        await asyncio.sleep(5)
        gate.cancel()
    elif reason == "the caller's task":
        await asyncio.sleep(5)
        calling.cancel()
    await asyncio.wait({calling})
    ends = {
        "cancel": "CancelledError",
        "the caller's task": "CancelledError",
        "timeout": "False",
        "deadline": "PromptEvaluationError",
    }
    assert after == [ends[reason], "went on"]


@pytest.mark.parametrize("how", ["cancel", "timeout"])
@pytest.mark.virtual_time
async def test_the_signal_fires_before_a_cancellation_of_the_callers_own_task_lands(how: str) -> None:
    """If `task.cancel()` or a timeout around the call stops a handler, the signal fires before the cancellation."""
    seen = list[str]()

    async def work(params: None, *, context: ToolContext) -> ToolResult[None]:
        async def clean_up(signal: Any) -> None:
            await signal.wait()
            seen.append("cleaned up")

        async with asyncio.TaskGroup() as group:
            group.create_task(clean_up(context.signal))
            try:
                await asyncio.sleep(60)
            finally:
                seen.append("cancelled")
        return ToolResult.ok(None)

    gate = gate_of(work, "", VirtualClock())
    if how == "timeout":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await gate.invoke("work")
    else:
        calling = asyncio.ensure_future(gate.invoke("work"))
        await asyncio.sleep(5)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
    assert asyncio.current_task().cancelling() == 0  # pyright: ignore[reportOptionalMemberAccess]  # in a task
    assert seen == ["cleaned up", "cancelled"]


@pytest.mark.usefixtures("waits")
@pytest.mark.virtual_time
async def test_a_timeout_inside_the_handler_does_not_fire_its_signal() -> None:
    """The signal does not fire if the handler's own timeout or task group cancels part of its work."""
    seen = list[Any]()

    async def work(params: None, *, context: ToolContext) -> ToolResult[None]:
        signal = context.signal
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.sleep(60)
        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                await asyncio.sleep(60)
        await asyncio.sleep(0)
        seen.append(signal.cancelled)
        return ToolResult.ok(None)

    async def fail() -> None:
        raise ValueError

    gate = gate_of(work, "", VirtualClock())
    seen.append((await gate.invoke("work")).success)
    assert seen == [False, True]
