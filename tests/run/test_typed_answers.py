"""Typed answers: any type from any model, and what is seen of an answer while the model writes it."""

from __future__ import annotations

import enum
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, SecretStr, computed_field
from typing_extensions import TypedDict

from handrail import (
    Adapter,
    Agent,
    MemoryJournal,
    Prompt,
    PromptEvaluationError,
    Session,
    ToolCall,
    ToolContext,
    WorkerRegistry,
    tool,
)
from handrail.events import ModelFailed, PartialOutput, TextDelta
from handrail.messages import CallPart, ModelPart, ModelRequest, StopPart, TextPart, ToolMessage, Traits
from handrail.models import ModelUnavailable
from handrail.models.scripted import ScriptedModel
from handrail.run.adapter import Retry
from handrail.run.response import Output

pytestmark = pytest.mark.once  # pydantic reads the types in the same way under every Python version

NATIVE, BY_CALL = Traits(native_output=True), Traits(native_output=False)


@dataclass(frozen=True)
class City:
    """A place."""

    name: str
    people: int = 0


@dataclass(frozen=True)
class Trip:
    """A city, and what to take there."""

    city: City
    pack: list[str]


class Row(BaseModel):
    """A row of a table."""

    cells: list[int]


class Counts(TypedDict):
    """The number of apples."""

    apples: int


class Color(enum.Enum):
    """A color."""

    RED = "red"


ANY = [
    (int, 3, 3),
    (bool, True, True),
    (str, "hi", "hi"),
    (list[City], [{"name": "Oslo"}], [City("Oslo")]),
    (City | str, "none", "none"),
    (City | str, {"name": "Oslo"}, City("Oslo")),
    (Literal["yes", "no"], "no", "no"),
    (dict[str, int], {"a": 1}, {"a": 1}),
    (Counts, {"apples": 1}, {"apples": 1}),
    (Color, "red", Color.RED),
    (list[Row], [{"cells": [1]}], [Row(cells=[1])]),
    (None | City, {"name": "Oslo"}, City("Oslo")),
    (None | City, None, None),
    (Trip, {"city": {"name": "Oslo"}, "pack": []}, Trip(City("Oslo"), [])),
]


def answering(kind: Any, value: Any, native: bool) -> ScriptedModel:
    """Return a model that gives this answer whenever it is asked for one of the type, and otherwise calls its only tool once."""
    answer = value if kind is Trip else {"value": value}

    def reply(request: ModelRequest) -> Any:
        if request.output is not None:
            return json.dumps(answer)
        names = [each.tool.name for each in request.tools]
        if "final_answer" in names:
            return ToolCall("final_answer", answer)
        return "Done." if isinstance(request.messages[-1], ToolMessage) else ToolCall(names[0], {})

    return ScriptedModel(reply, traits=NATIVE if native else BY_CALL)


# --- any type ----------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("kind", "value", "wanted"), ANY)
async def test_an_answer_can_have_any_type(kind: Any, value: Any, wanted: Any, native: bool) -> None:
    """A run's answer has the type, whether the provider enforces it or not, and so has that of the finished run when it is resumed."""
    journal = MemoryJournal()
    agent = Agent(Adapter(answering(kind, value, native), journal=journal), "Answer.", output=kind)
    response = await agent.run("go", run_id="r")
    assert (response.output, type(response.output)) == (wanted, type(wanted))
    again = await Agent(Adapter(ScriptedModel([]), journal=journal), "Answer.", output=kind).resume("r")
    assert (again.output, type(again.output)) == (wanted, type(wanted))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("kind", "value", "wanted"), ANY)
async def test_a_nested_answer_can_have_any_type(kind: Any, value: Any, wanted: Any, native: bool) -> None:
    """So can the answers that a handler gets from `evaluate`, and a model from an agent that is its tool."""
    outputs: list[Any] = []

    @tool
    async def ask(context: ToolContext) -> str:
        """Ask."""
        outputs.append((await context.adapter.evaluate(Prompt("inner", "Answer.", output=kind), "go")).output)
        return "asked"

    model = answering(kind, value, native)
    await Agent(model, "Ask.", tools=[ask]).run("go")
    assert [(each, type(each)) for each in outputs] == [(wanted, type(wanted))]
    inner = Agent(model, "Answer.", output=kind, name="inner", description="Answers.").as_tool()
    outer = ScriptedModel([ToolCall("inner", {"message": "?"}), "Done."])
    session = (await Agent(outer, "Ask.", tools=[inner]).run("go")).session
    result = outer.requests[-1].messages[-1]
    assert isinstance(result, ToolMessage)
    assert not result.results[0].failed, session
    if value is not None:
        plain = json.dumps(value) if not isinstance(value, str) or kind is Color else value
        assert json.loads(plain) if plain[0] in '{["' else plain in result.results[0].text


class Squared(BaseModel):
    """A number that knows its square."""

    number: int

    @computed_field
    @property
    def square(self) -> int:
        return self.number**2


async def test_a_recorded_answer_with_computed_fields_has_its_type() -> None:
    """Computed fields are not recorded, because they are not fields of the answer."""
    journal = MemoryJournal()
    model = ScriptedModel(['{"number": 3}'])
    agent = Agent(Adapter(model, journal=journal), "Answer.", output=Squared)
    await agent.run("go", run_id="r")
    assert (await agent.resume("r")).output == Squared(number=3)


async def test_the_text_of_an_answer_is_what_was_asked_for() -> None:
    """The object that a number or a list is sent in is not part of the response's text."""
    model = ScriptedModel(
        ['{"value": 5}', '```json\n{"value": [1, 2]}\n```', '{"value": "hi"}', '{"pack": [], "city": {}}']
    )
    assert (await Agent(model, "Answer.", output=int).run("go")).text == "5"
    assert (await Agent(model, "Answer.", output=list[int]).run("go")).text == "[1,2]"
    assert (await Agent(model, "Answer.", output=Literal["hi", "ho"]).run("go")).text == "hi"


# --- partial answers ---------------------------------------------------------------------------


class Streaming:
    """A model that answers with the next of some lists of parts. An exception among the parts is raised."""

    name = "test:streaming"

    def __init__(self, *answers: Sequence[ModelPart | Exception], native: bool = True) -> None:
        self.traits = NATIVE if native else BY_CALL
        self._answers = list(answers)

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        for part in self._answers.pop(0):
            if isinstance(part, Exception):
                raise part
            yield part


def text(*pieces: str) -> list[ModelPart]:
    """Return the parts of an answer in text."""
    return [*map(TextPart, pieces), StopPart("done")]


def call(*pieces: str, name: str = "final_answer") -> list[ModelPart]:
    """Return the parts of an answer that is a call."""
    return [CallPart(0, "c", name), *(CallPart(0, arguments=piece) for piece in pieces), StopPart("calls")]


async def partial(model: Any, kind: Any, **arguments: Any) -> list[Any]:
    """Run an agent, and return the values of its partial outputs, with None for each failed request."""
    stream = Agent(Adapter(model, retry=Retry(first_wait=0)), "Answer.", output=kind, **arguments).stream(
        "go"
    )
    values: list[Any] = []
    async for event in stream:
        if isinstance(event, PartialOutput):
            values.append(event.value)
        elif isinstance(event, ModelFailed):
            values.append(None)
    response = await stream.response
    assert not values or values[-1] == response.output
    return values


PIECES = ('{"city": {"name"', ': "Oslo"', '}, "pack": ["coat', '", "hat', '"]}')
GROWING = [
    {},
    {"city": {}},
    {"city": {"name": "Oslo"}},
    {"city": City("Oslo"), "pack": []},
    {"city": City("Oslo"), "pack": ["coat"]},
    Trip(City("Oslo"), ["coat", "hat"]),
]


async def test_a_streamed_answer_is_seen_while_it_grows() -> None:
    """Complete fields and items are published with their types, and at the end the whole answer, by every way to give it."""
    assert await partial(Streaming(text(*PIECES)), Trip) == GROWING
    assert await partial(Streaming(call(*PIECES), native=False), Trip) == GROWING


async def test_a_list_is_seen_item_by_item() -> None:
    """A list is not shown in the object that it is sent in."""
    pieces = ['{"value": [{"name": "a"}', ', {"name": "b"}, {"name": "c"', "}]}"]
    wanted = [[], [City("a")], [City("a"), City("b")], [City("a"), City("b"), City("c")]]
    assert await partial(Streaming(text(*pieces)), list[City]) == wanted
    assert await partial(Streaming(call(*pieces), native=False), list[City]) == wanted


@pytest.mark.parametrize("native", [True, False])
async def test_a_number_is_not_seen_before_the_end(native: bool) -> None:
    """Nothing is published for an answer that is neither an object nor a list, nor for one in text."""
    assert await partial(answering(int, 3, native), int) == []
    assert await partial(answering(City | str, "hi", native), City | str) == []
    assert (
        await partial(answering(None, None, native), None, tools=[tool(name="look", effect="pure")(look)])
        == []
    )


async def look() -> str:
    """Look around."""
    return "nothing"


async def test_an_answer_that_is_requested_again_begins_anew() -> None:
    """After a failed request, the value is empty again."""
    cut = [TextPart('{"value": [1, 2, '), ModelUnavailable("m", "down")]
    model = Streaming(cut, text('{"value": [3,', "4]}"))
    assert await partial(model, list[int]) == [[], [1, 2], None, [], [3], [3, 4]]


@pytest.mark.parametrize("native", [True, False])
async def test_an_answer_that_is_corrected_begins_anew(native: bool) -> None:
    """After an answer that does not match its type, the value is empty again."""
    give = text if native else call
    model = Streaming(give('{"value": [1, "x"', "]}"), give('{"value": [1,', " 2]}"), native=native)
    assert await partial(model, list[int]) == [[], [1], [], [1], [1, 2]]


async def test_a_paused_answer_continues() -> None:
    """An answer that the provider paused goes on where it was, and is corrected by a whole answer."""
    paused = [TextPart('{"value": [1, '), StopPart("paused")]
    assert await partial(Streaming(paused, text("2, ", "3]}")), list[int]) == [[], [1], [1, 2], [1, 2, 3]]
    model = Streaming(paused, text('"x"]}'), text('{"value": [4]}'))
    assert await partial(model, list[int]) == [[], [1], [], [4]]


async def test_calls_of_other_tools_are_not_answers() -> None:
    """The arguments of other calls, and text before them, are not published as the answer."""
    model = Streaming(
        [TextPart("First I look: "), *call("{}", name="look")], call('{"value": [1', "]}"), native=False
    )
    looks = tool(name="look", effect="pure")(look)
    assert await partial(model, list[int], tools=[looks]) == [[], [1]]


async def test_a_nested_answer_is_seen_with_its_run() -> None:
    """The partial outputs of a nested run carry its run's context."""
    inner = Agent(
        Streaming(text('{"value": [1', "]}")),
        "Answer.",
        output=list[int],
        name="inner",
        description="Counts.",
    )
    outer = ScriptedModel([ToolCall("inner", {"message": "?"}), "Done."])
    stream = Agent(outer, "Ask.", tools=[inner.as_tool()]).stream("go", run_id="r")
    events = [event async for event in stream if isinstance(event, PartialOutput)]
    assert [each.value for each in events] == [[], [1]]
    assert all(each.run_context.run_id.startswith("r.") for each in events)


async def test_the_answer_of_a_worker_is_plain_data_while_it_grows(tmp_path: Path) -> None:
    """A worker's partial outputs are the JSON that was sent, with the keys of its schema."""
    rows = {"type": "array", "items": {"type": "object", "properties": {"a b": {"type": "integer"}}}}
    whole = {"type": "object", "properties": {"the rows": rows, "more": {"type": "string"}}}
    pieces = ['[{"a b": 1}', ', {"a b": 2}', "]"]
    seen: list[list[Any]] = []
    for schema, before, after in ((whole, '{"the rows": ', "}"), (rows, '{"value": ', "}")):
        front = f"---\nname: w\ndescription: Counts.\noutput: {json.dumps(schema)}\n---\nCount.\n"
        (tmp_path / "w.md").write_text(front)
        stream = WorkerRegistry(tmp_path).stream(
            "w", "go", model=Streaming(text(before + pieces[0], *pieces[1:], after))
        )
        seen.append([event.value async for event in stream if isinstance(event, PartialOutput)])
        assert seen[-1][-1] == (await stream.response).output
    both = [{"a b": 1}, {"a b": 2}]
    assert seen[0] == [{}, {"the rows": both[:1]}, {"the rows": both}, {"the rows": both}, {"the rows": both}]
    assert seen[1] == [[], both[:1], both, both]


class Login(BaseModel):
    """An answer with a secret."""

    user: str
    tags: list[str]
    password: SecretStr


@pytest.mark.parametrize("native", [True, False])
async def test_an_answer_with_a_secret_is_not_seen_before_the_end(native: bool) -> None:
    """Nothing of an answer that may contain a secret is published while it arrives."""
    answer = {"user": "ada", "tags": ["x"], "password": "hunter2"}
    model = ScriptedModel([ToolCall("final_answer", answer)], traits=NATIVE if native else BY_CALL)
    stream = Agent(model, "Answer.", output=Login).stream("go")
    events = [event async for event in stream]
    assert not [each for each in events if isinstance(each, PartialOutput)]
    assert "hunter2" not in str(events)
    assert (await stream.response).output.password.get_secret_value() == "hunter2"


async def test_nothing_is_read_if_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A streamed answer is read as it arrives only if somebody listens for partial outputs."""
    made: list[Output] = []
    monkeypatch.setattr(Output, "partial", lambda output: made.append(output))
    session = Session()
    texts: list[str] = []
    session.dispatcher.subscribe(TextDelta, lambda event: texts.append(event.text))
    agent = Agent(ScriptedModel(['{"value": [1, 2]}'] * 2), "Answer.", output=list[int])
    assert (await agent.stream("go", session=session).response).output == [1, 2]
    assert len(texts) > 1
    assert made == []
    assert [event async for event in agent.stream("go") if isinstance(event, PartialOutput)] == []
    assert len(made) == 1


async def test_a_long_list_is_copied_in_linear_time() -> None:
    """Long lists are published less often than each time they grow, so that all copies together are linear in the answer's length."""
    written = json.dumps({"value": [0] * 20_000})
    pieces = [written[at : at + 20] for at in range(0, len(written), 20)]
    values = await partial(Streaming(text(*pieces)), list[int])
    assert len(values[-1]) == 20_000
    assert len(values) > 50
    assert sum(map(len, values)) <= 4 * len(written) + 20_000
    assert all(len(one) <= len(other) for one, other in pairwise(values))


async def test_a_run_without_a_valid_answer_fails_after_its_partial_outputs() -> None:
    """What was published of answers that are refused is not the run's output."""
    model = Streaming(*[text('{"value": [1, "x"]}') for _ in range(3)])
    stream = Agent(model, "Answer.", output=list[int]).stream("go")
    values = [event.value async for event in stream if isinstance(event, PartialOutput)]
    assert values == [[], [1]] * 3
    with pytest.raises(PromptEvaluationError, match="still invalid"):
        await stream.response
