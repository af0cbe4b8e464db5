"""An environment that records when runs are waiting, and a function that answers their questions."""

from __future__ import annotations

import asyncio
from typing import Any

from handrail import (
    LaterEnvironment,
)
from handrail.question import Answer, Question
from handrail.replay.parked_run import Parking


class Resting(LaterEnvironment):
    """Records when a run begins and each time it only waits for answers. It parks no run."""

    keeps_secrets = True

    def __init__(self) -> None:
        self.parking: Parking | None = None
        self.rested: list[bool] = []
        """Whether the run could be parked, for each time it only waited for answers."""
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


def answer_to(question: Question, value: Any = None) -> Answer:
    return Answer(
        question_id=question.id,
        digest=question.digest,
        by=question.principal,
        value={"number": 1} if value is None else value,
    )
