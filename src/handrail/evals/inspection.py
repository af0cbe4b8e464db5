"""Agents and tools of ours in Inspect: `inspect_agent` runs on the model that Inspect evaluates, `inspect_tools` offers tools.

Every call still goes through the gate, so policies, approvals, rollbacks and records hold. Inspect's own approval policies apply to
`inspect_tools`, in addition, but not to the calls of an `inspect_agent`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from os import PathLike
from typing import Any, Unpack, cast

import inspect_ai.agent as agents
import inspect_ai.tool as tools
import msgspec
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    GenerateConfig,
    ModelOutput,
    ModelUsage,
    get_model,
)
from inspect_ai.model import Model as ModelOfInspect
from inspect_ai.solver import TaskState
from inspect_ai.solver._task_state import sample_state  # the only way to the metadata of an agent's sample
from inspect_ai.util import store

from handrail.agent import Agent
from handrail.errors import DefinitionError
from handrail.evals import recordings
from handrail.evals.conduct import Conduct, Observer
from handrail.evals.trial import Files, Trials
from handrail.events import MessageAdded
from handrail.messages import (
    AssistantMessage,
    CallAsked,
    CallPart,
    Kept,
    Message,
    ModelPart,
    ModelRequest,
    StopPart,
    StopReason,
    TextPart,
    ThinkingPart,
    ToolMessage,
    Traits,
    Usage,
    UsagePart,
    UserMessage,
)
from handrail.models.grammar import CHAT_ID, id_for_wire, name_for_wire, object_text
from handrail.models.media import kept_data, only_in_words, said_in_words
from handrail.models.request_settings import limit_fields, settings_fields
from handrail.protocols import Environment
from handrail.run.gate import Gate
from handrail.run.options import RunArguments
from handrail.schema.references import target_of
from handrail.tools import Tool

CONDUCT = "handrail"
"""The key under which the conduct of a sample is kept in Inspect's store, and with it in the log."""
_STOPS: dict[str, StopReason] = {
    "max_tokens": "length",
    "model_length": "length",
    "content_filter": "refused",
}
_CHOICES: Mapping[str, Any] = {"required": "any", "auto": "auto", "none": "none"}
_SETTINGS: Mapping[str, Callable[[Any], Mapping[str, Any]]] = {
    "effort": lambda level: {"reasoning_effort": level},
    "verbosity": lambda level: {"verbosity": level},
    "seed": lambda seed: {"seed": seed},
    "stop": lambda texts: {"stop_seqs": [*texts]},
    "parallel_calls": lambda whether: {"parallel_tool_calls": whether},
    "tool_choice": lambda name: {"tool_choice": _CHOICES.get(name) or tools.ToolFunction(name)},
}


class InspectModel:
    """A model of Inspect as a model of Handrail. Without one, it is the model that is being evaluated.

    Inspect records its requests in the log, counts them against the limits of the sample, and retries them.
    """

    def __init__(self, model: ModelOfInspect | str | None = None) -> None:
        self._model = get_model(model)
        self.name = f"inspect:{self._model}"
        self.traits = Traits()

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        fields = limit_fields(request, "max_tokens") | settings_fields(self.name, request, _SETTINGS)
        choice = fields.pop("tool_choice", "any" if request.must_call else None)
        system = [ChatMessageSystem(content=request.system)] if request.system else []
        output = await self._model.generate(
            [*system, *messages_of(self.name, request.messages)],
            [_info(offered.tool) for offered in request.tools],
            choice if len(request.tools) else None,
            GenerateConfig(**fields),
        )
        for part in _parts(self.name, output):
            yield part


def _parts(model: str, output: ModelOutput) -> list[ModelPart]:
    message, parts = output.message, list[ModelPart]()
    for content in [] if isinstance(message.content, str) else message.content:
        if content.type == "reasoning":
            parts.append(ThinkingPart(content.summary or content.reasoning))
    if message.text:
        parts.append(TextPart(message.text))
    calls = message.tool_calls or []
    for index, call in enumerate(calls):
        # what can't be parsed is sent on as it is, so that the gate refuses it and the model is told
        arguments = json.dumps(call.arguments) if call.parse_error is None else "not valid JSON"
        parts.append(CallPart(index, call.id, call.function, arguments))
    used = output.usage or ModelUsage()
    cached, written = used.input_tokens_cache_read or 0, used.input_tokens_cache_write or 0
    parts.append(
        UsagePart(Usage(used.input_tokens + cached + written, used.output_tokens, cached, written, 1))
    )
    kept = None
    if not isinstance(message.content, str):  # signed thinking, for example
        kept = Kept(model, message.model_dump_json(exclude_none=True).encode())
    parts.append(StopPart("calls" if calls else _STOPS.get(output.stop_reason, "done"), kept))
    return parts


def messages_of(model: str, messages: Any) -> list[ChatMessage]:
    """Convert a conversation to Inspect's messages."""
    found: list[ChatMessage] = []
    for message in cast("list[Message]", messages):
        if isinstance(message, UserMessage):
            found.append(ChatMessageUser(content=only_in_words(message.text, message.attachments)))
        elif isinstance(message, AssistantMessage):
            kept: Any = kept_data(message, model)
            fields = {} if kept is None else {"content": kept["content"]}
            calls = [_call(call) for call in message.calls]
            text = said_in_words(message, Traits().takes)
            found.append(
                ChatMessageAssistant.model_validate({"content": text, "tool_calls": calls or None, **fields})
            )
        else:
            found += _results(message)
    return found


def _call(call: CallAsked) -> tools.ToolCall:
    return tools.ToolCall(
        id=id_for_wire(call.id, CHAT_ID),
        function=name_for_wire(call.name),
        arguments=json.loads(object_text(call.arguments)),
    )


def _results(message: ToolMessage) -> list[ChatMessage]:
    return [
        ChatMessageTool(
            content=only_in_words(each.text, each.attachments),
            tool_call_id=id_for_wire(each.id, CHAT_ID),
            function=name_for_wire(each.name),
            error=tools.ToolCallError("unknown", each.text) if each.failed else None,
        )
        for each in message.results
    ]


def _info(tool: Tool[Any, Any]) -> tools.ToolInfo:
    schema = {word: part for word, part in tool.json_schema.items() if word != "$defs"}
    parameters = tools.ToolParams.model_validate(_inlined(schema, tool.json_schema, ()))
    return tools.ToolInfo(name=tool.name, description=tool.description, parameters=parameters)


def _inlined(part: Any, root: Mapping[str, Any], around: tuple[str, ...]) -> Any:
    """Return a schema in the words that Inspect has: without `$ref`, `const` and `oneOf`. A type inside itself may then be anything."""
    if isinstance(part, list):
        return [_inlined(each, root, around) for each in cast("list[Any]", part)]
    if not isinstance(part, Mapping):
        return part
    schema = dict(cast("Mapping[str, Any]", part))
    reference = schema.pop("$ref", None)
    if isinstance(reference, str):
        target: Any = {} if reference in around else target_of(reference, root)
        return _inlined({**target, **schema}, root, (*around, reference))
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    if "oneOf" in schema:
        schema["anyOf"] = schema.pop("oneOf")
    return {word: _inlined(each, root, around) for word, each in schema.items()}


# --- agents ---------------------------------------------------------------------------------------------


def inspect_agent(
    agent: Agent[Any],
    *,
    files: Files | None = None,
    person: Callable[[Any], Environment] | None = None,
    **arguments: Unpack[RunArguments],
) -> agents.Agent:
    """Return an agent as an agent of Inspect, for a task's `solver`. It runs on the model that Inspect evaluates.

    Each sample has a fresh session and fresh files. `files` and `person` are those of `AgentTask`; a function is passed the sample's
    state. The sample's last message is the user's, and those before it are the history. What the agent did is in the store, for
    `conduct_of`, also if the run fails. Raises `DefinitionError` for a sample with a system message, since the agent has its own instructions.
    """
    trials = Trials(agent, files, person, arguments)

    async def execute(state: agents.AgentState) -> agents.AgentState:
        sample, model = sample_state(), InspectModel()
        message, history = _opening(state.messages)
        async with trials.open(sample, None if sample is None else sample.metadata) as trial:
            try:
                response = await trial.run(message, agent.adapter.with_model(model), history=history or None)
            finally:  # what was done before an error or a limit is scored too
                store().set(CONDUCT, msgspec.to_builtins(trial.observer.conduct))
                root = [each for each in trial.session[MessageAdded].all() if each.conversation == "root"]
                said = [each.message for each in root[len(history) + 1 :]]
                state.messages = [*state.messages, *messages_of(model.name, said)]
        state.output = ModelOutput.from_content(model.name, response.text)
        return state

    @agents.agent(name=agent.name, description=agent.description or None)
    def handrail_agent() -> agents.Agent:
        return execute

    return handrail_agent()


def _opening(messages: list[ChatMessage]) -> tuple[str, list[Message]]:
    """Return the user's message with which a sample ends, and the messages before it."""
    history: list[Message] = []
    for message in messages:
        is_text = isinstance(message.content, str) or all(each.type == "text" for each in message.content)
        if not isinstance(message, ChatMessageUser | ChatMessageAssistant) or not is_text:
            raise DefinitionError(
                f"a sample has a {message.role} message that an agent can't be given. Use user and assistant messages with text."
            )
        kind = UserMessage if isinstance(message, ChatMessageUser) else AssistantMessage
        history.append(kind(message.text))
    if not history or not isinstance(history[-1], UserMessage):
        raise DefinitionError("a sample does not end with a user's message. Add one to its input.")
    return history[-1].text, history[:-1]


def conduct_of(state: TaskState) -> Conduct:
    """Return what the agent or the tools did in a sample, for a scorer. Raises `DefinitionError` if the sample ran neither."""
    found = state.store.get(CONDUCT)
    if found is None:
        raise DefinitionError(
            f"sample {state.sample_id!r} ran no agent of Handrail. Use inspect_agent or inspect_tools in the task."
        )
    return msgspec.convert(found, Conduct)


def recorded_sample(path: str | PathLike[str]) -> Sample:
    """Return a run that `handrail runs export RUN PATH --case` has exported, as a sample.

    Its input is the recorded message, and its target the recorded answer. In an `inspect_agent`, it has the recorded files. Raises
    what `recorded_case` raises.
    """
    found = recordings.read(path)
    return Sample(found.message, target=found.text, id=found.name, metadata=found.metadata)


# --- tools ----------------------------------------------------------------------------------------------


def inspect_tools(open: Callable[[], Gate]) -> list[tools.Tool]:
    """Return the tools of a gate as tools of Inspect, for `react` and others: `inspect_tools(lambda: open_gate([fare]))`.

    `open` is called once for the definitions of the tools, and then for each sample, which has a gate of its own. A call that fails is an error that the
    model is told. What the calls did is in the store, for `conduct_of`.
    """
    gates: dict[str, tuple[Gate, Observer]] = {}

    def gate_of_sample() -> tuple[Gate, Observer]:
        sample = sample_state()
        key = "" if sample is None else sample.uuid
        if key not in gates:
            gate = open()
            files: Any = gate.run.world.filesystem
            gates[key] = gate, Observer(gate.run.session, files)
        return gates[key]

    def converted(tool: Tool[Any, Any]) -> tools.Tool:
        async def execute(**kwargs: Any) -> str:
            gate, observer = gate_of_sample()
            result = await gate.invoke(tool.name, kwargs)
            store().set(CONDUCT, msgspec.to_builtins(observer.conduct))
            if not result.success:
                raise tools.ToolError(result.render())
            return result.render()

        info = _info(tool)
        return tools.ToolDef(execute, info.name, info.description, info.parameters).as_tool()

    return [converted(tool) for tool in open().run.tools.values()]
