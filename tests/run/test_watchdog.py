"""The watchdog of a call cancels a handler that stops sending the heartbeats that it promised."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from handrail import MemoryFilesystem, Tool, ToolContext, ToolResult, UserContext, open_gate, tool
from handrail.errors import ToolDefinitionError
from handrail.events import ToolInvoked
from handrail.run.gate import Gate
from handrail.session import Session
from handrail.testing import Person, VirtualClock, run_virtual
from support.cards import Deck, Offer, Pick, card_game

pytestmark = pytest.mark.virtual_time

Body = Callable[[ToolContext], Awaitable[None]]


def working(body: Body, name: str = "work", **options: Any) -> Tool[None, str]:
    async def handler(params: None, *, context: ToolContext) -> ToolResult[str]:
        await body(context)
        return ToolResult.ok("worked")

    return Tool(name, "Works.", handler, effect="read", heartbeat=30, **options)


async def beats(context: ToolContext, times: int = 5) -> None:
    for _ in range(times):
        await asyncio.sleep(29)
        context.beat()


async def falls_silent(context: ToolContext) -> None:
    await beats(context, 2)
    await asyncio.Event().wait()


async def never_beats(context: ToolContext) -> None:
    await asyncio.Event().wait()


def run(body: Body, **options: Any) -> tuple[ToolResult[Any], str, float]:
    """Call a tool in virtual time, and return its result, its status and how long it took."""
    ended: list[ToolInvoked] = []
    results: list[ToolResult[Any]] = []

    async def main() -> None:
        session = Session()
        session.dispatcher.subscribe(ToolInvoked, ended.append)
        gate = open_gate([working(body, **options)], session=session, clock=VirtualClock())
        results.append(await gate.invoke("work"))

    run_virtual(main)
    return results[0], ended[0].status, ended[0].seconds


def test_a_handler_that_beats_may_take_as_long_as_it_likes() -> None:
    result, status, seconds = run(beats)
    assert (result.value, status, round(seconds)) == ("worked", "ok", 145)


@pytest.mark.parametrize(("body", "after"), [(never_beats, 30), (falls_silent, 88)])
def test_a_handler_that_stops_beating_is_cancelled(body: Body, after: int) -> None:
    result, status, seconds = run(body)
    assert (status, round(seconds)) == ("timed out", after)
    assert result.message.startswith("work was stopped: it promised a heartbeat every 30 seconds")


def test_the_timeout_still_applies_to_a_handler_that_beats() -> None:
    result, status, seconds = run(beats, timeout=100)
    assert (status, round(seconds)) == ("timed out", 100)
    assert "took longer than 100 seconds" in result.message


def test_both_limits_at_the_same_moment_end_the_call_once() -> None:
    _, status, seconds = run(never_beats, timeout=30)
    assert (status, round(seconds)) == ("timed out", 30)


async def test_what_its_siblings_do_does_not_count() -> None:
    """A silent call is cancelled even if another call in the same run sends heartbeats. The other call succeeds."""
    tools = [working(beats, "lively"), working(never_beats, "silent")]
    gate = open_gate(tools, clock=VirtualClock())
    lively, silent = await asyncio.gather(gate.invoke("lively"), gate.invoke("silent"))
    assert (lively.success, silent.success) == (True, False)


async def test_a_cancellation_at_the_same_moment_wins() -> None:

    gate: Gate = open_gate([working(never_beats)], clock=VirtualClock())
    calling = asyncio.ensure_future(gate.invoke("work"))
    asyncio.get_running_loop().call_later(30, calling.cancel)
    with pytest.raises(asyncio.CancelledError):
        await calling


async def test_the_watchdog_pauses_while_a_person_decides() -> None:
    @tool(effect="read", heartbeat=30)
    async def work(context: UserContext) -> str:
        """Ask, then go on for a while."""
        await asyncio.sleep(20)
        answer = await context.wait_for("name", {}, str)
        await asyncio.sleep(20)
        return answer

    gate = open_gate([work], environment=Person(answers={"name": "Ada"}, after=1000), clock=VirtualClock())
    assert (await gate.invoke("work")).unwrap() == "Ada"


async def test_an_act_beats_for_its_handoff() -> None:
    async def end(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
        await beats(context)
        return ToolResult.ok("ended")

    async def client(offer: Offer, *, context: ToolContext) -> Pick:
        return Pick(0)

    game = card_game(client=client, after=end, heartbeat=30, effect="idempotent")
    gate = open_gate([game], filesystem=MemoryFilesystem(), clock=VirtualClock())
    assert (await gate.invoke("pick_card", {"cards": 1})).unwrap() == "ended"


@pytest.mark.parametrize("seconds", [0, -1, True, float("inf"), float("nan"), "30"])
def test_a_wrong_heartbeat_is_refused(seconds: Any) -> None:
    with pytest.raises(ToolDefinitionError, match="heartbeat is"):
        Tool("work", "Works.", params=None, result=str, heartbeat=seconds)
