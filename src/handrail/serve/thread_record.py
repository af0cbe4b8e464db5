"""`ThreadRecord`: what a thread contains, read from the journal, and from memory while this process executes its run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from handrail import runs
from handrail.adapter.followed_turns import is_outdated
from handrail.adapter.remarks import unread_remarks
from handrail.errors import SessionUnknown
from handrail.journals import Journal
from handrail.messages import Message, UserMessage
from handrail.question import Question
from handrail.records import OVER, RunRow
from handrail.serve.agui.wire_events import plain_json
from handrail.serve.principals import session_id_of
from handrail.serve.refusals import ThreadUnknown
from handrail.serve.sources import Source
from handrail.serve.thread_messages import RunMessage, messages_in
from handrail.session import Session

if TYPE_CHECKING:
    from handrail.serve.live_run import LiveRun


class ThreadRecord:
    """Reads a principal's conversation: its runs, messages, state, questions and attachments."""

    def __init__(self, id: str, principal: str, source: Source, journal: Journal) -> None:
        self.id = id
        self.principal = principal
        self.session_id = session_id_of(principal, id)
        self.live: LiveRun | None = None
        self._source = source
        self._journal = journal
        self._session: Session | None = None

    async def session(self) -> Session:
        """Return the session with everything that its runs have committed. It is empty if the thread has no runs."""
        if self._session is None or await is_outdated(self._session, self._journal):
            try:
                self._session = await runs.session(self._journal, self.session_id, principal=self.principal)
            except SessionUnknown:
                self._session = Session(id=self.session_id, principal=self.principal)
        return self._session

    async def attachment(self, digest: str) -> bytes | None:
        """Return the bytes of one of this thread's attachments; None if none of its runs has it."""
        for row in await self._journal.runs.list(session_id=self.session_id):
            if digest in await self._journal.blobs.list(row.record.id):
                return await self._journal.blobs.get(digest)
        return None

    async def questions(self, rows: Sequence[RunRow] | None = None) -> Sequence[Question]:
        """Return the open questions. Here and elsewhere, `rows` are the thread's runs, if the caller has just read them."""
        row = await self.newest(rows)
        return () if row is None or row.status in OVER else await self._journal.questions.open(row.record.id)

    def state(self) -> Any:
        """Return the state that clients see. Returns None if no session is in memory, or if the source shows no slices."""
        live = self.live
        session = live.session if live is not None and live.has_started else self._session
        return None if session is None else self._shown(session)

    async def read_state(self) -> Any:
        """Return the state that clients see, from the journal if needed; None if the source shows no slices."""
        if not self._source.shown or (self.live is not None and self.live.has_started):
            return self.state()
        return self._shown(await self.session())

    async def messages(self) -> Sequence[Message]:
        """Return the messages, oldest first, including those of an unfinished run, but not those of nested runs."""
        return [message for _, message in await self.run_messages()]

    async def run_messages(self, rows: Sequence[RunRow] | None = None) -> Sequence[RunMessage]:
        """Return the messages that `messages` returns, each with the id of its run."""
        live = self.live
        if live is not None and live.has_started:
            unread = await unread_remarks(self._journal, live.run_id)
            return _with_unread(messages_in(live.session), live.run_id, unread)
        said = messages_in(await self.session())
        row = await self.newest(rows)
        if row is None or row.status in OVER:
            return said
        run_id = row.record.id
        unread = await unread_remarks(self._journal, run_id)
        own = [RunMessage(run_id, each) for each in await runs.said(self._journal, run_id)]
        return [*said, *_with_unread(own, run_id, unread)]

    async def rows(self) -> Sequence[RunRow]:
        """Return the thread's runs, oldest first."""
        found = await self._journal.runs.list(session_id=self.session_id)
        return [row for row in found if row.record.principal == self.principal]

    async def newest(self, rows: Sequence[RunRow] | None = None) -> RunRow | None:
        """Return the thread's newest run, or None if it has no runs."""
        rows = await self.rows() if rows is None else rows
        return rows[-1] if rows else None

    async def check_known(self) -> None:
        """Raise `ThreadUnknown` if the thread has no runs."""
        if self.live is None and await self.newest() is None:
            raise ThreadUnknown(self.id)

    async def _session_as_decided(self) -> Session:
        """Return the session with all its remembered decisions, including those from other processes."""
        live = self.live
        session = live.session if live is not None and live.has_started else await self.session()
        if session.decisions is not None:
            await session.decisions.read()
        return session

    def _shown(self, session: Session) -> Any:
        if not self._source.shown:
            return None
        return {kind.__name__: plain_json(list(session[kind].all())) for kind in self._source.shown}


def _with_unread(
    messages: Sequence[RunMessage], run_id: str, unread: UserMessage | None
) -> Sequence[RunMessage]:
    """Return a run's messages with the one that its model had not been told when `unread` was read, which is before `messages`."""
    if unread is None:
        return messages
    told = [each for run, each in messages if run == run_id and isinstance(each, UserMessage) and each.midway]
    return messages if told[-1:] == [unread] else [*messages, RunMessage(run_id, unread)]
