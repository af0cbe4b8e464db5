"""Apps as MCP servers: which tools an agent, a prompt, a worker or a folder of workers offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from handrail.agent import Agent
from handrail.errors import DefinitionError
from handrail.mcp.served_tools import NoModel
from handrail.mcp.server import ToolServer
from handrail.messages import Model
from handrail.prompt import MarkdownSection, Prompt, Section
from handrail.prompt.section import LiveSection, condition_of
from handrail.run.adapter import Adapter
from handrail.serve.sources import load_app_module
from handrail.tools import Tool


class App(NamedTuple):
    """An app that is served: the tools of a prompt, and further tools."""

    prompt: Prompt[Any]
    adapter: Adapter | None = None
    more: tuple[Tool[Any, Any], ...] = ()
    authenticate: Callable[..., Any] | None = None
    """The app's own hook, which returns the principal who sent a request; None if the app has none."""
    folder: Path | None = None
    """The folder of the workers, if the app is a worker or a folder of workers; otherwise None."""
    sections: tuple[Section[Any], ...] = ()
    """The sections that are served as MCP prompts."""


def app_of(found: Any, adapter: Adapter | None = None) -> App:
    """Return an agent or a prompt as an app. An agent that has a description is also served as a tool.

    `adapter` is for a prompt. An agent has its own.
    """
    prompt: Any = found
    more: tuple[Tool[Any, Any], ...] = ()
    if isinstance(found, Agent):
        agent = cast("Agent[Any]", found)
        prompt, adapter = agent.prompt, agent.adapter
        more = (agent.as_tool(),) if agent.description.strip() else ()
    return App(_without_params(prompt), adapter, more, sections=prompt.sections)


def _without_params(prompt: Prompt[Any]) -> Prompt[Any]:
    """Return a prompt that can be rendered without params: the prompt itself, if it takes none.

    Otherwise, this is a new prompt with the same tools, policies and resources. Its sections have no text. They are enabled
    as before, except that a condition that may read the params counts as true. None of them is closed.
    """
    if prompt.params_type is None:
        return prompt
    return Prompt(
        prompt.name,
        [_section_without_params(section) for section in prompt.sections],
        tools=prompt.tools,
        policies=prompt.policies,
        resources=prompt.resources,
    )


def _section_without_params(section: Section[Any]) -> Section[Any]:
    children = [_section_without_params(child) for child in section.children]
    enabled = True if condition_of(section, "enabled").may_read_params else section.enabled
    if isinstance(section, LiveSection):
        return _LiveTools(section, children, enabled)
    return MarkdownSection(
        section.title,
        section.key,
        "",
        tools=section.tools,
        policies=section.policies,
        children=children,
        enabled=enabled,
    )


class _LiveTools(LiveSection):
    """The tools and policies of a live section, without its text."""

    _source: LiveSection

    def __init__(self, source: LiveSection, children: Sequence[Section[Any]], enabled: Any) -> None:
        super().__init__(
            source.title, source.key, "", policies=source.policies, children=children, enabled=enabled
        )
        object.__setattr__(self, "_source", source)

    async def connect(self, principal: str) -> None:
        await self._source.connect(principal)

    def current_tools(self, principal: str) -> tuple[Tool[Any, Any], ...]:
        return self._source.current_tools(principal)


def serve_agent(agent: Agent[Any], **arguments: Any) -> ToolServer:
    """Return an agent as a server. `Agent.mcp` calls this."""
    app = app_of(agent)
    return ToolServer(app.prompt, adapter=app.adapter, more=app.more, sections=app.sections, **arguments)


def load_app(named: str, model: Model | None = None) -> App:
    """Load an app: a module (`pkg.mod`, `pkg.mod:agent`, `app.py`), a worker's file, or a folder of workers.

    Raises `DefinitionError` if it can't be loaded, or if there is nothing to serve in it.
    """
    path = Path(named)
    if path.is_dir() or path.suffix == ".md":
        return _workers_at(path, model)
    where, _, attribute = named.partition(":")
    module = load_app_module(where)
    found: Any = getattr(module, attribute or ("prompt" if hasattr(module, "prompt") else "agent"), None)
    if not isinstance(found, Agent | Prompt):
        raise DefinitionError(f"{named} has no prompt or agent to serve. Name one, as {where}:NAME.")
    app = app_of(found, getattr(module, "adapter", None))
    if model is not None:
        adapter = Adapter(model) if app.adapter is None else app.adapter.with_model(model)
        app = app._replace(adapter=adapter)
    return app._replace(authenticate=getattr(module, "authenticate", None))


def _workers_at(path: Path, model: Model | None) -> App:
    from handrail.workers import WorkerRegistry

    folder = path if path.is_dir() else path.parent
    registry = WorkerRegistry(folder)
    names = registry.names if path.is_dir() else (WorkerRegistry.worker_at(path).name,)
    if not names:
        raise DefinitionError(
            f"the folder {str(path)!r} has no workers to serve. Name another folder; `handrail new demo` creates one."
        )
    prompt = Prompt(folder.resolve().name, "Call a worker.", tools=[registry.tool(name) for name in names])
    return App(prompt, Adapter(model or NoModel(), workers=registry), folder=folder)
