"""The contract of a model: one test suite that every model passes. Models over HTTP pass it against servers written by others.

A subject is a model, together with its server if it is reached over HTTP. CASES are the cases of the contract. `TABLE` says
which subject runs which case. A subject skips a case for one of three reasons: NOT_APPLICABLE lists it, the wire does not
have it (WHOLE_CALLS), or another server covers it for the same wire. `python tests/models/test_contract.py` prints the table.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from handrail import (
    Adapter,
    Attachment,
    Deadline,
    Prompt,
    PromptEvaluationError,
    PromptResponse,
    Session,
    ToolContext,
    tool,
)
from handrail.events import (
    CallDelta,
    MessageAdded,
    ModelFailed,
    ModelResponded,
    TextDelta,
    ThoughtDelta,
    ToolInvoked,
)
from handrail.messages import AssistantMessage, Model, ModelPart, ModelRequest, SentPart, ToolMessage, Traits
from handrail.models import (
    ModelAnswerBroken,
    ModelRateLimited,
    ModelRequestRefused,
    ModelUnavailable,
)
from handrail.run.adapter import Retry
from support.servers import CAN
from support.stages import EXAMPLES, MESSAGE, SHOWN, SIGNATURE, WIRES, Call, Fail, Fault, Line, Say, Stage
from support.wire_grammar import check

QUICK = Retry(attempts=3, first_wait=0.01, chance=lambda: 0.0)


@tool
async def get_weather(city: str, days: int, context: ToolContext) -> str:
    """Say what the weather will be like in a city."""
    return f"It rains in {city} for {days} days."


@dataclass(frozen=True)
class Report:
    """The output type that the model is asked for."""

    city: str
    days: int


PROMPT = Prompt("contract", "Be brief.", tools=[get_weather])
TYPED = Prompt("typed", "Be brief.", output=Report)

HTTP = [f"{wire}@{server}" for wire in (*WIRES, "bridge") for server in ("aimock", "llmock")]
EMBEDDED = [f"{wire}@embedded" for wire in WIRES if wire != "gemini"]
IN_PROCESS = ["scripted", "local"]

# Each case, with the ability in servers.py that a server needs for it.
CASES = {
    "text": "text",
    "stream equals non-stream": "stream",
    "one call": "one call",
    "parallel calls": "parallel calls",
    "arguments in pieces": "arguments in pieces",
    "invalid arguments": "invalid arguments",
    "malformed arguments": "malformed arguments",
    "unknown tool": "unknown tool",
    "structured output": "structured output",
    "structured output by a call": "one call",
    "usage": "usage",
    "stop: done": "stopped at the end",
    "stop: calls": "stopped for calls",
    "stop: length": "stopped by length",
    "cancelled mid-stream": "cancelled mid-stream",
    "timeout": "timeout",
    "429 with retry-after": "429 with retry-after",
    "429 without": "429 without",
    "500 then fine": "500 then fine",
    "truncated stream": "truncated stream",
    "connection cut": "connection cut",
    "malformed JSON in the stream": "malformed JSON in the stream",
    "malformed JSON as the body": "malformed JSON as the body",
    "prompt too long": "prompt too long",
    "attachment of a person": "text",
    "attachment of a tool": "results with attachments",
    "thought in a tool loop": "thinking",
}

WHOLE_CALLS = {("gemini", "arguments in pieces"), ("gemini", "malformed arguments")}
"""Cases that a wire does not have. Gemini sends each call whole, with its arguments as an object, unless pieces are requested."""
NO_NETWORK = "it has no server"
FORCED = "it calls only the forced tool, with arguments constrained to the schema"
NOT_APPLICABLE: dict[tuple[str, str], str] = {
    ("local", "parallel calls"): "it makes one call at a time",
    ("local", "invalid arguments"): FORCED,
    ("local", "malformed arguments"): FORCED,
    ("local", "unknown tool"): FORCED,
    ("local", "429 with retry-after"): NO_NETWORK,
    ("local", "429 without"): NO_NETWORK,
    ("local", "500 then fine"): NO_NETWORK,
    ("local", "truncated stream"): NO_NETWORK,
    ("local", "connection cut"): NO_NETWORK,
    ("local", "malformed JSON in the stream"): NO_NETWORK,
    ("local", "malformed JSON as the body"): NO_NETWORK,
    ("local", "structured output by a call"): "its engine constrains output to a schema without a call",
    ("scripted", "malformed JSON as the body"): "its answers are Python values, not JSON",
    ("scripted", "prompt too long"): "it has no context limit",
    ("local", "attachment of a person"): "it takes only text",
    ("local", "attachment of a tool"): "it calls only the forced tool",
    ("local", "thought in a tool loop"): "it does not think",
}

# The small model can neither choose tools nor follow a script, so it runs only these cases.
EMBEDDED_CASES = (
    "text",
    "stream equals non-stream",
    "one call",
    "arguments in pieces",
    "structured output",
    "usage",
    "stop: done",
    "stop: length",
    "cancelled mid-stream",
    "prompt too long",
)


def can(subject: str, case: str) -> bool:
    """Return whether this subject runs this case."""
    if subject in IN_PROCESS:
        return (subject, case) not in NOT_APPLICABLE
    wire, _, server = subject.partition("@")
    if server == "embedded" and case not in EMBEDDED_CASES:
        return False
    wire = "chat" if wire == "bridge" else wire
    return wire in CAN[CASES[case]].get(server, ())


TABLE = {
    case: [subject for subject in (*HTTP, *EMBEDDED, *IN_PROCESS) if can(subject, case)] for case in CASES
}


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Provide the server or script behind the model of this test.

    Requests through the bridge are checked as the server recorded them; all others are checked as they are sent.
    """
    subject: str = request.param
    wire, _, name = subject.partition("@")
    if not name:
        yield Stage(subject, None)
        return
    server = request.getfixturevalue(f"{name}_server")
    yield Stage(subject, "chat" if wire == "bridge" else wire, server)  # pyright: ignore[reportArgumentType]  # `wire` is one of the literals
    if wire == "bridge":
        for seen in server.requests():
            check(seen.path, json.dumps(seen.body).encode())


def case(name: str) -> Callable[[Any], Any]:
    """Parametrize a test over every subject that can run the case."""
    return pytest.mark.parametrize(
        "stage", [_param(subject) for subject in TABLE[name]], indirect=True, ids=str
    )


def _param(subject: str) -> Any:
    """Return the test parameter for a subject. The embedded model's server is slow, so it is tested on only one Python version."""
    return pytest.param(subject, marks=pytest.mark.once) if subject in EMBEDDED else subject


def adapter(model: Model, **options: Any) -> Adapter:
    given: dict[str, Any] = {"retry": QUICK, "temperature": 0, **options}
    return Adapter(model, **given)


async def run(
    stage: Stage, *scene: Line, prompt: Prompt[Any] = PROMPT, stream: bool = False, **options: Any
) -> Any:
    """Play the scene until the run ends.

    Returns the response or, if `stream` is set, the stream with its events as `seen`.
    """
    model = stage.play(*scene)
    given: dict[str, Any] = {"session": options.pop("session", None)}
    message = MESSAGE
    if stage.is_small:
        given["max_tokens"] = 48
        message = "What is the capital of France?"
        if any(isinstance(line, Call) for line in scene):
            given["history"] = () if stage.name == "local" else EXAMPLES
            message = "What is the weather in Oslo?"
            prompt = SHOWN
    streaming = adapter(model, **options)
    if not stream:
        return await streaming.evaluate(prompt, message, **given)
    run = streaming.stream(prompt, message, **given)
    run.seen = [event async for event in run]  # pyright: ignore[reportAttributeAccessIssue]  # an attribute only for the tests
    return run


async def both(stage: Stage, *scene: Line, prompt: Prompt[Any] = PROMPT) -> list[PromptResponse[Any]]:
    """Play the scene without and with streaming, and return both responses."""
    whole = await run(stage, *scene, prompt=prompt)
    streamed = await run(stage, *scene, prompt=prompt, stream=True)
    return [whole, await streamed.response]


# --- answers -----------------------------------------------------------------------------------


@case("text")
async def test_text(stage: Stage) -> None:
    """The response has the model's text. Messages are not part of the session's state."""
    response = await run(stage, Say("One two."), prompt=Prompt("plain", "You are a helpful assistant."))
    assert response.text
    if not stage.is_small:
        assert response.text == "One two."
    assert response.session[AssistantMessage].latest() is None  # messages are recorded as facts, not as state


@case("stream equals non-stream")
async def test_stream_equals_non_stream(stage: Stage) -> None:
    """The streamed chunks add up to the complete answer."""
    plain = Prompt("plain", "You are a helpful assistant.")
    whole, streamed = await both(stage, Say(), prompt=plain)
    assert (streamed.text, streamed.stop_reason) == (whole.text, whole.stop_reason)
    again = await run(stage, Say(), prompt=plain, stream=True)
    assert "".join(event.text for event in again.seen if isinstance(event, TextDelta)) == whole.text
    assert sum(isinstance(event, TextDelta) for event in again.seen) > 1


@case("one call")
async def test_one_call(stage: Stage) -> None:
    """A call runs, its result is sent back, and the answer follows, streamed or not."""
    for response in await both(stage, Call(), Say("It rains.")):
        invoked = response.session[ToolInvoked].all()
        assert (invoked[0].tool, invoked[0].status) == ("get_weather", "ok")
        assert "Oslo" in invoked[0].result.value
        assert response.text


@case("parallel calls")
async def test_parallel_calls(stage: Stage) -> None:
    """Two calls in one answer both run, and each gets its own result."""
    two = Call((("get_weather", {"city": "Oslo", "days": 1}), ("get_weather", {"city": "Rome", "days": 2})))
    for response in await both(stage, two, Say("Done.")):
        said = [each.result.value for each in response.session[ToolInvoked].all()]
        assert sorted(said) == ["It rains in Oslo for 1 days.", "It rains in Rome for 2 days."]
        assert response.text == "Done."
        _check_conversation(response.session, calls=2)


@case("arguments in pieces")
async def test_arguments_in_pieces(stage: Stage) -> None:
    """Arguments streamed in chunks are joined."""
    streamed = await run(stage, Call(), Say("Done."), stream=True)
    pieces = [event for event in streamed.seen if isinstance(event, CallDelta)]
    assert len(pieces) > 2
    assert "".join(piece.name for piece in pieces) == "get_weather"
    assert '"Oslo"' in "".join(piece.arguments for piece in pieces)
    assert (await streamed.response).session[ToolInvoked].all()[0].status == "ok"


@case("invalid arguments")
async def test_invalid_arguments(stage: Stage) -> None:
    """Invalid arguments are reported to the model, and the run continues."""
    wrong = Call((("get_weather", {"city": 7, "weeks": 1}),))
    for response in await both(stage, wrong, Say("Sorry.")):
        (invoked,) = response.session[ToolInvoked].all()
        assert invoked.status == "invalid"
        assert "are invalid" in invoked.result.message
        assert response.text == "Sorry."


@case("malformed arguments")
async def test_malformed_arguments(stage: Stage) -> None:
    """Arguments that are not JSON do not end the run, and the model can answer afterwards."""
    streamed = await run(stage, Fault("malformed arguments"), Say("Sorry."), stream=True)
    response = await streamed.response
    (invoked,) = response.session[ToolInvoked].all()
    assert invoked.status == "invalid"
    assert response.text == "Sorry."


@case("unknown tool")
async def test_unknown_tool(stage: Stage) -> None:
    """The model is told that the tool is unknown, and which tool it may have meant."""
    unknown = Call((("get_wether", {"city": "Oslo"}),))
    for response in await both(stage, unknown, Say("Sorry.")):
        (invoked,) = response.session[ToolInvoked].all()
        assert invoked.status == "invalid"
        assert "Did you mean get_weather?" in invoked.result.message


@case("structured output")
async def test_structured_output(stage: Stage) -> None:
    """A structured answer is a value of the requested type."""
    answer = Say('{"city": "Oslo", "days": 2}')
    for response in await both(stage, answer, prompt=TYPED):
        assert isinstance(response.output, Report)
        if stage.name.endswith("@aimock") or stage.name == "scripted":
            assert response.output == Report("Oslo", 2)


@case("structured output by a call")
async def test_structured_output_by_a_call(stage: Stage) -> None:
    """If the provider can't constrain output, the answer is a tool call, which the model corrects if it is invalid."""
    if stage.is_small:
        raise AssertionError("not part of this subject's cases")
    wrong, right = ({"city": "Oslo"}, {"city": "Oslo", "days": 2})
    model = stage.play(
        Call((("final_answer", wrong),)),
        Call((("final_answer", right),)),
        **({"traits": _by_call()} if stage.wire is None else {"native_output": False}),
    )
    response = await adapter(model).evaluate(TYPED, MESSAGE)
    assert response.output == Report("Oslo", 2)
    assert [each.status for each in response.session[ToolInvoked].all()] == ["invalid", "ok"]


@case("usage")
async def test_usage(stage: Stage) -> None:
    """The usage is reported, and is the same streamed or not."""
    whole, streamed = await both(stage, Say(), prompt=Prompt("plain", "You are a helpful assistant."))
    assert whole.usage.output > 0
    assert whole.usage.input > 0
    assert whole.usage.output == streamed.usage.output
    assert whole.usage.input == streamed.usage.input
    assert whole.usage.requests == 1


@case("stop: done")
async def test_stopped_at_the_end(stage: Stage) -> None:
    """A model that has finished its answer stops with `done`."""
    limit: dict[str, Any] = {"max_tokens": 40} if stage.is_small else {}
    for stream in (False, True):
        model = stage.play(Say("Paris."))
        plain = Prompt("plain", "You are a helpful assistant.")
        message = "What is the capital of France?" if limit else MESSAGE
        if stream:
            response = await adapter(model).stream(plain, message, **limit).response
        else:
            response = await adapter(model).evaluate(plain, message, **limit)
        assert response.stop_reason == "done"


@case("stop: calls")
async def test_stopped_for_calls(stage: Stage) -> None:
    """A model that makes calls stops with `calls`, and the run continues."""
    response = await run(stage, Call(), Say("Done."))
    assert [each.stop_reason for each in response.session[ModelResponded].all()] == ["calls", "done"]


@case("stop: length")
async def test_stopped_by_length(stage: Stage) -> None:
    """An answer that is cut off at the length limit has the stop reason `length`."""
    for stream in (False, True):
        model = stage.play(Say("One two three", length=True))
        plain = Prompt("plain", "You are a helpful assistant.")
        message = "Tell me a long story about the sea." if stage.is_small else MESSAGE
        limit: dict[str, Any] = {"max_tokens": 5}
        if stream:
            response = await adapter(model).stream(plain, message, **limit).response
        else:
            response = await adapter(model).evaluate(plain, message, **limit)
        assert response.stop_reason == "length"


# --- cancellation and timeouts -----------------------------------------------------------------


_LONG = "Tell me a very long story about the sea."


@case("cancelled mid-stream")
async def test_cancelled_mid_stream(stage: Stage) -> None:
    """Cancelling a run in the middle of an answer leaves a valid conversation and, on servers that report it, ends the request."""
    plain = Prompt("plain", "You are a helpful assistant.")
    session = Session()
    most: dict[str, Any] = {"max_tokens": 400} if stage.is_small else {}
    told = _LONG if most else MESSAGE
    model: Any = stage.play(Fault("slow"))
    streaming = adapter(model).stream(plain, told, session=session, **most)
    if stage.name == "scripted":
        task = asyncio.ensure_future(streaming.response)
        while not model.requests:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        async for event in streaming:
            if isinstance(event, TextDelta):
                break
        await streaming.aclose()
    await _see_it_go(stage)
    _check_conversation(session, calls=0)


async def _see_it_go(stage: Stage) -> None:
    server: Any = stage.server
    if stage.name.endswith("@embedded"):
        while await asyncio.to_thread(server.busy):
            await asyncio.sleep(0.05)
    if stage.name.endswith("@llmock"):
        (seen,) = await asyncio.to_thread(server.requests)
        assert seen.raw["completed"] is False


@case("timeout")
async def test_deadline_during_a_request(stage: Stage) -> None:
    """A deadline ends a request that hangs."""
    model = stage.play(Fault("hang"))
    told = _LONG if stage.is_small else MESSAGE
    with pytest.raises(PromptEvaluationError, match="deadline") as raised:
        await adapter(model).evaluate(PROMPT, told, deadline=Deadline.after(0.3), max_tokens=400)
    assert raised.value.phase == "deadline"


@pytest.mark.parametrize("stage", [each for each in TABLE["timeout"] if "@" in each], indirect=True, ids=str)
async def test_a_silent_server_is_unavailable(stage: Stage) -> None:
    """Without a deadline, a server counts as unavailable after it has been silent for a while, and the request is retried."""
    model = stage.play(Fault("hang"), Fault("hang"), silence=0.3)
    with pytest.raises(
        PromptEvaluationError, match=r"no data arrived for 0.3 seconds.*tried 2 times"
    ) as raised:
        await adapter(model, retry=Retry(attempts=2, first_wait=0.01)).evaluate(PROMPT, MESSAGE)
    assert isinstance(raised.value.__cause__, ModelUnavailable)


# --- failures ----------------------------------------------------------------------------------


@case("429 with retry-after")
async def test_rate_limit_with_retry_after(stage: Stage) -> None:
    """After a rate limit, the run waits as long as the provider says, then continues."""
    model = stage.play(Fail(429, retry_after=1), Say("Fine."))
    session = Session()
    response = await adapter(model).evaluate(PROMPT, MESSAGE, session=session)
    assert response.text == "Fine."
    (failed,) = session[ModelFailed].all()
    assert failed.retry_in == pytest.approx(1.0)


@case("429 with retry-after")
async def test_rate_limit_past_the_deadline(stage: Stage) -> None:
    """A request is not retried past the deadline. The run ends at once with the reason."""
    model = stage.play(Fail(429, retry_after=55), Say("Fine."))
    with pytest.raises(PromptEvaluationError, match="past the deadline") as raised:
        await adapter(model).evaluate(PROMPT, MESSAGE, deadline=Deadline.after(50))
    assert isinstance(raised.value.__cause__, ModelRateLimited)


@case("429 without")
async def test_rate_limit_without_retry_after(stage: Stage) -> None:
    """After rate limits without a retry time, the request is retried with growing waits."""
    model = stage.play(Fail(429), Fail(429), Say("Fine."))
    session = Session()
    response = await adapter(model).evaluate(PROMPT, MESSAGE, session=session)
    assert response.text == "Fine."
    assert [each.retry_in for each in session[ModelFailed].all()] == [
        pytest.approx(0.005),
        pytest.approx(0.01),
    ]


@case("500 then fine")
async def test_500_then_fine(stage: Stage) -> None:
    """A request to a server that fails once is retried, streamed or not."""
    for stream in (False, True):
        model = stage.play(Fail(500), Say("Fine."))
        if stream:
            response = await adapter(model).stream(PROMPT, MESSAGE).response
        else:
            response = await adapter(model).evaluate(PROMPT, MESSAGE)
        assert response.text == "Fine."
        assert len(response.session[ModelFailed].all()) == 1


@case("500 then fine")
async def test_500_for_good(stage: Stage) -> None:
    """If a server keeps failing, the run ends, and the error says how many attempts were made."""
    model = stage.play(Fail(500), Fail(500), Fail(500), Fail(500))
    with pytest.raises(PromptEvaluationError, match="tried 3 times") as raised:
        await adapter(model).evaluate(PROMPT, MESSAGE)
    assert raised.value.phase == "request"
    assert isinstance(raised.value.__cause__, ModelUnavailable)


@case("truncated stream")
async def test_truncated_stream(stage: Stage) -> None:
    """A truncated stream is an error, and the request is retried. The stream is never taken for an answer."""
    await _broken_then_fine(stage, Fault("truncated"))


@case("connection cut")
async def test_connection_cut(stage: Stage) -> None:
    """A lost connection is an error, and the request is retried. What was received is never taken for an answer."""
    await _broken_then_fine(stage, Fault("cut"))


@case("malformed JSON in the stream")
async def test_malformed_event(stage: Stage) -> None:
    """A stream with an unreadable event is an error, and the request is retried. The stream is never taken for an answer."""
    await _broken_then_fine(stage, Fault("malformed"))


@case("malformed JSON as the body")
async def test_malformed_body(stage: Stage) -> None:
    """An unreadable body is an error, and the request is retried, streamed or not. The body is never taken for an answer."""
    await _broken_then_fine(stage, Fault("malformed"))
    model = stage.play(Fault("malformed"), Say("Fine."))
    response = await adapter(model).evaluate(PROMPT, MESSAGE)
    assert response.text == "Fine."


async def _broken_then_fine(stage: Stage, fault: Fault) -> None:
    model = stage.play(fault, Say("Fine."))
    session = Session()
    streaming = adapter(model).stream(PROMPT, MESSAGE, session=session)
    response = await streaming.response
    assert response.text == "Fine."
    (failed,) = session[ModelFailed].all()
    assert failed.retry_in is not None
    model = stage.play(*[fault] * 3)
    with pytest.raises(PromptEvaluationError, match="tried 3 times") as raised:
        await adapter(model).stream(PROMPT, MESSAGE).response
    assert isinstance(raised.value.__cause__, ModelAnswerBroken | ModelUnavailable)


@case("prompt too long")
async def test_prompt_too_long(stage: Stage) -> None:
    """A request that the provider refuses is not retried, and the run ends with the refusal."""
    if stage.name.endswith("@llmock"):
        model = stage.play(Fail(400))
        message = MESSAGE
    else:
        model, message = stage.play(), "word " * 5000
    session = Session()
    with pytest.raises(PromptEvaluationError) as raised:
        await adapter(model).evaluate(Prompt("plain", "Be brief."), message, session=session)
    cause = raised.value.__cause__
    assert isinstance(cause, ModelRequestRefused)
    assert cause.status in (400, None)  # an in-process model has no status
    assert [each.retry_in for each in session[ModelFailed].all()] == [None]


# --- content and thought ------------------------------------------------------------------------

PICTURE = Attachment(b"\x89PNG\r\n\x1a\n" + bytes(30), "plot.png")
ENCODED = base64.b64encode(PICTURE.content)


class Watched:
    """A model that keeps the bodies of its requests as they were sent."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.name = model.name
        self.bodies: list[bytes] = []

    @property
    def traits(self) -> Traits:
        return self._model.traits

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        async for part in self._model.stream(request):
            if isinstance(part, SentPart):
                self.bodies.append(part.body)
            yield part


def shows_bodies(stage: Stage) -> bool:
    """Return whether the stage's model shows its requests. Models of the bridge and models in process do not."""
    return stage.name.partition("@")[0] in WIRES


@tool
async def draw(context: ToolContext) -> Attachment:
    """Draw a plot."""
    return PICTURE


@case("attachment of a person")
async def test_a_persons_attachment_is_sent(stage: Stage) -> None:
    """The model answers a message that has a picture attached. If its requests can be seen, they have the picture's bytes."""
    for streaming in (False, True):
        model = Watched(stage.play(Say("A plot.")))
        prompt, asking, attached = Prompt("plain", "Be brief."), adapter(model), [PICTURE]
        asked: Any = (
            asking.stream(prompt, MESSAGE, attachments=attached).response
            if streaming
            else asking.evaluate(prompt, MESSAGE, attachments=attached)
        )
        assert (await asked).text == "A plot."
        assert [ENCODED in body for body in model.bodies] == [True] * shows_bodies(stage)


@case("attachment of a tool")
async def test_a_tools_attachment_is_sent(stage: Stage) -> None:
    """The model answers after a call that returned a picture. If its requests can be seen, the second one has the picture's bytes."""
    model = Watched(stage.play(Call((("draw", {}),)), Say("A plot.")))
    response = await adapter(model).evaluate(Prompt("plain", "Draw.", tools=[draw]), MESSAGE)
    assert response.text == "A plot."
    assert [ENCODED in body for body in model.bodies] == [False, True] * shows_bodies(stage)


THINKERS = {"messages": "claude-opus-4-6", "gemini": "gemini-3-pro"}
"""The model name for which aimock sends thoughts, by wire. On all other wires it is `o3`."""
BACK = {
    "chat": b'"reasoning_content":"Let me see."',
    "responses": b'"summary":[{"type":"summary_text","text":"Let me see."}],"encrypted_content":"',
    "messages": b'{"type":"thinking","thinking":"Let me see.","signature":"%s"}' % SIGNATURE.encode(),
    "gemini": b'{"text":"Let me see.","thought":true}',
}
"""How the thought is written in the next request, by wire."""


@case("thought in a tool loop")
async def test_a_thought_is_told_and_goes_back(stage: Stage) -> None:
    """A thought before a call is kept with the answer and sent back with it. In a streamed run, it is also published."""
    wire = stage.name.partition("@")[0]
    for streaming in (False, True):
        named: Any = {"name": THINKERS.get(wire, "o3")} if stage.wire else {}
        model = Watched(stage.play(Call(thought="Let me see."), Say("Rain."), **named))
        session, asking = Session(), adapter(model, temperature=None)
        if streaming:
            stream = asking.stream(PROMPT, MESSAGE, session=session)
            told = [event.text async for event in stream if isinstance(event, ThoughtDelta)]
            assert "".join(told) == "Let me see."
        else:
            await asking.evaluate(PROMPT, MESSAGE, session=session)
        messages = [each.message for each in session[MessageAdded].all()]
        said = [each for each in messages if isinstance(each, AssistantMessage)]
        assert [(each.thought, each.text) for each in said] == [("Let me see.", ""), ("", "Rain.")]
        if wire in BACK:
            assert BACK[wire] in model.bodies[1]


# --- the table of cases and models -------------------------------------------------------------


def test_every_http_model_passes_every_case() -> None:
    """For every case that a wire has, the table has a third-party server for that wire. For the bridge, it has one for every case."""
    for case_, subjects in TABLE.items():
        for wire in (*WIRES, "bridge"):
            if (wire, case_) in WHOLE_CALLS:
                continue
            assert any(subject.startswith(f"{wire}@") for subject in subjects), (
                f"no server tests {case_} on {wire}"
            )


def test_what_is_not_applicable_has_its_reason() -> None:
    """Each case that an in-process model skips has a reason."""
    for subject in IN_PROCESS:
        missing = {case_ for case_, subjects in TABLE.items() if subject not in subjects}
        assert missing == {
            case_ for (each, case_), reason in NOT_APPLICABLE.items() if each == subject and reason
        }


def _check_conversation(session: Session, calls: int) -> None:
    from handrail.run.conversation import check_well_formed, root_conversation

    messages = list(root_conversation(session).messages)
    check_well_formed(messages)
    assert sum(len(each.results) for each in messages if isinstance(each, ToolMessage)) == calls


def _by_call() -> Any:
    from handrail.messages import Traits

    return Traits(native_output=False)


def print_table() -> None:
    """Print the table of cases and models, with each wire's servers."""
    makers = {"messages": "Anthropic", "gemini": "Google"}
    rows = {wire: f"{makers.get(wire, 'OpenAI')} {wire}" for wire in WIRES}
    rows["bridge"] = "bridge"
    print(f"| case | {' | '.join(rows.values())} | {' | '.join(IN_PROCESS)} |")
    print("| --- " * (len(rows) + len(IN_PROCESS) + 1) + "|")
    for case_, subjects in TABLE.items():
        cells = [
            ", ".join(each.partition("@")[2] for each in subjects if each.startswith(f"{wire}@"))
            for wire in rows
        ]
        cells += ["yes" if own in subjects else f"n/a: {NOT_APPLICABLE[own, case_]}" for own in IN_PROCESS]
        print(f"| {case_} | {' | '.join(cells)} |")


if __name__ == "__main__":
    print_table()
