"""Tests of remarks: what a person says along with an answer reaches the run's model, once, after the results of the calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    Attachment,
    CapabilityPolicy,
    LaterEnvironment,
    MemoryJournal,
    Prompt,
    ScriptedModel,
    Session,
    SqliteJournal,
    ToolCall,
    ToolContext,
    UserContext,
    runs,
    tool,
)
from handrail.errors import PromptEvaluationError, RunParked
from handrail.messages import Message, ModelPart, ModelRequest, ToolMessage, Traits, UserMessage
from handrail.models.scripted import Scripted
from handrail.question import Answer
from support.parked_runs import answer_to
from support.programs import handrail


@tool(effect="read")
async def pick(question: str, context: UserContext) -> str:
    """Let the person pick."""
    return await context.wait_for("pick", {"question": question}, str)


@tool(capabilities={"money"})
async def pay(amount: int, context: ToolContext) -> str:
    """Pay."""
    return f"paid {amount}"


@tool(effect="read")
async def delegate(context: ToolContext) -> str:
    """Let a nested run ask."""
    inner = Prompt("inner", "Ask.", tools=[pick])

    def play(request: ModelRequest) -> Scripted:
        return "the inner answer" if len(request.messages) > 1 else ToolCall("pick", {"question": "inner?"})

    model = ScriptedModel(play)
    return (await context.adapter.evaluate(inner, "begin", model=model)).text


PROMPT = Prompt("desk", "Help.", tools=[pick, pay, delegate], policies=[CapabilityPolicy({"money": "ask"})])
PICK = ToolCall("pick", {"question": "which?"})


class Model(ScriptedModel):
    """A scripted model that keeps the messages of its last request."""

    def __init__(self, script: list[Scripted], **options: Any) -> None:
        super().__init__(script, **options)
        self.seen: list[Message] = []

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        self.seen = list(request.messages)
        async for part in super().stream(request):
            yield part


def shape(messages: list[Message]) -> list[str]:
    """Return the roles of messages, with the texts of users' messages and the results of calls."""
    found: list[str] = []
    for each in messages:
        if isinstance(each, UserMessage):
            found.append(f"user: {each.text}{' (midway)' if each.midway else ''}")
        elif isinstance(each, ToolMessage):
            found.append(f"results: {', '.join(result.text for result in each.results)}")
        else:
            found.append("calls" if each.calls else f"answer: {each.text}")
    return found


async def parked(adapter: Adapter, prompt: Prompt[Any] = PROMPT, **options: Any) -> RunParked:
    with pytest.raises(RunParked) as found:
        await adapter.evaluate(prompt, "go", run_id="r1", environment=LaterEnvironment(), **options)
    return found.value


async def resumed(adapter: Adapter, prompt: Prompt[Any] = PROMPT) -> Any:
    return await adapter.resume("r1", prompt, environment=LaterEnvironment())


def with_remark(question: Any, value: Any, remark: str, *files: Attachment) -> Answer:
    return answer_to(question, value, remark=remark, attachments=files)


@pytest.mark.parametrize("call", [PICK, ToolCall("pay", {"amount": 5}), ToolCall("delegate")])
async def test_a_remark_is_told_after_the_results_of_the_calls(call: ToolCall):
    """It reaches the outermost run's model, whoever asked, and is part of the conversation and of the record."""
    journal = MemoryJournal()
    model = Model([call, "Done."])
    adapter = Adapter(model, journal=journal)
    [question] = (await parked(adapter)).questions
    value = {"approved": True} if call.name == "pay" else "red"
    journal.questions.answer(with_remark(question, value, "and be quick"))
    response = await resumed(adapter)
    told = shape(model.seen)
    assert (told[:2], told[2].partition(":")[0], told[3:]) == (
        ["user: go", "calls"],
        "results",
        ["user: and be quick (midway)"],
    )
    assert shape(response.messages) == [*told, "answer: Done."]
    assert shape(await runs.said(journal, "r1")) == [*told, "answer: Done."]


async def test_a_remark_is_told_once_over_all_legs():
    """A run that asks again and is parked again goes through its record, and tells the remark where it was told."""
    journal = MemoryJournal()
    model = Model([PICK, PICK, PICK, "Done."])
    adapter = Adapter(model, journal=journal)
    questions = (await parked(adapter)).questions
    for remark in ("first", "", "third"):
        journal.questions.answer(with_remark(questions[0], "red", remark))
        try:
            await resumed(adapter)
        except RunParked as again:
            questions = again.questions
        told = [each.text for each in await runs.said(journal, "r1") if isinstance(each, UserMessage)]
        assert told.count("first") == 1
    one, other = ["results: red", "user: first (midway)"], ["results: red", "user: third (midway)"]
    assert shape(model.seen) == ["user: go", "calls", *one, "calls", "results: red", "calls", *other]


async def test_files_of_a_remark_are_recorded_with_the_answer(tmp_path: Path):
    """Another process accepts the answer, and the process that resumes the run loads the files' bytes."""
    paths = [SqliteJournal(tmp_path / "runs.db") for _ in range(3)]
    first, server, second = paths
    [question] = (await parked(Adapter(Model([PICK]), journal=first))).questions
    server.questions.answer(with_remark(question, "red", "read this", Attachment(b"notes", "notes.txt")))
    model = Model(["Done."])
    await resumed(Adapter(model, journal=second))
    said = model.seen[-1]
    assert isinstance(said, UserMessage)
    assert [(each.name, each.content) for each in said.attachments] == [("notes.txt", b"notes")]
    assert not (await second.runs.verify()).altered
    for each in paths:
        each.close()
    shown = handrail("runs", "show", "r1", "--journal", "runs.db", cwd=tmp_path).stdout
    assert "» read this [notes.txt]" in shown


@dataclass(frozen=True)
class Choice:
    """An answer."""

    colour: str


async def test_an_answer_by_a_call_does_not_end_a_run_with_an_untold_remark():
    """The model answers by a call in the turn in which a person was asked. It is asked again, with the remark."""
    journal = MemoryJournal()
    prompt = Prompt("desk", "Choose.", tools=[pick], output=Choice)
    answers = [ToolCall("final_answer", {"colour": "red"}), ToolCall("final_answer", {"colour": "blue"})]
    model = Model([[PICK, answers[0]], answers[1]], traits=Traits(native_output=False))
    adapter = Adapter(model, journal=journal)
    [question] = (await parked(adapter, prompt)).questions
    journal.questions.answer(with_remark(question, "red", "no, blue"))
    assert (await resumed(adapter, prompt)).output == Choice("blue")


async def test_a_run_that_ends_before_it_can_tell_leaves_the_remark_to_the_next():
    """The run fails at the request in which its model would read the remark. The next run's model reads it."""
    journal = MemoryJournal()

    @tool(effect="read")
    async def late(context: UserContext) -> str:
        """Ask, and end the run."""
        await context.wait_for("pick", {}, str)
        raise PromptEvaluationError("it can't go on", phase="tool")

    prompt = Prompt("desk", "Help.", tools=[late])
    adapter = Adapter(Model([ToolCall("late")]), journal=journal)
    [question] = (await parked(adapter, prompt, session=Session(id="s"))).questions
    journal.questions.answer(with_remark(question, "red", "and be quick"))
    with pytest.raises(PromptEvaluationError):
        await resumed(adapter, prompt)
    session = await runs.session(journal, "s", principal="local")
    model = Model(["Done."])
    await Adapter(model, journal=journal).evaluate(Prompt("desk", "Help."), "next", session=session)
    assert shape(model.seen)[-2:] == ["user: and be quick (midway)", "user: next"]
