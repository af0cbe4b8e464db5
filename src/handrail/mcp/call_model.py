"""`CallModel`: the model of a run that consists of one call.

It makes the call and is done when the call has ended. So a client's call is recorded, parked, resumed and shown by the
same code as any other run.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from handrail.journal.records import RunRecord
from handrail.messages import (
    CallPart,
    Model,
    ModelPart,
    ModelRequest,
    StopPart,
    TextPart,
    Traits,
    Usage,
    UsagePart,
    UserMessage,
)
from handrail.models import ModelRequestRefused
from handrail.run.record.begin import decode_begin
from handrail.schema import to_json
from handrail.tools import Tool

NAME = "mcp:call"


class CallMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The user's message in a run of one call: the call, with its secrets masked, and the id of the run."""

    run_id: str
    tool: str
    arguments: msgspec.Raw

    @classmethod
    def of(cls, run_id: str, tool: Tool[Any, Any], arguments: Mapping[str, Any]) -> CallMessage:
        given = tool.mask(arguments).encode() if tool.secret else to_json(arguments)
        return cls(run_id=run_id, tool=tool.name, arguments=msgspec.Raw(given))

    @classmethod
    def read(cls, text: str | None) -> CallMessage | None:
        """Return the call that a recorded message describes; None if it is a message of a different kind."""
        try:
            return msgspec.json.decode(text or "", type=cls)
        except msgspec.DecodeError:
            return None

    @classmethod
    def of_run(cls, record: RunRecord) -> CallMessage | None:
        """Return the call that a run consists of; None if the run is of a different kind or has not begun.

        Also returns None if the run's record can't be decoded.
        """
        try:
            found = cls.read(decode_begin(record).message) if record.begin else None
        except msgspec.DecodeError:
            return None
        return found if found is not None and found.run_id == record.id else None

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()


class NoModel:
    """Stands in for the model of an app that has none. It refuses every request."""

    name = NAME
    traits = Traits()

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        raise ModelRequestRefused(NAME, "this server has no model. Serve an agent, or pass --model")
        yield StopPart("done")  # makes this a generator


class CallModel:
    """Makes the call that a message describes. Requests of runs nested in the call go to `inner`, the app's own model.

    `arguments` are the call's arguments with their secrets. If a run is resumed whose call had not been recorded yet,
    there are only the arguments in the message, in which secrets are masked. No tool accepts a masked secret, so a call
    with secrets is then refused.
    """

    def __init__(
        self, message: CallMessage, inner: Model, arguments: Mapping[str, Any] | None = None
    ) -> None:
        self._message = message
        self._text = str(message)
        self._inner = inner
        given = message.arguments if arguments is None else to_json(arguments)
        self._arguments = bytes(given).decode()
        self.name = inner.name
        self.traits = inner.traits

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        first = request.messages[0]
        if not isinstance(first, UserMessage) or first.text != self._text:
            async with aclosing(self._inner.stream(request)) as parts:
                async for part in parts:
                    yield part
            return
        if len(request.messages) == 1:
            yield CallPart(0, "call", self._message.tool, self._arguments)
            yield UsagePart(Usage())
            yield StopPart("calls")
        else:
            yield TextPart("done")
            yield UsagePart(Usage())
            yield StopPart("done")
