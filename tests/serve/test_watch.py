"""When workers execute a thread's runs, the server shows the same events as if it executed the runs itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from handrail import Attachment, PostgresJournal, SqliteJournal
from handrail.errors import AnswerRefused, DefinitionError
from handrail.fleet import FleetApp, Runner, Submission, submit
from handrail.journal.postgres.address import parse_url
from handrail.journal.records import OVER
from handrail.messages import UserMessage
from handrail.runs import said
from handrail.serve import snapshots, watch
from handrail.serve.agui.wire_events import Event, plain_event
from handrail.serve.app import asgi
from handrail.serve.feed import Feed, follow
from handrail.serve.refusals import NotForWorkers
from handrail.serve.thread import Thread
from handrail.serve.threads import Threads
from handrail.serve.watch import Opening, Said
from support import PATIENCE, postgres, watched_app
from support.parked_runs import answer_to

pytestmark = pytest.mark.once  # PostgreSQL starts slowly


class Fleet:
    """A PostgreSQL journal, an app, workers and servers. Each worker and server has its own connection."""

    def __init__(self, url: str, app: FleetApp, gates: Path) -> None:
        self.url = url
        self.app = app
        self.gates = gates
        self.opened: list[PostgresJournal] = []

    def journal(self) -> PostgresJournal:
        self.opened.append(PostgresJournal(self.url))
        return self.opened[-1]

    def open(self, gate: str) -> None:
        (self.gates / gate).touch()

    @asynccontextmanager
    async def worker(self, grace: float = 0.0) -> AsyncGenerator[Runner]:
        runner, stop = Runner(self.journal(), [self.app]), asyncio.Event()
        task = asyncio.ensure_future(runner.run(stop, grace=grace))
        try:
            yield runner
        finally:
            stop.set()
            await asyncio.wait_for(task, PATIENCE)

    @asynccontextmanager
    async def server(self) -> AsyncGenerator[Threads]:
        journal = self.journal()

        async def submitted(
            text: str, attachments: Sequence[Attachment], run_id: str, thread: Thread
        ) -> None:
            asked = Submission(
                text,
                attachments=attachments,
                session_id=thread.session_id,
                principal=thread.principal,
                run_id=run_id,
            )
            await submit(journal, self.app, asked)

        threads = Threads(self.app.source, journal, submit=submitted)
        await threads.start()
        try:
            yield threads
        finally:
            await threads.stop()

    def execute(self, query: str) -> None:
        address = parse_url(self.url)
        with psycopg.connect(address.conninfo, autocommit=True) as connection:
            connection.execute(f'SET search_path = "{address.schema}"')  # pyright: ignore[reportArgumentType, reportCallIssue]  # a plain name
            connection.execute(query)  # pyright: ignore[reportArgumentType, reportCallIssue]  # a test's own text

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        address = parse_url(self.url)
        with psycopg.connect(address.conninfo, autocommit=True) as connection:
            return connection.execute(f'SELECT * FROM "{address.schema}".{table} ORDER BY 1').fetchall()  # pyright: ignore[reportArgumentType, reportCallIssue]  # plain names


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    monkeypatch.setenv("GATES", str(tmp_path))
    for name in ("_WATCH_SECONDS", "_REPLY_SECONDS", "_IDLE_SECONDS"):
        monkeypatch.setattr(watch, name, PATIENCE)
    monkeypatch.setattr("handrail.fleet.runner._CUT_SECONDS", PATIENCE)
    url = postgres.borrow_url()
    found = Fleet(url, FleetApp.load(str(Path(watched_app.__file__))), tmp_path)
    yield found
    for each in found.opened:
        each.close()
    postgres.give_back(url)


class Reader:
    """A reader of a thread's feed, who gets a snapshot of the thread first, and then the feed's events."""

    def __init__(self, threads: Threads, thread: Thread) -> None:
        self.threads = threads
        self.thread = thread
        self.snapshot: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self.joins = 0
        self._task: asyncio.Task[None] | None = None

    async def join(self) -> Reader:
        number = None
        while number is None:  # the feed may drop its events after the snapshot was taken
            self.snapshot = await snapshots.thread_snapshot(self.threads.journal, self.thread)
            number = self.thread.feed.number_of(self.snapshot["last_event_id"])
        self.joins, self.events = self.joins + 1, []
        self._task = asyncio.ensure_future(self._read(number))
        return self

    async def _read(self, number: int) -> None:
        async for chunk in follow(self.thread.feed, number):
            for line in chunk.decode().splitlines():
                if line.startswith("data: "):
                    self.events.append(json.loads(line[6:]))
        await self.join()

    def leave(self) -> None:
        assert self._task is not None
        self._task.cancel()

    @property
    def text(self) -> str:
        """The assistant's text: that of the snapshot, and what has arrived since."""
        before = [each["content"] for each in self.snapshot["messages"] if each["role"] == "assistant"]
        deltas = (each["delta"] for each in self.events if each["type"] == "TEXT_MESSAGE_CONTENT")
        return "".join([*before, *deltas])

    def types(self) -> list[str]:
        return [each["type"] for each in self.events if each["type"].startswith("RUN_")]

    async def until(self, holds: Callable[[Reader], Any]) -> Any:
        async with asyncio.timeout(PATIENCE):
            while not (found := holds(self)):
                await asyncio.sleep(0.005)
        return found


async def over(threads: Threads, run_id: str) -> str:
    async with asyncio.timeout(PATIENCE):
        while (row := await threads.journal.runs.get(run_id)).status not in OVER:
            await asyncio.sleep(0.005)
    return row.status


async def test_a_viewer_sees_the_text_while_a_worker_writes_it(fleet: Fleet):
    async with fleet.server() as threads:
        thread = threads.thread("ann", "t")
        await thread.say("tell", leg="leg-1")
        reader = await Reader(threads, thread).join()
        assert (reader.snapshot["status"], reader.snapshot["messages"][0]["content"]) == ("running", "tell")
        async with fleet.worker():
            await reader.until(lambda reader: reader.text == "The first half. ")
            fleet.open("middle")
            await reader.until(lambda reader: "RUN_FINISHED" in reader.types())
        assert (reader.text, reader.types(), reader.joins) == (
            "The first half. The second half.",
            ["RUN_STARTED", "RUN_FINISHED"],
            1,
        )
        [started] = [each for each in reader.events if each["type"] == "RUN_STARTED"]
        assert started["runId"] == "leg-1"  # the id that the client gave to the leg
        reader.leave()
        again = await Reader(threads, thread).join()
        assert (again.text, again.snapshot["status"]) == ("The first half. The second half.", "idle")
        again.leave()


async def test_a_viewer_who_joins_in_the_middle_gets_what_was_said_so_far(fleet: Fleet):
    """A viewer joins a leg that nobody watches, and then another joins it on a second server. Both see its whole text."""
    async with fleet.server() as threads, fleet.server() as others, fleet.worker() as runner:
        thread = threads.thread("ann", "t")
        run_id = await thread.say("tell")
        await thread.stop_watching()
        async with asyncio.timeout(PATIENCE):
            while (
                run_id not in runner.running or not (await threads.journal.runs.get(run_id)).record.has_begun
            ):
                await asyncio.sleep(0.005)
        first = await Reader(threads, thread).join()
        await first.until(lambda reader: reader.text == "The first half. ")
        second = await Reader(others, others.thread("ann", "t")).join()
        assert (second.text, second.snapshot["status"]) == ("The first half. ", "running")
        fleet.open("middle")
        for each in (first, second):
            await each.until(lambda reader: "RUN_FINISHED" in reader.types())
            assert (each.text, each.joins) == ("The first half. The second half.", 1)
            each.leave()


async def test_nothing_is_written_while_nobody_watches(fleet: Fleet):
    async with fleet.server() as threads, fleet.worker():
        thread = threads.thread("ann", "t")
        reader_of_another = threads.thread("ann", "other")
        await reader_of_another.watched()
        fleet.open("middle")
        asked = Submission("tell", session_id=thread.session_id, principal="ann")
        run_id = (await submit(threads.journal, fleet.app, asked)).record.id
        assert await over(threads, run_id) == "done"
    assert fleet.rows("broadcasts") == []
    assert fleet.rows("watchers") == []


async def test_secrets_are_masked_in_what_is_written(fleet: Fleet):
    async with fleet.server() as threads:
        thread = threads.thread("ann", "t")
        await thread.say("sign in")
        reader = await Reader(threads, thread).join()
        async with fleet.worker():
            await reader.until(lambda reader: "RUN_FINISHED" in reader.types())
        written = b"".join(row[6] for row in fleet.rows("broadcasts")).decode()
        assert "signed in with 21 characters" in written
        assert watched_app.PASSWORD not in written + json.dumps(reader.events)
        reader.leave()


async def test_a_question_is_answered_by_a_viewer_and_the_next_leg_is_shown_too(fleet: Fleet):
    async with fleet.server() as threads:
        thread = threads.thread("ann", "t")
        await thread.say("choose", leg="leg-1")
        reader = await Reader(threads, thread).join()
        async with fleet.worker() as runner:
            await reader.until(lambda reader: "RUN_FINISHED" in reader.types())
            await reader.until(lambda reader: not runner.running)  # until the run is parked
            [question] = await thread.questions()
            given = answer_to(question, "green", by="ann")
            with pytest.raises(AnswerRefused, match="Decline the question, or cancel the run"):
                await thread.answer([msgspec.structs.replace(given, outcome="cancelled", value=None)])
            assert await thread.answer([given], leg="leg-2") == "leg-2"
            await reader.until(lambda reader: reader.types()[2:] == ["RUN_STARTED", "RUN_FINISHED"])
        legs = [each["runId"] for each in reader.events if each["type"] == "RUN_STARTED"]
        assert (legs, "Result: green" in reader.text, reader.joins) == (["leg-1", "leg-2"], True, 1)
        reader.leave()


async def test_what_is_said_along_with_an_answer_reaches_the_worker(fleet: Fleet):
    """The server records it with the answer, with its files, and shows it at once. A worker that comes later tells the model."""
    async with fleet.server() as threads:
        thread = threads.thread("ann", "t")
        await thread.say("choose")
        reader = await Reader(threads, thread).join()
        async with fleet.worker() as runner:
            await reader.until(lambda reader: "RUN_FINISHED" in reader.types() and not runner.running)
        [question] = await thread.questions()
        given = answer_to(question, "green", by="ann")
        files = [Attachment(b"notes", "notes.txt")]
        await thread.answer([given], remark="words and files", attachments=files)
        shown = await snapshots.thread_snapshot(threads.journal, thread)
        assert [each["role"] for each in shown["messages"]] == ["user", "assistant", "user"]
        async with fleet.worker() as runner:
            run_id = question.run_id
            async with asyncio.timeout(PATIENCE):
                while (await threads.journal.runs.get(run_id)).status not in OVER:
                    await asyncio.sleep(0.005)
        found = await said(threads.journal, run_id)
        told = [each for each in found if isinstance(each, UserMessage)]
        assert [(each.text, each.midway, len(each.attachments)) for each in told] == [
            ("choose", False, 0),
            ("words and files", True, 1),
        ]
        after = await snapshots.thread_snapshot(threads.journal, thread)
        assert [each["id"] for each in after["messages"] if each["role"] == "user"] == [
            each["id"] for each in shown["messages"] if each["role"] == "user"
        ]
        reader.leave()


async def test_what_is_said_to_a_run_on_a_worker_is_shown_on_each_server_and_told(fleet: Fleet):
    """One server accepts, edits and withdraws it, also before a worker has begun the run. The worker broadcasts what happens to it."""
    async with fleet.server() as threads, fleet.server() as others:
        thread = threads.thread("ann", "t")
        run_id = await thread.say("tell")
        queued = await thread.send(run_id, "hullo", when="afterwards")
        assert queued.status == "queued"
        hurry = await thread.send(run_id, "hurry", when="next step")
        assert (await thread.withdraw(run_id, hurry.message.id)).state == "withdrawn"
        async with fleet.worker():
            first = await Reader(threads, thread).join()
            second = await Reader(others, others.thread("ann", "t")).join()
            await first.until(lambda reader: reader.text.startswith("The first half. "))
            await thread.edit(run_id, queued.message.id, text="hello")
            for each in (first, second):
                await each.until(lambda reader: "hello" in json.dumps(reader.events))
            fleet.open("middle")
            for each in (first, second):
                await each.until(lambda reader: "RUN_FINISHED" in reader.types())
                events = [event["value"] for event in each.events if event.get("name") == "handrail.queued"]
                assert [(event["text"], event["state"]) for event in events][-1] == ("hello", "told")
                assert "hurry" not in [event["text"] for event in events if event["state"] == "told"]
                each.leave()
        shown = await snapshots.thread_snapshot(threads.journal, thread)
        assert [each["content"] for each in shown["messages"] if each["role"] == "user"] == ["tell", "hello"]
        assert shown["queued"] == []


async def test_a_viewer_cancels_a_run_on_a_worker(fleet: Fleet):
    async with fleet.server() as threads:
        thread = threads.thread("ann", "t")
        run_id = await thread.say("hold")
        reader = await Reader(threads, thread).join()
        async with fleet.worker():
            await reader.until(lambda reader: "waiting at the gate" in json.dumps(reader.events))
            await thread.cancel()
            await reader.until(lambda reader: "RUN_FINISHED" in reader.types())
            assert await over(threads, run_id) == "cancelled"
        [end] = [each for each in reader.events if each["type"] == "RUN_FINISHED"]
        assert end["outcome"]["type"] == "cancelled"
        assert (fleet.gates / "cancelled").exists()
        reader.leave()


async def test_viewers_go_on_when_a_worker_leaves_a_run_to_another(fleet: Fleet):
    async with fleet.server() as threads:
        thread = threads.thread("ann", "t")
        await thread.say("tell")
        reader = await Reader(threads, thread).join()
        async with fleet.worker():
            await reader.until(lambda reader: reader.text == "The first half. ")
        async with fleet.worker():
            await reader.until(lambda reader: reader.joins > 1)
            fleet.open("middle")
            await reader.until(lambda reader: reader.text == "The first half. The second half.")
        reader.leave()


async def test_viewers_go_on_when_the_database_has_lost_what_is_not_recorded(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
):
    """Viewers still see the whole text if the unlogged tables are suddenly empty, as after a crash of PostgreSQL."""
    monkeypatch.setattr(watch, "_RENEW_SECONDS", 0.5)
    async with fleet.server() as threads, fleet.worker():
        thread = threads.thread("ann", "t")
        await thread.say("tell")
        reader = await Reader(threads, thread).join()
        await reader.until(lambda reader: reader.text == "The first half. ")
        fleet.execute("TRUNCATE broadcasts, watchers")
        fleet.open("middle")
        await reader.until(lambda reader: reader.text == "The first half. The second half.")
        reader.leave()


async def test_readers_join_again_after_a_lost_batch_and_a_lost_worker_is_not_heard_any_more(fleet: Fleet):
    """After a missing batch, readers join again. Batches of a leg that was replaced are ignored.

    The test writes the batches itself, in place of workers.
    """
    journal, broadcasts = fleet.journal(), fleet.journal().broadcasts
    feed = Feed("boot")
    watched = watch.Watch(broadcasts, journal, "ann/t", feed, "page")
    await watched.start()

    async def write(leg: int, number: int, *said: Said) -> None:
        await broadcasts.add("ann/t", "run", leg, number, msgspec.json.encode(said))

    async def seen(holds: Callable[[list[str]], bool]) -> list[str]:
        async with asyncio.timeout(PATIENCE):
            while not holds(
                found := [
                    json.loads(item.data).get("delta", "begun")
                    for item in feed.since(feed.last - feed.size[0])
                ]
            ):
                await asyncio.sleep(0.005)
        return found

    begun = Event({"type": "RUN_STARTED", "runId": "leg", "threadId": "t"})
    await write(1, 1, Said([begun]))
    await write(1, 2, Said([plain_event("TEXT_MESSAGE_CONTENT", None, messageId="m", delta="one")]))
    assert await seen(lambda found: len(found) == 2) == ["begun", "one"]
    await write(1, 4, Said([plain_event("TEXT_MESSAGE_CONTENT", None, messageId="m", delta="three")]))
    await seen(lambda found: found == [])  # the readers join again
    joining = asyncio.ensure_future(watched.join())
    async with asyncio.timeout(PATIENCE):
        while not (await broadcasts.watchers(["ann/t"]))["ann/t"][0].joins:
            await asyncio.sleep(0.005)
    opening = Opening(run_id="run", leg="leg", messages=[{"id": "m", "content": "one two three"}])
    await write(1, 5, Said(opening=opening, watcher="page", join=1))
    joined = await joining
    assert joined is not None
    assert (joined.opening.messages, joined.last) == (opening.messages, feed.last)
    await write(1, 6, Said([plain_event("TEXT_MESSAGE_CONTENT", None, messageId="m", delta="four")]))
    assert await seen(lambda found: len(found) == 1) == ["four"]
    await write(2, 1, Said([begun]))  # another worker has taken over
    await seen(lambda found: found == ["begun"])
    await write(1, 7, Said([plain_event("TEXT_MESSAGE_CONTENT", None, messageId="m", delta="late")]))
    await write(2, 2, Said([plain_event("TEXT_MESSAGE_CONTENT", None, messageId="m", delta="five")]))
    assert await seen(lambda found: len(found) == 2) == ["begun", "five"]
    await watched.stop()
    assert fleet.rows("watchers") == fleet.rows("broadcasts") == []


async def test_a_message_with_tools_or_earlier_messages_is_refused(fleet: Fleet):
    async with fleet.server() as threads:
        thread = threads.thread("ann", "t")
        with pytest.raises(
            NotForWorkers, match="Send a message without them, or serve the app without --submit"
        ):
            await thread.say("hello", tools=[watched_app.hold])
        with pytest.raises(NotForWorkers, match="take no client tools or earlier messages"):
            await thread.say("hello", history=[UserMessage("earlier")])
        assert await thread.newest() is None


async def test_attachments_reach_the_worker_with_the_submitted_message(fleet: Fleet):
    """Attachments reach a submitted run's worker, even if an earlier worker lost the run before it began.

    If the run repeats, they are kept for its next repetition.
    """
    note = Attachment(b"buy tea", "note.txt")
    async with fleet.server() as threads:
        thread = threads.thread("ann", "t")
        run_id = await thread.say("look", attachments=[note, Attachment(b"buy tea", "same.txt")])
        assert await thread.attachment(note.digest) == b"buy tea"
    journal = fleet.journal()
    asked = Submission("look", attachments=[note], every=3600.0, run_id="again")
    await submit(journal, fleet.app, asked)
    await journal.queue.claim([fleet.app.queue], run_id="again")
    await journal.runs.leave("again", "queued", due_at=0.0)  # lost before it began
    async with fleet.worker(grace=PATIENCE):
        async with asyncio.timeout(PATIENCE):
            for each in (run_id, "again"):
                while (await journal.runs.get(each)).status not in OVER:
                    await asyncio.sleep(0.01)
    assert (await said(journal, run_id))[-1].text == "You sent: note.txt buy tea, same.txt buy tea"
    assert (await said(journal, "again"))[-1].text == "You sent: note.txt buy tea"
    (next_run,) = [row for row in await journal.runs.list() if row.status == "queued"]
    assert await journal.blobs.list(next_run.record.id) == (note.digest,)
    await journal.runs.forget([run_id, "again"])
    assert await journal.blobs.get(note.digest) == b"buy tea"
    assert not (await journal.runs.verify()).altered


def test_submitting_needs_postgresql(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    app = FleetApp.load(str(Path(watched_app.__file__)))

    async def submitted(
        text: str, attachments: Sequence[Attachment], run_id: str, thread: Thread
    ) -> None: ...

    with pytest.raises(DefinitionError, match="only if the journal is in PostgreSQL"):
        asgi(app.source, journal=SqliteJournal(tmp_path / "runs.db"), submit=submitted)
