"""Simulations: runs that crash at many points, and reports on tools that break their declarations."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from handrail import Adapter, Handoff, Parked, Prompt, ToolContext, ToolResult, tool
from handrail.environment import LaterEnvironment
from handrail.errors import DefinitionError, JournalError
from handrail.run.call import ToolCall
from handrail.testing import Person
from handrail.testing.simulation import (
    Play,
    Point,
    Report,
    Scenario,
    Seen,
    SimulationError,
    Stage,
    World,
    simulate,
)
from handrail.testing.simulation.__main__ import main
from support import postgres, warm_python
from testing.simulated import DECIDING, DELIVERING, ERRANDS, EXPIRING, SHOPPING, Colour
from testing.simulated_messages import BEGETTING, READING, REMARKING, STEERING
from testing.simulated_scripts import LOADING, SCRIPTING, SEARCHING
from testing.simulated_workspace import WRITING

pytestmark = pytest.mark.once  # processes are slow to start, and behave the same under every Python version

DEEP = bool(os.environ.get("HANDRAIL_DEEP"))
ALL = DEEP or os.environ.get("HANDRAIL_POINTS") == "all"
"""Whether to crash at every write, which scripts/mutants.py needs even in an ordinary run."""
FEWER = 1 if ALL else 2
"""The number of crash points that are tried is divided by this."""


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except in a deep run, fork simulated processes from one that has everything loaded."""
    if DEEP:
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["handrail.testing.simulation", *warm_python.LOADED])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


def crashed(scenario: Scenario, **sampled: Any) -> Report:
    """Crash a scenario at some points of each kind. In a deep run, crash it at all points, and crash the restarted process too."""
    if not DEEP:
        return simulate(scenario, **sampled)
    simulate(scenario, jobs=2, overtaken_every=0, again=True).assert_kept()
    simulate(scenario, jobs=2, connected=True).assert_kept()
    return simulate(scenario, jobs=2, parked_every=1)


@pytest.mark.timeout(900)  # starts hundreds of processes, possibly on a busy machine
def test_a_run_with_a_bit_of_everything_survives_a_crash_at_every_point():
    """A run with an agent, a question, an approval, files, a payment, an email and a handoff survives a crash at each point that is tried."""
    every = 1 if ALL else 16
    report = crashed(SHOPPING, write_every=every, step_every=40 * FEWER, overtaken_every=60)
    report.assert_kept()
    assert report.writes > 30
    assert report.tried["before write"] == report.tried["after write"] >= report.writes // every
    assert report.tried["step"] >= report.steps // (40 * FEWER) > 1
    assert report.processes > 2 * sum(report.tried.values())


@pytest.mark.timeout(900)
def test_several_at_once_retries_threads_and_previews_survive_it_too():
    report = crashed(ERRANDS, write_every=1 if ALL else 24, step_every=40 * FEWER, overtaken_every=75)
    report.assert_kept()
    assert report.tried["step"] > 2


@pytest.mark.timeout(900)
def test_what_is_decided_for_the_session_survives_it_too():
    """A remembered answer is recorded when it is given, so after a crash the person is not asked again."""
    report = crashed(DECIDING, write_every=1 if ALL else 16, step_every=30 * FEWER, overtaken_every=40)
    report.assert_kept()
    assert report.tried["step"] > 2


@pytest.mark.timeout(900)
def test_a_question_that_expires_ends_once_whenever_its_process_dies():
    """A question that nobody answers ends in the same way, whether its process was alive, parked its run, or was dead."""
    every = 1 if ALL else 8
    report = crashed(EXPIRING, write_every=every, step_every=20 * FEWER, overtaken_every=30, parked_every=80)
    report.assert_kept()
    assert report.tried["step"] > 2
    assert report.tried["parked at step"] > 2


@pytest.mark.timeout(900)
def test_what_is_said_along_with_an_answer_is_told_once_whenever_the_process_dies():
    """The model is told each remark once, in the same place, whoever asked and however many answers were given meanwhile."""
    every = 1 if ALL else 8
    report = crashed(REMARKING, write_every=every, step_every=30 * FEWER, overtaken_every=40, parked_every=60)
    report.assert_kept()
    assert report.tried["step"] > 2


@pytest.mark.timeout(900)
def test_a_call_that_began_is_charged_once_however_often_its_process_dies():
    """However often the process dies, each call is charged once.

    This includes the inner calls of calls that are not repeated, of repeated attempts and of nested runs.
    """
    every = 1 if ALL else 6
    report = crashed(DELIVERING, write_every=every, step_every=10 * FEWER, overtaken_every=0, again=True)
    report.assert_kept()
    assert report.tried["step"] > 2


@pytest.mark.timeout(900)
def test_a_run_that_is_steered_survives_it():
    """Whenever the process dies, each message is told once and in order, and each order is carried out once."""
    every = 1 if ALL else 8
    report = crashed(STEERING, write_every=every, step_every=20 * FEWER, overtaken_every=40, parked_every=60)
    report.assert_kept()
    assert report.tried["step"] > 2


@pytest.mark.timeout(900)
def test_background_runs_survive_it():
    """Whenever the process dies, a background run exists if and only if its call has committed, its end is told once, and the budget is exact."""
    every = 1 if ALL else 4
    report = crashed(BEGETTING, write_every=every, step_every=20 * FEWER, overtaken_every=40)
    report.assert_kept()
    assert report.tried["before write"] > 2


@pytest.mark.timeout(900)
def test_scripts_survive_it():
    """Whenever the process dies, a script goes on with what its calls have returned, and each of them is made once."""
    every = 1 if ALL else 6
    report = crashed(SCRIPTING, write_every=every, step_every=40 * FEWER, overtaken_every=60, parked_every=80)
    report.assert_kept()
    assert report.tried["parked at step"] > 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", [SEARCHING, LOADING], ids=lambda scenario: scenario.name)
def test_found_tools_survive_it(scenario: Scenario):
    """Whenever the process dies, tools that were found are called once, and each request is byte for byte as without a crash."""
    every = 1 if ALL else 8
    report = crashed(scenario, write_every=every, step_every=40 * FEWER, overtaken_every=80, parked_every=80)
    report.assert_kept()
    assert report.tried["parked at step"] > 2


@pytest.mark.timeout(900)
def test_compacted_conversations_survive_it():
    """Whenever the process dies, even between a summary and its record, each request is sent as it would have been."""
    report = crashed(READING, write_every=1 if ALL else 8, step_every=30 * FEWER, overtaken_every=60)
    report.assert_kept()
    assert report.tried["before write"] > 2


@pytest.mark.timeout(900)
def test_a_run_in_a_workspace_survives_it_on_another_host():
    """A host that continues a run has the file changes of committed calls and of a nested agent, and no others."""
    report = crashed(WRITING, write_every=1 if ALL else 10, step_every=40 * FEWER, overtaken_every=60)
    report.assert_kept()
    assert report.tried["before write"] > 2


def library(stage: Stage) -> Play:
    """Return the play of a run that reads on in large results, one of them a failure, and asks before it ends."""

    @tool(effect="staged")
    async def look() -> str:
        """Look something up."""
        return "".join(f"page {number}\n" for number in range(100))

    @tool(effect="pure")
    async def fail() -> ToolResult[str]:
        """Fail at length."""
        return ToolResult.error("no " * 200)

    @tool(effect="read")
    async def rest(context: ToolContext) -> str:
        """Ask somebody."""
        assert context.wait_for is not None
        return (await context.wait_for("colour", None, Colour)).name

    def read(call_id: str, **how: Any) -> ToolCall:
        return ToolCall("read_result", {"call_id": call_id, **how})

    calls = [
        ToolCall("look", {}, "a"),
        ToolCall("fail", {}, "b"),
        ToolCall("rest"),
        read("a", search="page 50"),
    ]
    adapter = stage_adapter(stage, *calls, read("b", start=300), "Done.")
    prompt = Prompt("try", "You try.", tools=[look, fail, rest], result_limit=200)
    return Play(adapter, prompt, "Go.", Person(answers={"colour": {"name": "blue"}}))


@pytest.mark.timeout(900)
def test_a_large_result_is_read_whole_whenever_the_process_dies():
    """The whole text is stored before the call that returned it is recorded."""
    every = 1 if ALL else 3
    report = crashed(
        Scenario(name="a library", play=library), write_every=every, step_every=40 * FEWER, overtaken_every=0
    )
    report.assert_kept()
    assert report.tried["before write"] > 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", [SHOPPING, ERRANDS, DECIDING], ids=lambda scenario: scenario.name)
def test_a_run_parked_by_force_at_any_step_is_as_one_that_crashed_there(scenario: Scenario):
    """A run that is parked by force keeps the same laws as a run that crashes, at each step that is tried."""
    sampled: dict[str, Any] = {"write_every": 1000, "step_every": 1000, "overtaken_every": 0}
    report = simulate(scenario, **sampled, parked_every=17 if DEEP else 34 * FEWER)
    report.assert_kept()
    assert report.tried["parked at step"] > 2


KEY = "hunter2-of-the-simulation"


def bank(stage: Stage) -> Play:
    """Return the play of a run whose model passes a secret to each of its calls."""

    @tool(effect="read")
    async def login(key: SecretStr) -> str:
        """Log in."""
        stage.world.happened("used", key=key.get_secret_value())
        return "in"

    @tool(effect="idempotent")
    async def order(key: SecretStr, context: ToolContext) -> str:
        """Log in with an inner call."""
        return (await context.call("login", key=key)).message

    @tool
    async def pay(key: SecretStr) -> str:
        """Pay."""
        stage.world.happened("used", key=key.get_secret_value())
        stage.world.happened("paid")
        return "paid"

    calls = [ToolCall(name, {"key": KEY}) for name in ("login", "order", "pay")]
    adapter = stage_adapter(stage, *calls, "Done.")
    return Play(adapter, Prompt("try", "You try.", tools=[login, order, pay]), "Go.")


def used_as_it_is(seen: Seen) -> str | None:
    wrong = [each.details["key"] for each in seen.world.all("used") if each.details["key"] != KEY]
    return f"used with {wrong}" if wrong else None


def paid_at_most_once(seen: Seen) -> str | None:
    paid = seen.world.count("paid")
    return None if paid <= 1 else f"paid {paid} times"


BANK = Scenario(name="a bank", play=bank, laws=[used_as_it_is, paid_at_most_once], unrecorded=[KEY])


@pytest.mark.timeout(900)
def test_secrets_are_recorded_nowhere_and_never_used_from_a_record():
    report = crashed(BANK, write_every=1 if ALL else 4, step_every=32, overtaken_every=32)
    report.assert_kept()
    assert report.tried["before write"] > 3


def vault(stage: Stage) -> Play:
    """Return the play of a run whose calls each ask a person for a secret."""

    async def asked(context: ToolContext) -> None:
        assert context.wait_for is not None
        key = await context.wait_for("key", {}, SecretStr)
        stage.world.happened("used", key=key.get_secret_value())

    @tool(effect="read")
    async def login(context: ToolContext) -> str:
        """Log in."""
        await asked(context)
        return "in"

    @tool(effect="idempotent")
    async def order(context: ToolContext) -> str:
        """Log in with an inner call."""
        return (await context.call("login")).message

    @tool
    async def pay(context: ToolContext) -> str:
        """Pay."""
        await asked(context)
        stage.world.happened("paid")
        return "paid"

    sign: Any = Handoff("sign", "Let somebody sign.", answer=SecretStr, effect="irreversible")

    @sign.before
    async def before(params: None, *, context: ToolContext) -> Parked[int, str]:
        return Parked(1, "sign this")

    @sign.after
    async def after(private: int, answer: SecretStr, *, context: ToolContext) -> ToolResult[str]:
        stage.world.happened("used", key=answer.get_secret_value())
        stage.world.happened("signed")
        return ToolResult.ok("signed")

    person = Person(answers={"key": KEY, "sign": KEY})
    calls = [ToolCall(name) for name in ("login", "order", "sign", "pay")]
    adapter = stage_adapter(stage, *calls, "Done.")
    return Play(adapter, Prompt("try", "You try.", tools=[login, order, sign, pay]), "Go.", person)


def signed_at_most_once(seen: Seen) -> str | None:
    signed = seen.world.count("signed")
    return None if signed <= 1 else f"signed {signed} times"


VAULT = Scenario(
    name="a vault",
    play=vault,
    laws=[used_as_it_is, paid_at_most_once, signed_at_most_once],
    unrecorded=[KEY],
)


@pytest.mark.timeout(900)
def test_secrets_that_somebody_answers_with_are_recorded_nowhere_either():
    """A secret answer is recorded nowhere. The payment and the signature that depend on one happen at most once."""
    every: dict[str, Any] = (
        {} if DEEP else {"write_every": 1 if ALL else 12, "step_every": 32, "overtaken_every": 32}
    )
    report = simulate(
        VAULT, connected=True, **every
    )  # a secret answer reaches only a process in which the run is live
    report.assert_kept()
    assert report.tried["before write"] > 2


# --- runs recorded in PostgreSQL ----------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "scenario",
    [BANK, SHOPPING, ERRANDS, DECIDING, EXPIRING, WRITING, VAULT] if DEEP else [BANK],
    ids=lambda scenario: scenario.name,
)
def test_a_run_recorded_in_postgresql_survives_the_same_crashes(scenario: Scenario):
    """A run that is recorded in PostgreSQL keeps the laws of its scenario.

    In a deep run, each of seven scenarios is crashed at all points. The restarted process is crashed too, except in the
    scenario with secret answers.
    """
    url, is_secret = postgres.new_url(), scenario is VAULT
    sampled: dict[str, Any] = {"write_every": 20, "step_every": 150, "overtaken_every": 50}
    if DEEP:
        sampled = {"jobs": 2, "parked_every": 0 if is_secret else 1}
        simulate(scenario, jobs=2, connected=True, journal=url).assert_kept()
        if not is_secret:  # a secret answer reaches only a process in which the run is live
            simulate(scenario, jobs=2, overtaken_every=0, again=True, journal=url).assert_kept()
    report = simulate(scenario, connected=is_secret, journal=url, **sampled)
    report.assert_kept()
    assert min(report.tried[each] for each in ("before write", "step", "overtaken before write")) >= 1
    assert postgres.schemas(url) == []


def test_broken_laws_are_found_in_postgresql_too():
    scenario = Scenario(name="a liar", play=liar, laws=[paid_once], unrecorded=["You try."])
    sampled: dict[str, Any] = {"write_every": 1 if DEEP else 2, "step_every": 1000, "overtaken_every": 0}
    report = simulate(scenario, journal=postgres.new_url(), **sampled)
    assert {each.what for each in report.broken} == {"paid 2 times", "'You try.' was recorded"}


def test_the_url_of_no_database_is_refused_at_once():
    with pytest.raises(JournalError, match="is not a plain name"):
        simulate(LIAR, journal="postgresql://host/database?schema=no-name")


# --- violations are reported -------------------------------------------------------------------------


def stage_adapter(stage: Stage, *said: Any) -> Adapter:
    return Adapter(
        stage.model({"You try": said}),
        journal=stage.journal,
        filesystem=stage.files,
        environment=LaterEnvironment(),
        clock=stage.clock,
        new_id=stage.new_id,
    )


def one_call(stage: Stage, made: Any) -> Play:
    """Return the play of a run that makes one call and then ends."""
    adapter = stage_adapter(stage, ToolCall(made.name), "Done.")
    person = Person(approve=True, answers={"colour": {"name": "blue"}})
    return Play(adapter, Prompt("try", "You try.", tools=[made]), "Go.", person)


def paid_once(seen: Seen) -> str | None:
    paid = seen.world.count("paid")
    return None if paid == 1 else f"paid {paid} times"


def liar(stage: Stage) -> Play:
    @tool(effect="staged")
    async def pay() -> str:
        """Pay, although the tool is declared as one that can be rolled back."""
        stage.world.happened("paid")
        return "paid"

    return one_call(stage, pay)


LIAR = Scenario(name="a liar", play=liar, laws=[paid_once])


def test_a_tool_that_says_it_is_staged_and_pays_is_caught():
    report = simulate(LIAR, write_every=FEWER, step_every=3 if ALL else 1000, overtaken_every=0)
    assert {each.law for each in report.broken} == {"paid_once"}
    again = simulate(LIAR, at=report.broken[0].at)
    assert [each.what for each in again.broken] == [report.broken[0].what]
    assert again.tried == {Point.parse(report.broken[0].at).kind: 1}
    with pytest.raises(AssertionError, match=r"at 'before write \d+': paid_once: paid 2 times"):
        report.assert_kept()


@pytest.fixture
def own_path(monkeypatch: pytest.MonkeyPatch):
    """Undo what the command adds to `sys.path`: later tests would import from whatever folder is the current one."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.usefixtures("own_path")
def test_the_command_says_where_a_law_was_broken(capsys: pytest.CaptureFixture[str]):
    status = main(
        [f"{__name__}:LIAR", "--write-every", "2", "--step-every", "1000", "--overtaken-every", "0"]
    )
    said = capsys.readouterr().out
    assert status == 1
    assert "a liar: " in said
    assert "paid_once: paid 2 times" in said
    assert main([f"{__name__}:LIAR", "--at", "before write 3"]) == 0


def forgetful(stage: Stage) -> Play:
    @tool(effect="idempotent")
    async def guess(context: ToolContext) -> str:
        """Return a different value in each process."""
        assert context.wait_for is not None
        colour = await context.wait_for("colour", None, Colour)
        return f"{colour.name} {stage.process}"

    return one_call(stage, guess)


def test_a_tool_that_says_something_else_after_a_crash_is_caught():
    every = 1 if ALL else 5
    report = simulate(
        Scenario(name="forgetful", play=forgetful),
        write_every=every,
        step_every=10 * every,
        overtaken_every=0,
    )
    assert {each.law for each in report.broken} == {"each_call_has_its_result"}
    assert any("not 'blue 0'" in each.what for each in report.broken)


def wandering(stage: Stage) -> Play:
    @tool(effect="idempotent")
    async def wander(context: ToolContext) -> str:
        """Ask a different question on each rerun."""
        assert context.wait_for is not None
        kind = "colour" if stage.world.count("wandered") == 0 else "shade"
        stage.world.happened("wandered")
        return (await context.wait_for(kind, None, Colour)).name

    return one_call(stage, wander)


def test_a_handler_that_does_not_do_the_same_again_is_caught():
    """A handler that behaves differently when it is rerun is reported."""
    report = simulate(
        Scenario(name="wandering", play=wandering), write_every=4, step_every=50, overtaken_every=0
    )
    assert any("not known" in each.what for each in report.broken)


def careless(stage: Stage) -> Play:
    folder = Path(stage.folder, "..", "files").resolve()

    @tool(effect="staged")
    async def scribble(context: ToolContext) -> str:
        """Write one file directly to the folder, and one through the call's filesystem."""
        (folder / "a.txt").write_text("half")
        context.filesystem.write("b.txt", "whole")
        return "written"

    return one_call(stage, scribble)


def test_files_written_past_the_transaction_are_caught():
    scenario = Scenario(name="careless", play=careless)
    report = simulate(scenario, write_every=FEWER, step_every=4 if ALL else 1000, overtaken_every=0)
    assert "files_are_never_torn" in {each.law for each in report.broken}


def talkative(stage: Stage) -> Play:
    @tool(effect="idempotent")
    async def tell(context: ToolContext) -> str:
        """Show a secret in a question."""
        assert context.wait_for is not None
        await context.wait_for("colour", {"price": 'three "or so"'}, Colour)
        return "told"

    return one_call(stage, tell)


def test_a_secret_that_is_shown_is_caught_without_a_crash():
    scenario = Scenario(name="talkative", play=talkative, secrets=['three "or so"'])
    report = simulate(scenario, write_every=100, step_every=1000, overtaken_every=0)
    assert ("nothing_secret_is_shown", "no crash") in {(each.law, each.at) for each in report.broken}


def fickle(stage: Stage) -> Play:
    counted = stage.folder.parent.parent / "times"
    times = len(counted.read_text()) if counted.exists() else 0
    counted.write_text("." * (times + 1))

    @tool(effect="pure")
    async def rest() -> str:
        """Take one more step each time."""
        for _ in range(times):
            await asyncio.sleep(1)
        return "rested"

    return one_call(stage, rest)


def test_a_scenario_that_is_not_the_same_each_time_is_told():
    report = simulate(Scenario(name="fickle", play=fickle), at="step 1")
    assert [each.law for each in report.broken] == ["it is deterministic"]


def broken(stage: Stage) -> Play:
    raise ValueError("the scenario itself does not work")


def test_a_scenario_that_does_not_work_is_told_and_not_crashed():
    report = simulate(Scenario(name="broken", play=broken))
    assert report.tried == {}
    assert "the scenario itself does not work" in str(report)


def deadly(stage: Stage) -> Play:
    raise AssertionError("never called")


class Unloadable:
    """A value that can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return (exec, ("raise ImportError('no such module there')",))

    def __call__(self, seen: Seen) -> str | None:
        return None


def test_a_scenario_that_another_process_cant_import_is_an_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.undo()  # so that the other process is not forked from one that began before the capture
    with pytest.raises(SimulationError, match="at the top level of a module"):
        simulate(Scenario(name="deadly", play=deadly, laws=[Unloadable()]))
    assert "no such module there" in capfd.readouterr().err


@pytest.mark.usefixtures("own_path")
def test_an_invalid_point_is_refused():
    assert str(Point.parse("after write 3")) == "after write 3"
    with pytest.raises(DefinitionError, match="'write three' is not a crash point"):
        Point.parse("write three")
    with pytest.raises(DefinitionError, match="does not name a scenario"):
        main(["testing.simulated"])
    with pytest.raises(DefinitionError, match="is not a Scenario"):
        main(["testing.simulated:SHOP"])


@pytest.mark.parametrize("given", [{"write_every": 0}, {"step_every": -1}, {"jobs": 0}, {"parked_every": -1}])
def test_invalid_counts_are_refused(given: dict[str, Any]):
    """Invalid counts are refused before a process is started."""
    with pytest.raises(DefinitionError, match=r"Pass 1 or more|can't be negative"):
        simulate(Scenario(name="none", play=_never), **given)


def _never(stage: Stage) -> Play:
    raise AssertionError


def test_what_happened_stays(tmp_path: Path):
    world = World(tmp_path / "world")
    world.happened("paid", amount=3)
    later = World(tmp_path / "world", 1)
    later.happened("paid", amount=4)
    assert [(each.process, each.details) for each in world.all("paid")] == [
        (0, {"amount": 3}),
        (1, {"amount": 4}),
    ]
    assert (later.count("paid"), later.count("paid", amount=4), later.count("sent")) == (2, 1, 0)
    world.close()
    later.close()
