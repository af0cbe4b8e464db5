"""Environments without a connected person: `HeadlessEnvironment` and `LaterEnvironment`."""

from __future__ import annotations

from handrail.errors import Declined
from handrail.protocols import Environment
from handrail.question import Answer, Question
from handrail.tools import RunMode


class HeadlessEnvironment(Environment):
    """Nobody to ask, now or later: a tool that needs a person falls back or fails, and the model is told.

    The same as no environment at all, but stated explicitly.
    """

    run_mode: RunMode = "headless"

    async def ask(self, question: Question, /) -> Answer:
        """Decline every question."""
        raise Declined(question.name, "there is nobody to ask")


class LaterEnvironment(Environment):
    """A person who answers later: questions are recorded, and the run is parked until it is resumed.

    For servers and jobs that must not keep a run in memory while somebody thinks for days. It needs a journal;
    without one a question is cancelled, because there is nowhere to record it. A question from a call that was
    given a secret is cancelled too: secrets are not recorded, so such a run can't be parked.
    """

    run_mode: RunMode = "user"
    parks = True

    async def ask(self, question: Question, /) -> Answer | None:
        """Leave the question in the journal."""
        return None
