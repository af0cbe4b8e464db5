"""Fallback between providers over HTTP: outages, rate limits, refusals and cut streams, what they cost, and what the next provider is sent.

`python tests/models/test_fallback.py` prints the events, the record and the cost of five cases.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from decimal import Decimal
from typing import Any

import pytest

from handrail import (
    Adapter,
    AnthropicModel,
    Budget,
    GeminiModel,
    LaterEnvironment,
    MemoryJournal,
    OpenAIModel,
    Prompt,
    PromptEvaluationError,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    UserContext,
    first_that_works,
    tool,
)
from handrail.errors import RunParked
from handrail.events import ModelFailed, ModelRequested, ModelResponded, PromptExecuted, TextDelta
from handrail.messages import AssistantMessage, ModelPart, ModelRequest, Price, Traits, Usage, UsagePart
from handrail.models import ModelUnavailable
from handrail.models.scripted import Reply
from handrail.run.adapter import Retry
from handrail.run.limits import BudgetTracker
from handrail.runs import show
from handrail.testing import RecordingSubscriber
from support.parked_runs import answer_to, park_and_resume
from support.raw_server import delta, raw_server, said, streamed, whole

QUICK = Retry(attempts=3, first_wait=0.0)
USAGE = {"prompt_tokens": 10, "completion_tokens": 2}
CHEAP, DEAR = Price(Decimal(1), Decimal(1)), Price(Decimal(100), Decimal(100))
DOWN = whole({"error": {"message": "Overloaded"}}, 529)
LIMITED = whole({"error": {"message": "Too many requests"}}, 429).replace(
    b"\r\n", b"\r\nretry-after: 30\r\n", 1
)
REFUSED = whole({"content": [], "stop_reason": "refusal", "usage": {"input_tokens": 10, "output_tokens": 0}})
BEGUN = [
    {"type": "message_start", "message": {"usage": {"input_tokens": 10}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "The Forum"}},
]
CUT = streamed(*BEGUN, end=b"")
SILENT = streamed(BEGUN[0], end=b"")
WHOLE = streamed(
    *BEGUN, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, {"type": "message_stop"}
)
FINE = said("In Rome.", USAGE)
FINE_STREAM = streamed(delta(content="In Rome."), {**delta("stop"), "usage": USAGE})


class Told:
    """The outcome of a run, the requests that each server got, the events, the record and the cost."""

    def __init__(
        self, events: list[object], outcome: Any, asked: tuple[list[Any], list[Any]], tree: Any
    ) -> None:
        self.outcome = outcome
        self.asked = asked
        self.events = [line for event in events if (line := _line(event))]
        self.record = [
            (turn.model, [(each.model, each.error) for each in turn.failed], turn.cost) for turn in tree.turns
        ]
        self.cost = tree.cost


def _line(event: object) -> str:
    match event:
        case ModelRequested():
            return f"asked {event.model}"
        case ModelFailed():
            then = f"asking {event.next_model}" if event.next_model else f"retry in {event.retry_in}"
            return f"failed {event.model}: {then}"
        case ModelResponded():
            return f"answered {event.model}: {event.stop_reason}, ${event.cost}"
        case TextDelta():
            return f"text {event.text!r}"
        case _:
            return ""


async def tell(
    first: list[bytes], second: list[bytes], *, stream: bool = False, on_refusal: bool = False
) -> Told:
    """Run a prompt on an Anthropic model, with an OpenAI model to fall back to. Their servers give these answers."""
    session, journal = Session(), MemoryJournal()
    async with raw_server(*first) as one, raw_server(*second) as two:
        claude = AnthropicModel("claude", base_url=one.url, key_variable=None, price=DEAR)
        gpt = OpenAIModel("gpt", base_url=two.url, key_variable=None, price=CHEAP)
        model = first_that_works(claude, gpt, on_refusal=on_refusal)
        adapter = Adapter(model, retry=QUICK, journal=journal)
        prompt = Prompt("p", "Be brief.")
        outcome: Any
        with RecordingSubscriber(session) as seen:
            try:
                if stream:
                    run = adapter.stream(prompt, "Where?", session=session, run_id="r")
                    outcome = await run.response
                else:
                    outcome = await adapter.evaluate(prompt, "Where?", session=session, run_id="r")
            except PromptEvaluationError as error:
                outcome = error
        return Told(seen.events, outcome, (one.bodies, two.bodies), await show(journal, "r"))


CHEAP_ANSWER = Decimal("0.000012")
DEAR_ANSWER = REFUSAL = Decimal("0.001")


async def test_an_outage() -> None:
    """After an outage the model is asked once more, and then the next model is asked."""
    told = await tell([DOWN], [FINE])
    assert told.outcome.text == "In Rome."
    assert told.events == [
        "asked anthropic:claude",
        "failed anthropic:claude: retry in 0.0",
        "asked anthropic:claude",
        "failed anthropic:claude: asking openai:gpt",
        "asked openai:gpt",
        f"answered openai:gpt: done, ${CHEAP_ANSWER}",
    ]
    assert told.record == [("openai:gpt", [("anthropic:claude", "Overloaded")] * 2, CHEAP_ANSWER)]
    assert told.cost == told.outcome.cost == CHEAP_ANSWER


async def test_a_rate_limit() -> None:
    """If a provider asks for a long wait, the next model is asked at once."""
    told = await tell([LIMITED], [FINE])
    assert told.outcome.text == "In Rome."
    assert told.events == [
        "asked anthropic:claude",
        "failed anthropic:claude: asking openai:gpt",
        "asked openai:gpt",
        f"answered openai:gpt: done, ${CHEAP_ANSWER}",
    ]
    assert told.record == [("openai:gpt", [("anthropic:claude", "Too many requests")], CHEAP_ANSWER)]
    assert told.cost == told.outcome.cost == CHEAP_ANSWER


async def test_a_refusal() -> None:
    """A refusal is paid for. The next model is asked only if `on_refusal` is set."""
    told = await tell([REFUSED], [FINE], on_refusal=True)
    assert told.events == [
        "asked anthropic:claude",
        f"answered anthropic:claude: refused, ${REFUSAL}",
        "failed anthropic:claude: asking openai:gpt",
        "asked openai:gpt",
        f"answered openai:gpt: done, ${CHEAP_ANSWER}",
    ]
    assert told.record == [("openai:gpt", [("anthropic:claude", "it refused to answer")], CHEAP_ANSWER)]
    assert told.cost == told.outcome.cost == CHEAP_ANSWER + REFUSAL
    told = await tell([REFUSED], [FINE])
    assert (told.outcome.stop_reason, told.asked[1]) == ("refused", [])
    assert told.events == ["asked anthropic:claude", f"answered anthropic:claude: refused, ${REFUSAL}"]
    assert told.record == [("anthropic:claude", [], REFUSAL)]
    assert told.cost == told.outcome.cost == REFUSAL


async def test_a_cut_stream() -> None:
    """If part of an answer was streamed before it was cut off, only the same model is asked again.

    If nothing was streamed, the next model is asked after one more try. The tokens that the provider had counted before
    the stream was cut off are paid for.
    """
    cut = ("anthropic:claude", "the answer ended before it was complete")
    told = await tell([CUT, WHOLE], [FINE_STREAM], stream=True)
    assert (told.outcome.text, told.asked[1]) == ("The Forum", [])
    assert told.events == [
        "asked anthropic:claude",
        "text 'The Forum'",
        "failed anthropic:claude: retry in 0.0",
        "asked anthropic:claude",
        "text 'The Forum'",
        f"answered anthropic:claude: done, ${DEAR_ANSWER}",
    ]
    assert told.record == [("anthropic:claude", [cut], DEAR_ANSWER)]
    assert told.cost == told.outcome.cost == 2 * DEAR_ANSWER
    assert (told.outcome.usage.input, told.outcome.usage.requests) == (20, 2)
    told = await tell([SILENT], [FINE_STREAM], stream=True)
    assert told.outcome.text == "In Rome."
    assert told.events == [
        "asked anthropic:claude",
        "failed anthropic:claude: retry in 0.0",
        "asked anthropic:claude",
        "failed anthropic:claude: asking openai:gpt",
        "asked openai:gpt",
        "text 'In Rome.'",
        f"answered openai:gpt: done, ${CHEAP_ANSWER}",
    ]
    assert told.record == [("openai:gpt", [cut, cut], CHEAP_ANSWER)]
    assert told.cost == told.outcome.cost == CHEAP_ANSWER + 2 * DEAR_ANSWER


async def test_a_stream_that_is_cut_every_time() -> None:
    """If every attempt is cut off after part of its text was streamed, the run fails, and no other model is asked."""
    told = await tell([CUT], [FINE_STREAM], stream=True)
    assert isinstance(told.outcome, PromptEvaluationError)
    assert told.asked[1] == []
    assert told.events == [
        *["asked anthropic:claude", "text 'The Forum'", "failed anthropic:claude: retry in 0.0"] * 2,
        *["asked anthropic:claude", "text 'The Forum'", "failed anthropic:claude: retry in None"],
    ]
    assert (told.record, told.cost) == ([], 3 * DEAR_ANSWER)


@tool(effect="staged")
async def ask(context: UserContext) -> str:
    """Ask a person."""
    return await context.wait_for("sure", {}, str)


@tool(effect="pure")
async def look() -> str:
    """Look at something."""
    return "seen"


async def test_a_resumed_run_has_paid_for_what_was_cut_off() -> None:
    """The requests that failed before an answer are recorded, and a resumed run still counts their cost."""
    cut = Reply(cut=True, usage=Usage(input=10, requests=1))
    model = ScriptedModel(
        [cut, cut, Reply(calls=[ToolCall("ask")], usage=Usage(input=1, requests=1)), "Done."],
        traits=Traits(DEAR),
    )
    journal, prompt = MemoryJournal(), Prompt("p", "Be brief.", tools=[ask])
    adapter = Adapter(model, retry=QUICK, journal=journal)
    assert await park_and_resume(adapter, prompt) == "Done."
    tree = await show(journal, "r1")
    assert [(len(turn.failed), turn.usage) for turn in tree.turns] == [
        (2, Usage(input=1, requests=1)),
        (0, Usage(requests=1)),
    ]
    assert (tree.usage.input, tree.cost) == (21, 21 * DEAR.input / 1_000_000)


class Uncounted(ScriptedModel):
    """A scripted model that reports no usage for a reply whose usage is empty."""

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        async for part in super().stream(request):
            if part != UsagePart(Usage()):
                yield part


@pytest.mark.parametrize(
    "first",
    [
        ModelUnavailable("scripted", "down"),
        Reply("Hm.", cut=True, usage=Usage()),
        Reply("No.", stop="refused", usage=Usage()),
        Reply(calls=[ToolCall("look")], usage=Usage()),
    ],
    ids=["down", "cut", "refused", "uncounted"],
)
async def test_a_resumed_run_has_no_more_budget_than_before(first: Any) -> None:
    """Requests without reported usage are charged to the budget, and a resumed run does not get them back."""
    left: list[dict[str, float]] = []

    @tool(effect="read")
    async def peek(context: ToolContext) -> str:
        """Note how much is left."""
        left.append(dict(context.budget_tracker.remaining()))
        return "seen"

    rest = [ToolCall("peek"), ToolCall("ask"), ToolCall("peek"), "Done."]
    price = Traits(DEAR)
    one, two = Uncounted([first, *rest], name="a", traits=price), ScriptedModel(rest, name="b", traits=price)
    adapter = Adapter(first_that_works(one, two, on_refusal=True), retry=QUICK, journal=MemoryJournal())
    prompt, budget = Prompt("p", "Be brief.", tools=[ask, peek, look]), Budget(9**6, 9, 9)
    assert await park_and_resume(adapter, prompt, budget=budget) == "Done."
    before, after = left
    assert before["requests"] == 7.0
    assert after == {**before, "requests": before["requests"] - 2}


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (Reply("Hm.", cut=True, usage=Usage()), None),
        (ModelUnavailable("scripted", "down"), 3 * DEAR.input / 1_000_000),
    ],
    ids=["cut", "down"],
)
async def test_the_cost_of_an_answer_that_was_cut_off_uncounted_is_unknown(
    first: Any, expected: Decimal | None
) -> None:
    """If an answer is cut off before its usage is reported, the cost of its run is unknown. A request without any answer is free."""

    @tool(effect="idempotent")
    async def consult(context: ToolContext) -> str:
        """Ask a nested run."""
        return (await context.adapter.evaluate(Prompt("q", "Be brief."), "Where?")).text

    one = Usage(input=1, requests=1)
    rest = [Reply("Rome.", usage=one), Reply(calls=[ToolCall("ask")], usage=one), "Done."]
    model = Uncounted([Reply(calls=[ToolCall("consult")], usage=one), first, *rest], traits=Traits(DEAR))
    journal, prompt = MemoryJournal(), Prompt("p", "Be brief.", tools=[consult, ask])
    with pytest.raises(RunParked) as parked:
        await Adapter(model, retry=QUICK, journal=journal).evaluate(
            prompt, "go", run_id="r1", environment=LaterEnvironment()
        )
    assert (await show(journal, "r1")).cost == expected
    journal.questions.answer(answer_to(parked.value.questions[0], "yes"))
    response = await Adapter(model, retry=QUICK, journal=journal).resume("r1", prompt)
    assert (response.cost, (await show(journal, "r1")).cost) == (expected, expected)


async def test_a_request_that_is_stopped_may_have_cost_something() -> None:
    """If a run is cancelled while it waits for an answer, its cost is unknown, and the reserved amount counts as spent."""
    asked = asyncio.Event()

    async def answer(request: ModelRequest) -> Any:
        asked.set()
        await asyncio.Event().wait()

    session, journal, budget = Session(), MemoryJournal(), BudgetTracker(Budget(tokens=9000))
    adapter = Adapter(ScriptedModel(answer, traits=Traits(DEAR)), journal=journal)
    run = asyncio.ensure_future(
        adapter.evaluate(Prompt("p", "Be brief."), "Go.", session=session, budget=budget, run_id="r")
    )
    await asked.wait()
    run.cancel()
    await asyncio.wait([run])
    (ended,) = session[PromptExecuted].all()
    assert (ended.stop_reason, ended.cost) == ("cancelled", None)
    assert budget.spent()["tokens"] > 4000
    tree = await show(journal, "r")
    assert (tree.standing, tree.cost, tree.turns) == ("cancelled", None, [])
    assert tree.outcome.unanswered is not None
    assert [each.model for each in tree.outcome.unanswered.failed] == ["scripted:script"]


async def test_a_resumed_run_is_charged_for_nested_requests_that_were_not_counted() -> None:
    """The budget of a resumed run is charged for what the nested requests of its finished calls had reserved."""
    left: list[dict[str, float]] = []

    @tool(effect="idempotent")
    async def consult(context: ToolContext) -> str:
        """Ask a nested run."""
        return (await context.adapter.evaluate(Prompt("q", "Be brief."), "Where?")).text

    @tool(effect="read")
    async def peek(context: ToolContext) -> str:
        """Note how much is left."""
        left.append(dict(context.budget_tracker.remaining()))
        return "seen"

    def follow(request: ModelRequest) -> Any:
        turns = [ToolCall("consult"), ToolCall("peek"), ToolCall("ask"), ToolCall("peek"), "Done."]
        if not request.tools:
            return Reply("Rome.", usage=Usage())
        answer = turns[sum(isinstance(each, AssistantMessage) for each in request.messages)]
        return answer if isinstance(answer, str) else Reply(calls=[answer], usage=Usage(1, 1, requests=1))

    adapter = Adapter(Uncounted(follow, traits=Traits(DEAR)), journal=MemoryJournal())
    prompt = Prompt("p", "Be brief.", tools=[consult, peek, ask])
    assert await park_and_resume(adapter, prompt, budget=Budget(tokens=9**6, money=9)) == "Done."
    before, after = left
    spent = before["tokens"] - after["tokens"]
    assert spent == 2 * 2, "the answers with the calls of ask and peek"


COUNTED = {"input_tokens": 100, "output_tokens": 50}
CHAT_COUNTED = {"prompt_tokens": 100, "completion_tokens": 50}
BROKEN = {"error": {"message": "broken", "code": 500}, "choices": [], "usage": CHAT_COUNTED}
FAILED = {
    "status": "failed",
    "error": {"code": "server_error", "message": "x"},
    "usage": COUNTED,
    "output": [],
}
MALFORMED = {
    "candidates": [{"content": {"parts": []}, "finishReason": "MALFORMED_FUNCTION_CALL"}],
    "usageMetadata": {"promptTokenCount": 100, "candidatesTokenCount": 50},
}


@pytest.mark.parametrize(
    ("wire", "stream", "answer"),
    [
        ("chat", False, whole(BROKEN)),
        ("chat", True, streamed(delta(content="a"), BROKEN)),
        ("responses", False, whole(FAILED)),
        ("responses", True, streamed({"type": "response.failed", "response": FAILED}, end=b"")),
        ("gemini", False, whole(MALFORMED)),
        ("gemini", True, streamed(MALFORMED, end=b"")),
        (
            "messages",
            True,
            streamed(
                {"type": "message_start", "message": {"usage": {"input_tokens": 100, "output_tokens": 1}}},
                {
                    "type": "message_delta",
                    "delta": {"stop_reason": "end_turn"},
                    "usage": {"output_tokens": 50},
                },
                end=b"",
            ),
        ),
    ],
)
async def test_an_answer_that_fails_is_charged_for_what_it_reports(
    wire: Any, stream: bool, answer: bytes
) -> None:
    """A failed run counts the usage that the provider reported in the failed answer, and its cost."""
    async with raw_server(answer) as server:
        url, model = server.url, None
        match wire:
            case "messages":
                model = AnthropicModel("claude", base_url=url, key_variable=None, price=DEAR)
            case "gemini":
                model = GeminiModel("gemini-3-pro", base_url=url, key_variable=None, price=DEAR)
            case _:
                model = OpenAIModel("gpt", api=wire, base_url=url, key_variable=None, price=DEAR)
        session, adapter = Session(), Adapter(model, retry=Retry(attempts=1))
        prompt = Prompt("p", "Be brief.")
        asking: Any = (
            adapter.stream(prompt, "Go.", session=session).response
            if stream
            else adapter.evaluate(prompt, "Go.", session=session)
        )
        with pytest.raises(PromptEvaluationError):
            await asking
    (ended,) = session[PromptExecuted].all()
    assert (ended.usage.input, ended.usage.output) == (100, 50)
    assert ended.cost == 150 * DEAR.input / 1_000_000


THINKING = {
    "content": [
        {"type": "thinking", "thinking": "Let me look.", "signature": "anthropics+signature="},
        {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}},
    ],
    "stop_reason": "tool_use",
}
GEMINI_CALL = {
    "functionCall": {"id": "g1", "name": "look", "args": {}},
    "thoughtSignature": "googles+signature=",
}


def gemini_answer(*parts: Any) -> bytes:
    return whole({"candidates": [{"content": {"parts": list(parts)}, "finishReason": "STOP"}]})


async def test_what_one_provider_thought_is_not_sent_to_another() -> None:
    """In a tool loop over three providers, each gets back its own signatures and no other's, in valid requests."""
    async with (
        raw_server(whole(THINKING), DOWN, DOWN, DOWN) as one,
        raw_server(gemini_answer(GEMINI_CALL), DOWN, DOWN, DOWN) as two,
        raw_server(FINE) as three,
    ):
        model = first_that_works(
            AnthropicModel("claude", base_url=one.url, key_variable=None),
            GeminiModel("gemini-3-pro", base_url=two.url, key_variable=None),
            OpenAIModel("gpt", base_url=three.url, key_variable=None),
        )
        response = await Adapter(model, retry=QUICK).evaluate(Prompt("p", "Do.", tools=[look]), "go")
        bodies = [*map(json.dumps, (one.bodies[-1], two.bodies[0], two.bodies[-1], three.bodies[0]))]
    assert response.text == "In Rome."
    assert [("anthropics" in body, "googles" in body) for body in bodies] == [
        (True, False),
        (False, False),
        (False, True),
        (False, False),
    ]
    assert "skip_thought_signature_validator" in bodies[1]


def main() -> None:
    cases = {
        "an outage": tell([DOWN], [FINE]),
        "a rate limit of 30 seconds": tell([LIMITED], [FINE]),
        "a refusal, with on_refusal=True": tell([REFUSED], [FINE], on_refusal=True),
        "a stream that was cut after it was seen": tell([CUT, WHOLE], [FINE_STREAM], stream=True),
        "a stream that was cut before": tell([SILENT], [FINE_STREAM], stream=True),
    }

    async def everything() -> None:
        for name, case in cases.items():
            told = await case
            print(f"{name}:", *told.events, f"record {told.record}", f"cost ${told.cost}", sep="\n  ")

    asyncio.run(everything())


if __name__ == "__main__":
    main()
