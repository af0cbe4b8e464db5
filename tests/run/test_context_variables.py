"""Context variables: what a call's policies, handler and listeners set stays in the call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextvars import ContextVar, Token
from typing import Any

import aiohttp
import anyio
import pytest
import sniffio
from hypothesis import given
from hypothesis import strategies as st

from handrail import ToolContext, TransientError, tool
from handrail.concurrency.user_code import isolated
from handrail.events import ToolInvoked, ToolStarted
from handrail.protocols import PolicyDecision
from handrail.run.call import ToolCall, run_turn
from support import PATIENCE
from support.rig import Rig

who: ContextVar[str] = ContextVar("who", default="nobody")


@tool(effect="pure")
async def at_once(name: str, context: ToolContext) -> str:
    """Set the variable and return without waiting."""
    before = who.get()
    who.set(name)
    return before


@tool(effect="pure")
async def after_waits(name: str, context: ToolContext) -> str:
    """Set the variable between waits, and expect it to hold across them."""
    before = who.get()
    await asyncio.sleep(0)
    who.set(name)
    await asyncio.sleep(1)
    assert who.get() == name
    who.set(f"{name} again")
    async with asyncio.TaskGroup() as group:
        child = group.create_task(anyio.to_thread.run_sync(who.get))
    assert child.result() == f"{name} again"
    return before


@tool(effect="pure")
def in_a_thread(name: str, context: ToolContext) -> str:
    """Set the variable on a thread."""
    before = who.get()
    who.set(name)
    return before


@tool(effect="pure")
async def fails(name: str, context: ToolContext) -> str:
    """Set the variable and raise."""
    who.set(name)
    await asyncio.sleep(0)
    raise ValueError(who.get())


@tool(effect="read")
async def retried(name: str, context: ToolContext) -> str:
    """Set the variable and fail once."""
    before = who.get()
    who.set(name)
    if context.invocation.attempt == 1:
        raise TransientError("busy", retry_after=1)
    return "nobody" if before == name else before  # a retry may see what the first attempt set


@tool(effect="pure")
async def outer(name: str, context: ToolContext) -> str:
    """Set the variable, then call other tools, which see it and can't change it."""
    before = who.get()
    who.set(name)
    for inner in ("at_once", "in_a_thread", "after_waits"):
        result = await context.call(inner, name="inner")
        assert result.value == name
        assert who.get() == name
    return before


TOOLS = {each.name: each for each in (at_once, after_waits, in_a_thread, fails, retried, outer)}


class SetsVariables:
    """A policy that sets a variable in both of its methods, with or without waiting."""

    name = "sets"

    def __init__(self, waits: bool) -> None:
        self.waits = waits

    def check(self, tool: Any, params: Any, *, context: ToolContext) -> Any:
        if self.waits:
            return self._later(PolicyDecision.allow())
        policy_var.set("policy")
        return PolicyDecision.allow()

    def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> Any:
        policy_var.set("policy")
        return self._later(None) if self.waits else None

    async def _later(self, value: Any) -> Any:
        await asyncio.sleep(0)
        policy_var.set("policy")
        return value


policy_var: ContextVar[str] = ContextVar("policy_var", default="nobody")


@given(
    turns=st.lists(st.lists(st.sampled_from(sorted(TOOLS)), min_size=1, max_size=3), min_size=1, max_size=3),
    policy=st.none() | st.booleans(),
)
@pytest.mark.virtual_time
async def test_what_a_call_sets_stays_in_it(turns: list[list[str]], policy: bool | None) -> None:
    """No call sees variables that an earlier or a concurrent call set, whether the calls wait or not, succeed or fail."""
    rig = Rig(TOOLS.values(), policies=[] if policy is None else [SetsVariables(policy)])
    for names in turns:
        calls = [ToolCall(name, {"name": f"set by {name}"}) for name in names]
        turn = await run_turn(rig.gate, calls)
        assert turn.ending is None
        for name, result in zip(names, turn.results, strict=True):
            assert result.success is (name != "fails"), result.message
            assert name == "fails" or result.value == "nobody"
        assert (who.get(), policy_var.get()) == ("nobody", "nobody")
    rig.assert_paired()


@pytest.mark.virtual_time
async def test_a_handler_sees_what_its_caller_and_a_listener_set() -> None:
    """A handler sees variables that its caller or a listener set, and the listener can reset its own when the call ends."""
    rig = Rig([at_once, after_waits])
    tokens: dict[str, Token[str]] = {}

    def start(event: ToolStarted) -> None:
        tokens[event.call_id] = who.set(f"span of {event.call_id}")

    with contextlib.ExitStack() as stack:
        stack.callback(rig.session.dispatcher.subscribe(ToolStarted, start))
        for name in ("at_once", "after_waits"):
            result = await rig.call(name, name="other")
            assert result.value.startswith("span of ")
    assert who.get() == "nobody"
    who.set("the caller")
    assert (await rig.call("at_once", name="other")).value == "the caller"
    assert who.get() == "the caller"
    rig.session.dispatcher.subscribe(ToolStarted, start)
    rig.session.dispatcher.subscribe(ToolInvoked, lambda event: seen.append(_reset(tokens, event)))
    seen: list[str] = []
    await rig.call("at_once", name="other")
    assert seen == ["the caller"]


def _reset(tokens: dict[str, Token[str]], event: ToolInvoked) -> str:
    who.reset(tokens.pop(event.call_id))
    return who.get()


async def _asyncio_timeout() -> None:
    try:
        async with asyncio.timeout(1):
            who.set("inside")
            await asyncio.sleep(10)
    except TimeoutError:
        return
    pytest.fail("the timeout did not stop the block")


async def _anyio_timeout() -> None:
    with anyio.move_on_after(1) as scope:
        who.set("inside")
        await anyio.sleep(10)
    assert scope.cancelled_caught
    try:
        with anyio.fail_after(1):
            await anyio.sleep(10)
    except TimeoutError:
        return
    pytest.fail("the timeout did not stop the block")


async def _failing_task_group() -> None:
    async def fail() -> None:
        await asyncio.sleep(1)
        raise ValueError

    caught = 0
    try:
        async with asyncio.TaskGroup() as group:
            who.set("inside")
            group.create_task(fail())
    except* ValueError:
        caught += 1
    try:
        async with anyio.create_task_group() as other:
            who.set("inside")
            other.start_soon(fail)
    except* ValueError:
        caught += 1
    assert caught == 2


async def _async_generator() -> None:
    async def numbers() -> AsyncGenerator[int]:
        token = who.set("inside")
        for number in range(3):
            await asyncio.sleep(0)
            yield number
        who.reset(token)

    assert [number async for number in numbers()] == [0, 1, 2]
    who.set("inside")


async def _own_cancellation() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    try:
        await asyncio.sleep(1)
    except asyncio.CancelledError:
        task.uncancel()
    who.set("inside")


@pytest.mark.parametrize(
    "body", [_asyncio_timeout, _anyio_timeout, _failing_task_group, _async_generator, _own_cancellation]
)
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.virtual_time
async def test_timeouts_groups_and_cancellations_work_in_a_call(body: Any, depth: int) -> None:
    """The handler runs in its caller's task, so timeouts, task groups and cancellation work as they do outside a call."""
    tasks: set[Any] = set()

    @tool(effect="pure")
    async def work(depth: int, context: ToolContext) -> str:
        """Run the body at this depth."""
        tasks.add(asyncio.current_task())
        if depth:
            assert (await context.call("work", depth=depth - 1)).success
            return "fine"
        await body()
        tasks.add(asyncio.current_task())
        assert sniffio.current_async_library() == "asyncio"
        assert who.get() == "inside"
        await asyncio.sleep(0)
        return "fine"

    rig = Rig([work])
    result = await rig.call("work", depth=depth)
    assert result.success, result.message
    current = asyncio.current_task()
    assert current is not None
    assert tasks == {current}
    assert current.cancelling() == 0
    assert who.get() == "nobody"


@pytest.mark.virtual_time
async def test_cleanup_of_a_stopped_call_runs_in_its_context() -> None:
    """A cancelled, timed-out or abandoned handler cleans up with the variables that it set."""
    seen: list[str] = []

    async def work(context: ToolContext) -> str:
        """Wait until stopped."""
        token = who.set("inside")
        try:
            await asyncio.sleep(100)
        finally:
            seen.append(who.get())
            who.reset(token)
        return "fine"

    timed, waits = tool(name="timed", effect="pure", timeout=1)(work), tool(name="waits", effect="pure")(work)

    rig = Rig([timed, waits])
    assert (await rig.call("timed")).success is False
    task = asyncio.ensure_future(rig.call("waits"))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    abandoned = rig.call("waits")
    abandoned.send(None)
    abandoned.close()
    assert seen == ["inside"] * 3
    assert [event.status for event in rig.of(ToolInvoked)] == ["timed out", "cancelled", "cancelled"]
    assert who.get() == "nobody"


async def test_an_http_client_works_in_a_call() -> None:
    """An HTTP client whose timeouts depend on the current task works in a handler, and the handler's variables stay there."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nhi")
        await writer.drain()
        writer.close()

    @tool(effect="read", timeout=60)
    async def fetch(port: int, context: ToolContext) -> str:
        """Fetch a page."""
        who.set("inside")
        limit = aiohttp.ClientTimeout(total=PATIENCE)
        url = f"http://127.0.0.1:{port}/"
        async with aiohttp.ClientSession(timeout=limit) as session, session.get(url) as response:
            text = await response.text()
        return f"{text} {who.get()}"

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        rig = Rig([fetch])
        result = await rig.call("fetch", port=server.sockets[0].getsockname()[1])
    assert result.value == "hi inside"
    assert who.get() == "nobody"


async def test_isolated_returns_the_value_or_the_error() -> None:
    """`isolated` returns the value or raises the error of any awaitable. Variables that the awaitable sets stay inside it."""

    async def work(error: Exception | None) -> str:
        who.set("inside")
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return who.get()

    assert await isolated(work(None)) == "inside"
    with pytest.raises(ValueError, match="as told"):
        await isolated(work(ValueError("as told")))
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    done.set_result(3)
    assert await isolated(done) == 3
    assert who.get() == "nobody"
