"""When a provider's own tools are offered: policies, sections, nested runs and resumed runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    Agent,
    CapabilityPolicy,
    Deadline,
    MarkdownSection,
    PolicyDecision,
    Prompt,
    PromptEvaluationError,
    ProviderTool,
    RateLimitPolicy,
    ScriptedModel,
    SequentialDependencyPolicy,
    Session,
    SqliteJournal,
    ToolCall,
    ToolContext,
    UserContext,
    first_that_works,
    open_gate,
    tool,
)
from handrail.errors import DefinitionError, RunError
from handrail.events import ToolInvoked, ToolStarted, ToolWithheld
from handrail.messages import Traits
from handrail.models import ModelUnavailable
from handrail.prompt.section import LiveSection
from handrail.run.adapter import Retry
from handrail.testing import VirtualClock
from support.parked_runs import park_and_resume

QUICK = Retry(attempts=3, first_wait=0.01, chance=lambda: 0.0)
SEARCH = ProviderTool("web_search")
CODE = ProviderTool("code_execution")


@tool(effect="read")
async def look(context: ToolContext) -> str:
    """Look around."""
    return "Nothing."


@tool(effect="staged")
async def ask(context: UserContext) -> str:
    """Ask a person."""
    return await context.wait_for("sure", {}, str)


def offered(model: ScriptedModel) -> list[list[str]]:
    """Return the names of the provider's tools that each request offered."""
    return [[each.name for each in request.provider_tools] for request in model.requests]


async def offers(
    *answers: Any,
    policies: Any = (),
    tools: Sequence[Any] = (look, SEARCH, CODE),
    more: Sequence[Any] = (),
    **options: Any,
) -> list[list[str]]:
    """Run a prompt with these policies, and return the names of the provider's tools that each request offered."""
    model = ScriptedModel(answers or ["Done."])
    prompt = Prompt("p", "x", tools=tools, policies=policies)
    await Adapter(model).evaluate(prompt, "Go.", tools=more, **options)
    return offered(model)


class Watch:
    """A policy that records what it is asked about. It gives `decision` on a provider's tool, and allows all other tools."""

    name = "watch"

    def __init__(self, decision: PolicyDecision) -> None:
        self.decision = decision
        self.seen: list[tuple[str, str]] = []

    def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
        self.seen.append((tool.name, context.invocation.idempotency_key))
        assert params is None or not isinstance(tool, ProviderTool)
        return self.decision if isinstance(tool, ProviderTool) else PolicyDecision.allow()

    def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
        assert not isinstance(tool, ProviderTool)


# --- policies ---


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        (CapabilityPolicy(), ["web_search", "code_execution"]),
        (CapabilityPolicy({"provider.web_search": "deny"}), ["code_execution"]),
        (CapabilityPolicy({"net": "deny"}), ["code_execution"]),
        (CapabilityPolicy({"provider.*": "deny"}), []),
        (CapabilityPolicy({"provider.*": "deny", "provider.web_search": "allow"}), ["web_search"]),
        (CapabilityPolicy(effects={"read": "deny"}), []),
        (Watch(PolicyDecision.deny("no")), []),
    ],
)
async def test_a_denied_tool_is_not_offered(policy: Any, left: list[str]) -> None:
    """A policy can deny a provider's tool by a capability or by its effect. A denied tool is not offered."""
    assert await offers(policies=[policy]) == [left]


async def test_a_policy_that_raises_denies() -> None:
    """If a policy raises an error, the provider's tool that it checks is not offered, and the run goes on without it."""

    class Broken(Watch):
        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            raise RuntimeError("no")

    session = Session()
    assert await offers(policies=[Broken(PolicyDecision.allow())], session=session) == [[]]
    (first, _) = session[ToolWithheld].all()
    assert (first.tool, first.reason) == (
        "web_search",
        "The policy 'watch' could not decide, so web_search is denied.",
    )


async def test_a_policy_that_waits_is_awaited() -> None:
    """An async policy is awaited when it decides about an offer, as it is for a call."""

    class Slow(Watch):
        async def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:  # pyright: ignore[reportIncompatibleMethodOverride]  # policies may be async
            return PolicyDecision.deny("too late") if tool is SEARCH else PolicyDecision.allow()

    assert await offers(policies=[Slow(PolicyDecision.allow())]) == [["code_execution"]]


async def test_it_is_decided_before_each_request() -> None:
    """The policies decide again before each request, so a tool can be offered later. Its denial is published once."""
    after = SequentialDependencyPolicy({"web_search": {"look"}})
    session = Session()
    answers = [ToolCall("nothing"), ToolCall("look"), "Done."]
    found = await offers(*answers, policies=[after], session=session)
    assert found == [["code_execution"], ["code_execution"], ["web_search", "code_execution"]]
    (withheld,) = session[ToolWithheld].all()
    assert "web_search may run only after look succeeded" in withheld.reason


async def test_a_rate_limit_counts_the_requests_that_offer_it() -> None:
    """A rate limit on a provider's tool counts each answer for which the tool was offered, however often its request was retried."""
    rate = RateLimitPolicy(2, 3600, tools={"web_search"})
    model = ScriptedModel([ModelUnavailable("scripted", "down"), ToolCall("look"), ToolCall("look"), "Done."])
    prompt = Prompt("p", "x", tools=[look, SEARCH], policies=[rate])
    await Adapter(model, retry=QUICK).evaluate(prompt, "Go.")
    assert offered(model) == [["web_search"], ["web_search"], ["web_search"], []]


async def test_a_policy_that_asks_ends_the_run_before_anything_is_sent() -> None:
    """If a policy decides `ask` for a provider's tool, the run fails before a request is sent.

    The error says what to write instead.
    """
    model = ScriptedModel(["Done."])
    policy = CapabilityPolicy({"provider.*": "ask"})
    with pytest.raises(PromptEvaluationError) as raised:
        await Adapter(model).evaluate(Prompt("p", "x", tools=[SEARCH], policies=[policy]), "Go.")
    assert "web_search can't be offered: web_search uses 'provider.web_search'" in str(raised.value)
    assert "CapabilityPolicy({'provider.web_search': 'allow'})" in str(raised.value)
    assert model.requests == []


async def test_a_sections_policy_decides_on_its_own_tools() -> None:
    """A section's policy decides only on the provider's tools of that section."""
    deny = CapabilityPolicy({"provider.*": "deny"})
    web = MarkdownSection("Web", "web", "Search.", tools=[SEARCH], policies=[deny])
    code = MarkdownSection("Code", "code", "Run code.", tools=[CODE])
    model = ScriptedModel(["Done."])
    await Adapter(model).evaluate(Prompt("p", [web, code]), "Go.")
    assert offered(model) == [["code_execution"]]


async def test_a_misspelt_policy_is_refused() -> None:
    """A policy that names a misspelt capability of a provider's tool is refused, with a suggestion."""
    with pytest.raises(DefinitionError, match=r"Did you mean 'provider\.web_search'"):
        await offers(policies=[CapabilityPolicy({"provider.web_serach": "deny"})])


async def test_the_offer_is_not_a_call() -> None:
    """Policies check each offer of a provider's tool. An offer has no arguments, no call number and no call events."""
    watch, session, seen = Watch(PolicyDecision.allow()), Session(), list[str]()
    session.dispatcher.subscribe(ToolStarted, lambda event: seen.append(event.tool))
    model = ScriptedModel([ToolCall("look"), "Done."])
    prompt = Prompt("p", "x", tools=[look, SEARCH], policies=[watch])
    await Adapter(model).evaluate(prompt, "Go.", session=session, run_id="r")
    assert seen == [each.tool for each in session[ToolInvoked].all()] == ["look"]
    assert watch.seen == [
        ("web_search", "r#1#web_search"),
        ("look", "r.1#look"),
        ("web_search", "r#2#web_search"),
    ]


async def test_a_model_that_calls_it_is_told_that_it_can_not() -> None:
    """A provider's tool can't be called through the gate, by a model or by a program."""
    session = Session()
    model = ScriptedModel([ToolCall("web_search"), "Done."])
    await Adapter(model).evaluate(Prompt("p", "x", tools=[look, SEARCH]), "Go.", session=session)
    (invoked,) = session[ToolInvoked].all()
    assert "There is no tool 'web_search' that can be called" in invoked.result.message
    assert not (await open_gate(tools=[SEARCH]).invoke("web_search")).success


# --- nesting, sections, added tools, choices ---


async def nested(policies: Any, effect: Any = "idempotent", inner: Any = ()) -> list[list[str]]:
    """Evaluate a prompt with a search tool in a nested run, and return the provider's tools that each of its requests offered."""
    model = ScriptedModel(["Found."])
    within = Prompt("inner", "x", tools=[SEARCH], policies=inner)

    @tool(effect=effect)
    async def research(context: ToolContext) -> str:
        """Search in a nested run."""
        return (await context.adapter.evaluate(within, "Find.", model=model)).text

    outer = ScriptedModel([ToolCall("research"), "Done."])
    await Adapter(outer).evaluate(Prompt("p", "x", tools=[research], policies=policies), "Go.")
    return offered(model)


@pytest.mark.parametrize(
    ("outer", "left"),
    [
        ([], [["web_search"]]),
        ([CapabilityPolicy({"provider.*": "deny"}, effects={"idempotent": "allow"})], [[]]),
        ([CapabilityPolicy(effects={"idempotent": "allow"})], [["web_search"]]),
    ],
)
async def test_a_nested_run_can_only_tighten(outer: Any, left: list[list[str]]) -> None:
    """What the policies of an outer run deny is not offered in a nested run, whatever its own policies allow."""
    assert await nested(outer, inner=[CapabilityPolicy({"*": "allow"}, name="inner")]) == left
    denied = await nested(outer, inner=[CapabilityPolicy({"net": "deny"}, name="inner")])
    assert denied == [[]]


async def test_a_pure_call_offers_nothing() -> None:
    """A provider's tools have the effect `read`, so a nested run in a `pure` call offers none of them."""
    assert await nested([], effect="pure") == [[]]
    assert await nested([], effect="read") == [["web_search"]]


async def test_an_agent_as_a_tool_offers_its_own() -> None:
    """An agent that is called as a tool offers the provider's tools that it was given, not those of its caller."""
    inner = ScriptedModel(["Found."])
    agent = Agent(inner, "Search.", name="searcher", description="Searches.", tools=[SEARCH])
    outer = ScriptedModel([ToolCall("searcher", {"message": "rust"}), "Done."])
    await Adapter(outer).evaluate(Prompt("p", "x", tools=[agent.as_tool(), CODE]), "Go.")
    assert (offered(outer), offered(inner)) == ([["code_execution"]] * 2, [["web_search"]])


async def test_an_opened_section_offers_its_tools_from_then_on() -> None:
    """The provider's tools of a section shown as a summary are offered only in the requests after it was opened."""
    web = MarkdownSection("Web", "web", "Search.", tools=[SEARCH], summary="The web.", visibility="summary")
    model = ScriptedModel([ToolCall("open_sections", {"sections": ["web"]}), "Done."])
    await Adapter(model).evaluate(Prompt("p", [web]), "Go.")
    assert offered(model) == [[], ["web_search"]]


class Live(LiveSection):
    """A section whose tools are the first of `states`, until `advance` moves it to the next."""

    def __init__(self, *states: tuple[ProviderTool, ...]) -> None:
        super().__init__("Live", "live", "Live.")
        self._states = list(states)

    async def connect(self, principal: str) -> None: ...

    def current_tools(self, principal: str) -> tuple[ProviderTool, ...]:
        return self._states[0]

    def advance(self) -> None:
        self._states.pop(0)


@pytest.mark.parametrize(
    "states", [[(SEARCH, CODE), (SEARCH,), (), (CODE,)], [(), (SEARCH,), ()], [(SEARCH,), ()]]
)
async def test_a_live_section_offers_only_what_it_has_now(states: list[tuple[ProviderTool, ...]]) -> None:
    """Each request offers exactly the provider's tools that the live section has at that moment, if any."""
    section = Live(*states)

    @tool(effect="read")
    async def advance(context: ToolContext) -> None:
        """Change the tools of the section."""
        section.advance()

    model = ScriptedModel([*[ToolCall("advance")] * (len(states) - 1), "Done."])
    await Adapter(model).evaluate(Prompt("p", [section], tools=[advance]), "Go.")
    assert offered(model) == [[each.name for each in state] for state in states]


async def test_a_run_can_add_one() -> None:
    """A provider's tool that is passed to a run is offered like those of the prompt, and policies decide on it."""
    deny = CapabilityPolicy({"provider.code_execution": "deny"})
    assert await offers(tools=[look], policies=[deny], more=[SEARCH, CODE]) == [["web_search"]]


async def test_each_candidate_of_a_choice_must_have_it() -> None:
    """If a choice falls back to a model that lacks the tool, the run fails, and the error names that model."""
    first = ScriptedModel([ModelUnavailable("a", "down")] * 2, name="a")
    second = ScriptedModel(["Done."], name="b", traits=Traits())
    with pytest.raises(PromptEvaluationError, match="model 'b': it has no web_search of its own"):
        await Adapter(first_that_works(first, second), retry=QUICK).evaluate(
            Prompt("p", "x", tools=[SEARCH]), "Go."
        )


@pytest.mark.virtual_time
async def test_a_deadline_ends_a_policy_that_waits() -> None:
    """A policy that takes too long to decide on an offer is stopped by the run's deadline."""

    class Endless(Watch):
        async def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:  # pyright: ignore[reportIncompatibleMethodOverride]  # policies may be async
            await asyncio.sleep(1000)
            return PolicyDecision.allow()

    clock = VirtualClock()
    adapter = Adapter(ScriptedModel(["Done."]), clock=clock)
    prompt = Prompt("p", "x", tools=[SEARCH], policies=[Endless(PolicyDecision.allow())])
    with pytest.raises(PromptEvaluationError) as raised:
        await adapter.evaluate(prompt, "Go.", deadline=Deadline.after(5, clock=clock))
    assert raised.value.phase == "deadline"
    assert asyncio.get_running_loop().time() == pytest.approx(5, abs=0.1)


# --- resumed runs ---


async def test_a_resumed_run_offers_the_same(tmp_path: Path) -> None:
    """A resumed run offers the same tools in its next request. Policies do not decide on recorded requests again."""
    watch = Watch(PolicyDecision.allow())
    model = ScriptedModel([ToolCall("ask"), "Done."])
    prompt = Prompt("p", "x", tools=[ask, SEARCH], policies=[watch])
    adapter = Adapter(model, journal=SqliteJournal(tmp_path / "j.db"))
    assert await park_and_resume(adapter, prompt) == "Done."
    assert offered(model) == [["web_search"], ["web_search"]]
    assert [key for name, key in watch.seen if name == "web_search"] == [
        "r1#1#web_search",
        "r1#2#web_search",
    ]


async def test_a_resumed_run_needs_its_added_tools(tmp_path: Path) -> None:
    """A run that was given a provider's tool in addition to its prompt's can't be resumed without it."""
    model = ScriptedModel([ToolCall("ask"), "Done."])
    adapter = Adapter(model, journal=SqliteJournal(tmp_path / "j.db"))
    with pytest.raises(RunError, match="web_search"):
        await park_and_resume(adapter, Prompt("p", "x", tools=[ask]), tools=[SEARCH])
