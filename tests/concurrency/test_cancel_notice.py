"""Cancellation signals: a handler's signal fires before the handler is cancelled, and the handler's own timeouts do not fire it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from handrail import Tool, ToolContext, ToolResult, open_gate
from handrail.concurrency import cancellation
from handrail.concurrency import user_code as isolation
from handrail.concurrency.user_code import Listener, listen, listeners
from handrail.errors import TransientError
from handrail.run.gate import Gate
from handrail.testing import VirtualClock, run_virtual
from support import PATIENCE

Trace = list[Any]
Work = Callable[[ToolContext, Trace], Awaitable[Any]]


def gate_of(work: Work, trace: Trace) -> Gate:
    """Open a gate whose only tool does `work`."""

    async def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
        await work(context, trace)
        return ToolResult.ok(None)

    return open_gate([Tool[None, Any]("work", "Works.", handler, effect="read")], clock=VirtualClock())


def count() -> int:
    """Return the number of pending cancellation requests of the current task."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def fail() -> None:
    await asyncio.sleep(1)
    raise ValueError("failed")


# --- what a handler does to its own task -----------------------------------------------------------------


async def expires(context: ToolContext, trace: Trace) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1):
            async with asyncio.timeout(5):
                await asyncio.sleep(60)


async def waits_for(context: ToolContext, trace: Trace) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.sleep(60), 1)


async def fails_in_a_group(context: ToolContext, trace: Trace) -> None:
    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            await asyncio.sleep(60)


async def fails_at_the_end_of_a_group(context: ToolContext, trace: Trace) -> None:
    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(asyncio.sleep(60))


async def moves_on(context: ToolContext, trace: Trace) -> None:
    with anyio.move_on_after(1) as scope:
        await asyncio.sleep(60)
    trace.append(scope.cancelled_caught)


async def waits_for_a_task(context: ToolContext, trace: Trace) -> None:
    inner = asyncio.ensure_future(asyncio.sleep(60))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1):
            await inner
    trace.append(inner.cancelled())


async def yields(context: ToolContext, trace: Trace) -> None:
    async def tick() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            trace.append("tick")

    ticking = asyncio.ensure_future(tick())
    for _ in range(3):
        await asyncio.sleep(0)
        trace.append("tock")
    await ticking


INSIDE = [
    expires,
    waits_for,
    fails_in_a_group,
    fails_at_the_end_of_a_group,
    moves_on,
    waits_for_a_task,
    yields,
]


def traced(work: Work, end: str, has_signal: bool) -> Trace:
    """Run `work` in a call that ends as `end` says, and return the trace.

    `has_signal` says whether the handler reads its signal.
    """
    trace: Trace = []

    async def body(context: ToolContext, trace: Trace) -> None:
        found = context.signal if has_signal else None
        await work(context, trace)
        trace.append((count(), found is not None and found.cancelled))
        try:
            await asyncio.sleep(60)
        finally:
            trace.append(("ends", count()))

    async def call(gate: Gate) -> None:
        try:
            if end == "timeout":
                async with asyncio.timeout(10):
                    await gate.invoke("work")
            elif end == "move on":
                with anyio.move_on_after(10):
                    await gate.invoke("work")
            else:
                await gate.invoke("work")
        except BaseException as error:
            trace.append((type(error).__name__, *error.args))
            raise
        finally:
            trace.append(count())

    async def main() -> None:
        calling = asyncio.ensure_future(call(gate_of(body, trace)))
        if end == "cancel":
            await asyncio.sleep(10)
            calling.cancel("enough")
        elif end == "cancel twice":
            await asyncio.sleep(10)
            calling.cancel("enough")
            calling.cancel("really")
        await asyncio.wait({calling})
        trace.append(calling.cancelled() or type(calling.exception()).__name__)

    run_virtual(main)
    assert not listeners
    return trace


@pytest.fixture(params=["watched", "unwatched"])
def waits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How tasks with listeners wait: for a `Watched`, or, on an asyncio without the detail that this takes, for the future itself."""
    monkeypatch.setattr(isolation, "CAN_WATCH", isolation.CAN_WATCH and request.param == "watched")
    return request.param


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("end", ["return", "cancel", "cancel twice", "timeout"])
@pytest.mark.parametrize("work", INSIDE)
def test_timeouts_and_groups_in_a_handler_are_the_same_with_and_without_its_signal(
    work: Work, end: str
) -> None:
    """Timeouts and task groups inside a handler do not fire its signal, and behave as if it had not read the signal."""
    with_signal = traced(work, end, True)
    assert (0, False) in with_signal
    assert with_signal == traced(work, end, False)


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("work", INSIDE)
def test_anyio_ends_a_call_whose_handler_has_its_signal(work: Work) -> None:
    """An anyio cancel scope around a call ends the call, and leaves no pending cancellation request."""
    trace = traced(work, "move on", True)
    assert trace[-2:] == [0, "NoneType"]


# --- cancellations from outside --------------------------------------------------------------------------


def cancelled_after(work: Work, seconds: float) -> Trace:
    """Call `work`, cancel the caller's task after `seconds`, and return the trace."""
    trace: Trace = []

    async def main() -> None:
        calling = asyncio.ensure_future(gate_of(work, trace).invoke("work"))
        await asyncio.sleep(seconds)
        calling.cancel()
        await asyncio.wait({calling})
        trace.append(calling.cancelled())

    run_virtual(main)
    assert not listeners
    return trace


async def note(found: Any, trace: Trace) -> None:
    await found.wait()
    trace.append("told")


@pytest.mark.virtual_time
async def test_a_handler_that_lets_others_run_is_told_first() -> None:
    """Work that only yields to the loop is cancelled after its signal has fired."""
    trace: Trace = []
    started = asyncio.Event()

    async def work(context: ToolContext, trace: Trace) -> None:
        told = asyncio.ensure_future(note(context.signal, trace))
        started.set()
        try:
            while True:
                await asyncio.sleep(0)
        finally:
            trace.append("cancelled")
            await told

    calling = asyncio.ensure_future(gate_of(work, trace).invoke("work"))
    await started.wait()
    calling.cancel()
    await asyncio.wait({calling})
    assert trace == ["told", "cancelled"]


@pytest.mark.parametrize("ends", ["with a value", "with an error"])
def test_a_cancellation_is_not_lost_if_the_awaited_future_ends_first(ends: str) -> None:
    """A handler is cancelled even if the future that it awaits is completed as soon as the signal fires."""

    async def work(context: ToolContext, trace: Trace) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def complete(found: Any) -> None:
            await found.wait()
            trace.append(future.done())
            if ends == "with a value":
                future.set_result(None)
            else:
                future.set_exception(ValueError("failed"))

        async with asyncio.TaskGroup() as group:
            group.create_task(complete(context.signal))
            await asyncio.sleep(1)
            try:
                await future
            except BaseException as error:
                trace.append(type(error).__name__)
                raise

    assert cancelled_after(work, 5) == [False, "CancelledError", True]


@pytest.mark.virtual_time
async def test_a_handler_that_ignores_a_cancellation_gets_the_next_one() -> None:
    """Each cancellation reaches the handler, even when the signal has already fired."""

    async def work(context: ToolContext, trace: Trace) -> None:
        held = context.signal
        for _ in range(2):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                trace.append((held.cancelled, count()))
        await asyncio.sleep(60)

    trace: Trace = []

    calling = asyncio.ensure_future(gate_of(work, trace).invoke("work"))
    for _ in range(3):
        await asyncio.sleep(5)
        calling.cancel()
    await asyncio.wait({calling})
    trace.append(calling.cancelled())
    assert trace == [(True, 1), (True, 2), True]


@pytest.mark.virtual_time
async def test_a_call_that_returns_at_its_signal_cancels_the_handler_around_it_once() -> None:
    """A cancellation that an inner call has raised is not raised in the outer handler again."""
    trace: Trace = []

    async def inner(params: None, *, context: ToolContext) -> ToolResult[None]:
        await context.signal.wait()
        return ToolResult.ok(None)

    async def outer(params: None, *, context: ToolContext) -> ToolResult[None]:
        held = context.signal
        for step in range(2):
            try:
                await (context.call("inner") if step == 0 else asyncio.sleep(0))
                trace.append("went on")
            except asyncio.CancelledError:
                trace.append(held.cancelled)
        return ToolResult.ok(None)

    tools = [Tool[None, Any](each.__name__, "Works.", each, effect="read") for each in (inner, outer)]
    calling = asyncio.ensure_future(open_gate(tools, clock=VirtualClock()).invoke("outer"))
    await asyncio.sleep(5)
    calling.cancel()
    await asyncio.wait({calling})
    trace.append(calling.cancelled())
    assert trace == [True, "went on", True]
    assert not listeners


@pytest.mark.virtual_time
async def test_the_timeout_of_an_inner_call_does_not_fire_the_signal_of_the_outer_one() -> None:
    """A timeout stops its own call only, even if the calls share a task."""
    trace: Trace = []

    async def slow(params: None, *, context: ToolContext) -> ToolResult[None]:
        await asyncio.sleep(60)
        return ToolResult.ok(None)

    async def work(params: None, *, context: ToolContext) -> ToolResult[None]:
        held = context.signal
        trace.append((await context.call("slow")).success)
        trace.append(held.cancelled)
        return ToolResult.ok(None)

    tools = [
        Tool[None, Any]("slow", "Slow.", slow, effect="read", timeout=5),
        Tool[None, Any]("work", "Works.", work, effect="read"),
        Tool[None, Any]("early", "Slow.", slow, effect="read", timeout=2),
    ]
    gate = open_gate(tools, clock=VirtualClock())
    # All timers of a loop share one asyncio timer. The call to `early` starts that timer outside of `work`.
    early = asyncio.ensure_future(gate.invoke("early"))
    await asyncio.sleep(1)
    trace.append((await gate.invoke("work")).success)
    await early
    assert trace == [False, False, True]


def test_the_signal_of_a_second_attempt_fires() -> None:
    """The signal of a call's second attempt fires when the call is cancelled."""
    attempts: list[int] = []

    async def work(context: ToolContext, trace: Trace) -> None:
        attempts.append(1)
        found = context.signal
        if len(attempts) == 1:
            raise TransientError("again")
        try:
            await asyncio.sleep(600)
        finally:
            trace.append(found.cancelled)

    assert cancelled_after(work, 300) == [True, True]


async def test_nothing_is_kept_of_a_call_whose_coroutine_is_closed() -> None:
    """A call whose coroutine is closed no longer listens for cancellations."""

    async def work(context: ToolContext, trace: Trace) -> None:
        assert context.signal is not None
        await asyncio.Event().wait()

    calling = gate_of(work, []).invoke("work").__await__()
    next(calling)
    assert listeners
    calling.close()
    assert not listeners


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_fires_the_signal_once_and_a_second_one_ends_the_program(times: int) -> None:
    """Ctrl-C cancels the main task after the signal has fired. A second Ctrl-C ends the program, even if the handler keeps waiting."""
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a program that a shell starts in the background ignores SIGINT
    trace: Trace = []

    async def work(context: ToolContext, trace: Trace) -> None:
        told = asyncio.ensure_future(note(context.signal, trace))
        try:
            await asyncio.Event().wait()
        finally:
            trace.append("cancelled")
            await told
            if times == 2:
                asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
                await asyncio.Event().wait()

    async def main() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await gate_of(work, trace).invoke("work")

    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
    finally:
        signal.signal(signal.SIGINT, before)
    assert trace == ["told", "cancelled"]
    assert not listeners


async def test_a_thread_that_begins_to_listen_while_its_call_ends_leaves_no_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a call ends in one thread while another thread adds its listener, no listener is left."""

    class Plain:
        work = "work"

        def is_cancelled_from_outside(self) -> bool:
            return False

        def stop(self) -> None: ...

    scope = cancellation.open_scope()
    ends = threading.Thread(target=scope.ignore)

    def add(task: asyncio.Task[Any], listener: Listener) -> None:
        ends.start()
        ends.join(0.1)  # the thread may have to wait until the listener is added
        listen(task, listener)

    monkeypatch.setattr(cancellation, "listen", add)
    scope.listen(Plain())
    ends.join(PATIENCE)
    assert not listeners
