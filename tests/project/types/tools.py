"""Type inference for tools and results, which tests/project/test_types.py checks without running this file."""

from dataclasses import dataclass
from typing import Any, TypeVar, assert_type

from pydantic import BaseModel

import handrail
from handrail import (
    AgentContext,
    Tool,
    ToolContext,
    ToolExample,
    ToolResult,
    UserContext,
    environment,
    mcp,
    tool,
)
from handrail.tools import FunctionTool, legacy_handler, tool_context

R = TypeVar("R")


class Query(BaseModel):
    text: str


@dataclass
class Hit:
    title: str


# --- @tool: sync and async, plain and result -----------------------------------------------------


@tool
def sync_plain(text: str, limit: int = 3) -> list[Hit]:
    """Search."""
    return []


@tool
def sync_result(text: str) -> ToolResult[list[Hit]]:
    """Search."""
    return ToolResult.ok([])


@tool
async def async_plain(text: str, context: ToolContext) -> Hit:
    """Search."""
    return Hit(text)


@tool
async def async_result(text: str, *, context: UserContext) -> ToolResult[Hit | None]:
    """Search."""
    return ToolResult.ok(None)


@tool
def nothing() -> None:
    """Do nothing."""


def as_list(found: FunctionTool[[str, int], list[Hit]]) -> None: ...
def as_hit(found: FunctionTool[..., Hit]) -> None: ...
def as_optional(found: FunctionTool[..., Hit | None]) -> None: ...
def as_none(found: FunctionTool[[], None]) -> None: ...
def as_tool(found: Tool[Any, Hit]) -> None: ...


assert_type(sync_plain.function("x", 2), Any)
assert_type(sync_plain.function(text="x"), Any)
sync_plain.function(1)  # expect-error: reportArgumentType
sync_plain.function("x", most=2)  # expect-error: reportCallIssue
sync_plain.function()  # expect-error: reportCallIssue
sync_result.function("x")
async_plain.function("x")  # expect-error: reportCallIssue

as_hit(async_plain)
as_tool(async_plain)
as_optional(async_result)
as_none(nothing)
as_hit(sync_plain)  # expect-error: reportArgumentType
as_hit(async_result)  # expect-error: reportArgumentType
as_hit(sync_result)  # expect-error: reportArgumentType


def results() -> None:
    assert_type(result_of(sync_plain), list[Hit])
    assert_type(result_of(sync_result), list[Hit])
    assert_type(result_of(async_plain), Hit)
    assert_type(result_of(async_result), Hit | None)
    assert_type(result_of(nothing), None)
    assert_type(result_of(with_options_sync), int)
    assert_type(result_of(with_options_async), str)
    assert_type(result_of(with_options_result), list[int])
    assert_type(result_of(with_options_async_result), dict[str, Hit])


def result_of(found: FunctionTool[..., R]) -> R: ...


# --- @tool(...) with options ---------------------------------------------------------------------


@tool(timeout=3, effect="pure")
def with_options_sync(x: int) -> int:
    """Count."""
    return x


@tool(name="other", capabilities={"net"})
async def with_options_async(x: int) -> str:
    """Count."""
    return str(x)


@tool(alone=True)
def with_options_result(x: int) -> ToolResult[list[int]]:
    """Count."""
    return ToolResult.ok([x])


@tool(run_mode="agent")
async def with_options_async_result(x: int, context: AgentContext) -> ToolResult[dict[str, Hit]]:
    """Count."""
    return ToolResult.ok({})


assert_type(with_options_sync.function(1), Any)
with_options_sync.function("x")  # expect-error: reportArgumentType


@tool(effect="pur")  # expect-error: reportArgumentType
def misspelt_effect(x: int) -> int:
    """Count."""
    return x


@tool(timout=3)  # expect-error: reportCallIssue, reportUntypedFunctionDecorator
def misspelt_option(x: int) -> int:
    """Count."""
    return x


# --- Tool(handler=...) ---------------------------------------------------------------------------


def sync_handler(params: Query, *, context: ToolContext) -> ToolResult[list[Hit]]:
    return ToolResult.ok([Hit(params.text)])


async def async_handler(params: Query, *, context: ToolContext) -> ToolResult[Hit]:
    return ToolResult.ok(Hit(params.text))


async def needs_a_person(params: Hit, *, context: UserContext) -> ToolResult[str]:
    return ToolResult.ok(await context.wait_for("pick", params, str))


def needs_a_model(params: None, *, context: AgentContext) -> ToolResult[int]:
    return ToolResult.ok(context.prompt_model("how many", int).wait())


def gives_no_result(params: Query, *, context: ToolContext) -> list[Hit]:
    return []


def takes_no_context(params: Query) -> ToolResult[int]:
    return ToolResult.ok(1)


assert_type(Tool("search", "Search.", handler=sync_handler), Tool[Query, list[Hit]])
assert_type(Tool("search", "Search.", sync_handler), Tool[Query, list[Hit]])
assert_type(Tool("search", "Search.", async_handler), Tool[Query, Hit])
assert_type(Tool("search", "Search.", needs_a_person), Tool[Hit, str])
assert_type(Tool("search", "Search.", needs_a_model), Tool[None, int])
assert_type(Tool("search", "Search.", sync_handler).parse("{}"), Query)
Tool("search", "Search.", gives_no_result)  # expect-error: reportArgumentType
Tool("search", "Search.", takes_no_context)  # expect-error: reportArgumentType
Tool("search", "Search.", sync_handler).paths(Hit(""))  # expect-error: reportArgumentType
Tool("search", "Search.", sync_handler, effect="pur")  # expect-error: reportArgumentType
Tool("search", "Search.", sync_handler, run_mode="usr")  # expect-error: reportArgumentType
Tool("search", "Search.", sync_handler).name = "other"  # expect-error: reportAttributeAccessIssue
assert_type(ToolExample("One.", Query(text="x"), [Hit("x")]), ToolExample[Query, list[Hit]])
legacy_handler(lambda params: params)


@tool
@tool_context(param="ctx")
def marked(x: int, ctx: Any) -> str:
    """Count."""
    return ""


assert_type(result_of(marked), str)

# --- ToolResult ----------------------------------------------------------------------------------

assert_type(ToolResult.ok(3), ToolResult[int])
assert_type(ToolResult.ok([Hit("x")], "Found."), ToolResult[list[Hit]])
assert_type(ToolResult.ok(None).value, None)
assert_type(ToolResult.error("no"), ToolResult[Any])
assert_type(ToolResult.ok("x").render(), str)
ToolResult.ok(3).value = 4  # expect-error: reportAttributeAccessIssue


def fails() -> ToolResult[Hit]:
    return ToolResult.error("nothing found")


def widens() -> ToolResult[int | None]:
    return ToolResult.ok(3)


def is_wrong() -> ToolResult[Hit]:
    return ToolResult.ok(3)  # expect-error: reportReturnType


# --- names that the package does not have ---------------------------------------------------------

del handrail.Nonsense  # expect-error: reportAttributeAccessIssue
del environment.Nowhere  # expect-error: reportAttributeAccessIssue
del mcp.Nowhere  # expect-error: reportAttributeAccessIssue
