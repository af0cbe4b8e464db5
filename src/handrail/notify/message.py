"""What a receiver is told: the body of a webhook, and the same in words for apprise. Never arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec

from handrail.text.rendering import counted, escape_line

_MOST_LISTED = 100
"""Maximum number of questions that one message lists. It counts the others."""
_MOST_NAMED = 5
"""Maximum number of tools that a message names in words."""

Change = Literal["opened", "reminder", "closed"]


class Item(msgspec.Struct, frozen=True):
    """What is told about one question."""

    question_id: str
    app: str
    tool: str
    """The tool that asks; "" if no tool does."""
    link: str
    asked_at: datetime
    expires_at: datetime | None = None


class Told(msgspec.Struct, frozen=True):
    """A question that a receiver was told about."""

    run_id: str
    at: float
    """When the receiver was last told, as a timestamp."""
    item: Item


class Message(msgspec.Struct, frozen=True):
    """A message to one receiver."""

    id: str
    """The same for each attempt to send the message."""
    body: bytes
    tells: tuple[str, ...] = ()
    """The ids of the open questions that it tells the receiver about."""
    ends: tuple[str, ...] = ()
    """The ids of the questions that it says are closed."""
    attempt: int = 1
    """1-based number of this attempt to send the message."""


class State(msgspec.Struct, frozen=True):
    """What a receiver was told, and the message that is on its way to it."""

    told: dict[str, Told] = {}
    """The questions that it was told about, by id, as long as no message that arrived said that they are closed."""
    message: Message | None = None
    due_at: float = 0.0
    """When something may be sent to it, as a timestamp."""


class News(msgspec.Struct, frozen=True):
    """What has happened to a question."""

    change: Change
    item: Item
    outcome: str = ""
    """How a closed question ended: `answered`, `declined`, `timed out` or `withdrawn`."""
    by: str = ""
    """Who answered a closed question; "" if nobody did."""

    def fields(self) -> dict[str, Any]:
        shown: dict[str, Any] = msgspec.to_builtins(self.item)
        if self.change == "closed":
            shown |= {"outcome": self.outcome, "by": self.by}
        return {name: value for name, value in shown.items() if value is not None}


def body_of(news: Sequence[News], *, at: datetime, waiting: int, page: str) -> bytes:
    """Return the body of a webhook: one event for one question, or a summary. `waiting` is the number of questions that still wait."""
    if len(news) == 1:
        type, data = f"question.{news[0].change}", news[0].fields()
    else:
        changes = Counter(each.change for each in news)
        type = "questions.summary"
        data = {
            **{name: changes[name] for name in ("opened", "reminder", "closed")},
            "waiting": waiting,
            "tools": Counter(each.item.tool for each in news if each.change != "closed"),
            "link": page,
            "questions": [{"change": each.change, **each.fields()} for each in news[:_MOST_LISTED]],
        }
    return msgspec.json.encode({"type": type, "timestamp": at.isoformat(), "data": data})


def words_of(body: bytes) -> tuple[str, str]:
    """Return the title and the text of a message with this body."""
    event = msgspec.json.decode(body)
    type, data = event["type"], event["data"]
    if type == "questions.summary":
        tools = Counter[str](data["tools"])
        named = ", ".join(f"{_named(tool)}: {number}" for tool, number in tools.most_common(_MOST_NAMED))
        more = ", …" if len(tools) > _MOST_NAMED else ""
        title = (
            f"{counted(data['waiting'], 'question')} wait{'s' if data['waiting'] == 1 else ''} for an answer"
        )
        lines = [
            *([f"Waiting: {named}{more}"] if named else []),
            *([f"{counted(data['closed'], 'question')} closed."] if data["closed"] else []),
        ]
        return title, "\n".join([*lines, data["link"]])
    app, tool = escape_line(data["app"]), _named(data["tool"])
    if type == "question.closed":
        by = f" by {escape_line(data['by'])}" if data["by"] else ""
        return f"{app}: closed", f"{tool}: {data['outcome']}{by}"
    still = "still waits" if type == "question.reminder" else "waits"
    return f"{app} {still} for an answer", f"{tool} {still} for an answer.\n{data['link']}"


def _named(tool: str) -> str:
    return escape_line(tool) or "a question"
