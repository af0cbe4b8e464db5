"""Tests for snapshots of threads: from memory, from the journal alone, and while the thread changes."""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from handrail import Prompt, ScriptedModel, ToolContext, tool
from handrail.errors import UndoRefused
from handrail.messages import AssistantMessage, Price, Traits, UserMessage
from handrail.models.scripted import Reply
from handrail.runs import show
from handrail.serve import snapshots
from handrail.serve.refusals import ThreadUnknown
from handrail.serve.snapshots import file_changes
from handrail.serve.thread import Thread
from handrail.serve.threads import ThreadList
from support.damage import unapply
from support.examples import at_most
from support.parked_runs import answer_to
from support.served_threads import App, Held, SlowModel, give, over, plan, served, settle

UNTIMED = {"last_event_id"}


async def snapshot(app: App, thread: Thread) -> dict[str, Any]:
    """Return a thread's snapshot as plain JSON, without its position in the feed."""
    shown = await snapshots.thread_snapshot(app.journal, thread)
    return json.loads(json.dumps({key: value for key, value in shown.items() if key not in UNTIMED}))


def drop(app: App) -> None:
    """Discard everything that the server holds in memory about its threads."""
    app.threads = app.make()


def unstarted(shown: dict[str, Any]) -> dict[str, Any]:
    """Return a snapshot without what parking changes: the start times of calls and the status of runs."""
    calls = {id: {**facts, "began_at": None} for id, facts in shown["calls"].items()}
    return {**shown, "calls": calls, "runs": [{**run, "status": ""} for run in shown["runs"]]}


CALLS = st.sampled_from(
    [
        ["note", {"text": "a"}],
        ["note", {"text": "b"}],
        ["write", {"path": "a.txt", "text": "a"}],
        ["write", {"path": "b.txt", "text": "b"}],
        ["read", {"path": "missing.txt"}],
        ["choose", {}],
        ["nothing", {}],
        ["note", {"wrong": 1}],
    ]
)
TURNS = st.lists(st.one_of(st.just("text"), st.lists(CALLS, min_size=1, max_size=3)), max_size=3)
ENDS = st.sampled_from(["answer", "cancel", "undo"])


@settings(
    max_examples=at_most(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(runs=st.lists(st.tuples(TURNS, ENDS), min_size=1, max_size=4), leave_open=st.booleans())
def test_a_thread_that_was_dropped_is_the_same_when_it_is_made_again(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[Any, str]], leave_open: bool
) -> None:
    """A thread that was dropped from memory has the same snapshot when it is loaded again."""
    check_dropped(tmp_path_factory.mktemp("dropped"), runs, leave_open)


def test_a_result_beside_an_open_question_is_shown_before_and_after_parking(tmp_path: Path) -> None:
    """If one call of a turn has ended and another waits, parking changes only start times and the run's status in the snapshot."""
    check_dropped(tmp_path, [([[["note", {"text": "a"}], ["choose", {}]]], "answer")], True)


def check_dropped(folder: Path, runs: list[tuple[Any, str]], leave_open: bool) -> None:
    async def main() -> None:
        async with served(folder) as app:
            for number, (turns, end) in enumerate(runs):
                thread = app.thread()
                await thread.say(plan(*turns))
                await settle(thread)
                last = number == len(runs) - 1
                if end == "cancel" and not (last and leave_open):
                    await thread.cancel()
                while not (last and leave_open) and thread.live is not None:
                    waits = await thread.questions()
                    await thread.answer([answer_to(each, {"n": 1}, by="ada") for each in waits])
                    await settle(thread)
                if end == "undo" and thread.live is None:
                    units = await app.journal.calls.load_session(thread.session_id)
                    for unit in reversed(units):
                        if unit.tool == "note" and unit.status == "ok":
                            with_undo = await app.journal.calls.marks(thread.session_id)
                            if unit.call_id not in {entry.key for _, entry in with_undo}:
                                await thread.undo(unit.call_id)
                            break
            thread = app.thread()
            before = await snapshot(app, thread)
            if thread.live is not None:
                parking = thread.live.parking
                assert parking is not None
                assert parking.park()
                await over(thread)
                parked = await snapshot(app, thread)
                assert unstarted(parked) == unstarted(before)
                before = parked
            drop(app)
            assert await snapshot(app, app.thread()) == before

    asyncio.run(main())


async def test_a_thread_nobody_used_is_unknown(tmp_path: Path) -> None:
    async with served(tmp_path) as app:
        with pytest.raises(ThreadUnknown):
            await snapshots.thread_snapshot(app.journal, app.thread())
        with pytest.raises(ThreadUnknown):
            await snapshots.joining_events(app.journal, app.thread())


async def test_a_parked_thread_shows_what_was_said_and_what_waits(tmp_path: Path) -> None:
    async with served(tmp_path, park_after=0.0) as app:
        thread = app.thread()
        run_id = await thread.say(
            plan([["note", {"text": "a"}]], [["write", {"path": "a.txt", "text": "x"}], ["choose", {}]])
        )
        await over(thread)
        drop(app)
        shown = await snapshot(app, app.thread())
        assert [(each["id"], each["role"]) for each in shown["messages"]] == [
            (f"{run_id}/user", "user"),
            (f"{run_id}/1", "assistant"),
            (shown["messages"][1]["toolCalls"][0]["id"] + "/result", "tool"),
            (f"{run_id}/2", "assistant"),
            (shown["messages"][3]["toolCalls"][0]["id"] + "/result", "tool"),
        ]
        assert shown["status"] == "waiting"
        assert shown["state"] == {"Noted": [{"text": "a"}]}
        [question] = shown["questions"]
        wrote, asks = (call["id"] for call in shown["messages"][3]["toolCalls"])
        assert question["call_id"] == asks
        assert shown["calls"][wrote]["status"] == "ok"
        assert shown["calls"][wrote]["paths"] == ["a.txt"]
        assert "+x" in shown["calls"][wrote]["diff"]
        assert shown["calls"][asks]["status"] == "waiting"


async def test_what_is_seen_and_what_follows_make_one_whole(tmp_path: Path) -> None:
    """Whenever a snapshot is taken, it and the events after it add up to the final texts and calls."""
    async with served(tmp_path, model_type=SlowModel) as app:
        thread = app.thread()
        joined: list[dict[str, Any]] = []

        async def look() -> None:
            while thread.live is not None:
                joined.append(await snapshots.thread_snapshot(app.journal, thread))

        for number in range(5):
            await thread.say(
                plan(
                    [["note", {"text": "a"}], ["write", {"path": str(number), "text": "a"}]],
                    "some words to say, one after the other",
                )
            )
            await asyncio.gather(look(), look(), look())
        final = await snapshots.thread_snapshot(app.journal, thread)
        assert len(joined) > 20
        for each in joined:
            place = thread.feed.number_of(each["last_event_id"])
            assert place is not None
            texts, calls = whole(each, [msgspec.json.decode(item.data) for item in thread.feed.since(place)])
            assert texts == {m["id"]: m["content"] for m in final["messages"] if m["role"] == "assistant"}
            assert {id: facts["status"] for id, facts in calls.items()} == {
                id: facts["status"] for id, facts in final["calls"].items()
            }
            assert {id: facts.get("paths") or [] for id, facts in calls.items()} == {
                id: facts["paths"] for id, facts in final["calls"].items()
            }


def whole(shown: dict[str, Any], later: list[dict[str, Any]]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the texts and calls that a page shows if it applies the later events to the snapshot."""
    texts = {m["id"]: m["content"] for m in shown["messages"] if m["role"] == "assistant"}
    calls = dict(shown["calls"])
    for event in later:
        if event["type"] == "TEXT_MESSAGE_START":
            assert event["messageId"] not in texts or not texts[event["messageId"]], (
                "a message that was already in the snapshot started again"
            )
            texts[event["messageId"]] = ""
        elif event["type"] == "TEXT_MESSAGE_CONTENT":
            texts[event["messageId"]] += event["delta"]
        elif event["type"] == "TOOL_CALL_START":
            texts.setdefault(event["parentMessageId"], "")
        elif event.get("name") == "handrail.call":
            facts = event["value"]
            calls[facts["call_id"]] = {**calls.get(facts["call_id"], {}), **facts}
    return texts, calls


async def test_a_new_viewer_is_sent_what_is_open(tmp_path: Path) -> None:
    held = Held()
    async with served(tmp_path, tools=[held.tool]) as app:
        thread = app.thread()
        await thread.say(plan([["hold", {}]], [["choose", {}]], "ok"), leg="first")
        await held.has_begun.wait()
        told, number, leg = await snapshots.joining_events(app.journal, thread)
        kinds = [event.data["type"] for event in told]
        assert kinds[:3] == ["RUN_STARTED", "MESSAGES_SNAPSHOT", "STATE_SNAPSHOT"]
        assert (told[0].data["runId"], leg, number) == ("first", "first", thread.feed.last)
        assert [
            event.data["value"]["status"] for event in told if event.data.get("name") == "handrail.call"
        ] == ["running"]
        held.may_end.set()
        await settle(thread)
        for parked in (False, True):
            if parked:
                assert thread.live is not None
                assert thread.live.parking is not None
                assert thread.live.parking.park()
                await over(thread)
            told, number, leg = await snapshots.joining_events(app.journal, thread)
            [interrupt] = told[-1].data["outcome"]["interrupts"]
            [question] = await thread.questions()
            assert interrupt["toolCallId"] == question.call_id
            assert (leg, number) == ("", thread.feed.last)
        await give(thread, question, {"n": 1})
        await over(thread)
        told, _, _ = await snapshots.joining_events(app.journal, thread)
        assert told[-1].data["outcome"] == {"type": "success"}


async def test_what_a_client_said_elsewhere_survives(tmp_path: Path) -> None:
    """History that a client sends with its first message is kept across a second run, a restart and a resumption."""
    async with served(tmp_path, park_after=0.0) as app:
        history = [UserMessage("earlier"), AssistantMessage("indeed", ())]
        thread = app.thread()
        await thread.say(plan("one"), history=history)
        await over(thread)
        await thread.say(plan([["choose", {}]], "two"))
        await over(thread)
        before = await snapshot(app, thread)
        del thread
        await app.restart()
        thread = app.thread()
        assert await snapshot(app, thread) == before
        [question] = await thread.questions()
        await give(thread, question, {"n": 1})
        await over(thread)
        after = await snapshot(app, thread)
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert [m["content"] for m in after["messages"] if m["role"] != "tool"][:2] == ["earlier", "indeed"]
        assert len({m["id"] for m in after["messages"]}) == len(after["messages"])
        messages = await thread.run_messages(await thread.rows())
        trees = [snapshots.run_tree(await show(app.journal, run["id"]), messages) for run in after["runs"]]
        said = [[turn["said"] for turn in tree["turns"]] for tree in trees]
        assert said == [[[plan("one")]], [[plan([["choose", {}]], "two")], []]]


async def test_nested_agents_are_shown_with_what_they_cost(tmp_path: Path) -> None:
    inner: Prompt[None] = Prompt("helper", "Help.", tools=[])

    @tool(effect="staged")
    async def ask_helper(context: ToolContext) -> str:
        """Ask an expert."""
        assert context.adapter
        return (await context.adapter.evaluate(inner, message=plan("of course"))).text

    async with served(tmp_path, tools=[ask_helper]) as app:
        thread = app.thread()
        await thread.say(plan([["ask_helper", {}]], "ok"))
        await over(thread)
        shown = await snapshot(app, thread)
        [call_id] = shown["calls"]
        [agent] = shown["subagents"]
        assert (agent["name"], agent["parent_call_id"], agent["status"]) == ("helper", call_id, "ok")
        assert shown["calls"][call_id]["usage"]["requests"] == 1
        tree = snapshots.run_tree(await show(app.journal, shown["runs"][0]["id"]))
        [call] = tree["turns"][0]["calls"]
        assert call["usage"] == call["runs"][0]["usage"] == shown["calls"][call_id]["usage"]


async def test_a_cost_that_is_not_known_is_not_shown_as_nothing(tmp_path: Path) -> None:
    """If the model has no price, neither the thread nor its run has a cost."""
    async with served(tmp_path) as app:
        thread = app.thread()
        await thread.say(plan("hello"))
        await over(thread)
        shown = await snapshot(app, thread)
        assert (shown["cost"], shown["runs"][0]["cost"]) == (None, None)
        assert shown["usage"]["requests"] == 1


async def test_a_thread_costs_an_unknown_amount_if_one_of_its_runs_does(tmp_path: Path) -> None:
    """Neither the thread nor its line in the list shows only a part of its cost."""
    prices = iter([Price(Decimal(1), Decimal(1)), None, None])

    class Priced(ScriptedModel):
        def __init__(self, script: Any) -> None:
            super().__init__(script, traits=Traits(next(prices)))

    async with served(tmp_path, model_type=Priced) as app:
        for cost in ("0", None):
            thread = app.thread()
            await thread.say(plan("hello"))
            await over(thread)
            shown = await snapshot(app, thread)
            ((line,), _) = await ThreadList(app.threads).page("ada", limit=9)
            assert (shown["cost"], shown["runs"][-1]["cost"], line["cost"]) == (cost, cost, cost)
            await app.restart()


async def test_an_error_in_the_apps_model_is_not_said_to_be_the_servers(tmp_path: Path) -> None:
    """If the app's own model raises, the page is told the kind of the error. The message is in the log."""

    def broken(request: object) -> Any:
        raise KeyError("the inside")

    class Broken(ScriptedModel):
        def __init__(self, _: object) -> None:
            super().__init__(broken)

    async with served(tmp_path, model_type=Broken) as app:
        thread = app.thread()
        await thread.say(plan("hello"))
        await over(thread)
        assert thread.problem.startswith("The run ended with an error in the app's code: KeyError.")


async def test_a_thought_is_shown_after_a_restart(tmp_path: Path) -> None:
    """A model's thinking is recorded, and a snapshot from the journal alone shows it."""

    class Thinker(ScriptedModel):
        def __init__(self, _: object) -> None:
            super().__init__([Reply("So it is.", thinking="Let me think.")])

    async with served(tmp_path, model_type=Thinker) as app:
        thread = app.thread()
        await thread.say("think")
        await over(thread)
        live = (await snapshot(app, thread))["messages"]
        drop(app)
        assert (await snapshot(app, app.thread()))["messages"] == live
        assert [(each["role"], each["content"]) for each in live[1:]] == [
            ("reasoning", "Let me think."),
            ("assistant", "So it is."),
        ]


async def test_only_what_can_be_undone_is_undoable(tmp_path: Path) -> None:
    """A file that a later call has read, that somebody has changed or whose folder is gone is not undoable, and the problem says why."""
    async with served(tmp_path) as app:
        thread = app.thread()
        names = ("read.txt", "changed.txt", "free.txt")
        writes = [["write", {"path": name, "text": "x"}] for name in names]
        await thread.say(plan(*([each] for each in writes), [["read", {"path": "read.txt"}]], "ok"))
        await over(thread)
        (tmp_path / "files" / "changed.txt").write_text("mine")
        changes = await file_changes(app.journal, thread)
        assert [each["undoable"] for each in changes] == [False, False, True]
        assert "later call" in changes[0]["problem"]
        assert "changed since" in changes[1]["problem"]
        assert changes[2]["problem"] is None
        for each in changes[:2]:
            with pytest.raises(UndoRefused):
                await thread.undo(each["call_id"])
        await thread.undo(changes[2]["call_id"])
        (tmp_path / "files").rename(tmp_path / "moved")
        changes = await file_changes(app.journal, thread)
        assert not any(each["undoable"] for each in changes)
        assert not [each for each in changes if str(tmp_path) in str(each["problem"])]


async def test_files_and_undo_are_shown(tmp_path: Path) -> None:
    async with served(tmp_path) as app:
        thread = app.thread()
        await thread.say(plan([["write", {"path": "a.txt", "text": "x"}], ["note", {"text": "n"}]], "ok"))
        await over(thread)
        [change] = await file_changes(app.journal, thread)
        assert (change["paths"], change["undone"], change["undoable"]) == (["a.txt"], False, True)
        # this caches a summary of the run, which must not hide that the call is undone afterwards
        await snapshots.thread_snapshot(app.journal, thread)
        await thread.undo(change["call_id"])
        [change] = await file_changes(app.journal, thread)
        assert (change["undone"], change["undoable"]) == (True, False)
        shown = await snapshots.thread_snapshot(app.journal, thread)
        assert shown["calls"][change["call_id"]]["undone"] is True


async def test_changes_that_are_not_applied_are_shown(tmp_path: Path) -> None:
    """A recorded change whose folder is gone is shown as unapplied, without the folder's path, and can't be undone."""
    async with served(tmp_path) as app:
        thread = app.thread()
        await thread.say(plan([["write", {"path": "a.txt", "text": "x"}]], "ok"))
        await over(thread)
        [change] = await file_changes(app.journal, thread)
        shown = await snapshots.thread_snapshot(app.journal, thread)
        assert (change["unapplied"], shown["calls"][change["call_id"]]["unapplied"]) == (False, False)
        unapply(tmp_path / "runs.db")
        app.folder.rename(tmp_path / "away")
        [change] = await file_changes(app.journal, thread)
        assert (change["unapplied"], change["undoable"]) == (True, False)
        shown = await snapshots.thread_snapshot(app.journal, thread)
        assert shown["calls"][change["call_id"]]["unapplied"] is True
        assert str(tmp_path) not in json.dumps([change, shown])


async def test_a_thread_of_many_runs_stays_usable(tmp_path: Path) -> None:
    """The summaries of finished runs are cached, so a second snapshot does not read those runs again."""
    async with served(tmp_path) as app:
        thread = app.thread()
        for number in range(20):
            await thread.say(plan([["note", {"text": str(number)}]], "ok"))
            await over(thread)
        first = await snapshot(app, thread)
        read: list[str] = []
        load = app.journal.calls.load
        app.journal.calls.load = lambda run_id: (read.append(run_id), load(run_id))[1]  # pyright: ignore
        assert await snapshot(app, thread) == first
        assert read == []
        assert len(first["runs"]) == 20


async def test_an_agent_two_levels_down_stands_under_its_own_call(tmp_path: Path) -> None:
    """Each nested agent is shown under its own call, both while the run is in memory and in a snapshot from the journal alone."""

    @tool(effect="read")
    async def ask_reader(context: ToolContext) -> str:
        """Ask a reader, then the person."""
        await context.adapter.evaluate(Prompt("reader", "Read."), plan("text"))
        return str(await context.wait_for("n", {}, int)) if context.wait_for else ""

    inner = Prompt("helper", "Help.", tools=[ask_reader])

    @tool(effect="read")
    async def ask_helper(context: ToolContext) -> str:
        """Ask a helper."""
        return (await context.adapter.evaluate(inner, plan([["ask_reader", {}]]))).text

    async with served(tmp_path, tools=[ask_helper]) as app:
        thread = app.thread()
        await thread.say(plan([["ask_helper", {}]]))
        await settle(thread)
        for _ in range(2):
            shown = await snapshot(app, app.thread())
            names = {
                call["id"]: call["function"]["name"]
                for message in shown["messages"]
                for call in message.get("toolCalls", ())
            }
            agents = [
                (each["name"], names[each["parent_call_id"]], each["status"]) for each in shown["subagents"]
            ]
            assert agents == [("helper", "ask_helper", "running"), ("reader", "ask_reader", "ok")]
            await app.threads.stop(0)
            drop(app)
