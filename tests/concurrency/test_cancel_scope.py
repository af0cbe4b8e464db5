"""`CancelScope`: which cancellations stop a call, and which stay inside its handler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import anyio
import pytest

from handrail import Deadline, ToolContext, tool
from handrail.errors import PromptEvaluationError
from handrail.protocols import PolicyDecision
from handrail.testing import VirtualClock, VirtualTimeLoop
from support.rig import Rig, staged

pytestmark = pytest.mark.virtual_time


async def fail_after(seconds: float) -> None:
    await asyncio.sleep(seconds)
    raise ValueError("a member failed")


async def recover(seconds: float = 1.0) -> None:
    """Recover from a task group in which a member fails."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail_after(seconds))
    except* ValueError:
        pass


async def recover_in_body() -> None:
    """Recover from a task group whose body is still waiting when a member fails."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail_after(1))
            await asyncio.sleep(60)
    except* ValueError:
        pass


async def recover_with_stragglers() -> None:
    """Recover from a task group in which one member fails and another takes two seconds to end."""

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(2)
            raise

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(slow())
            group.create_task(fail_after(1))
    except* ValueError:
        pass


async def recover_twice() -> None:
    await recover_in_body()
    await recover()


async def recover_and_wait() -> None:
    await recover()
    await asyncio.sleep(1)


@contextlib.asynccontextmanager
async def in_background() -> AsyncGenerator[None]:
    async with asyncio.TaskGroup() as group:
        group.create_task(fail_after(1))
        yield


async def recover_behind_generator() -> None:
    """Recover from a task group inside an async generator, as in many libraries."""
    try:
        async with in_background():
            pass
    except* ValueError:
        pass


async def recover_in_nested_groups() -> None:
    async with asyncio.TaskGroup():
        await recover()


HELPERS: list[Callable[[], Awaitable[None]]] = [
    recover,
    recover_in_body,
    recover_with_stragglers,
    recover_twice,
    recover_and_wait,
    recover_behind_generator,
    recover_in_nested_groups,
]


def rig_for(helper: Callable[[], Awaitable[None]], **options: Any) -> Rig:
    async def work(text: str, context: ToolContext) -> str:
        await helper()
        return text

    return Rig([staged(work)], **options)


def virtual_clock() -> VirtualClock:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return VirtualClock(loop)


def task_count() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


@pytest.mark.parametrize("helper", HELPERS, ids=lambda helper: helper.__name__)
async def test_a_helper_recovers_from_a_failed_member(helper: Callable[[], Awaitable[None]]) -> None:
    """A call whose helper recovers from a failed task group is committed, and its task's cancel count is zero."""
    rig = rig_for(helper)
    assert (await rig.call("work", text="kept")).value == "kept"
    assert task_count() == 0
    assert (await rig.call("work", text="again")).value == "again"
    assert rig.notes == ["kept", "again"]
    rig.assert_paired()


@pytest.mark.parametrize("at", [0.5, 1.0, 1.5, 2.5])
@pytest.mark.parametrize("helper", HELPERS, ids=lambda helper: helper.__name__)
async def test_a_cancel_from_outside_is_never_taken_for_the_groups(
    helper: Callable[[], Awaitable[None]], at: float
) -> None:
    """A cancel from outside rolls back an unfinished call, whether it comes before, during or after a task group's failure."""
    rig = rig_for(helper)
    call = asyncio.ensure_future(rig.call("work", text="gone"))
    done, _ = await asyncio.wait([call], timeout=at)
    if done:
        assert rig.notes == ["gone"]
        return
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert rig.status("work") == "cancelled"
    rig.assert_untouched()
    rig.assert_paired()


async def test_a_cancel_that_is_swallowed_after_a_recovery_is_rolled_back() -> None:
    """A call is rolled back even if its handler swallows a cancel after it recovered from a failed task group."""

    async def swallow() -> None:
        await recover()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

    rig = rig_for(swallow)
    call = asyncio.ensure_future(rig.call("work", text="gone"))
    await asyncio.sleep(5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    rig.assert_untouched()


@pytest.mark.parametrize("how", ["asyncio.timeout", "anyio", "wait_for"])
async def test_a_timeout_inside_a_handler_is_its_own(how: str) -> None:
    """A timeout inside a handler ends only what it surrounds, even right after a task group has failed."""

    async def limited() -> None:
        await recover()
        if how == "asyncio.timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await asyncio.sleep(60)
        elif how == "anyio":
            with anyio.move_on_after(1) as scope:
                await asyncio.sleep(60)
            assert scope.cancelled_caught
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.sleep(60), 1)

    rig = rig_for(limited)
    assert (await rig.call("work", text="kept")).value == "kept"
    assert task_count() == 0
    assert rig.notes == ["kept"]


async def test_a_group_around_the_call_stops_it() -> None:
    """If a task group around a call fails, the call is cancelled and rolled back."""
    rig = rig_for(recover_with_stragglers)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail_after(0.5))
            await rig.call("work", text="gone")
    except* ValueError:
        pass
    assert rig.status("work") == "cancelled"
    rig.assert_untouched()


async def test_an_inner_call_right_after_a_recovery_is_cancelled_as_such() -> None:
    """A cancel from outside reaches an inner call that began right after a task group had failed."""

    @tool(effect="staged")
    async def inner() -> None:
        """Wait."""
        await asyncio.sleep(60)

    @tool(effect="staged")
    async def outer(context: ToolContext) -> None:
        """Recover from a failed task group, then call the inner tool."""
        await recover()
        await context.call("inner")

    rig = Rig([inner, outer])
    call = asyncio.ensure_future(rig.call("outer"))
    await asyncio.sleep(5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (rig.status("inner"), rig.status("outer")) == ("cancelled", "cancelled")


async def test_an_inner_call_recovers_for_itself() -> None:
    """After an inner call has recovered from a failed task group, a swallowed cancel still ends the outer call."""

    @tool(effect="staged")
    async def inner() -> str:
        """Recover from a failed task group."""
        await recover_with_stragglers()
        return "recovered"

    @tool(effect="staged")
    async def outer(context: ToolContext) -> str:
        """Call the inner tool, then swallow a cancellation."""
        said = (await context.call("inner")).value
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(5)
        return said

    rig = Rig([inner, outer])
    assert (await rig.call("outer")).value == "recovered"
    call = asyncio.ensure_future(rig.call("outer"))
    await asyncio.sleep(6)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_timeout_and_deadline_are_distinguished_from_a_recovered_group() -> None:
    """After a handler has recovered from a failed task group, a timeout or a deadline still ends the call."""

    async def forever() -> None:
        await recover()
        await asyncio.sleep(60)

    async def work(text: str, context: ToolContext) -> None:
        await forever()

    rig = Rig([staged(work, timeout=3)])
    result = await rig.call("work", text="a")
    assert (rig.status("work"), result.message) == (
        "timed out",
        "work took longer than 3 seconds and was stopped.",
    )
    clock = virtual_clock()
    rig = rig_for(forever, clock=clock, deadline=Deadline.after(3, clock=clock))
    with pytest.raises(PromptEvaluationError) as raised:
        await rig.call("work", text="a")
    assert raised.value.phase == "deadline"
    assert task_count() == 0


async def test_a_policy_recovers_as_well() -> None:
    """A policy, like a handler, may recover from a failed task group."""

    class Careful:
        name = "careful"

        async def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            await recover()
            return PolicyDecision.allow()

        def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None: ...

    async def work(text: str, context: ToolContext) -> str:
        return text

    rig = Rig([staged(work)], policies=[Careful()])
    assert (await rig.call("work", text="a")).value == "a"
    assert task_count() == 0
