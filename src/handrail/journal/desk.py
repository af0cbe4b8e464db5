"""The desk where questions lie open: one mechanism under approvals, `wait_for` and handoffs."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import threading
from collections.abc import Callable
from datetime import datetime
from typing import get_args

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import AnswerRefused, Declined, NoAnswer, QuestionTimedOut, ToolValidationError
from handrail.journal.digest import new_key
from handrail.journal.seal import not_heard, sealed
from handrail.protocols import Asker
from handrail.question import Answer, AnswerOutcome, Question
from handrail.records import Asked, Check, Mask
from handrail.schema import Problem
from handrail.schema.problems import Misfit, misfits

log = logging.getLogger("handrail.questions")

_TRIES = 3
"""How often somebody who gave an answer that does not fit is asked again."""


class _Lying:
    """A question on the desk, and the answer once there is one."""

    __slots__ = ("answer", "answered_at", "check", "left", "loop", "mask", "question", "settled")

    def __init__(
        self,
        question: Question,
        loop: asyncio.AbstractEventLoop,
        check: Check | None,
        mask: Mask | None = None,
    ) -> None:
        self.question = question
        self.check = check
        self.mask = mask
        self.loop = loop
        self.settled: asyncio.Future[Answer] = loop.create_future()
        self.answer: Answer | None = None
        """As it may be shown: only whoever asked hears the secrets in it."""
        self.answered_at: float | None = None
        self.left = False
        """Has whoever asked gone, without its being over?"""


class QuestionDesk:
    """Takes questions and answers, and decides which answer counts.

    - The first answer wins; the same answer again is harmless; a different one is refused.
    - An answer must carry the question's digest, come from whom it was put to, be in time, and pass
      the asker's check.
    - A question without an answer ends as declined, timed out or cancelled, never as a made-up
      answer, and never not at all because whoever was to be asked could not be reached.
    - The same question again, as from a call that is run again, gets the answer it was given. One
      that timed out or was cancelled may be asked again, and one is whose answer had a secret in it.
    - Whoever asked hears what was given; what is kept of it, and shown to anybody, has the secrets masked.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK, key: bytes | None = None) -> None:
        self._clock = clock
        self.key = new_key() if key is None else key
        """What answers with secrets in them are known again by."""
        self._questions: dict[str, _Lying] = {}
        self._open: dict[str, _Lying] = {}
        self._lock = threading.Lock()
        self.keep: Callable[[Answer], None] | None = None
        """Records an answer before anybody hears of it; it may refuse it."""
        self.stays: Callable[[Question], bool] = lambda question: False
        """Does a question stay here although whoever asked it has gone, to be asked again?"""

    def open_questions(self) -> tuple[Question, ...]:
        """What waits for an answer, oldest first."""
        with self._lock:
            return tuple(lying.question for lying in self._open.values())

    def asked(self) -> tuple[Asked, ...]:
        """What waits for an answer, and what was given one that stands, oldest first."""
        with self._lock:
            lying = tuple(self._questions.values())
        return tuple(
            Asked(each.question, each.answer, each.answered_at)
            for each in lying
            if each.answer is None or each.answer.outcome in ("answered", "declined")
        )

    def forget_run(self, run_id: str) -> None:
        """Keep nothing of the questions of a run that is over."""
        with self._lock:
            for kept in (self._questions, self._open):
                for id in [id for id, lying in kept.items() if lying.question.run_id == run_id]:
                    del kept[id]

    async def ask(
        self,
        question: Question,
        asker: Asker | None = None,
        check: Check | None = None,
        mask: Mask | None = None,
    ) -> Answer:
        """Lay a question out and wait until it is over."""
        loop = asyncio.get_running_loop()
        with self._lock:
            lying = self._questions.get(question.id)
            if lying is None or _may_be_asked_again(lying, question):
                lying = self._questions[question.id] = self._open[question.id] = _Lying(
                    question, loop, check, mask
                )
                is_new = True
            else:
                is_new = False
            settled = lying.settled
        if not is_new:
            return lying.answer or await asyncio.shield(settled)
        asking: asyncio.Task[None] | None = None
        timer: asyncio.TimerHandle | None = None
        if question.expires_at is not None:
            left = (question.expires_at - self._clock.now()).total_seconds()
            timer = loop.call_later(max(left, 0), self._close, lying, "timed out")
        if asker is not None:
            asking = loop.create_task(self._put(lying, asker))
        try:
            return await settled
        except asyncio.CancelledError:
            if not self.stays(question):
                self._close(lying, "cancelled")
            lying.left = True
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if asking is not None:
                asking.cancel()

    def answer(self, answer: Answer) -> None:
        """Take an answer, or `AnswerRefused` that says why not. From any thread."""
        lying = self._questions.get(answer.question_id)
        if lying is None:
            raise AnswerRefused(answer.question_id, "there is no such question", "Answer one that is open.")
        check_whose(lying.question, answer)
        if lying.answer is None:
            if lying.left and lying.question.secret and answer.outcome == "answered":
                raise not_heard(lying.question)
            self._check_fit(lying, answer)
        if not self._settle(lying, answer) and lying.answer != self._shown(lying, answer):
            over = "" if lying.answer is None else lying.answer.outcome
            raise AnswerRefused(lying.question.id, f"it is over: {over}", "The first answer counts.")

    def stands(self, question_id: str) -> bool:
        """Does it wait here for an answer, or was it given one? One that was withdrawn may be asked again."""
        lying = self._questions.get(question_id)
        return lying is not None and (
            lying.answer is None or lying.answer.outcome not in ("timed out", "cancelled")
        )

    def forget(self, question_id: str) -> None:
        """Keep nothing of a question that is over, where somebody else does."""
        with self._lock:
            lying = self._questions.get(question_id)
            if lying is not None and lying.answer is not None:
                del self._questions[question_id]

    def take(self, answer: Answer) -> None:
        """Let an answer be heard that was recorded elsewhere, if it fits."""
        lying = self._questions.get(answer.question_id)
        if lying is not None and lying.answer is None and not answer.seal:
            self._check_fit(lying, answer)
            self._settle(lying, answer, recorded=True)

    def cancel(self, question_id: str) -> None:
        """Withdraw a question; harmless if it is over. From any thread."""
        lying = self._questions.get(question_id)
        if lying is not None:
            self._close(lying, "cancelled")

    def _check_fit(self, lying: _Lying, answer: Answer) -> None:
        """Is it in time, and what was asked for?"""
        question = lying.question
        check_in_time(question, answer, self._clock.now())
        check = lying.check
        if answer.outcome == "answered" and check is not None:
            try:
                check(answer.value)
            except ToolValidationError as error:
                raise AnswerRefused(
                    question.id,
                    f"it does not fit: {str(error).removesuffix('.')}",
                    "Give what the schema says.",
                    problems=error.problems or (Problem("", str(error)),),
                ) from None

    def _shown(self, lying: _Lying, answer: Answer) -> Answer:
        return sealed(lying.question, answer, lying.mask, self.key)

    def _settle(self, lying: _Lying, answer: Answer, recorded: bool = False) -> bool:
        """Let this be the answer, unless there is one. Only here does a question end."""
        with self._lock:
            if lying.answer is not None:
                return False
            shown, settled = self._shown(lying, answer), lying.settled
            if self.keep is not None and not recorded:
                self.keep(shown)
            lying.answer = shown
            if shown.seal:
                lying.settled = lying.loop.create_future()  # nothing here holds the secret any more
            lying.answered_at = self._clock.now().timestamp()
            lying.check = None
            if self._open.get(lying.question.id) is lying:
                del self._open[lying.question.id]
        with contextlib.suppress(RuntimeError):  # the loop that asked has ended; the answer is kept
            lying.loop.call_soon_threadsafe(_wake, settled, answer)
        return True

    def _close(self, lying: _Lying, outcome: AnswerOutcome, reason: str = "") -> None:
        question = lying.question
        self._settle(
            lying,
            Answer(
                question_id=question.id,
                digest=question.digest,
                by=question.principal,
                outcome=outcome,
                reason=reason,
            ),
        )

    async def _put(self, lying: _Lying, asker: Asker) -> None:
        """Ask whoever is there; somebody whose answer does not fit is asked again."""
        question = lying.question
        try:
            for _ in range(_TRIES):
                answer = await asker.ask(question)
                try:
                    if answer.question_id != question.id:
                        raise AnswerRefused(
                            question.id, f"it answers {answer.question_id!r}", "Answer what was asked."
                        )
                    self.answer(answer)
                    return
                except AnswerRefused as refused:
                    if lying.answer is not None:
                        return
                    question = msgspec.structs.replace(
                        question, message=f"{lying.question.message}\n{refused.problem}"
                    )
            self._close(lying, "declined", f"no answer that fits after {_TRIES} tries")
        except Declined as declined:
            self._close(lying, "declined", declined.reason)
        except NoAnswer as none:
            outcome = "timed out" if isinstance(none, QuestionTimedOut) else "cancelled"
            self._close(lying, outcome, getattr(none, "reason", "") or str(none))
        except Exception as error:
            log.error("asking %s raised, so the question ends", question.id, exc_info=error)
            self._close(lying, "cancelled", f"whoever was to be asked could not be: {type(error).__name__}")


def check_answer(question: Question, answer: Answer, now: datetime) -> None:
    """Refuse an answer that is not to this question, not by whom it was put to, late, or plainly unfit."""
    check_whose(question, answer)
    check_in_time(question, answer, now)
    wrong: list[Misfit] = []
    if answer.outcome == "answered":
        wrong = misfits(question.schema, answer.value, secret=question.secret)
    if wrong:
        raise AnswerRefused(
            question.id,
            f"it does not fit: {'; '.join(map(str, wrong))}",
            "Give what the schema says.",
            problems=[Problem(each.where, each.what) for each in wrong],
        )


def check_whose(question: Question, answer: Answer) -> None:
    """Is it about what was asked, by somebody who was asked?"""
    if not hmac.compare_digest(_bytes(answer.digest), _bytes(question.digest)):
        raise AnswerRefused(
            question.id,
            "its digest is not this question's",
            "Answer what was asked: read the question again.",
        )
    if answer.by != question.principal:
        raise AnswerRefused(
            question.id, f"{answer.by!r} may not answer it", f"Only {question.principal!r} may."
        )


def check_in_time(question: Question, answer: Answer, now: datetime) -> None:
    """Is it in time, and an outcome there is?"""
    if question.expires_at is not None and now >= question.expires_at:
        raise AnswerRefused(question.id, "it has expired", "Ask again to get a new question.")
    if answer.outcome not in get_args(AnswerOutcome):
        raise AnswerRefused(
            question.id,
            f"{answer.outcome!r} is no outcome",
            f"Use one of {', '.join(map(repr, get_args(AnswerOutcome)))}.",
        )


def _may_be_asked_again(lying: _Lying, question: Question) -> bool:
    """False: it is the same question, which has an answer or waits for one."""
    if lying.question.digest != question.digest:
        raise AnswerRefused(
            question.id, "another question with this id was asked already", "Give each its own id."
        )
    if lying.answer is None:
        return lying.left
    return lying.answer.outcome in ("timed out", "cancelled") or bool(lying.answer.seal)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # compared in bytes, since only ASCII can be as text


def _wake(settled: asyncio.Future[Answer], answer: Answer) -> None:
    if not settled.done():
        settled.set_result(answer)
