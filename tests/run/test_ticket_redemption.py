"""Redeeming tickets: a tool that runs elsewhere commits with the call that issued the ticket, or not at all."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from handrail import (
    Adapter,
    Budget,
    CapabilityPolicy,
    Deadline,
    DirectoryFilesystem,
    LaterEnvironment,
    MemoryFilesystem,
    Operation,
    Prompt,
    PromptEvaluationError,
    ScriptedModel,
    Session,
    SqliteJournal,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    TransientError,
    open_gate,
    tool,
)
from handrail.context import Ticket
from handrail.errors import JournalError, NotSupported, OutcomeUnknown, RunParked, TicketError
from handrail.events import ToolInvoked
from handrail.journal.records import RunRecord
from handrail.journal.sql.leases import new_owner
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import Price, Traits
from handrail.resources.bindings import RunResources
from handrail.run import redemption
from handrail.run.limits import BudgetTracker
from handrail.run.redemption import redeem
from support import importing_support, warm_python
from support.examples import at_most
from support.parked_runs import answer_to
from support.rig import Note
from support.texts import OUTCOME_UNKNOWN
from support.warm_python import Program

pytestmark = pytest.mark.once  # starting processes is slow, and the Python version makes no difference

APP = Path(__file__).with_name("ticket_app.py")
Body = Callable[[ToolContext], Awaitable[str]]


# --- two processes ---------------------------------------------------------------------------------


def start(folder: Path, mode: str, end: str = "-", effect: str = "staged") -> Program:
    return warm_python.start([APP, folder, mode, end, effect], env=importing_support())


def said_by(process: Program) -> str:
    said, _ = process.communicate()
    assert process.returncode == 0
    return said.rstrip("\n")


def giving(folder: Path, end: str, effect: str = "staged") -> Program:
    """Start the process that issues a ticket, and wait until its handler has done so."""
    (folder / "files").mkdir()
    process = start(folder, "give", end, effect)
    assert process.stdout is not None
    assert process.stdout.readline() == "given\n"
    return process


def test_what_another_process_did_commits_with_the_call(tmp_path: Path):
    """What a redeeming process writes appears when the issuing call commits, and not before. After the run, the ticket is refused."""
    first = giving(tmp_path, "ok")
    assert said_by(start(tmp_path, "redeem")) == "done at depth 0, 4 left"
    assert os.listdir(tmp_path / "files") == []
    assert said_by(start(tmp_path, "redeem")) == "done at depth 0, 4 left"  # the recorded result
    (tmp_path / "go").touch()
    assert json.loads(said_by(first)) == {
        "notes": ["before", "done here", "done there"],
        "told": "[10.0, 5.0]",
        "text": "over",
    }
    done = (tmp_path / "files" / "done.txt").read_text()
    assert done.startswith("2 by ")  # the redeemer saw two notes: one committed before, and its own
    assert done.endswith(".1")
    assert "its run 'run' is over" in said_by(start(tmp_path, "redeem"))


def test_nothing_of_it_is_left_where_the_call_fails(tmp_path: Path):
    """If the issuing call fails, neither the file nor the event of the redeeming process remains."""
    first = giving(tmp_path, "fail")
    assert said_by(start(tmp_path, "redeem")) == "done at depth 0, 4 left"
    (tmp_path / "go").touch()
    ended = json.loads(said_by(first))
    assert ended["notes"] == ["before"]
    assert "RuntimeError" in ended["told"]
    assert os.listdir(tmp_path / "files") == []


def test_one_killed_while_redeeming_leaves_nothing(tmp_path: Path):
    """If a process is killed while it redeems a ticket, none of its work remains, and another can redeem the ticket."""
    first = giving(tmp_path, "ok")
    killed = start(tmp_path, "hang")
    assert killed.stdout is not None
    assert killed.stdout.readline() == "begun\n"
    assert "another process is redeeming it" in said_by(start(tmp_path, "redeem"))
    killed.close()
    assert os.listdir(tmp_path / "files") == []
    assert said_by(start(tmp_path, "redeem")) == "done at depth 0, 4 left"
    (tmp_path / "go").touch()
    assert json.loads(said_by(first))["notes"] == ["before", "done here", "done there"]


@pytest.mark.parametrize("effect", ["staged", "irreversible"])
def test_a_deposit_outlives_the_process_that_gave_the_ticket_out(tmp_path: Path, effect: str):
    """A deposit survives the issuer's death. A call that is rerun uses it, and one that can't be rerun reports it."""
    first = giving(tmp_path, "ok", effect)
    assert said_by(start(tmp_path, "redeem", effect=effect)) == "done at depth 0, 4 left"
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert said_by(start(tmp_path, "redeem", effect=effect)) == "done at depth 0, 4 left"
    (tmp_path / "go").touch()
    said = said_by(start(tmp_path, "give", "resume", effect))
    ended = json.loads(said.removeprefix("given\n"))
    if effect == "staged":
        assert ended["notes"] == ["before", "done here", "done there"]
        assert os.listdir(tmp_path / "files") == ["done.txt"]
    else:
        assert ended["notes"] == ["before"]
        assert OUTCOME_UNKNOWN in ended["told"]
        assert "It had done: work." in ended["told"]
        assert os.listdir(tmp_path / "files") == []


# --- one process, which opens the journal's file twice -----------------------------------------------


FREE = Traits(Price(Decimal(0), Decimal(0)), native_output=True)


def tracker_of(context: ToolContext) -> BudgetTracker:
    return context.resources.get(BudgetTracker)


class Pick(BaseModel):
    number: int


def acting(body: Body, effect: Any = "staged", **options: Any) -> Tool[Any, Any]:
    """Return the tool `work` with this body, for the issuer or the redeemer."""

    @tool(name="work", description="Work.", effect=effect, **options)
    async def work(context: ToolContext) -> Any:
        return await body(context)

    return work


async def mark(context: ToolContext) -> str:
    """Leave a note and a file, as the redeemer's work."""
    context.session.dispatch(Note("there"))
    context.filesystem.write("there.txt", "there")
    return "marked"


MARK = acting(mark)


class Stage:
    """A session, files and a journal. Unless it is in memory, the journal is opened twice, as if by two processes."""

    def __init__(self, tmp_path: Path, *, memory: bool = False) -> None:
        self.here = MemoryJournal() if memory else SqliteJournal(tmp_path / "runs.db", watch=0.02)
        self.there = self.here if memory else SqliteJournal(tmp_path / "runs.db", watch=0.02)
        self.files = MemoryFilesystem()
        self.session = Session(id="session")

    def adapter(self, **options: Any) -> Adapter:
        script = ScriptedModel([ToolCall("work"), "over"], traits=FREE)
        return Adapter(script, journal=self.here, filesystem=self.files, **options)

    async def run(self, *tools: Tool[Any, Any], **options: Any) -> str:
        """Evaluate a prompt with these tools, and return the rendered result of the last call."""
        await self.adapter().evaluate(
            Prompt("p", "Do.", tools=list(tools)), "go", session=self.session, run_id="run", **options
        )
        return self.ends[-1].result.render()

    @property
    def ends(self) -> list[Any]:
        return list(self.session[ToolInvoked].all())

    @property
    def notes(self) -> list[str]:
        return [note.text for note in self.session[Note].all()]

    def redeem(self, ticket: str, work: Tool[Any, Any] = MARK, **options: Any) -> Operation[ToolResult[Any]]:
        options = {"journal": self.there, "filesystem": self.files, **options}
        return redeem(ticket, options.pop("arguments", {}), tool=work, **options)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.mark.parametrize("memory", [False, True])
async def test_a_deposit_is_applied_as_an_inner_call(tmp_path: Path, memory: bool):
    """Deposits are applied in ticket order, after the handler's own changes.

    The end of each redeemed call is recorded in the issuer's session, and published to the redeemer too.
    """
    stage, heard = Stage(tmp_path, memory=memory), list[object]()

    async def here(context: ToolContext) -> str:
        context.session.dispatch(Note("here"))
        one, two = context.ticket(), context.ticket()
        assert (await stage.redeem(two)).value == "marked"
        result = await stage.redeem(one, acting(other), on_event=heard.append)
        assert context.session[Note].all() == (Note("here"),)
        return str(result.value)

    async def other(context: ToolContext) -> str:
        context.session.dispatch(Note(f"{context.depth} {context.invocation.path}"))
        return context.call_id

    said = await stage.run(acting(here))
    [one, two, ended] = stage.ends
    assert one.call_id == said == f"{ended.call_id}.1"
    assert two.call_id == f"{ended.call_id}.2"
    assert stage.notes == ["here", "0 ('work',)", "there"]
    assert stage.files.read("there.txt") == "there"
    assert [each.status for each in heard if isinstance(each, ToolInvoked)] == ["ok"]


async def test_a_ticket_of_a_nested_call_commits_with_it(stage: Stage):
    """The deposit under an inner call's ticket is committed with the inner call, and then with the outer one."""

    async def inner(context: ToolContext) -> str:
        return (await stage.redeem(context.ticket(), MARK)).render()

    @tool(name="outer", description="Work.", effect="staged")
    async def outer(context: ToolContext) -> str:
        await context.call("work")
        assert context.session[Note].all() == (Note("there"),)
        return "whole"

    script = ScriptedModel([ToolCall("outer"), "over"])
    prompt = Prompt("p", "Do.", tools=[outer, acting(inner)])
    await Adapter(script, journal=stage.here, filesystem=stage.files).evaluate(
        prompt, "go", session=stage.session
    )
    assert stage.notes == ["there"]
    assert list(stage.files.glob("**")) == ["there.txt"]


@pytest.mark.parametrize(
    ("work", "options", "words"),
    [
        (acting(mark, capabilities=["net"]), {}, "has the capabilities net here, and had none where"),
        (
            acting(mark, effect="irreversible"),
            {},
            "does more here than where the ticket was issued: a 'staged' call",
        ),
        (tool(name="other", description="Other.")(mark), {}, "it is for the tool 'work', not for 'other'"),
        (MARK, {"journal": MemoryJournal()}, "its signature is wrong"),
    ],
)
async def test_a_ticket_is_for_what_it_says(stage: Stage, work: Any, options: Any, words: str):
    """A ticket is refused for a tool with more capabilities, a stronger effect or another name, and in another journal.

    It stays valid for its own tool.
    """

    async def here(context: ToolContext) -> str:
        ticket = context.ticket()
        with pytest.raises(TicketError, match=words):
            await stage.redeem(ticket, work, **options)
        return (await stage.redeem(ticket)).render()

    assert await stage.run(acting(here)) == "marked"
    assert stage.notes == ["there"]


async def test_a_forged_ticket_is_refused(stage: Stage):
    """A ticket that was altered is refused, and so is one that was never issued, even if it is sealed with the right key."""

    async def here(context: ToolContext) -> str:
        ticket = context.ticket()
        body, signature = ticket.split(".")
        with pytest.raises(TicketError, match="its signature is wrong"):
            await stage.redeem(f"{body[:-4]}AAAA.{signature}")
        opened = Ticket.open(ticket, stage.here.key)
        for changed in ({"place": ".7~1.1"}, {"run_id": "other"}):
            forged = msgspec.structs.replace(opened, **changed)
            with pytest.raises(TicketError, match="it is not in this journal"):
                await stage.redeem(forged.seal(stage.here.key))
        return "refused"

    assert await stage.run(acting(here)) == "refused"
    assert stage.notes == []


async def test_an_expired_ticket_is_refused(tmp_path: Path):
    """A ticket expires at its run's deadline."""
    tickets: list[str] = []
    seconds = 1

    async def here(context: ToolContext) -> str:
        tickets.append(context.ticket())
        await asyncio.get_running_loop().create_future()
        return "never"

    while True:
        folder = tmp_path / str(seconds)
        folder.mkdir()
        stage = Stage(folder)
        with pytest.raises(Exception, match="deadline"):
            await stage.run(acting(here), deadline=Deadline.after(seconds))
        if tickets:
            break
        seconds *= 10  # on a busy machine, the deadline may pass before the call begins
    with pytest.raises(TicketError, match=r"its deadline, .+, has passed"):
        await stage.redeem(tickets[0])


async def test_a_call_that_is_over_takes_nothing(stage: Stage):
    """If a call ends while work under its ticket is in progress, that work is compensated, or reported if it can't be."""
    begun, over, undone = asyncio.Event(), asyncio.Event(), list[str]()
    redeeming: list[asyncio.Task[Any]] = []

    async def undo(params: Any, value: Any, *, context: ToolContext) -> None:
        undone.append(str(value))

    async def slow(context: ToolContext) -> str:
        begun.set()
        await over.wait()
        return "sent"

    async def here(context: ToolContext) -> str:
        for effect, options in (("compensable", {"compensate": undo}), ("irreversible", {})):
            begun.clear()
            there = stage.redeem(context.ticket(), acting(slow, effect, **options))
            redeeming.append(asyncio.ensure_future(there))
            await begun.wait()
        return "not waited for"

    stage.session.dispatcher.subscribe(ToolInvoked, lambda event: over.set())
    assert await stage.run(acting(here, "irreversible")) == "not waited for"
    with pytest.raises(TicketError, match=r"is over\. "):
        await redeeming[0]
    with pytest.raises(TicketError, match=r"is over\. Could not be undone: work\."):
        await redeeming[1]
    assert undone == ["sent"]


# --- responsibility of the issuing call --------------------------------------------------------------


async def test_a_call_that_fails_answers_for_what_was_done_under_its_tickets(stage: Stage):
    """If a call fails, work done under its tickets is compensated or reported, and its changes are discarded."""
    undone: list[str] = []

    async def undo(params: Any, value: Any, *, context: ToolContext) -> None:
        undone.append(value)

    @tool(effect="compensable", compensate=undo)
    async def book(context: ToolContext) -> str:
        """Book."""
        return "booked"

    async def there(context: ToolContext) -> str:
        await context.call("book")
        return await mark(context)

    async def here(context: ToolContext) -> str:
        await stage.redeem(context.ticket(), acting(there, "irreversible"), tools=[book])
        raise RuntimeError("no")

    said = await stage.run(acting(here, "irreversible"), book)
    assert undone == ["booked"]
    assert "Could not be undone: work" in said
    assert (stage.notes, list(stage.files.glob("**"))) == ([], [])


async def test_a_deposit_that_does_not_fit_any_more_fails_the_call(tmp_path: Path):
    """If a deposit conflicts with the handler's own change, the call fails, and both the call and the deposit are compensated."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("old")
    stage, undone = Stage(tmp_path), list[str]()
    here_files, there_files = (DirectoryFilesystem(tmp_path / "files") for _ in range(2))
    stage.files = here_files  # pyright: ignore[reportAttributeAccessIssue]  # a real folder this time

    async def undo(params: Any, value: Any, *, context: ToolContext) -> None:
        undone.append(value)

    async def there(context: ToolContext) -> str:
        context.filesystem.write("a.txt", context.filesystem.read("a.txt") + " there")
        return "booked"

    booking = acting(there, "compensable", compensate=undo)

    async def here(context: ToolContext) -> str:
        context.filesystem.write("a.txt", "here")
        return (await stage.redeem(context.ticket(), booking, filesystem=there_files)).render()

    said = await stage.run(acting(here, "compensable", compensate=undo))
    assert "another call or somebody else has changed a.txt in the meantime" in said
    assert undone == ["booked", "booked"]  # the call's own booking, and the one under the ticket
    assert (tmp_path / "files" / "a.txt").read_text() == "old"
    here_files.close()
    there_files.close()


async def test_what_was_read_under_two_tickets_can_not_both_hold(stage: Stage):
    """Of two redemptions that both saw a seat as free, the second one does not fit, and the call fails with a conflict."""

    async def book(context: ToolContext) -> str:
        if not context.session[Note].all():
            context.session.dispatch(Note("booked"))
        return "done"

    async def here(context: ToolContext) -> str:
        tickets = [context.ticket(), context.ticket()]
        for ticket in tickets:
            await stage.redeem(ticket, acting(book))
        return "sold"

    said = await stage.run(acting(here))
    assert "Note" in said
    assert stage.ends[-1].status == "conflict"
    assert stage.notes == []


async def test_a_read_under_a_ticket_counts_as_a_read_of_the_call(stage: Stage):
    """If another call changes what was read under a ticket before the call commits, the call runs again."""
    runs: list[int] = []

    async def look(context: ToolContext) -> str:
        return str(len(context.session[Note].all()))

    async def here(context: ToolContext) -> str:
        runs.append(1)
        seen = await stage.redeem(context.ticket(), acting(look))
        if len(runs) == 1:
            stage.session.dispatch(Note("meanwhile"))
        return seen.value

    await stage.run(acting(here))
    assert len(runs) == 2


async def test_another_try_has_tickets_of_its_own(stage: Stage):
    """Each attempt at a call issues its own tickets, and work under a failed attempt's tickets is discarded."""
    tickets: list[str] = []

    async def here(context: ToolContext) -> str:
        if tickets:
            with pytest.raises(TicketError, match="is over"):
                await stage.redeem(tickets[0])
        tickets.append(context.ticket())
        await stage.redeem(tickets[-1])
        if len(tickets) == 1:
            raise TransientError("again")
        return "second"

    assert await stage.run(acting(here)) == "second"
    assert stage.notes == ["there"]
    assert [Ticket.open(each, stage.here.key).place for each in tickets] == [".1~1.1", ".1~2.1"]


# --- repeated redemption -----------------------------------------------------------------------------


async def test_a_ticket_is_redeemed_once(stage: Stage):
    """A second redemption returns the recorded result, or is refused while the first is in progress."""
    entered: list[str] = []

    async def there(context: ToolContext) -> str:
        entered.append(context.invocation.idempotency_key)
        with pytest.raises(TicketError, match="another process is redeeming it"):
            await stage.redeem(ticket[0])
        return await mark(context)

    ticket: list[str] = []

    async def here(context: ToolContext) -> str:
        ticket.append(context.ticket())
        first = await stage.redeem(ticket[0], acting(there))
        again = await stage.redeem(ticket[0], acting(there))
        assert first.value == again.value == again.render() == "marked"
        return "once"

    assert await stage.run(acting(here)) == "once"
    assert entered == ["run.1.1#work"]
    assert stage.notes == ["there"]


async def test_what_no_handler_began_can_be_redeemed_still(stage: Stage):
    """A ticket can still be redeemed after a redemption with invalid arguments or one that a policy denied."""

    async def here(context: ToolContext) -> str:
        ticket = context.ticket()
        wrong = await stage.redeem(ticket, arguments={"colour": "red"})
        assert not wrong.success
        denied = await stage.redeem(ticket, policies=[CapabilityPolicy(effects={"staged": "deny"})])
        assert denied.message.startswith("work is not allowed")
        return (await stage.redeem(ticket)).render()

    assert await stage.run(acting(here)) == "marked"
    assert stage.notes == ["there"]


async def test_a_failure_is_recorded_too(stage: Stage):
    """A failed redemption is recorded, does not fail the call, and applies none of its changes."""

    async def there(context: ToolContext) -> str:
        await mark(context)
        raise RuntimeError("no")

    async def here(context: ToolContext) -> str:
        ticket = context.ticket()
        for _ in range(2):
            result = await stage.redeem(ticket, acting(there))
            assert not result.success
            assert "RuntimeError" in result.message
        return "went on"

    assert await stage.run(acting(here)) == "went on"
    assert [each.status for each in stage.ends] == ["error", "ok"]
    assert (stage.notes, list(stage.files.glob("**"))) == ([], [])


async def test_one_that_was_cancelled_is_spent(stage: Stage):
    """If a redemption's handler is cancelled, none of its changes remain, and a second redemption only reports the cancellation."""

    async def there(context: ToolContext) -> str:
        await mark(context)
        begun.set()
        return await asyncio.get_running_loop().create_future()

    begun = asyncio.Event()

    async def here(context: ToolContext) -> str:
        ticket = context.ticket()
        redeeming = asyncio.ensure_future(stage.redeem(ticket, acting(there)))
        await begun.wait()
        redeeming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await redeeming
        assert (await stage.redeem(ticket)).message == "work was cancelled."
        return "went on"

    assert await stage.run(acting(here)) == "went on"
    assert stage.notes == []


@pytest.mark.parametrize("step", ["deposit", "release", "release unopened", "close"])
async def test_a_cancellation_in_the_last_steps_of_a_redemption_is_raised_after_them(
    stage: Stage, step: str, monkeypatch: pytest.MonkeyPatch
):
    """If a redemption is cancelled in one of its last steps, the step is completed before the cancellation is raised.

    A deposited result is found afterwards, and a released claim can be acquired.
    """
    redeeming: list[asyncio.Future[Any]] = []
    name = step.split()[0]
    owner: Any = RunResources if name == "close" else type(stage.there.tickets)
    method = "close_logged" if name == "close" else name
    finish_step = getattr(owner, method)

    async def cancelled_meanwhile(*given: Any) -> Any:
        redeeming[0].cancel()
        await asyncio.sleep(0)
        return await finish_step(*given)

    async def here(context: ToolContext) -> str:
        ticket = context.ticket()
        arguments = {"colour": "red"} if step == "release" else {}
        session = Session(id="other") if step == "release unopened" else None
        with monkeypatch.context() as patched:
            patched.setattr(owner, method, cancelled_meanwhile)
            redeeming.append(
                asyncio.ensure_future(stage.redeem(ticket, arguments=arguments, session=session))
            )
            with pytest.raises(asyncio.CancelledError):
                await redeeming[0]
        return (await stage.redeem(ticket)).render()

    assert await stage.run(acting(here)) == "marked"
    assert stage.notes == ["there"]


async def test_one_who_could_not_keep_a_ticket_once_keeps_it_all_the_same(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A redeemer keeps its claim if renewing it fails once, for example because the disk is full."""
    monkeypatch.setattr(redemption, "LEASE_SECONDS", 0.03)
    claim, claims = stage.there.tickets.claim, list[str]()
    kept = asyncio.Event()

    async def failing_once(*given: Any) -> bytes:
        claims.append("")
        if len(claims) == 2:
            raise JournalError("runs.db", "can't write: disk full", "Free some space, and try again.")
        if len(claims) == 3:
            kept.set()
        return await claim(*given)

    monkeypatch.setattr(stage.there.tickets, "claim", failing_once)

    async def there(context: ToolContext) -> str:
        await kept.wait()
        return await mark(context)

    async def here(context: ToolContext) -> str:
        return (await stage.redeem(context.ticket(), acting(there))).message

    await stage.run(acting(here))
    assert stage.notes == ["there"]
    assert "the claim on ticket run.1~1.1 could not be renewed; will retry" in caplog.text


def dead_owner() -> str:
    host, pid, _, rest = new_owner().split("/")
    return f"{host}/{pid}/0/{rest}"


@pytest.mark.parametrize("effect", ["idempotent", "irreversible"])
async def test_one_cut_is_done_again_only_where_that_is_harmless(stage: Stage, effect: str):
    """A redemption that was interrupted by a crash is repeated only if that is harmless. Otherwise, its outcome is unknown."""

    async def here(context: ToolContext) -> str:
        ticket = context.ticket()
        await stage.there.tickets.claim("run", ".1~1.1", dead_owner(), True)  # the claim of a dead process
        if effect == "irreversible":
            with pytest.raises(OutcomeUnknown, match=r"ticket run\.1~1\.1"):
                await stage.redeem(ticket, acting(mark, effect))
        else:
            await stage.redeem(ticket, acting(mark, effect))
        return ToolResult.error("no") if effect == "irreversible" else "done"  # pyright: ignore[reportReturnType]

    said = await stage.run(acting(here, effect))
    if effect == "irreversible":
        assert "Could not be undone: work (under a ticket: it is not known whether it was done)" in said
    assert stage.notes == (["there"] if effect == "idempotent" else [])


# --- budgets -------------------------------------------------------------------------------------------


def left_after(session: Session, trackers: list[Any]) -> list[Any]:
    """Return a list to which the remaining budget is added after each call."""
    found: list[Any] = []
    session.dispatcher.subscribe(ToolInvoked, lambda event: found.append(dict(trackers[0].left())))
    return found


async def test_shares_of_the_budget_add_up(stage: Stage):
    """Each ticket gets half of the remaining budget, rounded down, and the part that is not spent is returned."""
    there_left: list[Any] = []
    trackers: list[Any] = []

    async def there(context: ToolContext) -> str:
        tracker_of(context).reserve(tokens=100, money=0.1).settle(tokens=70, money=0.05)
        there_left.append(context.budget_tracker.remaining())
        return "spent"

    async def here(context: ToolContext) -> str:
        tracker = tracker_of(context)
        trackers.append(tracker)
        tracker.reserve(tokens=tracker.remaining()["tokens"] - 1000)  # so that a round number is left
        one, two = context.ticket(), context.ticket()
        assert tracker.remaining() == {"tokens": 250, "money": 0.25, "tool_calls": 3}
        assert Ticket.open(two, stage.here.key).budget == {"tokens": 250, "money": 0.25, "tool_calls": 2}
        await stage.redeem(one, acting(there))
        return "done"

    left = left_after(stage.session, trackers)
    await stage.run(acting(here), budget=Budget(tokens=100_000, money=1, tool_calls=11))
    assert there_left == [
        {"tokens": 430, "money": 0.45, "tool_calls": 4}
    ]  # one less than half of the calls, because the redeemed call counts as one
    assert left == [{"tokens": 930, "money": Decimal("0.95"), "tool_calls": 9}]


async def test_more_than_the_share_is_refused_there(stage: Stage):
    """A redeemer can't exceed its share, and the issuer is charged only for what was spent."""

    async def there(context: ToolContext) -> str:
        tracker_of(context).reserve(requests=2).settle()
        tracker_of(context).reserve(requests=3)
        return "too much"

    async def here(context: ToolContext) -> str:
        trackers.append(tracker_of(context))
        return (await stage.redeem(context.ticket(), acting(there))).message

    trackers: list[Any] = []
    left = left_after(stage.session, trackers)
    said = await stage.run(acting(here), budget=Budget(requests=9))
    assert "budget for requests is too low: 3 wanted, 2 left" in said
    assert left == [{"requests": 6}]


@settings(max_examples=at_most(30), deadline=None)
@given(
    requests=st.integers(0, 10**6),
    money=st.decimals(0, 1000, places=7, allow_nan=False),
    spends=st.lists(st.none() | st.floats(0, 1), max_size=5),
)
def test_no_share_is_more_than_there_was(requests: int, money: Any, spends: list[float | None]):
    """Whatever is issued and spent, the shares stay within the limits, and in the end only the requests spent are deducted."""
    journal, session = MemoryJournal(), Session()
    spent: list[int] = []
    trackers: list[Any] = []

    async def here(context: ToolContext) -> str:
        trackers.append(tracker_of(context))
        tickets = [context.ticket() for _ in spends]
        shares = [Ticket.open(each, journal.key).budget for each in tickets]
        assert sum(share["requests"] for share in shares) <= requests
        assert sum(Decimal(str(share["money"])) for share in shares) <= money
        for ticket, share, part in zip(tickets, shares, spends, strict=True):
            if part is not None:
                amount = int(share["requests"] * part)

                async def there(context: ToolContext, amount: int = amount) -> str:
                    tracker_of(context).reserve(requests=amount).settle()
                    return "spent"

                result = await redeem(ticket, tool=acting(there), journal=journal)
                assert result.success, result.message
                spent.append(amount)
        return "done"

    script = ScriptedModel([ToolCall("work"), "over"], traits=FREE)
    left = left_after(session, trackers)
    running = Adapter(script, journal=journal).evaluate(
        Prompt("p", "Do.", tools=[acting(here)]),
        "go",
        session=session,
        budget=Budget(requests=requests + 1, money=money),
    )
    with contextlib.suppress(PromptEvaluationError):  # the last request may exceed the budget
        running.wait()
    assert left == [{"requests": requests - sum(spent), "money": money}]


# --- replayed runs --------------------------------------------------------------------------------------


def answered(parked: RunParked, journal: Any) -> None:
    [question] = parked.questions
    journal.questions.answer(answer_to(question, {"number": 1}))


@pytest.mark.parametrize("when", ["before", "while"])
async def test_a_deposit_waits_for_a_run_that_is_parked(tmp_path: Path, when: str):
    """When a parked run's handler reruns, it gets the same ticket with the same share, and the deposit is applied once."""
    stage, tickets = Stage(tmp_path), list[str]()

    async def here(context: ToolContext) -> str:
        if tickets:
            tracker_of(context).reserve(tool_calls=2).settle()  # less budget is left than the first time
        tickets.append(context.ticket())
        if when == "before":
            await stage.redeem(tickets[-1])
        assert context.wait_for is not None
        picked = await context.wait_for("pick", {}, Pick)
        return f"picked {picked.number}"

    work = acting(here)
    prompt = Prompt("p", "Do.", tools=[work])
    script = ScriptedModel([ToolCall("work"), "over"])
    budget = Budget(tool_calls=9)
    first = Adapter(script, journal=stage.here, filesystem=stage.files, environment=LaterEnvironment())
    with pytest.raises(RunParked) as parked:
        await first.evaluate(prompt, "go", session=stage.session, run_id="run", budget=budget)
    if when == "while":
        await stage.redeem(tickets[0])
    answered(parked.value, stage.there)
    later = Adapter(script, journal=stage.there, filesystem=stage.files, environment=LaterEnvironment())
    response = await later.resume("run", prompt)
    assert response.text == "over"
    assert tickets[0] == tickets[1]
    assert response.session[Note].all() == (Note("there"),)
    assert stage.files.read("there.txt") == "there"


async def test_what_was_spent_under_tickets_of_a_finished_call_is_billed_again(tmp_path: Path):
    """The amounts that were spent under a finished call's tickets count against a resumed run's budget."""
    stage, left = Stage(tmp_path), list[Any]()

    async def there(context: ToolContext) -> str:
        tracker_of(context).reserve(tokens=70).settle()
        return "spent"

    async def here(context: ToolContext) -> str:
        return (await stage.redeem(context.ticket(), acting(there))).render()

    @tool(effect="pure")
    async def ask(context: ToolContext) -> str:
        """Record the tokens that are left, and ask a person."""
        left.append(context.budget_tracker.remaining()["tokens"])
        assert context.wait_for is not None
        return str(await context.wait_for("pick", {}, Pick))

    prompt = Prompt("p", "Do.", tools=[acting(here), ask])
    script = ScriptedModel([ToolCall("work"), ToolCall("ask"), "over"])
    first = Adapter(script, journal=stage.here, environment=LaterEnvironment())
    with pytest.raises(RunParked) as parked:
        await first.evaluate(prompt, "go", run_id="run", budget=Budget(tokens=100_000))
    answered(parked.value, stage.there)
    await Adapter(script, journal=stage.there, environment=LaterEnvironment()).resume("run", prompt)
    assert left[0] == left[1]
    assert left[0] <= 100_000 - 70


async def test_a_handler_that_gives_no_ticket_any_more_has_diverged(tmp_path: Path):
    """A rerun handler that no longer issues its ticket has diverged from the record, and the call fails."""
    stage = Stage(tmp_path)

    async def here(context: ToolContext) -> str:
        context.ticket()
        assert context.wait_for is not None
        return str(await context.wait_for("pick", {}, Pick))

    async def changed(context: ToolContext) -> str:
        assert context.wait_for is not None
        return str(await context.wait_for("pick", {}, Pick))

    script = ScriptedModel([ToolCall("work"), "over"])
    first = Adapter(script, journal=stage.here, environment=LaterEnvironment())
    with pytest.raises(RunParked) as parked:
        await first.evaluate(Prompt("p", "Do.", tools=[acting(here)]), "go", run_id="run")
    answered(parked.value, stage.there)
    later = Adapter(script, journal=stage.there, environment=LaterEnvironment())
    response = await later.resume("run", Prompt("p", "Do.", tools=[acting(changed)]))
    assert "the record has ticket" in response.session[ToolInvoked].all()[-1].result.message


# --- refusals ------------------------------------------------------------------------------------------


async def test_only_a_handler_in_a_recorded_run_gives_tickets_out(stage: Stage):
    """`ticket` is refused without a recorded run, in a policy, and in a call that itself redeems a ticket."""

    async def here(context: ToolContext) -> str:
        with pytest.raises(NotSupported, match="Give the run a journal that other processes can open"):
            context.ticket()
        return "none"

    for journal in (None, stage.here):
        assert (await open_gate([acting(here)], journal=journal).invoke("work")).value == "none"

    async def ticket_of_a_ticket(context: ToolContext) -> str:
        return (await stage.redeem(context.ticket(), acting(here))).render()

    class Curious(CapabilityPolicy):
        def check(self, tool: Any, params: Any, *, context: ToolContext) -> Any:
            with pytest.raises(NotSupported, match="Only a tool's handler"):
                context.ticket()
            return super().check(tool, params, context=context)

    script = ScriptedModel([ToolCall("work"), "over"])
    prompt = Prompt("p", "Do.", tools=[acting(ticket_of_a_ticket)], policies=[Curious()])
    await Adapter(script, journal=stage.here).evaluate(prompt, "go", session=stage.session)
    assert stage.ends[-1].result.render() == "none"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["issue", "claim", "claim again", "give back", "deposit", "close", "end"]),
        st.sampled_from([".1~1.1", ".2~1.1"]),
        st.sampled_from(["alive", "other", "dead"]),
    ),
    max_size=12,
)


@settings(max_examples=at_most(60), deadline=None)
@given(steps=STEPS)
def test_both_journals_keep_tickets_alike(steps: list[tuple[str, str, str]], tmp_path_factory: Any):
    """The same steps have the same outcomes in a file journal and one in memory, with at most one deposit per ticket."""
    owners = {"alive": new_owner(), "other": new_owner(), "dead": dead_owner()}

    async def outcomes(journal: Any) -> list[str]:
        run = RunRecord(id="r", session_id="s", principal="p", prompt="p", model="m", began_at=0.0)
        await journal.runs.begin(run)
        box, said, deposited = journal.tickets, list[str](), set[str]()
        for number, (step, place, who) in enumerate(steps):
            by = owners[who]
            try:
                match step:
                    case "issue":
                        said.append(box.issue("r", place, f"text {number}"))
                    case "claim" | "claim again":
                        said.append(str(await box.claim("r", place, by, step == "claim again")))
                    case "give back":
                        await box.release("r", place, by)
                    case "deposit":
                        before = await box.claim("r", place, by, True)
                        if not before:
                            await box.deposit("r", place, by, b"%d" % number)
                            assert place not in deposited
                            deposited.add(place)
                    case "close":
                        said.append(str(await box.close("r", [place])))
                    case _:
                        await journal.runs.leave("r", "done")
            except Exception as error:
                said.append(f"{type(error).__name__} {getattr(error, 'problem', '')}")
        return said

    path = tmp_path_factory.mktemp("journal") / "runs.db"
    in_file = SqliteJournal(path, inline=True)
    assert asyncio.run(outcomes(in_file)) == asyncio.run(outcomes(MemoryJournal()))
    in_file.close()
