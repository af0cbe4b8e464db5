"""Tests of background runs in a thread: as events, in snapshots, and for clients that join later."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from handrail.runs import children
from handrail.serve import snapshots
from handrail.serve.sources import load
from handrail.serve.thread import Thread
from handrail.serve.threads import Threads
from run.test_background import until, working
from support.background_app import HELPER, HOST
from support.parked_runs import answer_to
from support.served_threads import App, events, over, served, settle

BACKGROUND = "handrail.background"
TRAVELLER = "support.background_app:traveller"


class Hosted(App):
    """An app that serves one of the agents of `support.background_app`."""

    agent = HOST

    def make(self) -> Threads:
        return Threads(load(self.agent).source, self.journal, **self.options)


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> type[Hosted]:
    monkeypatch.setattr("support.served_threads.App", Hosted)
    return Hosted


def shown(messages: Any) -> list[Any]:
    return [each for each in messages if each.get("activityType") == BACKGROUND]


def told(thread: Thread) -> list[Any]:
    """Return the activities that were sent as events, as messages."""
    return [
        {"id": each["messageId"], "content": each["content"]}
        for each in events(thread.feed)
        if each.get("activityType") == BACKGROUND
    ]


def contents(messages: Any) -> list[Any]:
    return [{"id": each["id"], "content": each["content"]} for each in shown(messages)]


async def snapshot(app: App, thread: Thread) -> Any:
    found = await snapshots.thread_snapshot(app.journal, thread)
    return json.loads(json.dumps(found["messages"]))


async def joined(app: App, thread: Thread) -> Any:
    found, _, _ = await snapshots.joining_events(app.journal, thread)
    return json.loads(json.dumps(found[1].data["messages"]))


@asynccontextmanager
async def one(journal: Any, run_id: str) -> AsyncGenerator[str]:
    """Execute the only background run that a run has begun, and yield its id."""
    [child] = await children(journal, run_id)
    async with working(journal, HELPER):
        await until(journal, child.record.id)
        yield child.record.id


async def test_a_background_run_is_shown_at_its_call_and_its_end_where_it_is_told(
    tmp_path: Path, hosted: Any
):
    """The same activities come as events, in snapshots from memory and from the journal, and to clients that join; nobody is shown the end as a person's words."""
    hosted.agent = HOST
    async with served(tmp_path) as app:
        thread = app.thread()
        run_id = await thread.say('{"message": "hello"}')
        await over(thread)
        begun = contents(await snapshot(app, thread))
        assert begun == told(thread)
        async with one(app.journal, run_id) as child:
            await thread.say("thanks")
            await over(thread)
        messages = await snapshot(app, thread)
        assert contents(messages) == told(thread)
        [start, end] = [each["content"] for each in shown(messages)]
        calls = [call["id"] for each in messages for call in each.get("toolCalls", ())]
        assert start == {
            "state": "begun",
            "background_id": child,
            "agent": "helper",
            "call_id": calls[0],
            "message": "hello",
        }
        assert end == {
            "state": "ended",
            "background_id": child,
            "agent": "helper",
            "end": "done",
            "text": "hello",
        }
        roles = [each["role"] for each in messages]
        assert roles == [
            "user",
            "assistant",
            "tool",
            "activity",
            "assistant",
            "user",
            "activity",
            "assistant",
        ]
        assert [each["content"] for each in messages if each["role"] == "user"] == [
            '{"message": "hello"}',
            "thanks",
        ]
        said = [each for each in events(thread.feed) if each.get("name") == "handrail.message"]
        assert [each["value"]["content"] for each in said] == ['{"message": "hello"}', "thanks"]
        app.threads = app.make()
        again = app.thread()
        assert await snapshot(app, again) == messages
        assert await joined(app, again) == messages


async def test_an_unfinished_run_shows_its_background_runs_from_memory_and_from_the_journal(
    tmp_path: Path, hosted: Any
):
    """Also after the run is resumed by another server, and once it has ended. Each activity stands once."""
    hosted.agent = TRAVELLER
    async with served(tmp_path) as app:
        thread = app.thread()
        run_id = await thread.say("Go.")
        await settle(thread)
        async with one(app.journal, run_id):
            live = await snapshot(app, thread)
            assert [each["content"]["state"] for each in shown(live)] == ["begun"]
            assert await joined(app, thread) == live
            assert thread.live is not None
            assert thread.live.parking is not None
            assert thread.live.parking.park()
            await over(thread)
            app.threads = app.make()
            thread = app.thread()
            assert await snapshot(app, thread) == live  # from the journal of an unfinished run
            for question in await thread.questions():
                await thread.answer([answer_to(question, {"approved": True}, by="ada")])
            await over(thread)
        ended = await snapshot(app, thread)
        assert [each["content"]["state"] for each in shown(ended)] == ["begun", "ended"]
        assert shown(ended)[:1] == shown(live)
        assert told(thread)[-1:] == contents(ended)[-1:]
        app.threads = app.make()
        assert await snapshot(app, app.thread()) == ended
