"""Environments, which handle a run's questions. To define another one, subclass `handrail.Environment`.

The environments that need no terminal are defined here. `TerminalEnvironment` is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from handrail.errors import Declined
from handrail.imports import names_on_first_use
from handrail.messages import Model
from handrail.protocols import Environment
from handrail.question import Answer, Question
from handrail.text.spelling import checked_arguments
from handrail.tools import RunMode

if TYPE_CHECKING:
    from handrail.environment.terminal import Screen, TerminalEnvironment

__all__ = ["AgentEnvironment", "HeadlessEnvironment", "LaterEnvironment", "Screen", "TerminalEnvironment"]


class HeadlessEnvironment(Environment):
    """An environment without a person: `context.wait_for` is None, and tools that require a person are not offered.

    A run without an environment behaves the same way.
    """

    run_mode: RunMode = "headless"

    async def ask(self, question: Question, /) -> Answer:
        """Raise `Declined` for every question."""
        raise Declined(question.name, "there is nobody to ask")


class LaterEnvironment(Environment):
    """An environment in which a person answers later. Until then, the run is parked with its questions, if it can be parked.

    This environment is meant for servers and jobs that must not keep a run in memory while a person takes days to answer.
    A run stays in memory if it has an open call that can't be run again from the start. The environment needs a journal; without
    one, a question is cancelled, because it can't be recorded. A question is also cancelled if its call, or a call around it,
    was given a secret: secrets are not recorded, so such a run can't be parked.
    """

    run_mode: RunMode = "user"
    parks = True

    async def ask(self, question: Question, /) -> Answer | None:
        """Return None, which leaves the question open in the journal."""
        return None


@checked_arguments
class AgentEnvironment(Environment):
    """An environment with a model in place of a person: tools get `prompt_model` instead of `wait_for`.

    `model` is the model to ask; the default is the run's own model. The model makes the choices that a
    person would make, but it approves nothing: a call that needs a person's approval is denied.
    """

    run_mode: RunMode = "agent"

    def __init__(self, model: Model | str | None = None) -> None:
        if model is not None:
            from handrail.run.adapter import Adapter  # imported only if a model is given

            adapter = Adapter(model)
            self.prompt_model = adapter.prompt_model_for
            self.adapter = adapter.bound_to

    async def ask(self, question: Question, /) -> Answer:
        """Raise `Declined` for every question, because only a person may answer questions and approve calls."""
        raise Declined(
            question.name,
            "a model stands in for people here, and it can't answer questions that are meant for a person",
        )


if not TYPE_CHECKING:  # a type checker would take every name for one of the package's
    __getattr__ = names_on_first_use(__name__, {"terminal": "Screen TerminalEnvironment"})
