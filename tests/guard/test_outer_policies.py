"""What an outer run denies stays denied in every run that is nested in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    Agent,
    AgentContext,
    MarkdownSection,
    Prompt,
    ScriptedModel,
    Session,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    run_as_agent,
    tool,
)
from handrail.environment import AgentEnvironment
from handrail.events import ToolInvoked
from handrail.guard import RateLimitPolicy, SequentialDependencyPolicy
from handrail.protocols import PolicyDecision
from handrail.run import open_gate
from handrail.testing import Person
from support.cards import Offer, Pick, card_game
from support.worker_folders import sound

Ran = list[str]


class Forbids:
    """A policy that makes one decision about one tool, allows all others, and records the tools whose results it sees."""

    def __init__(self, decision: Any, tool: str = "pay", name: str = "forbids") -> None:
        self.name = name
        self._decision = decision
        self._tool = tool
        self.told: list[str] = []

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> Any:
        if tool.name != self._tool:
            return PolicyDecision.allow()
        return self._decision() if callable(self._decision) else self._decision

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        self.told.append(tool.name)


async def later() -> PolicyDecision:
    await asyncio.sleep(0)
    return PolicyDecision.deny("no payments")


def raises() -> PolicyDecision:
    raise RuntimeError("broken")


DENIALS: dict[str, Any] = {
    "denies": PolicyDecision.deny("no payments"),
    "denies later": later,
    "raises": raises,
    "returns no decision": lambda: None,
    "decides an unknown kind": PolicyDecision("perhaps"),  # pyright: ignore[reportArgumentType]  # wrong on purpose
}


def paying(ran: Ran) -> Tool[Any, Any]:
    @tool(effect="staged")
    async def pay() -> str:
        """Pay."""
        ran.append("pay")
        return "paid"

    return pay


# Each `by_…` function returns the tool `outer`, which pays in a nested run.


def by_evaluate(ran: Ran) -> Tool[Any, Any]:
    @tool
    async def outer(context: ToolContext) -> str:
        """Pay in a nested run."""
        return (await context.adapter.evaluate(Prompt("inner", "Pay.", tools=[paying(ran)]), "go")).text

    return outer


def by_two_runs(ran: Ran) -> Tool[Any, Any]:
    @tool
    async def outer(context: ToolContext) -> str:
        """Pay in a run nested two levels down."""
        inner = Agent(
            model_for(calls=3), "Pay.", name="inner", description="Pays.", tools=[paying(ran)]
        ).as_tool()
        return (await context.adapter.evaluate(Prompt("middle", "Delegate.", tools=[inner]), "go")).text

    return outer


def by_agent(ran: Ran) -> Tool[Any, Any]:
    return Agent(model_for(calls=3), "Pay.", name="outer", description="Pays.", tools=[paying(ran)]).as_tool()


def by_worker(ran: Ran) -> Tool[Any, Any]:
    @tool
    async def outer(context: ToolContext) -> str:
        """Pay through a worker."""
        return str(await context.call_worker("payer", "go"))

    return outer


def by_prompt_model(ran: Ran) -> Tool[Any, Any]:
    @tool(run_mode="agent")
    async def outer(context: AgentContext) -> str:
        """Pay through a model inside the tool."""
        return await context.prompt_model("go", str, system="Pay.", tools=[paying(ran)])

    return outer


def played(ran: Ran) -> Any:
    """Return an operation that plays a handoff's `client` act, which pays."""

    async def choose(offer: Offer, *, context: ToolContext) -> Pick:
        await context.call("pay")
        return Pick(0)

    model = ScriptedModel([])
    return run_as_agent(card_game(client=choose), Offer(1), model=model, tools=[paying(ran)])


def by_run_as_agent(ran: Ran) -> Tool[Any, Any]:
    @tool
    async def outer() -> str:
        """Pay through a model that plays an act."""
        await played(ran)
        return "played"

    return outer


def by_run_as_agent_in_a_thread(ran: Ran) -> Tool[Any, Any]:
    @tool
    def outer() -> str:
        """Pay through a model that plays an act, in a synchronous handler."""
        played(ran).wait()
        return "played"

    return outer


def by_run_as_agent_in_a_task(ran: Ran) -> Tool[Any, Any]:
    @tool
    async def outer() -> str:
        """Pay through a model that plays an act, in a task that the handler starts."""

        async def play() -> None:
            await played(ran)

        await asyncio.create_task(play())
        return "played"

    return outer


WAYS: list[Callable[[Ran], Tool[Any, Any]]] = [
    by_evaluate,
    by_two_runs,
    by_agent,
    by_worker,
    by_prompt_model,
    by_run_as_agent,
    by_run_as_agent_in_a_thread,
    by_run_as_agent_in_a_task,
]

PAY = """
    from handrail import tool

    @tool(effect="staged")
    async def pay() -> str:
        \"\"\"Pay.\"\"\"
        return "paid"
"""


def model_for(outer: dict[str, str] | None = None, calls: int = 1) -> ScriptedModel:
    """Return a model that does what each prompt's instructions ask for."""
    scripts: dict[str, Iterator[Any]] = {
        "Outer.": iter([*[ToolCall("outer", outer or {})] * calls, "outer done"]),
        "Delegate.": iter([ToolCall("inner", {"message": "go"}), "middle done"]),
        "Pay.": iter([ToolCall("pay", {}), '"inner done"'] * calls),
    }
    return ScriptedModel(lambda request: next(scripts[request.system.strip().splitlines()[-1]]))


def payments(
    way: Callable[[Ran], Tool[Any, Any]], policies: Iterable[Any], at: Path, calls: int = 1, **options: Any
) -> int:
    """Return how many payments were made below `outer`, in a run with these policies."""
    ran: Ran = []
    outer = way(ran)
    arguments = {"message": "go"} if "message" in outer.json_schema["properties"] else {}
    model = model_for(arguments, calls)
    workers = sound(at, PAY, payer="---\ndescription: Pays.\ntools: [pay]\npolicies: []\n---\nPay.")
    session = Session()
    if way is by_prompt_model:
        options["environment"] = AgentEnvironment()
    adapter = Adapter(model, workers=workers)
    prompt = Prompt("p", "Outer.", tools=[outer], policies=policies)
    response = adapter.evaluate(prompt, "go", session=session, **options).wait()
    assert response.text == "outer done"
    by_the_worker = [each for each in session[ToolInvoked].all() if each.path[-2:] == ("payer", "pay")]
    return len(ran) + sum(each.status == "ok" for each in by_the_worker)


@pytest.mark.parametrize("way", WAYS)
def test_a_nested_run_may_pay_if_nothing_denies_it(way: Any, tmp_path: Path):
    """Without a denial, every way to nest a run leads to a payment."""
    assert payments(way, [], tmp_path) == 1


@pytest.mark.parametrize("how", sorted(DENIALS))
@pytest.mark.parametrize("way", WAYS)
def test_what_the_outer_run_denies_stays_denied(way: Any, how: str, tmp_path: Path):
    """A call that an outer policy denies, or can't decide about, does not run in a nested run either."""
    assert payments(way, [Forbids(DENIALS[how])], tmp_path) == 0


@pytest.mark.parametrize("way", [by_evaluate, by_two_runs, by_agent, by_worker])
def test_what_the_outer_run_asks_about_is_left_to_the_nested_run(way: Any, tmp_path: Path):
    """An outer policy's `ask` does not apply to calls in a nested evaluation, an agent or a worker."""
    policy = Forbids(PolicyDecision.ask("sure?"))
    assert payments(way, [policy], tmp_path, environment=Person(approve=False)) == 1


@pytest.mark.parametrize("way", [by_evaluate, by_two_runs, by_agent, by_worker])
def test_an_outer_policy_is_told_of_the_results_of_nested_runs(way: Any, tmp_path: Path):
    """Outer policies see the results of calls in nested runs, so limits on the rate and the order of calls apply there too."""
    policy = Forbids(PolicyDecision.allow())
    assert payments(way, [policy], tmp_path) == 1
    assert policy.told.count("pay") == 1


def test_a_sections_policy_is_told_of_the_results_of_nested_runs() -> None:
    """A policy of an outer run's section sees the results of calls in nested runs, and can reject them."""

    class Judges(Forbids):
        def on_result(
            self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
        ) -> None:
            super().on_result(tool, params, result, context=context)
            if tool.name == "pay":
                raise ValueError("no payments")

    ran: Ran = []
    session, policy = Session(), Judges(PolicyDecision.allow())
    section = MarkdownSection[Any]("Work", "work", "Outer.", tools=[by_evaluate(ran)], policies=[policy])
    model = ScriptedModel(lambda request: next(inner if request.system.strip().endswith("Pay.") else outer))
    outer = iter([ToolCall("outer", {}), "outer done"])
    inner = iter([ToolCall("pay", {}), "inner done"])
    Adapter(model).evaluate(Prompt("p", sections=[section]), "go", session=session).wait()
    assert policy.told == ["pay", "outer"]
    assert [(each.path[-1], each.status) for each in session[ToolInvoked].all()] == [
        ("pay", "denied"),
        ("outer", "ok"),
    ]


@pytest.mark.parametrize("way", [by_evaluate, by_agent, by_worker])
def test_an_outer_rate_limits_nested_calls(way: Any, tmp_path: Path):
    """Calls in nested runs count towards the outer run's rate limit."""
    assert payments(way, [RateLimitPolicy(2, 3600, tools={"pay"})], tmp_path, calls=3) == 2


@pytest.mark.parametrize(
    ("name", "paid", "status"), [("own_rate", ["pay"], "ok"), ("rate_limit", [], "error")]
)
def test_rates_of_an_outer_and_a_nested_run_do_not_lift_each_other(name: str, paid: Ran, status: str):
    """A nested run's own, lower limit applies. A nested limit with the name of an outer one is refused, since the two would share a count."""
    ran: Ran = []

    @tool
    async def outer(context: ToolContext) -> str:
        """Pay twice in a nested run."""
        own = RateLimitPolicy(1, 3600, tools={"pay"}, name=name)
        prompt = Prompt("inner", "Pay.", tools=[paying(ran)], policies=[own])
        model = ScriptedModel([ToolCall("pay", {}), ToolCall("pay", {}), "done"])
        return (await context.adapter.evaluate(prompt, "go", model=model)).text

    session = Session()
    model = ScriptedModel([ToolCall("outer", {}), "done"])
    prompt = Prompt("p", "Outer.", tools=[outer], policies=[RateLimitPolicy(5, 3600, tools={"pay"})])
    Adapter(model).evaluate(prompt, "go", session=session).wait()
    assert ran == paid
    last = session[ToolInvoked].latest()
    assert last is not None
    assert (last.tool, last.status) == ("outer", status)


def test_an_order_of_the_outer_run_is_kept_and_can_be_fulfilled_below():
    """If an outer policy requires one call before another, nested calls must follow that order and count towards it."""
    ran: Ran = []

    @tool(effect="staged")
    async def check() -> str:
        """Check the account."""
        return "checked"

    @tool
    async def outer(context: ToolContext) -> str:
        """Pay, check and pay."""
        prompt = Prompt("inner", "Pay.", tools=[paying(ran), check])
        calls = [ToolCall("pay", {}), ToolCall("check", {}), ToolCall("pay", {})]
        return (await context.adapter.evaluate(prompt, "go", model=ScriptedModel([*calls, "done"]))).text

    session = Session()
    policy = SequentialDependencyPolicy({"pay": {"check"}})
    model = ScriptedModel([ToolCall("outer", {}), "done"])
    Adapter(model).evaluate(
        Prompt("p", "Outer.", tools=[outer], policies=[policy]), "go", session=session
    ).wait()
    ends = [(each.tool, each.status) for each in session[ToolInvoked].all()]
    assert ends == [("pay", "denied"), ("check", "ok"), ("pay", "ok"), ("outer", "ok")]


def test_a_policy_that_both_runs_have_is_asked_once():
    """A policy that is declared on both the outer and the nested prompt checks each nested call once."""
    asked: list[str] = []

    def decide() -> PolicyDecision:
        asked.append("pay")
        return PolicyDecision.allow()

    rule = Forbids(decide)

    @tool
    async def outer(context: ToolContext) -> str:
        """Pay in a nested run."""
        prompt = Prompt("inner", "Pay.", tools=[paying([])], policies=[rule])
        model = ScriptedModel([ToolCall("pay", {}), "done"])
        return (await context.adapter.evaluate(prompt, "go", model=model)).text

    model = ScriptedModel([ToolCall("outer", {}), "done"])
    Adapter(model).evaluate(Prompt("p", "Outer.", tools=[outer], policies=[rule]), "go").wait()
    assert asked == ["pay"]


async def test_a_gates_denials_reach_acts_that_its_handlers_play():
    """A gate's policies apply to acts that its handlers play, but not to acts that are played outside its calls."""
    ran: Ran = []
    gate = open_gate([by_run_as_agent(ran)], policies=[Forbids(DENIALS["denies"])])
    assert (await gate.invoke("outer")).success
    assert ran == []
    await played(ran)  # outside the gate's call nothing is denied
    assert ran == ["pay"]


async def test_an_agent_that_stops_before_its_checks_pass_says_so():
    """If an agent stops although a completion check still objects, its caller is told so."""

    class Objects:
        name, cap = "objects", 1

        def missing(self, state: Any, /) -> str:
            return "Nothing is done."

    agent = Agent(
        ScriptedModel(["done", "done"]),
        Prompt("worker", "Work.", completion=[Objects()]),
        description="Works.",
    )
    result = await open_gate([agent.as_tool()], environment=None).invoke("worker", {"message": "go"})
    assert "a completion check still objects" in result.message
