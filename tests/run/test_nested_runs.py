"""The inheritance table: what a nested run inherits from the call around it, for each way to nest a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    Budget,
    Deadline,
    MemoryFilesystem,
    ModelSettings,
    Prompt,
    PromptEvaluationError,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    run_as_agent,
    tool,
)
from handrail.context import ExtraKey
from handrail.errors import CallFailed, ContextExpired, DefinitionError, DepthExceededError
from handrail.events import ToolInvoked
from handrail.ids import span_of
from handrail.protocols import PolicyDecision
from handrail.resources.bindings import Binding, given
from handrail.run import open_gate
from handrail.testing import Person
from run.nestings import BY_HAND, DEPTHS, IN_A_FILE, OWN_MODEL, Nesting
from support.worker_folders import sound

every_way = pytest.mark.parametrize("way", DEPTHS)

LEAF = Prompt("leaf", "Leaf.")
TENANT = ExtraKey("table_tenant", str, "Whose data this is.")
MIDDLE = 1
"""The depth of the model's call in the middle run, which is nested in a call of the root run."""


class Database:
    """A resource that records whether it was closed."""

    def __init__(self, name: str = "outer's") -> None:
        self.name = name
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Denies:
    """A policy that denies the tool `probe`."""

    name = "denies"

    def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
        return PolicyDecision.deny("no probes") if tool.name == "probe" else PolicyDecision.allow()

    def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None: ...


@every_way
async def test_model(way: str, tmp_path: Path) -> None:
    """A nested run uses the model of the run around it, not the root's, unless its definition names one."""

    async def ask(context: ToolContext) -> None:
        await context.adapter.evaluate(LEAF, "go")

    nesting = Nesting(way, tmp_path, ask)
    assert (await nesting.run()).text == "root done"
    expected = "own" if way in OWN_MODEL else "chosen"
    assert (expected, "Leaf.") in nesting.asked
    assert {name for name, system in nesting.asked if system in ("Inner.", "Leaf.")} == {expected}


@every_way
async def test_model_settings(way: str, tmp_path: Path) -> None:
    """A nested run on the same model inherits the settings of the run around it, except the tool choice. On its own model, it inherits none."""

    async def ask(context: ToolContext) -> None:
        await context.adapter.evaluate(LEAF, "go")

    nesting = Nesting(way, tmp_path, ask)
    nesting.middle_settings = ModelSettings(effort="low", tool_choice="required")
    await nesting.run(model_settings=ModelSettings(seed=1, tool_choice="middle"))
    expected = ModelSettings() if way in OWN_MODEL else ModelSettings(effort="low")
    inner = [settings for system, settings in nesting.settings if system in ("Inner.", "Leaf.")]
    assert inner
    assert set(inner) == {expected}
    assert {settings for system, settings in nesting.settings if system == "Middle."} == {
        nesting.middle_settings
    }


@every_way
async def test_budget(way: str, tmp_path: Path) -> None:
    """A nested run spends from the budget of the runs around it."""

    async def ask(context: ToolContext) -> None:
        for _ in range(10):
            await context.adapter.evaluate(LEAF, "go")

    nesting = Nesting(way, tmp_path, ask)
    with pytest.raises(PromptEvaluationError, match="requests is too low"):
        await nesting.run(budget=Budget(requests=4))
    assert len(nesting.asked) == 4


@every_way
async def test_deadline(way: str, tmp_path: Path) -> None:
    """A nested run has the deadline of the run around it."""
    seen: list[Any] = []

    async def look(context: ToolContext) -> None:
        seen.append(context.deadline)

    deadline = Deadline.after(600)
    await Nesting(way, tmp_path, look).run(deadline=deadline)
    assert seen == [deadline]


@every_way
async def test_cancellation(way: str, tmp_path: Path) -> None:
    """Cancelling the root run ends the nested call first, then the calls around it."""
    reached, ends = asyncio.Event(), list[tuple[str, str]]()

    async def wait(context: ToolContext) -> None:
        reached.set()
        await asyncio.Event().wait()

    session = Session()
    session.dispatcher.subscribe(ToolInvoked, lambda event: ends.append((event.path[-1], event.status)))
    running = asyncio.ensure_future(Nesting(way, tmp_path, wait).run(session=session))
    await reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ends[0][0].partition(".")[0] == "probe"  # the tool, or an act of the handoff with this name
    assert ends[-1] == ("middle", "cancelled")
    assert {status for _, status in ends} == {"cancelled"}


@every_way
async def test_depth(way: str, tmp_path: Path) -> None:
    """Each way of nesting adds its levels to the depth, and beyond the limit neither a nested run nor its calls start."""
    seen: list[int] = []
    raised: list[Exception] = []

    async def nest_again(context: ToolContext) -> None:
        seen.append(context.depth)
        try:
            await context.adapter.evaluate(LEAF, "go")
        except DepthExceededError as error:
            raised.append(error)

    depth = MIDDLE + DEPTHS[way]
    nesting = Nesting(way, tmp_path, nest_again)
    await nesting.run(depth_limit=depth)
    assert seen == [depth]
    (error,) = raised
    assert isinstance(error, DepthExceededError)
    assert (error.depth, error.limit) == (depth + 1, depth)
    shallow = Nesting(way, tmp_path / "again", nest_again)
    await shallow.run(depth_limit=depth - 1)
    assert shallow.ran == 0
    assert len(seen) == 1


@every_way
async def test_policies(way: str, tmp_path: Path) -> None:
    """A call that a policy of the root run denies is denied in a nested run too, with that policy's reason."""
    ends: list[ToolInvoked] = []

    async def nothing(context: ToolContext) -> None: ...

    allowed = Nesting(way, tmp_path / "allowed", nothing)
    await allowed.run()
    assert allowed.ran == 1
    nesting, session = Nesting(way, tmp_path / "denied", nothing), Session()
    session.dispatcher.subscribe(ToolInvoked, ends.append)
    await nesting.run(policies=[Denies()], session=session)
    assert nesting.ran == 0
    (denied,) = [each for each in ends if each.path[-1] == "probe"]
    assert denied.status == "denied"
    assert "no probes" in denied.result.message


@every_way
@pytest.mark.parametrize("mode", ["interactive", "strict"])
async def test_approvals(way: str, mode: Any, tmp_path: Path) -> None:
    """The root run's approval mode applies to approval requests in a nested run, and questions name the calls that led to them."""
    approved: list[bool] = []

    async def ask(context: ToolContext) -> None:
        approved.append((await context.request_approval("may I?")).approved)

    person = Person(approve=True)
    await Nesting(way, tmp_path, ask).run(environment=person, approvals=mode)
    assert approved == [mode == "interactive"]
    if mode == "interactive":
        (question,) = person.questions
        assert question.asked_by[0] == "middle"
        assert question.asked_by[-1].partition(".")[0] == "probe"  # the tool, or an act of the handoff


@every_way
async def test_files(way: str, tmp_path: Path) -> None:
    """A nested call works on a fork of the outer call's files, which commits with the outer call."""
    files = MemoryFilesystem({"a.txt": "old"})
    during: list[str] = []

    async def write(context: ToolContext) -> None:
        context.filesystem.write("a.txt", "new")
        during.append(files.read("a.txt"))

    await Nesting(way, tmp_path, write).run(filesystem=files)
    assert during == ["old"]
    assert files.read("a.txt") == "new"


@every_way
async def test_resources(way: str, tmp_path: Path) -> None:
    """A nested run uses the same resource objects as the outer run."""
    database = Database()
    seen: list[Any] = []

    async def look(context: ToolContext) -> None:
        seen.append(context.resources.get(Database))

    nesting = Nesting(way, tmp_path, look)
    await nesting.run(outer_resources=[given(Database, database)])
    assert seen == [database]


@pytest.mark.parametrize(
    "way", [way for way in DEPTHS if way not in ("call", "call_worker", "worker as tool", "prompt_model")]
)
async def test_own_resources(way: str, tmp_path: Path) -> None:
    """A nested run may bind its own resources, which replace the outer run's inside the nested run and are closed with it."""
    outer, own = Database(), Database("own")
    seen: list[Any] = []

    async def look(context: ToolContext) -> None:
        seen.extend([context.resources.get(Database), context.resources.get(str)])
        assert not own.closed

    bound = [given(Database, outer), given(str, "shared")]
    nesting = Nesting(way, tmp_path, look)
    await nesting.run([Binding(Database, lambda _: own)], outer_resources=bound)
    assert seen == [own, "shared"]
    assert (own.closed, outer.closed) == (True, False)


@every_way
async def test_workers(way: str, tmp_path: Path) -> None:
    """A nested run may call the workers that the run around it may call. A worker may call the workers that it lists."""
    answers: list[Any] = []

    async def delegate(context: ToolContext) -> None:
        answers.append(await context.call_worker("leaf", "go"))

    await Nesting(way, tmp_path, delegate).run()
    assert answers == ['"done"']


@every_way
async def test_trace(way: str, tmp_path: Path) -> None:
    """A nested run has the root's request id and trace id, and knows what started the root. Its own id begins with the root's id and the place of the root's call."""
    seen: list[Any] = []

    async def look(context: ToolContext) -> None:
        seen.append(context.run_context)

    response = await Nesting(way, tmp_path, look).run(
        run_id="r1", traceparent=f"00-{'1f' * 16}-{'2e' * 8}-01"
    )
    (ids,) = seen
    assert ids.request_id == response.run_id == "r1"
    assert ids.run_id.startswith("r1.1~1/1")
    assert ids.trace_id == "1f" * 16
    assert ids.span_id == span_of(ids.run_id, 1)
    assert ids.traceparent.startswith("00-1f1f")


@every_way
async def test_extras(way: str, tmp_path: Path) -> None:
    """A nested call has the extras of the root run."""
    seen: list[Any] = []

    async def look(context: ToolContext) -> None:
        seen.append(context.extras.get(TENANT))

    await Nesting(way, tmp_path, look).run(extras={TENANT: "acme"})
    assert seen == ["acme"]


# --- what a nested run may tighten or replace, and what it may not ---


def limited(way: str, at: Path, body: Any, in_a_file: str, **given: Any) -> Nesting:
    """Return a nesting whose nested run has limits of its own: in its worker's file, or as arguments."""
    nesting = Nesting(way, at, body, limits=in_a_file if way in IN_A_FILE else "{}")
    nesting.given = {} if way in IN_A_FILE else given
    return nesting


@pytest.mark.parametrize("way", [*BY_HAND, *IN_A_FILE])
@pytest.mark.parametrize("calls", [9, 900])
async def test_own_budget(way: str, calls: int, tmp_path: Path) -> None:
    """A nested run may have a smaller budget than the run around it, but never more than is left there."""
    seen: list[float] = []

    async def look(context: ToolContext) -> None:
        seen.append(context.budget_tracker.remaining()["tool_calls"])

    nesting = limited(way, tmp_path, look, f"{{tool_calls: {calls}}}", budget=Budget(tool_calls=calls))
    await nesting.run(budget=Budget(tool_calls=90))
    (left,) = seen
    assert 0 < left <= 9 if calls == 9 else 9 < left < 90


@pytest.mark.parametrize("way", [*BY_HAND, *IN_A_FILE])
@pytest.mark.parametrize("seconds", [300, 6000])
async def test_own_deadline(way: str, seconds: int, tmp_path: Path) -> None:
    """A nested run may have an earlier deadline than the run around it, but never a later one."""
    seen: list[Any] = []

    async def look(context: ToolContext) -> None:
        seen.append(context.deadline)

    outer = Deadline.after(600)
    own = Deadline.after(seconds)
    nesting = limited(way, tmp_path, look, f"{{seconds: {seconds}}}", deadline=own)
    await nesting.run(deadline=outer)
    (found,) = seen
    if seconds == 6000:
        assert found is outer
    else:
        assert found.at < outer.at
        assert way in IN_A_FILE or found is own


@pytest.mark.parametrize("way", IN_A_FILE)
@pytest.mark.parametrize(("own", "outer", "goes"), [(0, 9, False), (99, 9, True), (99, 0, False)])
async def test_own_depth(way: str, own: int, outer: int, goes: bool, tmp_path: Path) -> None:
    """A worker may allow fewer levels below its calls than the run around it, but never more."""
    below: list[bool] = []

    async def nest_again(context: ToolContext) -> None:
        try:
            await context.adapter.evaluate(LEAF, "go")
            below.append(True)
        except DepthExceededError:
            below.append(False)

    nesting = Nesting(way, tmp_path, nest_again, limits=f"{{depth: {own}}}")
    await nesting.run(depth_limit=outer or MIDDLE + DEPTHS[way])
    assert below == [goes]


@pytest.mark.parametrize("way", BY_HAND)
@pytest.mark.parametrize("name", ["approvals", "filesystem", "session"])
async def test_what_is_never_replaced(way: str, name: str, tmp_path: Path) -> None:
    """A nested run that is given its own approvals, files or session does not start."""
    own = {"approvals": "approve_all", "filesystem": MemoryFilesystem(), "session": Session()}

    async def nothing(context: ToolContext) -> None: ...

    nesting = Nesting(way, tmp_path, nothing)
    nesting.given = {name: own[name]}
    await nesting.run()
    assert nesting.ran == 0


async def test_own_model_settings(tmp_path: Path) -> None:
    """A nested run inherits the model settings of the run around it, except those that it sets itself."""

    async def nothing(context: ToolContext) -> None: ...

    nesting = Nesting("context.adapter.evaluate", tmp_path, nothing)
    nesting.middle_settings = ModelSettings(effort="low", seed=1)
    nesting.given = {"model_settings": ModelSettings(seed=2)}
    await nesting.run()
    inner = {settings for system, settings in nesting.settings if system == "Inner."}
    assert inner == {ModelSettings(effort="low", seed=2)}


@pytest.mark.parametrize("way", ["Adapter.evaluate", "run_as_agent", "run_as_agent of a handoff"])
async def test_own_workers(way: str, tmp_path: Path) -> None:
    """A nested run may bring its own workers, which replace those of the run around it."""
    answers: list[Any] = []

    async def delegate(context: ToolContext) -> None:
        answers.append(await context.call_worker("other", "go"))
        with pytest.raises(Exception, match="leaf"):
            await context.call_worker("leaf", "go")

    nesting = Nesting(way, tmp_path / "outer", delegate)
    nesting.given = {"workers": sound(tmp_path / "own", other="---\n---\nOther.")}
    await nesting.run()
    assert answers == ['"done"']


# --- runs that a handler starts by hand ---


async def test_a_run_by_hand_is_refused_what_is_always_the_calls(tmp_path: Path) -> None:
    """A run that a handler starts by hand is refused if it has its own session or files, is streamed, or resumes a run."""
    for_files = Adapter(ScriptedModel([]), filesystem=MemoryFilesystem())
    plain = Adapter(ScriptedModel([]))
    attempts = [
        lambda: plain.evaluate(LEAF, "go", session=Session()),
        lambda: for_files.evaluate(LEAF, "go"),
        lambda: plain.stream(LEAF, "go"),
        lambda: plain.resume("r1"),
        lambda: run_as_agent(probe, model=ScriptedModel([]), session=Session()),
    ]
    said: list[str] = []

    @tool
    async def probe() -> str:
        """Do nothing."""
        return "probed"

    @tool
    async def outer() -> str:
        """Start runs by hand."""
        for attempt in attempts:
            with pytest.raises(DefinitionError, match="inside the call outer") as caught:
                attempt()
            said.append(str(caught.value))
        return "refused"

    assert (await open_gate([outer]).invoke("outer")).value == "refused"
    assert [word in text for word, text in zip(["session=", "filesystem", "stream"], said, strict=False)] == [
        True
    ] * 3


async def test_what_a_handler_left_running_can_start_nothing() -> None:
    """A task that outlives its call can't start a run, since neither limits nor denials would apply to that run."""
    over, left = asyncio.Event(), list[asyncio.Task[Any]]()

    async def later() -> None:
        await over.wait()
        await Adapter(ScriptedModel(["done"])).evaluate(LEAF, "go")

    @tool
    async def outer() -> str:
        """Leave a task running."""
        left.append(asyncio.ensure_future(later()))
        return "left"

    assert (await open_gate([outer]).invoke("outer")).success
    over.set()
    with pytest.raises(ContextExpired):
        await left[0]


async def test_a_policy_may_ask_a_model_about_the_call_it_judges() -> None:
    """A policy is not inside the call that it checks, so the runs that it starts are not nested in that call."""

    class Judges:
        name = "judges"

        async def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            await Adapter(ScriptedModel(["fine"])).evaluate(LEAF, "ok?", session=Session())
            return PolicyDecision.allow()

        async def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
            await Adapter(ScriptedModel(["fine"])).evaluate(LEAF, "ok?", session=Session())

    @tool
    async def work() -> str:
        """Work."""
        return "worked"

    assert (await open_gate([work], policies=[Judges()]).invoke("work")).value == "worked"


def test_a_synchronous_handler_can_nest_by_hand() -> None:
    """A run that a synchronous handler starts by hand is nested in the handler's call."""
    seen: list[str] = []

    @tool(effect="staged")
    def probe(context: ToolContext) -> str:
        """Record the id of the run."""
        seen.append(context.run_context.run_id)
        return "probed"

    @tool
    def outer() -> str:
        """Start a nested run."""
        return run_as_agent(probe, model=ScriptedModel([])).wait()

    model = ScriptedModel([ToolCall("outer", {}), "done"])
    Adapter(model).evaluate(Prompt("p", "Go.", tools=[outer]), "go", run_id="r1").wait()
    assert seen == ["r1.1~1/1"]


def test_run_as_agent_takes_files_resources_workers_and_any_tool(tmp_path: Path) -> None:
    """Outside a call, `run_as_agent` takes files, resources and workers for the tool, and raises `CallFailed` if the tool fails."""

    async def work(context: ToolContext) -> None:
        context.filesystem.write("a.txt", context.resources.get(Database).name)
        assert context.prompt_model is not None
        assert await context.call_worker("leaf", "go") == '"done"'

    files, nesting = MemoryFilesystem(), Nesting("call", tmp_path, work)
    value = run_as_agent(
        nesting.probe,
        model=nesting.model("own"),
        filesystem=files,
        resources=[given(Database, Database("mine"))],
        workers=nesting.workers,
    ).wait()
    assert (value, files.read("a.txt")) == ("probed", "mine")
    with pytest.raises(CallFailed):
        run_as_agent(nesting.probe, model=nesting.model("own")).wait()
