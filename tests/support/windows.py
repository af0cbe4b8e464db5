"""A scripted provider with a small window, for conversations that outgrow it."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

from handrail import ScriptedModel, Session, tool
from handrail.events import ConversationCompacted
from handrail.messages import Message, ModelRequest, Price, Takes, Traits, Usage, UserMessage
from handrail.models import ModelRequestTooLong
from handrail.models.scripted import Reply
from handrail.run.compaction import weight_of
from handrail.run.conversation import check_well_formed

WINDOW = 8_000


@tool(effect="pure")
async def look(words: int) -> str:
    """Look something up."""
    return "word " * words


def tokens_of(request: ModelRequest) -> int:
    """Count the tokens of a request as this test's provider does: four bytes each, and 300 for the tools."""
    return (len(request.system) + sum(weight_of(message) for message in request.messages)) // 4 + 300


class Provider:
    """A scripted provider with a window, which counts its tokens and refuses what is too long.

    It checks that every request is well-formed, keeps the messages of each, and has the last one in its cache.
    """

    def __init__(
        self, answer: Callable[[ModelRequest], Any], *, window: int = WINDOW, known: bool = True
    ) -> None:
        self.sent: list[list[Message]] = []
        self.refused = 0
        self._answer = answer
        self._window = window
        traits = Traits(price=Price(Decimal(1), Decimal(1)), takes=Takes(), window=window if known else None)
        self.model = ScriptedModel(self._respond, traits=traits)

    def _respond(self, request: ModelRequest) -> Any:
        messages = list(request.messages)
        check_well_formed(messages)
        self.model.requests.clear()
        tokens = tokens_of(request)
        if tokens > self._window:
            self.refused += 1
            raise ModelRequestTooLong("scripted:script", "prompt is too long")
        self.sent.append(messages)
        answer = self._answer(request)
        before = self.sent[-2] if len(self.sent) > 1 else []
        same = [message for message, other in zip(messages, before, strict=False) if message == other]
        cached = sum(map(weight_of, same)) // 4
        usage = Usage(tokens, 10, cached, tokens - cached, requests=1)
        return Reply(answer, usage=usage) if isinstance(answer, str) else Reply(calls=[answer], usage=usage)


def texts(messages: list[Message]) -> str:
    return "\n".join(message.text for message in messages)


def compactions(session: Session) -> list[Any]:
    return [fact.compaction for fact in session[ConversationCompacted].all()]


def in_turn(*answers: Any, summary: str = "") -> Callable[[ModelRequest], Any]:
    """Return a function that gives these answers one after the other. A request for a summary is answered with `summary`, if that is given."""
    left = iter(answers)

    def answer(request: ModelRequest) -> Any:
        last = request.messages[-1]
        is_closing = summary and isinstance(last, UserMessage) and last.by_run
        return summary if is_closing else next(left)

    return answer
