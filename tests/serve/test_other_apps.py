"""Tests for a journal that several apps share: each server lists and continues only its own app's threads."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from handrail import Adapter, Prompt, ScriptedModel
from handrail.errors import AnswerRefused
from handrail.guard import CapabilityPolicy
from handrail.journal.records import RunCopy, RunRecord, RunRow
from handrail.journal.sqlite import MemoryJournal
from handrail.runs import list_runs
from handrail.serve.refusals import ThreadElsewhere
from handrail.serve.snapshots import thread_snapshot
from handrail.serve.sources import PromptSource, app_name, serves
from handrail.serve.threads import ThreadList, Threads
from support.served_threads import begin, give, over, plan, served, settle
from support.serving import pay, play, serving, source

CLERK, DESK = "support.rig:PROMPT", "support.recorded:PROMPT"


def app(name: str) -> PromptSource:
    prompt = Prompt("help", "Help.", tools=[pay], policies=[CapabilityPolicy()])
    return PromptSource(prompt, Adapter(ScriptedModel(play)), app=name)


def record(app: str = "", prompt: str = "help", number: int = 0) -> RunRecord:
    return RunRecord(
        id=f"run{number}",
        session_id=f"local/t{number}",
        principal="local",
        prompt=prompt,
        model="m",
        began_at=1.0,
        begin=begin("hello"),
        app=app,
    )


async def test_another_apps_thread_is_neither_listed_nor_continued(tmp_path: Path) -> None:
    """Every request to another app's thread is refused, and the thread's parked run can then go on in its own app."""
    async with serving(tmp_path, app(CLERK)) as client:
        run_id = await client.say("t", 'call pay {"amount": 3}')
        question = await client.asked("t")
    allowed = {"question_id": question["id"], "digest": question["digest"], "value": {"approved": True}}
    async with serving(tmp_path, app(DESK)) as client:
        assert (await client.ask("GET", "/threads")).json == {"threads": [], "next": None}
        await client.say("own", "hello")
        await client.idle("own")
        assert [each["id"] for each in (await client.ask("GET", "/threads")).json["threads"]] == ["own"]
        paths = {"{id}": "t", "{run_id}": run_id, "{call_id:path}": "c", "{digest}": "0" * 64}
        bodies: dict[str, Any] = {"messages": {"text": "hello"}, "answers": allowed}
        for method, path, _, _, _ in client.app.routes.guarded():
            if "{id}" in path:
                for name, value in {**paths, "{approval_id:path}": "a"}.items():
                    path = path.replace(name, value)
                body = bodies.get(path.rpartition("/")[2], {}) if method != "GET" else None
                said = await client.ask(method, path, body)
                assert (said.status, said.kind) == (404, "ThreadElsewhere"), path
                told = f"it belongs to {CLERK}. Serve it with `handrail serve {CLERK}`"
                assert told in said.json["error"]["message"]
        spoken = {
            "threadId": "t",
            "runId": "r",
            "messages": [{"id": "m", "role": "user", "content": "hello"}],
            "tools": [],
            "context": [],
            "state": {},
            "forwardedProps": {},
        }
        assert (await client.ask("POST", "/agent", spoken)).kind == "ThreadElsewhere"
        [line] = [each for each in await list_runs(client.app.threads.journal) if each.id == run_id]
        assert (line.standing, line.row.questions) == ("parked", 1)
    async with serving(tmp_path, app(CLERK)) as client:
        assert [each["id"] for each in (await client.ask("GET", "/threads")).json["threads"]] == ["t"]
        assert (await client.ask("POST", "/threads/t/answers", allowed)).status == 200
        assert (await client.idle("t"))["messages"][-1]["content"] == "Done: paid 3"


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_other_apps_threads_take_no_room_on_a_page(limit: int) -> None:
    journal = MemoryJournal()
    for number in range(10):
        row = RunRow(record=record("" if number % 4 == 0 else CLERK, "desk", number), status="done")
        await journal.runs.add(RunCopy(row=row))
    listed = ThreadList(Threads(source(), journal))
    found: list[str] = []
    before = None
    while True:
        page, before = await listed.page("local", limit=limit, before=before)
        assert len(page) == limit or before is None
        found += [each["id"] for each in page]
        if before is None:
            break
    assert sorted(found) == ["t0", "t4", "t8"]


def test_which_runs_belong_to_an_app(tmp_path: Path) -> None:
    here, there = tmp_path / "clerk.md", tmp_path / "team" / "clerk.md"
    there.parent.mkdir()
    assert serves(app(DESK), record(DESK, "an older name"))
    assert not serves(app(DESK), record(CLERK))
    assert not serves(app(DESK), record())
    assert serves(app(""), record())
    assert not serves(app(""), record(prompt="other"))
    assert serves(app(str(there)), record(str(here))), "the worker's file has moved"
    assert not serves(app(str(there)), record(str(here), "other"))
    here.touch()
    assert not serves(app(str(there)), record(str(here))), "there are two workers"


def test_an_app_is_named_as_people_serve_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert app_name(record(CLERK)) == CLERK
    assert app_name(record(str(tmp_path / "team" / "clerk.md"))) == "team/clerk.md"
    assert app_name(record(str(tmp_path.parent / "clerk.md"))) == "clerk.md"
    assert "belongs to the prompt 'help'. Serve that prompt." in str(
        ThreadElsewhere("t", app_name(record()), "help")
    )
    assert "`handrail serve 'the team/a.md'`." in str(ThreadElsewhere("t", "the team/a.md", ""))
    assert "`handrail serve a.md` in the folder of that file." in str(ThreadElsewhere("t", "a.md", ""))


async def test_an_answer_that_the_served_prompt_cant_use_is_refused(tmp_path: Path) -> None:
    """A renamed prompt can't resume its old runs, so an answer to one of them is refused, and the question stays open."""
    async with served(tmp_path, app_name=DESK) as app:
        await app.thread().say(plan([["choose", {}]], "ok"))
        await settle(app.thread())
        app.prompt_name = "renamed"
        await app.restart()
        thread = await app.threads.open("ada", "t")
        [question] = await thread.questions()
        with pytest.raises(AnswerRefused, match=r"the prompt 'work'.*Serve that prompt, or cancel the run"):
            await give(thread, question, {"n": 1})
        assert [each.id for each in await thread.questions()] == [question.id]
        app.prompt_name = "work"
        await app.restart()
        await give(app.thread(), question, {"n": 1})
        await over(app.thread())


async def test_a_run_that_cant_be_resumed_says_why_on_the_page_and_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path) as app:
        await app.thread().say(plan([["choose", {}]], "ok"))
        await settle(app.thread())
        await app.restart()
        [question] = await app.thread().questions()
        resume = app.threads.source.resume
        monkeypatch.setattr(
            app.threads.source, "resume", lambda run_id, **options: resume("missing", **options)
        )
        with caplog.at_level(logging.WARNING, "handrail.serve"), pytest.raises(LookupError):
            await give(app.thread(), question, {"n": 1})
        seen = await thread_snapshot(app.journal, app.thread())
        assert seen["status"] == "failed"
        assert "missing" in seen["problem"]
        assert seen["problem"] in caplog.text
