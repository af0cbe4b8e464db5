"""`ScriptedModel`: a model that follows a script. For tests, examples and documentation."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence

import msgspec

from handrail.dispatch.turn import ToolCall
from handrail.errors import DefinitionError
from handrail.messages import (
    CallPart,
    ModelPart,
    ModelRequest,
    Sent,
    StopPart,
    StopReason,
    TextPart,
    ThinkingPart,
    Traits,
    Usage,
    UsagePart,
)
from handrail.models import ModelRequestRefused
from handrail.schema import to_json

_PIECE = 8
"""Characters of a call's arguments per streamed piece."""


class Reply(msgspec.Struct, frozen=True):
    """One scripted answer, for when text or calls alone are not enough."""

    text: str = ""
    calls: Sequence[ToolCall] = ()
    thinking: str = ""
    delay: float = 0.0
    """Seconds before the first part."""
    error: Exception | None = None
    """Raised after the rest was sent."""
    stop: StopReason | None = None
    """None follows from the content. To cut the answer off, give an `error` or `cut=True`."""
    cut: bool = False
    """End the stream without a stop reason, like a lost connection."""
    pieces: Sequence[str] = ()
    """The text in the pieces it is streamed in."""
    usage: Usage = Usage(requests=1)


Scripted = str | ToolCall | Sequence[ToolCall] | Exception | Reply
"""One answer: text, a call, several calls at once, a failure, or a `Reply` with all of it."""
Script = Iterable[Scripted] | Callable[[ModelRequest], Scripted | Awaitable[Scripted]]


class ScriptedModel:
    """A model with given answers: one after the other, or from a function of each request.

        ScriptedModel([ToolCall("weather", {"city": "Oslo"}), "It rains."])

    Every request is kept in `requests` for tests to inspect. One request too many is refused.
    """

    def __init__(
        self, script: Script, *, name: str = "scripted:script", traits: Traits | None = None
    ) -> None:
        if isinstance(script, str | ToolCall | Reply):
            raise DefinitionError(f"a script is a list of answers. Write ScriptedModel([{script!r}]).")
        self.name = name
        self.traits = traits or Traits(native_output=True)
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
                self.name, f"its script has {len(self.requests) - 1} answers, and one more was requested"
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
    if isinstance(scripted, Sequence) and all(isinstance(call, ToolCall) for call in scripted):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
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
    """Split the text into words, each with the space before it."""
    start = 0
    while start < len(text):
        end = text.find(" ", start + 1)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end
