"""`Agent`: a prompt and the model that runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property
from importlib import import_module
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Unpack, cast, overload

from pydantic import Field
from typing_extensions import TypeVar

from handrail.concurrency.operation import Operation
from handrail.context import ToolContext
from handrail.errors import DefinitionError, NotSupported
from handrail.messages import DEFAULT_SETTINGS, Model, ModelSettings
from handrail.prompt import Prompt, Section
from handrail.prompt.compact import AT_THE_WINDOW, Compact
from handrail.prompt.section import walk
from handrail.protocols import ToolPolicy
from handrail.run.adapter import Adapter, checked_model
from handrail.run.options import ResumeArguments, RunArguments, RunOptions, check_names
from handrail.run.response import PromptResponse, RunStream
from handrail.text.spelling import checked_arguments
from handrail.tools import EFFECTS, Effect, Tool, ToolResult

if TYPE_CHECKING:
    from handrail.mcp.server import ToolServer

OutputT = TypeVar("OutputT", default=Any)

_NAME = "agent"


@checked_arguments
@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class Agent(Generic[OutputT]):
    """A prompt with its model: `Agent("openai:gpt-5", "Answer briefly.", tools=[fare]).run("…").wait().text`.

    `model` is a model, the name of a model (`provider:name`), or an `Adapter` with its own settings. Instructions given
    as text are literal: `$5` means five dollars. Sections in the list of instructions are templates. A whole `Prompt` may be
    passed in place of instructions, name, tools, output, policies and model settings.

    The constructor raises `DefinitionError` if the definition is invalid. A missing API key or extra is reported at the
    first run.
    """

    model: Adapter | Model | str
    prompt: Prompt[OutputT]
    description: str
    """What the agent does, for the people it is served to and the models that call it; "" if it was left out."""

    @overload
    def __init__(
        self: Agent[None],
        model: Adapter | Model | str,
        instructions: str | Sequence[str | Section[Any]],
        *,
        name: str = ...,
        description: str = ...,
        tools: Iterable[Tool[Any, Any]] = ...,
        output: None = None,
        policies: Iterable[ToolPolicy] = ...,
        model_settings: ModelSettings = ...,
        compact: Compact = ...,
        result_limit: int | None = ...,
    ) -> None: ...
    @overload
    def __init__(
        self,
        model: Adapter | Model | str,
        instructions: str | Sequence[str | Section[Any]],
        *,
        name: str = ...,
        description: str = ...,
        tools: Iterable[Tool[Any, Any]] = ...,
        output: type[OutputT],
        policies: Iterable[ToolPolicy] = ...,
        model_settings: ModelSettings = ...,
        compact: Compact = ...,
        result_limit: int | None = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: Agent[Any],
        model: Adapter | Model | str,
        instructions: str | Sequence[str | Section[Any]],
        *,
        name: str = ...,
        description: str = ...,
        tools: Iterable[Tool[Any, Any]] = ...,
        output: UnionType,
        policies: Iterable[ToolPolicy] = ...,
        model_settings: ModelSettings = ...,
        compact: Compact = ...,
        result_limit: int | None = ...,
    ) -> None: ...
    @overload
    def __init__(
        self, model: Adapter | Model | str, instructions: Prompt[OutputT], *, description: str = ...
    ) -> None: ...
    def __init__(
        self,
        model: Any,
        instructions: Any,
        *,
        name: str = _NAME,
        description: str = "",
        tools: Iterable[Tool[Any, Any]] = (),
        output: Any = None,
        policies: Iterable[ToolPolicy] = (),
        model_settings: ModelSettings = DEFAULT_SETTINGS,
        compact: Compact = AT_THE_WINDOW,
        result_limit: int | None = None,
    ) -> None:
        if isinstance(model, str):
            from handrail.models.names import check_name  # a model of one's own needs no providers

            check_name(model)
        elif not isinstance(model, Adapter):
            checked_model(model)
        if not isinstance(description, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
            raise DefinitionError(f"description is {description!r}. Pass a string, or leave it out.")
        prompt: Any = instructions
        if not isinstance(instructions, Prompt):
            prompt = Prompt(
                name,
                _literal(instructions),
                tools=tools,
                output=output,
                policies=policies,
                model_settings=model_settings,
                compact=compact,
                result_limit=result_limit,
            )
        elif (name, output, model_settings, compact, result_limit) != (
            *(_NAME, None, DEFAULT_SETTINGS, AT_THE_WINDOW, None),
        ) or (tools or policies):
            raise DefinitionError(
                f"the prompt {instructions.name!r} already has a name, tools, output, policies and settings. "
                "Pass them to the Prompt, or pass the Agent its instructions as text."
            )
        for field, value in (("model", model), ("prompt", prompt), ("description", description)):
            object.__setattr__(self, field, value)

    @property
    def name(self) -> str:
        """The name of the agent's prompt."""
        return self.prompt.name

    @cached_property
    def adapter(self) -> Adapter:
        """The adapter that runs the agent. A model given by name is created when this is first read, for example by the first run."""
        return self.model if isinstance(self.model, Adapter) else Adapter(self.model)

    def run(
        self, message: str | None = None, /, *, params: object = None, **arguments: Unpack[RunArguments]
    ) -> Operation[PromptResponse[OutputT]]:
        """Run the agent until its model is done.

        `message` is the user's message. Leave it out if the instructions say what to do. `params` fills the
        templates. A second run on the same `session` continues the conversation.

        If a tool fails, the model is told, and the run continues. Raises `PromptEvaluationError` if the run can't
        continue, for example after a failed request or at a limit, `RunParked` if the run is parked, and `ConversationBusy`
        if another run uses the session.
        """
        check_names("run", RunArguments, arguments, ["message"])
        return self.adapter.evaluate(self.prompt, params, message=message, **arguments)

    def stream(
        self, message: str | None = None, /, *, params: object = None, **arguments: Unpack[RunArguments]
    ) -> RunStream[OutputT]:
        """Return a run of the agent as a stream of events, for `async for`, or `for` in a script.

        The arguments are those of `run`. The run starts when the stream is iterated or its `.response` is awaited.
        """
        check_names("stream", RunArguments, arguments, ["message"])
        return self.adapter.stream(self.prompt, params, message=message, **arguments)

    def resume(
        self, run_id: str, /, **arguments: Unpack[ResumeArguments]
    ) -> Operation[PromptResponse[OutputT]]:
        """Resume a recorded run that was parked, or whose process ended.

        Recorded work is not repeated. If the run is over, its response is returned, or its error raised, again. The
        adapter's journal is used, unless `journal` is passed.
        """
        return self.adapter.resume(run_id, self.prompt, **arguments)

    def as_tool(self) -> Tool[Any, Any]:
        """Return this agent as a tool for another agent. Each call to the tool runs the agent inside that call.

        The tool takes the prompt's params if the prompt has any, or else a `message`. The nested run uses the caller's
        budget, deadline, session, files and environment, but the agent's own model, and its workers if it has any. The
        agent's resources and extras take precedence over the caller's. Raises `DefinitionError` if the agent has no description.
        """
        if not self.description.strip():
            raise DefinitionError(
                f"the agent {self.name!r} has no description, so a model could not tell when to call it. "
                "Pass one: Agent(..., description='Looks up fares.')."
            )
        prompt = self.prompt
        tools = [*prompt.tools, *(tool for _, section in walk(prompt.sections) for tool in section.tools)]

        async def handler(params: Any, *, context: ToolContext) -> ToolResult[Any]:
            return await self._run_inside(params, context)

        return AgentTool(
            self.name,
            self.description,
            handler,
            params=prompt.params_type or AgentCall,
            result=prompt.output or str,
            capabilities=frozenset({"agent"}),
            effect=strongest(tool.effect for tool in tools),
        )

    def mcp(self, **arguments: Any) -> ToolServer:
        """Return an MCP server that offers the agent's tools: `await agent.mcp().serve_stdio()`.

        If the agent has a description, the server offers the agent itself as a tool, too. Takes the arguments of
        `handrail.mcp.ToolServer`. Needs `pip install 'handrail[mcp]'`.
        """
        serve: Any = import_module("handrail.mcp").serve_agent  # the extra `mcp` may not be installed
        return serve(self, **arguments)

    async def _run_inside(self, params: Any, context: ToolContext) -> ToolResult[Any]:
        from handrail.run.call import attempt_of

        attempt = attempt_of(context)
        if attempt is None:
            raise NotSupported("adapter", "Call the agent through a gate.")
        own = self.adapter
        options = RunOptions(workers=own.workers, resources=own.resources, extras=own.options.extras)
        if isinstance(params, AgentCall):
            options = options.replace(message=params.message)
        else:
            options = options.replace(params=params)
        response = await own.inside(attempt).run(self.prompt, options, levels=own.levels)
        return result_of(self.name, response, self.prompt.output is not None)

    def __repr__(self) -> str:
        model = self.model if isinstance(self.model, str) else getattr(self.model, "name", self.model)
        return f"Agent({model!r}, name={self.name!r})"


@dataclasses.dataclass(frozen=True)
class AgentCall:  # no docstring: it would be shown to the model
    message: Annotated[
        str, Field(description="What to ask the agent. It sees nothing else of this conversation.")
    ]


class AgentTool(Tool[Any, Any]):
    """A tool that runs an agent. Everything the agent does is nested in the tool's call."""

    delegates: ClassVar[bool] = True


def strongest(effects: Iterable[Effect]) -> Effect:
    """Return the effect of a tool that runs an agent whose tools have these effects: `idempotent` or `irreversible`.

    It is never weaker than `idempotent`. A model's answers cost money and can differ each time, so a call that runs an
    agent must not be rerun as freely as one whose effects are all in a transaction.
    """
    most = max((EFFECTS[effect].strength for effect in effects), default=0)
    return "idempotent" if most <= EFFECTS["idempotent"].strength else "irreversible"


def result_of(name: str, response: PromptResponse[Any], has_output: bool) -> ToolResult[Any]:
    """Return an agent's response as a tool result: an error if the model refused, otherwise the output or, without one, the text.

    What the model made is attached to the result.
    """
    if response.stop_reason == "refused":
        return ToolResult.error(f"{name} refused: {response.text}", attachments=response.attachments)
    return ToolResult.ok(
        response.output if has_output else response.text,
        _UNFINISHED.get(response.stop_reason, ""),
        attachments=response.attachments,
    )


_UNFINISHED = {
    "length": "Its answer was cut off because it was too long.",
    "incomplete": "It stopped before its work was complete: a completion check still objects.",
}


def _literal(instructions: Any) -> Any:
    """Return the instructions with every `$` in their texts doubled, so that it is literal."""
    if isinstance(instructions, str):
        return instructions.replace("$", "$$")
    if not isinstance(instructions, list | tuple):
        return instructions
    given = cast("Sequence[Any]", instructions)
    return [each.replace("$", "$$") if isinstance(each, str) else each for each in given]
