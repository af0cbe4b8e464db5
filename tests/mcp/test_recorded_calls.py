"""Calls by MCP clients are recorded as runs. Each question can be answered once, even days later and after a restart."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mcp_types import ElicitResult

from handrail import (
    Adapter,
    CapabilityPolicy,
    Handoff,
    Parked,
    Prompt,
    ScriptedModel,
    ToolContext,
    ToolResult,
    UserContext,
    tool,
)
from handrail.clock import SystemClock
from handrail.journal.sqlite import MemoryJournal, SqliteJournal
from handrail.mcp import ToolServer
from handrail.mcp.calls import PARK_AFTER, CallUnknown, LiveCall
from mcp import Client, MCPError


@dataclass
class Log:
    """The actions of a test's handlers, and the stock that they show."""

    lines: list[str] = field(default_factory=list)
    stock: int = 7


@pytest.fixture
def log() -> Log:
    return Log()


def prompt_of(log: Log) -> Prompt[Any]:
    """Return a prompt whose tools log what they do."""

    @tool(effect="read")
    async def order(product: str, *, context: UserContext) -> str:
        """Order a product."""
        log.lines.append("order")
        size = await context.wait_for("size", {"product": product, "stock": log.stock}, int)
        colour = await context.wait_for("colour", {}, str)
        return f"{product} {size} {colour}"

    @tool
    async def ship(*, context: UserContext) -> str:
        """Ship something."""
        log.lines.append("ship")
        return await context.wait_for("address", {}, str)

    @tool(capabilities={"money"})
    def pay(amount: int) -> str:
        """Pay an amount."""
        log.lines.append(f"pay {amount}")
        return f"paid {amount}"

    return Prompt("shop", "Sell.", tools=[order, ship, pay], policies=[CapabilityPolicy({"money": "ask"})])


class Hands(SystemClock):
    """A clock that a test can set forward."""

    by = timedelta()

    def now(self) -> datetime:
        return super().now() + self.by


class Restarts:
    """A server whose process can end and start again, with a client."""

    def __init__(
        self, log: Log, journal: SqliteJournal, prompt: Prompt[Any] | None = None, **options: Any
    ) -> None:
        self.journal = journal
        self.answers: ElicitResult | None = None
        self._prompt = prompt or prompt_of(log)
        self._options = options

    @asynccontextmanager
    async def process(self, mode: Any = "2026-07-28") -> AsyncGenerator[Any]:
        """Serve as a new process would. Calls in progress are parked when the block ends."""
        self.server = server = ToolServer(self._prompt, journal=self.journal, **self._options)

        async def answer(context: Any, params: Any) -> ElicitResult:
            assert self.answers is not None, "the client was asked, but the test gives the answers"
            return self.answers

        async with Client(server.server, mode=mode, elicitation_callback=answer) as client:
            yield client.session
        await server.calls.stop()


def accept(asked: Any, **content: Any) -> dict[str, Any]:
    """Return the arguments of a call that answers the one question that was asked."""
    [id] = asked.input_requests
    return {
        "input_responses": {id: ElicitResult(action="accept", content=content)},
        "request_state": asked.request_state,
        "allow_input_required": True,
    }


def text(result: Any) -> str:
    return result.content[0].text


async def test_an_answer_is_refused_while_another_process_executes_the_call(log: Log, tmp_path: Path) -> None:
    journals = [SqliteJournal(tmp_path / "runs.db", watch=None) for _ in range(2)]
    first, second = (Restarts(log, each) for each in journals)
    async with first.process() as ours, second.process() as theirs:
        asked = await ours.call_tool("order", {"product": "shirt"}, allow_input_required=True)
        with pytest.raises(MCPError, match="a different server process is executing this call"):
            await theirs.call_tool("order", {"product": "shirt"}, **accept(asked, size=4))
    for each in journals:
        each.close()


async def test_questions_survive_restarts(log: Log) -> None:
    """Each answer may reach a new process. A handler that may run again is entered again with its recorded answers.

    A second answer to the same question changes nothing.
    """
    server = Restarts(log, MemoryJournal())
    given = {"product": "shirt"}
    async with server.process() as session:
        first: Any = await session.call_tool("order", given, allow_input_required=True)
    async with server.process() as session:
        second: Any = await session.call_tool("order", given, **accept(first, value=4))
    assert "colour" in next(iter(second.input_requests.values())).params.message
    async with server.process() as session:
        last = await session.call_tool("order", given, **accept(second, value="red"))
        again = await session.call_tool("order", given, **accept(second, value="blue"))
    assert text(last) == text(again) == "shirt 4 red"
    assert log.lines == ["order"] * 3
    [row] = await server.journal.runs.list()
    assert (row.status, row.record.prompt, row.record.principal) == ("done", "shop", "local")


async def test_an_irreversible_handler_that_asked_ends_as_unknown(log: Log) -> None:
    """The outcome of a handler that is not run again is unknown after a restart, and the client is told so."""
    server = Restarts(log, MemoryJournal())
    async with server.process() as session:
        approval: Any = await session.call_tool("ship", {}, allow_input_required=True)
        asked: Any = await session.call_tool("ship", {}, **accept(approval, approved=True))
    async with server.process() as session:
        found = await session.call_tool("ship", {}, **accept(asked, value="here"))
    assert found.is_error
    assert "unknown" in text(found)
    assert log.lines == ["ship"]


@pytest.mark.parametrize("approved", [True, False])
async def test_an_approval_survives_a_restart(log: Log, approved: bool) -> None:
    """An approval that reaches a new process decides on exactly the call that was shown, once."""
    server = Restarts(log, MemoryJournal())
    async with server.process() as session:
        asked: Any = await session.call_tool("pay", {"amount": 5}, allow_input_required=True)
        assert "amount: 5" in next(iter(asked.input_requests.values())).params.message
    async with server.process() as session:
        with pytest.raises(MCPError, match="Invalid or expired requestState"):
            await session.call_tool("pay", {"amount": 5000}, **accept(asked, approved=True))
        found = await session.call_tool("pay", {"amount": 5}, **accept(asked, approved=approved))
        await session.call_tool("pay", {"amount": 5}, **accept(asked, approved=True))
    assert found.is_error is not approved
    assert log.lines == (["pay 5"] if approved else [])


async def test_a_refused_answer_is_asked_for_again(log: Log) -> None:
    """An answer that does not match its schema leaves the question open, and the client is told why.

    A request without an answer leaves the question open too.
    """
    server = Restarts(log, MemoryJournal())
    given = {"product": "shirt"}
    async with server.process() as session:
        first: Any = await session.call_tool("order", given, allow_input_required=True)
        second: Any = await session.call_tool("order", given, **accept(first, value="large"))
        [asked] = second.input_requests.values()
        assert "The answer was refused" in asked.params.message
        third: Any = await session.call_tool(
            "order", given, request_state=second.request_state, allow_input_required=True
        )
        assert third.input_requests.keys() == first.input_requests.keys()
        fourth: Any = await session.call_tool("order", given, **accept(third, value=4))
    assert "colour" in next(iter(fourth.input_requests.values())).params.message
    assert log.lines == ["order"]


async def test_a_changed_question_is_asked_again(log: Log) -> None:
    """An answer counts only for the question as it was shown.

    A question that has changed since is asked again, and says so.
    """
    server = Restarts(log, MemoryJournal())
    given = {"product": "shirt"}
    async with server.process() as session:
        asked: Any = await session.call_tool("order", given, allow_input_required=True)
    log.stock = 1
    async with server.process() as session:
        again: Any = await session.call_tool("order", given, **accept(asked, value=4))
        [question] = again.input_requests.values()
        assert "has changed since" in question.params.message
        assert "stock: 1" in question.params.message
        last: Any = await session.call_tool("order", given, **accept(again, value=4))
    assert "colour" in next(iter(last.input_requests.values())).params.message


@pytest.mark.parametrize("mode", ["2026-07-28", "legacy"])
async def test_the_acts_of_a_handoff_run_once(log: Log, mode: Any) -> None:
    """Each act of a handoff runs once, even if the answer reaches a new process and the handoff is irreversible.

    A second answer changes nothing, and the client never sees the private part.
    """
    pick: Handoff[Any, Any] = Handoff("pick", "Let the person pick a card.")

    @pick.before
    def deal(params: None, *, context: ToolContext) -> Parked[dict[str, int], dict[str, int]]:
        log.lines.append("before")
        return Parked({"secret": 3}, {"cards": 5})

    @pick.after
    def settle(secret: dict[str, int], picked: int, *, context: ToolContext) -> ToolResult[str]:
        log.lines.append("after")
        return ToolResult.ok(f"{picked} of {secret['secret']}")

    server = Restarts(log, MemoryJournal(), prompt=Prompt("cards", "Play.", tools=[pick]))
    if mode == "legacy":
        server.answers = ElicitResult(action="accept", content={"value": 2})
        async with server.process(mode) as session:
            found = await session.call_tool("pick", {})
    else:
        async with server.process() as session:
            asked: Any = await session.call_tool("pick", {}, allow_input_required=True)
        [question] = asked.input_requests.values()
        assert "cards: 5" in question.params.message
        assert "secret" not in str(question)
        async with server.process() as session:
            found = await session.call_tool("pick", {}, **accept(asked, value=2))
            again = await session.call_tool("pick", {}, **accept(asked, value=4))
            assert text(again) == text(found)
    assert text(found) == "2 of 3"
    assert log.lines == ["before", "after"]


async def test_a_different_principal_can_not_answer(log: Log) -> None:
    """A call belongs to the principal who made it: nobody else can find or resume it."""
    journal = MemoryJournal()
    server = ToolServer(prompt_of(log), journal=journal)
    order = (await server.tools.all("local"))["order"]
    call = await server.calls.begin(order, {"product": "shirt"}, principal="ann", asks=True)
    assert not await call.wait()
    assert server.calls.find(call.run_id, "bob") is None
    with pytest.raises(CallUnknown):
        await server.calls.row(call.run_id, "bob")
    await server.calls.stop()
    server = ToolServer(prompt_of(log), journal=journal)
    with pytest.raises(CallUnknown):
        await server.calls.resume(call.run_id, principal="bob", asks=True)
    found = await server.calls.resume(call.run_id, principal="ann", asks=True)
    assert isinstance(found, LiveCall)
    await server.calls.stop()


async def test_a_call_that_waits_leaves_memory(log: Log) -> None:
    """A call that waits longer than `park_after` is parked, and the answer resumes it in the same process."""
    server = Restarts(log, MemoryJournal(), park_after=0.001)
    given = {"product": "shirt"}
    async with server.process() as session:
        asked: Any = await session.call_tool("order", given, allow_input_required=True)
        while {row.status for row in await server.journal.runs.list()} != {"parked"}:
            await asyncio.sleep(0)
        # With the short limit, a slow machine could park the resumed call again before it takes the answer.
        server.server.calls.park_after = PARK_AFTER
        found: Any = await session.call_tool("order", given, **accept(asked, value=1))
    assert "colour" in next(iter(found.input_requests.values())).params.message
    assert log.lines == ["order"] * 2


@pytest.mark.parametrize("parked", [False, True])
async def test_a_yes_that_comes_too_late_is_told_as_an_approval_that_timed_out(
    log: Log, parked: bool
) -> None:
    """The client gets the call's result, whether the call was in memory or parked when its approval expired."""
    clock = Hands()
    adapter = Adapter(ScriptedModel([]), approval_seconds=3600.0)
    server, found = Restarts(log, MemoryJournal(clock), adapter=adapter), cast(Any, None)
    async with server.process() as session:
        asked: Any = await session.call_tool("pay", {"amount": 3}, allow_input_required=True)
        if not parked:
            clock.by = timedelta(hours=2)
            found = await session.call_tool("pay", {"amount": 3}, **accept(asked, approved=True))
    if parked:
        clock.by = timedelta(hours=2)
        async with server.process() as session:
            found = await session.call_tool("pay", {"amount": 3}, **accept(asked, approved=True))
    assert "pay was not approved (timed out)" in text(found)
    assert log.lines == []


@pytest.mark.parametrize(("days", "works"), [(3, True), (31, False)])
async def test_an_answer_may_come_days_later(
    log: Log, monkeypatch: pytest.MonkeyPatch, days: int, works: bool
) -> None:
    """The sealed state of a call is accepted by a new process after three days, and refused after 31."""
    server = Restarts(log, MemoryJournal())
    given = {"product": "shirt"}
    async with server.process() as session:
        asked: Any = await session.call_tool("order", given, allow_input_required=True)
    later = time.time() + days * 24 * 3600
    monkeypatch.setattr("mcp.server.request_state.time", SimpleNamespace(time=lambda: later))
    async with server.process() as session:
        if not works:
            with pytest.raises(MCPError, match="Invalid or expired requestState"):
                await session.call_tool("order", given, **accept(asked, value=4))
            return
        found: Any = await session.call_tool("order", given, **accept(asked, value=4))
    assert "colour" in next(iter(found.input_requests.values())).params.message
