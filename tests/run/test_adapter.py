"""The agent loop: what an evaluation does, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

import pytest
from pydantic import Field

from handrail import (
    Adapter,
    AgentContext,
    Budget,
    Deadline,
    MarkdownSection,
    MemoryFilesystem,
    MemoryJournal,
    Prompt,
    PromptEvaluationError,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    UserContext,
    tool,
)
from handrail.context import PROVIDER_REQUEST_ID, RETRIES
from handrail.errors import (
    BudgetExceededError,
    ConversationBusy,
    DeadlineExceededError,
    DefinitionError,
    DepthExceededError,
    OperationUsedTwice,
    VisibilityExpansionRequired,
)
from handrail.events import (
    MessageAdded,
    ModelFailed,
    ModelRequested,
    ModelResponded,
    PromptExecuted,
    PromptRendered,
    TextDelta,
    ToolInvoked,
    ToolStarted,
)
from handrail.messages import AssistantMessage, Price, Sent, Takes, ToolMessage, Traits, Usage, UserMessage
from handrail.models import ModelRateLimited, ModelUnavailable
from handrail.models.http import encoder
from handrail.models.providers import Quirks
from handrail.models.scripted import Reply
from handrail.run.adapter import Retry, Throttle
from handrail.run.limits import BudgetTracker
from handrail.session import load, save
from handrail.testing import Agent, RecordingSubscriber, VirtualClock, run_virtual
from support.parked_runs import park_and_resume


@dataclass(frozen=True)
class Verdict:
    """The output type of a prompt."""

    verdict: Annotated[str, Field(description="判決。" * 60)]


ONE = Price(Decimal(1_000_000), Decimal(1_000_000))
"""A price of one dollar per token, so that the cost equals the token count."""


@tool
async def weather(city: str) -> str:
    """Say what the weather is like in a city."""
    return f"It rains in {city}."


GUIDE = Prompt("guide", "Answer briefly.", tools=[weather])


def wrongly(value: object) -> Any:
    """Return the value as `Any`, to hide its type from the type checker."""
    return value


def scripted(*answers: Any, **options: Any) -> ScriptedModel:
    return ScriptedModel(answers, **options)


# --- a run -------------------------------------------------------------------------------------


def test_hello_world() -> None:
    """Evaluating a prompt with a tool returns the model's answer, and each request contains the conversation so far."""
    model = scripted(ToolCall("weather", {"city": "Oslo"}), "Take an umbrella.")
    response = Adapter(model).evaluate(GUIDE, "What is it like in Oslo?").wait()
    assert (response.text, response.output, response.stop_reason) == ("Take an umbrella.", None, "done")
    asked, answered = model.requests
    assert asked.system == "Answer briefly."
    assert list(asked.messages) == [UserMessage("What is it like in Oslo?")]
    assert [offered.tool for offered in asked.tools] == [weather]
    call, result = list(answered.messages)[1:]
    assert isinstance(call, AssistantMessage)
    assert isinstance(result, ToolMessage)
    assert result.results[0].text == "It rains in Oslo."


@pytest.mark.virtual_time
async def test_parallel_calls_run_at_once() -> None:
    """The calls in one model answer run concurrently, and their results are in the order of the calls."""

    @tool
    async def wait(seconds: int) -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return f"waited {seconds}"

    loop = asyncio.get_running_loop()
    model = scripted([ToolCall("wait", {"seconds": 9}), ToolCall("wait", {"seconds": 5})], "Done.")
    await Adapter(model).evaluate(Prompt("p", "Wait.", tools=[wait]), "go")
    assert loop.time() == pytest.approx(9, abs=0.1)
    results = model.requests[1].messages[-1]
    assert isinstance(results, ToolMessage)
    assert [each.text for each in results.results] == ["waited 9", "waited 5"]


def test_a_run_is_told_in_events() -> None:
    """A run publishes its events in a fixed order, and those with a run context all carry the same run id."""
    session = Session()
    with RecordingSubscriber(session) as seen:
        Adapter(scripted(ToolCall("weather", {"city": "Oslo"}), "Rain.")).evaluate(
            GUIDE, "hi", session=session
        ).wait()
    assert [type(event) for event in seen.events] == [
        PromptRendered,
        MessageAdded,
        ModelRequested,
        ModelResponded,
        MessageAdded,
        ToolStarted,
        ToolInvoked,
        MessageAdded,
        ModelRequested,
        ModelResponded,
        MessageAdded,
        PromptExecuted,
    ]
    contexts: list[Any] = [getattr(event, "run_context", None) for event in seen.events]
    assert len({context.run_id for context in contexts if context is not None}) == 1


def test_a_bus_of_ones_own_hears_the_run() -> None:
    """A `bus` passed to a run receives that run's events, with or without a session. It receives none of a later run's."""

    class Listening:
        def __init__(self) -> None:
            self.heard: list[object] = []

        def publish(self, event: object, /) -> None:
            self.heard.append(event)

        def subscribe(self, kind: type, listener: Any, /) -> Any:
            raise NotImplementedError

    for session in (None, Session()):
        bus = Listening()
        Adapter(scripted("Hi.")).evaluate(GUIDE, "hi", session=session, bus=bus).wait()
        assert isinstance(bus.heard[-1], PromptExecuted)
    assert session is not None
    Adapter(scripted("Hi.")).evaluate(GUIDE, "hi", session=session).wait()
    assert sum(isinstance(event, PromptExecuted) for event in bus.heard) == 1
    own = Session().dispatcher
    seen: list[object] = []
    own.subscribe(PromptExecuted, seen.append)
    Adapter(scripted("Hi.")).evaluate(GUIDE, "hi", bus=own).wait()
    assert len(seen) == 1


def test_a_conversation_continues() -> None:
    """A second evaluation on the same session sends the whole conversation so far."""
    session = Session()
    model = scripted("One.", "Two.")
    adapter = Adapter(model)
    adapter.evaluate(GUIDE, "first", session=session).wait()
    adapter.evaluate(GUIDE, "second", session=session).wait()
    said = [message.text for message in model.requests[1].messages if not isinstance(message, ToolMessage)]
    assert said == ["first", "One.", "second"]


def test_a_conversation_outlives_its_session_object() -> None:
    """A saved and reloaded session continues the same conversation."""
    session = Session()
    Adapter(scripted(ToolCall("weather", {"city": "Oslo"}), "Rain.")).evaluate(
        GUIDE, "hi", session=session
    ).wait()
    again = load(save(session))
    model = scripted("Still rain.")
    Adapter(model).evaluate(GUIDE, "and now?", session=again).wait()
    assert [type(message).__name__ for message in model.requests[0].messages] == [
        "UserMessage",
        "AssistantMessage",
        "ToolMessage",
        "AssistantMessage",
        "UserMessage",
    ]


@pytest.mark.virtual_time
async def test_one_evaluation_at_a_time() -> None:
    """A second evaluation in a busy conversation is refused. It is allowed once the first has ended."""
    session = Session()
    adapter = Adapter(scripted(Reply("slow", delay=5), "later"))
    first = asyncio.ensure_future(adapter.evaluate(GUIDE, "one", session=session))
    await asyncio.sleep(1)
    with pytest.raises(ConversationBusy, match="Wait until it has ended"):
        await adapter.evaluate(GUIDE, "two", session=session)
    assert (await first).text == "slow"
    assert (await adapter.evaluate(GUIDE, "two", session=session)).text == "later"


def test_a_session_is_let_go() -> None:
    """A conversation does not keep its session alive."""
    session = Session()
    Adapter(scripted("Hi.")).evaluate(GUIDE, "hi", session=session).wait()
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is None


def test_params_fill_the_prompt() -> None:
    """Params fill the templates, and the user's turn is `message` or a default text."""

    @dataclass(frozen=True)
    class Topic:
        topic: str

    prompt = Prompt("about", [MarkdownSection[Topic]("Task", "task", "Write about $topic.")])
    model = scripted("Done.", "Done.")
    adapter = Adapter(model)
    adapter.evaluate(prompt, Topic("rain")).wait()
    adapter.evaluate(prompt, Topic("snow"), message="Now.").wait()
    assert "Write about rain." in model.requests[0].system
    assert [request.messages[0] for request in model.requests] == [
        UserMessage("Do what the instructions say."),
        UserMessage("Now."),
    ]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda a: a.evaluate("prompt", "hi"), "evaluate takes a Prompt, not a str"),
        (lambda a: a.evaluate(GUIDE, "hi", message="hi"), "two messages were passed"),
        (lambda a: a.evaluate(GUIDE, "hi", session=5), "session is an int. Pass a Session"),
        (lambda a: a.evaluate(GUIDE, "hi", deadline=5).wait(), "deadline is an int. Pass a Deadline"),
        (lambda a: a.evaluate(GUIDE, "hi", budget=5).wait(), "budget is an int. Pass a Budget"),
        (lambda a: Adapter("gpt-5"), "Write provider:name"),
        (lambda a: Adapter(wrongly(ScriptedModel)), "is not a model"),
        (lambda a: Adapter(wrongly(object())), "is not a model"),
        (lambda a: ScriptedModel("hi"), r"Write ScriptedModel\(\['hi'\]\)"),
        (lambda a: Adapter(scripted(7)).evaluate(GUIDE, "hi").wait(), "a script can't contain 7"),
        (lambda a: Retry(attempts=0), "Pass an integer of at least 1"),
        (lambda a: Retry(first_wait=5, longest_wait=1), "first_wait is 5, and longest_wait is 1"),
        (lambda a: Retry(attempts=wrongly("3")), "Pass an integer"),
        (lambda a: Retry(first_wait=wrongly("1")), "Pass numbers of at least 0"),
        (lambda a: Throttle(at_once=0), "at_once=0 is not a valid limit. Pass a whole number of at least 1"),
        (lambda a: Throttle(at_once=wrongly(1.5)), "at_once=1.5 is not a valid limit"),
        (lambda a: Throttle(per_minute=0), "per_minute=0 is not a valid rate"),
        (lambda a: Throttle(per_minute=wrongly("9")), "per_minute='9' is not"),
        (
            lambda a: Adapter(scripted("x"), max_tokens=0),
            "max_tokens is 0",
        ),
        (lambda a: Adapter(scripted("x"), temperature=-1), "temperature is -1"),
        (lambda a: a.evaluate(GUIDE, "hi", max_tokens=-5), "max_tokens is -5"),
        (lambda a: a.evaluate(GUIDE, "hi", temperature="hot"), "temperature is 'hot'"),
        (lambda a: a.stream(GUIDE, "hi", max_tokens=1.5), "max_tokens is 1.5"),
    ],
)
def test_bad_input_is_refused_by_name(wrong: Any, words: str) -> None:
    """Invalid arguments are refused with an error that says what is wrong or what to pass."""
    with pytest.raises(DefinitionError, match=words):
        wrong(Adapter(scripted("x")))


def test_a_script_that_is_over_says_so() -> None:
    """A request beyond the end of the script fails, and the error says which request has no answer."""
    with pytest.raises(PromptEvaluationError, match="its script has no answer to request 2"):
        Adapter(scripted(ToolCall("weather", {"city": "Oslo"}))).evaluate(GUIDE, "hi").wait()


# --- streaming ---------------------------------------------------------------------------------


def test_a_script_iterates_a_stream() -> None:
    """Synchronous code can iterate a stream once to get the run's events, and then get the response from `.response`."""
    stream = Adapter(scripted(ToolCall("weather", {"city": "Oslo"}), "It rains a lot.")).stream(GUIDE, "hi")
    seen = list(stream)
    assert "".join(event.text for event in seen if isinstance(event, TextDelta)) == "It rains a lot."
    assert isinstance(seen[-1], PromptExecuted)
    assert stream.response.wait().text == "It rains a lot."
    with pytest.raises(OperationUsedTwice, match="iterated already"):
        list(stream)


def test_a_stream_that_is_only_asked_for_its_response() -> None:
    """Waiting for a stream's `.response` executes the run, even if nobody iterates the stream."""
    assert Adapter(scripted("Hi.")).stream(GUIDE, "hi").response.wait().text == "Hi."


def test_a_stream_shows_what_failed_and_the_response_raises_it() -> None:
    """Iterating a stream does not raise the run's error. The last event reports the failure, and `.response` raises the error."""
    stream = Adapter(scripted(ModelUnavailable("m", "down")), retry=Retry(attempts=1)).stream(GUIDE, "hi")
    last = list(stream)[-1]
    assert isinstance(last, PromptExecuted)
    assert last.stop_reason.startswith("failed: ")
    with pytest.raises(PromptEvaluationError, match="down"):
        stream.response.wait()


def test_leaving_a_stream_cancels_its_run() -> None:
    """If a stream is abandoned, its run is cancelled and the handler in progress ends."""
    began: list[str] = []
    ended: list[str] = []

    @tool
    async def slow() -> str:
        """Take a long time."""
        began.append("slow")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("slow")
        return "never"

    session = Session()
    stream = Adapter(scripted(ToolCall("slow"), "never")).stream(
        Prompt("p", "Go.", tools=[slow]), "hi", session=session
    )
    for event in stream:
        if isinstance(event, ToolStarted):
            break
    assert began == ended
    (executed,) = session[PromptExecuted].all()
    assert executed.stop_reason == "cancelled"


def test_a_stream_includes_nested_runs() -> None:
    """A stream includes the events of nested runs."""

    @tool
    async def ask(context: ToolContext) -> str:
        """Ask another agent."""
        return (await context.adapter.evaluate(Prompt("inner", "Inner."), "inner")).text

    stream = Adapter(scripted(ToolCall("ask"), "From inside.", "Outside.")).stream(
        Prompt("p", "Go.", tools=[ask]), "hi"
    )
    texts = [event for event in stream if isinstance(event, TextDelta)]
    assert "".join(event.text for event in texts) == "From inside.Outside."
    assert len({event.run_context.run_id for event in texts}) == 2


# --- limits ------------------------------------------------------------------------------------


def test_budget_of_requests() -> None:
    """A run that has used up its requests ends with an error that names the limit."""
    model = ScriptedModel(lambda request: ToolCall("weather", {"city": "Oslo"}))
    with pytest.raises(PromptEvaluationError, match="requests") as raised:
        Adapter(model).evaluate(GUIDE, "hi", budget=Budget(requests=3)).wait()
    assert raised.value.phase == "budget"
    assert isinstance(raised.value.__cause__, BudgetExceededError)
    assert len(model.requests) == 3


def test_usage_and_cost_of_request_run_and_subtree() -> None:
    """Each answer's cost is exact, and so are each run's usage and cost, which include those of its nested runs."""

    @tool
    async def ask(context: ToolContext) -> str:
        """Ask another agent."""
        inner = await context.adapter.evaluate(Prompt("inner", "Inner."), "inner")
        assert inner.usage == Usage(20, 2, 0, 0, 1)
        assert inner.cost == 22
        assert context.cost_tracker.spent()["money"] == 10 + 1 + 22
        return inner.text

    model = ScriptedModel(
        [
            Reply(calls=[ToolCall("ask")], usage=Usage(10, 1, 0, 0, 1)),
            Reply("in", usage=Usage(20, 2, 0, 0, 1)),
            Reply("out", usage=Usage(30, 3, 5, 0, 1)),
        ],
        traits=Traits(ONE, native_output=True),
    )
    session = Session()
    response = Adapter(model).evaluate(Prompt("p", "Go.", tools=[ask]), "hi", session=session).wait()
    assert response.usage == Usage(60, 6, 5, 0, 3)
    assert response.cost == 66
    assert [each.cost for each in session[ModelResponded].all()] == [11, 22, 33]


def test_an_unknown_price_is_unknown() -> None:
    """Without a price the cost is None, and a money limit refuses the request before it is sent."""
    model = scripted("Hi.", "Hi.")
    assert Adapter(model).evaluate(GUIDE, "hi").wait().cost is None
    with pytest.raises(PromptEvaluationError, match="unknown amount") as raised:
        Adapter(model).evaluate(GUIDE, "hi", budget=Budget(money=5)).wait()
    assert raised.value.phase == "budget"
    assert len(model.requests) == 1


def test_little_money_makes_answers_short() -> None:
    """If a budget can't pay for the longest answer, `max_tokens` is lowered. If it can't pay for even a short one, the run fails."""
    seen: list[int] = []

    def answer(request: Any) -> Reply:
        seen.append(request.max_tokens)
        return Reply("Hi.", usage=Usage(10, 1, 0, 0, 1))

    model = ScriptedModel(answer, traits=Traits(Price(Decimal(3), Decimal(15)), native_output=True))
    assert Adapter(model).evaluate(GUIDE, "hi", budget=Budget(money=0.02)).wait().text == "Hi."
    assert 16 <= seen[0] < 4096
    with pytest.raises(PromptEvaluationError, match="money"):
        Adapter(model).evaluate(GUIDE, "hi", budget=Budget(money=0.0001)).wait()


def test_the_table_of_prices() -> None:
    """A known provider's model has a price from the maintained table, lower for cached tokens.

    An unknown model has none.
    """
    from handrail.models.prices import tariff_of

    million = Usage(1_000_000, 1_000_000, 0, 0, 1)
    known = tariff_of("openai:gpt-4o", Traits())(million)
    assert known is not None
    assert 1 < known < 100
    cached = tariff_of("anthropic:claude-sonnet-4-5", Traits())(Usage(100_000, 0, 90_000, 0, 1))
    fresh = tariff_of("anthropic:claude-sonnet-4-5", Traits())(Usage(100_000, 0, 0, 0, 1))
    assert cached is not None
    assert fresh is not None
    assert cached < fresh
    assert tariff_of("nobody:nothing", Traits())(million) is None


def test_tokens_are_reserved_before_and_settled_after() -> None:
    """A request reserves as many tokens as it could use at most. Afterwards only its actual usage counts."""
    tracker = BudgetTracker(Budget(tokens=100_000))
    left: list[float] = []

    def answer(request: Any) -> Reply:
        left.append(tracker.remaining()["tokens"])
        assert request.max_tokens == 4096
        return Reply("Hi.", usage=Usage(50, 5, 0, 0, 1))

    Adapter(ScriptedModel(answer)).evaluate(GUIDE, "hi", budget=tracker).wait()
    assert left[0] < 100_000 - 4096
    assert tracker.remaining()["tokens"] == 100_000 - 55


@pytest.mark.parametrize("wire", ["chat", "responses", "anthropic"])
def test_what_is_reserved_is_at_least_what_is_said_of_tools_and_answer(wire: str) -> None:
    """The reservation covers the encoded bytes of the output schema and of all tools, including an opened section's."""
    from handrail.models import anthropic, openai, responses

    encoder = {
        "chat": openai._tool,
        "responses": responses._tool,
        "anthropic": anthropic._tool,
    }[wire]

    @tool
    async def look(city: Annotated[str, Field(description="ある都市の名前。" * 60)]) -> str:
        """天気を見る。"""
        return city

    prompt = Prompt(
        "guide",
        [
            MarkdownSection("Task", "task", "Help.", tools=[weather]),
            MarkdownSection(
                "More", "more", "Look.", tools=[look], summary="How to look.", visibility="summary"
            ),
        ],
        output=Verdict,
    )
    script = [ToolCall("open_sections", {"sections": ["more"]}), '{"verdict": "fine"}']
    tracker = BudgetTracker(Budget(tokens=100_000))
    reserved: list[int] = []

    def answer(request: Any) -> Reply:
        spent = 2 * len(reserved)  # the usage that the earlier replies reported
        reserved.append(100_000 - spent - int(tracker.remaining()["tokens"]) - request.max_tokens)
        said = script[len(reserved) - 1]
        usage = Usage(1, 1, 0, 0, 1)
        return Reply(said, usage=usage) if isinstance(said, str) else Reply(calls=[said], usage=usage)

    model = ScriptedModel(answer)
    Adapter(model).evaluate(prompt, "hi", budget=tracker).wait()
    first, second = model.requests
    assert first.output is not None
    assert reserved[0] >= len(first.tools.encoded(encoder)) + len(anthropic.encode(first.output.json_schema))
    assert second.tools[-1].tool is look
    assert reserved[1] >= len(encoder(second.tools[-1]))


@pytest.mark.virtual_time
async def test_eight_children_can_not_pass_a_limit_of_four() -> None:
    """Parallel nested runs share one budget and together never make more requests than it allows."""

    @tool
    async def ask(context: ToolContext) -> str:
        """Ask another agent."""
        return (await context.adapter.evaluate(Prompt("inner", "Inner."), "inner")).text

    def answer(request: Any) -> Any:
        if request.system == "Inner.":
            return Reply("in", delay=1)
        return "out" if len(request.messages) > 1 else [ToolCall("ask") for _ in range(8)]

    session = Session()
    model = ScriptedModel(answer)
    with pytest.raises(PromptEvaluationError, match="requests"):
        await Adapter(model).evaluate(
            Prompt("p", "Go.", tools=[ask]), "hi", session=session, budget=Budget(requests=5)
        )
    assert sum(request.system == "Inner." for request in model.requests) == 4


def test_a_share_for_a_child() -> None:
    """If a nested run uses up its share of the budget, its call fails, and the outer run continues."""

    @tool
    async def ask(context: ToolContext) -> str:
        """Ask another agent."""
        inner = Prompt("inner", "Inner.", tools=[weather])
        return (await context.adapter.evaluate(inner, "inner", budget=Budget(requests=1))).text

    def answer(request: Any) -> Any:
        if request.system == "Inner.":
            return ToolCall("weather", {"city": "Oslo"})
        return "I see." if len(request.messages) > 1 else ToolCall("ask")

    session = Session()
    response = (
        Adapter(ScriptedModel(answer)).evaluate(Prompt("p", "Go.", tools=[ask]), "hi", session=session).wait()
    )
    assert response.text == "I see."
    failed = session[ToolInvoked].latest()
    assert failed is not None
    assert failed.status == "error"
    assert "requests" in failed.result.message


@pytest.mark.virtual_time
async def test_deadline_before_and_during_a_request() -> None:
    """A deadline is checked before a request, and ends a request that takes too long."""
    clock = VirtualClock()
    adapter = Adapter(scripted(Reply("late", delay=100)), clock=clock)
    with pytest.raises(PromptEvaluationError, match="deadline") as raised:
        await adapter.evaluate(GUIDE, "hi", deadline=Deadline.after(10, clock=clock))
    assert asyncio.get_running_loop().time() == pytest.approx(10, abs=0.1)
    assert isinstance(raised.value.__cause__, DeadlineExceededError)
    over = Deadline.after(0.001, clock=clock)
    await asyncio.sleep(1)
    model = scripted("never")
    with pytest.raises(PromptEvaluationError, match="deadline"):
        await Adapter(model, clock=clock).evaluate(GUIDE, "hi", deadline=over)
    assert not model.requests


def test_the_run_of_a_child_ends_with_the_deadline_of_its_parent() -> None:
    """A parent's deadline ends all runs below it. A nested run's own, tighter deadline ends only that run."""

    @tool
    async def ask(seconds: int, context: ToolContext) -> str:
        """Ask another agent."""
        limit = Deadline.after(seconds, clock=VirtualClock())
        return (await context.adapter.evaluate(Prompt("inner", "Inner."), "inner", deadline=limit)).text

    def answer(request: Any) -> Any:
        if request.system == "Inner.":
            return Reply("late", delay=50)
        return "I see." if len(request.messages) > 1 else ToolCall("ask", {"seconds": tight})

    async def scenario() -> None:
        clock = VirtualClock()
        adapter = Adapter(ScriptedModel(answer), clock=clock)
        prompt = Prompt("p", "Go.", tools=[ask])
        if tight < 20:
            assert (
                await adapter.evaluate(prompt, "hi", deadline=Deadline.after(20, clock=clock))
            ).text == "I see."
        else:
            with pytest.raises(PromptEvaluationError, match="deadline"):
                await adapter.evaluate(prompt, "hi", deadline=Deadline.after(20, clock=clock))

    for tight in (5, 30):  # noqa: B007  # the functions above read it
        run_virtual(scenario)


# --- retries -----------------------------------------------------------------------------------


def test_waits_grow_and_are_cut_by_chance() -> None:
    """Waits between retries double up to a limit, and jitter shortens each by up to half.

    A provider's `retry_after` is never shortened. If it exceeds the limit, there is no retry.
    """
    retry = Retry(attempts=9, first_wait=1, longest_wait=5, chance=lambda: 1.0)
    error = ModelUnavailable("m", "down")
    assert [retry.wait_after(attempt, error) for attempt in range(1, 6)] == [1, 2, 4, 5, 5]
    least = Retry(attempts=9, first_wait=1, longest_wait=5, chance=lambda: 0.0)
    assert least.wait_after(3, error) == 2
    assert retry.wait_after(9, error) is None
    assert least.wait_after(1, ModelRateLimited("m", "busy", retry_after=3)) == 3
    assert least.wait_after(1, ModelRateLimited("m", "busy", retry_after=6)) is None


@pytest.mark.virtual_time
async def test_a_throttle_holds_requests_back() -> None:
    """A throttle limits concurrent requests and requests per minute, and can hold all requests for a while."""
    clock, loop = VirtualClock(), asyncio.get_running_loop()
    times: list[float] = []

    def answer(request: Any) -> Reply:
        times.append(loop.time())
        return Reply("Hi.", delay=10)

    def runs(throttle: Throttle) -> Any:
        adapter = Adapter(ScriptedModel(answer), clock=clock, throttle=throttle)
        return asyncio.gather(*(adapter.evaluate(GUIDE, "hi") for _ in range(3)))

    await runs(Throttle(at_once=1, clock=clock))
    assert [round(time) for time in times] == [0, 10, 20]
    times.clear()
    begin = loop.time()
    await runs(Throttle(per_minute=30, clock=clock))
    assert [round(time - begin) for time in times] == [0, 2, 4]
    times.clear()
    begin = loop.time()
    held = Throttle(clock=clock)
    held.hold(7)
    await runs(held)
    assert [round(time - begin) for time in times] == [7, 7, 7]


@pytest.mark.virtual_time
async def test_a_rate_limit_holds_everybody_who_shares_the_throttle() -> None:
    """After one run has been rate limited, every run that shares its throttle waits."""
    clock, loop = VirtualClock(), asyncio.get_running_loop()
    throttle = Throttle(clock=clock)
    limited = Adapter(
        scripted(ModelRateLimited("m", "busy", retry_after=8), "fine"),
        clock=clock,
        throttle=throttle,
        retry=Retry(chance=lambda: 0.0),
    )
    other = Adapter(scripted("fine"), clock=clock, throttle=throttle)
    first = asyncio.ensure_future(limited.evaluate(GUIDE, "hi"))
    await asyncio.sleep(1)
    assert (await other.evaluate(GUIDE, "hi")).text == "fine"
    assert loop.time() == pytest.approx(8, abs=0.1)
    assert (await first).text == "fine"


def test_a_tool_sees_the_request_that_led_to_it() -> None:
    """A tool can read its prompt, the request that led to its call, the accumulated response, and the number of retries."""
    seen: list[Any] = []

    @tool
    async def look(context: ToolContext) -> str:
        """Look around."""
        seen.append((context.request, context.response_accumulator, context.extras))
        assert context.rendered_prompt is not None
        assert context.prompt.name == "p"
        return "ok"

    failing = ModelUnavailable("m", "down")
    model = scripted(failing, Reply("Let me see.", [ToolCall("look", {}, "c1")]), "Done.")
    Adapter(model, retry=Retry(first_wait=0.001)).evaluate(Prompt("p", "Go.", tools=[look]), "hi").wait()
    request, accumulator, extras = seen[0]
    assert request.model == "scripted:script"
    assert request.body["messages"] == [{"role": "user", "text": "hi"}]
    assert (accumulator.text, accumulator.calls) == ("Let me see.", ("c1",))
    assert extras[RETRIES] == 1
    assert extras.get(PROVIDER_REQUEST_ID) is None


@pytest.mark.parametrize("ids", [(None,), (None, None), ("c1", None), ("c1", "c1")])
async def test_the_accumulated_response_has_the_id_of_each_call(ids: tuple[str | None, ...]) -> None:
    """A call's id is in its `response_accumulator` also if the provider gave none, or one that is taken, and after a resume."""
    seen: list[Any] = []

    @tool(effect="idempotent")
    async def look(context: UserContext) -> str:
        """Look around."""
        assert context.response_accumulator is not None
        seen.append((context.call_id, context.response_accumulator.calls))
        return await context.wait_for("go_on", {}) if len(seen) == 2 * len(ids) else "seen"

    turn = [ToolCall("look", {}, id) for id in ids]
    adapter = Adapter(ScriptedModel([turn, turn, "Done."]), journal=MemoryJournal())
    assert await park_and_resume(adapter, Prompt("p", "Go.", tools=[look])) == "Done."
    assert len(seen) >= 2 * len(ids) + 1
    assert all(call_id and call_id in calls and len(calls) == len(ids) for call_id, calls in seen)
    first, second, again = seen[0][1], seen[len(ids)][1], seen[-1][1]
    assert not set(first) & set(second)
    assert again == second


# --- nesting -----------------------------------------------------------------------------------


def test_what_a_call_evaluates_is_undone_with_it() -> None:
    """Files that a nested run writes are committed or rolled back with the call that started the run."""

    @tool(effect="staged")
    async def write(path: str, context: ToolContext) -> str:
        """Write a file."""
        context.filesystem.write(path, "text")
        return path

    @tool
    async def delegate(fail: bool, context: ToolContext) -> str:
        """Let another agent write the file."""
        await context.adapter.evaluate(Prompt("inner", "Inner.", tools=[write]), f"{fail}")
        assert context.filesystem.exists(f"{fail}.txt")
        if fail:
            raise ValueError("after all")
        return "written"

    def answer(request: Any) -> Any:
        if request.system == "Inner.":
            return (
                "ok"
                if len(request.messages) > 1
                else ToolCall("write", {"path": f"{request.messages[0].text}.txt"})
            )
        calls = [ToolCall("delegate", {"fail": True}), ToolCall("delegate", {"fail": False})]
        return "Done." if len(request.messages) > 1 else calls

    files = MemoryFilesystem()
    Adapter(ScriptedModel(answer)).evaluate(
        Prompt("p", "Go.", tools=[delegate]), "hi", filesystem=files
    ).wait()
    assert [each.path for each in files.list()] == ["False.txt"]


def test_nested_runs_are_conversations_of_their_own() -> None:
    """A nested run neither sees nor extends the conversation of the outer run or of another nested run."""

    @tool
    async def ask(context: ToolContext) -> str:
        """Ask two other agents, one after the other."""
        one = await context.adapter.evaluate(Prompt("inner", "Inner."), "first")
        two = await context.adapter.evaluate(Prompt("inner", "Inner."), "second")
        return f"{one.text} {two.text}"

    model = ScriptedModel(
        lambda request: (
            "in" if request.system == "Inner." else ("out" if len(request.messages) > 1 else ToolCall("ask"))
        )
    )
    session = Session()
    Adapter(model).evaluate(Prompt("p", "Go.", tools=[ask]), "hi", session=session).wait()
    assert [[each.text for each in request.messages] for request in model.requests[1:3]] == [
        ["first"],
        ["second"],
    ]
    keys = [each.conversation for each in session[MessageAdded].all()]
    assert len(set(keys)) == 3
    assert keys.count("root") == 4


def test_a_nested_prompt_may_have_resources_of_its_own() -> None:
    """A nested run uses the resource that its own prompt binds, even if the outer run binds another of the same type."""
    from handrail.resources.bindings import given

    class Settings:
        word = "here"

    @tool
    async def look(context: ToolContext) -> str:
        """Return the word of the bound settings."""
        return context.resources.get(Settings).word

    inner = Prompt("inner", "Inner.", tools=[look], resources=[given(Settings, Settings())])

    @tool
    async def ask(context: ToolContext) -> str:
        """Ask another agent."""
        return (await context.adapter.evaluate(inner, "inner")).text

    def answer(request: Any) -> Any:
        if request.system == "Inner.":
            last = request.messages[-1]
            return last.text if len(request.messages) > 1 else ToolCall("look")
        return "out" if len(request.messages) > 1 else ToolCall("ask")

    outer = Prompt("p", "Go.", tools=[ask])

    class Others(Settings):
        word = "elsewhere"

    for resources, said in (((), "here"), ([given(Settings, Others())], "here")):
        session = Session()
        Adapter(ScriptedModel(answer)).evaluate(outer, "hi", session=session, resources=resources).wait()
        last = session[ToolInvoked].latest()
        assert last is not None
        assert said in last.result.render()


def test_depth_is_limited_through_nested_runs() -> None:
    """A tool that evaluates its own prompt fails at the depth limit, and the runs above it continue."""

    @tool
    async def deeper(context: ToolContext) -> str:
        """Go deeper."""
        return (await context.adapter.evaluate(prompt, "deeper")).text

    prompt = Prompt("p", "Go.", tools=[deeper])
    session = Session()
    model = ScriptedModel(lambda request: "out" if len(request.messages) > 1 else ToolCall("deeper"))
    assert Adapter(model).evaluate(prompt, "hi", session=session).wait().text == "out"
    failed = [each for each in session[ToolInvoked].all() if isinstance(each.error, DepthExceededError)]
    assert [len(each.path) for each in failed] == [6]


@pytest.mark.virtual_time
async def test_cancelling_stops_the_whole_tree() -> None:
    """Cancelling a run ends a model request at the fifth level, and the runs at all five levels."""

    @tool
    async def deeper(context: ToolContext) -> str:
        """Go deeper."""
        return (await context.adapter.evaluate(prompt, "deeper")).text

    prompt = Prompt("p", "Go.", tools=[deeper])
    closed: list[bool] = []

    async def answer(request: Any) -> Any:
        if len(closed) or len(model.requests) < 5:
            return ToolCall("deeper")
        try:
            await asyncio.sleep(500)
        finally:
            closed.append(True)
        return "never"

    model = ScriptedModel(answer)

    session = Session()
    with RecordingSubscriber(session) as seen:
        task = asyncio.ensure_future(Adapter(model).evaluate(prompt, "hi", session=session))
        await asyncio.sleep(5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        seen.assert_paired()
    assert closed == [True]
    assert {each.stop_reason for each in session[PromptExecuted].all()} == {"cancelled"}
    assert len(session[PromptExecuted].all()) == 5


def test_an_expired_adapter_refuses() -> None:
    """A finished call's adapter refuses to evaluate."""
    from handrail.errors import ContextExpired

    kept: list[Any] = []

    @tool
    async def keep(context: ToolContext) -> str:
        """Keep the adapter."""
        kept.append(context.adapter)
        return "kept"

    Adapter(scripted(ToolCall("keep"), "Done.")).evaluate(Prompt("p", "Go.", tools=[keep]), "hi").wait()
    with pytest.raises(ContextExpired):
        kept[0].evaluate(GUIDE, "hi")


# --- prompt_model ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    selected: str


def test_prompt_model_gives_a_typed_answer() -> None:
    """`prompt_model` returns a typed answer, has an invalid one corrected, and streams the model's text."""
    texts: list[str] = []

    @tool
    async def choose(context: AgentContext) -> str:
        """Let the model choose."""
        choice = await context.prompt_model(
            "Choose: a or b", Choice, system="Choose well: $5.", temperature=0.5, on_text=texts.append
        )
        return choice.selected

    model = scripted(ToolCall("choose"), "none", '{"selected": "b"}', "Done.")
    session = Session()
    response = (
        Adapter(model, environment=Agent())
        .evaluate(Prompt("p", "Go.", tools=[choose]), "hi", session=session)
        .wait()
    )
    assert response.text == "Done."
    invoked = session[ToolInvoked].latest()
    assert invoked is not None
    assert invoked.result.value == "b"
    asked = model.requests[1]
    assert (asked.system, asked.temperature, asked.stream) == ("Choose well: $5.", 0.5, True)
    assert "".join(texts) == 'none{"selected": "b"}'
    assert "is invalid" in model.requests[2].messages[-1].text


def test_an_async_on_text_is_awaited() -> None:
    """`prompt_model` awaits an async `on_text` for each chunk, in order, before it returns."""
    texts: list[str] = []

    async def hear(text: str) -> None:
        await asyncio.sleep(0)
        texts.append(text)

    @tool
    async def choose(context: AgentContext) -> str:
        """Let the model choose."""
        choice = await context.prompt_model("Choose: a or b", Choice, on_text=hear)
        assert "".join(texts) == '{"selected": "b"}'
        return choice.selected

    model = scripted(ToolCall("choose"), '{"selected": "b"}', "Done.")
    response = Adapter(model, environment=Agent()).evaluate(Prompt("p", "Go.", tools=[choose]), "hi").wait()
    assert response.text == "Done."
    assert model.requests[-1].messages[-1].text == "b"


def test_prompt_model_takes_any_type_and_gives_up_after_two_repairs() -> None:
    """If the type is not a class, `prompt_model` asks for an object with a `value`. It fails after two failed corrections."""
    from typing import Literal

    from pydantic import TypeAdapter

    @tool
    async def choose(context: AgentContext) -> str:
        """Let the model choose."""
        return await context.prompt_model("Choose", TypeAdapter(Literal["a", "b"]))

    right = scripted(ToolCall("choose"), '{"value": "b"}', "Done.")
    session = Session()
    Adapter(right, environment=Agent()).evaluate(
        Prompt("p", "Go.", tools=[choose]), "hi", session=session
    ).wait()
    assert session[ToolInvoked].all()[0].result.value == "b"
    wrong = scripted(ToolCall("choose"), *['{"value": "c"}'] * 3, "I see.")
    session = Session()
    assert (
        Adapter(wrong, environment=Agent())
        .evaluate(Prompt("p", "Go.", tools=[choose]), "hi", session=session)
        .wait()
        .text
        == "I see."
    )
    assert "after 2 corrections" in session[ToolInvoked].all()[0].result.message


def test_prompt_model_may_call_tools_and_another_model() -> None:
    """Tool calls in `prompt_model` are inner calls, and `model=` selects a different model."""
    from handrail.models import names as package

    other = scripted(ToolCall("weather", {"city": "Rome"}), '{"selected": "rain"}', name="test:other")
    package._made["test:other", ""] = other

    @tool
    async def choose(context: AgentContext) -> str:
        """Let another model choose."""
        return (await context.prompt_model("Choose", Choice, model="test:other", tools=[weather])).selected

    session = Session()
    Adapter(scripted(ToolCall("choose"), "Done."), environment=Agent()).evaluate(
        Prompt("p", "Go.", tools=[choose]), "hi", session=session
    ).wait()
    assert [each.path for each in session[ToolInvoked].all()] == [("choose", "weather"), ("choose",)]


def test_prompt_model_is_not_there_for_a_person() -> None:
    """Without an agent environment, `prompt_model` is None."""

    @tool
    async def look(context: ToolContext) -> str:
        """Check that there is no `prompt_model`."""
        assert context.prompt_model is None
        return "none"

    session = Session()
    Adapter(scripted(ToolCall("look"), "Done.")).evaluate(
        Prompt("p", "Go.", tools=[look]), "hi", session=session
    ).wait()
    assert session[ToolInvoked].all()[0].result.value == "none"


# --- closed sections ---------------------------------------------------------------------------


def _closed_prompt() -> Prompt[None]:
    return Prompt(
        "guide",
        [
            MarkdownSection("Task", "task", "Help."),
            MarkdownSection(
                "Weather",
                "weather",
                "Use the tool for any city.",
                tools=[weather],
                summary="How to look up the weather.",
                visibility="summary",
            ),
        ],
    )


def test_a_section_opens_in_place() -> None:
    """Opening a section shows the model its text, and offers its tool in all later requests, including those of later runs.

    The system text does not change.
    """
    model = scripted(
        ToolCall("weather", {"city": "Oslo"}),
        ToolCall("open_sections", {"sections": ["weather"]}),
        ToolCall("weather", {"city": "Oslo"}),
        "It rains.",
        "Still.",
    )
    session = Session()
    prompt = _closed_prompt()
    assert Adapter(model).evaluate(prompt, "hi", session=session).wait().text == "It rains."
    statuses = [(each.tool, each.status) for each in session[ToolInvoked].all()]
    assert statuses == [("weather", "invalid"), ("open_sections", "ok"), ("weather", "ok")]
    offered = [[(each.tool.name, each.deferred) for each in request.tools] for request in model.requests]
    assert offered[1] == [("open_sections", False)]
    assert offered[2] == [("open_sections", False), ("weather", True)]
    assert len({request.system for request in model.requests}) == 1
    opened = model.requests[2].messages[-1]
    assert isinstance(opened, ToolMessage)
    assert "Use the tool for any city." in opened.results[0].text
    assert opened.results[0].shows == ("weather",)
    Adapter(model).evaluate(prompt, "and now?", session=session).wait()
    assert [each.tool.name for each in model.requests[4].tools] == ["open_sections", "weather"]


def test_marks_for_the_cache_can_be_left_out() -> None:
    """With `cache=False`, neither the system prompt nor the messages have cache marks."""
    from handrail.models.anthropic import AnthropicModel

    model = scripted("Rain.")
    Adapter(model).evaluate(_closed_prompt(), "hi").wait()
    request: Any = model.requests[0]
    assert AnthropicModel("m")._body(request).count(b"cache_control") == 2
    assert b"cache_control" not in AnthropicModel("m", cache=False)._body(request)


@pytest.mark.parametrize("wire", ["chat", "responses", "anthropic"])
def test_opening_leaves_every_byte_before_it(wire: str) -> None:
    """After a section is opened, requests repeat earlier messages and tools unchanged, and add new ones at the end."""
    from handrail.models import anthropic, openai, responses
    from handrail.models.anthropic import AnthropicModel

    taken = Takes()

    def body(request: Any) -> bytes:
        if wire == "chat":
            return openai._body({"model": "m"}, request, Quirks(), "chat:openai")
        if wire == "responses":
            return responses._body({"model": "m"}, request, "responses:openai", taken)
        return AnthropicModel("m")._body(request)

    model = scripted(
        ToolCall("open_sections", {"sections": ["weather"]}), ToolCall("weather", {"city": "Oslo"}), "Rain."
    )
    Adapter(model).evaluate(_closed_prompt(), "hi").wait()
    decoded = [anthropic.decode(body(request)) for request in model.requests]
    said = "input" if wire == "responses" else "messages"
    for earlier, later in itertools.pairwise(decoded):
        count = len(earlier[said])
        assert later[said][:count] == earlier[said]
        assert later["tools"][: len(earlier["tools"])] == earlier["tools"]
        rest = {name: value for name, value in earlier.items() if name not in (said, "tools")}
        assert rest == {name: value for name, value in later.items() if name not in (said, "tools")}
    encoders = {
        "chat": encoder(openai._encode, Quirks(), "chat:openai"),
        "responses": encoder(responses._items, taken, "responses:openai", "", frozenset()),
        "anthropic": encoder(anthropic._message, taken, "anthropic:anthropic", frozenset()),
    }
    written = [Sent(request.messages).encoded(encoders[wire]) for request in model.requests]
    assert written[1].startswith(written[0])
    assert written[2].startswith(written[1])
    added = decoded[1]["tools"][-1]
    if wire == "anthropic":
        assert added["defer_loading"] is True
        shown = decoded[1]["messages"][-1]["content"]
        assert shown[0]["content"] == [{"type": "tool_reference", "tool_name": "weather"}]
        assert "Use the tool" in shown[1]["text"]
    else:
        assert "defer_loading" not in str(added)


def test_an_adapter_that_can_not_open_in_place_says_so() -> None:
    """With `opens_in_place=False`, opening a section raises `VisibilityExpansionRequired`, which names the section.

    The caller can then evaluate again with that section opened.
    """
    model = scripted(ToolCall("open_sections", {"sections": ["weather"]}), "It rains.")
    adapter = Adapter(model, opens_in_place=False)
    prompt = _closed_prompt()
    with pytest.raises(VisibilityExpansionRequired) as raised:
        adapter.evaluate(prompt, "hi").wait()
    assert raised.value.sections == ("weather",)
    assert adapter.evaluate(prompt, "hi", opened=raised.value.sections).wait().text == "It rains."
    assert "Use the tool for any city." in model.requests[1].system
    assert [each.tool.name for each in model.requests[1].tools] == ["weather"]


@pytest.mark.parametrize("kind", ["evaluate", "group", "call"])
def test_a_childs_sections_do_not_end_the_outer_run(kind: str) -> None:
    """If a nested run needs a section opened and its caller does not handle that, the call fails and the outer run goes on."""
    model = scripted(
        ToolCall("ask", {"input": "hi"} if kind != "evaluate" else {}),
        ToolCall("open_sections", {"sections": ["weather"]}),
        "It went on.",
    )
    adapter = Adapter(model, opens_in_place=False)
    child = _closed_prompt()

    @tool(name="ask")
    async def ask(context: ToolContext) -> str:
        """Ask another agent."""
        return (await context.adapter.evaluate(child, "hi")).text

    @tool(name="ask")
    async def ask_group(input: str, context: ToolContext) -> str:
        """Ask another agent in a task group."""
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(waited(context))
        return answer.result()

    async def waited(context: ToolContext) -> str:
        return (await context.adapter.evaluate(child, "hi")).text

    @tool(name="inner")
    async def inner(context: ToolContext) -> str:
        """Ask another agent."""
        return (await context.adapter.evaluate(child, "hi")).text

    @tool(name="ask")
    async def ask_inner(input: str, context: ToolContext) -> str:
        """Call a tool that asks another agent."""
        return (await context.call("inner")).unwrap()

    tools = {"evaluate": [ask], "group": [ask_group], "call": [ask_inner, inner]}[kind]
    session = Session()
    response = adapter.evaluate(Prompt("outer", "Go.", tools=tools), "go", session=session).wait()
    assert response.text == "It went on."
    ended = session[ToolInvoked].all()[-1]
    assert ended.tool == "ask"
    assert ended.status == "error"
    assert "a run inside it needs weather to be opened" in ended.result.message


def test_a_caller_answers_what_its_child_needs() -> None:
    """A caller that catches a nested run's `VisibilityExpansionRequired` can evaluate again with the sections opened."""
    model = scripted(
        ToolCall("ask", {}), ToolCall("open_sections", {"sections": ["weather"]}), "It rains.", "Bye."
    )
    child = _closed_prompt()

    @tool
    async def ask(context: ToolContext) -> str:
        """Ask another agent."""
        try:
            return (await context.adapter.evaluate(child, "hi")).text
        except VisibilityExpansionRequired as needed:
            return (await context.adapter.evaluate(child, "hi", opened=needed.sections)).text

    session = Session()
    adapter = Adapter(model, opens_in_place=False)
    assert adapter.evaluate(Prompt("outer", "Go.", tools=[ask]), "go", session=session).wait().text == "Bye."
    assert session[ToolInvoked].all()[-1].result.value == "It rains."


def test_a_closed_section_can_not_be_opened_by_a_wrong_path() -> None:
    """Opening an unknown section is refused with a list of those that can be opened, and nothing is opened."""
    model = scripted(ToolCall("open_sections", {"sections": ["wether"]}), "Sorry.")
    session = Session()
    Adapter(model).evaluate(_closed_prompt(), "hi", session=session).wait()
    (invoked,) = session[ToolInvoked].all()
    assert invoked.status == "invalid"
    assert "'weather'" in invoked.result.message
    assert [each.tool.name for each in model.requests[1].tools] == ["open_sections"]


def test_failures_are_recorded_as_facts() -> None:
    """Each failed model request is recorded in the session, with the wait before its retry."""
    session = Session()
    adapter = Adapter(
        scripted(ModelUnavailable("m", "down"), "up"), retry=Retry(first_wait=0.001, chance=lambda: 1.0)
    )
    adapter.evaluate(GUIDE, "hi", session=session).wait()
    (failed,) = session[ModelFailed].all()
    assert (failed.attempt, failed.retry_in) == (1, pytest.approx(0.001))
    assert "down" in failed.error
