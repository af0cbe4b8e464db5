"""Tests of messages to a run while it works, over HTTP and AG-UI: sent, edited, withdrawn, listed and told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from handrail import Adapter, Prompt, ScriptedModel, ToolCall
from handrail.messages import ModelPart, ModelRequest, TextPart, UserMessage
from handrail.models.scripted import Scripted
from handrail.run.record.begin import decode_outcome
from handrail.runs import send
from handrail.serve import Limits
from handrail.serve.sources import PromptSource
from support.served_threads import Held
from support.serving import Client, Said, order, said_by, serving

pytestmark = pytest.mark.once


class Desk:
    """A served run whose tool works until it is released, or which asks a person, or whose model does not end its answer."""

    def __init__(self, client: Client, held: Held, requests: list[ModelRequest]) -> None:
        self.client = client
        self.held = held
        self.requests = requests
        self.run_id = ""

    async def begin(self, text: str) -> None:
        self.run_id = await self.client.say("t", text)
        if text == "work":
            await self.held.has_begun.wait()

    @property
    def path(self) -> str:
        return f"/threads/t/runs/{self.run_id}/messages"

    async def send(self, text: str, **more: Any) -> dict[str, Any]:
        said = await self.client.ask("POST", self.path, {"text": text, **more})
        assert said.status == 202, said.body
        return said.json["message"]

    async def change(self, message: dict[str, Any], **new: Any) -> Said:
        return await self.client.ask("POST", f"{self.path}/{message['id']}", new)

    async def withdraw(self, message: dict[str, Any]) -> Said:
        return await self.client.ask("DELETE", f"{self.path}/{message['id']}")

    async def order(self, order: str, text: str = "") -> Said:
        path = self.path.replace("/messages", "/orders")
        return await self.client.ask("POST", path, {"order": order, "text": text})

    async def listed(self) -> list[tuple[str, str]]:
        found = (await self.client.ask("GET", self.path)).json["messages"]
        return [(each["text"], each["state"]) for each in found]

    async def end(self) -> Any:
        self.held.may_end.set()
        return await self.client.idle("t")

    @property
    def said(self) -> list[str]:
        """What the model's last request has of the user."""
        return [each.text for each in self.requests[-1].messages if isinstance(each, UserMessage)]


class Talker(ScriptedModel):
    """A model that answers "talk" without an end."""

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        last = request.messages[-1]
        if isinstance(last, UserMessage) and last.text == "talk":
            yield TextPart("It began. ")
            await asyncio.Event().wait()
        async for part in super().stream(request):
            yield part


@asynccontextmanager
async def desk(folder: Path, **options: Any) -> AsyncGenerator[Desk]:
    held = Held()
    requests: list[ModelRequest] = []

    def play(request: ModelRequest) -> Scripted:
        requests.append(request)
        said = [each.text for each in request.messages if isinstance(each, UserMessage)]
        if len(said) == 1 and not isinstance(request.messages[-1], UserMessage):
            return "done"
        calls = {"work": ToolCall("hold", {}), "ask": ToolCall("order", {})}
        return calls.get(said[-1], f"heard {said[-1]}")

    prompt = Prompt("desk", "Help.", tools=[held.tool, order])
    source = PromptSource(prompt, Adapter(Talker(play)))
    async with serving(folder, source, **options) as client:
        try:
            yield Desk(client, held, requests)
        finally:
            held.may_end.set()


def queued(events: list[dict[str, Any]]) -> list[tuple[str, str, bool]]:
    found = [each["value"] for each in events if each.get("name") == "handrail.queued"]
    return [(each["text"], each["state"], each["edited"]) for each in found]


async def test_a_message_is_told_while_the_run_works(tmp_path: Path):
    """The sender gets the message and the run's status; the message waits in the snapshot, and moves into the conversation when told."""
    async with desk(tmp_path) as here:
        await here.begin("work")
        said = await here.client.ask("POST", here.path, {"text": "in metres", "id": "m1"})
        again = await here.client.ask("POST", here.path, {"text": "in metres", "id": "m1"})
        assert (said.status, said.json["status"]) == (202, "running")
        assert again.json["message"]["id"] == said.json["message"]["id"] == "m1"
        await here.send("and then stop", when="afterwards")
        seen = (await here.client.ask("GET", "/threads/t")).json
        assert [(each["text"], each["when"], each["by"]) for each in seen["queued"]] == [
            ("in metres", "next step", seen["queued"][0]["by"]),
            ("and then stop", "afterwards", seen["queued"][0]["by"]),
        ]
        seen = await here.end()
        assert seen["queued"] == []
        assert here.said == ["work", "in metres", "and then stop"]
        users = [each for each in seen["messages"] if each["role"] == "user"]
        assert [each["content"] for each in users] == here.said
        assert len({each["id"] for each in users}) == 3
        assert await here.listed() == [("in metres", "told"), ("and then stop", "told")]
        turns = (await here.client.ask("GET", f"/threads/t/runs/{here.run_id}")).json["turns"]
        assert [turn["said"] for turn in turns] == [["work"], ["in metres"], ["and then stop"]]


async def test_a_message_is_edited_and_withdrawn_until_it_is_told(tmp_path: Path):
    async with desk(tmp_path) as here:
        await here.begin("work")
        first, second = await here.send("in metres"), await here.send("hurry")
        edited = await here.change(first, text="in feet", when="afterwards")
        assert edited.status == 200
        assert [edited.json["message"][key] for key in ("text", "when", "state", "edited")] == [
            "in feet",
            "afterwards",
            "waiting",
            True,
        ]
        assert (await here.withdraw(second)).json["message"]["state"] == "withdrawn"
        seen = (await here.client.ask("GET", "/threads/t")).json
        assert [each["text"] for each in seen["queued"]] == ["in feet"]
        assert (await here.withdraw(second)).kind == "MessageRefused"
        await here.end()
        assert await here.listed() == [("in feet", "told"), ("hurry", "withdrawn")]
        assert here.said == ["work", "in feet"]
        late = await here.change(first, text="in miles")
        assert (late.status, late.kind) == (409, "MessageRefused")
        assert "already told" in late.json["error"]["message"]


async def test_a_message_for_now_stops_the_answer_and_keeps_its_text(tmp_path: Path):
    async with desk(tmp_path) as here:
        await here.begin("talk")
        await here.client.until("t", lambda seen: "It began." in str(seen["messages"]))
        await here.send("enough", when="now")
        seen = await here.end()
        assert [each["role"] for each in seen["messages"]] == ["user", "assistant", "user", "assistant"]
        assert seen["messages"][1]["content"].startswith("It began.")
        assert said_by(seen["messages"])[-1] == "heard enough"


async def test_a_run_that_waits_for_an_answer_gets_the_message_after_it(tmp_path: Path):
    """This holds in memory and parked. Other windows are told about the message although no process executes the run."""
    async with desk(tmp_path, park_after=0.0) as here:
        await here.begin("ask")
        asked = await here.client.asked("t")
        await here.client.until("t", lambda seen: not here.client.app.running())
        async with here.client.stream("GET", "/threads/t/events?follow=1") as stream:
            reader = stream.events()
            events = [event async for _, event in _until(reader, "RUN_FINISHED")]
            assert queued(events) == []
            said = await here.client.ask("POST", here.path, {"text": "with salt"})
            assert said.json["status"] == "parked"
            await here.change(said.json["message"], text="with pepper")
            _, event = await anext(reader)
            _, other = await anext(reader)
            assert queued([event, other]) == [
                ("with salt", "waiting", False),
                ("with pepper", "waiting", True),
            ]
        seen = (await here.client.ask("GET", "/threads/t")).json
        assert [each["text"] for each in seen["queued"]] == ["with pepper"]
        given = {"question_id": asked["id"], "digest": asked["digest"], "value": {"seats": 2}}
        assert (await here.client.ask("POST", "/threads/t/answers", given)).status == 200
        await here.end()
        assert here.said == ["ask", "with pepper"]


async def _until(reader: Any, kind: str) -> AsyncGenerator[Any]:
    async for each in reader:
        yield each
        if each[1]["type"] == kind:
            return


async def test_followers_see_each_state_and_the_message_in_the_conversation(tmp_path: Path):
    """So does a client that joins later: it gets the messages that wait."""
    async with desk(tmp_path) as here:
        await here.begin("work")
        message = await here.send("in metres")
        async with (
            here.client.stream("GET", "/threads/t/events") as stream,
            here.client.stream("GET", "/threads/t/events") as other,
        ):
            await here.change(message, text="in feet")
            await here.withdraw(await here.send("hurry"))
            await send(here.client.app.threads.journal, here.run_id, "thanks")  # as another program does
            here.held.may_end.set()
            events, _ = await stream.all(), await other.all()
        states = queued(events)
        assert states[0] == ("in metres", "waiting", False)
        assert [each for each in states if each[0] == "hurry"] == [
            ("hurry", "waiting", False),
            ("hurry", "withdrawn", False),
        ]
        assert states.index(("in feet", "waiting", True)) < states.index(("in feet", "told", True))
        [start] = [each for each in events if each.get("role") == "user" and "messageId" in each]
        texts = [
            each["delta"]
            for each in events
            if each.get("messageId") == start["messageId"] and "delta" in each
        ]
        assert texts == ["in feet\n\nthanks"]
        assert events.index(start) > max(
            at for at, each in enumerate(events) if each.get("name") == "handrail.queued"
        )
        seen = await here.end()
        assert start["messageId"] in [each["id"] for each in seen["messages"]]


async def test_what_a_run_was_not_told_is_read_by_the_next_one(tmp_path: Path):
    """If the run is cancelled, no message waits any more, and the thread shows it."""
    async with desk(tmp_path) as here:
        await here.begin("work")
        await here.send("in metres")
        await here.client.ask("POST", "/threads/t/cancel", {})
        seen = await here.client.idle("t")
        assert seen["queued"] == []
        assert [each["content"] for each in seen["messages"] if each["role"] == "user"] == [
            "work",
            "in metres",
        ]
        refused = await here.client.ask("POST", here.path, {"text": "more"})
        assert (refused.status, refused.kind) == (409, "MessageRefused")
        await here.client.say("t", "hello")
        await here.client.idle("t")
        assert here.said[-2:] == ["in metres", "hello"]


async def test_messages_between_the_same_two_answers_have_ids_of_their_own(tmp_path: Path):
    """One is told before an answer. The other arrives during that answer, which is then cut, so it stands next to the first."""
    async with desk(tmp_path) as here:
        await here.begin("work")
        await here.send("talk")
        here.held.may_end.set()
        await here.client.until("t", lambda seen: "It began." in str(seen["messages"]))
        await here.send("more")
        await here.client.ask("POST", "/threads/t/cancel", {})
        seen = await here.client.idle("t")
        users = {each["id"]: each["content"] for each in seen["messages"] if each["role"] == "user"}
        assert list(users.values()) == ["work", "talk", "more"]


async def test_a_refused_message_leaves_the_thread_free_for_the_next_run(tmp_path: Path, monkeypatch: Any):
    """A sender whose message came too late can start a run with it at once, although this process had not quite finished the old one."""
    async with desk(tmp_path) as here:
        await here.begin("work")
        [thread] = here.client.app.threads.running()
        live = thread.live
        assert live is not None
        is_awaited = asyncio.Event()
        over = live.over

        async def awaited() -> None:
            is_awaited.set()
            await over()

        monkeypatch.setattr(live, "over", awaited)
        monkeypatch.setattr(live.emissions, "finish", is_awaited.wait)
        here.held.may_end.set()
        journal = here.client.app.threads.journal
        while (await journal.runs.get(here.run_id)).status != "done":
            await asyncio.sleep(0)
        said = await here.client.ask("POST", here.path, {"text": "x"})
        assert (said.status, said.kind) == (409, "MessageRefused")
        assert (await here.client.ask("POST", "/threads/t/messages", {"text": "x"})).status == 202
        await here.client.idle("t")


@pytest.mark.parametrize("park_after", [0.0, 300.0])
@pytest.mark.parametrize("order", ["continue", "wrap up", "stop", "answer"])
async def test_a_paused_run_goes_on_as_ordered(tmp_path: Path, order: str, park_after: float):
    """It asks a question of its own kind, in memory or parked, and each order and an answer to the question end the pause."""
    async with desk(tmp_path, park_after=park_after) as here:
        await here.begin("work")
        paused = await here.order("pause")
        assert (paused.status, paused.json["message"]["order"]) == (202, "pause")
        here.held.may_end.set()
        question = await here.client.asked("t")
        assert (question["kind"], question["call_id"]) == ("pause", "")
        if not park_after:
            await here.client.until("t", lambda seen: not here.client.app.running())
        if order == "answer":
            given = {"question_id": question["id"], "digest": question["digest"], "value": "continue"}
            said = await here.client.ask("POST", "/threads/t/answers", given)
        else:
            said = await here.order(order, "as I said")
        assert said.status in (200, 202), said.body
        seen = await here.client.idle("t")
        assert (seen["questions"], seen["queued"]) == ([], [])
        row = await here.client.app.threads.journal.runs.get(here.run_id)
        reason = {"wrap up": "wrapped up", "stop": "stopped"}.get(order, "done")
        assert decode_outcome(row).stop_reason == reason
        assert len(here.requests) == (1 if order == "stop" else 2)
        assert (await here.order("continue")).kind == "MessageRefused"


async def test_a_pause_that_has_not_begun_is_taken_back(tmp_path: Path):
    """While another question is open, the run is not paused yet. The followers are told that the order was withdrawn."""
    async with desk(tmp_path, park_after=0.0) as here:
        await here.begin("ask")
        asked = await here.client.asked("t")
        await here.client.until("t", lambda seen: not here.client.app.running())
        await here.order("pause")
        seen = (await here.client.ask("GET", "/threads/t")).json
        assert [(each["order"], each["text"]) for each in seen["queued"]] == [("pause", "")]
        after = seen["last_event_id"]
        assert (await here.order("continue")).json == {}
        async with here.client.stream("GET", f"/threads/t/events?after={after}") as stream:
            events = await stream.all()
        assert [event["value"]["state"] for event in events if event.get("name") == "handrail.queued"] == [
            "withdrawn"
        ]
        given = {"question_id": asked["id"], "digest": asked["digest"], "value": {"seats": 2}}
        await here.client.ask("POST", "/threads/t/answers", given)
        assert (await here.client.idle("t"))["questions"] == []


async def test_an_order_without_words_is_no_message(tmp_path: Path):
    """After it, what a client says along with an answer is still shown as the client's own message."""
    async with desk(tmp_path) as here:
        await here.begin("work")
        async with here.client.stream("GET", "/threads/t/events?follow=1") as stream:
            await here.order("pause")
            here.held.may_end.set()
            question = await here.client.asked("t")
            resume = {"interruptId": f"{question['id']}#{question['digest'][:16]}", "status": "resolved"}
            sent = {
                "threadId": "t",
                "runId": "r2",
                "tools": [],
                "context": [],
                "state": {},
                "forwardedProps": {},
            }
            sent |= {"messages": [{"id": "u2", "role": "user", "content": "gently"}]}
            sent |= {"resume": [{**resume, "payload": "continue"}]}
            async with here.client.stream("POST", "/agent", sent) as answered:
                assert (await answered.all())[-1]["type"] == "RUN_FINISHED"
            reader = stream.events()
            events = [event async for _, event in _until(reader, "RUN_FINISHED")]
            events += [event async for _, event in _until(reader, "RUN_FINISHED")]
        assert not [
            event for event in events if event["type"] == "TEXT_MESSAGE_START" and event["role"] == "user"
        ]
        told = [event["value"]["content"] for event in events if event.get("name") == "handrail.message"]
        assert told == ["gently"]
        assert here.said == ["work", "gently"]


async def test_bad_messages_are_refused(tmp_path: Path):
    """The same limits hold as for every message, and only the runs of one's own thread get them."""
    async with desk(tmp_path, limits=Limits(message_chars=100)) as here:
        await here.begin("work")
        message = await here.send("fine")
        other = await here.client.say("other", "hello")
        for body, kind in [
            ({"text": " "}, "MessageEmpty"),
            ({"text": "x" * 101}, "MessageTooLong"),
            ({"text": "x", "when": "soon"}, "BodyUnfit"),
            ({"text": "x", "id": "a b"}, "BadId"),
            ({"text": "y", "id": message["id"]}, "MessageRefused"),
            ({"text": "x", "more": 1}, "BodyUnfit"),
        ]:
            assert (await here.client.ask("POST", here.path, body)).kind == kind, body
        for body, kind in [({"text": ""}, "MessageEmpty"), ({"text": "x" * 101}, "MessageTooLong")]:
            assert (await here.change(message, **body)).kind == kind
        assert (await here.change({"id": "none"}, text="x")).kind == "MessageRefused"
        assert (await here.order("sleep")).kind == "BodyUnfit"
        assert (await here.order("pause", "x" * 101)).kind == "MessageTooLong"
        orders = await here.client.ask("POST", f"/threads/t/runs/{other}/orders", {"order": "stop"})
        assert (orders.status, orders.kind) == (404, "RunUnknown")
        wrong = f"/threads/t/runs/{other}/messages"
        for method, path in [
            ("GET", wrong),
            ("POST", wrong),
            ("POST", f"{wrong}/m"),
            ("DELETE", f"{wrong}/m"),
        ]:
            body = {"text": "x"} if method == "POST" else None
            said = await here.client.ask(method, path, body)
            assert (said.status, said.kind) == (404, "RunUnknown")
        assert await here.listed() == [("fine", "waiting")]
