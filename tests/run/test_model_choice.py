"""Model choices, `first_that_works` and `by`, in runs, nested runs, workers and resumed runs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import (
    Adapter,
    Agent,
    AgentContext,
    AgentEnvironment,
    Attachment,
    Budget,
    Deadline,
    LaterEnvironment,
    MemoryJournal,
    Prompt,
    PromptEvaluationError,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    WorkerRegistry,
    by,
    first_that_works,
    tool,
)
from handrail.errors import BudgetExceededError, DefinitionError, ModelError, RunParked
from handrail.events import ModelFailed, ModelRequested, ModelResponded, TextDelta
from handrail.messages import Model, ModelRequest, Price, Sent, Takes, TextPart, Traits, Usage, UserMessage
from handrail.models import (
    ModelAnswerBroken,
    ModelKeyMissing,
    ModelRateLimited,
    ModelRequestRefused,
    ModelUnavailable,
)
from handrail.models.names import ModelChoice, check_name, model_named, reference_to
from handrail.models.scripted import Reply, Scripted
from handrail.run.adapter import Retry
from handrail.testing import RecordingSubscriber, VirtualClock
from support.parked_runs import answer_to
from support.texts import NO_SUCH_PROVIDER, NOT_A_MODEL_NAME

QUICK = Retry(attempts=5, first_wait=0.0, longest_wait=60.0)
PLAIN = Prompt("plain", "Be brief.")


def one(name: str, *script: Scripted, price: int | None = 1, native: bool = True) -> ScriptedModel:
    """Return a scripted model with this price in dollars per token. None is an unknown price."""
    cost = None if price is None else Price(Decimal(price * 1_000_000), Decimal(price * 1_000_000))
    return ScriptedModel(script, name=name, traits=Traits(cost, native))


def said(text: str, **more: Any) -> Reply:
    return Reply(text, usage=Usage(2, 1, 0, 0, 1), **more)


def down(name: str = "a:down") -> ModelUnavailable:
    return ModelUnavailable(name, "it is down", status=503)


@tool(effect="pure")
async def look() -> str:
    """Look around."""
    return "seen"


def story(events: list[object]) -> list[str]:
    """Return a line for each failed request to a model and for each answer."""
    lines: list[str] = []
    for event in events:
        match event:
            case ModelFailed():
                again = "retry" if event.retry_in is not None else "end"
                lines.append(
                    f"{event.attempt} {event.model} failed, {f'ask {event.next_model}' if event.next_model else again}"
                )
            case ModelResponded():
                lines.append(f"{event.attempt} {event.model} {event.stop_reason} {event.cost}")
            case _:
                pass
    return lines


async def told(
    model: Model, *, prompt: Prompt[Any] = PLAIN, stream: bool = False, retry: Retry = QUICK, **options: Any
) -> tuple[Any, list[str], list[object]]:
    """Run a prompt, and return its response or error, the lines from `story`, and all events."""
    session = Session()
    outcome: Any
    with RecordingSubscriber(session) as seen:
        adapter = Adapter(model, retry=retry, journal=options.pop("journal", None))
        try:
            if stream:
                outcome = await adapter.stream(prompt, "go", session=session, **options).response
            else:
                outcome = await adapter.evaluate(prompt, "go", session=session, **options)
        except PromptEvaluationError as error:
            outcome = error
    return outcome, story(seen.events), seen.events


# --- which model is asked, and when ---


async def test_the_first_model_that_works_answers() -> None:
    """If the first model works, the others are not asked."""
    a, b = one("a:1", said("A.")), one("b:1", price=5)
    response, lines, _ = await told(first_that_works(a, b))
    assert (response.text, response.cost, lines) == ("A.", 3, ["1 a:1 done 3"])
    assert b.requests == []


async def test_an_outage_is_retried_once_and_then_the_next_model_is_asked() -> None:
    """After an outage and one retry, the next model is asked. Events name both, and the cost is that of the model that answered."""
    a, b = one("a:1", down(), down(), said("never")), one("b:1", said("B."), price=5)
    response, lines, events = await told(first_that_works(a, b))
    assert (response.text, response.cost, response.usage.requests) == ("B.", 15, 1)
    assert lines == ["1 a:1 failed, retry", "2 a:1 failed, ask b:1", "3 b:1 done 15"]
    assert [event.model for event in events if isinstance(event, ModelRequested)] == ["a:1", "a:1", "b:1"]


@pytest.mark.parametrize(
    "error",
    [
        ModelRateLimited("a:1", "too many requests", status=429, retry_after=30),
        ModelKeyMissing("a:1", ["A_KEY"]),
        ModelRequestRefused("a:1", "no such model", status=404),
        ModelRequestRefused("a:1", "wrong key", status=401),
        ModelRequestRefused("a:1", "no credit", status=402),
    ],
    ids=["long rate limit", "key missing", "404", "401", "402"],
)
async def test_what_a_retry_can_not_help_falls_over_at_once(error: ModelError) -> None:
    """After a long rate limit, a missing or refused key, no credit or a missing model, the next model is asked without a retry."""
    response, lines, _ = await told(first_that_works(one("a:1", error), one("b:1", said("B."))))
    assert (response.text, lines) == ("B.", ["1 a:1 failed, ask b:1", "2 b:1 done 3"])


async def test_a_short_rate_limit_is_waited_for() -> None:
    limited = ModelRateLimited("a:1", "too many requests", status=429, retry_after=0.0)
    response, lines, _ = await told(first_that_works(one("a:1", limited, said("A.")), one("b:1")))
    assert (response.text, lines) == ("A.", ["1 a:1 failed, retry", "2 a:1 done 3"])


async def test_a_wrong_request_is_not_sent_to_others() -> None:
    """If a provider refuses a request as invalid, the run fails at once, and no other model is asked."""
    wrong = ModelRequestRefused("a:1", "the prompt is too long", status=400)
    error, lines, _ = await told(first_that_works(one("a:1", wrong), one("b:1", said("B."))))
    assert lines == ["1 a:1 failed, end"]
    assert "too long" in str(error)


async def test_the_last_model_has_all_of_the_retries() -> None:
    """The last model is retried as it would be alone, and the error names those that failed before it."""
    a, b = one("a:1", *[down()] * 2), one("b:1", *[down("b:1")] * 5)
    error, lines, _ = await told(first_that_works(a, b))
    assert lines[1:3] == ["2 a:1 failed, ask b:1", "3 b:1 failed, retry"]
    assert lines[-1] == "7 b:1 failed, end"
    assert str(error) == (
        "prompt 'plain': model 'b:1': it is down (status 503). It was tried 5 times. "
        "Before it, a:1 failed: it is down."
    )


@pytest.mark.parametrize("on_refusal", [False, True])
async def test_a_refusal_falls_over_only_if_asked_to(on_refusal: bool) -> None:
    """A refusal is the answer unless `on_refusal` is set. Its tokens are paid for in both cases."""
    a, b = one("a:1", said("", stop="refused")), one("b:1", said("B."), price=5)
    response, lines, _ = await told(first_that_works(a, b, on_refusal=on_refusal))
    if on_refusal:
        assert (response.text, response.stop_reason, response.cost) == ("B.", "done", 18)
        assert lines == ["1 a:1 refused 3", "1 a:1 failed, ask b:1", "2 b:1 done 15"]
    else:
        assert (response.stop_reason, response.cost, lines) == ("refused", 3, ["1 a:1 refused 3"])


async def test_the_refusal_of_the_last_model_stands() -> None:
    models = [one(name, said("", stop="refused")) for name in ("a:1", "b:1")]
    response, lines, _ = await told(first_that_works(*models, on_refusal=True))
    assert (response.stop_reason, len(lines)) == ("refused", 3)


async def test_a_refusal_falls_over_from_the_model_that_a_run_stays_with() -> None:
    """Each link between two models has the rule of its own choice, and the outermost one decides what follows the last model."""

    def models() -> list[ScriptedModel]:
        return [
            one("a:1", down(), down(), said("A again.")),
            one("b:1", ToolCall("look"), said("", stop="refused")),
        ]

    prompt = Prompt("p", "Look.", tools=[look])
    response, lines, _ = await told(first_that_works(*models(), on_refusal=True), prompt=prompt)
    assert (response.text, lines[-2:]) == ("A again.", ["1 b:1 failed, ask a:1", "2 a:1 done 3"])
    response, _, _ = await told(first_that_works(*models()), prompt=prompt)
    assert response.stop_reason == "refused"
    inner = first_that_works(*models(), on_refusal=True)
    response, _, _ = await told(first_that_works(inner), prompt=prompt)
    assert response.stop_reason == "refused"


async def test_choices_nest() -> None:
    """A choice may contain choices, and each has its own rule for refusals.

    If all models of an inner choice fail, the outer choice asks its next model.
    """
    refused = said("", stop="refused")
    inner = first_that_works(one("a:1", refused), one("b:1", refused), on_refusal=True)
    response, lines, _ = await told(first_that_works(inner, one("c:1", said("C."))))
    assert (response.stop_reason, lines[-1]) == ("refused", "2 b:1 refused 3")
    inner = first_that_works(one("a:1", down(), down()), one("b:1", down(), down()))
    response, _, _ = await told(first_that_works(inner, one("c:1", said("C."))))
    assert response.text == "C."


# --- streams ---


@pytest.mark.parametrize("how", ["text", "thinking", "call"])
async def test_no_other_model_continues_a_stream_that_was_seen(how: str) -> None:
    """If a stream is cut after part of it was shown, the same model is asked again, as often as it would be alone."""
    cut: dict[str, Reply] = {
        "text": Reply("Once upon", pieces=["Once", " upon"], cut=True),
        "thinking": Reply(thinking="Hm.", cut=True),
        "call": Reply(calls=[ToolCall("look")], cut=True),
    }
    a, b = one("a:1", *[cut[how]] * 3, said("A.")), one("b:1", said("B."))
    response, lines, events = await told(first_that_works(a, b), stream=True)
    assert response.text == "A."
    assert lines == [*(f"{number} a:1 failed, retry" for number in (1, 2, 3)), "4 a:1 done 3"]
    assert b.requests == []
    if how == "text":
        assert [event.text for event in events if isinstance(event, TextDelta)][:2] == ["Once", " upon"]


async def test_a_stream_that_was_seen_fails_in_the_end() -> None:
    a, b = one("a:1", *[Reply("Once", cut=True)] * 5), one("b:1", said("B."))
    error, lines, _ = await told(first_that_works(a, b), stream=True)
    assert isinstance(error, PromptEvaluationError)
    assert lines[-1] == "5 a:1 failed, end"


async def test_a_stream_that_nobody_saw_falls_over() -> None:
    """The next model is asked after a stream that fails before anything was shown, or after a cut answer that is not streamed."""
    broken = Reply(error=ModelAnswerBroken("a:1", "the connection was lost"))
    response, lines, _ = await told(
        first_that_works(one("a:1", broken, broken), one("b:1", said("B."))), stream=True
    )
    assert (response.text, lines[-2:]) == ("B.", ["2 a:1 failed, ask b:1", "3 b:1 done 3"])
    cut = Reply("Once upon", cut=True)
    response, _, _ = await told(first_that_works(one("a:1", cut, cut), one("b:1", said("B."))))
    assert response.text == "B."


async def test_a_refusal_that_was_seen_stands() -> None:
    a = one("a:1", said("I can't help.", stop="refused"))
    response, _, _ = await told(first_that_works(a, one("b:1"), on_refusal=True), stream=True)
    assert (response.text, response.stop_reason) == ("I can't help.", "refused")


# --- several requests in one run ---


async def test_a_run_stays_with_the_model_that_answered() -> None:
    """Later requests of a run go to the model that answered. If it fails, those after it are asked, then those before it."""
    a = one("a:1", down(), down(), said("A again."))
    b = one("b:1", ToolCall("look"), ToolCall("look"), down("b:1"), down("b:1"))
    c = one("c:1", down("c:1"), down("c:1"))
    prompt = Prompt("p", "Do.", tools=[look])
    response, lines, _ = await told(first_that_works(a, b, c), prompt=prompt)
    assert response.text == "A again."
    assert [line.split(" ", 1)[1] for line in lines if "retry" not in line] == [
        "a:1 failed, ask b:1",
        *["b:1 calls 0"] * 2,
        "b:1 failed, ask c:1",
        "c:1 failed, ask a:1",
        "a:1 done 3",
    ]


async def test_the_model_is_chosen_for_each_request() -> None:
    """`by` calls its function with each request before the request is sent.

    The function may return a model or a choice.
    """
    small, large = one("a:small", ToolCall("look")), one("b:large", said("B."), price=5)
    seen: list[int] = []

    def choose(request: ModelRequest) -> Model | str:
        seen.append(len(request.messages))
        return small if len(request.messages) < 3 else first_that_works(one("c:1", down(), down()), large)

    response, lines, _ = await told(by(choose), prompt=Prompt("p", "Do.", tools=[look]))
    assert (response.text, response.cost) == ("B.", 15)
    assert lines == [
        "1 a:small calls 0",
        "1 c:1 failed, retry",
        "2 c:1 failed, ask b:large",
        "3 b:large done 15",
    ]
    assert seen == [1, 3]


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda request: None, "returned a NoneType. Use a name like"),
        (lambda request: 1 / 0, "raised ZeroDivisionError"),
        (lambda request: "nonsense", NOT_A_MODEL_NAME),
    ],
)
async def test_a_function_that_chooses_no_model_ends_the_run(choose: Any, words: str) -> None:
    error, _, _ = await told(by(choose))
    assert isinstance(error, PromptEvaluationError)
    assert words in str(error)


@pytest.mark.virtual_time
async def test_a_deadline_is_not_spent_on_the_first_model() -> None:
    """If a retry would come after the deadline, the next model is asked instead."""
    retry = Retry(attempts=5, first_wait=1.5, longest_wait=2.0)
    model = first_that_works(one("a:1", down()), one("b:1", said("B.")))
    deadline = Deadline.after(0.7, clock=VirtualClock())
    response, lines, _ = await told(model, retry=retry, deadline=deadline)
    assert (response.text, lines) == ("B.", ["1 a:1 failed, ask b:1", "2 b:1 done 3"])


@dataclass(frozen=True)
class City:
    """The output type of a prompt."""

    name: str


async def test_a_typed_answer_is_asked_for_as_all_models_can_give_it() -> None:
    """If all models are known to support native schemas, a typed answer uses one. If not, it is a `final_answer` call."""
    prompt = Prompt("typed", "Answer.", output=City)
    natives = first_that_works(one("a:1", down(), down()), one("b:1", said('{"name": "Oslo"}')))
    assert (await told(natives, prompt=prompt))[0].output == City("Oslo")
    answer = ToolCall("final_answer", {"name": "Oslo"})
    mixed = first_that_works(one("a:1", down(), down()), one("b:1", answer, native=False))
    assert (await told(mixed, prompt=prompt))[0].output == City("Oslo")
    assert (await told(by(lambda request: one("c:1", answer)), prompt=prompt))[0].output == City("Oslo")


async def test_the_first_model_must_take_what_is_attached() -> None:
    """The first model decides what may be attached. With `by`, no attachment is refused before the request."""
    picture = Attachment(b"\x89PNG\r\n\x1a\n" + b"\0" * 9, "plot.png")
    blind = ScriptedModel(["A."], name="a:1", traits=Traits(takes=Takes()))
    sees = ScriptedModel(["B.", "B."], name="b:1", traits=Traits(takes=Takes(frozenset({"image/png"}))))
    with pytest.raises(PromptEvaluationError, match="it takes no image") as refused:
        await Adapter(first_that_works(blind, sees)).evaluate(PLAIN, "go", attachments=[picture])
    assert isinstance(refused.value.__cause__, ModelRequestRefused)
    response = await Adapter(first_that_works(sees, blind)).evaluate(PLAIN, "go", attachments=[picture])
    assert response.text == "B."
    response = await Adapter(by(lambda request: blind)).evaluate(PLAIN, "go", attachments=[picture])
    assert response.text == "A."


# --- budgets ---


async def test_a_budget_counts_every_request() -> None:
    """A budget counts every request, even if it fails or gets a refusal, and charges it at its own model's price."""
    a = one("a:1", down(), said("", stop="refused"))
    model = first_that_works(a, one("b:1", said("B."), price=5), on_refusal=True)
    response, _, _ = await told(model, budget=Budget(requests=3, money=10_000_000))
    assert (response.text, response.cost) == ("B.", 18)
    a = one("a:1", down(), said("", stop="refused"))
    model = first_that_works(a, one("b:1", said("B."), price=5), on_refusal=True)
    error, _, _ = await told(model, budget=Budget(requests=2))
    assert isinstance(error.__cause__, BudgetExceededError)


async def test_a_model_without_a_price_is_judged_when_it_is_asked() -> None:
    """Under a money limit, a model with an unknown price is refused only when it is about to be asked."""
    a, b = one("a:1", said("A.")), one("b:1", said("B."), price=None)
    response, _, _ = await told(first_that_works(a, b), budget=Budget(money=10_000_000))
    assert response.text == "A."
    a = one("a:1", down(), down())
    error, _, _ = await told(first_that_works(a, b), budget=Budget(money=10_000_000))
    assert isinstance(error.__cause__, BudgetExceededError)


# --- records ---


@tool(effect="staged")
async def ask(context: ToolContext) -> str:
    """Ask a person."""
    assert context.wait_for is not None
    return str(await context.wait_for("pick", {}, dict[str, int]))


async def test_a_resumed_run_remembers_who_answered_and_what_it_cost() -> None:
    """A resumed run goes on with the model that answered before, and its cost includes the refusal before that answer."""
    journal = MemoryJournal()
    prompt = Prompt("p", "Do.", tools=[ask])
    a = one("a:1", said("", stop="refused"), said("never"))
    b = one("b:1", Reply(calls=[ToolCall("ask")], usage=Usage(2, 1, 0, 0, 1)), said("B."), price=5)
    model = first_that_works(a, b, on_refusal=True)
    adapter = Adapter(model, retry=QUICK, journal=journal, environment=LaterEnvironment())
    with pytest.raises(RunParked) as parked:
        await adapter.evaluate(prompt, "go", run_id="run")
    row = await journal.runs.get("run")
    assert row.record.model == "a:1, b:1"
    journal.questions.answer(answer_to(parked.value.questions[0], {"number": 2}))
    response = await adapter.resume("run", prompt)
    assert (response.text, response.cost, response.usage.requests) == ("B.", 3 + 15 + 15, 3)
    assert len(a.requests) == 1
    assert len(b.requests) == 2


# --- names ---


def test_a_choice_has_a_name_by_which_it_is_found() -> None:
    """Model names separated by commas make a choice, and its name lists them. Each name is checked."""
    model = model_named("demo:notes,openai:gpt-5")
    assert isinstance(model, ModelChoice)
    assert model.name == reference_to(model) == "demo:notes, openai:gpt-5"
    assert repr(model) == "first_that_works('demo:notes', 'openai:gpt-5')"
    check_name("demo:notes, openai:gpt-5")
    with pytest.raises(DefinitionError, match=NO_SUCH_PROVIDER):
        check_name("demo:notes, opnai:gpt-5")
    with pytest.raises(DefinitionError, match=NOT_A_MODEL_NAME):
        model_named("demo:notes,")
    assert by(str).name == "by str"


not_yet: Any = ScriptedModel
named: Any = "openai:gpt-5"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: first_that_works(), "has no models"),
        (lambda: first_that_works("openai"), NOT_A_MODEL_NAME),
        (lambda: first_that_works(not_yet), "first_that_works was given"),
        (lambda: by(named), "takes a function"),
    ],
)
def test_a_wrong_choice_is_refused_at_once(make: Any, words: str) -> None:
    with pytest.raises(DefinitionError, match=words):
        make()


async def test_a_choice_can_be_used_wherever_a_model_is_named(tmp_path: Path) -> None:
    """An agent, `prompt_model` and a worker's front matter accept a choice."""
    a = one("a:1", *[down()] * 2)
    b = one("b:1", said("B."))
    assert (await Agent(first_that_works(a, b), "Be brief.").run("go")).text == "B."

    @tool
    async def nested(context: AgentContext) -> str:
        """Ask a model."""
        inner = first_that_works(
            one("a:2", ModelKeyMissing("a:2", ["K"])), one("b:2", said('{"name": "Oslo"}'))
        )
        return (await context.prompt_model("Which city?", City, model=inner)).name

    outer = ScriptedModel([ToolCall("nested"), "done"])
    response = await Adapter(outer, environment=AgentEnvironment()).evaluate(
        Prompt("p", "Do.", tools=[nested]), "go"
    )
    assert story_models(response.session) == ["scripted:script", "b:2", "scripted:script"]

    (tmp_path / "team.md").write_text("---\nmodel: [mine:one, mine:two]\n---\nBe brief.\n")
    (tmp_path / "mine.py").write_text(
        "from handrail import ScriptedModel\nfrom handrail.models import ModelKeyMissing\n"
        "one = ScriptedModel([ModelKeyMissing('mine:one', ['K'])], name='mine:one')\n"
        "two = ScriptedModel(['It is two.'], name='mine:two')\n"
    )
    registry = WorkerRegistry(tmp_path)
    assert registry["team"].model == "mine:one, mine:two"
    assert (await registry.run("team", "go")).text == "It is two."


def story_models(session: Session) -> list[str]:
    return [event.model for event in session[ModelResponded].all()]


# --- without a run ---


async def test_a_choice_can_be_streamed_without_a_run() -> None:
    """A choice is a model like any other: its stream is that of the first model that works.

    If a model fails after part of its stream was seen, its error is raised.
    """
    request = ModelRequest("", Sent([UserMessage("go")]), Sent(), stream=True)

    async def text(model: Model) -> str:
        return "".join([part.text async for part in model.stream(request) if isinstance(part, TextPart)])

    assert await text(first_that_works(one("a:1", down()), one("b:1", "B."))) == "B."
    assert await text(by(lambda request: one("b:1", "B."))) == "B."
    refused = Reply(stop="refused")
    assert await text(first_that_works(one("a:1", refused), one("b:1", "B."), on_refusal=True)) == "B."
    with pytest.raises(ModelUnavailable):
        await text(first_that_works(one("a:1", Reply("Once", error=down())), one("b:1", "B.")))


# --- the law ---

OUTCOMES = ("down", "limited", "no key", "wrong", "refused", "cut", "fine")


def scripted(name: str, outcomes: list[str]) -> ScriptedModel:
    made: dict[str, Scripted] = {
        "down": down(name),
        "limited": ModelRateLimited(name, "too many", status=429, retry_after=99),
        "no key": ModelKeyMissing(name, ["K"]),
        "wrong": ModelRequestRefused(name, "wrong", status=400),
        "refused": said("", stop="refused"),
        "cut": Reply("par", usage=Usage(2, 1, 0, 0, 1), cut=True),
        "fine": said(name),
    }
    return one(name, *[made[each] for each in outcomes], "the script is over")


@given(
    st.lists(st.lists(st.sampled_from(OUTCOMES), min_size=5, max_size=5), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_whatever_fails_one_model_answers_or_the_run_fails(
    scripts: list[list[str]], on_refusal: bool, stream: bool
) -> None:
    """Models are asked in order. The last one asked gives the answer, or its failure ends the run.

    No other model is asked after part of a stream was seen, and every answer is paid for.
    """
    models = [scripted(f"{'abc'[number]}:1", script) for number, script in enumerate(scripts)]
    outcome, lines, events = asyncio.run(
        told(first_that_works(*models, on_refusal=on_refusal), stream=stream)
    )
    answers = [event for event in events if isinstance(event, ModelResponded)]
    failures = [event for event in events if isinstance(event, ModelFailed)]
    asked = [event.model for event in events if isinstance(event, ModelRequested)]
    assert asked == sorted(asked), lines  # in order, and no earlier model is asked again
    if isinstance(outcome, PromptEvaluationError):
        assert failures[-1].next_model == "", lines
        assert failures[-1].model == asked[-1]
    else:
        assert answers[-1].model == asked[-1]
        assert outcome.text in ("", asked[-1])
        assert outcome.cost == sum(answer.cost or 0 for answer in answers)
        assert all(answer.stop_reason == "refused" for answer in answers[:-1])
    for failed in failures:
        if stream and failed.next_model:
            deltas = [event for event in events[: events.index(failed)] if isinstance(event, TextDelta)]
            assert deltas == [], lines
