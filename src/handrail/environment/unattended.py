"""Environments without a connected person: `HeadlessEnvironment` and `LaterEnvironment`."""

from __future__ import annotations

from handrail.dispatch.parking import held_by_secret, wait_for_later
from handrail.errors import Declined, QuestionCancelled
from handrail.question import Answer, Question
from handrail.tools import RunMode

_HELD = (
    "a call that was given a secret can't wait until later, since secrets are not recorded. "
    "Run it where somebody is there to answer"
)


class HeadlessEnvironment:
    """Nobody to ask, now or later: a tool that needs a person falls back or fails, and the model is told.

    The same as no environment at all, but stated explicitly.
    """

    run_mode: RunMode = "headless"

    async def ask(self, question: Question, /) -> Answer:
        """Decline every question."""
        raise Declined(question.name, "there is nobody to ask")


class LaterEnvironment:
    """A person who answers later: questions are recorded, and the run is parked until it is resumed.

    For servers and jobs that must not keep a run in memory while somebody thinks for days. It needs a journal;
    without one a question is cancelled, because there is nowhere to record it. A question from a call that was
    given a secret is cancelled too: secrets are not recorded, so such a run can't be parked.
    """

    run_mode: RunMode = "user"
    parks = True
    """The run may be parked."""

    async def ask(self, question: Question, /) -> Answer:
        """Leave the question in the journal and wait for the run to be parked."""
        # An environment that hears of idle runs decides itself what to do with one that can't be parked.
        decides = hasattr(self, "rests")
        if held_by_secret() and not decides:
            raise QuestionCancelled(question.name, _HELD)
        await wait_for_later()
        raise QuestionCancelled(question.name)
