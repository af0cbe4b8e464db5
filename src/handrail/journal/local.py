"""Steps, questions and messages within one process.

Runs without a journal use them as they are. A journal uses them for the steps and the askers of its own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import (
    AnswerRefused,
    Declined,
    DefinitionError,
    JournalError,
    MessageRefused,
    NoAnswer,
    QuestionTimedOut,
)
from handrail.journal.digest import new_key
from handrail.journal.protocol import Check, Choose, Mask
from handrail.journal.records import OVER, QuestionRecord, QueuedMessage, RunStatus
from handrail.question import Answer, AnswerOutcome, Question

if TYPE_CHECKING:
    from handrail.protocols import Asker


from handrail.journal.answers import (
    already_answered,
    check_outcome,
    check_sender,
    check_value,
    has_expired,
    seal,
    still_fits,
    unanswered,
)

T = TypeVar("T")

log = logging.getLogger("handrail.questions")

_KEPT_ANSWERS = 100
"""Maximum number of ended questions that are kept, so that a repeated or late answer to one of them is recognised."""
_RETRY_SECONDS = 5.0
"""Seconds after which the end of a question's time is recorded again, if the journal failed."""
_TRIES = 3
"""How many invalid answers the environment may give. After the last, the question counts as declined."""

_inside: ContextVar[tuple[tuple[int, str], ...]] = ContextVar("steps in progress around this one", default=())


class LocalSteps:
    """Steps that each succeed at most once in this process, until their values are dropped."""

    def __init__(self) -> None:
        self._steps: dict[str, asyncio.Future[Any]] = {}
        self._keys: dict[str, dict[str, None]] = {}
        """The keys of each run's steps. A prefix of a key does not identify its run, since run ids may share prefixes."""
        self._calls: dict[str, dict[str, None]] = {}
        """The keys of the steps of each outermost call."""

    async def run(
        self,
        key: str,
        function: Callable[[], Awaitable[T]],
        /,
        *,
        run_id: str = "",
        unsettled: Callable[[], Awaitable[T]] | None = None,
    ) -> T:
        """Run `function`, or return its value if it has already succeeded for this key.

        If a key is run twice concurrently, the second caller waits for the first, and runs its own function if
        the first one fails or is cancelled. `unsettled` is never called, because these steps do not outlive their process.
        Raises `DefinitionError` if the key is run inside its own function.
        """
        around, me = _inside.get(), (id(self), key)
        if me in around:
            raise DefinitionError(
                f"step {key!r} was started inside itself, so it would wait for itself. Give the inner step another key."
            )
        while (earlier := self._steps.get(key)) is not None:
            try:
                return cast(T, await asyncio.shield(earlier))
            except _Retry:
                continue
        mine: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._steps[key] = mine
        if run_id:
            self._keys.setdefault(run_id, {})[key] = None
        entered = _inside.set((*around, me))
        try:
            value = await function()
        except BaseException:
            if self._steps.get(key) is mine:
                del self._steps[key]
            mine.set_exception(_Retry())
            mine.exception()  # marks the error as retrieved, in case nobody waits for it
            raise
        finally:
            with contextlib.suppress(
                ValueError
            ):  # the coroutine was closed in another context, where nothing was set
                _inside.reset(entered)
        mine.set_result(value)
        return value

    def begin(self, key: str, call: str, live: Collection[str]) -> None:
        """Note the outermost call that a step belongs to, and drop the steps of the calls that are not in `live`.

        The key of a step contains the key of its call, so a step of a call that is over is never looked up again.
        """
        for over in [each for each in self._calls if each not in live]:
            for old in self._calls.pop(over):
                self._steps.pop(old, None)
        self._calls.setdefault(call, {})[key] = None

    async def load(self, run_id: str, /) -> Sequence[tuple[str, bytes | None]]:
        """Return no steps, because their values do not outlive the process."""
        return ()

    def forget(self, run_id: str) -> None:
        """Drop the values of a run's steps."""
        for key in self._keys.pop(run_id, ()):
            self._steps.pop(key, None)


class _Retry(Exception):
    """Raised in a task that waits for a concurrent step which failed or was cancelled, so that the task runs its own function."""


class _Pending:
    """A question asked in this process, and its answer once there is one."""

    __slots__ = ("answer", "answered_at", "check", "loop", "mask", "question", "settled", "timer")

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
        """The answer in the form that may be shown, with its secrets masked; None until there is one."""
        self.answered_at: float | None = None
        self.timer: asyncio.TimerHandle | None = None

    @property
    def can_be_asked_again(self) -> bool:
        answer = self.answer
        return answer is not None and (answer.outcome in ("timed out", "cancelled") or bool(answer.seal))


class LocalQuestions:
    """Questions asked in this process, and the rules by which an answer counts.

    - The first answer wins. Repeating it is harmless; a different one is refused.
    - An answer must carry the question's digest, be in time, and come from the person who was asked. A value must pass the
      asker's check. If quorums decide the question, an answer with a value may come from anyone, but needs the votes that
      decide it.
    - A question without an answer ends as declined, timed out or cancelled, never with a made-up answer. It is
      cancelled if the environment fails.
    - If a call runs again and asks the same question, it gets the same answer. The question is asked again if it timed
      out, was cancelled, or got an answer with a secret.
    - Only the asker gets the secrets in an answer. Whatever is kept, recorded or shown is masked.
    - Of the questions that are over, at most the last hundred are kept.
    """

    def __init__(
        self,
        clock: Clock = SYSTEM_CLOCK,
        *,
        key: bytes | None = None,
        record: Callable[[Answer], Answer] | None = None,
    ) -> None:
        self._clock = clock
        self._key = new_key() if key is None else key
        """The key that seals answers with secrets."""
        self._record = record
        """A function that decides how a question ends before the asker is notified, given an answer, and returns its end.

        With a journal, it records the end. It may refuse the answer. If it is None, `_decide` does it.
        """
        self._questions: dict[str, _Pending] = {}
        self._over: dict[str, None] = {}
        """The ids of the questions that are over, in the order in which they ended."""
        self._lock = threading.Lock()

    async def ask(
        self,
        question: Question,
        asker: Asker | None = None,
        check: Check | None = None,
        mask: Mask | None = None,
        /,
    ) -> Answer:
        """Ask a question, wait until it is over, and return its answer. The outcome of the answer says how it ended.

        Raises `AnswerRefused` if a different question with the same id was asked before and is still kept.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            earlier = self._questions.get(question.id)
            if earlier is not None and earlier.question.digest != question.digest:
                raise AnswerRefused(
                    question.id,
                    "another question with this id has already been asked",
                    "Give each question its own id.",
                )
            if earlier is None or earlier.can_be_asked_again:
                earlier = None
                self._forget(question.id)  # keeps the dict in the order of asking
                pending = self._questions[question.id] = _Pending(question, loop, check, mask)
            else:
                pending = earlier
            settled = pending.settled
        if earlier is not None:
            return pending.answer or await asyncio.shield(settled)
        asking: asyncio.Task[None] | None = None
        self._watch_time(pending)
        if asker is not None and pending.answer is None:
            asking = loop.create_task(self._put(pending, asker))
        try:
            return await settled
        except asyncio.CancelledError:
            self._close(pending, "cancelled")
            raise
        finally:
            if pending.timer is not None:
                pending.timer.cancel()
            if asking is not None:
                asking.cancel()

    def answer(self, answer: Answer, /) -> None:
        """Accept an answer. This is thread-safe.

        Raises `AnswerRefused` if there is no such question, if the answer is not valid, or if the question is over
        and its answer was a different one.
        """
        pending = self._questions.get(answer.question_id)
        if pending is None:
            raise AnswerRefused(
                answer.question_id, "there is no such question", "Answer one of the open questions."
            )
        check_sender(pending.question, answer)
        if pending.answer is None:
            self._check(pending, answer)
        if not self._settle(pending, answer) and pending.answer != self._shown(pending, answer):
            over = "" if pending.answer is None else pending.answer.outcome
            if pending.answer is not None and over == "timed out":
                raise already_answered(pending.question, pending.answer)
            raise AnswerRefused(
                pending.question.id, f"the question is over: {over}", "Only an open question can be answered."
            )

    async def open(self, run_id: str | None = None, /, *, principal: str | None = None) -> Sequence[Question]:
        """Return the questions without an answer, oldest first; if given, only those of this run or to this principal."""
        return tuple(
            each.question
            for each in self._all()
            if each.answer is None
            and run_id in (None, each.question.run_id)
            and principal in (None, each.question.principal)
        )

    async def history(self, run_id: str, /) -> Sequence[QuestionRecord]:
        """Return a run's open, answered, declined and expired questions, oldest first."""
        return tuple(
            QuestionRecord(each.question, each.answer, each.answered_at)
            for each in self._all()
            if each.question.run_id == run_id and (each.answer is None or each.answer.outcome != "cancelled")
        )

    async def withdraw(self, question_id: str, /) -> None:
        """Cancel a question, unless it is over."""
        pending = self._questions.get(question_id)
        if pending is not None:
            self._close(pending, "cancelled")

    async def withdraw_all(self, prefix: str, /) -> None:
        """Cancel every question without an answer whose id starts with `prefix`."""
        for pending in self._all():
            if pending.question.id.startswith(prefix):
                self._close(pending, "cancelled")

    def is_known(self, question_id: str) -> bool:
        """Return whether a question that this process asked is kept, and is open, answered or declined."""
        pending = self._questions.get(question_id)
        return pending is not None and (
            pending.answer is None or pending.answer.outcome not in ("timed out", "cancelled")
        )

    def deliver(self, answer: Answer) -> None:
        """Wake the asker with the answer or expiry that another process recorded. Raises `AnswerRefused` if it is invalid.

        Does nothing if no asker in this process waits for the answer, or if its secrets are masked.
        """
        pending = self._questions.get(answer.question_id)
        if pending is not None and pending.answer is None and not answer.seal:
            check_sender(pending.question, answer)
            self._check(pending, answer)
            self._settle(pending, answer, recorded=True)

    def forget(self, question_id: str) -> None:
        """Drop a question, if it is over."""
        with self._lock:
            pending = self._questions.get(question_id)
            if pending is not None and pending.answer is not None:
                self._forget(question_id)

    def _forget(self, question_id: str) -> None:
        self._questions.pop(question_id, None)
        self._over.pop(question_id, None)

    def _all(self) -> tuple[_Pending, ...]:
        with self._lock:
            return tuple(self._questions.values())

    def _check(self, pending: _Pending, answer: Answer) -> None:
        check_outcome(pending.question, answer)
        check_value(pending.question, answer, pending.check)

    def _shown(self, pending: _Pending, answer: Answer) -> Answer:
        return seal(pending.question, answer, pending.mask, self._key)

    def _settle(self, pending: _Pending, answer: Answer, recorded: bool = False) -> bool:
        """End a question with this answer, and return whether it did. Every question ends in this method.

        The answer is recorded first, unless it is `recorded` already. The question may turn out to have ended differently:
        because its time is over, or because another process has recorded its end. Then it ends like that here too.
        """
        with self._lock:
            if pending.answer is not None:
                return False
            given, settled = self._shown(pending, answer), pending.settled
            shown = given if recorded else (self._record or self._decide)(given)
            if shown != given and not still_fits(shown, pending.check):
                shown = given  # a process that could not check it recorded it, so it will be asked again
            if shown != given:
                answer = shown
            pending.answer = shown
            if shown.seal:
                pending.settled = pending.loop.create_future()  # so that this object does not keep the secret
            pending.answered_at = self._clock.now().timestamp()
            pending.check = None
            self._over[pending.question.id] = None
            if len(self._over) > _KEPT_ANSWERS:
                self._forget(next(iter(self._over)))
        with contextlib.suppress(RuntimeError):  # the asker's loop is closed; the answer is kept
            pending.loop.call_soon_threadsafe(_wake, settled, answer)
        return shown == given

    def _decide(self, answer: Answer) -> Answer:
        """Return how a question ends that is not recorded: with the answer, unless that comes too late."""
        question = self._questions[answer.question_id].question
        is_late = answer.outcome != "cancelled" and has_expired(question, self._clock.now())
        return unanswered(question, "timed out") if is_late else answer

    def _watch_time(self, pending: _Pending) -> None:
        """End the question if its time is over by the clock that decides. Otherwise look again at the end of its time."""
        question = pending.question
        if question.expires_at is None or pending.answer is not None:
            return
        left = (question.expires_at - self._clock.now()).total_seconds()
        if left <= 0:
            try:
                self._settle(pending, unanswered(question, "timed out"))
                return
            except JournalError as error:
                log.log(
                    error.retry_level,
                    "could not record that %s has expired; will retry",
                    question.id,
                    exc_info=True,
                )
                left = _RETRY_SECONDS
        pending.timer = pending.loop.call_later(left, self._watch_time, pending)

    def _close(self, pending: _Pending, outcome: AnswerOutcome, reason: str = "") -> None:
        self._settle(pending, unanswered(pending.question, outcome, reason))

    async def _put(self, pending: _Pending, asker: Asker) -> None:
        """Ask the environment until its answer is valid, but at most `_TRIES` times. If none is valid, the question counts as declined."""
        question = pending.question
        try:
            for _ in range(_TRIES):
                answer = await asker.ask(question)
                try:
                    if answer.question_id != question.id:
                        raise AnswerRefused(
                            question.id,
                            f"it answers {answer.question_id!r}",
                            "Answer the question that was asked.",
                        )
                    self.answer(answer)
                    return
                except AnswerRefused as refused:
                    if pending.answer is not None:
                        return
                    question = msgspec.structs.replace(
                        question, message=f"{pending.question.message}\n{refused.problem}"
                    )
            self._close(pending, "declined", f"no valid answer after {_TRIES} tries")
        except Declined as declined:
            self._close(pending, "declined", declined.reason)
        except NoAnswer as none:
            outcome = "timed out" if isinstance(none, QuestionTimedOut) else "cancelled"
            self._close(pending, outcome, getattr(none, "reason", "") or str(none))
        except Exception as error:
            log.error("the environment raised, so question %s is cancelled", question.id, exc_info=error)
            self._close(pending, "cancelled", f"nobody could be asked: {type(error).__name__}")


def _wake(settled: asyncio.Future[Answer], answer: Answer) -> None:
    if not settled.done():
        settled.set_result(answer)


def check_message(
    run_id: str,
    message: QueuedMessage,
    known: Mapping[str, QueuedMessage],
    principal: str,
    status: RunStatus,
) -> bool:
    """Return whether a message is new. Raises `MessageRefused` if the run can't be sent it."""
    before = known.get(message.id)
    if before is not None and before.by == message.by:
        again = msgspec.structs.replace(message, at=before.at, state=before.state)
        if before.edited or again == before:
            return False
    if before is not None:
        raise MessageRefused(run_id, f"the id {message.id!r} is that of another message", "Leave the id out.")
    _check_sender(run_id, message, principal)
    if status in OVER:
        raise MessageRefused(
            run_id, f"the run is over ({status})", "Say it in a new run of its session, which continues it."
        )
    return True


def check_edit(
    run_id: str,
    message: QueuedMessage,
    known: Mapping[str, QueuedMessage],
    principal: str,
    status: RunStatus,
) -> None:
    """Raise `MessageRefused` if a message can't be edited or withdrawn."""
    before = known.get(message.id)
    if before is None:
        shown = ", ".join(known) or "none"
        raise MessageRefused(run_id, f"it was sent no message {message.id!r}", f"It was sent these: {shown}.")
    _check_sender(run_id, message, principal)
    if before.child:
        raise MessageRefused(
            run_id, f"message {message.id!r} is the end of a background run", "It will be told."
        )
    if before.state == "told":
        raise MessageRefused(
            run_id,
            f"its model was already told message {message.id!r}",
            "Send another message that corrects it.",
        )
    if before.state == "withdrawn":
        raise MessageRefused(run_id, f"message {message.id!r} was withdrawn", "Send another message.")
    if status in OVER:
        raise MessageRefused(run_id, f"the run is over ({status})", "There is nothing left to change.")


def _check_sender(run_id: str, message: QueuedMessage, principal: str) -> None:
    if message.by != principal:
        raise MessageRefused(
            run_id, f"{message.by!r} may not send messages to it", f"Only {principal!r} may, whose run it is."
        )


class LocalMessages:
    """The messages to a run without a journal. This may be used from any thread."""

    def __init__(self, principal: str, clock: Clock) -> None:
        self.principal = principal
        self.look: Callable[[], Awaitable[None]] | None = None
        """Lets the run look for messages, once it has begun."""
        self._clock = clock
        self._known: dict[str, QueuedMessage] = {}
        self._lock = threading.Lock()
        self._status: RunStatus = "running"

    async def send(self, run_id: str, message: QueuedMessage, /) -> RunStatus:
        with self._lock:
            if check_message(run_id, message, self._known, self.principal, self._status):
                self._put(message)
            return self._status

    async def edit(self, run_id: str, message: QueuedMessage, /) -> None:
        with self._lock:
            check_edit(run_id, message, self._known, self.principal, self._status)
            self._put(message)

    async def deliver(self, run_id: str, choose: Choose, /) -> None:
        with self._lock:
            chosen = choose(self._waiting())
            for id in () if chosen is None else chosen[0]:
                self._known[id] = msgspec.structs.replace(self._known[id], state="told")

    async def list(self, run_id: str, /) -> Sequence[QueuedMessage]:
        with self._lock:
            return tuple(self._known.values())

    async def notify(self) -> None:
        """Let the run look for messages now, if it has begun."""
        if self.look is not None:
            await self.look()

    def end(self, status: RunStatus) -> bool:
        """End the run, unless messages wait. Returns whether it has ended."""
        with self._lock:
            if self._waiting():
                return False
            self._status = status
            return True

    def _put(self, message: QueuedMessage) -> None:
        self._known[message.id] = msgspec.structs.replace(message, at=self._clock.now().timestamp())

    def _waiting(self) -> Sequence[QueuedMessage]:
        return [each for each in self._known.values() if each.state == "waiting"]
