"""Tests for approvals by other people: who is asked, whose vote counts, and how votes survive a restart."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from handrail import (
    Adapter,
    CapabilityPolicy,
    PolicyDecision,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolContext,
    open_gate,
    tool,
)
from handrail.clock import SystemClock
from handrail.errors import AnswerRefused, DefinitionError
from handrail.guard import ask
from handrail.guard.policy import Verdict
from handrail.journal.answers import check_answer
from handrail.journal.records import OVER
from handrail.protocols import Environment
from handrail.question import Answer, Question, Quorum, Vote
from handrail.serve.people import People, people_path
from handrail.serve.sources import PromptSource
from handrail.testing import Person
from support import warm_python
from support.parked_runs import answer_to
from support.passwords import COST, cheap_hashes
from support.serving import Client, play, said_by, serving

__all__ = ["cheap_hashes"]

SECRET = "correct horse battery"
TWO = ask(approvals=2)
FINANCE = ask(role="finance")


@tool(capabilities={"money"})
async def pay(amount: int, context: ToolContext) -> str:
    """Pay somebody."""
    return f"paid {amount}"


@tool(capabilities={"money", "law"})
async def sign(context: ToolContext) -> str:
    """Sign a contract."""
    return "signed"


def desk(seconds: float | None = None, **verdicts: Any) -> PromptSource:
    prompt = Prompt("desk", "Help.", tools=[pay, sign], policies=[CapabilityPolicy(verdicts)])
    return PromptSource(prompt, Adapter(ScriptedModel(play), approval_seconds=seconds))


def people_in(folder: Path, *users: tuple[str, Sequence[str]]) -> None:
    people = People(folder / "people.db")
    for name, roles in users:
        people.add(name, roles, SECRET)
    people.close()


def by(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}:{SECRET}"}


TEAM = (
    ("ann", ["user"]),
    ("fay", ["finance"]),
    ("gus", ["finance"]),
    ("lea", ["law"]),
    ("vic", ["viewer", "finance"]),
)


async def inbox(client: Client, name: str) -> list[Any]:
    return (await client.ask("GET", "/inbox", headers=by(name))).json["questions"]


async def vote(client: Client, name: str, question: Any, approved: bool = True, **more: Any) -> Any:
    given = {"question_id": question["id"], "digest": question["digest"], "approved": approved, **more}
    return await client.ask("POST", "/inbox/answers", given, by(name))


async def asked(client: Client, said: str = 'call pay {"amount": 5}', name: str = "ann") -> Any:
    await client.say("t", said, by(name))
    return await client.asked("t", by(name))


async def ending(client: Client, name: str = "ann") -> str:
    return said_by((await client.idle("t", by(name)))["messages"])[-1]


# --- who is asked --------------------------------------------------------------------------------------


async def test_two_others_approve_and_each_sees_that_question_only(tmp_path: Path):
    people_in(tmp_path, *TEAM)
    async with serving(tmp_path, desk(money=TWO)) as client:
        question = await asked(client)
        assert question["quorums"] == [{"role": None, "approvals": 2}]
        [seen] = await inbox(client, "fay")
        assert (seen["id"], seen["principal"], seen["votes"]) == (question["id"], "ann", [])
        assert seen["payload"]["arguments"] == {"amount": 5}
        for path in (
            "/threads/t",
            "/threads/t/events",
            "/threads/t/files",
            f"/threads/t/runs/{question['run_id']}",
        ):
            assert (await client.ask("GET", path, headers=by("fay"))).status == 404
        assert (await vote(client, "fay", question)).json == {"decided": None}
        assert [(each["votes"], each["voted"]) for each in await inbox(client, "fay")] == [(["fay"], True)]
        assert (await vote(client, "fay", question)).json == {"decided": None}, (
            "the same person twice is one vote"
        )
        assert (await client.ask("GET", "/threads/t", headers=by("ann"))).json["questions"][0]["votes"] == [
            "fay"
        ]
        assert (await vote(client, "lea", question)).json == {"decided": True}
        assert await ending(client) == "Done: paid 5"
        assert await inbox(client, "gus") == []


async def test_one_denial_ends_it(tmp_path: Path):
    people_in(tmp_path, *TEAM)
    async with serving(tmp_path, desk(money=TWO)) as client:
        question = await asked(client)
        await vote(client, "fay", question)
        assert (await vote(client, "gus", question, False, reason="too much")).json == {"decided": False}
        assert "not approved (denied): gus: too much" in await ending(client)
        late = await vote(client, "lea", question)
        assert (late.status, late.kind) == (409, "AnswerRefused")


async def test_the_owner_never_counts_whatever_roles_they_have(tmp_path: Path):
    people_in(tmp_path, ("fay", ["finance", "admin"]), ("gus", ["finance"]))
    async with serving(tmp_path, desk(money=FINANCE)) as client:
        question = await asked(client, name="fay")
        assert await inbox(client, "fay") == []
        assert (await vote(client, "fay", question)).kind == "AnswerRefused"
        for value in ({"approved": True}, {"approved": True, "remember": "exact"}, {"approved": False}):
            given = {"question_id": question["id"], "digest": question["digest"], "value": value}
            said = await client.ask("POST", "/threads/t/answers", given, by("fay"))
            assert (said.status, said.kind) == (409, "AnswerRefused")
            assert "inbox" in said.json["error"]["message"]
        assert (await vote(client, "gus", question)).json == {"decided": True}
        assert await ending(client, "fay") == "Done: paid 5"


@pytest.mark.parametrize("name", ["lea", "vic", "ann"])
async def test_others_than_those_asked_neither_see_nor_decide(tmp_path: Path, name: str):
    """People without the role, viewers, and the run's owner don't have the question in their inbox, and can't decide it."""
    people_in(tmp_path, *TEAM)
    async with serving(tmp_path, desk(money=FINANCE)) as client:
        question = await asked(client)
        said = await client.ask("GET", "/inbox", headers=by(name))
        assert said.status == 403 or said.json == {"questions": []}
        assert (await vote(client, name, question)).status in (403, 409)
        assert len(await inbox(client, "fay")) == 1
        assert (await vote(client, "fay", question)).json == {"decided": True}


async def test_a_vote_names_the_digest_that_was_shown(tmp_path: Path):
    people_in(tmp_path, *TEAM)
    async with serving(tmp_path, desk(money=FINANCE)) as client:
        question = await asked(client)
        said = await vote(client, "fay", {**question, "digest": "0" * 64})
        assert (said.status, said.kind) == (409, "AnswerRefused")
        [seen] = await inbox(client, "fay")
        assert seen["votes"] == []


async def test_every_role_that_is_asked_for_has_to_approve(tmp_path: Path):
    people_in(tmp_path, *TEAM)
    async with serving(tmp_path, desk(money=FINANCE, law=ask(role="law"))) as client:
        question = await asked(client, "call sign")
        assert (await vote(client, "fay", question)).json == {"decided": None}
        assert (await vote(client, "gus", question)).json == {"decided": None}
        assert (await vote(client, "lea", question)).json == {"decided": True}
        assert await ending(client) == "Done: signed"


@pytest.mark.parametrize(
    ("team", "verdict", "words"),
    [
        ([("ann", ["user"]), ("fay", ["finance"])], TWO, "2 people who may approve for others, not counting 'ann', and only 1 can be asked"),
        ([("ann", ["admin"]), ("lea", ["law"])], FINANCE, "1 person with the role 'finance', not counting 'ann', and nobody can be asked"),
        ([("ann", ["finance"])], FINANCE, "nobody can be asked"),
        ([("ann", ["user"]), ("vic", ["viewer", "finance"])], FINANCE, "nobody can be asked"),
    ],
)  # fmt: skip
async def test_where_too_few_such_people_exist_it_is_denied_at_once(
    tmp_path: Path, team: Any, verdict: Quorum, words: str
):
    people_in(tmp_path, *team)
    async with serving(tmp_path, desk(money=verdict)) as client:
        await client.say("t", 'call pay {"amount": 5}', by("ann"))
        assert words in await ending(client)


@pytest.mark.parametrize("approvals", [None, "approve_all", "strict"])
async def test_nothing_stands_in_for_the_people_who_are_asked(tmp_path: Path, approvals: Any):
    """If nobody can vote, the call is denied, even with `approve_all`."""
    source = desk(money=FINANCE)
    source._approvals = approvals  # pyright: ignore[reportPrivateUsage]
    async with serving(tmp_path, source) as client:
        await client.say("t", 'call pay {"amount": 5}')
        told = said_by((await client.idle("t"))["messages"])[-1]
        assert "pay was not approved (denied)" in told


async def test_a_plain_approval_that_is_remembered_does_not_cover_it(tmp_path: Path):
    people_in(tmp_path, *TEAM)
    async with serving(tmp_path, desk(money="ask")) as client:
        question = await asked(client)
        value = {"approved": True, "remember": "scope"}
        given = {"question_id": question["id"], "digest": question["digest"], "value": value}
        assert (await client.ask("POST", "/threads/t/answers", given, by("ann"))).status == 200
        await ending(client)
    async with serving(tmp_path, desk(money=FINANCE)) as client:
        question = await asked(client)
        assert "scopes" not in question["payload"]
        assert (await vote(client, "fay", question)).json == {"decided": True}


# --- votes after a restart ----------------------------------------------------------------------------


async def test_votes_outlive_parking_and_a_restart(tmp_path: Path):
    people_in(tmp_path, *TEAM)
    async with serving(tmp_path, desk(money=TWO), park_after=0.01) as client:
        question = await asked(client)
        await vote(client, "fay", question)
        await client.until("t", lambda seen: client.app.threads.find("ann", "t").live is None, by("ann"))  # type: ignore[union-attr]
    async with serving(tmp_path, desk(money=TWO)) as client:
        [seen] = await inbox(client, "gus")
        assert (seen["digest"], seen["votes"]) == (question["digest"], ["fay"])
        assert (await vote(client, "gus", question)).json == {"decided": True}
        assert await ending(client) == "Done: paid 5"


@pytest.mark.parametrize("change", ["removed", "without the role"])
async def test_a_vote_of_somebody_who_may_not_vote_any_more_does_not_count(tmp_path: Path, change: str):
    """It neither approves nor denies, and the question stays open for others."""
    people_in(tmp_path, *TEAM, ("hal", ["finance"]))
    people = People(tmp_path / "people.db")
    async with serving(tmp_path, desk(money=ask(role="finance", approvals=2))) as client:
        question = await asked(client)
        assert (await vote(client, "fay", question)).json == {"decided": None}
        people.remove("fay")
        if change == "without the role":
            people.add("fay", ["law"], SECRET)
        assert (await vote(client, "gus", question)).json == {"decided": None}
        assert [each["votes"] for each in await inbox(client, "hal")] == [["gus"]]
        assert (await vote(client, "hal", question)).json == {"decided": True}
        assert await ending(client) == "Done: paid 5"
    people.close()


@pytest.mark.parametrize("approved", [False, True])
async def test_a_vote_of_an_account_that_was_replaced_does_not_count(tmp_path: Path, approved: bool):
    """The new account of the same name votes for itself, and a request that the old one had sent before counts for nothing."""
    people_in(tmp_path, *TEAM)
    people = People(tmp_path / "people.db")
    async with serving(tmp_path, desk(money=TWO)) as client:
        question = await asked(client)
        old = people.find("lea")
        assert old is not None
        assert (await vote(client, "fay", question)).json == {"decided": None}
        for name in ("fay", "lea"):
            people.remove(name)
            people.add(name, ["finance"], SECRET)
        late = Answer(question_id=question["id"], digest=question["digest"], by="lea")
        assert await client.app.inbox.vote(old, late, True) is None
        assert [(each["votes"], each["voted"]) for each in await inbox(client, "fay")] == [([], False)]
        assert (await vote(client, "gus", question)).json == {"decided": None}
        decided = await vote(client, "fay", question, approved)
        assert decided.json == {"decided": approved}
        assert await ending(client) == "Done: paid 5" if approved else "denied" in await ending(client)
    people.close()


async def test_a_denial_of_somebody_who_was_removed_does_not_count(tmp_path: Path):
    """It was recorded, but its process ended before it was counted."""
    people_in(tmp_path, *TEAM)
    async with serving(tmp_path, desk(money=FINANCE)) as client:
        question = await asked(client)
    no = Vote(
        question_id=question["id"], digest=question["digest"], by="fay", roles=("finance",), approved=False
    )
    with closing(SqliteJournal(tmp_path / "runs.db")) as journal:
        await journal.votes.cast(question["run_id"], no)
    with closing(People(tmp_path / "people.db")) as people:
        people.remove("fay")
    async with serving(tmp_path, desk(money=FINANCE)) as client:
        assert (await vote(client, "gus", question)).json == {"decided": True}
        assert await ending(client) == "Done: paid 5"


@pytest.mark.parametrize("is_parked", [False, True])
@pytest.mark.parametrize("change", ["removed", "made a viewer"])
async def test_the_waiting_call_of_somebody_who_was_removed_does_not_go_on(
    tmp_path: Path, change: str, is_parked: bool
):
    """Approvers do not see it any more, and neither their votes, an answer in the journal nor a restart continue it."""
    people_in(tmp_path, *TEAM)
    people = People(tmp_path / "people.db")
    async with serving(tmp_path, desk(money=FINANCE), park_after=0.01 if is_parked else 300.0) as client:
        question = await asked(client)
        if is_parked:
            await client.until("t", lambda seen: client.app.threads.parked == 1, by("ann"))
        people.remove("ann")
        if change == "made a viewer":
            people.add("ann", ["viewer"], SECRET)
        assert await inbox(client, "fay") == []
        assert (await vote(client, "fay", question)).status == 409
        await client.app.threads.poll()
        while client.app.threads.running():  # a run in memory that waits is parked
            await asyncio.sleep(0.01)
        yes = Vote(
            question_id=question["id"], digest=question["digest"], by="fay", roles=("finance",), approved=True
        )
        decided = Answer(
            question_id=question["id"],
            digest=question["digest"],
            by="fay",
            value={"approved": True},
            votes=(yes,),
        )
        client.app.threads.journal.questions.answer(decided)
        await client.app.threads.poll()
        assert not client.app.threads.running()
    async with serving(tmp_path, desk(money=FINANCE)) as client:
        assert not client.app.threads.running()
        row = await client.app.threads.journal.runs.get(question["run_id"])
        assert row.status not in OVER
    people.remove("ann")
    people.add("ann", ["user"], SECRET)
    async with serving(tmp_path, desk(money=FINANCE)) as client:
        assert await ending(client) == "Done: paid 5", "somebody who may run again gets it back"
    people.close()


async def test_a_vote_that_was_recorded_but_not_counted_is_counted_at_the_start(tmp_path: Path):
    """If a process ends between recording the last vote and counting the votes, the next process counts them."""
    people_in(tmp_path, *TEAM)
    async with serving(tmp_path, desk(money=TWO)) as client:
        question = await asked(client)
        await vote(client, "fay", question)
    with closing(People(tmp_path / "people.db")) as people:
        since = people.who_may_vote(None, "ann")["gus"]
    journal = SqliteJournal(tmp_path / "runs.db")
    last = Vote(
        question_id=question["id"],
        digest=question["digest"],
        by="gus",
        since=since,
        roles=("approver",),
        approved=True,
    )
    await journal.votes.cast(question["run_id"], last)
    journal.close()
    async with serving(tmp_path, desk(money=TWO)) as client:
        assert await ending(client) == "Done: paid 5"


class Hands(SystemClock):
    """A clock that a test can set forward."""

    by = timedelta()

    def now(self) -> datetime:
        return super().now() + self.by


@pytest.mark.parametrize("voted", [False, True])
async def test_a_question_that_has_expired_takes_no_vote_and_its_call_is_denied(tmp_path: Path, voted: bool):
    """Votes before the expiry do not decide it either, unless they were enough. The run goes on by itself."""
    people_in(tmp_path, *TEAM)
    clock = Hands()
    async with serving(tmp_path, desk(3600.0, money=TWO), clock=clock, park_after=0.01) as client:
        question = await asked(client)
        if voted:
            await vote(client, "fay", question)
        await client.until("t", lambda seen: client.app.threads.find("ann", "t").live is None, by("ann"))  # type: ignore[union-attr]
        clock.by = timedelta(hours=2)
        assert (await vote(client, "gus", question)).status == 409
        assert await inbox(client, "gus") == []
        await client.app.threads.poll()
        assert "pay was not approved (timed out)" in await ending(client)


async def test_a_forged_vote_is_refused(tmp_path: Path):
    """After a vote is written directly to the journal's file, no vote is accepted, and the run is reported as altered."""
    people_in(tmp_path, *TEAM)
    async with serving(tmp_path, desk(money=TWO)) as client:
        question = await asked(client)
        await vote(client, "fay", question)
    with closing(sqlite3.connect(tmp_path / "runs.db")) as database, database:
        last = Vote(
            question_id=question["id"],
            digest=question["digest"],
            by="gus",
            roles=("approver",),
            approved=True,
        )
        copied = "SELECT (SELECT max(number) + 1 FROM records), chain, max(link) + 1, kind, key, at, session_id, ?, mac, state, begins FROM records"
        database.execute(f"INSERT INTO records {copied} WHERE kind = 'vote'", (msgspec.msgpack.encode(last),))
        database.execute("UPDATE chains SET links = links + 1 WHERE chain LIKE 'outside %'")
    async with serving(tmp_path, desk(money=TWO)) as client:
        said = await vote(client, "lea", question)
        assert said.status >= 400
        [line] = (await client.ask("GET", "/threads", headers=by("ann"))).json["threads"]
        assert (line["id"], line["status"]) == ("t", "waiting")
        [run] = (await client.ask("GET", "/runs", headers=by("ann"))).json["runs"]
        assert run["status"] == "altered"
        assert "not what was recorded" in run["error"]
        await client.serves(by("ann"))  # one altered run does not stop the others


@pytest.mark.parametrize("seen_before", [False, True])
@pytest.mark.parametrize(
    ("was", "now"),
    [(b"\xa6amount\x05", b"\xa6amount\x01"), (b"\xa9approvals\x02", b"\xa9approvals\x01")],
    ids=["text", "quorum"],
)
async def test_an_altered_question_is_never_shown_and_takes_no_vote(
    tmp_path: Path, was: bytes, now: bytes, seen_before: bool
):
    """If a question's row differs from what was recorded, the question is shown to nobody and accepts no vote.

    Once the row is restored, people can vote.
    """
    people_in(tmp_path, *TEAM)
    async with serving(tmp_path, desk(money=TWO)) as client:
        question = await asked(client)
        if seen_before:
            assert [each["id"] for each in await inbox(client, "fay")] == [question["id"]]
        with closing(sqlite3.connect(tmp_path / "runs.db")) as database, database:
            [(body,)] = database.execute("SELECT question FROM questions").fetchall()
            assert was in body
            database.execute("UPDATE questions SET question = ?", (body.replace(was, now),))
        assert await inbox(client, "fay") == []
        assert (await vote(client, "fay", question)).status >= 400
        owner = await client.ask("GET", "/threads/t", headers=by("ann"))
        assert owner.status >= 400
        assert owner.kind == "JournalAltered"
        await client.serves(by("ann"))
        with closing(sqlite3.connect(tmp_path / "runs.db")) as database, database:
            assert database.execute("SELECT count(*) FROM records WHERE kind = 'vote'").fetchone() == (0,)
            database.execute("UPDATE questions SET question = ?", (body,))
        [shown] = await inbox(client, "gus")
        assert (shown["votes"], shown["payload"]["arguments"]) == ([], {"amount": 5})
        await vote(client, "fay", question)
        assert (await vote(client, "gus", question)).json == {"decided": True}
        assert await ending(client) == "Done: paid 5"


async def test_other_policies_after_a_restart_ask_anew(tmp_path: Path):
    """A vote that was cast under one rule does not count under another."""
    people_in(tmp_path, *TEAM)
    async with serving(tmp_path, desk(money=TWO)) as client:
        question = await asked(client)
        await vote(client, "lea", question)
    async with serving(tmp_path, desk(money=ask(role="finance", approvals=2))) as client:
        await client.app.threads.thread("ann", "t").go_on()
        again = await client.until("t", lambda seen: bool(seen["questions"]) and seen["questions"][0]["digest"] != question["digest"], by("ann"))  # fmt: skip
        new = again["questions"][0]
        assert new["votes"] == []
        assert (await vote(client, "fay", question)).status == 409
        assert (await vote(client, "fay", new)).json == {"decided": None}
        assert (await vote(client, "gus", new)).json == {"decided": True}


APP = '''
import json
from handrail import Adapter, CapabilityPolicy, Prompt, ScriptedModel, ToolCall, ToolContext, tool
from handrail.guard import ask
from handrail.messages import ToolMessage

@tool(capabilities={"money"})
async def pay(amount: int, context: ToolContext) -> str:
    """Pay somebody."""
    return f"paid {amount}"

def play(request):
    last = request.messages[-1]
    return f"Done: {last.results[-1].text}" if isinstance(last, ToolMessage) else ToolCall("pay", {"amount": 5})

prompt = Prompt("desk", "Help.", tools=[pay], policies=[CapabilityPolicy({"money": ask(approvals=2)})])
adapter = Adapter(ScriptedModel(play))
'''


@contextmanager
def killed(folder: Path) -> Generator[Client]:
    """Run `handrail serve` while the block runs, then kill it."""
    program = ["-m", "handrail", "serve", "desk.py", "--port", "0", "--journal", "runs.db"]
    kept = {name: value for name, value in os.environ.items() if name != "HANDRAIL_TOKEN"}
    process = warm_python.start(program, cwd=folder, env=kept)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+?/", line)
        assert found is not None
        assert "link" not in line, "people sign in by name"
        yield Client(found[0], None)  # type: ignore[arg-type]
    finally:
        process.close()  # this sends SIGKILL to the process


async def test_votes_outlive_kill_9(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("handrail.serve.people._SCRYPT", COST)
    (tmp_path / "desk.py").write_text(APP)
    people = People(people_path(tmp_path / "runs.db"))
    for name, roles in TEAM:
        people.add(name, roles, SECRET)
    people.close()
    with killed(tmp_path) as client:
        question = await asked(client)
        assert (await vote(client, "fay", question)).json == {"decided": None}
    with killed(tmp_path) as client:
        [seen] = await inbox(client, "gus")
        assert seen["votes"] == ["fay"]
        assert (await vote(client, "gus", question)).json == {"decided": True}
        assert await ending(client) == "Done: paid 5"


# --- counting votes -----------------------------------------------------------------------------------


def question_for(*quorums: Quorum) -> Question:
    from datetime import UTC, datetime

    return Question(id="q", kind="approval", name="pay", message="", payload={}, schema={}, digest="d", principal="ann",
                    asked_by=(), call_id="c", asked_at=datetime(2026, 5, 31, tzinfo=UTC), quorums=quorums)  # fmt: skip


def voted(by: str, approved: bool = True, *, roles: Sequence[str] = ("approver",), digest: str = "d") -> Vote:
    return Vote(question_id="q", digest=digest, by=by, roles=tuple(roles), approved=approved)


@pytest.mark.parametrize(
    ("votes", "decided"),
    [
        ([], None),
        ([voted("bob")], None),
        ([voted("bob"), voted("bob")], None),
        ([voted("bob"), voted("ann")], None),
        ([voted("bob"), voted("cid", digest="other")], None),
        ([voted("bob"), voted("cid")], True),
        ([voted("bob"), voted("cid", False)], False),
        ([voted("ann", False)], None),
        ([voted("bob", False)], False),
    ],
)
def test_votes_are_counted_by_person(votes: list[Vote], decided: bool | None):
    question = question_for(TWO)
    assert question.decided_by(votes) is decided
    for approved in (True, False):
        answer = Answer(question_id="q", digest="d", by="x", value={"approved": approved}, votes=tuple(votes))
        if decided is approved:
            check_answer(question, answer)
        else:
            with pytest.raises(AnswerRefused):
                check_answer(question, answer)


def test_an_invalid_quorum_is_refused_where_it_is_written():
    for given in ({"approvals": 0}, {"approvals": True}, {"approvals": 1.5}, {"role": ""}, {"role": 5}):
        with pytest.raises(DefinitionError):
            ask(**given)  # type: ignore[arg-type]
    with pytest.raises(DefinitionError, match="ask\\(role"):
        CapabilityPolicy({"money": "finance"})  # type: ignore[dict-item]
    assert ask(role="approver") == ask()


def test_a_call_that_could_be_previewed_does_not_run_where_nobody_can_decide_about_it():
    ran: list[str] = []

    @tool(effect="staged", capabilities={"money"})
    async def book(context: ToolContext) -> str:
        """Book something, in a fork until the booking is approved."""
        ran.append("book")
        return "booked"

    tries: list[tuple[Verdict, list[str]]] = [("ask", ["book"]), (FINANCE, [])]
    for policy, runs in tries:
        ran.clear()
        gate = open_gate(
            [book], policies=[CapabilityPolicy({"money": policy})], environment=Person(approve=True)
        )
        gate.invoke("book", {}).wait()
        assert ran == runs


@pytest.mark.parametrize("approvals", [None, "interactive", "approve_all"])
def test_a_person_at_a_terminal_can_not_approve_for_others(approvals: Any):
    """If nobody can vote, the call is denied at once, and the person at the terminal is not asked."""
    there = Person(approve=True)
    gate = open_gate(
        [pay], policies=[CapabilityPolicy({"money": FINANCE})], environment=there, approvals=approvals
    )
    said = gate.invoke("pay", {"amount": 5}).wait().render()
    assert "1 person with the role 'finance'" in said
    assert "It did not run." in said
    assert there.questions == []


class Team(Environment):
    """An environment in which Fay approves, and then the voters may change."""

    run_mode = "user"

    def __init__(self, after: Mapping[str, float]) -> None:
        self._voters: Mapping[str, float] = {"fay": 1.0}
        self._after = after

    def voters(self, quorum: Quorum, principal: str, /) -> Mapping[str, float]:
        return self._voters

    async def ask(self, question: Question, /) -> Answer:
        yes = Vote(
            question_id=question.id,
            digest=question.digest,
            by="fay",
            since=1.0,
            roles=("finance",),
            approved=True,
        )
        self._voters = self._after
        return answer_to(question, {"approved": True}, by="fay", votes=(yes,))


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ({"fay": 1.0}, "paid 5"),
        ({"fay": 2.0}, "have not approved it"),
        ({"gus": 1.0}, "have not approved it"),
        ({}, "have not approved it"),
    ],
)
def test_the_gate_counts_no_vote_of_somebody_who_may_not_vote_any_more(after: Mapping[str, float], said: str):
    """Nor one of an account that was replaced. There are no voters either if the person whose call waits was removed, so their call does not run."""
    gate = open_gate([pay], policies=[CapabilityPolicy({"money": FINANCE})], environment=Team(after))
    assert said in gate.invoke("pay", {"amount": 5}).wait().render()


def test_a_rule_that_asks_for_more_people_at_a_second_look_is_not_passed_with_the_first_approval():
    """Policies are checked again after an approval. If they then require other approvers, that approval is not enough."""

    class Moody:
        name = "moody"

        def __init__(self) -> None:
            self.asked = 0

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            self.asked += 1
            return PolicyDecision.ask("pays") if self.asked == 1 else PolicyDecision.ask("pays", FINANCE)

        def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None: ...

    gate = open_gate([pay], policies=[Moody()], environment=Person(approve=True))
    assert "now needs approval from different people" in gate.invoke("pay", {"amount": 5}).wait().render()
