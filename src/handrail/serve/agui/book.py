"""What a translator knows of the runs and calls under way: which are shown, which are open, what they took."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from handrail.messages import Usage
from handrail.place import Place


@dataclass(slots=True)
class Known:
    """The calls that were told, and those whose results were, so that none is told twice.

    One may be shared by the runs of a thread. After a restart it is made of the messages as they were shown.
    """

    calls: set[str] = field(default_factory=set[str])
    results: set[str] = field(default_factory=set[str])

    @classmethod
    def of(cls, messages: list[dict[str, Any]]) -> Known:
        """What somebody knows who was given these messages."""
        known = cls()
        for message in messages:
            if message["role"] == "tool":
                known.results.add(message["toolCallId"])
            known.calls.update(call["id"] for call in message.get("toolCalls", ()))
        return known


@dataclass(slots=True)
class Writing:
    """A call that a model is writing."""

    id: str = ""
    name: str = ""
    arguments: str = ""
    shown: bool = False
    """Has a client been told of it? Then it is to be ended."""


@dataclass(slots=True)
class RunUnderWay:
    """A run, the outermost or a nested one, and what of it is open."""

    id: str
    tag: str | None
    """The id that its events carry; None for the outermost run, whose events carry none."""
    name: str = ""
    begun: bool = False
    turn: int = 0
    """How many answers its model has given."""
    calls: int = 0
    """How many calls these asked for."""
    text: str | None = None
    """The text of its open message."""
    thought: str | None = None
    """What its model has thought in the open span."""
    thoughts: int = 0
    writing: dict[int, Writing] = field(default_factory=dict[int, Writing])
    """The calls its model is writing, by their index."""

    @property
    def message_id(self) -> str:
        """The id of the message that its model is writing."""
        return f"{self.id}/{self.turn + 1}"

    @property
    def thought_id(self) -> str:
        return f"{self.message_id}/thought-{self.thoughts}"

    @property
    def streams(self) -> bool:
        return self.text is not None or self.thought is not None or bool(self.writing)

    def forget_answer(self) -> None:
        """What is being written is over, or came to nothing."""
        self.text = self.thought = None
        self.thoughts = 0
        self.writing.clear()


@dataclass(slots=True)
class CallUnderWay:
    """A call that is not over."""

    id: str
    tool: str
    run: RunUnderWay
    place: Place | None
    """Where it is in the run, if that is known."""
    around: str | None
    """The id of the call it is an inner call of."""
    facts: dict[str, Any]
    progress: dict[str, Any] | None = None
    usage: Usage | None = None
    cost: Decimal | None = None
