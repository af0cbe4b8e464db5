"""Events that tools emit: what they carry, and who hears them."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from handrail import (
    Handoff,
    ScriptedModel,
    Session,
    ToolContext,
    WorkerRegistry,
    gather,
    open_gate,
    run_as_agent,
    tool,
)
from handrail.cli.activity import Activity
from handrail.clock import SYSTEM_CLOCK
from handrail.concurrency.user_code import Callback
from handrail.events import Emitted, Fact, Progress, ToolStarted
from handrail.serve.agui.translator import Translator
from handrail.testing import RecordingSubscriber


@dataclass(frozen=True)
class Found:
    """A tool's own event."""

    what: str


@tool(effect="read")
async def search(topic: str, context: ToolContext) -> str:
    """Search for a topic."""
    context.emit(Found(topic))
    await asyncio.sleep(0)
    context.emit(Found(topic.upper()))
    return topic


def asking() -> Handoff[None, str]:
    """Make a handoff whose client emits an event and reports progress."""
    made = Handoff("ask", "Ask.", answer=str, effect="read")

    @made.client
    async def answer(public: None, *, context: ToolContext) -> str:
        context.emit(Found("in an act"))
        context.report_progress("half", done=1, total=2)
        return "done"

    return made


async def test_an_act_emits_under_the_call_and_the_name_of_its_handoff() -> None:
    """An act's events and progress carry the id of the handoff's call and the handoff's own name."""
    session = Session()
    heard = RecordingSubscriber(session)
    await open_gate([asking()], session=session).invoke("ask")
    outer = heard.of(ToolStarted)[0].call_id
    [emitted], [progress] = heard.of(Emitted), heard.of(Progress)
    assert (emitted.call_id, emitted.tool, emitted.event) == (outer, "ask", Found("in an act"))
    assert (progress.call_id, progress.tool) == (outer, "ask")
    names = list[str]()
    alone = Session()
    alone.dispatcher.subscribe(Emitted, lambda each: names.append(each.tool))
    assert await run_as_agent(asking(), None, model=ScriptedModel([]), session=alone) == "done"
    assert names == ["ask"]


async def test_a_listener_to_a_tools_own_type_hears_its_events_once() -> None:
    """Listeners to an emitted event's own type hear it once, even if one of them fails. Listeners to `Emitted` hear the wrapper."""
    session, heard = Session(), list[tuple[str, object]]()

    def listen(name: str, kind: type[Any]) -> None:
        session.dispatcher.subscribe(kind, lambda event: heard.append((name, event)))

    for name, kind in {"own": Found, "emitted": Emitted, "fact": Fact, "other": Path}.items():
        listen(name, kind)

    def fails(event: Found) -> None:
        raise ValueError("a listener failed")

    session.dispatcher.subscribe(Found, fails)
    listen("last", Found)
    await open_gate([search], session=session).invoke("search", {"topic": "tea"})
    heard = [(name, event) for name, event in heard if isinstance(event, (Found, Emitted))]
    one = [name for name, event in heard if "tea" in str(event)]
    assert one == ["emitted", "fact", "own", "last"]
    assert [event for name, event in heard if name == "own"] == [Found("tea"), Found("TEA")]


async def test_two_agents_that_emit_at_once_are_told_apart() -> None:
    """Events that parallel calls emit can be told apart, in AG-UI by their call ids and in the terminal by a number."""
    session = Session()
    heard = RecordingSubscriber(session)

    @tool(effect="read")
    async def research(context: ToolContext) -> str:
        """Make two searches at once."""
        both = (context.call("search", topic="tea"), context.call("search", topic="rum"))
        return str([each.value for each in await gather(*both)])

    await open_gate([research, search], session=session).invoke("research")
    emitted = heard.of(Emitted)
    assert [each.event for each in emitted] == [Found(one) for one in ("tea", "rum", "TEA", "RUM")]
    ids = {each.call_id for each in emitted}
    assert len(ids) == 2
    assert {each.call_id for each in heard.of(ToolStarted) if each.tool == "search"} == ids

    activity = Activity(SYSTEM_CLOCK)
    lines = [line.plain.strip() for event in heard.events for line in activity.update(event)]
    shown = [line for line in lines if "Found" in line]
    assert shown == [
        f"· research › search #{number} Found what={what}"
        for number, what in [(1, "tea"), (2, "rum"), (1, "TEA"), (2, "RUM")]
    ]

    translator = Translator("thread", emitted[0].run_context.run_id)
    translator.begin_leg("leg")
    told = [each for event in heard.events for each in translator.take(event)]
    custom = [event for event in map(_decoded, told) if event.get("name") == "search"]
    assert [(each["value"]["call_id"], each["value"]["type"], each["value"]["event"]) for each in custom] == [
        (each.call_id, "Found", dataclasses.asdict(cast(Found, each.event))) for each in emitted
    ]


def _decoded(event: Any) -> dict[str, Any]:
    return event.data


async def test_an_async_on_emit_is_awaited_in_order() -> None:
    """An async `on_emit` is awaited for one event after another, before `run_as_agent` returns."""
    done = list[str]()

    async def on_emit(event: object) -> None:
        assert isinstance(event, Found)
        for _ in range(3 - len(done)):  # the first takes longest
            await asyncio.sleep(0)
        done.append(event.what)

    made = Handoff("ask", "Ask.", answer=str, effect="read")

    @made.client
    def answer(public: None, *, context: ToolContext) -> str:  # a sync client runs in a thread
        for what in ("one", "two", "three"):
            context.emit(Found(what))
        return "done"

    assert await run_as_agent(made, None, model=ScriptedModel([]), on_emit=on_emit) == "done"
    assert done == ["one", "two", "three"]


async def test_an_async_message_callback_is_awaited(tmp_path: Path) -> None:
    """An async `message_callback` is awaited before a worker's run returns."""
    (tmp_path / "greeter.md").write_text("---\nname: greeter\ndescription: Greets.\n---\nGreet.\n")
    done = list[str]()

    async def hear(message: Any) -> None:
        await asyncio.sleep(0)
        done.append(message.message.text)

    registry = WorkerRegistry(tmp_path)
    await registry.run("greeter", "Ada", model=ScriptedModel(["Hello, Ada."]), message_callback=hear)
    assert done[-1] == "Hello, Ada."


@pytest.mark.parametrize("error", [ValueError("no"), GeneratorExit("no")])
async def test_a_callback_that_fails_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """Errors in sync and async callbacks are logged, and later values still arrive. `GeneratorExit` is an error like any other."""
    done = list[int]()

    async def later(value: int) -> None:
        await asyncio.sleep(0)
        if value == 1:
            raise error
        done.append(value)

    def tell(value: int) -> Any:
        if value == 3:
            raise error
        return later(value)

    callback = Callback(tell, "tell")
    for value in range(5):
        callback(value)
    await callback.finish()
    assert done == [0, 2, 4]
    assert [each.getMessage() for each in caplog.records] == ["tell raised; the run goes on"] * 2


async def test_a_cancelled_finish_drops_what_is_left() -> None:
    """If the wait for a callback is cancelled, so is the callback, and nothing is left unawaited."""
    began, ended = asyncio.Event(), list[str]()

    async def forever(value: int) -> None:
        began.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("cancelled")

    callback = Callback(forever, "forever")
    callback(1)
    callback(2)
    finishing = asyncio.ensure_future(callback.finish())
    await began.wait()
    finishing.cancel()
    await asyncio.wait({finishing})
    await asyncio.sleep(0)
    assert (finishing.cancelled(), ended) == (True, ["cancelled"])
