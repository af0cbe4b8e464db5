"""Tests of compactions in a thread: as an event, in snapshots, and for clients that join later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from handrail import Adapter, CapabilityPolicy, Compact, Prompt, ToolCall, ToolContext, tool
from handrail.messages import UserMessage
from handrail.serve import snapshots
from handrail.serve.sources import PromptSource
from handrail.serve.thread import Thread
from handrail.serve.threads import Threads
from support.parked_runs import answer_to
from support.served_threads import App, events, over, served, settle
from support.windows import Provider, in_turn, look

LOOK = ToolCall("look", {"words": 1_200})
COMPACTED = "handrail.compacted"


@tool(effect="pure", capabilities=["book"])
async def book(seat: int) -> str:
    """Book a seat."""
    return "booked"


class LongTalk(App):
    """An app whose model has a small window, and which asks before it books."""

    provider: Provider
    by: Any = "trim"
    extra: Any = ()

    def make(self) -> Threads:
        prompt: Prompt[None] = Prompt(
            "work",
            "Be brief.",
            tools=[look, book, *self.extra],
            policies=[CapabilityPolicy({"book": "ask"})],
            compact=Compact(by=self.by),
        )
        return Threads(
            PromptSource(prompt, Adapter(self.provider.model), app=self.app_name),
            self.journal,
            **self.options,
        )


@pytest.fixture
def long_talk(monkeypatch: pytest.MonkeyPatch) -> type[LongTalk]:
    monkeypatch.setattr("support.served_threads.App", LongTalk)
    return LongTalk


def shown(messages: Any) -> list[Any]:
    return [each for each in messages if each.get("activityType") == COMPACTED]


async def snapshot(app: App, thread: Thread) -> Any:
    found = await snapshots.thread_snapshot(app.journal, thread)
    return json.loads(json.dumps(found["messages"]))


@pytest.mark.parametrize("by", ["trim", "summary"])
async def test_a_compaction_is_shown_at_its_place(tmp_path: Path, long_talk: Any, by: str):
    """The activity is the same as an event, in a snapshot from memory, and in snapshots from the journal of unfinished and finished runs."""
    long_talk.by = by
    long_talk.provider = Provider(
        in_turn(*[LOOK] * 6, ToolCall("book", {"seat": 1}), *[LOOK] * 5, "done", summary="They looked.")
    )
    async with served(tmp_path) as app:
        thread = app.thread()
        await thread.say("Look around.")
        await settle(thread)
        live = await snapshot(app, thread)
        told = [each for each in events(thread.feed) if each.get("activityType") == COMPACTED]
        drawn = shown(live)
        assert [(each["messageId"], each["content"]) for each in told] == [
            (each["id"], each["content"]) for each in drawn
        ]
        assert drawn
        ids = {each["id"] for each in live} | {
            call["id"] for each in live for call in each.get("toolCalls", ())
        }
        for each in drawn:
            content = each["content"]
            assert content["by"] == by
            assert content["summary"] == ("They looked." if by == "summary" else "")
            assert content["left_out"]["messages"] + content["shortened"]["messages"] > 0
            assert {*content["left_out"]["ids"], *content["shortened"]["ids"]} <= ids
            assert content["before"]["cached"] > 0
            assert (content["spent"] is not None) is (by == "summary")
        place = live.index(drawn[0])
        assert live[place - 1]["role"] == "tool"
        assert (
            live[place + 1]["id"]
            == drawn[0]["id"].replace("/compacted", "").rpartition("/")[0]
            + f"/{int(drawn[0]['id'].split('/')[1]) + 1}"
        )

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
        assert len(shown(ended)) > len(drawn)
        assert shown(ended)[: len(drawn)] == drawn
        said = [each for each in await thread.messages() if isinstance(each, UserMessage)]
        assert [each.text for each in said] == ["Look around."]
        app.threads = app.make()
        thread = app.thread()
        assert await snapshot(app, thread) == ended
        joined, _, _ = await snapshots.joining_events(app.journal, thread)
        assert shown(joined[1].data["messages"]) == shown(ended)


async def test_what_was_left_out_before_is_not_listed_again(tmp_path: Path, long_talk: Any):
    """In several runs on one session, each compaction lists what the ones before it have not."""
    long_talk.provider = Provider(in_turn(*([LOOK] * 12 + ["done"]) * 8))
    async with served(tmp_path) as app:
        thread = app.thread()
        for number in range(8):
            await thread.say(f"Look {number}.")
            await over(thread)
        drawn = shown(await snapshot(app, thread))
        assert len(drawn) > 2
        for name in ("left_out", "shortened"):
            ids = [id for each in drawn for id in each["content"][name]["ids"]]
            assert ids
            assert len(ids) == len(set(ids))
        assert len({each["id"] for each in drawn}) == len(drawn)


async def test_a_nested_run_shows_its_compaction_inside_it(tmp_path: Path, long_talk: Any):
    nested: Prompt[None] = Prompt("inner", "Look around.", tools=[look])
    inner, outer = in_turn(*[LOOK] * 8, "looked"), in_turn(ToolCall("delegate", {}), "done")

    @tool(effect="staged")
    async def delegate(context: ToolContext) -> str:
        """Look around."""
        assert context.adapter
        return (await context.adapter.evaluate(nested, "Go.")).text

    long_talk.extra = [delegate]
    long_talk.provider = Provider(
        lambda request: (outer if "Be brief." in request.system else inner)(request)
    )
    async with served(tmp_path) as app:
        thread = app.thread()
        await thread.say("Go.")
        await over(thread)
        told = [each for each in events(thread.feed) if each.get("activityType") == COMPACTED]
        live = await snapshot(app, thread)
        assert told
        assert all(each["subagentRunId"] for each in told)
        assert [each["id"] for each in shown(live)] == [each["messageId"] for each in told]
        app.threads = app.make()
        again = await snapshot(app, app.thread())
        assert shown(again) == shown(live)
