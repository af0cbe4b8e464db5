"""`DemoModel`: a fixed conversation for the folder that `handrail new` creates. It says so itself.

It needs no key, network or weights, and always does the same few things, so that a newcomer sees streamed text,
tool calls, a worker calling another, an approval with a diff, and a form.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from decimal import Decimal

from handrail.dispatch.turn import ToolCall
from handrail.errors import DefinitionError
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    Message,
    ModelPart,
    ModelRequest,
    Price,
    TextPart,
    ToolMessage,
    Traits,
    UserMessage,
)
from handrail.models.scripted import Reply, ScriptedModel

_NAME = "notes"
_PAUSE = 0.015
"""Seconds between two words, so that streaming is visible."""

WHAT_IT_IS = (
    "I am a scripted demonstration, not a language model: whatever you say, I do the same few things."
)
_REAL = "To use a real model, set `model:` in main.md, for example to openai:gpt-5."


class DemoModel:
    """Plays the part of a model in the starter folder. It is free, and says what it is."""

    def __init__(self, name: str = _NAME) -> None:
        if name != _NAME:
            raise DefinitionError(f"there is no demonstration {name!r}. The only one is {_NAME!r}.")
        self.name = f"demo:{name}"
        self.traits = Traits(Price(Decimal(0), Decimal(0)), native_output=True)

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        script = ScriptedModel([_reply(request)], name=self.name)
        async for part in script.stream(request):
            yield part
            if isinstance(part, TextPart) and request.stream:
                await asyncio.sleep(_PAUSE)


def _reply(request: ModelRequest) -> Reply:
    messages = list(request.messages)
    offered = {each.tool.name for each in request.tools}
    asked = max((at for at, each in enumerate(messages) if _is_said(each)), default=0)
    said = messages[asked].text if messages and isinstance(messages[asked], UserMessage) else ""
    results = [
        result
        for message in messages[asked:]
        if isinstance(message, ToolMessage)
        for result in message.results
    ]
    if "add_note" not in offered:
        return Reply(_review(said))
    first = not any(isinstance(message, AssistantMessage) for message in messages[:asked])
    return _next(said.strip(), results, offered, first)


def _is_said(message: Message) -> bool:
    return isinstance(message, UserMessage) and not message.by_run


def _next(said: str, results: list[CallAnswered], offered: set[str], first: bool) -> Reply:
    """Return the next step: read, get a review, ask for details by form, write, report."""
    names = [result.name for result in results]
    last = results[-1] if results else None
    if last is None:
        intro = f"{WHAT_IT_IS}\n\n" if first else ""
        return Reply(f"{intro}First I read the notes.", [ToolCall("read_notes", {})])
    if "reviewer" in offered and "reviewer" not in names:
        given = results[names.index("read_notes")].text if "read_notes" in names else last.text
        return Reply(
            "Then I ask another worker, the reviewer, about them.", [ToolCall("reviewer", {"input": given})]
        )
    if "form" in said.casefold() and "ask_for_note" in offered and "ask_for_note" not in names:
        return Reply("Here is a form: please fill it in.", [ToolCall("ask_for_note", {})])
    if "add_note" not in names:
        asked = next((result for result in results if result.name == "ask_for_note"), None)
        if asked is not None and asked.failed:
            return Reply(f"No note was added: {asked.text}")
        text = asked.text if asked is not None else said or "a note without words"
        return Reply(
            "Now I add the note. This changes a file, so it needs your approval.",
            [ToolCall("add_note", {"text": text})],
        )
    if last.failed:
        return Reply(f"The note was not added. I was told: {last.text}")
    return Reply(
        f"**Done**: the note is in `files/notes.txt`.\n\n{_REAL}"
        if first
        else "**Done**: the note is in `files/notes.txt`."
    )


def _review(said: str) -> str:
    notes = [line for line in said.splitlines() if line.startswith("- ")]
    return f"I count {len(notes)} note{'' if len(notes) == 1 else 's'}. ({WHAT_IT_IS})"
