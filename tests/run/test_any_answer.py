"""Whatever a model says, the next request is well-formed on every wire."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from handrail import (
    Adapter,
    Budget,
    LaterEnvironment,
    MemoryJournal,
    Prompt,
    Session,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.errors import RunParked
from handrail.events import MessageAdded, ToolInvoked
from handrail.journal.sqlite import SqliteJournal
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    CallAsked,
    CallPart,
    Kept,
    ModelPart,
    ModelRequest,
    StopPart,
    StopReason,
    TextPart,
    ThinkingPart,
    ToolMessage,
    Traits,
    Usage,
    UsagePart,
    UserMessage,
)
from handrail.models.bridge import messages_of
from handrail.models.scripted import Reply, ScriptedModel
from handrail.run.conversation import check_well_formed, root_conversation
from support.parked_runs import answer_to
from support.strict_wires import bodies, check_everywhere

pytestmark = pytest.mark.once  # the messages are plain data, the same under every Python version

ran: list[str] = []


@tool(effect="pure")
async def look(where: str = "here", context: ToolContext | None = None) -> str:
    """Look somewhere."""
    ran.append(where)
    return f"nothing {where}"


@tool(effect="pure")
async def quiet() -> str:
    """Say nothing."""
    return ""


PROMPT = Prompt("any", "Answer.", tools=[look, quiet])


class Drawn:
    """A model that checks each request on every wire, and answers with the next of `answers` or, after the last, "done"."""

    name = "test:drawn"
    traits = Traits()

    def __init__(self, answers: Sequence[Sequence[ModelPart]]) -> None:
        self._answers = list(answers)
        self.requests = 0
        self.sent: list[dict[str, bytes]] = []

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        self.requests += 1
        assert check_everywhere(request) == []
        messages_of("test:drawn", request)  # pydantic-ai's own types accept the conversation
        self.sent.append(bodies(request))
        for part in self._answers.pop(0) if self._answers else [TextPart("done"), StopPart("done")]:
            yield part


# --- what a model can say ----------------------------------------------------------------------

LIKE_A_DIGEST = f"hr-{hashlib.sha256(b'functions.add:0').hexdigest()[:32]}"
NAMES = st.sampled_from(
    [
        "look",
        "quiet",
        "multi_tool_use.parallel",
        "",
        "functions.look",
        "look look",
        "l" * 65,
        "Løk",
        "…",
        "\ud800",
    ]
) | st.text(max_size=70)
IDS = st.sampled_from(
    ["", "a", "functions.add:0", LIKE_A_DIGEST, "i" * 41, "i" * 65, "a b", "a\n", "å", "\ud800", "a-1"]
) | st.text(max_size=70)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = (
    st.sampled_from(["", "{}", "[]", "null", "0", '"x"', "{", '{"where": "there"}', "[" * 1200, "x" * 30_000])
    | st.sampled_from(
        ['{"where":' * 1200, '{"a":' * 60 + "1" + "}" * 60, '{"a": "\\ud800"}', '{"a": "\x00"}']
    )
    | st.sampled_from(
        ['{"a": NaN}', '{"a": 1e999}', f'{{"a": {"1" * 400}}}', "1" * 5000, "\ud800", "\ufeff{}"]
    )
    | st.sampled_from(['{"where": "a", "where": "b"}', '{"where": "\ud800"}'])
    | st.text(max_size=20)
    | JSON.map(json.dumps)
    | st.dictionaries(st.sampled_from(["where", "a"]), JSON, max_size=2).map(json.dumps)
)
TEXTS = st.sampled_from(["", " ", "\n", "ok", "\ud83d", "\ude00", "\x00"]) | st.text(max_size=10)

BLOCKS = st.sampled_from(
    [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "thinking", "thinking": "hm"},
        {"type": "redacted_thinking", "data": "z"},
        {"type": "text", "text": "said", "citations": None},
        {"type": "text", "text": " "},
        {"type": "tool_use", "id": "x", "name": "look"},
        {"type": "novelty", "said": 1},
    ]
)
ITEMS = st.sampled_from(
    [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "e", "novelty": 1},
        {"type": "reasoning", "encrypted_content": "e"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "said"}]},
        {"type": "message", "role": "assistant", "content": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "novelty"}, {"type": "refusal", "refusal": "no"}],
        },
        {"type": "function_call", "call_id": "x", "name": "a.b", "arguments": "["},
        {"type": "novelty", "encrypted_content": "e"},
    ]
)
KEPT = (
    st.none()
    | st.builds(Kept, st.just("anthropic"), st.lists(BLOCKS, min_size=1, max_size=5).map(msgspec.json.encode))
    | st.builds(Kept, st.just("responses"), st.lists(ITEMS, min_size=1, max_size=5).map(msgspec.json.encode))
)
PIECES = st.one_of(
    st.builds(TextPart, TEXTS),
    st.builds(ThinkingPart, TEXTS),
    st.builds(CallPart, st.integers(0, 3), IDS, NAMES, ARGUMENTS),
    st.builds(CallPart, st.integers(0, 3), arguments=ARGUMENTS),
    st.builds(UsagePart, st.builds(Usage, st.integers(0, 9), st.integers(0, 9))),
)
CACHE_MARK = b',"cache_control":{"type":"ephemeral"}'
STOPS: st.SearchStrategy[StopReason] = st.sampled_from(["done", "calls", "length", "refused"])


@st.composite
def answers(draw: st.DrawFn) -> list[ModelPart]:
    return [*draw(st.lists(PIECES, max_size=6)), StopPart(draw(STOPS), draw(KEPT))]


@given(st.lists(answers(), min_size=1, max_size=4), st.booleans())
@example([[CallPart(0, "a", "multi_tool_use.parallel", "[" * 1200), StopPart("calls")]], False)
@example([[CallPart(n, "functions.add:0", "", "{}") for n in range(4)] + [StopPart("calls")]] * 2, True)
@example([[CallPart(n, f"c{n}", "look", "{}") for n in range(200)] + [StopPart("calls")]], False)
@example([[CallPart(0, "a", "look", '{"where": "a", "where": "b"}'), StopPart("calls")]], False)
async def test_any_answer_leaves_a_conversation_that_every_wire_accepts(
    said: list[list[ModelPart]], stream: bool
) -> None:
    """Whatever a model answers, every wire accepts the next request, which repeats all earlier messages unchanged.

    Gemini's messages are not compared, and neither are marks for the provider's cache, which are not part of a message.
    """
    model, session = Drawn(said), Session()

    adapter = Adapter(model)
    for message in ("go", "go on"):
        if stream:
            await adapter.stream(PROMPT, message, session=session).response
        else:
            await adapter.evaluate(PROMPT, message, session=session)
    event(f"{model.requests} requests")
    assert model.requests >= 2
    check_well_formed(root_conversation(session).messages)
    for earlier, later in zip(model.sent, model.sent[1:], strict=False):
        for wire, list_name in (
            ("chat", b'"messages":['),
            ("responses", b'"input":['),
            ("messages", b'"messages":['),
        ):
            before = earlier[wire].replace(CACHE_MARK, b"").split(list_name, 1)[1].rsplit(b"]", 1)[0]
            before = before.split(b'],"tools"')[0].split(b'],"system"')[0].split(b'],"instructions"')[0]
            assert later[wire].replace(CACHE_MARK, b"").split(list_name, 1)[1].startswith(before)


async def test_what_a_model_said_is_kept_as_it_said_it() -> None:
    """The session keeps a call as the model wrote it; only what is sent back to the provider is normalised."""
    call = CallPart(0, "functions.add:0", "multi_tool_use.parallel", "[[[")
    session = Session()
    await Adapter(Drawn([[call, StopPart("calls")]])).evaluate(PROMPT, "go", session=session)
    facts = [fact.message for fact in session[MessageAdded].all()]
    asked = next(each for each in facts if isinstance(each, AssistantMessage))
    assert [(each.id, each.name, each.arguments) for each in asked.calls] == [
        ("functions.add:0", "multi_tool_use.parallel", "[[[")
    ]
    answered = next(each for each in facts if isinstance(each, ToolMessage))
    assert answered.results[0].id == "functions.add:0"
    assert "There is no tool 'multi_tool_use.parallel'" in answered.text


# --- calls that are cut off --------------------------------------------------------------------

CUT: list[tuple[StopReason, str]] = [("length", "length limit"), ("refused", "stopped the answer")]


@pytest.mark.parametrize(("reason", "words"), CUT)
@pytest.mark.parametrize("arguments", ["", "{}", '{"where": "there"}', '{"where": "th'])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_was_cut_off_never_runs(
    reason: StopReason, words: str, arguments: str, stream: bool
) -> None:
    """The last call of an answer that was cut off does not run, even with valid arguments. The model is told why."""
    ran.clear()
    said = [
        CallPart(0, "a", "look", '{"where": "first"}'),
        CallPart(1, "b", "look", arguments),
        StopPart(reason),
    ]
    session, adapter = Session(), Adapter(Drawn([said]))
    if stream:
        await adapter.stream(PROMPT, "go", session=session).response
    else:
        await adapter.evaluate(PROMPT, "go", session=session)
    assert ran == ["first"]
    assert [(each.call_id, each.status) for each in session[ToolInvoked].all()] == [
        ("a", "ok"),
        ("b", "invalid"),
    ]
    results = next(
        each for each in root_conversation(session).messages if isinstance(each, ToolMessage)
    ).results
    assert [result.failed for result in results] == [False, True]
    assert words in results[1].text
    assert "look was not run" in results[1].text


async def test_calls_that_are_written_at_the_same_time_are_cut_off_together() -> None:
    """If an answer with several incomplete calls is cut off, none of them runs, and neither does its last call."""
    ran.clear()
    said: list[ModelPart] = [
        CallPart(0, "a", "look", ""),
        CallPart(1, "b", "look", '{"where": '),
        CallPart(2, "c", "look", '{"where": "c"}'),
        StopPart("length"),
    ]
    await Adapter(Drawn([said])).evaluate(PROMPT, "go")
    assert ran == []


class Pick(BaseModel):
    """A number that a person or a model gives."""

    number: int


async def test_a_call_that_was_cut_off_is_still_cut_off_in_a_resumed_run(tmp_path: Path) -> None:
    """A run that is resumed in a turn that was cut off still refuses the turn's incomplete calls and its last call."""
    ran.clear()

    @tool(effect="staged")
    async def ask(context: ToolContext) -> str:
        """Ask for a number."""
        assert context.wait_for
        return f"got {(await context.wait_for('pick', {}, Pick)).number}"

    prompt = Prompt("cut", "Answer.", tools=[look, ask])
    said: list[ModelPart] = [
        CallPart(0, "a", "look", ""),
        CallPart(1, "b", "ask", "{}"),
        CallPart(2, "c", "look", "{}"),
        StopPart("length"),
    ]
    journal = SqliteJournal(tmp_path / "runs.db", watch=None)
    try:
        adapter = Adapter(Drawn([said]), journal=journal, environment=LaterEnvironment())
        with pytest.raises(RunParked) as parked:
            await adapter.evaluate(prompt, "go", run_id="r")
        journal.questions.answer(answer_to(parked.value.questions[0]))
        response = await adapter.resume("r", prompt)
    finally:
        journal.close()
    assert (response.text, ran) == ("done", [])
    results = next(
        fact.message for fact in response.session[MessageAdded].all() if isinstance(fact.message, ToolMessage)
    ).results
    assert ["length limit" in each.text for each in results] == [True, False, True]


async def test_an_answer_by_call_that_was_cut_off_is_no_answer() -> None:
    """A typed answer that was cut off is not accepted, even if what arrived fits the type."""
    whole = '{"number": 12}'
    cut: list[ModelPart] = [CallPart(0, "a", "final_answer", whole), StopPart("length")]
    again: list[ModelPart] = [CallPart(0, "b", "final_answer", '{"number": 1234}'), StopPart("calls")]
    response = await Adapter(Drawn([cut, again])).evaluate(Prompt("typed", "Answer.", output=Pick), "go")
    assert response.output == Pick(number=1234)


def test_scripted_models_can_be_cut_off() -> None:
    """A call in a scripted answer with the stop reason `length` does not run, as in a provider's answer."""
    ran.clear()
    script = [Reply(calls=[ToolCall("look", {"where": "x"})], stop="length"), "done"]
    assert Adapter(ScriptedModel(script)).evaluate(PROMPT, "go").wait().text == "done"
    assert ran == []


# --- conversations that begin elsewhere --------------------------------------------------------


async def test_a_history_may_begin_with_the_model() -> None:
    """A history may begin with a model's message, even on wires that require a user message first."""
    history = [AssistantMessage("Hello."), UserMessage("Hi."), AssistantMessage("")]
    model = Drawn([])
    await Adapter(model).evaluate(PROMPT, "go", history=history)
    assert model.requests == 1


async def test_text_from_elsewhere_may_have_lone_surrogates() -> None:
    """Lone surrogates in a history or a message are sent as replacement characters."""
    history = [
        UserMessage("a\ud800"),
        AssistantMessage("b\ud800", (CallAsked("c\ud800", "d\ud800", '{"where": "e\ud800"}'),)),
        ToolMessage((CallAnswered("c\ud800", "d\ud800", "f\ud800"),)),
    ]
    model = Drawn([])
    await Adapter(model, journal=MemoryJournal()).evaluate(
        PROMPT, "g\ud800", history=history, budget=Budget(tokens=10_000)
    )
    assert "b\ufffd".encode() in model.sent[0]["chat"]
