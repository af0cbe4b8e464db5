"""`AgentEnvironment`: a model that answers in place of a person."""

from __future__ import annotations

from handrail.adapter import Adapter
from handrail.errors import Declined
from handrail.messages import Model
from handrail.protocols import Environment
from handrail.question import Answer, Question
from handrail.tools import RunMode


class AgentEnvironment(Environment):
    """A model in place of a person: tools get `prompt_model` instead of `wait_for`.

    `model` is the model to ask; by default it is the model of the run. It makes the choices a person would
    make, but it approves nothing: a call that needs approval is denied.
    """

    run_mode: RunMode = "agent"

    def __init__(self, model: Model | str | None = None) -> None:
        if model is not None:
            adapter = Adapter(model)
            self.prompt_model = adapter.prompt_model_for
            self.adapter = adapter.bound_to

    async def ask(self, question: Question, /) -> Answer:
        """Decline: questions are for people, and a model approves nothing on their behalf."""
        raise Declined(question.name, "a model answers here, and there is nobody to ask")
