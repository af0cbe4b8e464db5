"""Adapters, which run prompts on a model until the model is done."""

from handrail.adapter.adapter import Adapter
from handrail.adapter.response import PromptResponse
from handrail.adapter.settings import Retry, Throttle
from handrail.adapter.stream import RunStream

__all__ = ["Adapter", "PromptResponse", "Retry", "RunStream", "Throttle"]
