"""Tests for the server's threads: messages, answers, parking, cancellation, undo and approvals."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from handrail.errors import (
    AnswerRefused,
    HandrailError,
    JournalError,
    RunBusy,
    SessionBusy,
    SessionOutdated,
    UndoRefused,
)
from handrail.serve.feed import FellBehind
from handrail.serve.refusals import (
    QuestionsOpen,
    ThreadBusy,
    ThreadNameRefused,
    ThreadUnknown,
    error_response,
)
from support.parked_runs import answer_to
from support.served_threads import Held, events, give, kinds, over, plan, served, settle, texts

# --- runs with and without readers ------------------------------------------------------------------------


async def test_a_run_is_done_without_any_reader(tmp_path: Path) -> None:
    async with served(tmp_path) as app:
        thread = app.thread()
        run_id = await thread.say(plan([["note", {"text": "a"}]], "all done"))
        await over(thread)
        assert (await app.journal.runs.get(run_id)).status == "done"
        assert texts(await thread.messages())[1:] == ["note()", "note: noted a", "all done"]
        assert kinds(thread.feed) == ["started", "success"]
        assert thread.state() == {"Noted": [{"text": "a"}]}


async def test_what_was_said_is_recorded_when_saying_returns(tmp_path: Path) -> None:
    held = Held()
    async with served(tmp_path, tools=[held.tool]) as app:
        run_id = await app.thread().say(plan([["hold", {}]]))
        assert (await app.journal.runs.get(run_id)).status == "running"
        held.may_end.set()
        await over(app.thread())


async def test_readers_that_stall_or_leave_change_nothing(tmp_path: Path) -> None:
    """A reader that disconnects or stalls neither cancels the run nor blocks it."""
    held = Held()
    async with served(tmp_path, tools=[held.tool]) as app:
        thread = app.thread()
        await thread.say(plan([["hold", {}]], "word " * 200))
        stalled = thread.feed.last
        leaving = asyncio.ensure_future(thread.feed.after(thread.feed.last))
        await held.has_begun.wait()
        leaving.cancel()
        held.may_end.set()
        await over(thread)
        assert (held.ended, held.cut) == (1, 0)
        assert kinds(thread.feed) == ["started", "success"]
        assert events(thread.feed, stalled)[-1]["type"] == "RUN_FINISHED"


# --- messages ----------------------------------------------------------------------------------------


async def test_of_two_concurrent_messages_one_is_accepted(tmp_path: Path) -> None:
    async with served(tmp_path) as app:
        thread = app.thread()
        both = await asyncio.gather(thread.say(plan("one")), thread.say(plan("two")), return_exceptions=True)
        await over(thread)
        assert sorted(type(each).__name__ for each in both) == ["ThreadBusy", "str"]
        assert len(await thread.rows()) == 1


async def test_a_run_that_its_journal_fails_does_not_tell_where_the_journal_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*given: Any, **named: Any) -> Any:
        raise JournalError("postgresql://tests@db.internal/x", "it is gone", "Start it.", is_lost=True)

    async with served(tmp_path) as app:
        thread = app.thread()
        with monkeypatch.context() as patch:
            patch.setattr(app.threads.journal.calls, "note", broken)
            await thread.say(plan("hello"))
            await over(thread)
        [failed] = [each for each in events(thread.feed) if each["type"] == "RUN_ERROR"]
        assert failed["code"] == "JournalError"
        assert "journal" in failed["message"]
        assert "db.internal" not in failed["message"] + thread.problem
        assert "db.internal" in caplog.text


async def test_a_message_is_accepted_as_soon_as_the_end_is_reported(tmp_path: Path) -> None:
    async with served(tmp_path) as app:
        thread = app.thread()
        for number in range(20):
            place = thread.feed.last
            await thread.say(plan(f"answer {number}"), leg=f"leg{number}")
            ended = False
            while not ended:
                for item in await thread.feed.after(place, 5):
                    place, ended = item.number, item.ends == f"leg{number}"
        assert [text for text in texts(await thread.messages()) if text.startswith("answer")] == [
            f"answer {number}" for number in range(20)
        ]


async def test_a_message_is_refused_while_a_question_is_open(tmp_path: Path) -> None:
    async with served(tmp_path) as app:
        thread = app.thread()
        await thread.say(plan([["choose", {}]]))
        await settle(thread)
        with pytest.raises(QuestionsOpen, match="a question is waiting for an answer"):
            await thread.say(plan("hello"))


async def test_a_run_that_can_not_be_recorded_is_refused_where_it_is_said(tmp_path: Path) -> None:
    async with served(tmp_path) as app:
        thread = app.thread()
        await thread.say(plan("x"))
        await over(thread)
        app.journal.close()
        with pytest.raises(Exception, match="closed"):
            await thread.say(plan("x"))
        app.journal = type(app.journal)(tmp_path / "runs.db")
        assert thread.live is None


# --- answers ----------------------------------------------------------------------------------------


async def test_an_answer_opens_the_next_leg_of_the_same_run(tmp_path: Path) -> None:
    async with served(tmp_path) as app:
        thread = app.thread()
        run_id = await thread.say(plan([["choose", {}]], "thanks"), leg="first")
        await settle(thread)
        assert kinds(thread.feed) == ["started", "interrupt"]
        [question] = await thread.questions()
        assert await give(thread, question, {"n": 7}, leg="second") == "second"
        await over(thread)
        assert kinds(thread.feed) == ["started", "interrupt", "started", "success"]
        assert [each["runId"] for each in events(thread.feed) if each["type"] == "RUN_STARTED"] == [
            "first",
            "second",
        ]
        assert texts(await thread.messages())[2:] == ["choose: got 7", "thanks"]
        assert [row.record.id for row in await thread.rows()] == [run_id]


async def test_one_of_two_answers_continues_and_the_other_is_asked_again(tmp_path: Path) -> None:
    async with served(tmp_path) as app:
        thread = app.thread()
        await thread.say(plan([["choose", {}], ["choose", {}]], "both"))
        await settle(thread)
        first, second = await thread.questions()
        await give(thread, second, {"n": 2})
        await settle(thread)
        assert kinds(thread.feed) == ["started", "interrupt", "started", "interrupt"]
        last = events(thread.feed)[-1]["outcome"]["interrupts"]
        assert [each["metadata"]["handrail"]["id"] for each in last] == [first.id]
        await give(thread, first, {"n": 1})
        await over(thread)
        assert texts(await thread.messages())[2:] == ["choose: got 1", "choose: got 2", "both"]


async def test_both_answers_at_once(tmp_path: Path) -> None:
    async with served(tmp_path) as app:
        thread = app.thread()
        await thread.say(plan([["choose", {}], ["choose", {}]], "both"))
        await settle(thread)
        waits = await thread.questions()
        await thread.answer([answer_to(each, {"n": number}, by="ada") for number, each in enumerate(waits)])
        await over(thread)
        assert kinds(thread.feed) == ["started", "interrupt", "started", "success"]


async def test_the_same_answer_again_is_harmless_and_another_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as app:
        thread = app.thread()
        await thread.say(plan([["pick_two", {}]], "ok"))
        await settle(thread)
        [first] = await thread.questions()
        await give(thread, first, {"n": 1})
        await settle(thread)
        place = thread.feed.last
        assert await give(thread, first, {"n": 1}) == ""
        with pytest.raises(AnswerRefused, match=r"over|already"):
            await give(thread, first, {"n": 2})
        assert thread.feed.last == place, "a repeated answer caused events"
        [second] = await thread.questions()
        await give(thread, second, {"n": 2})
        await over(thread)
        assert await give(thread, second, {"n": 2}) == ""  # a repeated answer is harmless even after the run
        assert texts(await thread.messages())[2] == "pick_two: 1 and 2"


@pytest.mark.parametrize("parked", [False, True])
async def test_answers_that_do_not_fit_are_refused_and_begin_nothing(tmp_path: Path, parked: bool) -> None:
    async with served(tmp_path, park_after=0.0 if parked else None) as app:
        thread, other = app.thread(), app.thread("other")
        for each in (thread, other):
            await each.say(plan([["choose", {}]], "ok"))
            await (over(each) if parked else settle(each))
        assert (thread.live is None) == parked
        [question], [elsewhere] = await thread.questions(), await other.questions()
        place = thread.feed.last
        refused: dict[str, Any] = {
            "unfit": answer_to(question, {"n": "many"}, by="ada"),
            "digest": answer_to(question, {"n": 1}, by="ada", digest="0" * 64),
            "whose": answer_to(question, {"n": 1}, by="eve"),
            "another thread's": answer_to(elsewhere, {"n": 1}, by="ada"),
            "nobody's": answer_to(question, {"n": 1}, by="ada").__class__(
                question_id="nope", digest="x", by="ada", outcome="answered"
            ),
        }
        for answer in refused.values():
            with pytest.raises(AnswerRefused):
                await thread.answer([answer])
            with pytest.raises(AnswerRefused):  # a valid answer beside an invalid one is not accepted either
                await thread.answer([answer_to(question, {"n": 1}, by="ada"), answer])
        eve = app.threads.thread("eve", "t")
        with pytest.raises(AnswerRefused):
            await eve.answer([answer_to(question, {"n": 1}, by="eve")])
        assert thread.feed.last == place
        assert [each.id for each in await thread.questions()] == [question.id]
        await give(thread, question, {"n": 3})
        await over(thread)
        assert texts(await thread.messages())[2:] == ["choose: got 3", "ok"]


@pytest.mark.parametrize("parked", [False, True])
@pytest.mark.parametrize("outcome", ["declined", "cancelled"])
async def test_a_question_can_be_declined_or_withdrawn(tmp_path: Path, outcome: str, parked: bool) -> None:
    async with served(tmp_path, park_after=0.0 if parked else None) as app:
        thread = app.thread()
        await thread.say(plan([["choose", {}]], "so be it"))
        await (over(thread) if parked else settle(thread))
        [question] = await thread.questions()
        await thread.answer([answer_to(question, None, by="ada", outcome=outcome, reason="no time")])
        await over(thread)
        said = texts(await thread.messages())
        assert said[-1] == "so be it"
        assert "got" not in said[2]


async def test_a_question_is_shown_while_another_call_works(tmp_path: Path) -> None:
    """A question is shown while another call works. The leg ends when that call has ended."""
    held = Held()
    async with served(tmp_path, tools=[held.tool]) as app:
        thread = app.thread()
        await thread.say(plan([["choose", {}], ["hold", {}]], "ok"))
        await held.has_begun.wait()
        while not thread.live or not thread.live.questions:
            await thread.feed.after(thread.feed.last, 5)
        shown = [each for each in events(thread.feed) if each.get("name") == "handrail.question"]
        assert len(shown) == 1
        assert kinds(thread.feed) == ["started"]
        held.may_end.set()
        await settle(thread)
        assert kinds(thread.feed) == ["started", "interrupt"]
        [question] = await thread.questions()
        await give(thread, question, {"n": 1})
        await over(thread)
        assert held.began == 1


async def test_an_answer_given_while_another_call_works_opens_no_leg(tmp_path: Path) -> None:
    held = Held()
    async with served(tmp_path, tools=[held.tool]) as app:
        thread = app.thread()
        await thread.say(plan([["choose", {}], ["hold", {}]], "ok"), leg="only")
        while not thread.live or not thread.live.questions:
            await thread.feed.after(thread.feed.last, 5)
        [question] = await thread.questions()
        assert await give(thread, question, {"n": 1}, leg="another") == "only"
        held.may_end.set()
        await over(thread)
        assert kinds(thread.feed) == ["started", "success"]


# --- parking ------------------------------------------------------------------------------------------


async def test_a_run_that_waits_leaves_memory_and_an_answer_brings_it_back(tmp_path: Path) -> None:
    async with served(tmp_path, park_after=0.0) as app:
        thread = app.thread()
        run_id = await thread.say(
            plan(
                [["note", {"text": "once"}]],
                [["write", {"path": "a.txt", "text": "a"}], ["choose", {}]],
                "ok",
            )
        )
        await over(thread)
        assert (await app.journal.runs.get(run_id)).status == "parked"
        requests = len(app.model.requests)
        assert texts(await thread.messages())[1:3] == ["note()", "note: noted once"]
        assert await thread.read_state() == {"Noted": [{"text": "once"}]}
        [question] = await thread.questions()
        await give(thread, question, {"n": 5})
        await over(thread)
        assert texts(await thread.messages())[1:] == [
            "note()",
            "note: noted once",
            "write(); choose()",
            "write: wrote a.txt",
            "choose: got 5",
            "ok",
        ]
        assert len(app.model.requests) == requests + 1, (
            "the model was asked again for an answer that was recorded"
        )
        assert thread.state() == {"Noted": [{"text": "once"}]}
        assert kinds(thread.feed) == ["started", "interrupt", "started", "success"]
        units = await app.journal.calls.load(run_id)
        assert [unit.tool for unit in units] == ["note", "write", "choose"]


async def test_one_of_two_answers_resumes_a_parked_run_which_rests_again(tmp_path: Path) -> None:
    async with served(tmp_path, park_after=0.0) as app:
        thread = app.thread()
        await thread.say(plan([["choose", {}], ["choose", {}]], "both"))
        await over(thread)
        first, second = await thread.questions()
        await give(thread, first, {"n": 1})
        await over(thread)
        assert [each.id for each in await thread.questions()] == [second.id]
        assert kinds(thread.feed) == ["started", "interrupt", "started", "interrupt"]
        await give(thread, second, {"n": 2})
        await over(thread)
        assert texts(await thread.messages())[2:] == ["choose: got 1", "choose: got 2", "both"]


async def test_an_answer_that_comes_while_the_run_is_parked_is_not_lost(tmp_path: Path) -> None:
    """An answer that arrives while a run is being parked is not lost. The test tries twelve moments."""
    async with served(tmp_path) as app:
        for steps in range(12):
            thread = app.thread(f"t{steps}")
            await thread.say(plan([["choose", {}]], "ok"))
            await settle(thread)
            [question] = await thread.questions()
            assert thread.live is not None
            parking = thread.live.parking
            assert parking is not None
            assert parking.park()
            for _ in range(steps):
                await asyncio.sleep(0)
            await give(thread, question, {"n": steps})
            await over(thread)
            assert texts(await thread.messages())[2:] == [f"choose: got {steps}", "ok"]


# --- cancellation -------------------------------------------------------------------------------------


async def test_cancelled_while_it_works(tmp_path: Path) -> None:
    held = Held()
    async with served(tmp_path, tools=[held.tool]) as app:
        thread = app.thread()
        run_id = await thread.say(plan([["note", {"text": "a"}]], [["hold", {}]], "never"))
        await held.has_begun.wait()
        await thread.cancel()
        assert thread.live is None
        assert (await app.journal.runs.get(run_id)).status == "cancelled"
        assert kinds(thread.feed) == ["started", "cancelled"]
        assert held.cut == 1
        assert thread.state() == {"Noted": [{"text": "a"}]}
        await thread.say(plan("again"))
        await over(thread)
        assert texts(await thread.messages())[-1] == "again"


@pytest.mark.parametrize("parked", [False, True])
async def test_cancelled_while_it_waits(tmp_path: Path, parked: bool) -> None:
    async with served(tmp_path, park_after=0.0 if parked else None) as app:
        thread = app.thread()
        run_id = await thread.say(plan([["choose", {}]], "never"))
        await (over(thread) if parked else settle(thread))
        [question] = await thread.questions()
        await thread.cancel()
        assert (await app.journal.runs.get(run_id)).status == "cancelled"
        assert list(await thread.questions()) == []
        assert kinds(thread.feed) == ["started", "interrupt", "started", "cancelled"]
        with pytest.raises(AnswerRefused):
            await give(thread, question, {"n": 1})
        await thread.cancel()  # cancelling again is harmless
        await thread.say(plan("again"))
        await over(thread)
        assert texts(await thread.messages())[-1] == "again"


@pytest.mark.parametrize("answer_first", [False, True])
async def test_answer_and_cancel_at_once_leave_one_story(tmp_path: Path, answer_first: bool) -> None:
    async with served(tmp_path) as app:
        for number in range(10):
            thread = app.thread(f"t{number}")
            run_id = await thread.say(plan([["choose", {}]], "ok"))
            await settle(thread)
            [question] = await thread.questions()
            both = [give(thread, question, {"n": 1}), thread.cancel()]
            for _ in range(number):
                await asyncio.sleep(0)
            await asyncio.gather(*(both if answer_first else both[::-1]), return_exceptions=True)
            await over(thread)
            assert (await app.journal.runs.get(run_id)).status in ("done", "cancelled")
            assert kinds(thread.feed)[-1] in ("success", "cancelled")
            assert kinds(thread.feed).count("started") == len(kinds(thread.feed)) / 2
            await thread.say(plan("after"))
            await over(thread)
            assert texts(await thread.messages())[-1] == "after"


# --- undo ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [False, True])
async def test_undone_in_memory_and_after_a_restart(tmp_path: Path, restarted: bool) -> None:
    async with served(tmp_path) as app:
        thread = app.thread()
        run_id = await thread.say(
            plan([["write", {"path": "a.txt", "text": "new"}], ["note", {"text": "a"}]], "ok")
        )
        await over(thread)
        wrote, noted = [unit.call_id for unit in await app.journal.calls.load(run_id)]
        if restarted:
            await app.restart()
            thread = app.thread()
        done = await thread.undo(wrote)
        assert (list(done.paths), (tmp_path / "files/a.txt").exists()) == (["a.txt"], False)
        await thread.undo(noted)
        assert await thread.read_state() == {"Noted": []}
        told = [each["value"] for each in events(thread.feed) if each.get("name") == "handrail.undone"]
        assert [each["call_id"] for each in told] == [wrote, noted]
        with pytest.raises(UndoRefused, match="already been undone"):
            await thread.undo(wrote)
        with pytest.raises(UndoRefused, match="no finished call"):
            await thread.undo("nope")
        with pytest.raises(UndoRefused, match="no finished call"):
            await app.thread("t", "eve").undo(wrote)


async def test_undo_is_refused_while_a_run_is_active(tmp_path: Path) -> None:
    held = Held()
    async with served(tmp_path, tools=[held.tool]) as app:
        thread = app.thread()
        await thread.say(plan([["write", {"path": "a.txt", "text": "new"}]], [["hold", {}]]))
        await held.has_begun.wait()
        [unit] = await app.journal.calls.load_session(thread.session_id)
        with pytest.raises(RunBusy, match=r"this server.*Wait until"):
            await thread.undo(unit.call_id)
        held.may_end.set()
        await over(thread)
        await thread.undo(unit.call_id)
        assert not (tmp_path / "files/a.txt").exists()


# --- approvals ------------------------------------------------------------------------------------------


async def test_an_approval_is_revoked_while_the_run_is_active(tmp_path: Path) -> None:
    """An approval that is remembered for the exact call allows the same call again, until it is revoked."""
    held = Held()
    async with served(tmp_path, tools=[held.tool]) as app:
        thread = app.thread()
        sends = [["send", {"text": "hello"}]]
        await thread.say(plan(sends, sends, [["hold", {}]], sends, "ok"))
        await settle(thread)
        [question] = await thread.questions()
        await give(thread, question, {"approved": True, "remember": "exact"})
        await held.has_begun.wait()
        assert texts(await thread.messages()).count("send: sent hello") == 2, (
            "the repeated call was not allowed by the remembered approval"
        )
        [kept] = await thread.approvals()
        await thread.revoke(kept.id)
        held.may_end.set()
        await settle(thread)
        [again] = await thread.questions()
        assert (again.kind, again.id != question.id) == ("approval", True)
        assert await thread.approvals() == ()
        await give(thread, again, {"approved": False, "reason": "enough"})
        await over(thread)


# --- principals and thread names ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("principal", "id"),
    [
        *((("ada", id)) for id in ("", "a/b", "../t", "a\nb", "x" * 129)),
        *((principal, "t") for principal in ("", "a\nb", "\ud800", "x" * 257, "a\0")),
    ],
)
async def test_invalid_names_are_refused(tmp_path: Path, principal: str, id: str) -> None:
    async with served(tmp_path) as app:
        with pytest.raises(ThreadNameRefused, match=r"Use|must return"):
            app.threads.thread(principal, id)


async def test_a_principal_with_a_slash_reaches_nobody_else(tmp_path: Path) -> None:
    """No similar pair of principal and thread reaches the thread `t` of the principal `ada/x` or answers its question.

    A thread's name can't contain a slash.
    """
    async with served(tmp_path) as app:
        victim = app.threads.thread("ada/x", "t")
        await victim.say(plan([["choose", {}]], "secret"))
        await settle(victim)
        [question] = await victim.questions()
        for principal, id in [("ada", "x"), ("ada", "t"), ("x", "t"), ("ada/x/", "t"), ("/ada/x", "t")]:
            attacker = app.threads.thread(principal, id)
            assert attacker is not victim
            assert list(await attacker.questions()) == []
            with pytest.raises(ThreadUnknown):
                await attacker.check_known()
            with pytest.raises(AnswerRefused):
                await attacker.answer([answer_to(question, {"n": 1}, by=principal)])
        with pytest.raises(ThreadNameRefused):
            app.threads.thread("ada", "x/t")
        await app.restart()
        assert app.threads.parked == 1
        assert len(await app.threads.thread("ada/x", "t").questions()) == 1


# --- threads dropped from memory ------------------------------------------------------------------------


async def test_a_thread_is_deleted_only_while_no_run_is_active(tmp_path: Path) -> None:
    held = Held()
    async with served(tmp_path, tools=[held.tool]) as app:
        thread = app.thread()
        with pytest.raises(ThreadUnknown):
            await thread.forget()
        await thread.say(plan([["hold", {}]]))
        with pytest.raises(ThreadBusy):
            await thread.forget()
        held.may_end.set()
        await over(thread)
        await thread.forget()
        with pytest.raises(ThreadUnknown):
            await thread.check_known()
        await thread.say(plan("anew"))
        await over(thread)
        assert texts(await thread.messages())[1:] == ["anew"]


async def test_what_another_process_deletes_does_not_stay_in_memory(tmp_path: Path) -> None:
    """Once another process has deleted a thread's runs, whoever asks for the thread gets nothing that was in memory."""
    async with served(tmp_path) as app:
        thread = app.thread()
        await thread.say(plan("a secret"))
        await over(thread)
        assert texts(await thread.messages())
        assert thread.feed.since(0)
        rows = await thread.rows()
        await app.journal.runs.forget([row.record.id for row in rows])
        with pytest.raises(ThreadUnknown):
            await thread.check_known()
        assert not thread.feed.since(thread.feed.last)
        with pytest.raises(FellBehind):
            thread.feed.since(0)
        assert texts(await thread.messages()) == []


async def test_idle_threads_are_dropped_and_those_that_are_read_are_found(tmp_path: Path) -> None:
    async with served(tmp_path, most_kept=3) as app:
        feed = app.thread("t0").feed
        for number in range(10):
            await app.thread(f"t{number}").say(plan(f"answer {number}"))
            await over(app.thread(f"t{number}"))
        assert app.threads.kept() <= 3
        gc.collect()
        reader = asyncio.ensure_future(feed.after(feed.last))
        await app.thread("t0").say(plan("news"))
        assert await reader, "a reader of a dropped thread did not receive later events"
        await over(app.thread("t0"))
        assert texts(await app.thread("t3").messages())[1:] == ["answer 3"]


@pytest.mark.parametrize("error", [SessionBusy("s", "r", "elsewhere"), SessionOutdated("s")])
def test_a_session_that_another_process_uses_is_a_conflict(error: HandrailError) -> None:
    """A run that another process begins at the same moment is as much in the way as one that was there before."""
    assert error_response(error).status_code == 409


async def test_the_first_message_of_a_thread_reads_the_journal_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread without runs has an empty session, which is not read. Whether it has runs is read while nothing can begin one."""
    async with served(tmp_path) as app:
        reads: list[str] = []
        for name in ("list", "turn", "get"):
            real = getattr(app.journal.runs, name)

            def counted(*given: Any, name: str = name, real: Any = real, **options: Any) -> Any:
                reads.append(name)
                return real(*given, **options)

            monkeypatch.setattr(app.journal.runs, name, counted)
        thread = app.thread()
        await thread.say(plan([["note", {"text": "a"}]], "done"))
        assert reads in (["list"], ["list", "list"])  # the second may be the run's own
        await over(thread)
        assert texts(await thread.messages())[-1:] == ["done"]
