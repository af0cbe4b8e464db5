"""Tests for notifications: who is told what and when, what is told again, and what is told once whoever sends it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from handrail import Adapter, CapabilityPolicy, Notify, Prompt, ScriptedModel, ToolContext, tool
from handrail.errors import DefinitionError
from handrail.guard import ask
from handrail.notify import Address
from handrail.notify.message import Message
from handrail.question import Question
from handrail.serve.app import asgi
from handrail.serve.notifier import Notifier
from handrail.serve.people import People
from handrail.serve.sources import PromptSource
from handrail.testing import RecordingSender
from support.passwords import cheap_hashes
from support.serving import Client, play, serving

__all__ = ["cheap_hashes"]

SECRET = "correct horse battery"
PAGE = "https://desk.example/agents/"
DAY = 86400.0


@tool(capabilities={"money"})
async def pay(amount: int, context: ToolContext) -> str:
    """Pay somebody."""
    return f"paid {amount}"


@tool(effect="read")
async def choose(menu: str, context: ToolContext) -> str:
    """Ask the person to choose."""
    assert context.wait_for is not None
    return await context.wait_for("pick", {"menu": menu}, str, message=f"Choose from {menu}.")


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return self.seconds


def url(name: str) -> str:
    return f"https://hooks.example/{name}"


class Desk:
    """A server and a notifier that looks only when a test says so."""

    def __init__(self, client: Client, clock: Hands, settings: Notify, sender: RecordingSender) -> None:
        self.client, self.clock, self.sender = client, clock, sender
        self.journal = client.app.threads.journal
        self.notifier = self.another(settings)

    def another(self, settings: Notify, sender: RecordingSender | None = None) -> Notifier:
        app = self.client.app
        return Notifier(
            "desk", app.inbox, app.principals, self.journal, PAGE, settings, sender or self.sender
        )

    async def ask(self, thread: str = "t", said: str = 'call pay {"amount": 5}', name: str = "ann") -> Any:
        await self.client.say(thread, said, by(name))
        return await self.client.asked(thread, by(name))

    async def vote(self, name: str, question: Any, approved: bool = True) -> Any:
        given = {"question_id": question["id"], "digest": question["digest"], "approved": approved}
        return await self.client.ask("POST", "/inbox/answers", given, by(name))

    async def after(self, seconds: float) -> None:
        """Let this much time pass, and send what is then to be told."""
        self.clock.seconds += seconds
        await self.notifier.look()
        await self.notifier.sent()

    def types(self, name: str) -> list[str]:
        return [event["type"] for event in self.sender.events(url(name))]

    def last(self, name: str) -> Any:
        return self.sender.events(url(name))[-1]


def by(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}:{SECRET}"}


TEAM = {"ann": ["user"], "fay": ["finance"], "gus": ["finance"], "max": ["manager"]}


@asynccontextmanager
async def desk(folder: Path, money: Any = "ask", **settings: Any) -> AsyncGenerator[Desk]:
    clock = Hands()
    people = People(folder / "people.db")
    for name, roles in TEAM.items():
        people.add(name, roles, SECRET, [Address(url(name))])
    people.close()
    prompt = Prompt("desk", "Help.", tools=[pay, choose], policies=[CapabilityPolicy({"money": money})])
    source = PromptSource(prompt, Adapter(ScriptedModel(play)))
    channel = settings.pop("channel", ())
    async with serving(folder, source, clock=clock, park_after=0) as client:
        yield Desk(client, clock, Notify(*channel, **settings), RecordingSender())


# --- who is told, and what -----------------------------------------------------------------------------


async def test_two_people_are_told_and_one_answers(tmp_path: Path):
    async with desk(tmp_path, ask(role="finance")) as on:
        question = await on.ask()
        await on.after(9)
        assert on.sender.attempts == [], "the question has waited no longer than a moment"
        await on.after(1)
        assert (on.types("fay"), on.types("gus"), on.types("ann")) == (
            ["question.opened"],
            ["question.opened"],
            [],
        )
        assert len({message.id for _, message in on.sender.attempts}) == 2, "one program may receive both"
        told = on.last("fay")["data"]
        assert (told["app"], told["tool"], told["question_id"]) == ("desk", "pay", question["id"])
        assert told["link"].startswith(f"{PAGE}#/q/")
        assert told.keys() == {"question_id", "app", "tool", "link", "asked_at"}, "no arguments"
        await on.after(1000)
        assert on.types("fay") == ["question.opened"], "nobody is told twice"
        await on.vote("fay", question)
        await on.after(0)
        assert on.types("fay") == on.types("gus") == ["question.opened", "question.closed"]
        ended = on.last("gus")["data"]
        assert (ended["outcome"], ended["by"], ended["tool"]) == ("answered", "fay", "pay")
        await on.after(DAY)
        assert len(on.sender.attempts) == 4


async def test_the_owner_is_told_about_their_own_question_without_its_words(tmp_path: Path):
    async with desk(tmp_path, channel=(url("channel"),)) as on:
        await on.ask(said='call choose {"menu": "sekrit-soup"}')
        await on.after(10)
        assert on.types("ann") == on.types("channel") == ["question.opened"]
        assert on.last("ann")["data"]["tool"] == "choose"
        assert b"soup" not in b"".join(message.body for _, message in on.sender.attempts)
        assert on.types("fay") == []


async def test_a_question_that_closes_in_a_moment_is_told_to_nobody(tmp_path: Path):
    async with desk(tmp_path, ask(role="finance")) as on:
        question = await on.ask()
        await on.after(5)
        await on.vote("fay", question, approved=False)
        await on.after(10)
        assert on.sender.attempts == []


async def test_a_cancelled_run_and_a_removed_user_and_a_lost_role(tmp_path: Path):
    """A withdrawn question is told as closed. Who may not answer any more, or has no address, is told nothing new."""
    async with desk(tmp_path, ask(role="finance"), remind=100) as on:
        people = on.client.app.people
        await on.ask()
        people.remove("gus")
        await on.after(10)
        assert (on.types("fay"), on.types("gus")) == (["question.opened"], [])
        people.remove("fay")
        people.add("fay", ["user"], SECRET, [Address(url("fay"))])
        await on.after(100)
        assert on.types("fay") == ["question.opened"], "no reminder without the role"
        await on.client.ask("POST", "/threads/t/cancel", {}, by("ann"))
        await on.client.idle("t", by("ann"))
        await on.after(100)
        assert on.last("fay")["type"] == "question.closed"
        assert on.last("fay")["data"]["outcome"] == "withdrawn"
        people.remove("fay")
        people.add("fay", ["finance"], SECRET, [])
        await on.ask("u")
        await on.after(100)
        assert len(on.sender.events(url("fay"))) == 2


async def test_nobody_is_asked_about_the_run_of_a_user_who_was_removed(tmp_path: Path):
    async with desk(tmp_path, ask(role="finance")) as on:
        await on.ask()
        on.client.app.people.remove("ann")
        await on.after(10)
        assert on.sender.attempts == []


async def test_whoever_has_voted_is_not_reminded(tmp_path: Path):
    async with desk(tmp_path, ask(role="finance", approvals=2), remind=100) as on:
        question = await on.ask()
        await on.after(10)
        await on.vote("fay", question)
        await on.after(100)
        assert on.types("fay") == ["question.opened"]
        assert on.types("gus") == ["question.opened", "question.reminder"]


# --- as declared ---------------------------------------------------------------------------------------


async def test_a_reminder_another_role_and_then_a_denial(tmp_path: Path):
    money = ask(role="finance", then="manager", after=3600, expires=DAY)
    async with desk(tmp_path, money, remind=1800) as on:
        question = await on.ask()
        await on.after(10)
        assert (await on.vote("max", question)).status == 409, "it is not the manager's to decide yet"
        await on.after(1800)
        assert on.types("fay") == ["question.opened", "question.reminder"]
        assert on.types("max") == []
        await on.after(1800)
        assert on.types("max") == ["question.opened"]
        assert len(on.types("fay")) == 3
        await on.after(DAY)
        assert on.last("max")["type"] == on.last("fay")["type"] == "question.closed"
        assert on.last("max")["data"]["outcome"] == "timed out"
        await on.client.app.threads.poll()
        seen = await on.client.idle("t", by("ann"))
        assert "not approved (timed out)" in seen["messages"][-1]["content"]


async def test_another_role_may_decide_once_its_time_has_come(tmp_path: Path):
    async with desk(tmp_path, ask(role="finance", then="manager", after=3600)) as on:
        question = await on.ask()
        assert question["quorums"] == [
            {"role": "finance", "approvals": 1, "then": "manager", "after": 3600.0}
        ]
        on.clock.seconds = 3600.0
        assert (await on.vote("max", question)).json == {"decided": True}
        seen = await on.client.idle("t", by("ann"))
        assert seen["messages"][-1]["content"] == "Done: paid 5"


# --- many, and receivers that are down -----------------------------------------------------------------


async def test_a_thousand_questions_in_a_minute_are_two_messages(tmp_path: Path):
    async with desk(tmp_path, ask(role="finance")) as on:
        await on.ask("first")
        await on.after(10)
        for number in range(30):
            await on.ask(f"t{number}")
        for _ in range(25):
            await on.after(2)
        assert on.types("fay") == ["question.opened"]
        await on.after(10)
        assert on.types("fay") == ["question.opened", "questions.summary"]
        summary = on.last("fay")["data"]
        assert (summary["opened"], summary["waiting"], summary["closed"]) == (30, 31, 0)
        assert summary["tools"] == {"pay": 30}
        assert summary["link"] == PAGE


async def test_a_clock_that_is_set_back_holds_nothing_up(tmp_path: Path):
    async with desk(tmp_path, ask(role="finance")) as on:
        on.clock.seconds = DAY
        await on.ask("first")
        await on.after(10)
        on.clock.seconds = 0
        await on.ask("second")
        await on.after(10)
        assert on.types("fay") == ["question.opened", "question.opened"]
        await on.after(10)
        assert len(on.types("fay")) == 2


async def test_a_receiver_that_is_down_for_a_day(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The same message is tried with backoff, and nothing is lost. Others are told meanwhile."""
    async with desk(tmp_path, ask(role="finance")) as on:
        on.sender.answer = lambda where: "it answered 500" if where == url("fay") else ""
        await on.ask("first")
        await on.after(10)
        question = await on.ask("second")
        for _ in range(24 * 60):
            await on.after(60)
        assert on.types("gus") == ["question.opened", "question.opened"]
        tried = [message for where, message in on.sender.attempts if where == url("fay")]
        assert len({(message.id, message.body) for message in tried}) == 1
        assert [message.attempt for message in tried] == list(range(1, len(tried) + 1))
        assert 25 < len(tried) < 40
        assert "https://hooks.example/…" in caplog.text
        assert url("fay") not in caplog.text
        await on.vote("gus", question)
        on.sender.answer = lambda where: ""
        await on.after(3600)
        assert on.types("fay") == ["question.opened"]
        assert on.last("fay")["data"]["question_id"] != question["id"]
        await on.after(60)
        assert on.types("fay") == ["question.opened"], "it was never told about the second question"


async def test_a_message_about_a_question_that_has_closed_is_replaced(tmp_path: Path):
    async with desk(tmp_path, ask(role="finance")) as on:
        on.sender.answer = lambda where: "down" if where == url("fay") else ""
        question = await on.ask()
        await on.after(10)
        await on.vote("gus", question)
        on.sender.answer = lambda where: ""
        await on.after(10)
        assert on.types("fay") == ["question.closed"], (
            "it may have got the first message, so it is told the end"
        )


async def test_two_servers_send_each_message_once(tmp_path: Path):
    async with desk(tmp_path, ask(role="finance")) as on:
        others = [on.another(Notify()) for _ in range(4)]
        await on.ask()
        on.clock.seconds += 10
        for _ in range(3):
            await asyncio.gather(*(each.look() for each in others))
            await asyncio.gather(*(each.sent() for each in others))
            on.clock.seconds += 60
        assert sorted(where for where, _ in on.sender.attempts) == [url("fay"), url("gus")]


async def test_a_message_that_a_killed_server_was_sending_is_sent_again_with_its_id(tmp_path: Path):
    class Killed(RecordingSender):
        async def send(self, address: Address, message: Message, /) -> str:
            await super().send(address, message)
            raise asyncio.CancelledError  # the process ends after it has sent, before it recorded that

    async with desk(tmp_path, ask(role="finance")) as on:
        killed = on.another(Notify(), sender := Killed())
        await on.ask()
        on.clock.seconds += 10
        await killed.look()
        while len(sender.attempts) < 2:
            await asyncio.sleep(0)
        await killed.stop()
        await on.after(30)
        assert on.sender.attempts == [], "it may still be sending"
        await on.after(31)
        assert sorted(each.id for _, each in on.sender.attempts) == sorted(
            each.id for _, each in sender.attempts
        )
        assert on.types("fay") == ["question.opened"]
        await on.after(DAY)
        assert len(on.sender.attempts) == 2


async def test_a_receiver_that_hangs_delays_no_other(tmp_path: Path):
    """A receiver that hangs keeps its own message only."""
    gate = asyncio.Event()

    class Slow(RecordingSender):
        async def send(self, address: Address, message: Message, /) -> str:
            if address.url == url("fay"):
                await gate.wait()
            return await super().send(address, message)

    async with desk(tmp_path, ask(role="finance")) as on:
        slow = on.another(Notify(), sender := Slow())
        await on.ask()
        on.clock.seconds += 10
        await slow.look()
        for _ in range(20):
            await asyncio.sleep(0)
        while not sender.events(url("gus")):
            await asyncio.sleep(0)
        await slow.look()
        assert sender.events(url("fay")) == []
        gate.set()
        await slow.sent()
        assert len(sender.attempts) == 2


# --- the link ------------------------------------------------------------------------------------------


async def test_a_link_leads_only_those_who_may_answer(tmp_path: Path):
    async with desk(tmp_path, ask(role="finance")) as on:
        question = await on.ask("t")
        path = f"/questions/{question['id'].replace('?', '%3F')}"

        async def follow(name: str, where: str = path) -> Any:
            return await on.client.ask("GET", where, headers=by(name))

        assert (await follow("ann")).json == {"thread": "t"}
        assert (await follow("fay")).json == {"thread": None}
        refused, unknown = await follow("max"), await follow("fay", "/questions/no-such%3F1")
        assert (refused.status, refused.json) == (unknown.status, unknown.json) == (404, refused.json)
        assert (await on.client.ask("GET", path)).status == 401
        await on.vote("fay", question)
        assert (await follow("gus")).json == refused.json


def test_addresses_without_a_public_url_are_refused(tmp_path: Path):
    from handrail import MemoryJournal

    source = PromptSource(Prompt("desk", "Help."), Adapter(ScriptedModel(play)))
    with pytest.raises(DefinitionError, match="--public-url"):
        asgi(source, journal=MemoryJournal(), notify=Notify(url("channel")))
    with pytest.raises(DefinitionError, match="public URL"):
        asgi(source, journal=MemoryJournal(), public_url="desk.example")


async def test_a_server_tells_people_by_itself(tmp_path: Path):
    """With a public URL, a started server looks by itself."""
    sender = RecordingSender()
    people = People(tmp_path / "people.db")
    people.add("ann", ["user"], SECRET, [Address(url("ann"))])
    people.close()
    async with serving(
        tmp_path, public_url=PAGE, notify=Notify(after=0.001), sender=sender, park_after=0
    ) as client:
        await client.say("t", "call order {}", by("ann"))
        while not sender.events(url("ann")):
            await asyncio.sleep(0.01)
    event = json.loads(sender.attempts[0][1].body)
    assert event["type"] == "question.opened"


async def test_what_no_person_answers_is_told_to_nobody(tmp_path: Path):
    """Tools of a client, and questions of programs whose runs are not recorded. The latter do not stop what is told about others."""
    async with desk(tmp_path, ask(role="finance")) as on:
        map_tool = {
            "name": "show_map",
            "description": "Show a map.",
            "parameters": {"type": "object", "properties": {}},
        }
        input = {
            "threadId": "map",
            "runId": "1",
            "messages": [{"id": "1", "role": "user", "content": "call show_map {}"}],
            "tools": [map_tool],
            "context": [],
            "state": {},
            "forwardedProps": {},
        }
        said = await on.client.ask("POST", "/agent", input, by("ann"))
        assert b"show_map" in said.body
        question = Question(
            id="ghost?1", kind="input", name="pick", message="?", payload={}, schema={}, digest="d", principal="ann",
            asked_by=(), call_id="c", asked_at=on.clock.now(), run_id="ghost",
        )  # fmt: skip
        asking = asyncio.ensure_future(on.journal.questions.ask(question))
        await on.ask()
        assert len(await on.journal.questions.open()) == 3
        await on.after(10)
        assert (on.types("ann"), on.types("fay")) == ([], ["question.opened"])
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
