"""Type inference for handoffs, which tests/project/test_types.py checks without running this file."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, assert_type

from handrail import (
    AgentContext,
    AgentEnvironment,
    Handoff,
    HeadlessEnvironment,
    Operation,
    Parked,
    Prompt,
    ScriptedModel,
    Session,
    Tool,
    ToolContext,
    ToolResult,
    UserContext,
    open_gate,
    run_as_agent,
)
from handrail.protocols import Environment
from handrail.testing import agent_context, user_context


@dataclass(frozen=True)
class Deal:
    cards: int


@dataclass(frozen=True)
class Deck:
    cards: list[str]


@dataclass(frozen=True)
class Offer:
    backs: int


@dataclass(frozen=True)
class Pick:
    index: int


# --- a handoff and its acts ------------------------------------------------------------------------

pick_card = Handoff("pick_card", "Let the other side pick a card.", params=Deal, answer=Pick)
assert_type(pick_card, Handoff[Deal, Pick])
assert_type(Handoff("ask", "Ask."), Handoff[None, Any])
assert_type(Handoff("ask", "Ask.", params=Deal), Handoff[Deal, Any])

parked = Parked(Deck(["ace"]), Offer(1))
assert_type(parked, Parked[Deck, Offer])
assert_type(parked.private, Deck)
assert_type(parked.public, Offer)


@pick_card.before
async def deal(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
    return Parked(Deck(["ace"] * params.cards), Offer(params.cards))


@pick_card.client
async def choose(offer: Offer, *, context: ToolContext) -> Pick:
    if context.prompt_model:
        return await context.prompt_model("Choose", Pick)
    return Pick(0)


@pick_card.after
async def settle(deck: Deck, pick: Pick, *, params: Deal, context: ToolContext) -> ToolResult[str]:
    return ToolResult.ok(deck.cards[pick.index])


# The decorated functions keep their types, so that a test can call them.
async def unit_tests() -> None:
    assert_type(await deal(Deal(1), context=user_context()), Parked[Deck, Offer])
    assert_type(await choose(Offer(1), context=agent_context({"Choose": {"index": 0}})), Pick)
    assert_type(await settle(Deck([]), Pick(0), params=Deal(1), context=user_context()), ToolResult[str])
    await choose(Deck([]), context=agent_context())  # expect-error: reportArgumentType
    await choose(Offer(1))  # expect-error: reportCallIssue
    await settle(Deck([]), Pick(0), context=user_context())  # expect-error: reportCallIssue


# --- acts may be sync, finish early, or require a person -------------------------------------------

either = Handoff("either", "Ask, or do not.", params=Deal)


@either.before
def begin(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer] | ToolResult[str]:
    return Parked(Deck([]), Offer(0)) if params.cards else ToolResult.ok("none")


@either.client
def with_a_person(offer: Offer, *, context: UserContext) -> Pick:
    return context.wait_for("pick", offer, Pick).wait()


@either.after
def end(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
    return ToolResult.ok("done")


assert_type(begin(Deal(1), context=user_context()), Parked[Deck, Offer] | ToolResult[str])

maybe = Handoff("maybe", "Ask, or do not, later.", params=Deal)


@maybe.before
async def begin_later(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer] | ToolResult[str]:
    return Parked(Deck([]), Offer(0)) if params.cards else ToolResult.ok("none")


@maybe.client
async def with_a_model(offer: Offer, *, context: AgentContext) -> Pick:
    return await context.prompt_model("Choose", Pick)


# --- errors -----------------------------------------------------------------------------------------

wrong = Handoff("wrong", "Everything is wrong with it.", params=Deal)


@wrong.before  # expect-error: reportArgumentType
async def parks_nothing(params: Deal, *, context: ToolContext) -> Offer:
    return Offer(1)


@wrong.before  # expect-error: reportArgumentType
async def takes_another(params: Offer, *, context: ToolContext) -> Parked[Deck, Offer]:
    return Parked(Deck([]), Offer(1))


@wrong.after  # expect-error: reportArgumentType
async def gives_no_result(deck: Deck, pick: Pick, *, context: ToolContext) -> str:
    return "done"


Handoff("wrong", "Wrong.", effect="harmless")  # expect-error: reportArgumentType
Handoff("wrong", "Wrong.", run_mode="browser")  # expect-error: reportArgumentType
Handoff("wrong", "Wrong.", parms=Deal)  # expect-error: reportCallIssue

# --- a handoff is a tool, and a model can play its client act ---------------------------------------

as_tool: Tool[Deal, Any] = pick_card
Prompt("p", "Go.", tools=[pick_card])
open_gate([pick_card], environment=AgentEnvironment(ScriptedModel([])))
somebody: Environment = AgentEnvironment("openai:gpt-5")
nobody: Environment = HeadlessEnvironment()
Session(run_mode="agent")
Session(run_mode="browser")  # expect-error: reportArgumentType

model = ScriptedModel([])
assert_type(run_as_agent(pick_card, Offer(1), model=model), Operation[Pick])
assert_type(run_as_agent(pick_card, {"backs": 1}, Deal(1), model="openai:gpt-5").wait().index, int)
run_as_agent(pick_card, Offer(1))  # expect-error: reportCallIssue
kept: Callable[[Deal], Coroutine[Any, Any, Any]] = deal  # expect-error: reportAssignmentType
