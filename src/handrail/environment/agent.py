"""`AgentEnvironment`: a model that answers in place of a person."""

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
    """A model in place of a person: tools get `prompt_model` instead of `wait_for`.

    `model` is the model to ask; by default it is the model of the run. It makes the choices a person would
    make, but it approves nothing: a call that needs approval is denied.
    """

    run_mode: RunMode = "agent"

    def __init__(self, model: Model | str | None = None) -> None:
        self._adapter = None if model is None else Adapter(model)

    @property
    def prompt_model(self) -> Any:
        """Creates the `prompt_model` verb of a call, or None to use the model of the run."""
        return None if self._adapter is None else self._prompt_model

    @property
    def adapter(self) -> Any:
        """Binds a run that has no adapter to this model, or None to leave it without one."""
        return None if self._adapter is None else self._bound

    def _prompt_model(self, call: Any) -> PromptModel:
        assert self._adapter is not None
        return self._adapter.prompt_model_for(call)

    def _bound(self, call: Any) -> BoundAdapter:
        assert self._adapter is not None
        return self._adapter.bound_to(call)

    async def ask(self, question: Question, /) -> Answer:
        """Decline: questions are for people, and a model approves nothing on their behalf."""
        raise Declined(question.name, "a model answers here, and there is nobody to ask")
