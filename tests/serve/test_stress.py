"""Tests of a server under stress: races, overload, and invalid text and numbers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from handrail import (
    Adapter,
    CapabilityPolicy,
    DirectoryFilesystem,
    Prompt,
    ScriptedModel,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.journal.records import CommitUnit, QuestionRecord
from handrail.messages import ModelPart, ModelRequest, Traits
from handrail.models.scripted import Reply, Scripted
from handrail.serve import snapshots
from handrail.serve.agui.wire_events import Event
from handrail.serve.feed import Feed, follow
from handrail.serve.sources import PromptSource
from support import PATIENCE
from support.recorded import write
from support.served_threads import give, kinds, over, plan, served, settle
from support.serving import Client, play, serving


@dataclass(frozen=True)
class Level:
    """State with a number that can be infinite or NaN."""

    at: float


def source_of(*tools: Any, model: Any = None, **options: Any) -> PromptSource:
    prompt = Prompt("desk", "Help.", tools=tools, policies=[CapabilityPolicy({"fs.write": "allow"})])
    files = options.pop("files", None)
    return PromptSource(prompt, Adapter(model or ScriptedModel(play), filesystem=files), **options)


def asked_by_a_client(thread: str, leg: str, text: str) -> dict[str, Any]:
    said = [{"id": leg, "role": "user", "content": text}]
    given = {"threadId": thread, "runId": leg, "messages": said, "protocolVersion": "1.0"}
    return {**given, "state": {}, "tools": [], "context": [], "forwardedProps": {}}


async def first_id(client: Client, thread: str) -> str:
    """Wait until a thread is idle, and return the id of its first event."""
    return (await client.idle(thread))["last_event_id"].rpartition("-")[0] + "-1"


# --- races ---


async def test_cancelled_in_the_moment_of_parking(tmp_path: Path) -> None:
    async with served(tmp_path, park_after=None) as app:
        for turns in range(4):
            thread = app.thread(f"t{turns}")
            await thread.say(plan([["choose", {}]]))
            await settle(thread)
            assert thread.live is not None
            parking = thread.live.parking
            assert parking is not None
            going = asyncio.create_task(thread.cancel())
            for _ in range(turns):
                await asyncio.sleep(0)
            parking.park()
            await going
            row = await thread.newest()
            assert row is not None
            assert row.status == "cancelled", turns
            assert kinds(thread.feed) == ["started", "interrupt", "started", "cancelled"], turns


async def test_cancelled_in_the_moment_of_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run cancelled after it is done, while its file changes are being collected, still counts as successful."""
    async with served(tmp_path) as app:
        thread, may_look, load = app.thread(), asyncio.Event(), app.journal.calls.load

        async def slow(run_id: str) -> Sequence[CommitUnit]:
            await may_look.wait()
            return await load(run_id)

        monkeypatch.setattr(app.journal.calls, "load", slow)
        await thread.say(plan([["write", {"path": "a.txt", "text": "a"}]]))
        while (row := await thread.newest()) is None or row.status != "done":
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)
        assert thread.live is not None
        cancelling = asyncio.create_task(thread.cancel())
        await asyncio.sleep(0.02)
        may_look.set()
        await cancelling
        await over(thread)
        assert kinds(thread.feed) == ["started", "success"]


async def test_answered_in_the_moment_of_parking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a run is parked while the server looks up an answer's question, the answer resumes the run."""
    async with served(tmp_path, park_after=None) as app:
        thread = app.thread()
        await thread.say(plan([["choose", {}]]))
        await settle(thread)
        [question] = await thread.questions()
        assert thread.live is not None
        parking, asked = thread.live.parking, app.journal.questions.history
        assert parking is not None

        async def parked_meanwhile(run_id: str) -> Sequence[QuestionRecord]:
            found = await asked(run_id)
            parking.park()
            return found

        monkeypatch.setattr(app.journal.questions, "history", parked_meanwhile)
        assert await give(thread, question, {"n": 3}, leg="mine") == "mine"
        await over(thread)
        assert kinds(thread.feed) == ["started", "interrupt", "started", "success"]


async def test_a_leg_begins_with_itself_also_if_another_window_s_run_ends_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as client:
        await client.say("a", "call order")
        question = await client.asked("a")
        given = {
            "question_id": question["id"],
            "digest": question["digest"],
            "value": {"seats": 1, "name": "x"},
        }
        journal = client.app.threads.journal
        asked = journal.questions.history
        once = [True]

        async def ended_meanwhile(run_id: str) -> Sequence[QuestionRecord]:
            if once.pop() if once else False:
                assert (await client.ask("POST", "/threads/a/answers", given)).status == 200
                await client.idle("a")
            return await asked(run_id)

        monkeypatch.setattr(journal.questions, "history", ended_meanwhile)
        async with client.stream("POST", "/agent", asked_by_a_client("a", "mine", "hello")) as stream:
            told = await stream.all()
        assert (told[0]["type"], told[0]["runId"]) == ("RUN_STARTED", "mine")
        assert (told[-1]["type"], told[-1]["runId"]) == ("RUN_FINISHED", "mine")


async def test_a_stream_that_comes_back_after_the_end_gets_the_rest_and_ends(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        await client.say("a", "hello")
        headers = {"Last-Event-ID": await first_id(client, "a")}
        async with (
            client.stream("GET", "/threads/a/events", headers=headers) as stream,
            asyncio.timeout(PATIENCE),
        ):
            assert (await stream.all())[-1]["type"] == "RUN_FINISHED"


async def test_nothing_of_a_forgotten_thread_is_told_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        await client.say("a", "a private matter")
        headers = {"Last-Event-ID": await first_id(client, "a")}
        async with client.stream("GET", "/threads/a/events?follow=1", headers=headers) as viewer:
            events = viewer.events()
            await anext(events)
            assert (await client.ask("DELETE", "/threads/a")).status == 200
            async with asyncio.timeout(PATIENCE):
                assert [event async for _, event in events]  # the stream ends after the thread is deleted
        again = await client.ask("GET", "/threads/a/events?follow=1", headers=headers)
        assert again.kind == "ThreadUnknown"


# --- overload ---


async def test_a_viewer_sees_the_thread_while_a_tool_floods_it(tmp_path: Path) -> None:
    enough = asyncio.Event()

    @tool(effect="read")
    async def flood(context: ToolContext) -> str:
        """Report more progress at once than the feed keeps."""
        number = 0
        while not enough.is_set():
            for _ in range(4200):
                number += 1
                context.report_progress("more", done=number)
            await asyncio.sleep(0.01)
        return "done"

    async with served(tmp_path, tools=[flood]) as app:
        thread = app.thread()
        await thread.say(plan([["flood", {}]]))
        try:
            shown = await snapshots.thread_snapshot(app.journal, thread)
        finally:
            enough.set()
        assert [facts["status"] for facts in shown["calls"].values()] == ["running"]
        await over(thread)


@pytest.mark.parametrize(("leg", "ends"), [("mine", ["RUN_STARTED", "RUN_ERROR"]), ("", ["RUN_STARTED"])])
async def test_a_reader_of_a_leg_that_takes_too_long_is_told_so(leg: str, ends: list[str]) -> None:
    """A stream of one leg ends with an error if it falls behind. A stream of all legs, such as the page's, just ends."""
    feed = Feed("boot", most_items=10)
    feed.append([Event({"type": "RUN_STARTED", "runId": "mine"})])
    reading = follow(feed, 0, leg=leg)
    told = await anext(reading)
    feed.append(Event({"type": "TEXT_MESSAGE_CONTENT", "delta": str(number)}) for number in range(100))
    told += b"".join([chunk async for chunk in reading])
    events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith(b"data: ")]
    assert [each["type"] for each in events] == ends
    assert [each["code"] for each in events if each["type"] == "RUN_ERROR"] == ["FellBehind"][: len(ends) - 1]


# --- invalid text and numbers ---


async def test_numbers_that_are_not_finite_are_shown_as_nothing(tmp_path: Path) -> None:
    @tool(effect="staged")
    async def measure(context: ToolContext) -> str:
        """Report numbers that are not finite, and ask about them."""
        assert context.wait_for
        context.session.dispatch(Level(float("inf")))
        return await context.wait_for("level", {"at": float("nan")}, str)

    async with serving(tmp_path, source_of(measure, shown=[Level])) as client:
        await client.say("a", "call measure")
        question = await client.asked("a")
        assert question["payload"] == {"at": None}
        given = {"question_id": question["id"], "digest": question["digest"], "value": "high"}
        assert (await client.ask("POST", "/threads/a/answers", given)).status == 200
        assert (await client.idle("a"))["state"] == {"Level": [{"at": None}]}


class Playing:
    """A model that gives its answers in order, and raises those that are exceptions."""

    name = "played"
    traits = Traits()

    def __init__(self, *answers: Scripted) -> None:
        self._answers = iter(answers)

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        async for part in ScriptedModel([next(self._answers)]).stream(request):
            yield part


async def test_an_error_message_with_lone_surrogates_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("handrail.serve"), "disabled", True)  # this text can't be logged
    async with serving(tmp_path, source_of(model=Playing(OSError("no file \udcff"), "better"))) as client:
        await client.say("a", "hello")
        assert (await client.idle("a"))["status"] == "failed"
        await client.say("a", "again")
        assert (await client.idle("a"))["status"] == "idle"


async def test_a_call_is_undone_whatever_its_id_has_in_it(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    id = "a/b c?d#<e>%2f"
    model = Playing(Reply(calls=[ToolCall("write", {"path": "a.txt", "text": "a"}, id=id)]), "done")
    files = DirectoryFilesystem(tmp_path / "work")
    async with serving(tmp_path, source_of(write, model=model, files=files)) as client:
        await client.say("a", "hello")
        await client.idle("a")
        [change] = (await client.ask("GET", "/threads/a/files")).json["changes"]
        assert change["call_id"] == id
        undone = await client.ask("POST", f"/threads/a/calls/{quote(id, safe='')}/undo", {})
        assert undone.status == 200, undone.body
        assert not (tmp_path / "work" / "a.txt").exists()


async def test_an_event_that_can_not_be_encoded_takes_no_position() -> None:
    feed = Feed("boot")
    feed.append([Event({"type": "CUSTOM", "name": "one"})])
    with pytest.raises(UnicodeEncodeError):
        feed.append([Event({"type": "CUSTOM", "name": "\ud800"})])
    feed.append([Event({"type": "CUSTOM", "name": "two"})])
    assert [item.number for item in feed.since(0)] == [1, 2]
    assert [item.number for item in feed.since(1)] == [2]
