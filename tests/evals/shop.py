"""A clerk in Inspect, on a mock model: an agent of ours, and our tools in Inspect's own agent."""

from dataclasses import dataclass
from typing import Any

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageUser,
    ModelOutput,
    ModelUsage,
    get_model,
)
from inspect_ai.scorer import Score, Target, accuracy, includes, scorer
from inspect_ai.solver import TaskState

from handrail import Agent, CapabilityPolicy, MemoryFilesystem, ScriptedModel, ToolContext, open_gate, tool
from handrail.evals import conduct_of, inspect_agent, inspect_tools, recorded_sample
from handrail.testing import Person


@dataclass(frozen=True)
class Note:
    text: str


@tool(effect="staged", capabilities={"money"})
async def refund(order: str, cents: int, note: Note, context: ToolContext) -> str:
    """Refund an order.

    Args:
        order: The order's number.
        cents: How much.
        note: A note.
    """
    context.filesystem.append("ledger.txt", f"{order} {cents}\n")
    if cents > 10_000:
        raise ValueError("more than it cost")
    return "refunded"


POLICIES = [CapabilityPolicy({"money": "ask"}, name="till")]
FILES = {"ledger.txt": ""}


def person(_: object = None) -> Person:
    return Person(approve=lambda question: question.payload["arguments"]["cents"] != 666)


clerk = Agent(ScriptedModel([]), "Serve.", name="clerk", tools=[refund], policies=POLICIES)


def said_by(result: Any) -> str:
    return result.error.message if result.error else result.text


def answer(messages: list[Any], tools: list[Any], tool_choice: Any, config: Any) -> ModelOutput:
    """Refund what the user's message says, then tell how that went."""
    usage = ModelUsage(input_tokens=10, output_tokens=5, total_tokens=15)
    said = next(each.text for each in messages if each.role == "user" and each.text.startswith("Refund"))
    results = [each for each in messages if each.role == "tool"]
    if results:
        reply = ModelOutput.from_content("mock", f"It said: {said_by(results[-1])}")
        if "submit" in [each.name for each in tools]:
            reply = ModelOutput.for_tool_call(
                "mock", "submit", {"answer": f"It said: {said_by(results[-1])}"}
            )
    else:
        reply = ModelOutput.for_tool_call(
            "mock", "refund", {"order": "a1", "cents": int(said.split()[-1]), "note": {"text": ""}}
        )
    reply.usage = usage
    return reply


DATASET = [
    Sample("Refund 500", target="refunded", id="approved"),
    Sample("Refund 666", target="not approved", id="denied"),
    Sample("Refund 50000", target="more than it cost", id="undone"),
]


@scorer(metrics=[accuracy()])
def ledger():
    """The ledger has exactly what was refunded."""

    async def score(state: TaskState, target: Target) -> Score:
        conduct = conduct_of(state)
        [call] = conduct.calls
        explanation = f"{call.status} by {call.policy}, asked {[each.approved for each in call.asks]}, undone {len(call.undone)}"
        expected = {"ledger.txt": "a1 500\n"} if state.sample_id == "approved" else {}
        return Score(value=conduct.files == expected, explanation=explanation)

    return score


def as_inspect_agent() -> Any:
    return inspect_agent(clerk, files=FILES, person=person, temperature=0.5)


def made(solver: Any, dataset: list[Sample] = DATASET, **limits: Any) -> Task:
    model = get_model("mockllm/model", custom_outputs=answer)
    return Task(dataset=dataset, solver=solver, scorer=[includes(), ledger()], model=model, **limits)


@task
def as_agent() -> Task:
    return made(as_inspect_agent())


@task
def as_tools() -> Task:
    return made(
        react(
            tools=inspect_tools(
                lambda: open_gate(
                    [refund], policies=POLICIES, filesystem=MemoryFilesystem(FILES), environment=person()
                )
            )
        )
    )


@task
def limited() -> Task:
    return made(as_inspect_agent(), [DATASET[0]], token_limit=20)


@task
def wrong() -> Task:
    messages: list[ChatMessage] = [ChatMessageSystem(content="Be rude."), ChatMessageUser(content="Refund 5")]
    return made(as_inspect_agent(), [Sample(messages, id="wrong")])


@task
def continued() -> Task:
    before: list[ChatMessage] = [ChatMessageUser(content="Hello."), ChatMessageAssistant(content="Hi.")]
    sample = Sample([*before, ChatMessageUser(content="Refund 500")], target="refunded", id="approved")
    return made(as_inspect_agent(), [sample])


@task
def recorded() -> Task:
    return made(as_inspect_agent(), [recorded_sample("clerk.case.json")])
