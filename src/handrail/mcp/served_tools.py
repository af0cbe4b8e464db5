"""`ServedTools`: the tools that a server offers, and the prompt of the runs in which they are called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from handrail.guard.policy import within_scope
from handrail.mcp.call_model import NoModel
from handrail.messages import Model
from handrail.prompt import Prompt
from handrail.run.adapter import Adapter
from handrail.tools import Tool
from handrail.tools.named_tools import without_late


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
