"""People for tests: a person who gives prepared answers, a model in place of a person, or nobody.

    person = Person(approve="not on a Friday", answers={"pick": {"selected": "tea"}})
    gate = open_gate([deploy], policies=[CapabilityPolicy()], environment=person)

`RecordingSubscriber` keeps every event that a session publishes, for a test to inspect.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from contextvars import Context
from types import TracebackType
from typing import Any, Literal, TypeVar

import pydantic_core

from handrail.errors import Declined, QuestionCancelled, QuestionTimedOut
from handrail.events import CallStatus, ToolInvoked, ToolResumed, ToolStarted
from handrail.messages import Model
from handrail.prompt import Prompt
from handrail.protocols import Environment
from handrail.question import Answer, AnswerOutcome, Question
from handrail.run.adapter import Adapter
from handrail.schema import to_json
from handrail.session import Session
from handrail.tools import RunMode

T = TypeVar("T")

Says = bool | str | tuple[bool, str] | Mapping[str, Any]
"""A decision on an approval: a boolean, a reason to deny, a boolean with a reason, or the complete answer.

A complete answer is a mapping such as `{"approved": True, "remember": "exact"}`.
"""
Approves = Says | Callable[[Question], Says]
"""The decision on every approval, or a function that returns it for a question."""

Forgery = Literal["digest", "principal", "question"]
"""The part of an answer that is forged: its digest, the principal it comes from, or the question it answers."""


class Person(Environment):
    """An environment with a person who gives prepared answers.

    - `approve` decides approvals; by default everything is denied.
    - `answers` has the answer to each kind of `wait_for` question: a value, an exception to raise, or a function
      of the payload. `Declined`, `QuestionCancelled` and `QuestionTimedOut` mean that the question is declined, cancelled
      or timed out; any other exception means that the environment failed. A question without an answer is declined.
    - `after` delays each answer until an event is set, or by a number of seconds.
    - `wrong_first` is the answer to each question the first time it is asked.
    - `forge` names the part that is forged in every answer.

    `questions` lists the questions in the order they were asked, including repetitions.
    """

    run_mode: RunMode = "user"

    def __init__(
        self,
        approve: Approves = False,
        answers: Mapping[str, Any] | None = None,
        *,
        after: asyncio.Event | float | None = None,
        wrong_first: Any = None,
        forge: Forgery | None = None,
    ) -> None:
        self.approve: Approves = approve
        self.answers = dict(answers or {})
        self.after = after
        self.wrong_first = wrong_first
        self.forge: Forgery | None = forge
        self.questions: list[Question] = []

    async def ask(self, question: Question, /) -> Answer:
        """Record a question, and return this person's answer to it after the delay, if any.

        A prepared exception other than `Declined`, `QuestionCancelled` and `QuestionTimedOut` is raised.
        """
        first = all(each.id != question.id for each in self.questions)
        self.questions.append(question)
        if isinstance(self.after, asyncio.Event):
            await self.after.wait()
        elif self.after is not None:
            await asyncio.sleep(self.after)
        if first and self.wrong_first is not None:
            return self._answer(question, "answered", self.wrong_first)
        if question.kind == "approval":
            return self._answer(question, "answered", self._approval(question))
        return self._input(question)

    def _approval(self, question: Question) -> dict[str, Any]:
        said = self.approve(question) if callable(self.approve) else self.approve
        if isinstance(said, Mapping):
            return dict(said)
        if isinstance(said, str):
            said = (False, said)
        approved, reason = said if isinstance(said, tuple) else (said, "")
        return {"approved": approved, "reason": reason}

    def _input(self, question: Question) -> Answer:
        name = question.name
        try:
            if name not in self.answers:
                raise Declined(name, f"no answer was prepared for {name!r}")
            answer = self.answers[name]
            if isinstance(answer, BaseException):
                raise answer
            value = answer(question.payload) if callable(answer) else answer
        except Declined as declined:
            return self._answer(question, "declined", reason=declined.reason)
        except QuestionCancelled:
            return self._answer(question, "cancelled")
        except QuestionTimedOut:
            return self._answer(question, "timed out")
        return self._answer(question, "answered", value)

    def _answer(
        self, question: Question, outcome: AnswerOutcome, value: Any = None, reason: str = ""
    ) -> Answer:
        return Answer(
            question_id=question.id if self.forge != "question" else f"{question.id} of another",
            digest=question.digest if self.forge != "digest" else "0" * len(question.digest),
            by=question.principal if self.forge != "principal" else f"not {question.principal}",
            outcome=outcome,
            value=value,
            reason=reason,
        )


class SimulatedPerson(Person):
    """A person whose answers a model gives: `SimulatedPerson("openai:gpt-5", "You are a customer. Approve up to 20 euros.")`.

    The model is asked about each question by itself, with the `instructions` and what a person would be shown. `approve` and `answers` are
    prepared answers, which come first. An answer of the model that does not fit is asked for again. Its requests belong to no run: they are neither in
    the run's usage nor in its budget. What the model approves is approved, so use this only in tests and evals.
    """

    def __init__(
        self,
        model: Model | str,
        instructions: str,
        *,
        approve: Approves | None = None,
        answers: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(False if approve is None else approve, answers)
        self._decides = approve is None
        self._adapter = Adapter(model)
        self._instructions = instructions.replace("$", "$$")

    async def ask(self, question: Question, /) -> Answer:
        """Record a question, and return the prepared answer to it, or else the model's."""
        is_approval = question.kind == "approval"
        if not self._decides if is_approval else question.name in self.answers:
            return await super().ask(question)
        self.questions.append(question)
        shown = to_json({"kind": question.kind, "name": question.name, "payload": question.payload}).decode()
        message = f"{question.message}\n{shown}"
        if is_approval:
            decision = await self._say(message, Decision)
            return self._answer(
                question, "answered", {"approved": decision.approved, "reason": decision.reason}
            )
        schema = to_json(question.schema).decode()
        text = await self._say(f"{message}\nAnswer with nothing but JSON that matches this schema: {schema}")
        try:
            value: Any = pydantic_core.from_json(text)
        except ValueError:
            value = text
        return self._answer(question, "answered", value)

    async def _say(self, message: str, output: Any = None) -> Any:
        prompt: Prompt[Any] = Prompt("person", self._instructions, output=output)

        async def evaluate() -> Any:
            response = await self._adapter.evaluate(prompt, message=message)
            return response.text if output is None else response.output

        # In an empty context, so that this is no part of the run that asks, nor of its trace.
        return await asyncio.create_task(evaluate(), context=Context())


@dataclasses.dataclass(frozen=True)
class Decision:  # no docstring: it would be shown to the model
    approved: bool
    reason: str = ""


class Agent(Person):
    """An environment with a model in place of a person, which answers as a `Person` does.

    Handrail's own broker never asks a model for an approval. A different broker gets the decision in `approve`, which approves
    everything by default.
    """

    run_mode: RunMode = "agent"

    def __init__(self, approve: Approves = True, answers: Mapping[str, Any] | None = None) -> None:
        super().__init__(approve, answers)


class Nobody(Agent):
    """An environment with nobody to ask. Questions that were asked anyway are in `questions`."""

    run_mode: RunMode = "headless"


def _check(holds: bool, otherwise: str) -> None:
    """Raise `AssertionError` if something does not hold, under `python -O` too."""
    if not holds:
        raise AssertionError(otherwise)


class RecordingSubscriber:
    """Keeps every event that a session publishes, in order.

    Used as a context manager, it stops recording at the end of the block.
    """

    def __init__(self, session: Session) -> None:
        self.events: list[object] = []
        self._stop = session.dispatcher.subscribe(object, self.events.append)

    def of(self, kind: type[T]) -> list[T]:
        """Return the events of this type, oldest first."""
        return [event for event in self.events if isinstance(event, kind)]

    def statuses(self) -> list[tuple[str, CallStatus]]:
        """Return each finished call's tool and status, in the order the calls ended."""
        return [(ended.tool, ended.status) for ended in self.of(ToolInvoked)]

    def assert_paired(self) -> None:
        """Raise `AssertionError` unless every call has exactly one start and, after it, exactly one end.

        A call that continues in a resumed run has started in an earlier leg.
        """
        started: list[str] = []
        ended: list[str] = []
        for event in self.events:
            if isinstance(event, ToolStarted):
                _check(event.call_id not in started, f"{event.tool} ({event.call_id}) was started twice")
                started.append(event.call_id)
            elif isinstance(event, ToolResumed):
                started += [] if event.call_id in started else [event.call_id]
            elif isinstance(event, ToolInvoked):
                _check(event.call_id in started, f"{event.tool} ({event.call_id}) ended before it started")
                _check(event.call_id not in ended, f"{event.tool} ({event.call_id}) ended twice")
                ended.append(event.call_id)
        _check(set(started) == set(ended), f"never ended: {sorted(set(started) - set(ended))}")

    def close(self) -> None:
        """Stop recording. The recorded events are kept."""
        self._stop()

    def __enter__(self) -> RecordingSubscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
