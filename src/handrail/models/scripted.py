"""`ScriptedModel`: a model that follows a script, for tests, examples and documentation.

`DemoModel`, the model of the folder that `handrail new` creates, follows a fixed script and tells the user so. It
needs no key, network or weights. Its script shows streamed text, tool calls, a worker that calls another, an approval with
a diff, and a form.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from decimal import Decimal

import msgspec

from handrail.content import Attachment
from handrail.errors import DefinitionError
from handrail.messages import (
    AssistantMessage,
    AttachmentPart,
    CallAnswered,
    CallPart,
    Message,
    ModelPart,
    ModelRequest,
    Price,
    Sent,
    StopPart,
    StopReason,
    Takes,
    TextPart,
    ThinkingPart,
    ToolMessage,
    Traits,
    Usage,
    UsagePart,
    UserMessage,
)
from handrail.models import ModelRequestRefused
from handrail.run.call import ToolCall
from handrail.schema import to_json
from handrail.text.spelling import checked_arguments
from handrail.tools.provider_tool import PROVIDER_TOOLS

_PIECE = 8
"""Maximum number of characters of a call's arguments in each streamed chunk."""


_EVERY = frozenset({"*/*"})
"""Matches every media type."""


class Reply(msgspec.Struct, frozen=True):
    """A scripted answer with details, such as a delay, a stop reason or an error."""

    text: str = ""
    calls: Sequence[ToolCall] = ()
    thinking: str = ""
    delay: float = 0.0
    """Seconds to wait before the first part."""
    error: Exception | None = None
    """An error to raise after the text and the calls, in place of the usage and the stop reason; None to raise nothing."""
    stop: StopReason | None = None
    """The stop reason. If None, it is `calls` for a reply with calls, and otherwise `done`."""
    cut: bool = False
    """Whether to end the stream without a stop reason, as a lost connection does."""
    pieces: Sequence[str] = ()
    """The chunks of text to yield in place of `text`."""
    usage: Usage = Usage(requests=1)
    attachments: Sequence[Attachment] = ()
    """The pictures, sounds and other files that the model makes, after the text."""


Scripted = str | ToolCall | Sequence[ToolCall] | Exception | Reply
"""One scripted answer: text, a call, several calls at once, an error, or a `Reply`."""
Script = Iterable[Scripted] | Callable[[ModelRequest], Scripted | Awaitable[Scripted]]


@checked_arguments
class ScriptedModel:
    """A model whose answers are given as a list, or by a function of each request.

        ScriptedModel([ToolCall("weather", {"city": "Oslo"}), "It rains."])

    Every request is kept in `requests` for tests to inspect. A request after the last answer in the list, or for which the
    function returns None, raises `ModelRequestRefused`. Any other answer that is not a `Scripted` raises `DefinitionError`. The
    constructor raises `DefinitionError` if `script` is a single text, call or `Reply` and not a list.
    """

    def __init__(
        self, script: Script, *, name: str = "scripted:script", traits: Traits | None = None
    ) -> None:
        if isinstance(script, str | ToolCall | Reply):
            raise DefinitionError(f"a script is a list of answers. Write ScriptedModel([{script!r}]).")
        self.name = name
        self.traits = traits or Traits(
            native_output=True, takes=Takes(_EVERY, _EVERY), provider_tools=PROVIDER_TOOLS
        )
        self._function = script if callable(script) else None
        self._answers: Iterator[Scripted] = iter(() if callable(script) else tuple(script))
        self.requests: list[ModelRequest] = []

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        self.requests.append(
            msgspec.structs.replace(request, messages=Sent(request.messages), tools=Sent(request.tools))
        )
        if self._function is not None:
            made = self._function(request)
            scripted = await made if inspect.isawaitable(made) else made
        else:
            scripted = next(self._answers, None)
        if scripted is None:
            raise ModelRequestRefused(
                self.name,
                f"its script has no answer to request {len(self.requests)}. Add one",
            )
        reply = _reply(scripted)
        if reply.delay:
            await asyncio.sleep(reply.delay)
        for part in _parts(reply, request.stream):
            yield part
        if reply.error is not None:
            raise reply.error
        yield UsagePart(reply.usage)
        if not reply.cut:
            yield StopPart(reply.stop or ("calls" if reply.calls else "done"))


def _reply(scripted: Scripted) -> Reply:
    if isinstance(scripted, Reply):
        return scripted
    if isinstance(scripted, str):
        return Reply(scripted)
    if isinstance(scripted, Exception):
        return Reply(error=scripted)
    if isinstance(scripted, ToolCall):
        return Reply(calls=(scripted,))
    if isinstance(scripted, Sequence) and all(isinstance(call, ToolCall) for call in scripted):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
        return Reply(calls=scripted)
    raise DefinitionError(
        f"a script can't contain {scripted!r}. An answer is text, a ToolCall, a list of ToolCalls, "
        "an exception, or a Reply."
    )


def _parts(reply: Reply, streamed: bool) -> Iterator[ModelPart]:
    if reply.thinking:
        yield ThinkingPart(reply.thinking)
    if reply.pieces or streamed:
        for piece in reply.pieces or _words(reply.text):
            yield TextPart(piece)
    elif reply.text:
        yield TextPart(reply.text)
    for attachment in reply.attachments:
        yield AttachmentPart(attachment)
    for index, call in enumerate(reply.calls):
        raw = call.arguments
        arguments = (
            raw if isinstance(raw, str) else (raw if isinstance(raw, bytes) else to_json(raw)).decode()
        )
        if not streamed:
            yield CallPart(index, call.id or "", call.name, arguments)
            continue
        yield CallPart(index, call.id or "", call.name)
        for start in range(0, len(arguments), _PIECE):
            yield CallPart(index, arguments=arguments[start : start + _PIECE])


def _words(text: str) -> Iterator[str]:
    """Yield the words of a string. Each keeps the space before it."""
    start = 0
    while start < len(text):
        end = text.find(" ", start + 1)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end


_NAME = "notes"
_PAUSE = 0.015
"""Seconds between two words, so that a person can see the text stream."""

WHAT_IT_IS = (
    "I am a scripted demonstration, not a language model: whatever you say, I do the same few things."
)
_REAL = "To use a real model, set `model:` in main.md, for example to openai:gpt-5."


class DemoModel:
    """A scripted model for the starter folder. It costs nothing, and tells the user that it is a demonstration."""

    def __init__(self, name: str = _NAME) -> None:
        if name != _NAME:
            raise DefinitionError(f"there is no demonstration {name!r}. The only one is {_NAME!r}.")
        self.name = f"demo:{name}"
        self.traits = Traits(Price(Decimal(0), Decimal(0)), native_output=True, takes=Takes(_EVERY, _EVERY))

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        script = ScriptedModel([_demo_reply(request)], name=self.name)
        async for part in script.stream(request):
            yield part
            if isinstance(part, TextPart) and request.stream:
                await asyncio.sleep(_PAUSE)


def _demo_reply(request: ModelRequest) -> Reply:
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
    """Return the reply for the next step: read the notes, have them reviewed, show a form if requested, add a note, report."""
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
        return Reply(f"The note was not added: {last.text}")
    return Reply(
        f"**Done**: the note is in `files/notes.txt`.\n\n{_REAL}"
        if first
        else "**Done**: the note is in `files/notes.txt`."
    )


def _review(said: str) -> str:
    notes = [line for line in said.splitlines() if line.startswith("- ")]
    return f"I count {len(notes)} note{'' if len(notes) == 1 else 's'}. ({WHAT_IT_IS})"
