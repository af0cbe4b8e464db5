"""`ServedTools`: the tools that a server offers, and the prompt of the runs in which they are called."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from handrail.guard.policy import within_scope
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
from handrail.prompt import Prompt
from handrail.run.adapter import Adapter
from handrail.run.record.begin import decode_begin
from handrail.schema import to_json
from handrail.tools import Tool
from handrail.tools.toolbox import without_late

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
    """The model of a run that consists of one call: it makes the call that a message describes, and is done when that has ended.

    So a client's call is recorded, parked, resumed and shown by the same code as any other run. Requests of runs nested in the
    call go to `inner`, the app's own model.

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


class ServedTools:
    """The tools of a prompt, and further tools, such as agents and workers.

    The prompt's own policies decide on all tools. A section's policies decide on the tools of the section and of the sections
    inside it. The tools of sections that are not shown in full are not served. The tools of live sections may change at any time.
    """

    def __init__(
        self, prompt: Prompt[Any], *, adapter: Adapter | None = None, more: Iterable[Tool[Any, Any]] = ()
    ) -> None:
        self.prompt = prompt
        self._adapter = adapter or Adapter(NoModel())
        self._more = tuple(more)
        self._tools: Mapping[str, Tool[Any, Any]] = {}
        self._rendered: Any = None
        self._calls: Prompt[Any] | None = None

    @property
    def name(self) -> str:
        """The name of the prompt, under which the server's runs are recorded."""
        return self.prompt.name

    def adapter(self, model: Model | None = None) -> Adapter:
        """Return the app's own adapter, with this model if one is given."""
        return self._adapter if model is None else self._adapter.with_model(model)

    @property
    def model(self) -> Model:
        """The app's own model, for runs that are nested in calls. An app without an adapter has a `NoModel`."""
        return self._adapter.model

    async def load(self, principal: str) -> Prompt[Any]:
        """Connect the live sections, and return the prompt of a principal's run that calls one of the tools.

        The prompt has the current tools, and a fixed text. Raises a `HandrailError` if a section can't be connected, if the
        app's prompt can't be rendered, or if two tools have the same name.
        """
        await self.prompt.connect(principal)
        rendered = self.prompt.render(principal=principal)
        if rendered is self._rendered and self._calls is not None:
            return self._calls
        tools = without_late([*rendered.tools, *self._more])
        self._calls = Prompt(
            self.name,
            "An MCP client calls a tool.",
            tools=tools,
            policies=[within_scope(scoped.policy, scoped.tools) for scoped in rendered.policies],
            resources=self.prompt.resources,
        )
        self._rendered = rendered
        self._tools = {tool.name: tool for tool in tools}
        return self._calls

    async def all(self, principal: str) -> Mapping[str, Tool[Any, Any]]:
        """Return a principal's current tools, by name. Raises a `HandrailError` as `load` does."""
        await self.load(principal)
        return self._tools

    def input_schema(self, name: str) -> Mapping[str, Any] | None:
        """Return the JSON Schema of a tool's arguments, as it was when the tools were last loaded; None for an unknown tool.

        The SDK compares the headers of a call with the schema. Without this method, it would list all tools for each call.
        """
        tool = self._tools.get(name)
        return None if tool is None else tool.json_schema
