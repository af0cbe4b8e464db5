"""The loop: a prompt on a model, until it is done."""

from handrail.adapter.adapter import Adapter
from handrail.adapter.options import Retry, Throttle
from handrail.adapter.response import PromptResponse
from handrail.adapter.stream import RunStream

__all__ = ["Adapter", "PromptResponse", "Retry", "RunStream", "Throttle"]
