"""`LaterEnvironment`: somebody will answer, but not now and not here."""

from __future__ import annotations

from handrail.dispatch.parking import held_by_secret, wait_for_later
from handrail.errors import QuestionCancelled
from handrail.question import Answer, Question
from handrail.tools import RunMode

_HELD = (
    "a call that was given a secret can't wait until later, since secrets are not recorded. "
    "Run it where somebody is there to answer"
)


class LaterEnvironment:
    """A person who is not connected: questions are recorded, and the run is parked until it is resumed.

    For servers and jobs that must not hold a run in memory while somebody thinks for days. It needs a
    journal; without one there is nowhere to leave a question, and it ends as cancelled. So does one of a
    call that was given a secret: that is not recorded, so its run can't be left.
    """

    run_mode: RunMode = "user"
    parks = True
    """Tells the run that it may be parked."""

    async def ask(self, question: Question, /) -> Answer:
        """Leave the question where it is recorded."""
        keeps = hasattr(
            self, "rests"
        )  # who hears of runs at rest decides what becomes of one that can't be parked
        if held_by_secret() and not keeps:
            raise QuestionCancelled(question.name, _HELD)
        await wait_for_later()
        raise QuestionCancelled(question.name)
