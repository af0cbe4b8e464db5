"""Type inference for agents, which tests/project/test_types.py checks without running this file."""

from dataclasses import dataclass
from typing import Any, assert_type

from handrail import (
    Adapter,
    Agent,
    Budget,
    FileTools,
    Operation,
    Prompt,
    PromptResponse,
    ScriptedModel,
    Session,
    SqliteJournal,
    Tool,
    tool,
)


@dataclass(frozen=True)
class Report:
    title: str


@tool(effect="read")
async def fare(city: str) -> str:
    """Return the price of a ticket."""
    return city


model = ScriptedModel(["hello"])
plain = Agent("openai:gpt-5", "Answer.", tools=[fare])
typed = Agent(Adapter(model), ["Report.", FileTools()], output=Report, name="desk", description="Reports.")
of_prompt = Agent(model, Prompt("guide", "Report.", output=Report))

assert_type(plain, Agent[None])
assert_type(typed, Agent[Report])
assert_type(of_prompt, Agent[Report])
assert_type(Agent(model, "Count.", output=int).run("hi").wait().output, int)
assert_type(Agent(model, "Find.", output=Report | None), Agent[Any])
assert_type(plain.run("hi"), Operation[PromptResponse[None]])
assert_type(plain.run("hi").wait().text, str)
assert_type(typed.run("hi", session=Session(), budget=Budget(requests=1)).wait().output, Report)
assert_type(typed.run(params={"city": "Rome"}).wait().output.title, str)
assert_type(of_prompt.stream("hi").response.wait().output, Report)
assert_type(typed.resume("run", journal=SqliteJournal("runs.db")).wait().output, Report)
assert_type(typed.as_tool(), Tool[Any, Any])
assert_type(typed.name, str)

Agent("openai:gpt-5")  # expect-error: reportCallIssue
Agent(7, "Answer.")  # expect-error: reportArgumentType, reportCallIssue
Agent(model, "Answer.", tool=[fare])  # expect-error: reportCallIssue
Agent(model, Prompt("guide", "Answer."), tools=[fare])  # expect-error: reportArgumentType
plain.run(7)  # expect-error: reportArgumentType
plain.run(message="hi")  # expect-error: reportCallIssue
plain.run("hi", sesion=Session())  # expect-error: reportCallIssue
plain.stream("hi", deadline=5)  # expect-error: reportArgumentType
plain.resume("run", deadline=None)  # expect-error: reportCallIssue
plain.prompt = Prompt("other", "Answer.")  # expect-error: reportAttributeAccessIssue
wrong: str = typed.run("hi").wait().output  # expect-error: reportAssignmentType
