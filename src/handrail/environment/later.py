"""`LaterEnvironment`: somebody will answer, but not now and not here."""

from __future__ import annotations

from handrail.dispatch.parking import wait_for_later
from handrail.errors import QuestionCancelled
from handrail.question import Answer, Question
from handrail.tools import RunMode


class LaterEnvironment:
    """A person who is not connected: questions are recorded, and the run is parked until it is resumed.

    For servers and jobs that must not hold a run in memory while somebody thinks for days. It needs a
    journal; without one there is nowhere to leave a question, and it ends as cancelled.
    """

    run_mode: RunMode = "user"
    parks = True
    """Tells the run that it may be parked."""

    async def ask(self, question: Question, /) -> Answer:
        """Leave the question where it is recorded."""
        await wait_for_later()
        raise QuestionCancelled(question.name)
