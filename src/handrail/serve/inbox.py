"""`Inbox`: the questions in other people's runs that a person may vote on."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from handrail.errors import AnswerRefused, JournalAltered, RunUnknown
from handrail.journal.answers import check_digest
from handrail.journal.protocol import Journal
from handrail.question import Answer, Question, Vote
from handrail.run.host import Voters
from handrail.serve.agui.wire_events import custom
from handrail.serve.people import Person
from handrail.serve.principals import Principals
from handrail.serve.thread import Thread
from handrail.serve.threads import Threads

log = logging.getLogger("handrail.serve")

GATEWAY = "mcp-gateway"
"""The beginning of the prompt name in the records of an MCP gateway's runs. The gateway's identity follows.

Such a run belongs to no thread, but its questions are in the inbox too.
"""

_MOST_PLACES = 10_000


class Waiting(NamedTuple):
    """An open question that a person may vote on, with the votes so far."""

    question: Question
    votes: Sequence[Vote]


class _Elsewhere:
    """Stands in for the thread of an MCP gateway's run. Another process executes the run and reads the answer in the journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def answer(self, answers: Sequence[Answer]) -> None:
        for each in answers:
            self._journal.questions.answer(each)


class Inbox:
    """The questions that wait for each person's vote.

    A vote counts as long as the account that cast it exists, may vote and has the role for it. Questions of people who may not run anything any
    more, for example because they were removed, take no votes.

    People see these questions, and nothing else from other people's threads.
    """

    def __init__(self, threads: Threads, principals: Principals) -> None:
        self._threads = threads
        self._principals = principals
        self._journal = threads.journal
        self._places: dict[str, str | None] = {}
        """Where the questions of runs are, by run id, as `_place_of` returns it."""

    async def list(self, person: Person) -> Sequence[Waiting]:
        """Return the open questions that this person may vote on, oldest first."""
        found: list[Waiting] = []
        for question in await self._journal.questions.open():
            if await self._thread_for(question, person) is not None:
                found.append(Waiting(question, await self._votes(question)))
        return found

    async def vote(self, person: Person, given: Answer, approved: bool) -> bool | None:
        """Record a person's vote and return the decision, or None if more votes are needed.

        The deciding vote continues the run. Raises `AnswerRefused` if the question is closed, changed or expired, if
        this person has already voted differently, or if this person may not vote on it. In the last case the message is
        the same as for a question that is closed or does not exist.
        """
        for question in await self._journal.questions.open():
            thread = await self._thread_for(question, person) if question.id == given.question_id else None
            if thread is not None:
                break
        else:
            raise AnswerRefused(
                given.question_id,
                "you have no such question, or it has been decided",
                "Load your inbox again.",
            )
        now = self._threads.clock.now()
        check_digest(question, given)
        vote = Vote(
            question_id=question.id,
            digest=question.digest,
            by=person.name,
            since=person.since,
            roles=tuple(sorted(person.roles)),
            approved=approved,
            reason=given.reason,
            at=now.timestamp(),
            waited=self.waited(question),
        )
        await self._journal.votes.cast(question.run_id, vote)
        return await self._count(thread, question)

    async def count_all(self) -> None:
        """Count the votes on every open question that needs votes, because an earlier process may not have counted them all.

        If that fails for a question, the error is logged.
        """
        for question in await self._journal.questions.open():
            if question.quorums:
                try:
                    thread = await self._thread_of(question)
                    if thread is not None:
                        await self._count(thread, question)
                except Exception:
                    log.exception("could not count the votes on %s", question.id)

    async def _count(self, thread: Thread | _Elsewhere, question: Question) -> bool | None:
        votes = await self._votes(question)
        decided = question.decided_by(votes)
        if decided is None:
            told = {"question_id": question.id, "votes": [each.by for each in votes]}
            if isinstance(thread, Thread):
                thread.feed.append([custom("handrail.votes", told)])
            return None
        deciding = [each for each in votes if each.approved == decided]
        reasons = "; ".join(f"{each.by}: {each.reason}" for each in deciding if each.reason)
        answer = Answer(
            question_id=question.id,
            digest=question.digest,
            by=", ".join(each.by for each in deciding),
            value={"approved": decided, **({"reason": reasons} if reasons else {})},
            votes=tuple(votes),
        )
        await thread.answer([answer])
        return decided

    async def _votes(self, question: Question) -> Sequence[Vote]:
        """Return the votes on a question, with the roles that the voters still have. Those of former voters are left out."""
        standing: list[Vote] = []
        for vote in await self._journal.votes.on(question.run_id, question.id, question.digest):
            now = self._principals.find(vote.by)
            roles = tuple(role for role in vote.roles if role in now.roles)
            # A vote that schema 13 recorded does not say since when the voter was a user, but when it was cast.
            is_theirs = vote.since == now.since or (not vote.since and now.since <= vote.at)
            if is_theirs and now.may("vote") and question.may_vote(vote.by, roles, vote.waited):
                standing.append(replace(vote, roles=roles))
        return standing

    async def _thread_for(self, question: Question, person: Person) -> Thread | _Elsewhere | None:
        """Return what `_thread_of` returns for a question, or None if this person may not vote on it."""
        if not person.may("vote") or not question.may_vote(person.name, person.roles, self.waited(question)):
            return None
        return await self._thread_of(question)

    async def _thread_of(self, question: Question) -> Thread | _Elsewhere | None:
        """Return the thread of a question, or a stand-in for a gateway's run.

        Returns None if the question is in no thread of this app, or if the thread's principal may not run anything any more.
        """
        place = await self._place_of(question)
        if place == "":
            return _Elsewhere(self._journal)
        if place is None or not self._principals.may_run(question.principal):
            return None
        return self._threads.thread(question.principal, place)

    def waited(self, question: Question) -> float:
        """Return the seconds since a question was asked, by the journal's clock, which also decided when that was."""
        return (self._journal.clock.now() - question.asked_at).total_seconds()

    async def _place_of(self, question: Question) -> str | None:
        """Return the id of the thread that a question is in, "" for a gateway's run, or None if it is in no thread of this app."""
        if question.run_id not in self._places:
            try:
                row = await self._journal.runs.get(question.run_id)
            except (RunUnknown, JournalAltered):  # a program's own, or deleted just now, or altered
                return None
            is_gateway = row.record.prompt.startswith(GATEWAY) and not row.record.app
            key = self._threads.key_of(row)
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            self._places[question.run_id] = "" if is_gateway else None if key is None else key[1]
        return self._places[question.run_id]

    async def find(self, person: Person, question_id: str) -> str | None:
        """Return where this person can answer an open question: the id of their own thread, or "" for their inbox.

        Returns None if they may not answer it. So a link to a question tells nothing to anybody else, not even whether it is open.
        """
        for question in await self._journal.questions.open():
            if question.id == question_id and question.principal == person.name:
                return await self._place_of(question) or None if person.may("run") else None
            if question.id == question_id:
                return None if await self._thread_for(question, person) is None else ""
        return None

    async def audience(self, question: Question, voters: Voters) -> Collection[str] | None:
        """Return the names of the people who may answer a question now and have not voted on it.

        Returns None if the question is in no thread of this app, or takes no answers because its principal may not run anything.
        """
        place = await self._place_of(question)
        if place is None or (place and not self._principals.may_run(question.principal)):
            return None
        if not question.quorums:
            return (question.principal,) if place else ()
        waited = self.waited(question)
        roles = {role for quorum in question.quorums for role in quorum.roles(waited)}
        found = {name for role in roles for name in voters(role, question.principal)}
        takes_one = sum(quorum.approvals for quorum in question.quorums) == 1
        return found if takes_one else found - {vote.by for vote in await self._votes(question)}
