"""An environment that records when everything in a run waits for answers, and functions that answer."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from handrail import Adapter, LaterEnvironment, Prompt
from handrail.errors import RunParked
from handrail.question import Answer, Question
from handrail.run.record.parking import Parking

NUMBER = {"number": 1}


class Resting(LaterEnvironment):
    """An environment that never parks a run.

    It records the run's `Parking` and, whenever everything in the run waits for answers, whether the run could be parked.
    """

    keeps_secrets = True

    def __init__(self) -> None:
        self.parking: Parking | None = None
        self.rested: list[bool] = []
        """For each time that everything in the run waited for answers, whether the run could be parked."""
        self._next = asyncio.Event()

    def run_started(self, parking: Parking) -> None:
        self.parking = parking

    def run_waiting(self, parking: Parking) -> None:
        assert parking is self.parking
        self.rested.append(parking.may_park)
        self._next.set()

    async def until_rest(self) -> Parking:
        await self._next.wait()
        self._next.clear()
        assert self.parking is not None
        return self.parking


def answer_to(question: Question, value: Any = NUMBER, **changed: Any) -> Answer:
    """Return an answer to this question by the one who was asked, with what `changed` names changed."""
    answer = Answer(question_id=question.id, digest=question.digest, by=question.principal, value=value)
    return msgspec.structs.replace(answer, **changed)


async def park_and_resume(adapter: Adapter, prompt: Prompt[Any], **arguments: Any) -> str:
    """Run a prompt until a question parks the run, answer "yes", and resume the run. Returns the model's final text."""
    with pytest.raises(RunParked) as parked:
        await adapter.evaluate(prompt, "go", run_id="r1", environment=LaterEnvironment(), **arguments)
    journal = adapter.options.journal
    assert journal is not None
    journal.questions.answer(answer_to(parked.value.questions[0], "yes"))
    return (await adapter.resume("r1", prompt, environment=LaterEnvironment())).text
