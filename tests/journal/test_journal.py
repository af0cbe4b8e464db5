"""A journal in memory: steps that run once, the calls that it records, and `context.once` through the gate."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from handrail import Tool, ToolContext, ToolResult, TransientError, tool
from handrail.errors import DefinitionError
from handrail.events import ToolInvoked, ToolRolledBack
from handrail.journal.records import CommitUnit
from handrail.journal.sqlite import MemoryJournal
from handrail.run import open_gate
from handrail.session import Session
from handrail.testing import RecordingSubscriber, VirtualClock, run_virtual
from handrail.tools import Effect

pytestmark = pytest.mark.virtual_time


@dataclass(frozen=True)
class Done:
    what: str


def counting(seconds: float = 0, fail: int = 0) -> tuple[list[int], Callable[[], Awaitable[int]]]:
    """Return a list of runs, and a function that adds to it, takes some time, and fails the first `fail` times."""
    runs: list[int] = []

    async def function() -> int:
        runs.append(len(runs) + 1)
        number = runs[-1]
        await asyncio.sleep(seconds)
        if number <= fail:
            raise ValueError(f"failed {number}")
        return number

    return runs, function


# --- steps ---------------------------------------------------------------------------------------


async def test_a_step_that_succeeded_is_not_run_again():
    """For a step that has succeeded, the recorded value is returned, even with a different function. A step with a different key runs."""
    journal = MemoryJournal()
    _, function = counting()
    other, unused = counting()
    found = [
        await journal.steps.run("a", function),
        await journal.steps.run("a", unused),
        await journal.steps.run("b", function),
    ]
    assert other == []
    assert found == [1, 1, 2]


@pytest.mark.parametrize("value", [None, False, 0, ""])
async def test_a_value_that_is_nothing_is_a_value(value: Any):
    """A step that returned None or another falsy value has succeeded and is not run again."""
    runs: list[int] = []

    async def function() -> Any:
        runs.append(1)
        return value

    journal = MemoryJournal()
    await journal.steps.run("a", function)
    assert await journal.steps.run("a", function) == value
    assert runs == [1]


async def test_two_at_once_are_one():
    """If a step is started several times at once, it runs once, and every caller gets its value."""
    runs, function = counting(seconds=5)

    journal = MemoryJournal()
    assert await asyncio.gather(*(journal.steps.run("a", function) for _ in range(5))) == [1] * 5
    assert runs == [1]


def test_a_failure_lets_the_next_try():
    """If a step fails, only the caller that ran it gets the error, and a waiting caller runs it again."""
    runs, function = counting(seconds=5, fail=2)

    async def main() -> list[Any]:
        journal = MemoryJournal()
        first = await asyncio.gather(
            *(journal.steps.run("a", function) for _ in range(4)), return_exceptions=True
        )
        return [*first, await journal.steps.run("a", function)]

    first, second, *others = run_virtual(main)
    assert [str(first), str(second)] == ["failed 1", "failed 2"]
    assert others == [3, 3, 3]
    assert runs == [1, 2, 3]


async def test_a_cancelled_step_lets_the_next_try():
    """If the caller that runs a step is cancelled, a waiting caller runs the step."""
    runs, function = counting(seconds=5)

    journal = MemoryJournal()
    first = asyncio.ensure_future(journal.steps.run("a", function))
    second = asyncio.ensure_future(journal.steps.run("a", function))
    await asyncio.sleep(1)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert [await second, await journal.steps.run("a", function)] == [2, 2]
    assert runs == [1, 2]


async def test_one_that_waits_can_be_cancelled_alone():
    """A waiting caller can be cancelled alone, and the step continues for the caller that runs it."""
    runs, function = counting(seconds=5)

    journal = MemoryJournal()
    first = asyncio.ensure_future(journal.steps.run("a", function))
    second = asyncio.ensure_future(journal.steps.run("a", function))
    await asyncio.sleep(1)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert await first == 1
    assert runs == [1]


async def test_a_step_inside_itself_is_refused_and_not_waited_for_forever():
    """Starting a step inside itself is refused instead of hanging. A step with a different key may be started inside it."""
    journal = MemoryJournal()
    runs, function = counting()

    async def inside() -> int:
        return await journal.steps.run("a", function)

    async with asyncio.timeout(60):
        with pytest.raises(DefinitionError, match=r"step 'a' was started inside itself.*another key"):
            await journal.steps.run("a", inside)
        assert await journal.steps.run("b", inside) == 1
        assert await journal.steps.run("a", function) == 1
    assert runs == [1]


# --- commit and load -------------------------------------------------------------------------------


def unit(run: str, call: str) -> CommitUnit:
    return CommitUnit(run_id=run, call_id=call, events=[b"{}"], result=b"{}")


async def test_what_was_committed_is_loaded_in_order_by_run():
    """A run's units are loaded in commit order, and a loaded list does not change afterwards."""
    journal = MemoryJournal()
    for run, call in [("r", "1"), ("s", "1"), ("r", "2")]:
        await journal.calls.commit(unit(run, call))
    loaded = await journal.calls.load("r")
    await journal.calls.commit(unit("r", "3"))
    assert [each.call_id for each in loaded] == ["1", "2"]
    assert [each.call_id for each in await journal.calls.load("r")] == ["1", "2", "3"]
    assert list(await journal.calls.load("nobody's")) == []


async def test_a_call_is_recorded_when_it_commits_and_only_then():
    """A committed call is recorded as one unit with its inner calls' events, and a failed call is not recorded."""

    @tool(effect="staged")
    async def inner(fail: bool, context: ToolContext) -> str:
        """Dispatch an event, and fail if told to."""
        context.session.dispatch(Done("inner"))
        if fail:
            raise ValueError("no")
        return "done"

    @tool(effect="staged")
    async def outer(fail: bool, context: ToolContext) -> str:
        """Call the inner tool, dispatch an event, and fail if told to."""
        await context.call("inner", fail=False)
        context.session.dispatch(Done("outer"))
        if fail:
            raise ValueError("no")
        return "done"

    journal = MemoryJournal(VirtualClock())
    gate = open_gate([inner, outer], journal=journal)
    for name in ("inner", "outer"):
        for fail in (True, False):
            await gate.invoke(name, {"fail": fail}, call_id=f"{name} {fail}")
    units = await journal.calls.load(gate.run.run_context.run_id)
    assert [each.call_id for each in units] == ["inner False", "outer False"]
    assert [len(each.events) for each in units] == [1, 2]
    assert b'"success":true' in units[0].result


# --- once ----------------------------------------------------------------------------------------


class Bank:
    """An outside system whose payments can't be undone."""

    def __init__(self) -> None:
        self.paid: list[str] = []

    async def pay(self, whom: str = "ada") -> int:
        self.paid.append(whom)
        await asyncio.sleep(1)
        return len(self.paid)

    def pay_at_once(self) -> int:
        self.paid.append("at once")
        return len(self.paid)


def paying(body: Any, effect: Effect = "idempotent", **options: Any) -> Tool[Any, Any]:
    @tool(name="pay", description="Pay.", effect=effect, **options)
    async def pay(context: ToolContext) -> Any:
        return await body(context)

    return pay


def one_call(
    *tools: Tool[Any, Any], name: str = "pay", **options: Any
) -> tuple[ToolResult[Any], RecordingSubscriber]:
    async def main() -> tuple[ToolResult[Any], RecordingSubscriber]:
        session = Session()
        seen = RecordingSubscriber(session)
        result = await open_gate(tools, session=session, clock=VirtualClock(), **options).invoke(name)
        seen.assert_paired()
        return result, seen

    return run_virtual(main)


def test_once_is_settled_once_across_retries():
    """`once` runs its step in the first attempt only, and later attempts get the recorded value."""
    bank = Bank()
    got: list[int] = []

    async def body(context: ToolContext) -> int:
        got.append(await context.once("pay", bank.pay))
        if context.invocation.attempt < 3:
            raise TransientError("try again", retry_after=1)
        return got[-1]

    result, seen = one_call(paying(body))
    assert (result.value, got, bank.paid) == (1, [1, 1, 1], ["ada"])
    assert seen.of(ToolInvoked)[0].attempts == 3


@pytest.mark.parametrize("how", ["async", "sync", "returns an awaitable"])
def test_once_takes_any_function(how: str):
    """`once` accepts an async function, a plain function and a function that returns an awaitable."""
    bank = Bank()
    function: Any = {"async": bank.pay, "sync": bank.pay_at_once, "returns an awaitable": lambda: bank.pay()}[
        how
    ]

    async def body(context: ToolContext) -> int:
        return await context.once("pay", function)

    assert one_call(paying(body))[0].value == 1
    assert len(bank.paid) == 1


def test_once_in_a_sync_handler():
    """In a sync handler, `.wait()` returns the value of a step, which runs only once."""
    bank = Bank()

    @tool(name="pay", description="Pay.")
    def pay(context: ToolContext) -> int:
        return context.once("pay", bank.pay).wait() + context.once("pay", bank.pay).wait()

    assert one_call(pay)[0].value == 2
    assert bank.paid == ["ada"]


async def test_once_is_keyed_by_the_call_and_the_key():
    """`once` is keyed by call and key, so a different call with equal arguments runs the step again."""
    bank = Bank()

    async def body(context: ToolContext) -> list[int]:
        return [
            await context.once("a", bank.pay),
            await context.once("b", bank.pay),
            await context.once("a", bank.pay),
        ]

    gate = open_gate([paying(body)])
    assert [(await gate.invoke("pay")).value for _ in range(2)] == [[1, 2, 1], [3, 4, 3]]


def test_once_of_one_call_at_the_same_time_is_one():
    """Two concurrent branches of a handler that use the same key run the step once."""
    bank = Bank()

    async def body(context: ToolContext) -> list[int]:
        return list(await asyncio.gather(context.once("a", bank.pay), context.once("a", bank.pay)))

    assert one_call(paying(body))[0].value == [1, 1]


def test_once_that_failed_may_be_tried_again():
    """A step that fails in `once` is not recorded, and may run again."""
    runs, function = counting(fail=1)

    async def body(context: ToolContext) -> int:
        try:
            return await context.once("a", function)
        except ValueError:
            return await context.once("a", function)

    assert one_call(paying(body))[0].value == 2
    assert runs == [1, 2]


@pytest.mark.parametrize("effect", ["pure", "read", "staged"])
def test_once_is_refused_where_everything_can_be_undone(effect: Effect):
    """In a pure, read or staged tool, `once` is refused before its step runs."""
    bank = Bank()

    async def body(context: ToolContext) -> int:
        return await context.once("pay", bank.pay)

    result, seen = one_call(paying(body, effect))
    assert f"tool 'pay' declares effect='{effect}': it may not use `once` ('pay')" in result.message
    assert "Declare the effect" in result.message
    assert seen.statuses() == [("pay", "error")]
    assert bank.paid == []


@pytest.mark.parametrize("how", ["raises", "says so", "times out"])
def test_what_once_did_is_listed_when_the_call_fails(how: str):
    """When a call fails, its message and its `ToolRolledBack` event name what `once` did, because it could not be undone."""
    bank = Bank()

    async def body(context: ToolContext) -> Any:
        context.session.dispatch(Done("gone"))
        await context.once("bank", bank.pay)
        await context.once("mail", bank.pay)
        if how == "raises":
            raise ValueError("no")
        if how == "says so":
            return ToolResult.error("no")
        await asyncio.sleep(100)
        return "never"

    result, seen = one_call(paying(body, timeout=10))
    assert result.success is False
    (undone,) = seen.of(ToolRolledBack)
    assert sorted(undone.not_undone) == ["pay: once('bank')", "pay: once('mail')"]
    assert "Could not be undone: " in result.message
    for key in ("bank", "mail"):
        assert result.message.count(f"pay: once('{key}')") == 1
    assert seen.of(Done) == []


def test_what_once_did_is_listed_once():
    """If a call passes the same key to `once` twice and fails, the step is listed only once."""
    bank = Bank()

    async def body(context: ToolContext) -> Any:
        await context.once("bank", bank.pay)
        await context.once("bank", bank.pay)
        raise ValueError("no")

    result, _ = one_call(paying(body))
    assert bank.paid == ["ada"]
    assert result.message.count("once('bank')") == 1


def test_what_once_did_in_an_earlier_attempt_is_listed_too():
    """When a call fails, steps from earlier attempts are listed too, even if the last attempt did not reach them."""
    bank = Bank()

    async def body(context: ToolContext) -> Any:
        if context.invocation.attempt == 1:
            await context.once("bank", bank.pay)
            raise TransientError("again", retry_after=1)
        raise ValueError("no")

    result, _ = one_call(paying(body))
    assert bank.paid == ["ada"]
    assert "pay: once('bank')" in result.message


def test_what_once_did_in_an_inner_call_is_listed_by_the_outer():
    """When an outer call fails, it lists what `once` did in an inner call that had succeeded."""
    bank = Bank()

    async def body(context: ToolContext) -> Any:
        return await context.once("bank", bank.pay)

    @tool
    async def outer(context: ToolContext) -> str:
        """Pay, and fail."""
        await context.call("pay")
        raise ValueError("no")

    result, _ = one_call(paying(body), outer, name="outer")
    assert "Could not be undone: pay: once('bank')." in result.message


async def test_once_of_two_runs_that_share_a_journal_are_two():
    """A step recorded in one run runs again in another, even if the model repeats its call ids."""
    bank = Bank()

    async def body(context: ToolContext) -> int:
        return await context.once("pay", bank.pay)

    journal = MemoryJournal()
    tools = [paying(body)]
    assert [
        (await open_gate(tools, journal=journal).invoke("pay", call_id="call_0")).value for _ in range(2)
    ] == [1, 2]
