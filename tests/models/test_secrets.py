"""Tests that a planted API key appears in no event, log, record or error."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    AnthropicModel,
    GeminiModel,
    OpenAIModel,
    Prompt,
    PromptEvaluationError,
    Session,
    ToolContext,
    tool,
)
from handrail.errors import DefinitionError, HandrailError
from handrail.messages import Model
from handrail.run.adapter import Retry
from handrail.session import save
from handrail.testing import Cassette, RecordingSubscriber
from support.planted_secrets import Recording, everything
from support.raw_server import raw_server
from support.servers import Aimock, Llmock
from support.stages import MESSAGE, WIRES, Call, Fail, Say, Stage, Wire

KEY = "sk-planted-7d1f0c2e9b"


def _model(wire: Wire, server: Aimock | Llmock) -> Model:
    if wire == "messages":
        return AnthropicModel("gpt-test", base_url=server.anthropic_url, key_variable="PLANTED_KEY")
    if wire == "gemini":
        return GeminiModel(
            "gpt-test", base_url=server.gemini_url, key_variable="PLANTED_KEY", headers={"x-team": KEY}
        )
    return OpenAIModel(
        "gpt-test", api=wire, base_url=server.openai_url, key_variable="PLANTED_KEY", headers={"x-team": KEY}
    )


@pytest.mark.parametrize("wire", WIRES)
def test_a_planted_key_is_shown_nowhere(
    wire: Wire, aimock_server: Aimock, llmock_server: Llmock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted key appears in no event, log line, journal row, exception, tool context or saved session."""
    monkeypatch.setenv("PLANTED_KEY", KEY)
    logged = io.StringIO()
    handler = logging.StreamHandler(logged)
    root = logging.getLogger()
    root.addHandler(handler)
    monkeypatch.setattr(root, "level", logging.DEBUG)
    found: list[str] = []
    looked_at: set[str] = set()

    @tool
    async def get_weather(city: str, days: int, context: ToolContext) -> str:
        """Say what the weather will be like."""
        members = [name for name in dir(context) if not name.startswith("_")]
        for name in members:
            with contextlib.suppress(HandrailError):  # some members are not available in this run
                found.append(everything(getattr(context, name)))
                looked_at.add(name)
        raise ValueError("so that there is a traceback too")

    prompt = Prompt("p", "Go.", tools=[get_weather])
    try:
        for server, scene in ((aimock_server, (Call(), Say())), (llmock_server, (Call(), Fail(401)))):
            stage = Stage("x", wire, server)
            stage.play(*scene)
            session, journal = Session(), Recording()
            model = _model(wire, server)
            adapter = Adapter(model, retry=Retry(attempts=1), journal=journal)
            with RecordingSubscriber(session) as seen:
                try:
                    response: Any = adapter.evaluate(prompt, MESSAGE, session=session).wait()
                except PromptEvaluationError as error:
                    response = error
            found += [everything(seen.events), everything(journal.rows), everything(response)]
            found += [save(session).decode(), repr(model), repr(adapter), everything(vars(model))]
    finally:
        root.removeHandler(handler)
    found.append(logged.getvalue())
    assert {"request", "extras", "session", "adapter", "run_context", "response_accumulator"} <= looked_at
    for text in found:
        assert KEY not in text
    if wire == "messages":
        return
    seen_headers = [entry.raw["headers"] for entry in aimock_server.requests()]
    assert all("x-team" in headers for headers in seen_headers)


def test_a_provider_that_says_the_key_back_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider's error that contains the key is shown without it. The error for an unreachable provider has no key either."""
    from handrail.models.http import Endpoint
    from handrail.models.providers import Key

    monkeypatch.setenv("PLANTED_KEY", KEY)
    provider = Endpoint(
        "m", "http://127.0.0.1:1", keys=(Key("PLANTED_KEY", "x-api-key", ""),), key_needed=True
    )
    assert (
        provider._without_key(f"Incorrect API key provided: {KEY}.")
        == "Incorrect API key provided: [the key]."
    )
    with pytest.raises(PromptEvaluationError) as raised:
        Adapter(
            OpenAIModel("m", base_url="http://127.0.0.1:1", key_variable="PLANTED_KEY"),
            retry=Retry(attempts=1),
        ).evaluate(Prompt("p", "Go."), "hi").wait()
    assert "can't be reached" in str(raised.value)
    assert KEY not in everything(raised.value)


SHORT_KEYS = [
    (
        "x",
        "maximum of x: Bearer x, 'x', x.",
        "maximum of [the key]: Bearer [the key], '[the key]', [the key].",
    ),
    ("none", "Nonetheless none", "Nonetheless [the key]"),
    ("a+b", "aa+bb a+b", "aa+bb [the key]"),
    ("sk-long", "desk-longer", "de[the key]er"),
]


@pytest.mark.parametrize(("key", "said", "shown"), SHORT_KEYS)
def test_a_short_key_is_hidden_where_it_stands_alone(
    monkeypatch: pytest.MonkeyPatch, key: str, said: str, shown: str
) -> None:
    """A key such as `x` is hidden as a word of its own, and does not garble other words. A longer key is hidden everywhere."""
    from handrail.models import bridge
    from handrail.models.http import Endpoint
    from handrail.models.providers import Key

    monkeypatch.setenv("PLANTED_API_KEY", key)
    provider = Endpoint(
        "m", "http://127.0.0.1:1", keys=(Key("PLANTED_API_KEY", "x-api-key", ""),), key_needed=True
    )
    assert provider._without_key(said) == shown
    assert bridge._without_secrets(said) == shown
    monkeypatch.delenv("PLANTED_API_KEY")
    monkeypatch.setenv("PLANTED_TOKENS_ARE_FAST", "true")
    assert bridge._without_secrets("not true") == "not true"


@pytest.mark.parametrize("stream", [False, True])
async def test_secret_headers_are_recorded_nowhere(tmp_path: Path, stream: bool) -> None:
    """A value of `headers` that a provider repeats is in no error, no request id and no cassette."""
    key = "planted-1a2b/3c4d"
    headers = {"x-team-key": key, "authorization": f"Bearer {key}", "x-title": "Refused"}
    body = json.dumps({"error": {"message": f"Refused: {key}"}}).encode()
    answer = (
        f"HTTP/1.1 400 Bad\r\nx-request-id: {key}\r\nretry-after: {key}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    async with raw_server(answer) as server:
        model = OpenAIModel("m", base_url=server.url, headers=headers)
        adapter = Adapter(model, retry=Retry(attempts=1))
        run = (
            adapter.stream(Prompt("p", "Go."), "hi").response
            if stream
            else adapter.evaluate(Prompt("p", "Go."), "hi")
        )
        with Cassette(tmp_path / "c.json", mode="record"), pytest.raises(PromptEvaluationError) as raised:
            await run
    assert "Refused: [secret]" in str(raised.value)
    assert key not in everything(raised.value)
    assert key not in (tmp_path / "c.json").read_text()


@pytest.mark.parametrize("end", ["?key=planted-1a2b3c4d", "#planted-1a2b3c4d"])
def test_an_address_with_a_query_is_refused(end: str) -> None:
    """The key in an address would be shown with the address, so a query is refused without being repeated."""
    with pytest.raises(DefinitionError, match="key_variable") as raised:
        OpenAIModel("m", base_url=f"http://127.0.0.1:1/v1{end}")
    assert "planted" not in str(raised.value)


def test_a_missing_key_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key, the run ends at once, and the error names the variable to set."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    for name, variable in (
        ("openai:gpt-5", "OPENAI_API_KEY"),
        ("anthropic:claude-sonnet-5", "ANTHROPIC_API_KEY"),
    ):
        with pytest.raises(PromptEvaluationError, match=f"Set {variable} in the environment"):
            Adapter(name).evaluate(Prompt("p", "Go."), "hi").wait()
