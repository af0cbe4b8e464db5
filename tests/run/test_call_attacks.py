"""Attacks on the gate: unusual errors, cancellations, ids, event loops and results."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import dataclass
from typing import Annotated, Any

import anyio
import pytest

from handrail import (
    CapabilityPolicy,
    PathArg,
    ReadBeforeWritePolicy,
    ToolContext,
    ToolResult,
    TransientError,
    tool,
)
from handrail.concurrency.claims import WHOLE, Claim
from handrail.concurrency.timers import timers_of
from handrail.errors import DefinitionError, PromptEvaluationError
from handrail.events import ToolInvoked, ToolRolledBack, ToolStarted
from handrail.journal.records import CommitUnit
from handrail.journal.sqlite import MemoryJournal
from handrail.protocols import PolicyDecision
from handrail.run import open_gate
from handrail.run.gate import Gate
from handrail.session import Dispatcher, Session
from handrail.testing import Person
from support.rig import Note, Rig, leave_traces, nothing, staged

pytestmark = pytest.mark.virtual_time


async def test_a_handled_failure_in_a_task_group_is_no_cancellation() -> None:
    """A call that handles a failed task group is not treated as cancelled, and can still be cancelled.

    Before Python 3.13, such a group leaves the task's cancel count raised.
    """

    @tool(effect="staged")
    async def outer(context: ToolContext) -> str:
        """Handle an error that a member of a task group raises."""

        async def bad() -> None:
            await asyncio.sleep(0)
            raise ValueError

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(bad())
        except* ValueError:
            pass
        context.session.dispatch(Note("kept"))
        return "handled"

    rig = Rig([outer])
    assert (await rig.call("outer")).value == "handled"
    assert rig.notes == ["kept"]
    hanging = asyncio.ensure_future(rig.call("outer"))
    await asyncio.sleep(0)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    rig.assert_paired()


async def test_an_error_that_can_not_describe_itself_still_ends_the_call() -> None:
    """A call whose error raises in `__str__` still ends, with a result, and changes nothing."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    async def fails(text: str, context: ToolContext) -> None:
        raise Mute

    rig = Rig([staged(fails)])
    result = await rig.call("work", text="a")
    assert result.message == "work failed: Mute"
    assert rig.gate.run.live == {}
    rig.assert_untouched()
    rig.assert_paired()


@pytest.mark.parametrize("how", ["cancels itself", "run cancelled"])
async def test_every_compensation_gets_its_turn(how: str) -> None:
    """If one compensation cancels itself, the others still run. If the run is cancelled, all run. The call ends once in both cases."""
    undone: list[str] = []

    async def unbook(params: Any, value: Any, *, context: ToolContext) -> None:
        if how == "cancels itself" and params.what == "b":
            raise asyncio.CancelledError
        await context.call("note", what=params.what)
        undone.append(params.what)

    @tool(effect="compensable", compensate=unbook)
    async def book(what: str) -> None:
        """Book."""

    @tool(effect="irreversible")
    async def note(what: str) -> None:
        """Note something."""

    @tool(effect="irreversible")
    async def trip(context: ToolContext) -> None:
        """Make three bookings, then fail."""
        for what in "abc":
            await context.call("book", what=what)
        if how == "run cancelled":
            await asyncio.sleep(60)
        raise RuntimeError("no")

    rig = Rig([book, note, trip])
    call = asyncio.ensure_future(rig.call("trip"))
    if how == "run cancelled":
        await asyncio.sleep(1)
        rig.gate.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert undone == ["c", "b", "a"]
    else:
        assert "book (compensating it failed: CancelledError)" in (await call).message
        assert undone == ["c", "a"]
    rig.assert_paired()
    assert rig.gate.run.live == {}


async def test_once_is_once_although_the_call_was_asked_about_the_first_time() -> None:
    """A retry does not repeat a step that the first attempt settled with `once`, even if the call needed approval."""
    paid: list[int] = []
    tries: list[int] = []

    @tool(effect="idempotent")
    async def pay(context: ToolContext) -> None:
        """Pay."""
        await context.once("pay", lambda: paid.append(1))

    @tool(effect="idempotent", capabilities={"net"})
    async def order(context: ToolContext) -> None:
        """Order, and fail once after paying."""
        await context.call("pay")
        tries.append(1)
        if len(tries) == 1:
            raise TransientError(retry_after=0)

    policy = CapabilityPolicy({"net": "ask"}, effects={"idempotent": "allow"})
    rig = Rig([pay, order], policies=[policy], approvals="approve_all")
    assert (await rig.call("order")).success
    assert len(tries) == 2
    assert paid == [1]


async def test_two_compensations_have_two_keys() -> None:
    """If two compensations use the same `once` key, each settles its own step."""
    refunds: list[str] = []

    async def refund(params: Any, value: Any, *, context: ToolContext) -> None:
        await context.once("refund", lambda: refunds.append(params.number))

    @tool(effect="compensable", compensate=refund)
    async def pay(number: str) -> None:
        """Pay."""

    @tool(effect="irreversible")
    async def middle(context: ToolContext) -> None:
        """Pay twice and fail."""
        await context.call("pay", number="1")
        await context.call("pay", number="2")
        raise RuntimeError("no")

    @tool(effect="irreversible")
    async def top(context: ToolContext) -> str:
        """Call the middle tool."""
        return (await context.call("middle")).message

    rig = Rig([pay, middle, top])
    assert (await rig.call("top")).success
    assert refunds == ["2", "1"]


async def test_an_approval_is_not_replayed_when_an_id_is_used_again() -> None:
    """Each call needs its own approval, even if the provider reuses an earlier call's id."""
    ran: list[int] = []
    answers = [True, False, True]

    @tool
    async def pay(number: int) -> None:
        """Pay."""
        ran.append(number)

    person = Person(lambda question: answers.pop(0))
    rig = Rig([pay], policies=[CapabilityPolicy()], environment=person)
    for number in (1, 2, 3):
        await rig.gate.invoke("pay", {"number": number}, call_id="call_0")
    assert ran == [1, 3]
    assert len({question.id for question in person.questions}) == 3


@dataclass(frozen=True)
class Count:
    """A count that must not lose an update."""

    number: int


class SlowJournal(MemoryJournal):
    """A journal whose commits are slow."""

    def __init__(self) -> None:
        super().__init__()
        calls: Any = self.calls
        commit = calls.commit

        async def slow(unit: CommitUnit, /) -> None:
            await asyncio.sleep(0.05)
            await commit(unit)

        calls.commit, calls.commit_now = slow, lambda unit: False


@tool(effect="staged")
async def increment(context: ToolContext) -> int:
    """Increment the counter."""
    latest = context.session[Count].latest()
    number = 1 if latest is None else latest.number + 1
    context.session.dispatch(Count(number))
    return number


async def test_journaled_commits_of_several_gates_are_one_after_another() -> None:
    """Commits from several gates on one session are serialised, because the lock belongs to the session."""
    session, journal = Session(), SlowJournal()
    gates = [open_gate([increment], session=session, journal=journal) for _ in range(3)]
    results = await asyncio.gather(*[gate.invoke("increment") for gate in gates])
    assert sorted(result.value for result in results) == [1, 2, 3]


def test_one_session_serves_two_event_loops() -> None:
    """Commits from two event loops on one session wait for each other, even with a journal."""
    session = Session()
    results: list[int] = []

    def one_loop() -> None:
        async def main() -> None:
            gate = open_gate([increment], session=session, journal=SlowJournal())
            results.append((await gate.invoke("increment")).value)

        asyncio.run(main())

    async def both() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(asyncio.to_thread, one_loop)

    asyncio.run(both())
    assert sorted(results) == [1, 2]


@pytest.mark.parametrize("where", ["on_result", "swallowed timeout"])
async def test_a_finished_call_that_can_not_commit_is_compensated(where: str) -> None:
    """If a handler has finished but its call can't commit, the work is compensated."""
    undone: list[str] = []

    async def unbook(params: Any, value: str, *, context: ToolContext) -> None:
        undone.append(value)

    @tool(effect="compensable", compensate=unbook, timeout=5)
    async def book() -> str:
        """Book, whatever happens."""
        if where == "swallowed timeout":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return "seat 3"
        return "seat 3"

    class Slow:
        name = "slow"

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            return PolicyDecision.allow()

        async def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
            await asyncio.sleep(60)

    rig = Rig([book], policies=[Slow()] if where == "on_result" else [])
    call = asyncio.ensure_future(rig.call("book"))
    if where == "on_result":
        await asyncio.sleep(1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    else:
        assert not (await call).success
    assert undone == ["seat 3"]
    rig.assert_paired()


async def test_a_failed_call_does_not_keep_what_its_handler_held() -> None:
    """The recorded error of a failed call has no traceback, so the objects in the handler's variables are freed."""

    class Large:
        pass

    seen: list[weakref.ref[Any]] = []

    async def fails(text: str, context: ToolContext) -> None:
        large = Large()
        seen.append(weakref.ref(large))
        raise RuntimeError("no")

    rig = Rig([staged(fails)])
    await rig.call("work", text="a")
    (ended,) = rig.of(ToolInvoked)
    assert ended.error is not None
    assert ended.error.__traceback__ is None
    gc.collect()
    assert seen[0]() is None


def test_a_loop_is_freed_with_its_timers() -> None:
    """An event loop's timers do not keep the loop alive."""

    async def main() -> weakref.ref[Any]:
        loop = asyncio.get_running_loop()
        timers_of(loop)
        return weakref.ref(loop)

    loop = asyncio.run(main())
    gc.collect()
    assert loop() is None


def test_a_loop_is_freed_although_a_session_it_committed_to_lives_on() -> None:
    """A session's claims do not keep closed event loops alive, even if tasks on them waited for a claim."""
    claims = Session().claims

    async def main() -> weakref.ref[Any]:
        async def commit() -> None:
            claim = Claim(WHOLE)
            await claims.enter(claim)
            await asyncio.sleep(0)
            claims.leave(claim)

        await asyncio.gather(commit(), commit())
        return weakref.ref(asyncio.get_running_loop())

    first, _ = asyncio.run(main()), asyncio.run(main())
    gc.collect()
    assert first() is None
    assert not claims.is_busy


async def test_uncancelling_does_not_save_a_handler_from_a_cancelled_run() -> None:
    """A call whose handler calls `uncancel` on its task is still rolled back when the run is cancelled."""

    async def stubborn(text: str, context: ToolContext) -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
        return "ok"

    rig = Rig([staged(stubborn)])
    call = asyncio.ensure_future(rig.call("work", text="a"))
    await asyncio.sleep(1)
    rig.gate.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert rig.status("work") == "cancelled"
    rig.assert_untouched()


async def test_a_cancelled_call_is_not_tried_again() -> None:
    """A call that is cancelled while its first attempt is rolled back is not retried."""
    runs: list[int] = []
    undone: list[int] = []

    async def slowly(params: Any, value: Any, *, context: ToolContext) -> None:
        await asyncio.sleep(5)
        undone.append(1)

    @tool(effect="compensable", compensate=slowly)
    async def book() -> None:
        """Book."""

    @tool(effect="idempotent")
    async def outer(context: ToolContext) -> None:
        """Book, then fail with a transient error."""
        runs.append(1)
        await context.call("book")
        raise TransientError(retry_after=0)

    rig = Rig([book, outer])
    call = asyncio.ensure_future(rig.call("outer"))
    await asyncio.sleep(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert runs == [1]
    assert undone == [1]
    rig.assert_paired()


def test_an_operation_of_a_call_is_refused_on_another_loop() -> None:
    """Awaiting a call's operation on a different event loop is refused, because it could not be cancelled there."""

    @tool(effect="irreversible")
    def outer(context: ToolContext) -> str:
        """Await an inner call on another loop."""

        async def go() -> Any:
            return await context.call("inner")

        return str(asyncio.run(go()))

    @tool(effect="read")
    async def inner() -> None:
        """Do nothing."""

    async def main() -> None:
        rig = Rig([outer, inner])
        result = await rig.call("outer")
        assert "a different event loop than its call's" in result.message
        rig.assert_paired()

    asyncio.run(main())


async def test_what_a_failed_inner_call_read_counts_for_the_outer_one() -> None:
    """A file that a failed inner call has read counts as read by the outer call.

    Therefore, only one of two concurrent claims is granted.
    """
    meeting = asyncio.Barrier(2)
    first = [True, True]

    @tool(effect="read")
    async def look(path: str, context: ToolContext) -> None:
        """Fail unless the file is taken."""
        if context.filesystem.read(path) == "0":
            raise LookupError("free")

    @tool(effect="staged")
    async def claim(mine: str, other: str, context: ToolContext) -> str:
        """Take `mine` if `other` is free."""
        free = not (await context.call("look", path=other)).success
        if first and first.pop():
            await meeting.wait()
        if not free:
            return "taken"
        context.filesystem.write(mine, "1")
        return "mine"

    rig = Rig([look, claim])
    rig.files.write("x", "0")
    rig.files.write("y", "0")
    results = await asyncio.gather(
        rig.call("claim", mine="x", other="y"), rig.call("claim", mine="y", other="x")
    )
    assert sorted(result.value for result in results) == ["mine", "taken"]


async def test_read_before_write_can_not_be_overtaken() -> None:
    """A write fails if the file has changed since `ReadBeforeWritePolicy` checked it."""
    go_on = asyncio.Event()

    @tool(effect="read")
    async def read(path: Annotated[str, PathArg("read")], context: ToolContext) -> str:
        """Read."""
        return context.filesystem.read(path)

    @tool(effect="irreversible", capabilities={"fs.write"})
    async def write(path: Annotated[str, PathArg("write")], context: ToolContext) -> None:
        """Write, after a while."""
        await go_on.wait()
        context.filesystem.write(path, "mine")

    rig = Rig([read, write], policies=[ReadBeforeWritePolicy()])
    rig.files.write("a", "v1")
    await rig.call("read", path="a")
    writing = asyncio.ensure_future(rig.call("write", path="a"))
    await asyncio.sleep(1)
    rig.files.write("a", "theirs")
    go_on.set()
    assert not (await writing).success
    assert rig.files.read("a") == "theirs"


async def test_a_bus_of_ones_own_hears_every_start() -> None:
    """A subclass of `Dispatcher` that overrides `publish` receives the start and the end of every call."""
    heard: list[str] = []

    class Loud(Dispatcher):
        def publish(self, event: object, /) -> None:
            heard.append(type(event).__name__)
            super().publish(event)

    gate: Gate = open_gate([staged(nothing)], session=Session(dispatcher=Loud()))
    for _ in range(3):
        await gate.invoke("work", {"text": "a"})
    assert heard.count("ToolStarted") == heard.count("ToolInvoked") == 3


async def test_what_stops_the_run_stops_it_from_inside_a_task_group_too() -> None:
    """An exception that ends the run does so even if a task group has wrapped it."""

    @tool(effect="irreversible")
    async def outer(context: ToolContext) -> None:
        """Raise an error that ends the run, inside a task group."""

        async def stops() -> None:
            raise PromptEvaluationError("the model is gone")

        async with anyio.create_task_group() as group:
            group.start_soon(stops)

    rig = Rig([outer])
    with pytest.raises(PromptEvaluationError, match="the model is gone"):
        await rig.call("outer")
    rig.assert_paired()


async def test_a_closed_coroutine_leaves_nothing_and_has_its_end() -> None:
    """Closing a call's coroutine rolls the call back without awaiting, and its end is published."""

    async def hangs(text: str, context: ToolContext) -> None:
        await asyncio.sleep(60)

    rig = Rig([staged(hangs)])
    work = rig.gate.invoke("work", {"text": "a"})
    work.send(None)
    work.close()
    assert rig.gate.run.live == {}
    rig.assert_untouched()
    rig.assert_paired()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("operation", "the operation call('inner'), which has not run"),
        ("text", "it returned a str but declares int"),
        (None, "it returned None but declares int"),
    ],
)
async def test_a_result_of_another_type_than_declared_fails_the_call(value: Any, words: str) -> None:
    """A result that is not of the declared type fails the call, and nothing is committed."""

    @tool(effect="staged")
    async def outer(context: ToolContext) -> int:
        """Return a value of another type than declared."""
        leave_traces(context, "a")
        return context.call("inner") if value == "operation" else value  # pyright: ignore[reportReturnType]

    rig = Rig([outer])
    result = await rig.call("outer")
    assert words in result.message
    rig.assert_untouched()


@pytest.mark.parametrize(
    "paid", [ToolResult.ok(message="paid"), ToolResult("paid", None), ToolResult.ok(None), ToolResult.ok()]
)
async def test_a_result_may_lack_a_value_of_the_declared_type(paid: ToolResult[Any]) -> None:
    """A call that succeeded stands if its handler returns a `ToolResult` without a value, with any declared type."""

    @tool(effect="irreversible")
    async def pay() -> ToolResult[int]:
        """Pay."""
        return paid

    @tool(effect="irreversible")
    async def outer(context: ToolContext) -> str:
        """Pay, too."""
        return str((await context.call("pay")).unwrap())

    rig = Rig([pay, outer], journal=MemoryJournal())
    result = await rig.call("pay")
    assert (result.success, result.value, result.render()) == (True, None, paid.message or "done")
    assert (await rig.call("outer")).value == "None"


async def test_a_result_that_can_not_be_shown_fails_the_call() -> None:
    """A result that can't be encoded as JSON fails the call, even without a declared type."""

    async def body(text: str, context: ToolContext) -> Any:
        return {"x": object()}

    rig = Rig([staged(body)])
    result = await rig.call("work", text="a")
    assert "can't be written as JSON" in result.message
    rig.assert_untouched()


async def test_unwrap_gives_the_value_or_says_why_not() -> None:
    """`unwrap` returns a result's value, or raises an error with the failure's message."""

    @tool(effect="staged")
    async def outer(context: ToolContext) -> str:
        """Unwrap the result of an inner call."""
        return (await context.call("missing")).unwrap()

    rig = Rig([outer])
    result = await rig.call("outer")
    assert "There is no tool 'missing'" in result.message
    assert ToolResult.ok(3).unwrap() == 3


@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [
        ("filesystem", "/tmp", "MemoryFilesystem"),
        ("session", {}, "Pass a Session"),
        ("deadline", 5, "Deadline.after"),
        ("budget", 5, "Budget(tool_calls=100)"),
        ("policies", CapabilityPolicy(), "a list of policies"),
        ("environment", Person, "an instance of Environment"),
        ("policies", [object()], "`check` and `on_result`"),
    ],
)
def test_wrong_options_of_a_gate_are_refused_by_name(option: str, value: Any, hint: str) -> None:
    """Invalid gate options are refused when the gate is opened, and the error says what to pass."""
    with pytest.raises(DefinitionError) as error:
        open_gate([], **{option: value})
    assert hint in str(error.value)


async def test_events_of_undone_tries_and_denied_calls() -> None:
    """A denied call publishes a start and an end but no rollback, because its handler never ran."""
    rig = Rig([staged(nothing, effect="irreversible")], policies=[CapabilityPolicy()])
    await rig.call("work", text="a")
    assert [
        type(event) for event in rig.events if isinstance(event, ToolStarted | ToolInvoked | ToolRolledBack)
    ] == [
        ToolStarted,
        ToolInvoked,
    ]
