"""Tests for Gemini's wire: signed thoughts, calls in pieces, names, reasons to stop, usage, errors and addresses."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from pydantic import SecretStr

from handrail import Adapter, GeminiModel, MemoryJournal, Prompt, PromptEvaluationError, Session, tool
from handrail.errors import DefinitionError, ModelError
from handrail.events import ModelFailed, ModelResponded, ThoughtDelta, ToolInvoked
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    CallAsked,
    CallPart,
    Kept,
    Message,
    ModelPart,
    ModelRequest,
    Sent,
    StopPart,
    ToolMessage,
    Usage,
    UserMessage,
)
from handrail.models import (
    ModelAnswerBroken,
    ModelKeyMissing,
    ModelRateLimited,
    ModelRequestRefused,
    ModelUnavailable,
)
from handrail.models.names import model_named
from handrail.models.prices import tariff_of
from handrail.run.adapter import Retry
from handrail.session import save
from support.raw_server import raw_server, streamed, whole
from support.wire_grammar import problems

ONCE = Retry(attempts=1)
SIGNATURE = "Cs8BAePx/+=="
"""A signature with the characters that an encoder might change."""


@tool(name="3d_plot", effect="pure")
async def plot(city: str) -> str:
    """Plot a city."""
    return f"{city} is plotted."


@tool(effect="pure")
async def look(where: str = "here") -> str:
    """Look somewhere."""
    return where


PLAIN = Prompt("plain", "Be brief.")
TOOLS = Prompt("tools", "Be brief.", tools=[look, plot])


def model_at(url: str, **options: Any) -> GeminiModel:
    return GeminiModel("gemini-3-pro", base_url=url, key_variable=None, **options)


def answer(*parts: Any, reason: str | None = "STOP", **more: Any) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": list(parts)}, "index": 0}
    if reason is not None:
        candidate["finishReason"] = reason
    return {"candidates": [candidate], **more}


def call(name: str, id: str | None = "c1", /, **arguments: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": arguments, **({"id": id} if id else {})}}


def contents(model: GeminiModel, *messages: Message) -> list[Any]:
    """Return the `contents` field of a request with these messages, after checking the request against the grammar."""
    body = model._body(ModelRequest("", Sent(messages), Sent()))
    assert problems("gemini", body) == []
    return json.loads(body)["contents"]


def sent(server: Any, number: int) -> Any:
    return server.bodies[number]


# --- thoughts and signatures ---


THOUGHTS = [
    {"text": "First ", "thought": True},
    {"text": "I look.", "thought": True, "thoughtSignature": SIGNATURE},
    {"text": "Looking"},
    {"text": " now.", "thoughtSignature": "text+/signature="},
    {**call("look", where="there"), "thoughtSignature": "call+/signature="},
    call("look", "c2"),
    {"text": "", "thoughtSignature": "last+/signature="},
    {"executableCode": {"language": "PYTHON", "code": "1"}},
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_every_part_comes_back_in_place_and_unchanged(stream: bool) -> None:
    """Thoughts, signatures and unknown parts are sent back unchanged, with the calls in their places."""
    if stream:
        said = streamed(*(answer(part, reason=None) for part in THOUGHTS), answer())
        done = streamed(answer({"text": "Done."}))
    else:
        said, done = whole(answer(*THOUGHTS)), whole(answer({"text": "Done."}))
    session = Session()
    async with raw_server(said, done) as server:
        adapter = Adapter(model_at(server.url), retry=ONCE)
        if stream:
            run = adapter.stream(TOOLS, "go", session=session)
            thoughts = [event.text async for event in run if isinstance(event, ThoughtDelta)]
            outside = "code_execution, run by the provider: 1\n"
            assert "".join(thoughts) == f"First I look.\n\n{outside}"
            response = await run.response
        else:
            response = await adapter.evaluate(TOOLS, "go", session=session)
        back = sent(server, 1)["contents"]
    assert response.text == "Done."
    assert back[1] == {"role": "model", "parts": THOUGHTS}
    assert [each["functionResponse"] for each in back[2]["parts"]] == [
        {"id": "c1", "name": "look", "response": {"output": "there"}},
        {"id": "c2", "name": "look", "response": {"output": "here"}},
    ]


# --- calls in pieces ---


def piece(*values: dict[str, Any], goes_on: bool = True, **more: Any) -> dict[str, Any]:
    """Return one piece of a call."""
    given: dict[str, Any] = {**more, **({"partialArgs": list(values)} if values else {})}
    return {"functionCall": {**given, **({"willContinue": True} if goes_on else {})}}


def at(path: str, goes_on: bool = False, **value: Any) -> dict[str, Any]:
    return {"jsonPath": path, **value, **({"willContinue": True} if goes_on else {})}


async def parts_of(*pieces: dict[str, Any], reason: str = "STOP") -> list[ModelPart]:
    """Return the parts of an answer that is streamed in these pieces."""
    said = streamed(*(answer(each, reason=None) for each in pieces), answer(reason=reason))
    async with raw_server(said) as server:
        request = ModelRequest("", Sent([UserMessage("go")]), Sent(), stream=True)
        return [part async for part in model_at(server.url).stream(request)]


async def test_the_arguments_of_a_call_arrive_in_pieces() -> None:
    """Pieces of a call are put together by their paths, and the call goes back in one piece, with its signature."""
    parts = await parts_of(
        {**piece(name="draw", id="c1"), "thoughtSignature": SIGNATURE},
        piece(at("$.title", goes_on=True, stringValue="A sq")),
        piece(at("$.title", stringValue="uare"), at("$.size.width", numberValue=2.5)),
        piece(at("$.points[0].x", numberValue=1), at("$.points[0].y", numberValue=2)),
        piece(at("$.points[1].x", numberValue=3), at("$['a b'][\"c'd\"]", boolValue=True)),
        piece(at("$.fill", nullValue="NULL_VALUE"), at("$.note", stringValue="")),
        piece(goes_on=False),
        call("look", "c2"),
    )
    calls = [part for part in parts if isinstance(part, CallPart)]
    arguments = {
        "title": "A square",
        "size": {"width": 2.5},
        "points": [{"x": 1, "y": 2}, {"x": 3}],
        "a b": {"c'd": True},
        "fill": None,
        "note": "",
    }
    assert [(part.index, part.id, part.name) for part in calls] == [(0, "c1", "draw"), (1, "c2", "look")]
    assert [json.loads(part.arguments) for part in calls] == [arguments, {}]
    stop = parts[-1]
    assert isinstance(stop, StopPart)
    assert stop.reason == "calls"
    asked = tuple(CallAsked(part.id, part.name, part.arguments) for part in calls)
    results = ToolMessage(tuple(CallAnswered(each.id, each.name, "done") for each in asked))
    said = contents(model_at("http://x"), UserMessage("go"), AssistantMessage("", asked, stop.kept), results)
    assert said[1]["parts"] == [
        {
            "functionCall": {"id": "c1", "name": "draw", "args": arguments},
            "thoughtSignature": SIGNATURE,
        },
        call("look", "c2"),
    ]


async def test_a_call_in_pieces_that_is_cut_off() -> None:
    """A call without its last piece is kept as far as it arrived if the answer was cut off, and is an error otherwise."""
    pieces = [piece(name="look"), piece(at("$.where", goes_on=True, stringValue="the"))]
    *_, cut, stop = await parts_of(*pieces, reason="MAX_TOKENS")
    assert isinstance(cut, CallPart)
    assert isinstance(stop, StopPart)
    assert (cut.name, cut.arguments, stop.reason) == ("look", '{"where":"the"}', "length")
    with pytest.raises(ModelAnswerBroken, match="in the middle of a call"):
        await parts_of(*pieces)


@pytest.mark.parametrize(
    "paths", [["where"], ["$"], ["$.a[1]"], ["$[0]"], ["$.a..b"], ["$.a", "$.a.b"], ["$.a[0]", "$.a.b"]]
)
async def test_a_piece_that_fits_nowhere(paths: list[str]) -> None:
    """A piece whose path is invalid, skips a list item, or leads into a value of a different kind makes the answer broken."""
    values = [at(path, stringValue="x") for path in paths]
    with pytest.raises(ModelAnswerBroken):
        await parts_of(piece(*values, name="look", goes_on=False))


def test_texts_are_joined_only_without_signatures() -> None:
    """The pieces of a streamed text are joined into one part, but a signed piece stays separate."""
    from handrail.models.gemini import GeminiAnswer

    model = model_at("http://test")
    pieces = GeminiAnswer(model._endpoint, {})
    for part in [{"text": "a"}, {"text": "b"}, {"text": "c", "thoughtSignature": "s"}, {"text": "d"}]:
        list(pieces.take(answer(part, reason=None)))
    (*_, stop) = pieces.take(answer())
    kept = json.loads(stop.kept.data)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess, reportUnknownMemberType, reportUnknownArgumentType]
    assert kept == [{"text": "ab"}, {"text": "c", "thoughtSignature": "s"}, {"text": "d"}]


def test_the_calls_of_a_different_provider_are_marked_as_such() -> None:
    """The first call of another provider's answer gets the placeholder signature that Google documents. That provider's thought is not sent."""
    asked = AssistantMessage(
        "",
        (CallAsked("toolu_1", "look", "{}"), CallAsked("toolu_2", "look", "{}")),
        Kept("anthropic", b'[{"type":"thinking","thinking":"x","signature":"y"}]'),
    )
    results = ToolMessage((CallAnswered("toolu_1", "look", "a"), CallAnswered("toolu_2", "look", "", True)))
    said = contents(model_at("http://test"), UserMessage("go"), asked, results)
    assert [part.get("thoughtSignature") for part in said[1]["parts"]] == [
        "skip_thought_signature_validator",
        None,
    ]
    assert "signature" not in json.dumps(said).replace("thoughtSignature", "").replace(
        "thought_signature", ""
    )
    assert said[2]["parts"][1]["functionResponse"]["response"] == {"error": ""}


@tool(effect="pure")
async def unlock(password: SecretStr) -> str:
    """Unlock the door."""
    return "open"


async def test_a_secret_in_a_signed_call_is_recorded_nowhere() -> None:
    """The signature of a call is recorded and sent back, and its secret argument is sent back but not recorded."""
    journal, session = MemoryJournal(), Session()
    signed = {**call("unlock", password="hunter2"), "thoughtSignature": SIGNATURE}
    async with raw_server(whole(answer(signed)), whole(answer({"text": "Done."}))) as server:
        adapter = Adapter(model_at(server.url), retry=ONCE, journal=journal)
        prompt = Prompt("p", "Do.", tools=[unlock])
        response = await adapter.evaluate(prompt, "go", session=session, run_id="r")
        assert sent(server, 1)["contents"][1]["parts"] == [signed]
    assert response.text == "Done."
    (note,) = [
        each
        for each in await journal.calls.entries("r")
        if each.kind == "model answer" and b"unlock" in each.body
    ]
    assert SIGNATURE.encode() in note.body
    assert b"hunter2" not in note.body
    assert "hunter2" not in save(session).decode()


# --- the conversation ---


def test_user_and_model_alternate() -> None:
    """Consecutive messages of the same role are sent as one content, and the first content is always the user's."""
    asked = AssistantMessage("", (CallAsked("a", "look", "{}"),))
    messages = [asked, ToolMessage((CallAnswered("a", "look", "x"),)), UserMessage("and"), UserMessage(" ")]
    said = contents(model_at("http://test"), *messages)
    assert [each["role"] for each in said] == ["user", "model", "user"]
    assert [list(part) for part in said[2]["parts"]] == [["functionResponse"], ["text"], ["text"]]


async def test_a_name_that_the_api_refuses_is_mapped_both_ways() -> None:
    """A tool whose name begins with a digit is offered with an underscore before it, and a call by that name reaches the tool."""
    async with raw_server(
        whole(answer(call("_3d_plot", None, city="Oslo"))), whole(answer({"text": "Done."}))
    ) as server:
        response = await Adapter(model_at(server.url), retry=ONCE).evaluate(TOOLS, "go")
        first, second = sent(server, 0), sent(server, 1)
    assert [each["name"] for each in first["tools"][0]["functionDeclarations"]] == ["look", "_3d_plot"]
    (invoked,) = response.session[ToolInvoked].all()
    assert (invoked.tool, invoked.status) == ("3d_plot", "ok")
    made, result = (
        second["contents"][1]["parts"][0]["functionCall"],
        second["contents"][2]["parts"][0]["functionResponse"],
    )
    assert made["name"] == result["name"] == "_3d_plot"
    assert made["id"] == result["id"] != ""


async def test_settings_are_sent_in_the_fields_of_the_api() -> None:
    """Temperature, limits, the answer's schema, forced calls and options are in the fields that the API defines for them."""
    options = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}, "safetySettings": []}
    model = model_at("http://test", options=options)
    from handrail.schema import schema_of

    request = ModelRequest(
        "Be brief.",
        Sent([UserMessage("go")]),
        Sent(),
        schema_of(dict[str, int]),
        temperature=0.5,
        max_tokens=9,
        must_call=True,
    )
    body = json.loads(model._body(request))
    assert body["generationConfig"] == {
        "thinkingConfig": {"includeThoughts": True},
        "temperature": 0.5,
        "maxOutputTokens": 9,
        "responseMimeType": "application/json",
        "responseJsonSchema": {"type": "object", "additionalProperties": {"type": "integer"}},
    }
    assert body["toolConfig"] == {"functionCallingConfig": {"mode": "ANY"}}
    assert body["systemInstruction"] == {"parts": [{"text": "Be brief."}]}
    assert body["safetySettings"] == []


def test_models_before_gemini_3_answer_by_a_call() -> None:
    """Gemini models before version 3 have no native output, unless `native_output` says otherwise."""
    assert not GeminiModel("gemini-2.5-flash", key_variable=None).traits.native_output
    assert GeminiModel("gemini-3-pro", key_variable=None).traits.native_output
    assert GeminiModel("gemini-2.5-flash", key_variable=None, native_output=True).traits.native_output


# --- answers ---


@pytest.mark.parametrize(
    ("reason", "stop"),
    [
        ("STOP", "done"),
        ("MAX_TOKENS", "length"),
        ("SAFETY", "refused"),
        ("RECITATION", "refused"),
        ("PROHIBITED_CONTENT", "refused"),
        ("SPII", "refused"),
        ("BLOCKLIST", "refused"),
        ("A_NEW_REASON", "done"),
    ],
)
async def test_reasons_to_stop(reason: str, stop: str) -> None:
    async with raw_server(whole(answer({"text": "So"}, reason=reason))) as server:
        response = await Adapter(model_at(server.url), retry=ONCE).evaluate(PLAIN, "go")
    assert (response.text, response.stop_reason) == ("So", stop)


async def test_a_blocked_prompt_is_a_refusal() -> None:
    """A response that has no candidates because the prompt was blocked counts as a refusal, not as a broken answer."""
    blocked = {
        "promptFeedback": {"blockReason": "PROHIBITED_CONTENT"},
        "usageMetadata": {"promptTokenCount": 5},
    }
    async with raw_server(whole(blocked)) as server:
        response = await Adapter(model_at(server.url), retry=ONCE).evaluate(PLAIN, "go")
    assert (response.text, response.stop_reason, response.usage.input) == ("", "refused", 5)


@pytest.mark.parametrize("reason", ["MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL", "OTHER"])
async def test_an_answer_that_the_model_could_not_finish_is_retried(reason: str) -> None:
    """If the finish reason means that the answer can't be used, the attempt fails with the provider's explanation.

    The next answer is used.
    """
    broken = answer(reason=reason)
    broken["candidates"][0]["finishMessage"] = "Malformed function call: print(look("
    session = Session()
    retry = Retry(attempts=2, first_wait=0)
    async with raw_server(whole(broken), whole(answer({"text": "fine"}))) as server:
        response = await Adapter(model_at(server.url), retry=retry).evaluate(PLAIN, "go", session=session)
    assert response.text == "fine"
    (failed,) = session[ModelFailed].all()
    assert reason in failed.error
    assert "print(look(" in failed.error


async def test_usage_counts_cache_and_thought() -> None:
    """Thought tokens count as output; cached and tool-use tokens count as input. The price table charges less for cached tokens."""
    usage = {
        "promptTokenCount": 100,
        "cachedContentTokenCount": 60,
        "toolUsePromptTokenCount": 5,
        "candidatesTokenCount": 7,
        "thoughtsTokenCount": 30,
        "totalTokenCount": 142,
    }
    async with raw_server(whole(answer({"text": "x"}, usageMetadata=usage))) as server:
        response = await Adapter(model_at(server.url), retry=ONCE).evaluate(PLAIN, "go")
    assert response.usage == Usage(105, 37, 60, 0, 1)
    assert response.session[ModelResponded].all()[0].usage == response.usage
    model = model_named("google:gemini-2.5-flash")
    cost = tariff_of(model.name, model.traits)
    whole_price, cached = cost(Usage(1_000_000, 0)), cost(Usage(1_000_000, 0, 1_000_000))
    assert whole_price is not None
    assert cached is not None
    assert Decimal(0) < cached < whole_price


# --- errors and addresses ---


def error(code: int, status: str, **more: Any) -> dict[str, Any]:
    return {"error": {"code": code, "message": f"{status} happened", "status": status, **more}}


RETRY_INFO = [
    {"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": []},
    {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34.5s"},
]


@pytest.mark.parametrize(
    ("body", "kind", "wait"),
    [
        (error(429, "RESOURCE_EXHAUSTED", details=RETRY_INFO), ModelRateLimited, 34.5),
        ([error(429, "RESOURCE_EXHAUSTED", details=RETRY_INFO)], ModelRateLimited, 34.5),
        (error(429, "RESOURCE_EXHAUSTED", details="retryDelay"), ModelRateLimited, None),
        (error(429, "RESOURCE_EXHAUSTED", details=[{"retryDelay": "soon"}]), ModelRateLimited, None),
        (error(503, "UNAVAILABLE"), ModelUnavailable, None),
        (error(400, "INVALID_ARGUMENT"), ModelRequestRefused, None),
    ],
)
async def test_errors_of_the_api(body: Any, kind: type[ModelError], wait: float | None) -> None:
    """An error quotes the provider's message, and has the retry delay if the details give a valid one."""
    status = (body[0] if isinstance(body, list) else body)["error"]["code"]
    async with raw_server(whole(body, status)) as server:
        with pytest.raises(PromptEvaluationError) as raised:
            await Adapter(model_at(server.url), retry=ONCE).evaluate(PLAIN, "go")
    cause = raised.value.__cause__
    assert isinstance(cause, kind)
    assert "happened" in str(cause)
    assert "details" not in str(cause)
    assert cause.retry_after == (wait if wait is None else pytest.approx(wait, abs=0.1))


@pytest.mark.parametrize(
    ("code", "kind"), [(429, ModelRateLimited), (503, ModelUnavailable), (400, ModelRequestRefused)]
)
async def test_an_error_in_the_middle_of_a_stream(code: int, kind: type[Exception]) -> None:
    async with raw_server(streamed(answer({"text": "x"}, reason=None), error(code, "BAD"))) as server:
        with pytest.raises(PromptEvaluationError) as raised:
            await Adapter(model_at(server.url), retry=ONCE).stream(PLAIN, "go").response
    assert type(raised.value.__cause__) is kind
    assert "middle of its answer: BAD happened" in str(raised.value)


async def test_a_complete_answer_without_a_reason_is_broken() -> None:
    async with raw_server(whole(answer({"text": "x"}, reason=None))) as server:
        with pytest.raises(PromptEvaluationError) as raised:
            await Adapter(model_at(server.url), retry=ONCE).evaluate(PLAIN, "go")
    assert isinstance(raised.value.__cause__, ModelAnswerBroken)


async def test_keys_and_addresses_are_those_of_googles_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """GOOGLE_API_KEY takes precedence over GEMINI_API_KEY, and GOOGLE_GEMINI_BASE_URL is an address without the version."""
    for variable in ("GOOGLE_API_KEY", "GEMINI_API_KEY", "GOOGLE_GEMINI_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(PromptEvaluationError) as raised:
        await Adapter("google:gemini-3-pro").evaluate(PLAIN, "go")
    assert isinstance(raised.value.__context__ or raised.value.__cause__, ModelKeyMissing)
    assert "GOOGLE_API_KEY" in str(raised.value)
    monkeypatch.setenv("GEMINI_API_KEY", "second-key")
    async with raw_server(whole(answer({"text": "x"})), whole(answer({"text": "y"}))) as server:
        monkeypatch.setenv("GOOGLE_GEMINI_BASE_URL", server.url)
        await Adapter("google:gemini-3-pro").evaluate(PLAIN, "go")
        monkeypatch.setenv("GOOGLE_API_KEY", "first-key")
        await Adapter("google:gemini-3-pro").evaluate(PLAIN, "go")
        heads = server.heads
    assert b"post /v1beta/models/gemini-3-pro:generatecontent http" in heads[0]
    assert b"x-goog-api-key: second-key" in heads[0]
    assert b"x-goog-api-key: first-key" in heads[1]


def test_the_other_name_is_explained() -> None:
    with pytest.raises(DefinitionError, match="Did you mean google:gemini-3-pro"):
        model_named("gemini:gemini-3-pro")
