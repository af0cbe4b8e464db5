"""Workers that a model creates.

Each must be approved, is stored in the session, and has no rights that its creator lacks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from pydantic import Field

from handrail.agent import AgentTool
from handrail.context import ToolContext, WorkerContext
from handrail.errors import ToolValidationError
from handrail.session import kept
from handrail.tools import Effect, Tool, ToolResult, tool
from handrail.tools.definition import is_name, name_hint
from handrail.workers.front_matter import FrontMatter, Limits, ShellEntry
from handrail.workers.worker import BUILT_IN, CALL, CREATE, Worker

if TYPE_CHECKING:
    from handrail.workers.registry import WorkerRegistry


def _key(made: Any) -> tuple[str, str]:
    return (made.creator, made.name)


@kept(key=_key)
class WorkerCreated(msgspec.Struct, frozen=True):
    """A worker that another worker created. Its text is kept in the session's state, not in a file.

    If the call that created the worker is rolled back, this record is removed again.
    """

    creator: str
    """The name of the worker that created this one. Only that worker's runs can find it."""
    name: str
    text: str


class CreationRequest(msgspec.Struct, frozen=True):
    """The arguments of `create_worker`."""

    name: str
    description: str
    instructions: str
    tools: Sequence[str] | None
    workers: Sequence[str] | None
    model: str | None


def creation_tools(registry: WorkerRegistry, creator: str, effect: Effect) -> tuple[Tool[Any, Any], ...]:
    """Return the tools `create_worker` and `call_worker` for a worker that may create others."""

    @tool(
        effect="staged",
        capabilities={"worker.create"},
        accepts_overrides=False,
        description="Create a worker for this session: a separate agent with at most the tools you have.",
    )
    async def create_worker(
        name: Annotated[str, Field(description="Its name, in lower-case letters, digits, _ and -.")],
        description: Annotated[str, Field(description="What it does, in one sentence.")],
        instructions: Annotated[
            str, Field(description="Its instructions; {{ input }} stands for its input.")
        ],
        tools: Annotated[
            list[str] | None, Field(description="The names of the tools it gets, from among your own.")
        ] = None,
        workers: Annotated[
            list[str] | None,
            Field(description="The names of the workers it may call, from among those you may call."),
        ] = None,
        model: Annotated[str | None, Field(description="The model that runs it, as provider:name.")] = None,
        *,
        context: WorkerContext,
    ) -> ToolResult[str]:
        maker = registry[creator]
        text = text_for(
            registry, maker, CreationRequest(name, description, instructions, tools, workers, model)
        )
        registry.from_text(maker, name, text)
        # Approval is requested here rather than by a policy, so that no list of policies can omit it.
        approval = await context.request_approval(f"{creator} wants to create this worker:\n\n{text}")
        if not approval.approved:
            why = f": {approval.reason}" if approval.reason else ""
            return ToolResult.error(f"{name} was not created: it was not approved ({approval.outcome}){why}.")
        context.session.dispatch(WorkerCreated(creator, name, text))
        return ToolResult.ok(f"The worker {name} was created for this session. Run it with {CALL}.")

    assert create_worker.name == CREATE, "the name is kept free for it"
    return (create_worker, _call_tool(effect))


@dataclass(frozen=True)
class CreatedCall:
    # This class has no docstring, because models would see it.
    name: str
    input: str
    attachments: list[str] = field(default_factory=list[str])


def _call_tool(effect: Effect) -> Tool[Any, Any]:
    async def handler(params: CreatedCall, *, context: ToolContext) -> ToolResult[Any]:
        value = await context.call_worker(params.name, params.input, attachments=params.attachments)
        return ToolResult.ok(value)

    return AgentTool(
        CALL,
        "Run a worker that you created in this session.",
        handler,
        result=Any,
        capabilities=frozenset({"worker"}),
        effect=effect,
        accepts_overrides=False,
    )


def text_for(registry: WorkerRegistry, maker: Worker, wanted: CreationRequest) -> str:
    """Return the text of the requested worker's file. Raises `ToolValidationError` if its name or a tool is not allowed."""
    _check_name(registry, maker, wanted.name)
    defaults = maker.creation_defaults
    own = {_called(entry): entry for entry in maker.front.tools}
    tools = list(wanted.tools if wanted.tools is not None else defaults.tools or ())
    workers = list(wanted.workers if wanted.workers is not None else defaults.workers or ())
    unknown = [name for name in tools if name not in own]
    if unknown:
        raise ToolValidationError(
            f"{', '.join(unknown)}: not among your own tools, and a worker that you create may have no others. "
            f"Your tools are: {', '.join(own) or 'none'}."
        )
    front: dict[str, Any] = {
        "name": wanted.name,
        "description": wanted.description,
        "tools": [_plain(own[name]) for name in dict.fromkeys(tools)],
        "workers": list(dict.fromkeys(workers)),
        "limits": _tightest(maker.limits, defaults.limits or Limits()).model_dump(exclude_none=True),
    }
    model = wanted.model or defaults.model or maker.model
    if model is not None:
        front["model"] = model
    settings = maker.front.settings.model_dump(exclude_none=True, exclude={"tool_choice"})
    if settings and model == maker.model:
        front["settings"] = settings
    if maker.front.policies is not None:
        front["policies"] = [_plain(each) for each in maker.front.policies]
    # JSON is valid YAML, so any text that a model wrote remains a single value.
    lines = [f"{key}: {json.dumps(value)}" for key, value in front.items()]
    return "\n".join(["---", *lines, "---", wanted.instructions])


def check_rights(maker: Worker, front: FrontMatter) -> None:
    """Raise `ToolValidationError` if `maker` may not create a worker with this front matter.

    The worker may have at most the creator's tools, workers and limits, and must have the same policies. A setting that
    is given must have the creator's value. A model that is given must be the creator's, or the one in the creation
    defaults. The worker may not create workers, be locked, or commit its calls one by one. This is checked both for a
    new worker and for one from a session's state.
    """
    own = {_called(entry): entry for entry in maker.front.tools}
    more = [_called(entry) for entry in front.tools if own.get(_called(entry)) != entry]
    if more:
        raise ToolValidationError(
            f"it would get {', '.join(more)}, which {maker.name} does not have. Leave {'it' if len(more) == 1 else 'them'} out."
        )
    strangers = (
        ["*"] if front.workers == "*" else [name for name in front.workers if name not in maker.workers]
    )
    if strangers:
        there = ", ".join(maker.workers) or "none"
        raise ToolValidationError(
            f"it would call {', '.join(strangers)}, which you may not call yourself. You may call: {there}."
        )
    if front.policies != maker.front.policies:
        raise ToolValidationError(f"its policies differ from those of {maker.name}. Give it the same ones.")
    if front.create or front.locked or front.commit == "each":
        raise ToolValidationError(
            "a created worker can't create workers, be locked or commit its calls one by one. "
            "Leave out `create`, `locked` and `commit`."
        )
    if front.model not in (None, maker.model, maker.creation_defaults.model):
        known = [each for each in (maker.model, maker.creation_defaults.model) if each]
        raise ToolValidationError(
            f"the model {front.model!r} is not allowed for it. Allowed: {', '.join(known) or 'your own'}."
        )
    for name in front.settings.model_fields_set:
        if getattr(front.settings, name) not in (None, getattr(maker.front.settings, name)):
            raise ToolValidationError(f"its setting {name} differs from that of {maker.name}. Leave it out.")
    for name in Limits.model_fields:
        most, wanted = getattr(maker.limits, name), getattr(front.limits, name)
        if most is not None and (wanted is None or wanted > most):
            raise ToolValidationError(
                f"its limit on {name} must be at most {most}, the limit of {maker.name}. Set or lower it."
            )


def _check_name(registry: WorkerRegistry, maker: Worker, name: str) -> None:
    if not is_name(name):
        raise ToolValidationError(f"the name {name!r} is not allowed. {name_hint(name, 'helper')}")
    if name in registry.locked:
        raise ToolValidationError(
            f"the worker {name} is locked or its file has problems, so its name can't be used. Use another name."
        )
    if name == maker.name or name in maker.tools or name in BUILT_IN:
        raise ToolValidationError(
            f"{name!r} is your own name, or the name of one of your tools or of a built-in tool. Use another name."
        )


def _tightest(one: Limits, other: Limits) -> Limits:
    found: dict[str, Any] = {}
    for name in Limits.model_fields:
        given = [each for each in (getattr(one, name), getattr(other, name)) if each is not None]
        found[name] = min(given, default=None)
    return Limits(**found)


def _called(entry: str | ShellEntry) -> str:
    return entry if isinstance(entry, str) else "shell"


def _plain(entry: Any) -> Any:
    return entry if isinstance(entry, str) else entry.model_dump(exclude_unset=True)
