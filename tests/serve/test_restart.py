"""Tests for restarts on the same journal: after a stop, after a kill, and with answers from other programs."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from handrail import Deadline, SqliteJournal, ToolContext, tool
from handrail.clock import SystemClock
from handrail.errors import AnswerRefused, JournalError
from handrail.resources.directory import DirectoryFilesystem
from handrail.runs import cancel, show
from handrail.serve import snapshots
from handrail.serve.agui.interrupts import frontend_tool
from handrail.serve.refusals import ServerStopping
from support import importing_support, warm_python
from support.parked_runs import answer_to
from support.programs import handrail
from support.recorded import Pick
from support.served_threads import (
    App,
    Held,
    events,
    give,
    kinds,
    over,
    plan,
    served,
    settle,
    texts,
)

WRITE = ["write", {"path": "a.txt", "text": "a"}]


def answered_elsewhere(app: App, question: Any, value: Any) -> None:
    """Answer a question as another program would."""
    journal = SqliteJournal(app.base / "runs.db")
    journal.questions.answer(answer_to(question, value))
    journal.close()


# --- after the server was stopped ---------------------------------------------------------------------


async def test_a_run_at_rest_is_parked_and_its_question_stands(tmp_path: Path) -> None:
    async with served(tmp_path) as app:
        run_id = await app.thread().say(plan([WRITE], [["choose", {}]], "ok"))
        await settle(app.thread())
        await app.restart(grace=30)  # the waiting run is parked at once
        assert (await app.journal.runs.get(run_id)).status == "parked"
        assert (app.threads.running(), app.threads.parked) == ([], 1)
        thread = app.thread()
        [question] = await thread.questions()
        await give(thread, question, {"n": 4})
        await over(thread)
        assert texts(await thread.messages())[1:] == [
            "write()",
            "write: wrote a.txt",
            "choose()",
            "choose: got 4",
            "ok",
        ]
        assert kinds(thread.feed) == ["started", "success"]
        told = [each for each in events(thread.feed) if each["type"] == "TEXT_MESSAGE_START"]
        assert [each["messageId"] for each in told] == [f"{run_id}/3"], (
            "the message's id differs from the one in the conversation"
        )
        assert [unit.tool for unit in await app.journal.calls.load(run_id)] == ["write", "choose"]


async def test_an_active_run_is_interrupted_after_the_grace_period_and_resumes_by_itself(
    tmp_path: Path,
) -> None:
    held = Held()
    async with served(tmp_path, tools=[held.tool]) as app:
        thread = app.thread()
        run_id = await thread.say(plan([WRITE], [["hold", {}]], "ok"))
        await held.has_begun.wait()
        held.may_end.clear()
        await app.threads.stop(0.05)
        assert kinds(thread.feed) == ["started", "error ServerStopping"]
        with pytest.raises(ServerStopping, match="Try again"):
            await thread.say(plan("more"))
        held.may_end.set()
        await app.restart()
        await over(app.thread())
        assert (held.began, held.cut, held.ended) == (2, 1, 1)
        assert (await app.journal.runs.get(run_id)).status == "done"
        assert texts(await app.thread().messages())[-1] == "ok"
        assert [unit.tool for unit in await app.journal.calls.load(run_id)] == ["write", "hold"]


async def test_a_run_that_rests_within_the_grace_period_is_parked_then(tmp_path: Path) -> None:
    held = Held()
    async with served(tmp_path, tools=[held.tool]) as app:
        thread = app.thread()
        run_id = await thread.say(plan([["hold", {}]], [["choose", {}]], "ok"))
        await held.has_begun.wait()
        stopping = asyncio.ensure_future(app.threads.stop(300))
        await asyncio.sleep(0)
        held.may_end.set()
        await stopping
        assert (held.ended, held.cut) == (1, 0)
        assert (await app.journal.runs.get(run_id)).status == "parked"
        assert kinds(thread.feed) == ["started", "interrupt"]


async def test_a_run_interrupted_with_an_open_question_resumes_and_keeps_it(tmp_path: Path) -> None:
    held = Held()
    async with served(tmp_path, tools=[held.tool]) as app:
        await app.thread().say(plan([["choose", {}], ["hold", {}]], "ok"))
        await held.has_begun.wait()
        while not (await app.thread().questions()):
            await asyncio.sleep(0)
        [before] = await app.thread().questions()
        await app.threads.stop(0.01)
        held.may_end.set()
        await app.restart()
        thread = app.thread()
        await settle(thread)
        [question] = await thread.questions()
        assert (question.id, question.digest) == (before.id, before.digest)
        assert (held.began, held.ended) == (2, 1)
        await give(thread, before, {"n": 9})
        await over(thread)
        assert texts(await thread.messages())[2:] == ["choose: got 9", "hold: held", "ok"]


async def test_what_an_irreversible_call_asked_closes_as_unknown(tmp_path: Path) -> None:
    """An irreversible call that has started is not parked. After a restart, its outcome is reported as unknown."""

    @tool
    async def pay(context: ToolContext) -> str:
        """Pay, after asking how much."""
        assert context.wait_for
        return f"paid {(await context.wait_for('amount', {}, Pick)).n}"

    async with served(tmp_path, tools=[pay], park_after=0.0) as app:
        thread = app.thread()
        await thread.say(plan([["pay", {}]], "I will ask"))
        await settle(thread)
        [approval] = await thread.questions()
        await over(thread)  # a call that waits for approval can be parked
        await give(thread, approval, {"approved": True})
        await settle(thread)
        [amount] = await thread.questions()
        for _ in range(20):
            await asyncio.sleep(0)
        assert thread.live is not None, "an irreversible call was parked after it had started"
        await app.restart(grace=30)
        thread = app.thread()
        await over(thread)
        said = texts(await thread.messages())
        assert "not known" in said[2]
        assert said[-1] == "I will ask"
        assert amount.id not in [each.id for each in await thread.questions()]


async def test_runs_of_other_apps_are_left_alone(tmp_path: Path) -> None:
    """Runs of another prompt, and runs of another app with the same prompt, are not resumed."""
    held = Held()
    async with served(tmp_path, tools=[held.tool], app_name="support.recorded:PROMPT") as app:
        run_id = await app.thread().say(plan([["hold", {}]], "ok"))
        await held.has_begun.wait()
        await app.threads.stop(0.01)
        held.may_end.set()
        for prompt_name, app_name in (("other", "support.recorded:PROMPT"), ("work", "support.rig:PROMPT")):
            app.prompt_name, app.app_name = prompt_name, app_name
            await app.restart()
            assert list(app.threads.running()) == []
            assert (await app.journal.runs.get(run_id)).status == "running"
        app.prompt_name, app.app_name = "work", "support.recorded:PROMPT"
        await app.restart()
        await over(app.thread())
        assert (await app.journal.runs.get(run_id)).status == "done"


async def test_another_apps_question_stays_open_for_that_app(tmp_path: Path) -> None:
    async with served(tmp_path, app_name="support.recorded:PROMPT") as app:
        run_id = await app.thread().say(plan([["choose", {}]], "ok"))
        await settle(app.thread())
        app.app_name = "support.rig:PROMPT"
        await app.restart()
        assert app.threads.parked == 0
        [question] = await app.thread().questions()
        with pytest.raises(AnswerRefused):
            await give(app.thread(), question, {"n": 1})
        assert (await app.journal.runs.get(run_id)).status == "parked"
        app.app_name = "support.recorded:PROMPT"
        await app.restart()
        await give(app.thread(), question, {"n": 1})
        await over(app.thread())
        assert texts(await app.thread().messages())[2:] == ["choose: got 1", "ok"]


async def test_files_are_finished_before_runs_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    async with served(tmp_path, tools=[held.tool]) as app:
        await app.thread().say(plan([["hold", {}]]))
        await held.has_begun.wait()
        await app.threads.stop(0.01)
        held.may_end.set()
        order: list[str] = []

        async def recorded(files: Any, journal: Any) -> Any:
            order.append(f"files, with {held.began} begun and {len(app.threads.running())} running")
            return await recover(files, journal)

        recover = DirectoryFilesystem.recover
        monkeypatch.setattr(DirectoryFilesystem, "recover", recorded)
        await app.restart()
        await over(app.thread())
        assert order[0] == "files, with 1 begun and 0 running"


async def test_a_run_that_can_not_go_on_is_named_and_can_be_cancelled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If a run can't be resumed, the server logs this and starts anyway, and the run can be cancelled."""
    held = Held()
    async with served(tmp_path, tools=[held.tool]) as app:
        run_id = await app.thread().say(plan([["hold", {}]], "ok"))
        await held.has_begun.wait()
        await app.threads.stop(0.01)

        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("this app is broken")

        make = app.make

        def make_broken() -> Any:
            threads = make()
            threads.source.resume = broken  # pyright: ignore[reportAttributeAccessIssue]
            return threads

        app.make = make_broken  # pyright: ignore[reportAttributeAccessIssue]
        await app.restart()
        assert "could not resume the run of thread" in caplog.text
        assert app.thread().live is None
        await app.thread().cancel()
        assert (await app.journal.runs.get(run_id)).status == "cancelled"


async def test_a_clients_own_tools_are_made_again_from_the_record(tmp_path: Path) -> None:
    """A resumed run has the client's own tools with the schema that the model saw, even if no client is connected."""
    schema = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}
    async with served(tmp_path) as app:
        await app.thread().say(
            plan([["paint", {"colour": 1}]], [["paint", {"colour": "red"}]], "ok"),
            tools=[frontend_tool("paint", "Paint it.", schema)],
        )
        await settle(app.thread())
        await app.restart()
        thread = app.thread()
        [question] = await thread.questions()
        assert (question.name, question.payload["arguments"]) == ("frontend_tool", {"colour": "red"})
        await give(thread, question, {"content": "painted"})
        await over(thread)
        said = texts(await thread.messages())
        assert "colour" in said[2], "a call that does not fit the client's schema was not refused"
        assert said[4:] == ["paint: painted", "ok"]


# --- answered by another program -----------------------------------------------------------------------


async def test_an_answer_from_elsewhere_wakes_a_run_in_memory(tmp_path: Path) -> None:
    async with served(tmp_path) as app:
        thread = app.thread()
        await thread.say(plan([["choose", {}]], "ok"))
        await settle(thread)
        [question] = await thread.questions()
        answered_elsewhere(app, question, {"n": 8})
        await over(thread)
        assert texts(await thread.messages())[2:] == ["choose: got 8", "ok"]
        assert kinds(thread.feed) == ["started", "interrupt", "started", "success"]


async def test_an_answer_from_elsewhere_in_the_moment_of_parking(tmp_path: Path) -> None:
    """An answer that another program records just before the run is parked is found, and the run is resumed."""
    async with served(tmp_path) as app:
        thread = app.thread()
        await thread.say(plan([["choose", {}]], "ok"))
        await settle(thread)
        [question] = await thread.questions()
        answered_elsewhere(app, question, {"n": 8})
        assert thread.live is not None
        parking = thread.live.parking
        assert parking is not None
        assert parking.park()
        await over(thread)
        while (await thread.newest()).status != "done":  # pyright: ignore[reportOptionalMemberAccess]
            await asyncio.sleep(0.001)
        assert texts(await thread.messages())[2:] == ["choose: got 8", "ok"]


async def test_an_answer_from_elsewhere_brings_a_parked_run_back(tmp_path: Path) -> None:
    """The server's next poll finds an answer that the command line recorded, and resumes the parked run."""
    async with served(tmp_path, park_after=0.0) as app:
        thread = app.thread()
        run_id = await thread.say(plan([["choose", {}], ["choose", {}]], "ok"))
        await over(thread)
        assert app.threads.parked == 1
        await app.threads.poll()
        assert thread.live is None, "the run was resumed without an answer"
        first, second = await thread.questions()
        answering = ["runs", "answer", run_id, first.id, "--value", '{"n": 8}', "--digest", first.digest]
        done = handrail(*answering, "--journal", str(tmp_path / "runs.db"), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        await app.threads.poll()
        await over(thread)
        assert [each.id for each in await thread.questions()] == [second.id]
        answered_elsewhere(app, second, {"n": 9})
        await app.threads.poll()
        await over(thread)
        assert texts(await thread.messages())[2:] == ["choose: got 8", "choose: got 9", "ok"]


async def test_the_server_looks_by_itself(tmp_path: Path) -> None:
    async with served(tmp_path, park_after=0.0, poll_seconds=0.01) as app:
        thread = app.thread()
        await thread.say(plan([["choose", {}]], "ok"))
        await over(thread)
        [question] = await thread.questions()
        answered_elsewhere(app, question, {"n": 8})
        while (await thread.newest()).status != "done":  # pyright: ignore[reportOptionalMemberAccess]
            await asyncio.sleep(0.005)
        assert texts(await thread.messages())[2:] == ["choose: got 8", "ok"]


async def test_a_look_that_finds_no_database_is_quiet_and_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The journal warns of a lost database once. What looks into it again and again adds nothing to that."""
    async with served(tmp_path, park_after=0.0, poll_seconds=0.01) as app:
        thread = app.thread()
        await thread.say(plan([["choose", {}]], "ok"))
        await over(thread)
        [question] = await thread.questions()
        failed = asyncio.Event()

        async def lost() -> None:
            failed.set()
            raise JournalError("runs", "it can't be used for now", "Will retry.", is_lost=True)

        with monkeypatch.context() as patch, caplog.at_level(logging.DEBUG, "handrail"):
            patch.setattr(app.threads, "poll", lost)
            await failed.wait()
            await asyncio.sleep(0)
        levels = {each.levelname for each in caplog.records if "could not check" in each.message}
        assert levels == {"DEBUG"}
        answered_elsewhere(app, question, {"n": 8})
        while (await thread.newest()).status != "done":  # pyright: ignore[reportOptionalMemberAccess]
            await asyncio.sleep(0.005)


async def test_a_run_that_finds_no_database_is_resumed_with_a_later_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose answer was seen just before the database was lost is not forgotten."""
    async with served(tmp_path, park_after=0.0) as app:
        thread = app.thread()
        await thread.say(plan([["choose", {}]], "ok"))
        await over(thread)
        [question] = await thread.questions()
        answered_elsewhere(app, question, {"n": 8})

        async def lost() -> None:
            raise JournalError("runs", "it can't be used for now", "Will retry.", is_lost=True)

        with monkeypatch.context() as patch:
            patch.setattr(thread, "newest", lost)
            await app.threads.poll()
        assert (await thread.newest()).status == "parked"  # pyright: ignore[reportOptionalMemberAccess]
        await app.threads.poll()
        await over(thread)
        assert texts(await thread.messages())[2:] == ["choose: got 8", "ok"]


async def test_an_answer_from_elsewhere_is_noticed_without_a_poll(tmp_path: Path) -> None:
    """A change of the journal wakes the server, which would poll only after an hour."""
    async with served(tmp_path, park_after=0.0, poll_seconds=3600.0) as app:
        thread = app.thread()
        await thread.say(plan([["choose", {}], ["choose", {}]], "ok"))
        await over(thread)
        for number, question in enumerate(await thread.questions()):
            answered_elsewhere(app, question, {"n": number})
        while (await thread.newest()).status != "done":  # pyright: ignore[reportOptionalMemberAccess]
            await asyncio.sleep(0.005)
        assert texts(await thread.messages())[2:] == ["choose: got 0", "choose: got 1", "ok"]


async def test_a_cancellation_from_elsewhere_is_noticed_before_the_lease_is_renewed(tmp_path: Path) -> None:
    held = Held()
    async with served(tmp_path, tools=[held.tool], poll_seconds=3600.0) as app:
        app.journal.lease = 36_000.0
        thread = app.thread()
        run_id = await thread.say(plan([["hold", {}]], "ok"))
        await held.has_begun.wait()
        elsewhere = app.open()
        await cancel(elsewhere, run_id)
        elsewhere.close()
        await over(thread)
        assert (await app.journal.runs.get(run_id)).status == "cancelled"


async def test_one_of_two_answered_while_the_server_was_down(tmp_path: Path) -> None:
    async with served(tmp_path) as app:
        await app.thread().say(plan([["choose", {}], ["choose", {}]], "ok"))
        await settle(app.thread())
        first, second = await app.thread().questions()
        await app.threads.stop(0.05)
        answered_elsewhere(app, first, {"n": 1})
        await app.restart()
        thread = app.thread()
        await settle(thread)
        row = await thread.newest()
        assert row is not None
        assert [unit.tool for unit in await app.journal.calls.load(row.record.id)] == ["choose"]
        await give(thread, second, {"n": 2})
        await over(thread)
        assert texts(await thread.messages())[2:] == ["choose: got 1", "choose: got 2", "ok"]


class Later(SystemClock):
    """A clock that a test can set forward."""

    by = timedelta()

    def now(self) -> datetime:
        return datetime.now(UTC) + self.by


@tool(effect="staged")
async def hurry(context: ToolContext) -> str:
    """Ask, with a timeout."""
    assert context.wait_for
    return f"got {(await context.wait_for('pick', {}, Pick, timeout=3600)).n}"


@tool(effect="staged")
async def hurry_twice(context: ToolContext) -> str:
    """Ask twice at once, one of the two with a timeout."""
    assert context.wait_for
    brief = context.wait_for("brief", {}, Pick, timeout=3600)
    found = await asyncio.gather(brief, context.wait_for("long", {}, Pick), return_exceptions=True)
    return f"{type(found[0]).__name__} {getattr(found[1], 'n', None)}"


@pytest.mark.parametrize("look", ["poll", "start", "a late answer", "a reader"])
@pytest.mark.parametrize(
    ("call", "told"),
    [("hurry", "hurry failed: question 'pick': nobody answered in time"), ("send", "(timed out)")],
)
async def test_a_question_that_expires_while_its_run_is_parked(
    tmp_path: Path, call: str, told: str, look: str
) -> None:
    """The run goes on by itself once the time is over, whoever notices that first."""
    clock = Later()
    options = {"approval_seconds": 3600.0}
    async with served(tmp_path, tools=[hurry], park_after=0.0, clock=clock, adapter_options=options) as app:
        thread = app.thread()
        run_id = await thread.say(plan([[call, {"text": "x"} if call == "send" else {}]], "too late"))
        await over(thread)
        await app.threads.poll()
        assert thread.live is None
        [question] = await thread.questions()
        clock.by = timedelta(hours=2)
        if look == "start":
            await app.restart()
            thread = app.thread()
        elif look == "a late answer":
            with pytest.raises(AnswerRefused, match="the question has expired"):
                await give(thread, question, {"n": 4} if call == "hurry" else {"approved": True})
        elif look == "a reader":
            assert (await show(app.journal, run_id)).calls[0].status == "open"
        await app.threads.poll()
        await over(thread)
        assert list(await thread.questions()) == []
        said = texts(await thread.messages())
        assert told in said[-2]
        assert said[-1] == "too late"
        assert (await app.journal.runs.get(run_id)).legs == 2


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_deadline_that_passes_while_its_run_is_parked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """The run ends by itself, although nobody has answered its question, which never expires."""
    clock = Later()
    async with served(tmp_path, park_after=0.0, clock=clock, adapter_options={"clock": clock}) as app:
        begin = app.threads.source.begin
        limited = partial(begin, deadline=Deadline.after(3600, clock=clock))
        monkeypatch.setattr(app.threads.source, "begin", limited)
        run_id = await app.thread().say(plan([["choose", {}]], "ok"))
        await over(app.thread())
        await app.threads.poll()
        assert (await app.journal.runs.get(run_id)).status == "parked"
        clock.by = timedelta(hours=2)
        if restarted:
            await app.restart()
        await app.threads.poll()
        await over(app.thread())
        assert (await app.journal.runs.get(run_id)).status == "failed"
        assert list(await app.thread().questions()) == []


@pytest.mark.parametrize("restarted", [False, True])
async def test_one_of_two_questions_expires_while_its_run_is_parked(tmp_path: Path, restarted: bool) -> None:
    """The handler learns of the one that ended. The other one stays open, and the run is not resumed again and again."""
    clock = Later()
    async with served(tmp_path, tools=[hurry_twice], park_after=0.0, clock=clock) as app:
        run_id = await app.thread().say(plan([["hurry_twice", {}]], "ok"))
        await over(app.thread())
        clock.by = timedelta(hours=2)
        if restarted:
            await app.restart()
        await app.threads.poll()
        await over(app.thread())
        legs = (await app.journal.runs.get(run_id)).legs
        for _ in range(3):
            await app.threads.poll()
            await over(app.thread())
        assert (await app.journal.runs.get(run_id)).legs == legs == 2
        [left] = await app.thread().questions()
        await give(app.thread(), left, {"n": 3})
        await over(app.thread())
        assert texts(await app.thread().messages())[-2] == "hurry_twice: QuestionTimedOut 3"


# --- how long calls waited ----------------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_run_says_how_long_it_waited_for_whom(tmp_path: Path, restarted: bool) -> None:
    """A call that waited for an answer is shown as one call, from before the question until after the answer.

    The run's tree shows the time of the answer, even if the server was restarted in between.
    """
    async with served(tmp_path) as app:
        run_id = await app.thread().say(plan([["choose", {}]], "ok"))
        await settle(app.thread())
        [question] = await app.thread().questions()
        [waiting] = (await show(app.journal, run_id)).calls
        assert waiting.at == question.asked_at.timestamp()
        [asked] = waiting.questions
        assert asked.answered_at is None
        if restarted:
            await app.restart()
        before = time.time()
        await give(app.thread(), question, {"n": 4})
        after = time.time()
        await over(app.thread())
        tree = await show(app.journal, run_id)
        [call] = tree.calls
        [asked] = call.questions
        assert asked.answered_at is not None
        assert before <= asked.answered_at <= after
        assert call.at is not None
        assert call.seconds is not None
        assert call.at <= question.asked_at.timestamp() < asked.answered_at
        assert call.at + call.seconds > asked.answered_at - 0.02  # `seconds` is from another clock
        [shown] = snapshots.run_tree(tree)["turns"][0]["calls"][0]["questions"]
        assert datetime.fromisoformat(shown["answered_at"]).timestamp() == pytest.approx(asked.answered_at)


# --- after the server was killed ------------------------------------------------------------------------


def killed(folder: Path, said: str) -> str:
    """Run a server in its own process until it prints that its run works or waits, then kill it. Return the printed line."""
    process = warm_python.start(
        [Path(__file__).with_name("serve_app.py"), folder, said], env=importing_support()
    )
    assert process.stdout is not None
    try:
        return process.stdout.readline().strip()
    finally:
        process.close()


@pytest.mark.once
async def test_killed_while_a_question_is_open(tmp_path: Path) -> None:
    assert await asyncio.to_thread(killed, tmp_path, plan([WRITE], [["choose", {}]], "ok")) == "asked"
    async with served(tmp_path, tools=[Held().tool]) as app:
        thread = app.thread()
        # the killed process did not park the run, so the new one resumes it until it waits again
        await settle(thread)
        [question] = await thread.questions()
        await give(thread, question, {"n": 6})
        await over(thread)
        assert texts(await thread.messages())[1:] == [
            "write()",
            "write: wrote a.txt",
            "choose()",
            "choose: got 6",
            "ok",
        ]
        assert len(app.model.requests) == 1, "the model was asked again for recorded answers"


@pytest.mark.once
async def test_killed_in_the_middle_of_its_work(tmp_path: Path) -> None:
    said = plan([WRITE], [["choose", {}], ["hold", {}], ["note", {"text": "n"}]], "ok")
    assert await asyncio.to_thread(killed, tmp_path, said) == "working"
    held = Held()
    held.may_end.set()
    async with served(tmp_path, tools=[held.tool]) as app:
        thread = app.thread()
        await settle(thread)
        [question] = await thread.questions()
        await thread.answer([answer_to(question, {"n": 1}, by="ada")])
        await over(thread)
        assert held.ended == 1
        assert texts(await thread.messages())[-4:] == ["choose: got 1", "hold: held", "note: noted n", "ok"]
        assert (tmp_path / "files/a.txt").read_text() == "a"
        assert sorted(unit.tool for unit in await app.journal.calls.load_session(thread.session_id)) == [
            "choose",
            "hold",
            "note",
            "write",
        ]
        noted = thread.state()["Noted"]
        assert sorted(each["text"] for each in noted) == ["held", "n"]
