"""A subscription that is made through a call's context ends with that call."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest

from handrail import Deadline, ToolContext, ToolResult, TransientError, tool
from handrail.errors import ContextExpired
from handrail.events import ToolInvoked
from handrail.protocols import PolicyDecision
from handrail.run.evaluation import why_withheld
from handrail.run.place import RUN
from handrail.testing import VirtualClock
from handrail.tools import ProviderTool
from support import PATIENCE
from support.rig import Note, Rig


def listeners(rig: Rig) -> int:
    """Return how many subscriptions the session has, besides the rig's own."""
    return len(rig.session.dispatcher._listeners) - 1  # pyright: ignore[reportPrivateUsage]


def bus_of(context: ToolContext, way: str) -> Any:
    return context.event_bus if way == "event_bus" else context.session.dispatcher


@pytest.mark.parametrize("way", ["event_bus", "session.dispatcher"])
@pytest.mark.parametrize("end", ["returns", "fails", "timed out", "cancelled", "deadline", "closed"])
@pytest.mark.virtual_time
async def test_a_subscription_ends_with_its_call(way: str, end: str) -> None:
    """However a call ends, the last event that its subscription hears is the call's own end."""
    heard: list[object] = []
    waiting = asyncio.Event()

    @tool(effect="pure", timeout=5 if end == "timed out" else None)
    async def listen(context: ToolContext) -> str:
        """Subscribe to everything."""
        bus_of(context, way).subscribe(object, heard.append)
        if end == "fails":
            raise ValueError("no")
        if end != "returns":
            waiting.set()
            await asyncio.sleep(3600)
        return "heard"

    @tool(effect="pure")
    async def other() -> str:
        """Do something else."""
        return "done"

    clock = VirtualClock()
    rig = Rig([listen, other], deadline=Deadline.after(5, clock=clock) if end == "deadline" else None)
    if end == "closed":
        call = rig.gate.invoke("listen").__await__()
        next(call)
        call.close()
    else:
        calling = asyncio.ensure_future(rig.call("listen"))
        if end == "cancelled":
            await waiting.wait()
            calling.cancel()
        await asyncio.wait({calling})
        with contextlib.suppress(BaseException):
            calling.result()
    assert listeners(rig) == 0
    assert isinstance(heard[-1], ToolInvoked)
    assert heard[-1].tool == "listen"
    count = len(heard)
    with contextlib.suppress(Exception):
        await rig.call("other")
    assert len(heard) == count


@pytest.mark.virtual_time
async def test_it_ends_with_the_attempt_that_made_it() -> None:
    """A call that is tried again has the subscriptions of its newest attempt only, so each event is heard once."""
    heard: list[Any] = []
    tries = iter((True, True, False))

    @tool(effect="read")
    async def listen(context: ToolContext) -> str:
        """Subscribe, and fail twice."""
        context.event_bus.subscribe(ToolInvoked, heard.append)
        if next(tries):
            raise TransientError("not yet", retry_after=0)
        return "heard"

    rig = Rig([listen])
    assert (await rig.call("listen")).success
    assert [each.tool for each in heard] == ["listen"]
    assert listeners(rig) == 0


@pytest.mark.virtual_time
async def test_an_inner_calls_subscription_ends_before_the_outer_call() -> None:
    """The subscription of an inner call hears nothing that the outer call does afterwards."""
    heard: list[str] = []

    @tool(effect="pure")
    async def inner(context: ToolContext) -> str:
        """Subscribe."""
        context.event_bus.subscribe(Note, lambda note: heard.append(f"inner {note.text}"))
        context.emit(Note("one"))
        return "heard"

    @tool(effect="pure")
    async def outer(context: ToolContext) -> str:
        """Subscribe, let an inner call subscribe too, and emit."""
        context.event_bus.subscribe(Note, lambda note: heard.append(f"outer {note.text}"))
        await context.call("inner")
        context.emit(Note("two"))
        return "done"

    rig = Rig([inner, outer])
    assert (await rig.call("outer")).success
    assert heard == ["outer one", "inner one", "outer two"]
    assert listeners(rig) == 0


@pytest.mark.virtual_time
async def test_a_subscription_can_be_ended_earlier() -> None:
    """Subscriptions that a handler ends itself leave nothing behind, during the call or after it."""
    left: list[int] = []

    @tool(effect="pure")
    async def listen(context: ToolContext) -> str:
        """Subscribe and unsubscribe many times."""
        for _ in range(5):
            stop = context.event_bus.subscribe(Note, lambda note: None)
            stop()
            stop()
        left.append(listeners(rig))
        return "heard"

    rig = Rig([listen])
    assert (await rig.call("listen")).success
    assert left == [0]
    assert not rig.gate.run.subscriptions


async def test_a_thread_that_outlives_its_call_can_not_subscribe() -> None:
    """A thread that subscribes after its call is over is refused, and no subscription is left."""
    proceed, over = threading.Event(), threading.Event()
    refused: list[str] = []

    @tool(effect="pure", timeout=0.05)
    def listen(context: ToolContext) -> str:
        """Subscribe too late."""
        bus = context.event_bus
        proceed.wait(PATIENCE)
        try:
            bus.subscribe(Note, lambda note: None)
        except ContextExpired as error:
            refused.append(str(error))
        over.set()
        return "heard"

    rig = Rig([listen])
    assert not (await rig.call("listen")).success
    proceed.set()
    assert await asyncio.to_thread(over.wait, PATIENCE)
    assert len(refused) == 1
    assert listeners(rig) == 0


@pytest.mark.parametrize("offered", [False, True])
@pytest.mark.virtual_time
async def test_a_policys_subscription_ends_with_the_call_it_checks(offered: bool) -> None:
    """What a policy subscribes to while it checks a call, or the offer of a provider's tool, ends with that."""
    heard: list[Any] = []

    class Listens:
        name = "listens"

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            context.event_bus.subscribe(ToolInvoked, heard.append)
            return PolicyDecision.deny("no")

        def on_result(
            self, tool: Any, params: Any, result: ToolResult[Any], *, context: ToolContext
        ) -> None: ...

    @tool(effect="pure")
    async def work() -> str:
        """Work."""
        return "done"

    rig = Rig([work], policies=[Listens()])
    if offered:
        await why_withheld(rig.gate, ProviderTool("web_search"), RUN.child(1))
    else:
        await rig.call("work")
        assert [each.status for each in heard] == ["denied"]
    assert listeners(rig) == 0
