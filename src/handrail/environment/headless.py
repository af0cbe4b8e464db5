"""`HeadlessEnvironment`: nobody is there."""

from __future__ import annotations

from handrail.errors import Declined
from handrail.question import Answer, Question
from handrail.tools import RunMode


class HeadlessEnvironment:
    """Nobody is there, and nobody will be: what needs somebody falls back or fails, and says so.

    The same as no environment at all, said on purpose.
    """

    run_mode: RunMode = "headless"

    async def ask(self, question: Question, /) -> Answer:
        """Nobody answers."""
        raise Declined(question.name, "nobody is there to be asked")
