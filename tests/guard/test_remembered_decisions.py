"""Remembered decisions in the journal: what they survive, which runs inherit them, and who sees them."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import SecretStr

from handrail import (
    Adapter,
    CapabilityPolicy,
    LaterEnvironment,
    MemoryFilesystem,
    PathArg,
    Prompt,
    ScriptedModel,
    Session,
    SqliteJournal,
    ToolCall,
    ToolContext,
    runs,
    tool,
)
from handrail.errors import AnswerRefused, JournalError, RunBusy, RunParked, SessionOutdated, SessionUnknown
from handrail.events import ApprovalRemembered
from handrail.guard import approvals_of
from handrail.journal.decisions import remembered_by
from handrail.journal.protocol import Journal
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import ToolMessage
from handrail.question import Question
from handrail.session.serialization import load, save
from handrail.testing import Person
from support.parked_runs import answer_to

ran: list[str] = []

NEVER = {"approved": False, "remember": "scope", "reason": "not here"}
NOT_THIS = {"approved": False, "remember": "exact"}
ALWAYS = {"approved": True, "remember": "scope"}


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


@tool
async def pay(amount: int, context: ToolContext) -> str:
    """Pay somebody."""
    ran.append(f"pay {amount}")
    return "paid"


@tool
async def send(text: str, context: ToolContext) -> str:
    """Send something."""
    ran.append(f"send {text}")
    return "sent"


@tool
async def unlock(password: SecretStr, context: ToolContext) -> str:
    """Unlock something with a password that is not shown to the person."""
    ran.append("unlock")
    return "unlocked"


@tool
async def plead(context: ToolContext) -> str:
    """Ask for a permission in a handler that can't be rerun."""
    approval = await context.request_permission("net")
    await asyncio.sleep(3600)
    return f"{approval.approved}"


@tool(effect="staged", capabilities={"fs.write"})
async def edit(path: Annotated[str, PathArg("write")], context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, "new\n")
    return "written"


PROMPT: Prompt[None] = Prompt(
    "desk",
    "Do it.",
    tools=[pay, send, unlock, plead, edit],
    policies=[CapabilityPolicy({"fs.write": "ask"})],
)
PAY, SEND = ToolCall("pay", {"amount": 1}), ToolCall("send", {"text": "a"})


class Office:
    """A journal file that several processes use in turn, with the calls and the person of the current run."""

    def __init__(self, base: Path) -> None:
        self.path = base / "runs.db"
        self.files = MemoryFilesystem()
        self.journal: Journal = SqliteJournal(self.path, watch=None)
        self.calls: list[ToolCall] = []
        self.person = Person(True)
        self.number = 0

    def adapter(self, environment: Any) -> Adapter:
        def says(request: Any) -> Any:
            return "done" if isinstance(request.messages[-1], ToolMessage) else self.calls

        return Adapter(
            ScriptedModel(says), journal=self.journal, environment=environment, filesystem=self.files
        )

    def restart(self) -> None:
        assert isinstance(self.journal, SqliteJournal)
        self.journal.close()
        self.journal = SqliteJournal(self.path, watch=None)

    async def session(self, session_id: str = "s", principal: str = "ada") -> Session:
        try:
            return await runs.session(self.journal, session_id, principal=principal)
        except SessionUnknown:
            return Session(id=session_id, principal=principal)

    async def run(
        self, *calls: ToolCall, says: Any = None, session: Session | None = None, **options: Any
    ) -> list[str]:
        """Run these calls, and return what the model was told. A person answers `says`; without it, nobody can be asked."""
        self.calls, self.number = list(calls), self.number + 1
        self.person = Person(says)
        adapter = self.adapter(self.person if says is not None else None)
        run_id = f"run{self.number}"
        await adapter.evaluate(
            PROMPT, "go", session=session or await self.session(), run_id=run_id, **options
        )
        return await self.told(run_id)

    async def park(self, *calls: ToolCall) -> list[Question]:
        """Start a run that makes these calls and must park, and return its open questions."""
        self.calls, self.number = list(calls), self.number + 1
        with pytest.raises(RunParked):
            await self.adapter(LaterEnvironment()).evaluate(
                PROMPT, "go", session=await self.session(), run_id=f"run{self.number}"
            )
        return [*await self.journal.questions.open(f"run{self.number}")]

    async def resume(self, run_id: str = "run1", says: Any = True, **options: Any) -> list[str]:
        self.person = Person(says)
        await self.adapter(self.person).resume(run_id, PROMPT, **options)
        return await self.told(run_id)

    def answer(self, question: Question, value: Any) -> None:
        self.journal.questions.answer(answer_to(question, value))

    async def told(self, run_id: str) -> list[str]:
        said = [each for each in await runs.said(self.journal, run_id) if isinstance(each, ToolMessage)]
        return [result.text for message in said for result in message.results]

    async def listed(self, session_id: str = "s", principal: str = "ada") -> list[tuple[str, bool]]:
        memory = await runs.approvals(self.journal, session_id, principal=principal)
        return [(each.scope, each.approved) for each in memory]


@pytest.fixture
def office(tmp_path: Path) -> Any:
    made = Office(tmp_path)
    yield made
    close = getattr(made.journal, "close", None)
    if close is not None:
        close()


# --- decisions in later processes and runs -------------------------------------------------------------


async def test_a_lasting_no_is_one_in_the_next_process_under_approve_all(office: Office):
    """A remembered denial holds in the next process, even if that process approves everything else."""
    await office.run(PAY, says=NEVER)
    office.restart()
    told = await office.run(PAY, SEND, approvals="approve_all")
    assert "not here" in told[0]
    assert told[1] == "sent"
    assert ran == ["send a"]


async def test_it_holds_from_its_answer_on_whatever_becomes_of_the_run(office: Office):
    """A remembered answer to a parked run's question holds even if the run is cancelled and never resumed."""
    [question] = await office.park(PAY)
    office.answer(question, NEVER)
    office.restart()
    await runs.cancel(office.journal, "run1")
    assert await office.listed() == [("pay (any arguments)", False)]
    assert "not here" in (await office.run(PAY, approvals="approve_all"))[0]
    assert ran == []


async def test_a_one_time_no_is_one_too_where_the_next_process_approves_all(office: Office):
    """A one-time denial holds for its call even if the next process approves everything, and covers no later call."""
    [question] = await office.park(PAY)
    office.answer(question, {"approved": False, "reason": "not now"})
    office.restart()
    assert "not now" in (await office.resume(approvals="approve_all"))[0]
    assert await office.run(PAY, approvals="approve_all") == ["paid"]


async def test_strict_denies_also_what_was_answered(office: Office):
    """In a process with the mode `strict`, a call is denied even if a person has approved it meanwhile."""
    [question] = await office.park(PAY)
    office.answer(question, ALWAYS)
    office.restart()
    assert "strict" in (await office.resume(approvals="strict"))[0]
    assert ran == []


async def test_what_an_irreversible_handler_was_answered_is_kept_although_it_is_never_entered_again(
    office: Office,
):
    """A remembered answer to an irreversible handler's request is kept even if the process dies in the handler."""
    office.calls = [ToolCall("plead", {})]
    person = Person(lambda question: NEVER if question.name == "net" else {"approved": True})
    running = asyncio.ensure_future(
        office.adapter(person).evaluate(PROMPT, "go", session=await office.session(), run_id="run1")
    )
    while len(person.questions) < 2 or not await office.listed():
        await asyncio.sleep(0.01)
    office.restart()  # the journal is closed, so nothing that happens later is recorded
    running.cancel()
    with pytest.raises((asyncio.CancelledError, JournalError)):
        await running
    assert await office.listed() == [("net for plead", False)]


async def test_what_nobody_saw_is_kept_under_the_journals_key(
    office: Office, monkeypatch: pytest.MonkeyPatch
):
    """A denial of a call with a secret holds in the next process, and the record does not reveal the secret."""
    call = ToolCall("unlock", {"password": "hunter2"})
    await office.run(call, says=NOT_THIS)
    monkeypatch.setattr("handrail.guard.remembered._KEY", b"that of another process")
    office.restart()
    await office.run(call, approvals="approve_all")
    assert ran == []
    await office.run(ToolCall("unlock", {"password": "hunter3"}), approvals="approve_all")
    assert ran == ["unlock"]
    connection = sqlite3.connect(office.path)
    decisions = connection.execute("SELECT body FROM records WHERE chain LIKE 'decisions %'").fetchall()
    connection.close()
    assert decisions
    assert all(b"hunter" not in body for (body,) in decisions)


async def test_what_is_shown_by_its_diff_stays_open_also_in_the_next_process(office: Office):
    """In the next process, too, a question with a diff stays open even if another answer covers it."""
    first, second = await office.park(
        ToolCall("edit", {"path": "docs/a.md"}), ToolCall("edit", {"path": "docs/b.md"})
    )
    office.answer(first, {"approved": True, "remember": "scope"})
    office.restart()
    told = await office.resume(says=False)
    assert [each.id for each in office.person.questions] == [second.id]
    assert told[0] == "written"
    assert "denied" in told[1]
    assert await office.run(ToolCall("edit", {"path": "docs/c.md"})) == ["written"]


async def test_a_question_that_is_covered_is_withdrawn_from_the_record(office: Office):
    """On resume, a question that another answer covers is withdrawn. The run's other questions stay open."""
    first, second, third = await office.park(PAY, PAY, SEND)
    office.answer(first, ALWAYS)
    office.restart()
    with pytest.raises(RunParked):
        await office.adapter(LaterEnvironment()).resume("run1", PROMPT)
    assert [each.id for each in await office.journal.questions.open()] == [third.id]
    with pytest.raises(AnswerRefused):
        office.answer(second, ALWAYS)
    assert await office.resume(says=True) == ["paid", "paid", "sent"]
    assert [each.id for each in office.person.questions] == [third.id]


async def test_a_journal_in_memory_keeps_them_as_well(office: Office):
    """A journal in memory keeps decisions and revocations until the session's last run is deleted."""
    office.journal.close()  # type: ignore[attr-defined]
    office.journal = MemoryJournal()
    [question] = await office.park(PAY)
    office.answer(question, ALWAYS)
    assert await office.resume(says=False) == ["paid"]
    assert await office.listed() == [("pay (any arguments)", True)]
    assert await office.run(PAY) == ["paid"]
    memory = await runs.approvals(office.journal, "s", principal="ada")
    memory.revoke(memory.list()[0].id)
    assert "nobody" in (await office.run(PAY))[0]
    await office.journal.runs.forget(["run1", "run2", "run3"])
    assert await office.journal.decisions.read("s", "ada") == ()


async def test_what_was_decided_without_a_journal_is_recorded_when_there_is_one(office: Office):
    """Decisions made without a journal are recorded by the session's first run with one."""
    session = Session(id="s", principal="ada")
    model = ScriptedModel([PAY, "done", SEND, "done"])
    bare = Adapter(model, environment=Person(NEVER))
    await bare.evaluate(PROMPT, "go", session=session)
    await office.run(SEND, says=ALWAYS, session=load(save(session)))
    office.restart()
    assert sorted(await office.listed()) == [("pay (any arguments)", False), ("send (any arguments)", True)]
    assert "not here" in (await office.run(PAY, approvals="approve_all"))[0]
    empty = Session(id="s", principal="ada")
    with pytest.raises(SessionOutdated):  # a new object with the id does not get around them
        await office.run(PAY, approvals="approve_all", session=empty)


# --- revocation ----------------------------------------------------------------------------------------


async def test_what_is_revoked_elsewhere_counts_at_once_in_a_session_in_memory(office: Office):
    """A decision that another process has revoked does not apply in the next run of a session in memory."""
    session = await office.session()
    await office.run(PAY, says=ALWAYS, session=session)
    assert await office.run(PAY, session=session) == ["paid"]
    elsewhere = SqliteJournal(office.path, watch=None)
    memory = await runs.approvals(elsewhere, "s", principal="ada")
    memory.revoke(memory.list()[0].id, by="the auditor")
    elsewhere.close()
    assert len(approvals_of(session)) == 1, "the session in memory already knows of the revocation"
    assert "nobody" in (await office.run(PAY, session=session))[0]
    assert approvals_of(session).list() == ()


async def test_what_is_revoked_elsewhere_counts_in_the_run_that_goes(office: Office):
    """A decision that another process revokes during a run does not apply to the run's later calls."""

    @tool(effect="read")
    async def meanwhile(context: ToolContext) -> str:
        """Revoke the approval from another process."""
        elsewhere = SqliteJournal(office.path, watch=None)
        memory = await runs.approvals(elsewhere, "s", principal="ada")
        memory.revoke(memory.list()[0].id)
        elsewhere.close()
        return "revoked"

    await office.run(PAY, says=ALWAYS)
    model = ScriptedModel([PAY, ToolCall("meanwhile", {}), PAY, "done"])
    adapter = Adapter(model, journal=office.journal)
    await adapter.evaluate(PROMPT, "go", session=await office.session(), run_id="run2", tools=[meanwhile])
    paid, _, not_paid = await office.told("run2")
    assert paid == "paid"
    assert "nobody" in not_paid


async def test_what_was_revoked_does_not_come_back_with_the_answer_that_made_it(office: Office):
    """If an approval is revoked, the call that it was given for still runs, and the next such call is asked about."""
    [question] = await office.park(PAY)
    office.answer(question, ALWAYS)
    memory = await runs.approvals(office.journal, "s", principal="ada")
    memory.revoke(memory.list()[0].id)
    office.restart()
    assert await office.resume(says=False) == ["paid"]
    assert await office.listed() == []
    await office.run(PAY, says=False)
    assert len(office.person.questions) == 1


# --- visibility, deletion and inheritance --------------------------------------------------------------


async def test_others_never_see_them(office: Office):
    """Neither the principal's other sessions nor another principal's session with the same id sees a decision."""
    await office.run(PAY, says=NEVER)
    office.restart()
    await office.run(PAY, approvals="approve_all", session=Session(id="t", principal="ada"))
    await office.run(PAY, approvals="approve_all", session=Session(id="s", principal="eve"))
    assert ran == ["pay 1", "pay 1"]
    assert await office.listed("t") == await office.listed("s", "eve") == []
    with pytest.raises(SessionUnknown):
        await runs.approvals(office.journal, "s", principal="bob")


async def test_they_are_forgotten_with_their_session_and_not_before(office: Office):
    """A session's decisions are deleted together with its last run."""
    await office.run(PAY, says=NEVER)
    await office.run(SEND, says=True)
    await office.journal.runs.forget(["run1"])
    assert len(await office.journal.decisions.read("s", "ada")) == 1
    await office.journal.runs.forget(["run2"])
    assert await office.journal.decisions.read("s", "ada") == ()


@pytest.mark.parametrize("how", ["fork", "export"])
async def test_a_run_that_is_parted_takes_the_denials_along_and_no_approval(
    office: Office, how: str, tmp_path: Path
):
    """A forked or imported run inherits its session's denials, except revoked ones, and none of its approvals."""
    says = {"pay": NEVER, "send": ALWAYS, "unlock": NOT_THIS}
    unlocking = ToolCall("unlock", {"password": "x"})
    await office.run(PAY, SEND, unlocking, says=lambda question: says[question.name])
    memory = await runs.approvals(office.journal, "s", principal="ada")
    memory.revoke(next(each.id for each in memory if each.tool == "unlock"))
    await office.run(PAY, SEND, unlocking, says=True)
    ran.clear()
    if how == "fork":
        await runs.fork(office.journal, "run2", 0, "other")
        session_id = "other"
    else:
        await runs.export(office.journal, "run2", tmp_path / "run.jsonl")
        await runs.import_(office.journal, tmp_path / "run.jsonl", run_id="other")
        session_id = "other"
        assert (await office.journal.runs.get("other")).status == "done"
        office.number = 5
        told = await office.run(PAY, session=await office.session(session_id), approvals="approve_all")
        assert "not here" in told[0]
        assert await office.listed(session_id) == [("pay (any arguments)", False)]
        return
    office.restart()
    office.calls = [PAY, SEND, unlocking]
    told = await office.resume("other", says=True)
    assert [each.name for each in office.person.questions] == ["send", "unlock"]
    assert "not here" in told[0]
    assert await office.listed(session_id) == [("pay (any arguments)", False)]
    assert len(await office.listed()) == 2, "the original session lost a decision"
    await runs.fork(office.journal, "other", 0, "third")
    office.calls = [PAY]
    assert "not here" in (await office.resume("third", approvals="approve_all"))[0]


async def test_what_a_session_was_saved_with_goes_along_by_the_same_rule(office: Office):
    """A fork also inherits the denials, but not the approvals, that its session had before it used a journal."""
    session = Session(id="s", principal="ada")
    model = ScriptedModel([[PAY, SEND], "done"])
    says = {"pay": NEVER, "send": ALWAYS}
    bare = Adapter(model, environment=Person(lambda question: says[question.name]))
    await bare.evaluate(PROMPT, "go", session=session)
    await office.run(PAY, says=True, session=session)
    await runs.fork(office.journal, "run1", 0, "other")
    office.restart()
    assert await office.listed("other") == [("pay (any arguments)", False)]
    office.calls = [PAY, SEND]
    told = await office.resume("other", says=False)
    assert "not here" in told[0]
    assert [each.name for each in office.person.questions] == ["send"]
    assert [each.scope for each in approvals_of(await office.session("other"))] == ["pay (any arguments)"]


# --- records in the journal ----------------------------------------------------------------------------


async def test_a_call_with_nothing_remembered_costs_the_record_nothing(office: Office):
    """If nothing is remembered, a run reads the session's decisions only once, and writes none."""
    written: list[str] = []
    read: list[str] = []
    box = office.journal.decisions
    office.journal.decisions.write = lambda decision, run_id="": written.append(decision.id)  # type: ignore[method-assign]
    there = box.read

    async def counted(session_id: str, principal: str, /) -> Any:
        read.append(session_id)
        return await there(session_id, principal)

    box.read = counted  # type: ignore[method-assign]
    await office.run(PAY, SEND, PAY, says=True, session=Session(id="s", principal="ada"))
    assert (read, written) == (["s"], [])
    assert not [each for each in await office.journal.calls.entries("run1") if each.kind == "approval"]


async def test_what_decides_by_memory_is_noted_at_its_place(office: Office):
    """If a remembered decision decides a request, the run's record has an approval entry for that request."""
    await office.run(PAY, says=ALWAYS)
    await office.run(PAY, PAY)
    noted = [each.key for each in await office.journal.calls.entries("run2") if each.kind == "approval"]
    assert noted == [".1~1!1", ".2~1!1"]


async def test_a_decision_that_can_not_be_recorded_does_not_count(office: Office):
    """A revocation that can't be recorded raises an error and has no effect."""
    session = await office.session()
    await office.run(PAY, says=ALWAYS, session=session)
    assert isinstance(office.journal, SqliteJournal)
    office.journal.close()
    with pytest.raises(JournalError, match="it is closed"):
        approvals_of(session).revoke(approvals_of(session).list()[0].id)
    assert len(approvals_of(session)) == 1
    office.journal = SqliteJournal(office.path, watch=None)


async def test_a_process_that_was_overtaken_decides_nothing(office: Office):
    """A process whose run another process has taken over can't record a decision in it."""
    [question] = await office.park(PAY)
    other = SqliteJournal(office.path, watch=None)
    await other.runs.take("run1")
    session = await office.session()
    fact = remembered_by(
        question,
        answer_to(question, ALWAYS, by="ada"),
        question.asked_at,
    )
    assert isinstance(fact, ApprovalRemembered)
    assert session.decisions is not None
    with pytest.raises(RunBusy):
        session.decisions.write(fact)
    await other.runs.leave("run1", "parked")
    other.close()
    assert await office.listed() == []


@pytest.mark.parametrize(
    "value",
    [
        {"approved": True},
        {"approved": True, "remember": "once"},
        {"approved": True, "remember": "always"},
        {"approved": "yes", "remember": "exact"},
        {"approved": 1, "remember": "exact"},
        {"remember": "exact"},
        {"approved": True, "remember": "exact", "for": "ever"},
        {"approved": True, "remember": "exact", "reason": 1},
        {"approved": True, "remember": "exact", "scope": "pay (any arguments)"},
        {"approved": True, "remember": "scope", "scope": "send (any arguments)"},
        {"approved": True, "remember": "scope", "scope": ["pay (any arguments)"]},
        [True, "exact"],
        None,
    ],
)
async def test_an_answer_that_will_not_be_taken_leaves_nothing(office: Office, value: Any):
    """An answer that is not to be remembered, or that the asker would refuse, leaves no decision."""
    [question] = await office.park(PAY)
    answer = answer_to(question, value, by="ada")
    assert remembered_by(question, answer, question.asked_at) is None


async def test_a_run_that_fails_keeps_them(office: Office):
    """A decision is remembered even if its run fails."""
    office.calls = [PAY]
    model = ScriptedModel([PAY, RuntimeError("broken")])
    adapter = Adapter(model, journal=office.journal, environment=Person(NEVER))
    with pytest.raises(RuntimeError):
        await adapter.evaluate(PROMPT, "go", session=Session(id="s", principal="ada"), run_id="run9")
    office.restart()
    assert await office.listed() == [("pay (any arguments)", False)]
