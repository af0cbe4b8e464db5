"""Environments: the run modes of tools, sessions and environments, and models in place of people."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from handrail import (
    Adapter,
    AgentContext,
    AgentEnvironment,
    Budget,
    CallFailed,
    CapabilityPolicy,
    Deadline,
    Handoff,
    HeadlessEnvironment,
    MemoryFilesystem,
    Operation,
    Parked,
    Prompt,
    PromptEvaluationError,
    ScriptedModel,
    Session,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    UserContext,
    open_gate,
    run_as_agent,
    tool,
)
from handrail.errors import Declined, DefinitionError, ToolValidationError
from handrail.events import ModelResponded, ToolInvoked
from handrail.messages import Usage
from handrail.models.scripted import Reply
from handrail.protocols import Environment
from handrail.question import Question
from handrail.session import load, save
from handrail.testing import Agent, Nobody, Person, VirtualClock, agent_context, user_context
from handrail.tools import RunMode
from support.cards import Deal, Deck, Offer, Pick, card_game
from support.rig import Rig
from support.texts import NO_PARAMS


@dataclass(frozen=True)
class Step:
    """An event that a test's act emits."""

    name: str
    number: int


SAYS = '{"index": 1}'
MODES: list[RunMode] = ["user", "agent", "headless"]


async def whoever(offer: Offer, *, context: ToolContext) -> Pick:
    """Ask the person or the model, or use a default if there is neither."""
    assert context.wait_for is None or context.prompt_model is None
    if context.wait_for:
        return await context.wait_for("which", offer, Pick)
    if context.prompt_model:
        return await context.prompt_model("Choose", Pick)
    return Pick(2)


CAME: dict[RunMode, str] = {"user": "card 0", "agent": "card 1", "headless": "card 2"}


def play(game: Handoff[Any, Any], environment: Environment | None, session: Session) -> ToolResult[Any]:
    """Call the handoff in a run that has a model, and return its result."""
    model = ScriptedModel(
        lambda request: ToolCall("pick_card") if len(request.messages) == 1 and request.tools else SAYS
    )
    Adapter(model, environment=environment).evaluate(
        Prompt("p", "Play.", tools=[game]), session=session, filesystem=MemoryFilesystem()
    ).wait()
    return session[ToolInvoked].all()[-1].result


def person() -> Person:
    return Person(approve=True, answers={"which": {"index": 0}, "pick_card": {"index": 0}})


@pytest.mark.parametrize("of_environment", [None, *MODES])
@pytest.mark.parametrize("of_session", [None, *MODES])
@pytest.mark.parametrize("of_tool", [None, *MODES])
@pytest.mark.parametrize("with_client", [True, False], ids=["with a client", "without"])
def test_the_tool_then_the_session_then_the_environment_says_whose_place_is_taken(
    of_tool: RunMode | None, of_session: RunMode | None, of_environment: RunMode | None, with_client: bool
) -> None:
    """A tool's run mode takes precedence over the session's, which takes precedence over the environment's.

    Without a mode, or with `user` and no person, nobody is asked.
    """
    there: dict[RunMode | None, Environment | None] = {
        None: None,
        "user": person(),
        "agent": Agent(),
        "headless": Nobody(),
    }
    mode = of_tool or of_session or of_environment or "headless"
    if mode == "user" and of_environment != "user":
        mode = "headless"
    game = card_game(client=whoever if with_client else None, run_mode=of_tool)
    result = play(game, there[of_environment], Session(run_mode=of_session))
    if with_client or mode != "headless":
        assert result.value == CAME[mode]
    else:
        assert "needs 'somebody to answer'" in result.message


def test_a_session_keeps_its_run_mode_and_refuses_another() -> None:
    """A session's run mode is saved and loaded with it, and an invalid one is refused."""
    assert load(save(Session(run_mode="agent"))).run_mode == "agent"
    assert load(save(Session())).run_mode is None
    wrong: Any = "browser"
    with pytest.raises(DefinitionError, match="run_mode is 'browser'"):
        Session(run_mode=wrong)


def test_a_session_in_which_a_model_chooses_and_a_person_approves() -> None:
    """The session's run mode decides who answers the handoff, while the environment's person still approves."""
    somebody = person()
    session = Session(run_mode="agent")
    model = ScriptedModel(
        lambda request: ToolCall("pick_card") if len(request.messages) == 1 and request.tools else SAYS
    )
    Adapter(model, environment=somebody).evaluate(
        Prompt("p", "Play.", tools=[card_game(effect="irreversible")], policies=[CapabilityPolicy()]),
        session=session,
        filesystem=MemoryFilesystem(),
    ).wait()
    assert session[ToolInvoked].all()[-1].result.value == "card 1"
    assert [each.kind for each in somebody.questions] == ["approval"]


# --- agent environments ----------------------------------------------------------------------------


def test_a_model_in_a_persons_place_may_be_another_than_the_runs() -> None:
    """`AgentEnvironment(model)` asks its own model, whose usage counts towards the run."""
    asking = ScriptedModel(
        [Reply(calls=[ToolCall("pick_card")], usage=Usage(1, 1)), Reply("Done.", usage=Usage(2, 2))]
    )
    standing_in = ScriptedModel([Reply(SAYS, usage=Usage(40, 4))], name="scripted:other")
    session = Session()
    response = (
        Adapter(asking, environment=AgentEnvironment(standing_in))
        .evaluate(Prompt("p", "Play.", tools=[card_game()]), session=session, filesystem=MemoryFilesystem())
        .wait()
    )
    assert session[ToolInvoked].all()[-1].result.value == "card 1"
    assert (len(asking.requests), len(standing_in.requests)) == (2, 1)
    assert response.usage == Usage(43, 7)
    assert [each.model for each in session[ModelResponded].all()] == [
        "scripted:script",
        "scripted:other",
        "scripted:script",
    ]


def test_without_a_model_of_its_own_the_runs_model_stands_in() -> None:
    """With `AgentEnvironment()`, the run's model is asked. At a gate without a model, the call fails."""
    assert play(card_game(), AgentEnvironment(), Session()).value == "card 1"
    result = open_gate([card_game()], environment=AgentEnvironment(), filesystem=MemoryFilesystem())
    assert "needs 'somebody to answer'" in result.invoke("pick_card").wait().message


def test_a_model_is_told_what_the_handoff_is_and_shown_the_public_part() -> None:
    """For a handoff without a client, the model is given the handoff's description and its public part."""
    model = ScriptedModel([SAYS])
    gate = open_gate([card_game()], environment=AgentEnvironment(model), filesystem=MemoryFilesystem())
    assert gate.invoke("pick_card", {"cards": 2}).wait().value == "card 1"
    [request] = model.requests
    assert request.messages[-1].text == "Let the other side pick a card.\n\nYou are shown:\n" + '{"backs":2}'  # pyright: ignore
    assert "stand in for a person" in request.system
    assert request.output is not None
    assert request.output.json_schema["properties"] == {"index": {"type": "integer"}}


def test_a_model_gets_to_correct_an_answer_that_does_not_fit() -> None:
    """A model whose answer is invalid is asked again, and its corrected answer is used."""
    model = ScriptedModel(['{"index": "one"}', SAYS])
    gate = open_gate([card_game()], environment=AgentEnvironment(model), filesystem=MemoryFilesystem())
    assert gate.invoke("pick_card").wait().value == "card 1"


@pytest.mark.parametrize("environment", [AgentEnvironment(ScriptedModel([])), HeadlessEnvironment()])
async def test_nobody_is_approved_for_by_a_machine(environment: Environment) -> None:
    """Without a person, a call that needs approval is denied, and a question is declined."""
    gate = open_gate(
        [card_game(effect="irreversible")],
        policies=[CapabilityPolicy()],
        environment=environment,
        filesystem=MemoryFilesystem(),
    )
    assert "was not approved (nobody there)" in (await gate.invoke("pick_card")).message
    with pytest.raises(Declined):
        await environment.ask(a_question())


def a_question() -> Question:
    from datetime import UTC, datetime

    return Question(
        id="q",
        kind="approval",
        name="pay",
        message="",
        payload={},
        schema={},
        digest="",
        principal="local",
        asked_by=(),
        call_id="c",
        asked_at=datetime(2030, 1, 1, tzinfo=UTC),
    )


@pytest.mark.parametrize(
    ("environment", "offered"),
    [
        (person(), ["for_people"]),
        (AgentEnvironment(), ["for_models"]),
        (HeadlessEnvironment(), []),
        (None, []),
    ],
)
def test_a_tool_is_offered_only_where_its_requirement_is_met(
    environment: Environment | None, offered: list[str]
) -> None:
    """A tool is offered, and a call to it succeeds, only where its requirement is met."""

    @tool
    async def for_people(context: UserContext) -> str:
        """Ask a person."""
        return "asked"

    @tool
    async def for_models(context: AgentContext) -> str:
        """Ask a model."""
        return "asked"

    model = ScriptedModel([[ToolCall("for_people"), ToolCall("for_models")], "Done."])
    session = Session()
    Adapter(model, environment=environment).evaluate(
        Prompt("p", "Go.", tools=[for_people, for_models]), session=session
    ).wait()
    assert [each.tool.name for each in model.requests[0].tools] == offered
    assert sorted(each.tool for each in session[ToolInvoked].all() if each.status == "ok") == offered


# --- run_as_agent ----------------------------------------------------------------------------------


async def test_an_agent_approves_nothing_on_anybodys_behalf() -> None:
    """In `run_as_agent`, approvals and permissions are denied with the outcome `nobody there`."""
    said: list[Any] = []

    async def choose(offer: Offer, *, context: AgentContext) -> Pick:
        said.append(await context.request_approval("Look at the cards?"))
        said.append(await context.request_permission("net"))
        assert context.wait_for is None
        return Pick(0)

    assert await run_as_agent(card_game(client=choose), Offer(1), model=ScriptedModel([])) == Pick(0)
    assert [(each.approved, each.outcome) for each in said] == [(False, "nobody there")] * 2


def test_run_as_agent_plays_one_act_and_leaves_nothing_behind() -> None:
    """`run_as_agent` lets the model answer the handoff, and runs neither `before` nor `after`."""

    async def never(*arguments: Any, context: ToolContext) -> Any:
        raise AssertionError

    async def deal(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
        return await never(context=context)

    async def settle(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
        return await never(context=context)

    game = card_game(before=deal, after=settle, run_mode="headless")
    assert run_as_agent(game, {"backs": 3}, model=ScriptedModel([SAYS])).wait() == Pick(1)


def test_run_as_agent_gives_params_to_a_client_that_takes_them() -> None:
    """`run_as_agent` passes `params` to a client that takes them, and refuses to run such a client without them."""

    def choose(offer: Offer, params: Deal, *, context: AgentContext) -> Pick:
        return Pick(params.cards)

    game = card_game(client=choose)
    assert run_as_agent(game, Offer(1), Deal(5), model=ScriptedModel([])).wait() == Pick(5)
    with pytest.raises(DefinitionError, match=NO_PARAMS):
        run_as_agent(game, Offer(1), model=ScriptedModel([]))


def test_run_as_agent_refuses_what_does_not_fit() -> None:
    """`run_as_agent` refuses invalid public data, a tool without a handler, and an act that needs a person."""
    game = card_game()
    with pytest.raises(ToolValidationError, match="backs"):
        run_as_agent(game, {"fronts": 1}, model=ScriptedModel([]))
    other: Any = Tool("other", "No handoff.")
    with pytest.raises(DefinitionError, match="has no handler"):
        run_as_agent(other, {}, model=ScriptedModel([]))

    async def ask(offer: Offer, *, context: UserContext) -> Pick:
        return Pick(0)

    with pytest.raises(CallFailed, match="needs 'wait_for'"):
        run_as_agent(card_game(client=ask), Offer(1), model=ScriptedModel([])).wait()


@pytest.mark.virtual_time
async def test_run_as_agent_has_limits() -> None:
    """In `run_as_agent`, a budget and a deadline apply to the model's requests."""
    with pytest.raises(PromptEvaluationError, match="requests"):
        await run_as_agent(
            card_game(), Offer(1), model=ScriptedModel(['{"index": "x"}', SAYS]), budget=Budget(requests=1)
        )

    clock = VirtualClock(asyncio.get_running_loop())  # pyright: ignore
    slow = ScriptedModel([Reply(SAYS, delay=60)])
    with pytest.raises(PromptEvaluationError, match="deadline"):
        await run_as_agent(
            card_game(), Offer(1), model=slow, deadline=Deadline.after(5, clock=clock), clock=clock
        )


async def test_what_an_act_emits_goes_to_its_own_listener_only() -> None:
    """An act's events reach only its own listener, even if two acts run in one session at once."""

    def game(name: str) -> Handoff[Any, Pick]:
        async def choose(offer: Offer, *, context: ToolContext) -> Pick:
            for step in range(2):
                context.emit(Step(name, step))
                await asyncio.sleep(0)
            return Pick(0)

        return card_game(name, client=choose)

    heard: dict[str, list[object]] = {"run": [], "run2": []}  # one id is a prefix of the other, on purpose

    def play(name: str, session: Session) -> Operation[Pick]:
        return run_as_agent(
            game(name),
            Offer(1),
            model=ScriptedModel([]),
            session=session,
            on_emit=heard[name].append,
            new_id=lambda: name,
        )

    session = Session()
    await asyncio.gather(*(play(name, session) for name in heard))
    assert heard == {name: [Step(name, 0), Step(name, 1)] for name in heard}


# --- acts in unit tests, and handoffs in a gate ----------------------------------------------------


async def test_acts_are_functions_that_a_test_can_call() -> None:
    """A test can call an act with a mock context.

    The context looks up its answer by the kind of a question, or by a part of a prompt's text.
    """
    assert await whoever(Offer(3), context=user_context({"which": {"index": 2}})) == Pick(2)
    assert await whoever(Offer(3), context=agent_context({"Choose": {"index": 1}})) == Pick(1)
    with pytest.raises(ToolValidationError, match="index"):
        await whoever(Offer(3), context=agent_context({"Choose": {"index": "one"}}))
    with pytest.raises(Declined):
        await whoever(Offer(3), context=user_context())


async def test_a_whole_handoff_needs_a_gate() -> None:
    """A handoff's handler refuses a mock context, and the error says what to do instead."""
    game = card_game(client=whoever)
    open_gate([game])
    handler: Any = game.handler
    with pytest.raises(NotImplementedError, match="call its acts one by one"):
        await handler(Deal(), context=user_context())


async def test_handoffs_run_where_any_tool_does() -> None:
    """A handoff can be called with `context.call`, like any other tool."""

    @tool
    async def twice(context: ToolContext) -> str:
        """Play twice."""
        return " and ".join([(await context.call("pick_card")).unwrap() for _ in range(2)])

    rig = Rig([card_game(client=whoever), twice], environment=person())
    assert (await rig.call("twice")).value == "card 0 and card 0"


@pytest.mark.parametrize("verdict", ["deny", "ask"])
def test_a_model_in_a_persons_place_is_under_the_policies_of_the_run(verdict: Any) -> None:
    """The run's policies also apply to tools that a handler gives to a model. `ask` counts as a denial, because nobody can approve."""
    paid: list[int] = []

    @tool(effect="staged", capabilities=["money.spend"])
    async def pay(amount: int) -> str:
        """Pay somebody."""
        paid.append(amount)
        return "paid"

    @tool(effect="staged", run_mode="agent")
    async def settle(context: AgentContext) -> str:
        """Let the model settle the bill."""
        return await context.prompt_model("Settle the bill.", str, tools=[pay])

    def reply(request: Any) -> Any:
        names = [each.tool.name for each in request.tools]
        if len(request.messages) == 1:
            return ToolCall("pay", {"amount": 5}) if "pay" in names else ToolCall("settle")
        return '"settled"' if "pay" in names else "Done."

    session = Session()
    policies = [CapabilityPolicy({"money.spend": verdict})]
    prompt = Prompt("p", "Settle.", tools=[settle], policies=policies)
    Adapter(ScriptedModel(reply)).evaluate(prompt, session=session).wait()
    assert paid == []
    assert {ended.tool: ended.status for ended in session[ToolInvoked].all()}["pay"] == "denied"
