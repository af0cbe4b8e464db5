"""Type inference for contexts and their verbs, which tests/project/test_types.py checks without running this file."""

from collections.abc import Awaitable
from typing import Any, Literal, assert_type

from pydantic import BaseModel, TypeAdapter

from handrail import AgentContext, Deadline, Operation, ToolContext, ToolResult, UserContext
from handrail.concurrency.operation import Done
from handrail.context import (
    PROVIDER_REQUEST_ID,
    RATE_LIMIT,
    TRACING_SPAN,
    Approval,
    ExtraKey,
    PromptModel,
    RateLimit,
    WaitFor,
)
from handrail.protocols import RenderedPromptView
from handrail.testing import agent_context, headless_context, user_context


class Choice(BaseModel):
    selected: str


COLOURS = TypeAdapter[Literal["red", "blue"]](Literal["red", "blue"])

# --- verbs of an environment ---------------------------------------------------------------------


async def wherever(context: ToolContext) -> None:
    assert_type(context.wait_for, WaitFor | None)
    assert_type(context.prompt_model, PromptModel | None)
    context.wait_for("pick", {}, Choice)  # expect-error: reportOptionalCall
    context.prompt_model("pick", Choice)  # expect-error: reportOptionalCall
    if context.wait_for:
        assert_type(context.wait_for("pick", {}, Choice), Operation[Choice])
        assert_type(await context.wait_for("pick", {}, Choice), Choice)
        assert_type((await context.wait_for("pick", {}, Choice)).selected, str)
        assert_type(await context.wait_for("pick", {}, list[str], timeout=3), list[str])
        assert_type(await context.wait_for("pick", {}, COLOURS), Literal["red", "blue"])
        assert_type(await context.wait_for("pick", {}, TypeAdapter(int | str)), int | str)
        assert_type(await context.wait_for("a", 1, Literal["red"]), Literal["red"])
        assert_type(await context.wait_for("a", schema=int | None, message="Which?", title="A"), int | None)
        assert_type(await context.wait_for("pick", {}), str)
        assert_type(await context.wait_for("pick", message="Which?"), str)
        context.wait_for("pick", {}, 3)  # expect-error: reportCallIssue, reportArgumentType
    if context.prompt_model is not None:
        assert_type(await context.prompt_model("pick", Choice), Choice)
        assert_type(await context.prompt_model("pick", COLOURS, temperature=0.5), Literal["red", "blue"])
        assert_type(context.prompt_model("pick", int, on_text=print).wait(), int)
        await context.prompt_model("pick", int, temprature=1)  # expect-error: reportCallIssue
    if context.wait_for is None:
        context.wait_for("pick", {}, Choice)  # expect-error: reportOptionalCall
        return
    assert_type(context.wait_for, WaitFor)


async def with_a_person(context: UserContext) -> None:
    assert_type(context.wait_for, WaitFor)
    assert_type(await context.wait_for("pick", {}, Choice), Choice)
    context.prompt_model("pick", Choice)  # expect-error: reportOptionalCall


async def with_a_model(context: AgentContext) -> None:
    assert_type(context.prompt_model, PromptModel)
    assert_type(await context.prompt_model("pick", Choice), Choice)
    context.wait_for("pick", {}, Choice)  # expect-error: reportOptionalCall


def narrower_ones_are_contexts(user: UserContext, agent: AgentContext, plain: ToolContext) -> None:
    takes_any(user)
    takes_any(agent)
    takes_user(plain)  # expect-error: reportArgumentType
    takes_user(agent)  # expect-error: reportArgumentType


def takes_any(context: ToolContext) -> None: ...
def takes_user(context: UserContext) -> None: ...


# --- verbs that every context has ----------------------------------------------------------------


async def verbs(context: ToolContext) -> None:
    assert_type(context.request_approval("sure?"), Operation[Approval])
    assert_type(await context.request_approval("sure?"), Approval)
    assert_type((await context.request_permission("fs.write")).reason, str)
    assert_type(await context.call("search", text="x"), ToolResult[Any])
    assert_type(await context.call_worker("reviewer", {}), Any)
    assert_type(context.beat(), Done)
    assert_type(context.emit("event"), Done)
    assert_type(context.report_progress("half", done=1, total=2), Done)
    assert_type(context.ticket(), str)
    assert_type(context.require_rendered(), RenderedPromptView)

    async def pay() -> int:
        return 3

    assert_type(await context.once("pay", pay), int)
    assert_type(await context.once("pay", lambda: "sync"), str)
    await context.once("pay", pay, on_unknown="guess")  # expect-error: reportArgumentType
    if await context.request_approval("sure?"):
        await context.beat()
    context.report_progress("half", 1)  # expect-error: reportCallIssue
    approval: Awaitable[Approval] = context.request_approval("sure?")
    assert_type(await approval, Approval)


async def forgotten_await(context: ToolContext) -> int:
    if context.request_approval("sure?"):  # expect-error: reportGeneralTypeIssues
        return 1
    if not context.request_approval("sure?"):  # expect-error: reportGeneralTypeIssues
        return 2
    while context.request_permission("fs.write"):  # expect-error: reportGeneralTypeIssues
        return 3
    chosen = 4 if context.request_approval("sure?") else 5  # expect-error: reportGeneralTypeIssues
    asking = context.request_approval("sure?")
    if asking.approved:  # expect-error: reportAttributeAccessIssue, reportUnknownMemberType
        return 6
    assert context.request_approval("sure?")  # expect-error: reportGeneralTypeIssues
    return chosen


# --- members -------------------------------------------------------------------------------------


def members_are_read_only(context: ToolContext) -> None:
    context.call_id = "x"  # expect-error: reportAttributeAccessIssue
    context.deadline = None  # expect-error: reportAttributeAccessIssue
    context.session = context.session  # expect-error: reportAttributeAccessIssue
    context.wait_for = None  # expect-error: reportAttributeAccessIssue
    context.invocation.attempt = 2  # expect-error: reportAttributeAccessIssue
    context.run_context.run_id = "x"  # expect-error: reportAttributeAccessIssue
    del context.depth  # expect-error: reportAttributeAccessIssue
    context.depht()  # expect-error: reportAttributeAccessIssue, reportUnknownMemberType
    context.session.restore()  # expect-error: reportAttributeAccessIssue, reportUnknownMemberType
    context.session.commit()  # expect-error: reportAttributeAccessIssue, reportUnknownMemberType


def members(context: ToolContext) -> None:
    assert_type(context.deadline, Deadline | None)
    assert_type(context.depth, int)
    assert_type(context.invocation.path, tuple[str, ...])


def extras(context: ToolContext) -> None:
    mine = ExtraKey("mine", int)
    assert_type(mine, ExtraKey[int])
    assert_type(context.extras.get(mine), int | None)
    assert_type(context.extras.get(mine, 3), int)
    assert_type(context.extras[mine], int)
    assert_type(context.extras.get(RATE_LIMIT), RateLimit | None)
    assert_type(context.extras[PROVIDER_REQUEST_ID], str)
    assert_type(context.extras.get(PROVIDER_REQUEST_ID, "none"), str)
    assert_type(context.extras.get(TRACING_SPAN), Any | None)
    assert_type(context.extras.get("by_name"), Any)
    context.extras["mine"] = 3  # expect-error: reportIndexIssue
    context.extras.get(3)  # expect-error: reportCallIssue, reportArgumentType
    ExtraKey("mine", "int")  # expect-error: reportArgumentType


def fakes() -> None:
    assert_type(user_context({"pick": 1}), UserContext)
    assert_type(agent_context({"pick": 1}), AgentContext)
    assert_type(headless_context(), ToolContext)
    assert_type(user_context().wait_for("pick", {}, int).wait(), int)
