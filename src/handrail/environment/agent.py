"""`AgentEnvironment`: a model in a person's place."""

from __future__ import annotations

from typing import Any

from handrail.adapter import Adapter
from handrail.context.verbs import PromptModel
from handrail.errors import Declined
from handrail.messages import Model
from handrail.protocols import BoundAdapter
from handrail.question import Answer, Question
from handrail.tools import RunMode


class AgentEnvironment:
    """A model stands in for a person: tools are given `prompt_model` instead of `wait_for`.

    `model` is who stands in; without one it is the model of the run. It decides what a person would
    have chosen, and approves nothing on anybody's behalf: what has to be approved is denied.
    """

    run_mode: RunMode = "agent"

    def __init__(self, model: Model | str | None = None) -> None:
        self._adapter = None if model is None else Adapter(model)

    @property
    def prompt_model(self) -> Any:
        """Makes the verb of one call; None where the model of the run is asked."""
        return None if self._adapter is None else self._prompt_model

    @property
    def adapter(self) -> Any:
        """Binds a run without an adapter of its own to this model."""
        return None if self._adapter is None else self._bound

    def _prompt_model(self, call: Any) -> PromptModel:
        assert self._adapter is not None
        return self._adapter.prompt_model_for(call)

    def _bound(self, call: Any) -> BoundAdapter:
        assert self._adapter is not None
        return self._adapter.bound_to(call)

    async def ask(self, question: Question, /) -> Answer:
        """A model is prompted, not asked: questions are for people, and it approves for none of them."""
        raise Declined(question.name, "a model stands in here, and nobody is there to be asked")
