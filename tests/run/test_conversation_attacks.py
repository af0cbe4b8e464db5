"""Attacks on the agent loop: threads, broken text, and unusual timing."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from typing_extensions import TypedDict

from handrail import (
    Adapter,
    AgentContext,
    Budget,
    Deadline,
    MarkdownSection,
    OpenAIModel,
    Prompt,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    UserContext,
    tool,
)
from handrail.errors import ConversationBusy, PromptRenderError
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    CallAsked,
    ModelRequest,
    ToolMessage,
    Traits,
    UserMessage,
)
from handrail.models import ModelUnavailable
from handrail.models.http import text_json
from handrail.models.scripted import Reply
from handrail.question import Answer, Question
from handrail.run.adapter import Retry
from handrail.session import load, save
from handrail.testing import Agent, Person, VirtualClock
from support.raw_server import raw_server, said

PLAIN = Prompt("p", "Go.")


# --- threads -----------------------------------------------------------------------------------


@pytest.fixture
def threads_take_turns() -> Iterator[None]:
    """Make threads switch very often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("threads_take_turns")
def test_two_threads_meet_in_a_session_that_was_just_loaded() -> None:
    """When two threads use a newly loaded session, each sees the whole conversation or is refused as busy."""
    history = [each for _ in range(5000) for each in (UserMessage("u"), AssistantMessage("a"))]
    session = Session()
    Adapter(ScriptedModel(["x"])).evaluate(PLAIN, "hi", session=session, history=history).wait()
    raw = save(session)
    for _ in range(4):
        both, came = threading.Barrier(2), list[str]()
        loaded, model = load(raw), ScriptedModel(lambda request: Reply("ok", delay=0.05))

        async def evaluate(loaded: Session = loaded, model: ScriptedModel = model) -> None:
            await Adapter(model).evaluate(PLAIN, "hi", session=loaded)

        def on_a_loop_of_its_own(
            both: threading.Barrier = both, came: list[str] = came, evaluate: Any = evaluate
        ) -> None:
            both.wait()
            try:
                asyncio.run(evaluate())
            except ConversationBusy:
                came.append("busy")
            else:
                came.append("answered")

        threads = [threading.Thread(target=on_a_loop_of_its_own) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert "answered" in came
        assert {len(request.messages) for request in model.requests} <= {10003, 10005}


# --- text --------------------------------------------------------------------------------------


@tool
async def list_files() -> str:
    """List the files."""
    return os.fsdecode(b"caf\xe9.txt, \xc3\xa9t\xc3\xa9.txt")


async def test_half_a_character_does_not_end_a_conversation() -> None:
    """A file name that is not UTF-8 is sent escaped, and a lone surrogate in a message as a replacement character."""
    call = {"id": "a", "type": "function", "function": {"name": "list_files", "arguments": "{}"}}
    async with raw_server(said(None, tool_calls=[call]), said("ok")) as raw:
        adapter = Adapter(OpenAIModel("m", base_url=raw.url, key_variable=None))
        session = Session()
        prompt = Prompt("p", "Go.", tools=[list_files])
        await adapter.evaluate(prompt, "half \ud83d, whole \ud83d\ude00", session=session)
        response = await adapter.evaluate(prompt, "Again.", session=session, budget=Budget(tokens=100_000))
    assert response.text == "ok"
    user, _, result = raw.bodies[1]["messages"][1:]
    assert user["content"] == "half \ufffd, whole \U0001f600"
    assert result["content"] == "caf\\xe9.txt, \u00e9t\u00e9.txt"


# --- deadlines ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The choice that a person or a model makes."""

    selected: str


class Thinking(Person):
    """A person who takes a hundred seconds to answer."""

    async def ask(self, question: Question, /) -> Answer:
        await asyncio.sleep(100)
        return await super().ask(question)


@pytest.mark.parametrize("tighter", [False, True])
@pytest.mark.virtual_time
async def test_a_person_asked_in_a_nested_run_stops_every_clock(tighter: bool) -> None:
    """When a nested run asks a person, the deadlines of all runs around it pause too, if they pause for people."""

    @tool
    async def ask(context: UserContext) -> str:
        """Ask a person."""
        return (await context.wait_for("pick", {}, Choice)).selected

    clock = VirtualClock()

    @tool
    async def delegate(context: ToolContext) -> str:
        """Let another agent ask a person."""
        deadline = Deadline.after(5, clock=clock, pauses_for_people=True) if tighter else None
        prompt = Prompt("inner", "Inner.", tools=[ask])
        return (await context.adapter.evaluate(prompt, "go", deadline=deadline)).text

    def script(request: ModelRequest) -> Any:
        last = request.messages[-1]
        if isinstance(last, ToolMessage):
            return last.results[0].text
        return ToolCall("ask" if request.system == "Inner." else "delegate")

    person = Thinking(answers={"pick": {"selected": "the blue one"}})
    response = await Adapter(ScriptedModel(script), environment=person, clock=clock).evaluate(
        Prompt("outer", "Outer.", tools=[delegate]),
        "go",
        deadline=Deadline.after(10, clock=clock, pauses_for_people=True),
    )
    assert response.text == "the blue one"


# --- structured output -------------------------------------------------------------------------


class Counts(TypedDict):
    """The number of apples."""

    apples: int


BY_CALL = Traits(native_output=False)


@pytest.mark.parametrize("wanted", [dict[str, int], Mapping[str, int], Counts])
@pytest.mark.parametrize("native", [True, False])
def test_mappings_can_be_asked_for_from_any_model(wanted: Any, native: bool) -> None:
    """`prompt_model` can ask for a mapping, although a tool's params can't be one."""

    @tool
    async def count(context: AgentContext) -> str:
        """Let the model count."""
        return str((await context.prompt_model("How many?", wanted))["apples"])

    answer = {"value": {"apples": 3}}
    script = [
        ToolCall("count"),
        json.dumps(answer) if native else ToolCall("final_answer", answer),
        "Done.",
    ]
    model = ScriptedModel(script, traits=Traits(native_output=native))
    Adapter(model, environment=Agent()).evaluate(Prompt("p", "Go.", tools=[count]), "hi").wait()
    result = model.requests[-1].messages[-1]
    assert isinstance(result, ToolMessage)
    assert result.results[0].text == "3"


def test_a_model_that_writes_where_it_should_call_is_told_to_call() -> None:
    """A model that writes text instead of calling `final_answer` is told to call it."""
    model = ScriptedModel(["The blue one.", ToolCall("final_answer", {"selected": "blue"})], traits=BY_CALL)
    response = Adapter(model).evaluate(Prompt("p", "Go.", output=Choice), "hi").wait()
    assert response.output == Choice("blue")
    told = model.requests[1].messages[-1]
    assert isinstance(told, UserMessage)
    assert told.text.endswith("Call final_answer with it.")


# --- histories and params ----------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The params of the prompt."""

    city: str


def test_params_that_do_not_fit_lose_nothing() -> None:
    """After invalid params are refused, an evaluation with valid params and the same session and history succeeds."""
    prompt = Prompt("p", [MarkdownSection[Place](title="Where", key="where", template="In $city.")])
    adapter, session = Adapter(ScriptedModel(["ok"])), Session()
    history = [UserMessage("u"), AssistantMessage("a")]
    with pytest.raises(PromptRenderError):
        adapter.evaluate(prompt, {"town": "Oslo"}, history=history, session=session).wait()
    assert adapter.evaluate(prompt, {"city": "Oslo"}, history=history, session=session).wait().text == "ok"


def test_a_history_with_repeated_ids_is_sent_with_ids_that_do_not_repeat() -> None:
    """Repeated call ids in a history are made unique, because some providers refuse them."""
    turn = (CallAsked("0", "x", "{}"), CallAsked("0", "y", "{}"))
    results = ToolMessage((CallAnswered("0", "x", "first"), CallAnswered("0", "y", "second")))
    model = ScriptedModel(["ok"])
    history = [UserMessage("u"), AssistantMessage("", turn), results, AssistantMessage("", turn), results]
    Adapter(model).evaluate(PLAIN, "hi", history=history).wait()
    sent = list(model.requests[0].messages)
    ids = [[call.id for call in each.calls] for each in sent if isinstance(each, AssistantMessage)]
    assert len({id for turn in ids for id in turn}) == 4
    answered = [each for each in sent if isinstance(each, ToolMessage)]
    assert [[result.id for result in each.results] for each in answered] == ids
    assert [result.text for result in answered[1].results] == ["first", "second"]


def test_two_messages_are_refused_in_a_call_too() -> None:
    """A nested evaluation with two messages is refused, so that neither is silently dropped."""

    @tool
    async def delegate(context: ToolContext) -> str:
        """Pass two messages to another agent."""
        return (await context.adapter.evaluate(PLAIN, "one", message="two")).text

    model = ScriptedModel([ToolCall("delegate"), "Done."])
    Adapter(model).evaluate(Prompt("p", "Go.", tools=[delegate]), "hi").wait()
    result = model.requests[-1].messages[-1]
    assert isinstance(result, ToolMessage)
    assert "two messages were passed" in result.results[0].text


# --- memory and retries ------------------------------------------------------------------------


def test_large_prompts_are_not_kept() -> None:
    """Encoding large texts does not keep them in memory."""
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(40):
            text_json(f"{number} " + "x" * 500_000)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 5_000_000


def test_many_attempts_are_possible() -> None:
    """The wait between attempts stays within its limits, however many attempts there were."""
    retry = Retry(attempts=5000, first_wait=0.5, longest_wait=60)
    wait = retry.wait_after(4000, ModelUnavailable("m", "down"))
    assert wait is not None
    assert 30 <= wait <= 60
