"""The failure table: the ways in which a call can fail. Most tests also check that session and files are rolled back."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import pytest

from handrail import Deadline, ToolContext, ToolResult, tool
from handrail.errors import (
    BudgetExceededError,
    DeadlineExceededError,
    Declined,
    PromptEvaluationError,
    QuestionTimedOut,
    ToolValidationError,
    VisibilityExpansionRequired,
)
from handrail.events import ToolInvoked
from handrail.protocols import PolicyDecision
from handrail.run.call import ToolCall, run_turn
from handrail.run.limits import Budget
from handrail.session import Session
from handrail.testing import run_virtual
from support.rig import Note, Rig, leave_traces, staged

Body = Callable[[str, ToolContext], Coroutine[Any, Any, Any]]


def raises(error: Callable[[], BaseException]) -> Body:
    async def body(text: str, context: ToolContext) -> Any:
        raise error()

    return body


async def sleeps(text: str, context: ToolContext) -> Any:
    await asyncio.sleep(60)


async def calls_wrongly(text: str, context: ToolContext) -> Any:
    def one(value: int) -> int:
        return value

    return one()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]  # the handler's own mistake


async def returns_failure(text: str, context: ToolContext) -> ToolResult[Any]:
    return ToolResult.error("the printer is on fire", {"floor": 3})


async def swallows_timeout(text: str, context: ToolContext) -> str:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    return "as if nothing had happened"


ROWS: list[tuple[str, Body, dict[str, Any], str, str]] = [
    (
        "validation error",
        raises(lambda: ToolValidationError("from is after to")),
        {},
        "invalid",
        "from is after to",
    ),
    ("type error of its own", calls_wrongly, {}, "error", "work failed: TypeError"),
    (
        "child run's evaluation error",
        raises(lambda: PromptEvaluationError("x", run_id="child")),
        {},
        "error",
        "x",
    ),
    (
        "child's deadline",
        raises(lambda: DeadlineExceededError(datetime(2020, 1, 1, tzinfo=UTC), "it ended")),
        {},
        "error",
        "the deadline 2020-01-01",
    ),
    (
        "child's budget share",
        raises(lambda: BudgetExceededError("tokens", 9, 1, of_root=False)),
        {},
        "error",
        "share of the budget for tokens is too low",
    ),
    ("declined question", raises(lambda: Declined("pick", "not today")), {}, "error", "declined: not today"),
    ("unanswered question", raises(lambda: QuestionTimedOut("pick")), {}, "error", "nobody answered in time"),
    ("timeout", sleeps, {"timeout": 5}, "timed out", "took longer than 5 seconds"),
    ("swallowed timeout", swallows_timeout, {"timeout": 5}, "timed out", "took longer than 5 seconds"),
    ("cancels itself", raises(asyncio.CancelledError), {}, "error", "it cancelled itself"),
    ("anything else", raises(lambda: RuntimeError("disk full\nTraceback: secret")), {}, "error", "disk full"),
    ("failure returned", returns_failure, {}, "error", "the printer is on fire"),
]


@pytest.mark.parametrize(
    ("body", "options", "status", "words"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
@pytest.mark.virtual_time
async def test_failed_result_and_rollback(
    body: Body, options: dict[str, Any], status: str, words: str
) -> None:
    """A failed call is rolled back entirely and reported to the model, and the run continues."""
    rig = Rig([staged(body, **options)])
    result = await rig.call("work", text="a")
    assert not result.success
    assert words in result.message
    assert "Traceback" not in result.message
    assert rig.status("work") == status
    assert len(rig.rolled_back("work")) == 1
    rig.assert_untouched()
    rig.assert_paired()
    assert (await rig.call("work", text="b")).success is False  # the gate still accepts calls


async def test_failed_sync_handler_is_rolled_back() -> None:
    """A call whose sync handler fails on its thread is rolled back."""

    @tool(effect="staged")
    def work(text: str, context: ToolContext) -> None:
        """Leave traces and fail."""
        leave_traces(context, text)
        raise OSError("no space left")

    rig = Rig([work])
    result = await rig.call("work", text="a")
    assert "OSError: no space left" in result.message
    rig.assert_untouched()
    rig.assert_paired()


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("work", '{"text": 3}', "text: must be text, got the number 3"),
        ("work", '{"text": "a", "colour": 1}', "colour: unknown"),
        ("work", "{", "not valid JSON"),
        ("wrok", "{}", "Did you mean work?"),
        ("zzz", "{}", "Available tools: work"),
    ],
)
@pytest.mark.virtual_time
async def test_bad_call_says_what_to_fix(name: str, arguments: str, words: str) -> None:
    """Invalid arguments and unknown tools give failed results that say what to fix, and no handler runs."""
    rig = Rig([staged(sleeps)])
    result = await rig.gate.invoke(name, arguments)
    assert not result.success
    assert words in result.message
    assert rig.of(ToolInvoked)[0].status == "invalid"
    rig.assert_untouched()
    rig.assert_paired()


@pytest.mark.virtual_time
async def test_a_wrong_signature_is_distinguished_from_the_handlers_own_type_error() -> None:
    """A call whose handler does not take `context` is `invalid`, and the message says that the tool can't be called."""
    fine = staged(sleeps)

    async def handler(params: Any) -> ToolResult[Any]:
        return ToolResult.ok(1)

    object.__setattr__(fine, "handler", handler)  # as if the module had been edited meanwhile
    rig = Rig([fine])
    result = await rig.call("work", text="a")
    assert "can't be called" in result.message
    assert "unexpected keyword argument 'context'" in result.message
    assert rig.status("work") == "invalid"


@pytest.mark.parametrize(
    "error",
    [
        lambda: VisibilityExpansionRequired(["docs"]),
        lambda: PromptEvaluationError("the model is gone"),
        lambda: KeyboardInterrupt(),
        lambda: SystemExit(3),
    ],
    ids=["visibility", "evaluation", "keyboard", "exit"],
)
def test_what_concerns_the_run_is_raised_and_siblings_get_their_results(
    error: Callable[[], BaseException],
) -> None:
    """An exception that ends the run cancels and rolls back the sibling calls, and every call has a result.

    `KeyboardInterrupt` and `SystemExit` end the event loop too.
    """

    async def stops(text: str, context: ToolContext) -> Any:
        if text == "stop":
            await asyncio.sleep(1)
            raise error()
        await asyncio.sleep(60)

    async def main() -> tuple[Any, int]:
        rig = Rig([staged(stops)])
        calls = [ToolCall("work", {"text": text}) for text in ("a", "stop", "b")]
        turn = await run_turn(rig.gate, calls)
        assert [result.success for result in turn.results] == [False] * 3
        assert sorted(event.status for event in rig.of(ToolInvoked)) == ["cancelled", "cancelled", "error"]
        rig.assert_untouched()
        rig.assert_paired()
        return type(turn.ending), len(turn.results)

    expected = type(error())
    if issubclass(expected, Exception):
        assert run_virtual(main) == (expected, 3)
    else:
        with pytest.raises(expected):  # the event loop itself raises these
            run_virtual(main)


@pytest.mark.virtual_time
async def test_spent_deadline_ends_the_run() -> None:
    """If the run's deadline passes before or during a call, the run ends with a `PromptEvaluationError`."""
    rig = Rig([staged(sleeps)])
    clock = rig.gate.run.clock
    rig = Rig([staged(sleeps)], deadline=Deadline.after(10, clock=clock))
    with pytest.raises(PromptEvaluationError) as during:
        await rig.call("work", text="a")
    assert during.value.phase == "deadline"
    with pytest.raises(PromptEvaluationError, match="could run"):
        await rig.call("work", text="b")
    assert [event.status for event in rig.of(ToolInvoked)] == ["timed out", "timed out"]
    rig.assert_untouched()
    rig.assert_paired()


@pytest.mark.virtual_time
async def test_spent_root_budget_ends_the_run() -> None:
    """A call beyond the root budget does not run, and ends the run."""

    async def fine(text: str, context: ToolContext) -> str:
        return text

    rig = Rig([staged(fine)], budget=Budget(tool_calls=1))
    assert (await rig.call("work", text="a")).success
    with pytest.raises(PromptEvaluationError) as error:
        await rig.call("work", text="b")
    assert error.value.phase == "budget"
    assert rig.notes == ["a"]
    rig.assert_paired()


class Denies:
    """A policy that denies the call in `check`, or raises in `check` or `on_result`, depending on `where`."""

    name = "denies"

    def __init__(self, where: str) -> None:
        self.where = where

    def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
        if self.where == "check raises":
            raise RuntimeError("broken")
        return PolicyDecision.deny("not on a Sunday") if self.where == "check" else PolicyDecision.allow()

    def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
        if self.where == "on_result raises":
            raise RuntimeError("too large")


@pytest.mark.parametrize(
    ("where", "words"),
    [("check", "not on a Sunday"), ("check raises", "could not decide"), ("on_result raises", "too large")],
)
@pytest.mark.virtual_time
async def test_policy_denies(where: str, words: str) -> None:
    """If a policy denies a call, or raises in `check` or `on_result`, the call is denied and changes nothing."""

    async def fine(text: str, context: ToolContext) -> str:
        return text

    rig = Rig([staged(fine)], policies=[Denies(where)])
    result = await rig.call("work", text="a")
    assert words in result.message
    assert rig.status("work") == "denied"
    rig.assert_untouched()
    rig.assert_paired()


@pytest.mark.virtual_time
async def test_conflict_names_the_path() -> None:
    """If two calls write the same file, the later commit fails with a conflict, and the model is told the path."""
    both = asyncio.Event

    started = both()

    @tool(effect="irreversible")
    async def write(text: str, context: ToolContext) -> None:
        """Write one file."""
        context.session.dispatch(Note(text))
        context.filesystem.write("shared.txt", text)
        started.set() if text == "b" else await started.wait()

    rig = Rig([write])
    turn = await run_turn(rig.gate, [ToolCall("write", {"text": "a"}), ToolCall("write", {"text": "b"})])
    ended = {event.params.text: event.status for event in rig.of(ToolInvoked)}
    assert sorted(ended.values()) == ["conflict", "ok"]
    (lost,) = [result for result in turn.results if not result.success]
    assert "shared.txt" in lost.message
    winner = next(text for text, status in ended.items() if status == "ok")
    assert rig.files.read("shared.txt") == winner
    assert rig.notes == [winner]
    rig.assert_paired()


@pytest.mark.virtual_time
async def test_reducer_that_raises_fails_the_call() -> None:
    """A reducer's error is raised in the handler. If the handler does not catch it, the call fails and is rolled back."""

    def refuse(contents: Any, event: Note) -> Any:
        raise ValueError("no notes today")

    session = Session(id="s")
    session.register(Note, on=Note, reducer=refuse)

    @tool(effect="staged")
    async def work(text: str, context: ToolContext) -> None:
        """Write, then dispatch."""
        context.filesystem.write("a.txt", text)
        context.session.dispatch(Note(text))

    rig = Rig([work], session=session)
    result = await rig.call("work", text="a")
    assert "no notes today" in result.message
    rig.assert_untouched()


@pytest.mark.virtual_time
async def test_error_has_its_traceback_for_telemetry() -> None:
    """Listeners get the exception with its traceback, but the message to the model is short."""
    rig = Rig([staged(raises(lambda: RuntimeError("x" * 1000)))])
    lines: list[str] = []
    rig.session.dispatcher.subscribe(
        ToolInvoked, lambda event: lines.extend(traceback.format_exception(event.error))
    )
    result = await rig.call("work", text="a")
    assert len(result.message) < 400
    (ended,) = rig.of(ToolInvoked)
    assert isinstance(ended.error, RuntimeError)
    assert any("raise error()" in line for line in lines)
