"""Caps on what is spent in a day: reserved before, exact across processes, asked about at the cap, and continued."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from handrail import (
    Adapter,
    Agent,
    Budget,
    Compact,
    LaterEnvironment,
    MemoryJournal,
    Prompt,
    ScriptedModel,
    Session,
    Spend,
    ToolCall,
    ToolContext,
    first_that_works,
    open_gate,
    tool,
)
from handrail.errors import AnswerRefused, DefinitionError, PromptEvaluationError, RunParked
from handrail.events import SpendWarned
from handrail.journal.protocol import Journal
from handrail.journal.records import SpendRaise, SpendState
from handrail.messages import ModelPart, ModelRequest, Price, TextPart, Traits, Usage, UsagePart
from handrail.models import ModelUnavailable
from handrail.models.scripted import Reply
from handrail.question import Answer, Question, Quorum, Vote
from handrail.run.adapter import Retry
from handrail.run.record.begin import decode_outcome
from handrail.run.redemption import redeem
from handrail.runs import Retention, children, sweep
from handrail.testing import Person
from run.test_background import asked, until, working
from support.background_app import HOST, host
from support.parked_runs import answer_to

DOLLAR_A_MILLION = Price(Decimal(1), Decimal(1))
YES, NO = {"approved": True}, {"approved": False, "reason": "too dear"}


def reply(tokens: int, text: str = "done", calls: Any = ()) -> Reply:
    return Reply(text, calls, usage=Usage(tokens, 0, requests=1))


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self, at: datetime) -> None:
        self.at = at

    def now(self) -> datetime:
        return self.at

    def monotonic(self) -> float:
        return self.at.timestamp()


NOON = datetime(2026, 3, 28, 12, tzinfo=UTC)


class Desk:
    """An agent whose model spends as its script says, in a journal whose clock stands still."""

    def __init__(self, script: Any, spend: Any, *, journal: Any = None, **options: Any) -> None:
        self.clock = Clock(NOON)
        self.journal: Any = journal or MemoryJournal(self.clock)
        self.model = ScriptedModel(script, traits=Traits(price=options.pop("price", DOLLAR_A_MILLION)))
        adapter = Adapter(
            self.model, journal=self.journal, spend=spend, retry=Retry(first_wait=0, longest_wait=0)
        )
        self.agent = Agent(adapter, "Help.", **options)

    def run(self, run_id: str = "r", principal: str = "local", **options: Any) -> Any:
        session = Session(principal=principal)
        return self.agent.run("go", run_id=run_id, session=session, max_tokens=1000, **options)

    async def parked(self, run_id: str = "r", principal: str = "local", **options: Any) -> Question:
        with pytest.raises(RunParked) as parked:
            await self.run(run_id, principal, environment=Voters(), **options)
        [question] = parked.value.questions
        return question

    def resume(self, run_id: str = "r") -> Any:
        return self.agent.resume(run_id, environment=Voters())

    async def spent(self) -> SpendState:
        [state] = await self.journal.spending.list()
        return state


class Voters(LaterEnvironment):
    """An environment that parks, with one user who may raise caps."""

    def voters(self, quorum: Quorum, principal: str, /) -> dict[str, float]:
        return {"bob": 1.0} if quorum.role == "admin" and principal != "bob" else {}


def voted(
    question: Question, value: Any = YES, by: str = "bob", roles: tuple[str, ...] = ("admin",)
) -> Answer:
    vote = Vote(
        question_id=question.id,
        digest=question.digest,
        by=by,
        since=1.0,
        roles=roles,
        approved=value["approved"],
    )
    return answer_to(question, value, by=by, votes=(vote,))


TOKENS = Spend(Budget(tokens=30_000))
"""A cap that a request with what 25,000 tokens said before fits into, but not twice."""


async def test_a_request_reserves_what_it_may_spend_and_is_charged_what_it_spent() -> None:
    reserved: list[SpendState] = []

    async def look(request: Any) -> Reply:
        reserved.append(await desk.spent())
        assert request.max_tokens == 4096, "the provider may not bill more than was reserved"
        return reply(700)

    desk = Desk(look, Spend(1))
    await desk.agent.run("go")
    [state] = reserved
    assert state.counted["tokens"] >= 4096
    assert state.counted["money"] == Decimal(state.counted["tokens"]) / 1_000_000
    assert state.in_flight == state.counted
    state = await desk.spent()
    assert state.counted == {"requests": 1, "tokens": 700, "money": Decimal("0.0007")}
    assert state.in_flight == {}
    assert state.window.id == '["principal","local","2026-03-28","UTC"]'


async def test_requests_that_fail_or_are_cut_off_count_as_what_they_may_have_cost() -> None:
    gone = ModelUnavailable("m", "gone")
    desk = Desk([gone, Reply("half an", error=gone), reply(10)], TOKENS)
    await desk.run()
    state = await desk.spent()
    assert (state.counted["requests"], state.in_flight) == (3, {})
    assert 1000 < state.counted["tokens"] < 2000, (
        "the first was not sent; it is unknown what the second cost, so what it reserved counts"
    )


async def test_an_answer_that_is_stopped_counts_as_what_its_provider_may_have_written() -> None:
    writing = asyncio.Event()

    class Early(ScriptedModel):
        """Reports the input at the beginning, as some providers do, and then writes without end."""

        async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
            yield UsagePart(Usage(50, 1, requests=1))
            yield TextPart("half an")
            writing.set()
            await asyncio.Event().wait()

    journal = MemoryJournal(Clock(NOON))
    adapter = Adapter(Early([], traits=Traits(price=DOLLAR_A_MILLION)), journal=journal, spend=TOKENS)
    running = asyncio.ensure_future(_finished(Agent(adapter, "Help.").run("go", max_tokens=1000)))
    await writing.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    [state] = await journal.spending.list()
    assert state.counted == {"requests": 1, "tokens": 1050, "money": Decimal("0.00105")}


@pytest.mark.parametrize(
    ("spend", "price", "words"),
    [
        (Spend(5), None, "the price of the model 'scripted:script' is not known"),
        (Spend(Budget(money=5, tokens=5)), None, "the price of the model 'scripted:script' is not known"),
    ],
)
async def test_a_cap_on_money_is_refused_at_start_if_the_price_is_unknown(
    spend: Any, price: Any, words: str
) -> None:
    desk = Desk([reply(1)], spend, price=price)
    with pytest.raises(DefinitionError, match=words):
        await desk.run()
    assert not desk.model.requests
    assert not await desk.journal.runs.list()


async def test_a_cap_on_money_is_refused_at_start_if_the_price_of_one_of_several_models_is_unknown() -> None:
    models = [ScriptedModel(["done"], name=name, traits=Traits(price=DOLLAR_A_MILLION)) for name in "ab"]
    journal, unpriced = MemoryJournal(), ScriptedModel([], name="c")
    model = first_that_works(models[0], first_that_works(models[1], unpriced))
    with pytest.raises(DefinitionError, match="the price of the model 'c' is not known"):
        await Agent(Adapter(model, journal=journal, spend=Spend(5)), "Help.").run("go")
    assert not await journal.runs.list()
    await Agent(Adapter(first_that_works(*models), journal=journal, spend=Spend(5)), "Help.").run("go")


async def test_a_choice_that_summarises_before_it_has_chosen_counts_what_the_summary_costs() -> None:
    gone = ModelUnavailable("m", "gone")
    priced = Traits(price=DOLLAR_A_MILLION)
    first = ScriptedModel(lambda request: gone, name="first", traits=priced)
    second = ScriptedModel(
        [reply(1000, "word " * 2000), reply(300, "A summary."), reply(20)], name="second", traits=priced
    )
    session, journal, retry = Session(), MemoryJournal(Clock(NOON)), Retry(first_wait=0, longest_wait=0)
    adapter = Adapter(first_that_works(first, second), journal=journal, spend=Spend(1), retry=retry)
    agent = Agent(adapter, "Help.", compact=Compact(by="summary", tokens=1000))
    for _ in range(2):
        await agent.run("go", session=session)
    assert len(second.requests) == 3
    [state] = await journal.spending.list()
    assert (state.counted["money"], state.in_flight) == (Decimal("0.00132"), {})


async def test_a_cap_needs_a_journal() -> None:
    agent = Agent(Adapter(ScriptedModel(["done"]), spend=TOKENS), "Help.")
    with pytest.raises(DefinitionError, match="this run has none"):
        await agent.run("go")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Spend(Budget()), "caps nothing"),
        (lambda: Spend(Budget(tool_calls=3)), "RateLimitPolicy"),
        (lambda: Spend(-1), "-1"),
        (lambda: Spend(5, by="team"), "by='team'"),  # pyright: ignore[reportArgumentType]  # what is refused
        (lambda: Spend(5, zone="Mars/Base"), "Mars/Base"),
        (lambda: Spend(5, zone="../etc/passwd"), "etc/passwd"),
        (lambda: Spend(5, warn_at=0), "warn_at=0"),
        (lambda: Spend(5, raised_by=""), "raised_by"),
        (lambda: Spend(5, app="desk"), "by='app'"),
        (lambda: Adapter(ScriptedModel([]), spend=5), "Spend\\(per_day=20\\)"),  # pyright: ignore[reportArgumentType]  # what is refused
    ],
)
def test_a_wrong_cap_is_an_error_that_names_it(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(DefinitionError, match=words):
        make()


# --- at the cap ---------------------------------------------------------------------------------------


async def test_a_run_parks_at_the_cap_and_goes_on_once_somebody_raised_it() -> None:
    desk = Desk([reply(25_000, calls=[ToolCall("look", {})]), reply(5)], TOKENS, tools=[look])
    question = await desk.parked(principal="ann")
    assert (question.kind, question.id, question.quorums) == (
        "approval",
        "r#2?spend-1",
        (Quorum("admin", 1),),
    )
    assert "ann has spent 25000 tokens on 2026-03-28, and the cap is 30000 tokens" in question.message
    assert question.expires_at == datetime(2026, 3, 29, tzinfo=UTC)
    journal: Journal = desk.journal
    for refused in (
        answer_to(question, YES),
        answer_to(question, YES, by="eve"),
        voted(question, by="ann"),
        voted(question, by="eve", roles=("user",)),
    ):
        with pytest.raises(AnswerRefused):
            journal.questions.answer(refused)
    assert len(desk.model.requests) == 1
    journal.questions.answer(voted(question))
    assert (await desk.resume()).text == "done"
    state = await desk.spent()
    [raised] = state.raises
    assert (raised.by, raised.amounts, raised.id) == ("bob", {"tokens": 30_000}, question.id)
    assert (state.counted["tokens"], state.in_flight) == (25_005, {})
    assert (await journal.runs.verify()).altered == []


@tool(effect="pure")
async def look() -> str:
    """Look."""
    return "seen"


async def test_a_denied_raise_ends_the_run_and_says_who_denied_it() -> None:
    desk = Desk([reply(25_000, calls=[ToolCall("look", {})]), reply(5)], TOKENS, tools=[look])
    question = await desk.parked(principal="ann")
    desk.journal.questions.answer(voted(question, NO))
    with pytest.raises(PromptEvaluationError, match="denied by bob: too dear") as failed:
        await desk.resume()
    assert failed.value.phase == "budget"
    assert (await desk.journal.runs.get("r")).status == "failed"


@pytest.mark.parametrize("environment", [None, Person(approve=True)])
async def test_without_anybody_who_may_raise_it_the_cap_stands(environment: Any) -> None:
    desk = Desk([reply(5)], Spend(Budget(tokens=10)))
    with pytest.raises(PromptEvaluationError, match="cap is 10 tokens"):
        await desk.run(principal="ann", environment=environment, approvals="approve_all")


async def test_the_only_user_raises_their_own_cap_but_the_mode_approve_all_does_not() -> None:
    desk = Desk([reply(5), reply(6)], Spend(Budget(tokens=10)))
    person = Person(approve=True)
    assert (await desk.run(environment=person, approvals="approve_all")).text == "done"
    [question] = person.questions
    assert question.payload["arguments"]["cap"] == {"tokens": 10}
    with pytest.raises(PromptEvaluationError, match="Nobody is there"):
        await desk.run("s", approvals="approve_all")


async def test_a_cap_below_what_is_already_spent_says_so_and_the_raise_reaches_above_it() -> None:
    desk = Desk([reply(5000)], TOKENS)
    await desk.run()
    lower = Desk([reply(5)], Spend(Budget(tokens=100)), journal=desk.journal)
    question = await lower.parked("s")
    assert "the cap is 100 tokens, which is below what was already spent" in question.message
    assert int(question.payload["arguments"]["raise_by"]["tokens"]) > 4900 + 1000
    desk.journal.questions.answer(answer_to(question, YES))
    assert (await lower.resume("s")).text == "done"


async def test_a_free_model_goes_on_after_the_cap_on_money_was_exceeded() -> None:
    desk = Desk([reply(5000)], Spend(1))
    await desk.run()
    free = Price(Decimal(0), Decimal(0))
    local = Desk([reply(5)], Spend(Budget(money=Decimal("0.001"))), journal=desk.journal, price=free)
    assert (await local.run("s")).text == "done"


async def test_a_new_day_frees_what_waits_at_the_cap() -> None:
    desk = Desk([reply(25_000, calls=[ToolCall("look", {})]), reply(5)], TOKENS, tools=[look])
    question = await desk.parked(principal="ann")
    desk.clock.at = datetime(2026, 3, 28, 23, 59, 59, tzinfo=UTC)
    with pytest.raises(RunParked):
        await desk.resume()
    desk.clock.at = datetime(2026, 3, 29, tzinfo=UTC)
    assert (await desk.resume()).text == "done"
    with pytest.raises(AnswerRefused):
        desk.journal.questions.answer(voted(question))
    first, second = await desk.journal.spending.list()
    assert (first.counted["tokens"], second.counted["tokens"]) == (25000, 5)


async def test_a_raise_frees_the_others_that_wait_for_the_same_cap_and_withdraws_their_questions() -> None:
    script = [reply(29_500), reply(1), reply(2), reply(3)]
    desk = Desk(script, TOKENS)
    await desk.run("first", "ann")
    waiting = [await desk.parked(run_id, "ann") for run_id in ("a", "b")]
    desk.journal.questions.answer(voted(waiting[0]))
    await desk.resume("a")
    assert await desk.journal.questions.open() == ()
    assert (await desk.resume("b")).text == "done"
    assert len((await desk.spent()).raises) == 1


async def test_a_run_in_memory_goes_on_when_the_cap_is_raised_elsewhere() -> None:
    desk = Desk([reply(29_500), reply(1), reply(2)], TOKENS)
    await desk.run("first", "ann")

    class Patient(Voters):
        def run_waiting(self, parking: Any) -> None: ...

    here = asyncio.ensure_future(_finished(desk.run("here", "ann", environment=Patient())))
    while not await desk.journal.questions.open("here"):
        await asyncio.sleep(0)
    window = (await desk.spent()).window
    await desk.journal.spending.add(window, SpendRaise(id="elsewhere", by="bob", amounts={"tokens": 9000}))
    assert (await here).text == "done"
    assert await desk.journal.questions.open() == ()


async def _finished(operation: Any) -> Any:
    return await operation


async def test_of_two_caps_the_lower_applies_and_an_apps_cap_is_everybodys() -> None:
    shared = Spend(Budget(requests=2), by="app")
    desk = Desk([reply(1)] * 3, [Spend(Budget(tokens=100_000)), shared])
    await desk.run("a", "ann")
    await desk.run("b", "bea")
    question = await desk.parked("c", "cem")
    assert "the app 'agent' has spent 2 requests" in question.message
    names = {state.window.name: state.counted["requests"] for state in await desk.journal.spending.list()}
    assert names == {"ann": 1, "bea": 1, "agent": 2}


async def test_a_warning_is_given_once_before_the_cap() -> None:
    desk = Desk([reply(14_000), reply(14_000), reply(1)], TOKENS)
    heard: list[SpendWarned] = []
    for number in range(3):
        session = Session()
        session.dispatcher.subscribe(SpendWarned, heard.append)
        await desk.agent.run("go", run_id=f"r{number}", session=session, max_tokens=100)
        assert len(heard) == (number > 0)
    assert "local has spent 28000 tokens on 2026-03-28, and the cap is 30000 tokens" in heard[0].text


async def test_a_request_that_ends_after_midnight_counts_for_the_day_on_which_it_began() -> None:
    async def late(request: Any) -> Reply:
        desk.clock.at = datetime(2026, 3, 29, 0, 0, 1, tzinfo=UTC)
        return reply(29_000)

    desk = Desk(late, TOKENS)
    session, heard = Session(), list[SpendWarned]()
    session.dispatcher.subscribe(SpendWarned, heard.append)
    assert (await desk.agent.run("go", session=session, max_tokens=100)).text == "done"
    assert "29000 tokens on 2026-03-28" in heard[0].text
    assert ((await desk.spent()).window.day, (await desk.spent()).in_flight) == ("2026-03-28", {})


async def test_retention_deletes_what_was_spent_on_days_that_no_rule_keeps() -> None:
    desk = Desk([reply(1), reply(2), reply(3)], [TOKENS, Spend(Budget(requests=9), by="app")])
    rules = [Retention(timedelta(days=1)), Retention(timedelta(days=2), ["failed"])]
    days: list[set[str]] = []
    for day in range(3):
        desk.clock.at = NOON + timedelta(days=2 * day)
        await desk.run(f"r{day}")
        window = (await desk.journal.spending.list())[-1].window
        await desk.journal.spending.reserve(f"killed {day}", {"tokens": 1}, {window: {}})
        await sweep(desk.journal, rules)
        days.append({state.window.day for state in await desk.journal.spending.list()})
    assert days == [{"2026-03-28"}, {"2026-03-28", "2026-03-30"}, {"2026-03-30", "2026-04-01"}]
    assert (await desk.journal.runs.verify()).altered == []


# --- nested runs --------------------------------------------------------------------------------------


async def test_nested_runs_spend_from_the_same_cap_and_park_the_run_at_it() -> None:
    inner = Agent(
        ScriptedModel([reply(25_000, calls=[ToolCall("look", {})]), reply(7)]), "Look.", tools=[look]
    )

    @tool(effect="idempotent")
    async def ask_inner(context: ToolContext) -> str:
        """Ask."""
        return (await inner.run("go", max_tokens=1000)).text

    desk = Desk([reply(3, calls=[ToolCall("ask_inner", {})]), reply(4)], TOKENS, tools=[ask_inner])
    question = await desk.parked(principal="ann")
    assert question.id == "r.1~1/1#2?spend-1"
    desk.journal.questions.answer(voted(question))
    assert (await desk.resume()).text == "done"
    assert (await desk.spent()).counted["tokens"] == 3 + 25_000 + 7 + 4


async def test_a_denied_raise_in_a_nested_run_ends_the_whole_run() -> None:
    @tool(effect="idempotent")
    async def ask_inner(context: ToolContext) -> str:
        """Ask."""
        return (await context.adapter.evaluate(desk.agent.prompt, "go")).text

    desk = Desk([reply(29_999, calls=[ToolCall("ask_inner", {})]), reply(4)], TOKENS, tools=[ask_inner])
    question = await desk.parked(principal="ann")
    desk.journal.questions.answer(voted(question, NO))
    with pytest.raises(PromptEvaluationError, match="denied by bob"):
        await desk.resume()
    assert len(desk.model.requests) == 1


async def test_a_raise_that_is_asked_for_needs_the_role_that_the_newest_cap_names() -> None:
    desk = Desk([reply(25_000, calls=[ToolCall("look", {})]), reply(5)], TOKENS, tools=[look])
    before = await desk.parked(principal="ann")
    spend = Spend(Budget(tokens=30_000), raised_by="owner")
    stricter = Agent(Adapter(desk.model, journal=desk.journal, spend=spend), desk.agent.prompt)

    class Owners(Voters):
        def voters(self, quorum: Quorum, principal: str, /) -> dict[str, float]:
            return {"bob": 1.0}

    desk.journal.questions.answer(voted(before))
    with pytest.raises(RunParked) as parked:
        await stricter.resume("r", environment=Owners())
    [question] = parked.value.questions
    with pytest.raises(AnswerRefused):
        desk.journal.questions.answer(voted(question))
    desk.journal.questions.answer(voted(question, roles=("owner",)))
    assert (await stricter.resume("r", environment=Owners())).text == "done"


async def test_what_runs_under_a_ticket_spends_from_the_caps_of_its_run_and_from_its_own() -> None:
    inner = Agent(
        Adapter(ScriptedModel([reply(25_000)]), spend=Spend(Budget(requests=9), by="app")),
        "Look.",
        name="inner",
    )

    @tool(name="ask_inner", effect="idempotent")
    async def there(context: ToolContext) -> str:
        """Ask."""
        return (await inner.run("go", max_tokens=1000)).text

    @tool(effect="idempotent")
    async def ask_inner(context: ToolContext) -> str:
        """Ask."""
        return (await redeem(context.ticket(), tool=there, journal=desk.journal)).message

    desk = Desk([reply(3, calls=[ToolCall("ask_inner", {})]), reply(4)], TOKENS, tools=[ask_inner])
    await desk.run(principal="ann")
    counted = {state.window.name: state.counted for state in await desk.journal.spending.list()}
    assert (counted["ann"]["tokens"], counted["inner"]["requests"]) == (25_007, 1)


async def test_what_an_opened_gate_runs_spends_from_its_caps() -> None:
    journal, leaf = MemoryJournal(), Prompt("leaf", "Leaf.")

    @tool(effect="idempotent")
    async def ask_inner(context: ToolContext) -> str:
        """Ask."""
        return (await context.adapter.evaluate(leaf, "go")).text

    adapter = Adapter(ScriptedModel([reply(7)]), journal=journal, spend=Spend(Budget(requests=1), by="app"))
    gate = open_gate([ask_inner], adapter=adapter, prompt=Prompt("desk", "Help."))
    assert (await gate.invoke("ask_inner")).value == "done"
    with pytest.raises(PromptEvaluationError, match="the app 'desk' has spent 1 requests"):
        await gate.invoke("ask_inner")


async def test_a_resumed_run_keeps_its_caps_and_a_newer_one_with_the_same_scope_replaces_them() -> None:
    desk = Desk([reply(25_000, calls=[ToolCall("look", {})]), reply(5)], TOKENS, tools=[look])
    await desk.parked(principal="ann")
    bare = Agent(Adapter(desk.model, journal=desk.journal), desk.agent.prompt)
    with pytest.raises(RunParked):
        await bare.resume("r", environment=Voters())
    higher = Agent(
        Adapter(desk.model, journal=desk.journal, spend=Spend(Budget(tokens=100_000))), desk.agent.prompt
    )
    assert (await higher.resume("r", environment=Voters())).text == "done"
    assert await desk.journal.questions.open() == ()


async def test_a_background_run_spends_from_the_caps_of_the_run_that_began_it_and_waits_at_them_in_its_worker() -> (
    None
):
    journal = MemoryJournal()
    caps = [Spend(Budget(tokens=10**6)), Spend(Budget(requests=2), by="app")]
    await host.run(asked(), journal=journal, run_id="r", app=HOST, spend=caps)
    [child] = await children(journal, "r")
    async with working(journal):
        await until(journal, child.record.id, {"parked"})
        [question] = await journal.questions.open()
        assert "the app 'host' has spent 2 requests" in question.message
        journal.questions.answer(answer_to(question, YES))
        row = await until(journal, child.record.id)
    assert decode_outcome(row).text == "hello"
    counted = {state.window.name: state.counted["requests"] for state in await journal.spending.list()}
    assert counted == {"local": 3, "host": 3}
