"""Other people approve the calls of runs that workers execute. The users are in the journal, for all servers and workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from handrail import PostgresJournal
from handrail.fleet import FleetApp, Runner, Submission, submit
from handrail.journal.records import OVER
from handrail.messages import ToolMessage
from handrail.question import Question, Vote
from handrail.runs import said
from handrail.serve.people import People
from support import PATIENCE, postgres, watched_app
from support.parked_runs import answer_to
from support.passwords import cheap_hashes
from support.reserved_port import reserved_port
from support.watched_fleet import WatchedFleet, watched_fleet

pytestmark = pytest.mark.once  # PostgreSQL starts slowly
__all__ = ["cheap_hashes"]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[WatchedFleet]:
    with watched_fleet(tmp_path) as found:
        found.token = None
        yield found


class User:
    """A user's program, which sends requests to any server."""

    def __init__(self, fleet: WatchedFleet, name: str, *roles: str) -> None:
        said = fleet.users("add", name, *(word for role in roles for word in ("--role", role)))
        token = said.partition("not be shown again: ")[2].split()[0]
        self.name = name
        self.fleet = fleet
        self.headers = {"Authorization": f"Bearer {name}:{token}"}

    def ask(self, method: str, url: str, body: Any = None) -> httpx.Response:
        return httpx.request(method, url, json=body, headers=self.headers, timeout=PATIENCE)

    def say(self, address: str, thread: str, text: str) -> None:
        assert self.ask("POST", f"{address}/threads/{thread}/messages", {"text": text}).is_success

    def inbox(self, address: str) -> list[Any]:
        return self.ask("GET", f"{address}/inbox").json()["questions"]

    def question(self, address: str) -> Any:
        """Wait until this person's inbox on a server has a question, and return it."""
        return self.fleet.until(lambda: self.inbox(address))[0]

    def vote(self, address: str, question: Any, approved: bool = True) -> httpx.Response:
        given = {"question_id": question["id"], "digest": question["digest"], "approved": approved}
        return self.ask("POST", f"{address}/inbox/answers", given)

    def ending(self, address: str, thread: str, text: str) -> bool:
        """Wait until a thread contains a text, and return True."""
        return self.fleet.until(lambda: text in self.ask("GET", f"{address}/threads/{thread}").text)


def test_two_servers_and_a_worker_count_the_votes_of_the_same_users(fleet: WatchedFleet):
    """Real processes with a folder each. What `handrail users` changes on another machine counts on every server and worker."""
    ann, fay = User(fleet, "ann", "user"), User(fleet, "fay", "approver", "finance")
    gus, lea = User(fleet, "gus", "approver"), User(fleet, "lea", "admin", "law")
    with reserved_port() as port:
        here, there = fleet.address, f"http://127.0.0.1:{port}"
        fleet.server()
        fleet.server(port)
        fleet.worker()

        ann.say(here, "one", "book")
        asked = fay.question(there)
        assert (asked["principal"], asked["payload"]["arguments"]) == ("ann", {"amount": 5})
        assert [each.inbox(address) for each in (gus, lea) for address in (here, there)] == [[]] * 4
        assert ann.vote(there, asked).status_code == 403
        assert gus.vote(there, asked).json()["error"]["kind"] == "AnswerRefused"
        assert fay.vote(there, asked).json() == {"decided": True}
        assert ann.ending(here, "one", "Result: booked 5")

        lea.say(there, "two", "pay")  # the owner may vote for others, but not for herself
        asked = fay.question(here)
        assert lea.inbox(there) == []
        assert lea.vote(there, asked).json()["error"]["kind"] == "AnswerRefused"
        assert fay.vote(here, asked).json() == {"decided": None}
        assert [each["votes"] for each in gus.inbox(there)] == [["fay"]]

        secret = {"name": "fay", "password": fay.headers["Authorization"].partition(":")[2]}
        signed_in = httpx.post(f"{here}/login", json=secret, timeout=PATIENCE)
        page = {
            "Cookie": signed_in.headers["set-cookie"].partition(";")[0],
            "handrail-key": signed_in.json()["key"],
        }
        assert httpx.get(f"{here}/threads", headers=page, timeout=PATIENCE).status_code == 200
        assert "1 session" in fleet.users("list")
        fay.say(here, "x", "hello")
        assert fay.ending(here, "x", "You said: hello")
        with httpx.stream(
            "GET", f"{here}/threads/x/events?follow=1", headers=page, timeout=PATIENCE
        ) as stream:
            assert stream.is_success
            assert "Removed fay" in fleet.users("remove", "fay")
            assert list(stream.iter_lines()) is not None, "the stream has ended"
        for address in (here, there):
            fleet.until(lambda address=address: fay.ask("GET", f"{address}/inbox").status_code == 401)
        assert httpx.get(f"{here}/threads", headers=page, timeout=PATIENCE).status_code == 401
        assert [each["votes"] for each in gus.inbox(there)] == [[]]
        again = User(fleet, "fay", "approver")
        assert httpx.get(f"{here}/threads", headers=page, timeout=PATIENCE).status_code == 401
        assert gus.vote(there, asked).json() == {"decided": None}
        assert again.vote(here, asked).json() == {"decided": True}
        assert lea.ending(there, "two", "Result: paid 5")
        log = [line for line in fleet.users("list").splitlines() if not line.startswith(" ")]
        assert [line.split()[0] for line in log] == ["ann", "fay", "gus", "lea"]


# --- the worker -----------------------------------------------------------------------------------------


class Desk:
    """A journal with users, and a worker that executes one run until it is parked or over."""

    def __init__(self, journal: PostgresJournal) -> None:
        self.journal = journal
        self.app = FleetApp.load(str(Path(watched_app.__file__)))
        self.people = People.of(journal, Path("no.db"))

    async def submit(self, text: str, principal: str) -> str:
        row = await submit(self.journal, self.app, Submission(text, principal=principal))
        return row.record.id

    async def work(self, ready: Any) -> list[str]:
        """Let a worker execute runs until `ready` returns true for its report, and return the report."""
        report: list[str] = []
        stop = asyncio.Event()

        def add(line: str) -> None:
            report.append(line)
            if ready(line):
                stop.set()

        worker = Runner(self.journal, [self.app], report=add)
        await asyncio.wait_for(worker.run(stop), PATIENCE)
        return report

    async def asked(self, text: str, principal: str) -> Question:
        """Submit a run, execute it until it waits, and return its question."""
        run_id = await self.submit(text, principal)
        await self.work(lambda line: "parked" in line)
        [question] = await self.journal.questions.open(run_id)
        return question

    async def decide(self, question: Question, *names: str) -> None:
        """Record the votes of these users, and the answer that they decide, as a server does."""
        votes: list[Vote] = []
        for name in names:
            person = self.people.find(name)
            assert person is not None
            vote = Vote(
                question_id=question.id,
                digest=question.digest,
                by=name,
                since=person.since,
                roles=tuple(sorted(person.roles)),
                approved=True,
                reason="",
                at=0.0,
            )
            votes = [*await self.journal.votes.cast(question.run_id, vote)]
        answer = answer_to(question, {"approved": True}, by=", ".join(names), votes=tuple(votes))
        self.journal.questions.answer(answer)

    async def result(self, run_id: str) -> str:
        row = await self.journal.runs.get(run_id)
        assert row.status in OVER
        found = [each.text for each in await said(self.journal, run_id) if isinstance(each, ToolMessage)]
        return found[-1]


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    url = postgres.borrow_url()
    with closing(PostgresJournal(url)) as journal:
        yield Desk(journal)
    postgres.give_back(url)


async def test_a_worker_goes_on_with_what_users_have_decided(desk: Desk):
    """The votes were cast, and the answer was recorded, while no worker was up."""
    for name in ("ann", "fay", "gus"):
        desk.people.add(name, ["approver"])
    question = await desk.asked("pay", "ann")
    await desk.decide(question, "fay", "gus")
    await desk.work(lambda line: "done" in line)
    assert await desk.result(question.run_id) == "paid 5"


async def test_a_worker_asks_nobody_if_there_are_too_few_users_with_the_role(desk: Desk):
    desk.people.add("ann", ["finance"])
    desk.people.add("gus", ["approver"])
    run_id = await desk.submit("book", "ann")
    await desk.work(lambda line: "done" in line)
    assert "not counting 'ann', and nobody can be asked" in await desk.result(run_id)


async def test_the_run_of_a_removed_user_waits_until_the_user_is_back(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
):
    desk.people.add("ann", ["user"])
    desk.people.remove("ann")
    run_id = await desk.submit("hello", "ann")
    monkeypatch.setattr("handrail.fleet.runner._RETRY_SECONDS", 0.0)
    report = await desk.work(lambda line: "waits" in line)
    assert report[-1] == f"{run_id}: waits, because its user was removed or may not run anything"
    assert (await desk.journal.runs.get(run_id)).status == "queued"
    desk.people.add("ann", ["user"])
    assert (await desk.work(lambda line: "done" in line))[-1] == f"{run_id}: done"
