"""Type inference for evaluations, which tests/project/test_types.py checks without running this file."""

from dataclasses import dataclass
from decimal import Decimal
from typing import Any, assert_type

from handrail import (
    Adapter,
    AgentContext,
    Budget,
    Deadline,
    Prompt,
    PromptResponse,
    ScriptedModel,
    Session,
    SqliteJournal,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    open_gate,
    tool,
)
from handrail.concurrency.operation import Operation
from handrail.run.redemption import redeem


@dataclass(frozen=True)
class Report:
    title: str


adapter = Adapter(ScriptedModel([ToolCall("weather"), "text"]))
journal = SqliteJournal("runs.db")
render: Tool[Any, Any] = Tool("render", "Render.")
plain = Prompt("plain", "Answer.")
typed = Prompt("typed", "Report.", output=Report)

assert_type(adapter.evaluate(plain, "hi"), Operation[PromptResponse[None]])
assert_type(adapter.evaluate(typed, "hi").wait().output, Report)
assert_type(adapter.evaluate(typed, "hi", session=Session()).wait().text, str)
assert_type(adapter.stream(typed, "hi").response.wait().output, Report)

adapter.evaluate("prompt", "hi")  # expect-error: reportArgumentType
adapter.evaluate(plain, "hi", sesion=Session())  # expect-error: reportCallIssue
adapter.evaluate(typed, "hi", budget=5)  # expect-error: reportArgumentType
adapter.evaluate(plain, "hi", lease=None)  # expect-error: reportCallIssue
adapter.stream(plain, "hi", dedline=Deadline.after(1))  # expect-error: reportCallIssue
adapter.stream(plain, "hi", deadline=1)  # expect-error: reportArgumentType
adapter.resume("run", plain, budget=Budget(requests=1))  # expect-error: reportCallIssue
adapter.resume_stream("run", plain, tools=render)  # expect-error: reportArgumentType
open_gate([render], sesion=Session())  # expect-error: reportCallIssue
open_gate([render], depth_limit="3")  # expect-error: reportArgumentType
wrong: str = adapter.evaluate(typed, "hi").wait().output  # expect-error: reportAssignmentType
Adapter()  # expect-error: reportCallIssue
Adapter(7)  # expect-error: reportArgumentType
Adapter("openai:gpt-5", approval="strict")  # expect-error: reportCallIssue
Adapter("openai:gpt-5", approvals="sometimes")  # expect-error: reportArgumentType


@tool
async def nested(context: ToolContext) -> str:
    """Evaluate another prompt."""
    if context.prompt_model:
        assert_type(await context.prompt_model("Report", Report), Report)
    response = await context.adapter.evaluate(typed, "hi")
    assert_type(response, PromptResponse[Report])
    assert_type(response.output.title, str)
    assert_type(response.cost, Decimal | None)
    assert_type(context.adapter.evaluate(plain, "hi"), Operation[PromptResponse[None]])
    context.adapter.evaluate(plain, "hi", session=Session())  # expect-error: reportCallIssue
    return response.text


@tool
async def standing_in(context: AgentContext) -> str:
    """Ask the model."""
    assert_type(await context.prompt_model("Report", Report, tools=[nested]), Report)
    return "done"


async def read_events() -> None:
    async for event in adapter.stream(plain, "hi"):
        assert_type(event, object)


assert_type(redeem("text", {"page": 3}, tool=render, journal=journal), Operation[ToolResult[Any]])
redeem("text", tool=render)  # expect-error: reportCallIssue
redeem("text", tool="render", journal=journal)  # expect-error: reportArgumentType
redeem(b"text", tool=render, journal=journal)  # expect-error: reportArgumentType
