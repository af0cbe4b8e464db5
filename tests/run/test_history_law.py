"""The law of histories: whatever happens in a run, every conversation sent to a model is well formed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import Adapter, Budget, Deadline, Prompt, Session, ToolCall, ToolContext, TransientError, tool
from handrail.errors import DefinitionError, HandrailError, PromptEvaluationError
from handrail.events import ToolInvoked
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    CallAsked,
    CallPart,
    Message,
    ModelPart,
    ModelRequest,
    Sent,
    StopPart,
    TextPart,
    ToolMessage,
    Traits,
    Usage,
    UsagePart,
    UserMessage,
)
from handrail.models import ModelAnswerBroken, ModelUnavailable
from handrail.models.http import encoder
from handrail.models.providers import Quirks
from handrail.run.adapter import Retry
from handrail.run.conversation import check_well_formed, root_conversation
from handrail.testing import RecordingSubscriber, VirtualClock

Doing = Literal["fine", "raise", "slow", "fail", "stop the run", "retry", "cancel itself"]


@tool
async def act(how: Doing, context: ToolContext) -> str:
    """Behave as the argument says."""
    if how == "slow":
        await asyncio.sleep(50)
    if how == "raise":
        raise ValueError("as told")
    if how == "fail":
        raise HandrailError("as told")
    if how == "stop the run":
        raise PromptEvaluationError("as told")
    if how == "retry" and context.invocation.attempt == 1:
        raise TransientError("as told")
    if how == "cancel itself":
        raise asyncio.CancelledError
    return how


calls = st.builds(
    lambda how, id, name: CallPart(0, id, name, f'{{"how": "{how}"}}' if how != "garbage" else '{"how": '),
    st.sampled_from(
        [
            "fine",
            "fine",
            "raise",
            "slow",
            "fail",
            "stop the run",
            "retry",
            "cancel itself",
            "garbage",
            "other",
        ]
    ),
    st.sampled_from(["", "a", "b", "c", "d"]),
    st.sampled_from(["act", "act", "act", "nothing"]),
)
answers = st.one_of(
    st.lists(calls, min_size=1, max_size=4),
    st.sampled_from(["text", "", "cut", "break", "hang"]),
)
programs = st.tuples(
    st.lists(answers, min_size=1, max_size=6),
    st.one_of(st.none(), st.floats(0.1, 120)),  # seconds until the run is cancelled
    st.one_of(st.none(), st.floats(0.1, 120)),  # seconds until its deadline
    st.one_of(st.none(), st.integers(0, 6)),  # budget of tool calls
)


class Whimsical:
    """A model that gives the answers of `script`, and checks that requests are well formed and have unique call ids."""

    name = "test:whimsical"
    traits = Traits(native_output=True)

    def __init__(self, script: list[Any]) -> None:
        self.script = list(script)
        self.sent: list[list[Message]] = []

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        said = list(request.messages)
        check_well_formed(said)
        ids = [call.id for message in said if isinstance(message, AssistantMessage) for call in message.calls]
        assert len(ids) == len(set(ids))
        assert all(ids)
        self.sent.append(said)
        answer = self.script.pop(0) if self.script else "text"
        if answer == "hang":
            await asyncio.sleep(40)
        if answer == "break":
            yield TextPart("half")
            raise ModelAnswerBroken(self.name, "as drawn")
        if isinstance(answer, str):
            yield TextPart(answer)
        else:
            for index, part in enumerate(answer):
                yield CallPart(index, part.id, part.name, part.arguments)
        yield UsagePart(Usage(1, 1, 0, 0, 1))
        if answer != "cut":
            yield StopPart("done" if isinstance(answer, str) else "calls")


async def _evaluate(model: Whimsical, session: Session, cancel: float | None, **limits: Any) -> None:
    adapter = Adapter(model, retry=Retry(attempts=2, chance=lambda: 0.0))
    task = asyncio.ensure_future(
        adapter.evaluate(Prompt("law", "Act.", tools=[act]), "go", session=session, **limits)
    )
    if cancel is not None:
        asyncio.get_running_loop().call_later(cancel, task.cancel)
    with contextlib.suppress(asyncio.CancelledError, PromptEvaluationError):
        await task


@given(programs)
@pytest.mark.virtual_time
async def test_every_conversation_is_well_formed(program: Any) -> None:
    """However a run ends, each of its calls has one result, and the next run can continue the conversation."""
    script, cancel, late, most = program
    session = Session()
    model = Whimsical(script)

    limits: dict[str, Any] = {}
    if late is not None:
        limits["deadline"] = Deadline.after(late, clock=VirtualClock())
    if most is not None:
        limits["budget"] = Budget(tool_calls=most)
    with RecordingSubscriber(session) as seen:
        await _evaluate(model, session, cancel, **limits)
        seen.assert_paired()
    check_well_formed(list(root_conversation(session).messages))
    before = list(root_conversation(session).messages)
    model.script.clear()
    await _evaluate(model, session, None)
    after = list(root_conversation(session).messages)
    assert after[: len(before)] == before
    assert after[-1] == AssistantMessage("text")


def test_an_interrupted_session_is_repaired() -> None:
    """A call that a killed process left without a result gets a failed one before the next request."""
    session = Session()
    conversation = root_conversation(session)
    conversation.add(UserMessage("go"), "run")
    conversation.add(AssistantMessage("", (CallAsked("a", "act", "{}"), CallAsked("b", "act", "{}"))), "run")
    model = Whimsical([])
    Adapter(model).evaluate(Prompt("law", "Act.", tools=[act]), "go on", session=session).wait()
    repaired = model.sent[0][2]
    assert isinstance(repaired, ToolMessage)
    assert [(each.id, each.failed) for each in repaired.results] == [("a", True), ("b", True)]
    assert "interrupted" in repaired.results[0].text


USER, CALL = UserMessage("hi"), AssistantMessage("", (CallAsked("a", "act", "{}"),))
RESULT = ToolMessage((CallAnswered("a", "act", "done"),))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([USER, CALL], "have no results"),
        ([USER, CALL, USER], "comes before the results of the calls a"),
        ([USER, RESULT], "the results in message 2 do not match the calls in the message before it"),
        ([USER, CALL, ToolMessage(())], "the results in message 3 do not match"),
        ([USER, CALL, RESULT, RESULT], "the results in message 4 do not match"),
        ([USER, "text"], "message 2 is a str"),
    ],
)
def test_a_malformed_history_is_refused(messages: Any, words: str) -> None:
    """A history is refused if its calls and results do not match, or if it contains anything but messages."""
    with pytest.raises(DefinitionError, match=words):
        Adapter(Whimsical([])).evaluate(Prompt("law", "Act."), "go", history=messages).wait()


def test_a_history_continues() -> None:
    """A history is sent before the message of a session's first evaluation. A later evaluation can't pass one."""
    model = Whimsical([])
    session = Session()
    adapter = Adapter(model)
    prompt = Prompt("law", "Act.", tools=[act])
    adapter.evaluate(
        prompt, "go", session=session, history=[USER, CALL, RESULT, AssistantMessage("so")]
    ).wait()
    assert model.sent[0][:4] == [USER, CALL, RESULT, AssistantMessage("so")]
    adapter.evaluate(prompt, "again", session=session).wait()
    assert len(model.sent[1]) == 7
    with pytest.raises(DefinitionError, match="has already begun"):
        adapter.evaluate(prompt, "go", session=session, history=[USER]).wait()


items = st.lists(st.text(max_size=6), max_size=8)


@given(st.lists(st.tuples(items, st.booleans()), max_size=6))
def test_what_was_encoded_once_is_not_encoded_again(steps: list[tuple[list[str], bool]]) -> None:
    """As a history grows, each item is encoded only once, and the bytes equal those of encoding everything anew."""
    sent: Sent[str] = Sent()
    encoded: list[str] = []

    def encode(item: str) -> bytes:
        encoded.append(item)
        return f'"{item}"'.encode()

    added: list[str] = []
    for more, ask in steps:
        for item in more:
            sent.append(item)
        added += more
        if ask:
            assert sent.encoded(encode) == b",".join(f'"{item}"'.encode() for item in added)
            assert encoded == added
    assert list(sent.copy()) == added


@given(st.lists(st.booleans(), max_size=8), st.integers(0, 8))
def test_what_could_not_be_encoded_leaves_nothing_half_written(fails: list[bool], before: int) -> None:
    """After an encoding that failed, the next one neither repeats nor loses anything."""
    sent: Sent[int] = Sent()
    broken = {number for number, fail in enumerate(fails) if fail}

    def encode(item: int) -> bytes:
        if item in broken:
            raise LookupError
        return b"%d" % item

    for number in range(len(fails)):
        sent.append(number)
        if number == before and not broken.intersection(range(number + 1)):
            sent.encoded(encode)
    if broken:
        with pytest.raises(LookupError):
            sent.encoded(encode)
    broken.clear()
    assert sent.encoded(encode) == b",".join(b"%d" % number for number in range(len(fails)))


def test_only_new_messages_are_encoded_in_a_run() -> None:
    """Encoding a conversation a second time with the same encoder encodes no message again."""
    from handrail.models import openai

    encode = encoder(openai._encode, Quirks(), "chat:openai")
    conversation: Sent[Message] = Sent([USER])
    first = bytes(conversation.encoded(encode))
    for _ in range(50):
        conversation.append(CALL)
        conversation.append(RESULT)
    count = 0

    def counted(message: Message) -> bytes:
        nonlocal count
        count += 1
        return encode(message)

    assert conversation.encoded(counted).startswith(first)
    conversation.encoded(counted)
    assert count == 101


def test_tool_results_are_kept_as_facts() -> None:
    """Each call's result is recorded in the session as a `ToolInvoked` event."""
    session = Session()
    Adapter(Whimsical([[CallPart(0, "a", "act", '{"how": "fine"}')]])).evaluate(
        Prompt("law", "Act.", tools=[act]), "go", session=session
    ).wait()
    assert [each.call_id for each in session[ToolInvoked].all()] == ["a"]


def test_a_model_that_can_not_be_reached_leaves_the_message() -> None:
    """If a request fails, the user's message stays in the conversation, and the next message follows it."""

    class Down(Whimsical):
        async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
            self.sent.append(list(request.messages))
            if len(self.sent) == 1:
                raise ModelUnavailable(self.name, "down")
            yield TextPart("back")
            yield StopPart("done")

    model, session = Down([]), Session()
    adapter = Adapter(model, retry=Retry(attempts=1))
    prompt = Prompt("law", "Act.")
    with pytest.raises(PromptEvaluationError, match="down"):
        adapter.evaluate(prompt, "one", session=session).wait()
    assert adapter.evaluate(prompt, "two", session=session).wait().text == "back"
    assert model.sent[1] == [UserMessage("one"), UserMessage("two")]


def test_scripts_may_repeat_ids() -> None:
    """If the model gives several calls the same id, they get unique ids."""
    session = Session()
    same = [CallPart(0, "x", "act", '{"how": "fine"}'), CallPart(0, "x", "act", '{"how": "fine"}')]
    Adapter(Whimsical([same, same])).evaluate(
        Prompt("law", "Act.", tools=[act]), "go", session=session
    ).wait()
    assert sorted(each.call_id for each in session[ToolInvoked].all()) == ["x", "x-2", "x-3", "x-4"]
    assert ToolCall("act").id is None
