"""Type inference for workers, which tests/project/test_types.py checks without running this file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

from handrail import (
    Adapter,
    Operation,
    Prompt,
    PromptResponse,
    ScriptedModel,
    Session,
    Tool,
    ToolContext,
    Worker,
    WorkerContext,
    WorkerRegistry,
    tool,
)
from handrail.content import Attachment
from handrail.context import MessageCallback, RegistryView, WorkerMessage
from handrail.messages import UserMessage
from handrail.testing import worker_context
from handrail.workers import WORKER_SCHEMA, WorkerProblem

# --- the context -----------------------------------------------------------------------------------


@tool
async def in_a_worker(text: str, context: WorkerContext) -> str:
    """Do something."""
    assert_type(context.registry, RegistryView)
    assert_type(context.registry.names, tuple[str, ...])
    assert_type(context.registry.descriptions, Mapping[str, str])
    assert_type(context.creation_defaults, Mapping[str, Any])
    assert_type(context.attachments, tuple[Attachment, ...])
    assert_type(context.attachments[0].read(), bytes)
    assert_type(context.attachments[0].text(), str)
    assert_type(context.message_callback, MessageCallback | None)
    heard = WorkerMessage(("main",), UserMessage("x"))
    context.message_callback(heard)  # expect-error: reportOptionalCall
    if context.message_callback:
        context.message_callback(heard)
    assert_type(context.call_worker("parser", text, attachments=["a.txt"]), Operation[Any])
    context.attachments = ()  # expect-error: reportAttributeAccessIssue
    context.registry.run("main", text)  # expect-error: reportAttributeAccessIssue, reportUnknownMemberType
    return await context.call_worker("parser", text)


def takes_worker(context: WorkerContext) -> None: ...
def takes_any(context: ToolContext) -> None: ...


def one_is_the_other(worker: WorkerContext, any_one: ToolContext) -> None:
    takes_any(worker)
    takes_worker(any_one)  # expect-error: reportArgumentType
    takes_worker(worker_context(attachments=[Attachment(b"", "a")]))


# --- the registry ----------------------------------------------------------------------------------

registry = WorkerRegistry(Path("folder"))
assert_type(registry["main"], Worker)
assert_type(registry.workers, Mapping[str, Worker])
assert_type(registry.check(), list[WorkerProblem])
assert_type(registry.tool("main"), Tool[Any, Any])
assert_type(WorkerRegistry.of_file("folder/main.md"), tuple[WorkerRegistry, Worker])
assert_type(registry["main"].prompt, Prompt[Any])
assert_type(WORKER_SCHEMA, Path)
model = ScriptedModel(["x"])
Adapter(model, workers=registry)
Adapter(model, workers="folder")  # expect-error: reportArgumentType


async def running() -> None:
    assert_type(registry.run("main", "x", model=model, session=Session()), Operation[PromptResponse[Any]])
    assert_type((await registry.run("main", "x", models={"main": "a:b"}, approvals="strict")).text, str)
    registry.stream("main", "x", attachments=[Path("a"), "b", Attachment(b"", "c")], message_callback=print)
    registry.run("main", "x", sesion=Session())  # expect-error: reportCallIssue
    registry.run("main", "x", approvals="always")  # expect-error: reportArgumentType
    registry.run("main", {"a": 1})  # expect-error: reportArgumentType
