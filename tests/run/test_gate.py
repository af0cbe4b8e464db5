"""The gate: the order of its steps, isolation, nesting, threads, cancellation, and its token for handlers."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import pytest

import handrail
from handrail import (
    Deadline,
    MemoryJournal,
    Tool,
    ToolContext,
    ToolResult,
    TransientError,
    UserContext,
    gather,
    tool,
)
from handrail.errors import ContextExpired, EffectRefused, EventRefused, PromptEvaluationError
from handrail.events import Emitted, Fact, Progress, ToolInvoked, ToolStarted
from handrail.journal.records import CommitUnit
from handrail.protocols import PolicyDecision
from handrail.run.call import ToolCall, new_call, run_turn
from handrail.run.failures import SignatureMismatch
from handrail.run.place import inner_call_id
from handrail.testing import VirtualClock, virtual_time
from support import PATIENCE
from support.rig import Note, Rig, leave_traces, nothing, staged


@pytest.mark.virtual_time
async def test_steps_happen_in_order() -> None:
    """A call goes through start, policy, handler, `on_result`, commit, publish and end, in this order."""
    seen: list[str] = []

    class Watches:
        name = "watches"

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            seen.append(f"check {params.text}")
            return PolicyDecision.allow()

        def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
            seen.append(f"on_result, {len(rig.notes)} committed")

    async def body(text: str, context: ToolContext) -> str:
        seen.append("handler")
        return text

    rig = Rig([staged(body)], policies=[Watches()])
    rig.session.dispatcher.subscribe(object, lambda event: seen.append(type(event).__name__))
    await rig.call("work", text="a")
    assert seen == ["ToolStarted", "check a", "handler", "on_result, 0 committed", "Note", "ToolInvoked"]


@pytest.mark.virtual_time
async def test_policy_cannot_change_params() -> None:
    """A policy that changes its copy of the params does not change what the handler receives."""

    class Meddles:
        name = "meddles"

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            params.text = "changed"
            params.words.append("changed")
            return PolicyDecision.allow()

        def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
            return None

    @tool
    async def say(text: str, words: list[str]) -> str:
        """Return the text."""
        return f"{text} {words}"

    rig = Rig([say], policies=[Meddles()])
    result = await rig.call("say", text="hello", words=["world"])
    assert result.value == "hello ['world']"


@pytest.mark.virtual_time
async def test_parallel_calls_are_isolated_and_one_failing_late_undoes_only_its_own() -> None:
    """No parallel call sees another's unfinished work. If one fails late, only its own changes to session and files are undone."""

    async def body(text: str, context: ToolContext) -> list[str]:
        await asyncio.sleep(1)
        seen = [note.text for note in context.session[Note].all()]
        if text == "bad":
            await asyncio.sleep(5)
            raise RuntimeError("late")
        return seen

    rig = Rig([staged(body, effect="idempotent")])
    turn = await run_turn(rig.gate, [ToolCall("work", {"text": text}) for text in ("good", "bad", "fine")])
    assert [result.success for result in turn.results] == [True, False, True]
    assert turn.results[0].value == ["good"]  # no call saw another's unfinished work
    assert turn.results[2].value == ["fine"]
    assert rig.notes == ["good", "fine"]
    assert rig.paths == ["fine.txt", "good.txt"]
    rig.assert_paired()


@pytest.mark.virtual_time
async def test_one_turn_runs_concurrently_and_alone_runs_alone() -> None:
    """Calls in one turn run concurrently. A call to an `alone` tool runs by itself, but may call the same tool."""
    running: set[str] = set()
    overlaps: dict[str, set[str]] = {}

    async def enter(text: str) -> None:
        running.add(text)
        for other in running:
            overlaps.setdefault(other, set()).update(running)
        await asyncio.sleep(1)
        running.discard(text)

    @tool(effect="read")
    async def free(text: str) -> None:
        """Run beside others."""
        await enter(text)

    @tool(effect="read", alone=True)
    async def single(text: str, context: ToolContext) -> None:
        """Run alone."""
        await enter(text)
        if text == "outer":
            assert (await context.call("single", text="inner")).success

    rig = Rig([free, single])
    calls = [("free", "a"), ("free", "b"), ("single", "outer"), ("free", "c"), ("free", "d")]
    turn = await run_turn(rig.gate, [ToolCall(name, {"text": text}) for name, text in calls])
    assert all(result.success for result in turn.results)
    assert overlaps == {
        "a": {"a", "b"},
        "b": {"a", "b"},
        "outer": {"outer"},
        "inner": {"inner"},
        "c": {"c", "d"},
        "d": {"c", "d"},
    }


@pytest.mark.virtual_time
async def test_nested_call_takes_the_same_gate_and_commits_with_the_outer_one() -> None:
    """An inner call goes through the same gate, is committed with the outer call, and is undone if the outer call fails."""
    inner = staged(nothing, name="inner")

    @tool(effect="staged")
    async def outer(fail: bool, context: ToolContext) -> str:
        """Call the inner tool twice, once with a misspelt argument, and then fail if told to."""
        assert (await context.call("inner", text="one")).success
        bad = await context.call("inner", txt="typo")
        assert "did you mean text?" in bad.message
        assert [note.text for note in context.session[Note].all()][-1] == "one"
        assert context.filesystem.read("one.txt") == "one"
        if fail:
            raise RuntimeError("after all")
        return "done"

    rig = Rig([inner, outer])
    assert not (await rig.call("outer", fail=True)).success
    rig.assert_untouched()
    assert (await rig.call("outer", fail=False)).success
    assert rig.notes == ["one"]
    assert rig.paths == ["one.txt"]
    rig.assert_paired()
    paths = {event.path for event in rig.of(ToolStarted)}
    assert ("outer", "inner") in paths
    ids = [event.call_id for event in rig.of(ToolStarted) if event.tool == "inner"]
    parents = [event.call_id for event in rig.of(ToolStarted) if event.tool == "outer"]
    assert ids == [f"{parents[0]}.1", f"{parents[0]}.2", f"{parents[1]}.1", f"{parents[1]}.2"]


@pytest.mark.virtual_time
async def test_depth_is_limited() -> None:
    """A call beyond the depth limit fails, and the message names the limit and the tools from the outermost call to this one."""

    @tool(effect="staged")
    async def dig(depth: int, context: ToolContext) -> int:
        """Call itself until the depth limit is reached."""
        result = await context.call("dig", depth=depth + 1)
        return result.value if result.success else context.depth

    rig = Rig([dig], depth_limit=3)
    assert (await rig.call("dig", depth=0)).value == 3
    (refused,) = [event for event in rig.of(ToolInvoked) if event.status == "error"]
    assert "dig > dig > dig > dig > dig" in refused.result.message
    assert "limit is 3" in refused.result.message
    rig.assert_paired()


@pytest.mark.virtual_time
async def test_state_events_are_published_once_at_the_outermost_commit_and_progress_at_once() -> None:
    """Progress is published while a call runs. State events are published once, after the outermost commit."""
    inner = staged(nothing, name="inner")

    @tool(effect="irreversible")
    async def outer(context: ToolContext) -> None:
        """Report progress, emit two events and call the inner tool."""
        context.report_progress("half", done=1, total=2)
        await context.emit(Note("first"))
        context.event_bus.publish(Note("mine"))
        await context.call("inner", text="a")
        assert not [event for event in rig.events if isinstance(event, Note)]

    rig = Rig([inner, outer])
    await rig.call("outer")
    names = [type(event).__name__ for event in rig.events]
    assert names.index("Progress") < names.index("Emitted") < names.index("Note")
    assert names.count("Note") == 1
    assert [(p.message, p.done, p.total) for p in rig.of(Progress)] == [("half", 1, 2)]
    assert [event.event for event in rig.of(Emitted)] == [Note("first"), Note("mine")]
    assert all(event.tool == "outer" for event in rig.of(Emitted))


@pytest.mark.virtual_time
async def test_our_own_facts_can_not_be_published_by_a_tool() -> None:
    """A tool can't publish Handrail's own events, either on the bus or in the session."""

    async def body(text: str, context: ToolContext) -> None:
        fact = Progress("x", "x", "x", None, None, context.run_context)
        with pytest.raises(EventRefused, match="Handrail's own"):
            context.event_bus.publish(fact)
        with pytest.raises(EventRefused, match="Handrail's own"):
            context.session.dispatch(fact)

    rig = Rig([staged(body)])
    assert (await rig.call("work", text="a")).success


@pytest.mark.virtual_time
async def test_sync_handler_that_outlives_its_timeout_writes_into_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a timeout, the abandoned handler's signal is cancelled, its reads, writes and calls are refused, and nothing changes."""
    refused: list[str] = []
    go_on, done = threading.Event(), threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    @tool(effect="irreversible", timeout=10)
    def slow(context: ToolContext) -> None:
        """Outlive the timeout."""
        session, files = context.session, context.filesystem
        leave_traces(context, "early")
        monkeypatch.setattr(virtual_time, "_THREAD_GRACE", 0.0)
        loops[0].call_soon_threadsafe(lambda: None)  # ends the wait for this thread, so that time jumps
        go_on.wait(PATIENCE)
        attempts: list[Any] = [
            lambda: session.dispatch(Note("late")),
            lambda: session[Note],
            lambda: files.write("late.txt", "late"),
            lambda: files.read("early.txt"),
            lambda: context.filesystem,
            lambda: context.call("slow").wait(),
            lambda: context.emit(Note("late")),
            lambda: context.report_progress("late"),
            lambda: context.request_approval("late").wait(),
            lambda: context.once("late", lambda: 1).wait(),
            context.beat,
        ]
        for attempt in attempts:
            try:
                attempt()
            except ContextExpired:
                refused.append("refused")
        assert context.signal.cancelled
        done.set()

    loops.append(asyncio.get_running_loop())
    rig = Rig([slow])
    result = await rig.call("slow")
    assert "took longer than 10 seconds" in result.message
    go_on.set()
    assert await asyncio.to_thread(done.wait, PATIENCE)
    assert len(refused) == 11
    rig.assert_untouched()
    rig.assert_paired()


@pytest.mark.virtual_time
async def test_context_refuses_after_a_success_too() -> None:
    """A task that a successful handler left behind can't change what was committed."""
    left: list[Any] = []

    @tool(effect="irreversible")
    async def leaves(context: ToolContext) -> None:
        """Leave a task behind."""

        async def later() -> None:
            await asyncio.sleep(1)
            context.session.dispatch(Note("late"))

        left.append(asyncio.ensure_future(later()))
        context.filesystem.write("a.txt", "a")

    rig = Rig([leaves])
    assert (await rig.call("leaves")).success
    with pytest.raises(ContextExpired):
        await left[0]
    assert rig.notes == []
    assert rig.paths == ["a.txt"]


@pytest.mark.parametrize("how", ["asyncio", "anyio", "gate", "swallowed"])
@pytest.mark.virtual_time
async def test_cancellation_rolls_back_and_gives_every_call_its_end(how: str) -> None:
    """However a run is cancelled, all its calls are rolled back, innermost first, and each call ends exactly once."""

    async def hangs(text: str, context: ToolContext) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if how != "swallowed":
                raise

    @tool(effect="staged")
    async def outer(context: ToolContext) -> None:
        """Make two inner calls at once."""
        leave_traces(context, "outer")
        await gather(context.call("inner", text="a"), context.call("inner", text="b"))

    rig = Rig([staged(hangs, name="inner"), outer])
    if how == "anyio":
        with anyio.move_on_after(1) as scope:
            await rig.call("outer")
        assert scope.cancelled_caught
    else:
        task = asyncio.ensure_future(rig.call("outer"))
        await asyncio.sleep(1)
        if how == "gate":
            rig.gate.cancel("enough")
        else:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    ended = [(event.tool, event.status) for event in rig.of(ToolInvoked)]
    assert ended == [("inner", "cancelled"), ("inner", "cancelled"), ("outer", "cancelled")]
    rig.assert_untouched()
    rig.assert_paired()


@pytest.mark.virtual_time
async def test_cancelled_run_starts_no_more_handlers() -> None:
    """A call made after the run was cancelled ends as cancelled, and its handler does not run."""
    ran: list[str] = []

    async def body(text: str, context: ToolContext) -> None:
        ran.append(text)

    rig = Rig([staged(body)])
    rig.gate.cancel("enough")
    with pytest.raises(asyncio.CancelledError):
        await rig.call("work", text="a")
    assert ran == []
    assert rig.status("work") == "cancelled"


@pytest.mark.virtual_time
async def test_timeout_and_an_outer_cancellation_at_the_same_moment() -> None:
    """If a cancellation coincides with a timeout, the cancellation wins. The call ends once and is rolled back."""

    async def hangs(text: str, context: ToolContext) -> None:
        await asyncio.sleep(60)

    rig = Rig([staged(hangs, timeout=5)])
    task = asyncio.ensure_future(rig.call("work", text="a"))
    asyncio.get_running_loop().call_later(5, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.status("work") == "cancelled"
    rig.assert_untouched()
    rig.assert_paired()


@pytest.mark.virtual_time
async def test_a_call_is_timed_from_when_it_begins() -> None:
    """A call's time starts when the call is awaited, not when it is created."""

    async def takes(text: str, context: ToolContext) -> None:
        await asyncio.sleep(2)

    @tool(effect="staged")
    async def outer(context: ToolContext) -> None:
        """Make two calls, and await them one after the other."""
        first, second = (context.call("inner", text="x") for _ in range(2))
        await first
        await second

    rig = Rig([staged(takes, name="inner"), outer])
    await rig.call("outer")
    assert [(event.tool, event.seconds) for event in rig.of(ToolInvoked)] == [
        ("inner", 2),
        ("inner", 2),
        ("outer", 4),
    ]
    assert [event.at for event in rig.of(ToolStarted) if event.tool == "inner"] == [0, 2]


@pytest.mark.virtual_time
async def test_timeouts_nest() -> None:
    """An outer timeout stops the inner call too. An inner timeout stops only the inner call."""

    async def hangs(text: str, context: ToolContext) -> None:
        await asyncio.sleep(60)

    @tool(effect="staged", timeout=10)
    async def outer(times: int, context: ToolContext) -> list[str]:
        """Call a slow tool."""
        results = [await context.call("inner", text="x") for _ in range(times)]
        return [result.message for result in results]

    rig = Rig([staged(hangs, name="inner", timeout=4), outer])
    two = await rig.call("outer", times=2)
    assert two.success
    assert all("took longer than 4 seconds" in message for message in two.value)
    three = await rig.call("outer", times=3)
    assert "outer took longer than 10 seconds" in three.message
    statuses = [(event.tool, event.status) for event in rig.of(ToolInvoked)][-4:]
    assert statuses == [
        ("inner", "timed out"),
        ("inner", "timed out"),
        ("inner", "cancelled"),
        ("outer", "timed out"),
    ]
    rig.assert_paired()


@pytest.mark.virtual_time
async def test_a_deadline_that_passes_while_a_call_is_recorded_cancels_nobody() -> None:
    """A deadline that passes while a call commits does not cancel the caller."""
    clock = VirtualClock()
    journal: Any = MemoryJournal()
    commit = journal.calls.commit

    async def commit_slowly(unit: CommitUnit) -> None:
        await asyncio.sleep(5)
        await commit(unit)

    journal.calls.commit, journal.calls.commit_now = commit_slowly, lambda unit: False
    rig = Rig([staged(nothing)], journal=journal, clock=clock, deadline=Deadline.after(3, clock=clock))
    assert (await rig.call("work", text="a")).success
    assert rig.notes == ["a"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(1)  # the caller is not cancelled at its next wait


@pytest.mark.virtual_time
async def test_deadline_is_enforced_during_a_call_that_swallows_it() -> None:
    """A call whose handler swallows the deadline's cancellation and goes on is rolled back."""

    async def stubborn(text: str, context: ToolContext) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return "late"

    clock = Rig([]).gate.run.clock
    rig = Rig([staged(stubborn)], deadline=Deadline.after(3, clock=clock))
    with pytest.raises(PromptEvaluationError):
        await rig.call("work", text="a")
    assert rig.status("work") == "timed out"
    rig.assert_untouched()


@pytest.mark.virtual_time
async def test_tool_that_needs_a_person_says_so() -> None:
    """A call to a tool that needs a person fails if nobody can be asked, and the message says so."""

    @tool
    async def ask(context: UserContext) -> str:
        """Ask somebody."""
        return await context.wait_for("name", {}, str)

    rig = Rig([ask])
    result = await rig.call("ask")
    assert "'ask' needs 'wait_for'" in result.message
    assert "in which a person can be asked" in result.message


@pytest.mark.virtual_time
async def test_context_is_dead_before_on_result_and_policies_still_see_the_fork() -> None:
    """In `on_result`, the policy's context works, although the handler's has expired."""
    kept: list[ToolContext] = []
    seen: list[Any] = []

    class Looks:
        name = "looks"

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            return PolicyDecision.allow()

        def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
            with pytest.raises(ContextExpired):
                kept[0].emit("late")
            seen.append(context.filesystem.read("a.txt"))
            seen.append(context.session[Note].latest())

    async def body(text: str, context: ToolContext) -> None:
        kept.append(context)

    rig = Rig([staged(body)], policies=[Looks()])
    assert (await rig.call("work", text="a")).success
    assert seen == ["a", Note("a")]


@pytest.mark.virtual_time
async def test_an_inner_call_is_not_applied_once_the_call_around_it_is_over() -> None:
    """An inner call that outlives its outer call is cancelled and changes nothing."""
    left: list[asyncio.Task[Any]] = []

    class KeepsGoing:
        name = "keeps going"

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            return PolicyDecision.allow()

        async def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
            if tool.name == "work":
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)

    @tool(effect="staged")
    async def outer(context: ToolContext) -> None:
        """Start an inner call, and return without waiting for it."""
        left.append(asyncio.ensure_future(context.call("work", text="late")))
        await asyncio.sleep(1)

    rig = Rig([staged(nothing), outer], policies=[KeepsGoing()])
    assert (await rig.call("outer")).success
    with pytest.raises(ContextExpired):
        await left[0]
    assert rig.status("work") == "cancelled"
    assert "its outer call is over" in rig.of(ToolInvoked)[-1].result.message
    rig.assert_untouched()


@pytest.mark.virtual_time
async def test_calls_are_numbered_in_their_run() -> None:
    """A call's id contains its run's id and its number in the run. An inner call's id contains its caller's id and a number."""

    @tool(effect="staged")
    async def outer(context: ToolContext) -> None:
        """Call another tool twice."""
        await context.call("work", text="b")
        await context.call("work", text="c")

    rig = Rig([staged(nothing), outer])
    await rig.call("work", text="a")
    await rig.call("outer")
    run_id = rig.gate.run.run_context.run_id
    ids = [event.call_id for event in rig.of(ToolStarted)]
    assert ids[:2] == [f"{run_id}.1", f"{run_id}.2"]
    assert ids[2:] == [inner_call_id(f"{run_id}.2", 1, number) for number in (1, 2)]


@pytest.mark.virtual_time
async def test_handlers_start_only_with_a_token_of_the_gate() -> None:
    """However a call is made, it goes through the gate, and no handler starts without the gate's token."""
    ran: list[str] = []

    async def body(text: str, context: ToolContext) -> None:
        assert context._source.token is not None  # pyright: ignore[reportAttributeAccessIssue]
        ran.append(text)

    @tool(effect="irreversible")
    async def outer(context: ToolContext) -> None:
        """Try the other ways to make a call."""
        await context.call("work", text="nested")
        await gather(context.call("work", text="gathered"))

    work = staged(body)
    rig = Rig([work, outer])
    await rig.gate.invoke("work", {"text": "invoked"})
    await run_turn(rig.gate, [ToolCall("work", {"text": "turn"})])
    await run_turn(rig.gate, [ToolCall("work", {"text": "one"}), ToolCall("work", {"text": "two"})])
    await rig.call("outer")
    assert ran == ["invoked", "turn", "one", "two", "nested", "gathered"]
    assert len(rig.of(ToolStarted)) == 7

    attempt = rig.gate.open(new_call(rig.gate, "work", {"text": "stolen"}))
    params = attempt.params = work.parse({"text": "stolen"})
    with pytest.raises(SignatureMismatch, match="did not pass the gate"):
        await rig.gate._start(attempt, ToolContext(attempt))
    assert params.text not in ran


@pytest.mark.once
def test_only_the_gate_starts_handlers() -> None:
    """Only the gate, and the modules that this test lists with a reason, read a tool's `handler`."""
    source = Path(handrail.__file__).parent
    callers: set[str] = set()
    for file in source.rglob("*.py"):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if "handler" in text else ():
            if isinstance(node, ast.Attribute) and node.attr == "handler" and isinstance(node.ctx, ast.Load):
                callers.add(str(file.relative_to(source)))
    # checks.py inspects the handler's signature. The others only check whether there is a handler, or where it is defined.
    look = {
        "code/section.py",
        "tools/toolbox.py",
        "run/handlers.py",
        "handoff/halves.py",
        "prompt/rendering.py",
        "workers/functions.py",
    }
    assert callers == {"run/gate.py", "tools/definition.py", *look}


@pytest.mark.virtual_time
async def test_read_only_effects_may_not_write() -> None:
    """A `read` call can read, but all its writes are refused with an error that names the tool."""

    @tool(effect="read")
    async def look(context: ToolContext) -> str:
        """Try to write."""
        for attempt in (
            lambda: context.session.dispatch(Note("x")),
            lambda: context.filesystem.write("x.txt", "x"),
            lambda: context.filesystem.delete("a.txt"),
            lambda: context.once("x", lambda: 1),
        ):
            with pytest.raises(EffectRefused, match="look"):
                attempt()
        return context.filesystem.read("a.txt")

    rig = Rig([look])
    rig.files.write("a.txt", "text")
    assert (await rig.call("look")).value == "text"
    assert rig.paths == ["a.txt"]


@pytest.mark.parametrize(
    ("declared", "fitting", "other"),
    [
        (int | None, (3, None), "three"),
        (list[int] | None, ([3], None), "three"),
        (Annotated[str, "a name"], ("three",), 3),
        (float | str, (3, 0.5, "three"), [3]),
        (Literal["a"] | None, ("a", None), None),
    ],
)
async def test_a_union_is_any_of_what_it_is_made_of(declared: Any, fitting: Any, other: Any) -> None:
    """A result must have the declared type, without its annotations, or that of one member of a declared union.

    Any other result fails the call.
    """
    given: list[Any] = [*fitting, other]

    async def handler(params: None, *, context: ToolContext) -> ToolResult[Any]:
        return ToolResult.ok(given.pop(0))

    rig = Rig([Tool("work", "Work.", handler, result=declared, effect="read")])
    for each in fitting:
        assert (await rig.call("work")).value == each
    assert (await rig.call("work")).success == (other is None)


@pytest.mark.virtual_time
async def test_plain_result_is_required_of_a_handler() -> None:
    """A handler that is passed to `Tool` must return a `ToolResult`. Otherwise, the call fails and is rolled back."""

    async def handler(params: None, *, context: ToolContext) -> ToolResult[str]:
        leave_traces(context, "a")
        return "text"  # type: ignore[return-value]  # pyright: ignore[reportReturnType]

    rig = Rig([Tool("work", "Work.", handler, effect="staged")])
    result = await rig.call("work")
    assert result.message == "work failed: its handler returned a str instead of a ToolResult."
    assert rig.status("work") == "error"  # `invalid` is a call that did not run
    rig.assert_untouched()


def test_gate_works_from_a_script() -> None:
    """A script without an event loop can make a call with `.wait()`."""

    @tool
    def double(number: int) -> int:
        """Double a number."""
        return number * 2

    from handrail.run import open_gate

    gate = open_gate([double])
    assert gate.invoke("double", {"number": 4}).wait().value == 8


@pytest.mark.virtual_time
async def test_facts_are_the_only_trace_of_a_failed_call() -> None:
    """A failed call leaves only Handrail's own events."""

    async def fails(text: str, context: ToolContext) -> None:
        context.emit(Note("said"))
        raise RuntimeError("no")

    rig = Rig([staged(fails)])
    await rig.call("work", text="a")
    assert all(isinstance(event, Fact) for event in rig.events)
    rig.assert_untouched()


async def test_what_an_earlier_try_left_behind_can_not_touch_the_next() -> None:
    """While a call's second attempt runs, a thread left over from the first attempt finds its context expired."""
    first_try_over, tried, done = threading.Event(), threading.Event(), threading.Event()
    refused: list[str] = []

    def left_behind(context: ToolContext) -> None:
        first_try_over.wait(300)
        for attempt in (
            lambda: context.session.dispatch(Note("late")),
            lambda: context.filesystem.write("late.txt", "late"),
            lambda: context.emit(Note("late")),
        ):
            try:
                attempt()
            except ContextExpired:
                refused.append("refused")
        tried.set()

    @tool(effect="staged")
    def flaky(context: ToolContext) -> str:
        """Fail once, leaving a thread behind."""
        if context.invocation.attempt == 1:
            threading.Thread(target=left_behind, args=(context,), daemon=True).start()
            raise TransientError("busy", retry_after=0)
        first_try_over.set()
        tried.wait(300)
        leave_traces(context, "second")
        done.set()
        return "fine"

    rig = Rig([flaky])
    assert (await rig.call("flaky")).success
    assert refused == ["refused"] * 3
    assert rig.notes == ["second"]
    assert rig.paths == ["second.txt"]


@pytest.mark.virtual_time
async def test_the_gate_beats_for_a_handler_until_it_beats_itself() -> None:
    """The gate renews the lease while a handler runs. Once the handler has called `beat`, only its own beats count."""

    class Lease:
        interval = 10.0

        def __init__(self) -> None:
            self.extended: list[float] = []

        def extend(self) -> None:
            self.extended.append(asyncio.get_running_loop().time())

    async def works(text: str, context: ToolContext) -> None:
        await asyncio.sleep(25)
        if text == "beats":
            context.beat()
            await asyncio.sleep(100)

    lease = Lease()
    rig = Rig([staged(works)], lease=lease)
    await rig.call("work", text="silent")
    assert lease.extended == [0, 10, 20]  # the lease is not renewed after the call has ended
    lease.extended.clear()
    await rig.call("work", text="beats")
    assert lease.extended == [25, 35, 45, 50]
