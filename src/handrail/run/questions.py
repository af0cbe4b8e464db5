"""Questions that a call asks a person, and the verb `wait_for`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Sequence
from contextvars import Context
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic_core

from handrail.concurrency.deadline import is_span
from handrail.concurrency.operation import Operation
from handrail.context import WaitFor
from handrail.errors import (
    AnswerRefused,
    Declined,
    DefinitionError,
    NoAnswer,
    QuestionCancelled,
    QuestionTimedOut,
    ToolError,
    ToolValidationError,
)
from handrail.events import QuestionAnswered, QuestionAsked
from handrail.journal.answers import unanswered
from handrail.journal.digest import keyed_digest
from handrail.journal.records import OVER
from handrail.question import (
    Answer,
    DecisionKeys,
    Question,
    QuestionKind,
    Quorum,
    Wording,
    markdown_fields,
    rows_of_payload,
)
from handrail.run.call_log import tell
from handrail.run.record.format import has_secret, mark_given, was_given_secret
from handrail.run.record.parking import end_grace
from handrail.schema import Schema, schema_of, to_json
from handrail.schema.coverage import first_hidden, in_order
from handrail.text.rendering import exact

if TYPE_CHECKING:
    from handrail.concurrency.deadline import Deadline
    from handrail.journal.protocol import Check, Mask, Questions
    from handrail.journal.records import QuestionRecord
    from handrail.protocols import Asker, Environment
    from handrail.run.call import Attempt
    from handrail.run.run import Run


_HAS_SECRET = (
    "a call that was given a secret can't wait for a later answer, since secrets are not recorded. "
    "Run it where somebody can answer at once"
)


def wait_for(attempt: Attempt) -> WaitFor:
    """Return the `wait_for` verb of one call."""

    def verb(
        kind: str,
        payload: object = None,
        schema: Any = None,
        *,
        message: str | None = None,
        title: str | None = None,
        timeout: float | None = None,
    ) -> Operation[Any]:
        attempt.home.check()
        if timeout is not None and not is_span(timeout):
            raise DefinitionError(
                f"wait_for({kind!r}): the timeout is {timeout!r}. Pass a positive number of seconds, or None for no timeout."
            )
        wording = Wording.of(kind, message, title)
        number = attempt.next_verb(f"wait_for {kind}")
        return Operation(
            lambda: _wait_for(attempt, number, kind, wording, payload, schema, timeout),
            f"wait_for({kind!r})",
            attempt.home,
        )

    return verb


async def _wait_for(
    attempt: Attempt,
    number: int,
    kind: str,
    wording: Wording,
    payload: object,
    schema: Any,
    timeout: float | None,
) -> Any:
    await note_verb(attempt, number, f"wait_for {kind}")
    wanted = _schema(str if schema is None else schema)
    return await ask_value(attempt, number, "input", kind, wording, payload, wanted, timeout)


async def ask_value(
    attempt: Attempt,
    number: int,
    of: QuestionKind,
    kind: str,
    wording: Wording,
    payload: object,
    wanted: Schema[Any],
    timeout: float | None = None,
) -> Any:
    """Ask a person for a value that matches the schema, and return it. Raises `NoAnswer` if there is no answer."""
    question = question_of(
        attempt, attempt.question_id(number), of, kind, wording, payload, wanted.json_schema, timeout
    )
    if wanted.secret:
        question = msgspec.structs.replace(question, secret=True)
    asked = QuestionAsked(question.id, attempt.id, kind, attempt.path, attempt.run_context)
    tell(attempt, asked, question.id, known=question.id in attempt.run.log.asked)
    outcome, by = "cancelled", ""
    try:
        with waiting_for_a_person(attempt):
            answer = await put(attempt, question, wanted)
        outcome, by = answer.outcome, answer.by
    finally:
        if not attempt.run.parked or outcome != "cancelled":  # a parked run leaves its question open
            seconds = seconds_open(attempt, question)
            answered = QuestionAnswered(question.id, attempt.id, outcome, by, attempt.run_context, seconds)
            tell(attempt, answered, question.id)
    value = _value_of(answer, kind)
    if has_secret(wanted, value):
        await mark_given(attempt, wanted, value)
    return wanted.parse_given(value)


def seconds_open(attempt: Attempt, question: Question) -> float:
    """Return how long a question was open, from when its run first asked it until its answer was accepted, or until now."""
    run, asked = attempt.run, question.asked_at
    closed = run.clock.now().timestamp()
    if (record := run.log.asked.get(question.id)) is not None:  # by an earlier leg
        asked, closed = record.question.asked_at, record.answered_at or closed
    return max(0.0, closed - asked.timestamp())


async def put(attempt: Attempt, question: Question, wanted: Schema[Any]) -> Answer:
    """Ask a question, through the environment if there is one, and return the answer. Meanwhile, the run may be parked."""
    run = attempt.run
    mask = wanted.hide if wanted.secret else None
    environment = run.people.environment
    asker = None if environment is None else CallAsker(attempt, environment)
    return await run.people.questions.ask(question, asker, wanted.parse_given, mask)


_asking: set[asyncio.Task[None]] = set()
_LOOK_SECONDS = 1.0


def ask_here(attempt: Attempt, background_id: str) -> None:
    """Ask the questions of a background run that this call has begun where those of the call's run are asked, if people are there now.

    Otherwise they wait in the journal, like those of a run that is parked.
    """
    environment, root = attempt.run.people.environment, [*attempt.with_outer()][-1].run
    if environment is None or environment.parks or environment.run_mode != "user":
        return

    async def ask() -> None:
        journal, asked = root.log.journal, set[str]()
        while root.end is not None and (await journal.runs.get(background_id)).status not in OVER:
            for question in await journal.questions.open(background_id):
                if question.id not in asked:
                    asked.add(question.id)
                    with contextlib.suppress(NoAnswer, AnswerRefused):  # it stays open, or has been answered
                        journal.questions.answer(await _answer_here(environment, question))
            await journal.queue.wait(_LOOK_SECONDS)

    asking = attempt.call.loop.create_task(ask(), context=Context())
    _asking.add(asking)
    asking.add_done_callback(_asking.discard)


async def _answer_here(environment: Environment, question: Question) -> Answer:
    try:
        answer = await environment.ask(question)
    except Declined as declined:
        return unanswered(question, "declined", declined.reason)
    assert answer is not None, "an environment that does not park answers"
    return answer


@contextlib.contextmanager
def paused_timeouts(attempt: Attempt) -> Generator[None]:
    """Pause the timeouts and watchdogs of the call and its outer calls until the block ends."""
    resume: list[Callable[[], None]] = []
    each: Attempt | None = attempt
    while each is not None:
        scope = each.run.live.get(each)
        if scope is not None:
            resume.append(scope.pause())
        each = each.parent
    try:
        yield
    finally:
        for resume_one in resume:
            resume_one()


@contextlib.contextmanager
def waiting_for_a_person(asks: Attempt) -> Generator[None]:
    """Pause the timeouts and watchdogs of the call and its outer calls until the block ends, because a person is asked.

    The deadlines of the call's run and of the runs around it pause too, unless `pauses_for_people` is false. Raises
    `CancelledError` in a parked run, where nobody may be asked.
    """
    parking = asks.run.parking
    if parking is not None:
        parking.asks()
    deadlines: list[Deadline] = []
    attempt: Attempt | None = asks
    while attempt is not None:
        deadline = attempt.run.deadline
        if deadline is not None and deadline not in deadlines:
            deadlines.append(deadline)  # the deadlines of outer runs pause as well
        attempt = attempt.parent
    with paused_timeouts(asks):
        for deadline in deadlines:
            deadline.pause()
        inquiries = asks.inquire()
        inquiries.open += 1
        end_grace(asks)
        try:
            yield
        finally:
            inquiries.open -= 1
            if parking is not None:
                parking.start_grace(asks)
            for deadline in deadlines:
                deadline.resume()


class CallAsker:
    """Asks an environment on behalf of one call. While a question is open, the call waits, and its run may be parked."""

    __slots__ = ("_attempt", "_environment")

    def __init__(self, attempt: Attempt, environment: Environment) -> None:
        self._attempt = attempt
        self._environment = environment

    async def ask(self, question: Question, /) -> Answer:
        """Return the environment's answer.

        If the environment leaves the question open, this does not return. It is cancelled when the question is settled or
        the run stops. Raises `QuestionCancelled` if the call can't wait for a later answer: its run can't be parked, or the call or
        an outer one was given a secret and the environment does not keep secrets.
        """
        answer = await self._environment.ask(question)
        if answer is not None:
            return answer
        if not self._environment.keeps_secrets and self._is_held_by_secret():
            raise QuestionCancelled(question.name, _HAS_SECRET)
        attempt = self._attempt
        parking = attempt.run.parking
        if parking is None:
            raise QuestionCancelled(question.name)  # the run can't be parked, so nobody can answer later
        for each in attempt.with_outer():
            if each.suspend is not None:
                await each.suspend()
        inquiries = attempt.inquire()
        inquiries.left += 1
        try:
            parking.consider()
            return await asyncio.get_running_loop().create_future()
        finally:
            inquiries.left -= 1

    def _is_held_by_secret(self) -> bool:
        """Return whether the call or an outer call was given a secret, which keeps the run from being parked."""
        attempt: Attempt | None = self._attempt
        while attempt is not None and not was_given_secret(attempt):
            attempt = attempt.parent
        return attempt is not None


class RunAsker:
    """Asks a run's environment between two steps of its model. If that can't ask anybody, the answer comes from elsewhere."""

    __slots__ = ("_run",)

    def __init__(self, run: Run) -> None:
        self._run = run

    async def ask(self, question: Question, /) -> Answer:
        environment, parking = self._run.people.environment, self._run.parking
        assert environment is not None, "it was made for one"
        with contextlib.suppress(QuestionCancelled):
            answer = await environment.ask(question)
            if answer is not None:
                return answer
        if parking is not None:
            return await parking.wait()
        return await asyncio.get_running_loop().create_future()


async def note_verb(attempt: Attempt, number: int, verb: str) -> None:
    """Record which verb a handler uses, before the verb is carried out."""
    await attempt.run.log.note_verb(attempt.place.child(number), verb)


def _value_of(answer: Answer, kind: str) -> Any:
    if answer.outcome == "declined":
        raise Declined(kind, answer.reason)
    if answer.outcome == "timed out":
        raise QuestionTimedOut(kind)
    if answer.outcome == "cancelled":
        plain = QuestionCancelled(kind)
        raise plain if answer.reason in ("", str(plain)) else QuestionCancelled(kind, answer.reason)
    return answer.value


def question_of(
    attempt: Attempt,
    question_id: str,
    kind: QuestionKind,
    name: str,
    wording: Wording,
    payload: object,
    schema: dict[str, Any],
    timeout: float | None,
    decision_keys: DecisionKeys | None = None,
    quorums: tuple[Quorum, ...] = (),
) -> Question:
    """Create an attempt's question. The question's digest binds an answer to what is asked, and to the call that asks.

    Raises `ToolError` if the payload can't be written as JSON.
    """
    run = attempt.run
    now = run.clock.now()
    markdown = () if kind == "approval" else markdown_fields(payload)
    try:
        shown = to_json(payload)
    except ToolValidationError as error:
        raise ToolError(f"the question that {attempt.name} asks can't be shown: {error}") from None
    payload = pydantic_core.from_json(shown)
    rows = [[row.name, row.whole] for row in rows_of_payload(kind, payload)]
    message, title = exact(wording.message), exact(wording.title)  # they may quote what a model wrote
    principal = run.session.principal
    people = [
        (quorum.role, quorum.approvals, *((quorum.then, quorum.after) if quorum.then else ()))
        for quorum in quorums
    ]
    times = (timeout, *(quorum.expires for quorum in quorums))
    timeout = min((each for each in times if each is not None), default=None)
    covered = (
        attempt.tool.name,
        attempt.tool.json_schema,
        canonical_arguments(attempt),
        attempt.id,
        question_id,
        principal,
        *([people] if people else ()),
        *([["title", title]] if title else ()),
    )
    return Question(
        id=question_id,
        kind=kind,
        name=name,
        message=message,
        payload=payload,
        schema=schema,
        digest=keyed_digest(run.people.key, kind, name, message, shown.decode(), rows, schema, *covered),
        principal=principal,
        asked_by=attempt.path,
        call_id=attempt.id,
        asked_at=now,
        expires_at=None if timeout is None else now + timedelta(seconds=timeout),
        run_id=run.run_context.request_id,
        decision_keys=decision_keys,
        quorums=quorums,
        title=title,
        markdown=markdown,
    )


def params_that_came(attempt: Attempt) -> Any:
    """Return the call's params as they were before the handler started.

    Once the handler has started, they are parsed again from the arguments, because the handler may have modified them. The
    params of a call without arguments, such as a compensation, are returned as they are.
    """
    if not attempt.let_through or attempt.arguments is None:
        return attempt.params
    return attempt.tool.parse(attempt.arguments)


def canonical_arguments(attempt: Attempt) -> Any:
    """Return a call's arguments as plain JSON, including secrets, for digests and keys.

    These are the validated arguments, so equal calls give equal JSON, however they were written. If JSON can't express all
    of them, or parsing it does not give equal arguments, this returns the arguments that were sent, as `_sent` does.
    """
    params = params_that_came(attempt)
    if params is not None:
        with contextlib.suppress(ToolValidationError):  # they can't be written as JSON
            written = attempt.tool.clear(params)
            plain = pydantic_core.from_json(written)
            if first_hidden(params, plain) is None and _is_equal(attempt.tool.parse(written), params):
                return in_order(params, plain)
    return _sent(attempt.arguments)


def _is_equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:  # the user's own types may refuse to be compared
        return False


def _sent(arguments: Any) -> Any:
    """Return, as plain JSON, the arguments that were sent. If they can't be read or written as JSON, return them as text."""
    try:
        text = arguments if isinstance(arguments, str | bytes) else to_json(arguments)
        return pydantic_core.from_json(text) if text.strip() else {}
    except (ValueError, ToolValidationError):
        return arguments.decode(errors="backslashreplace") if isinstance(arguments, bytes) else str(arguments)


def _schema(wanted: Any) -> Schema[Any]:
    try:
        return schema_of(wanted)
    except TypeError:  # a pydantic `TypeAdapter`, or a type that is not hashable
        return Schema(wanted)


class HeardQuestions:
    """Asks questions through another `Questions`, and keeps the answers that have a remark until the run's model is told."""

    def __init__(self, questions: Questions) -> None:
        self._questions = questions
        self.remarks: dict[str, Answer] = {}
        """The answers whose remarks the model has not been told, by question id, in the order in which they arrived."""

    async def ask(
        self,
        question: Question,
        asker: Asker | None = None,
        check: Check | None = None,
        mask: Mask | None = None,
        /,
    ) -> Answer:
        answer = await self._questions.ask(question, asker, check, mask)
        if answer.has_remark:
            self.remarks[question.id] = answer
        return answer

    def answer(self, answer: Answer, /) -> None:
        self._questions.answer(answer)

    async def open(self, run_id: str | None = None, /, *, principal: str | None = None) -> Sequence[Question]:
        return await self._questions.open(run_id, principal=principal)

    async def history(self, run_id: str, /) -> Sequence[QuestionRecord]:
        return await self._questions.history(run_id)

    async def withdraw(self, question_id: str, /) -> None:
        await self._questions.withdraw(question_id)

    async def withdraw_all(self, prefix: str, /) -> None:
        await self._questions.withdraw_all(prefix)
