"""Attacks on the wires: malformed responses, leaks of the key, and requests that a provider would refuse."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, Literal

import aiohttp
import pytest
from pydantic import Field

from handrail import (
    Adapter,
    AnthropicModel,
    Budget,
    Deadline,
    OpenAIModel,
    Prompt,
    PromptEvaluationError,
    Session,
    ToolContext,
    tool,
)
from handrail.clock import SystemClock
from handrail.context import RATE_LIMIT, RateLimit
from handrail.errors import DefinitionError
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    CallAsked,
    Price,
    ToolMessage,
    UserMessage,
)
from handrail.models import prices
from handrail.run.adapter import Retry, Throttle
from handrail.run.limits import BudgetTracker
from support import PATIENCE
from support.raw_server import Raw, delta, raw_server, said, streamed, whole

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Standing(SystemClock):
    """A clock that always shows 1 January 2026."""

    def now(self) -> datetime:
        return NOW


ONCE = Retry(attempts=1)
PLAIN = Prompt("p", "Go.")


@tool
async def weather(city: str) -> str:
    """Say what the weather is like in a city."""
    return f"It rains in {city}."


GUIDE = Prompt("guide", "Answer briefly.", tools=[weather])


def chat(raw: Raw, **options: Any) -> OpenAIModel:
    given: dict[str, Any] = {"base_url": raw.url, "key_variable": None, **options}
    return OpenAIModel("m", **given)


# --- usage -------------------------------------------------------------------------------------


async def test_a_provider_that_counts_nothing_is_not_free() -> None:
    """If the provider reports no usage, the reserved bound counts as spent, so a budget still ends a run."""
    async with raw_server(said("ok")) as raw:
        adapter = Adapter(chat(raw, price=Price(Decimal(1), Decimal(1))), max_tokens=100)
        budget = BudgetTracker(Budget(tokens=500))
        assert (await adapter.evaluate(PLAIN, "hi", budget=budget)).cost is None
        tries = [adapter.evaluate(PLAIN, "hi", budget=budget) for _ in range(9)]
        ended = [await asyncio.gather(each, return_exceptions=True) for each in tries]
        assert isinstance(ended[-1][0], PromptEvaluationError)
        assert 400 < budget.spent()["tokens"] <= 500


async def test_without_usage_the_next_request_is_bounded_by_all_that_is_sent() -> None:
    """Without reported usage, the next request's bound covers everything that is sent, even earlier messages."""
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    async with raw_server(said(None, tool_calls=[call]), said("ok")) as raw:
        budget = BudgetTracker(Budget(tokens=100_000))
        await Adapter(chat(raw), max_tokens=10).evaluate(GUIDE, "x" * 1000, budget=budget)
        assert budget.spent()["tokens"] > 2000


async def test_a_stream_that_breaks_off_is_not_free() -> None:
    """If a stream breaks off, its usage is unknown, so the reserved bound counts as spent."""
    async with raw_server(streamed(delta(content="One two"), end=b"")) as raw:
        budget = BudgetTracker(Budget(tokens=5000))
        adapter = Adapter(chat(raw), retry=Retry(attempts=2, first_wait=0), max_tokens=100)
        with pytest.raises(PromptEvaluationError):
            await adapter.stream(PLAIN, "hi", budget=budget).response
        assert budget.spent()["tokens"] > 200


async def test_a_refused_request_is_free() -> None:
    """A request that fails with an error status costs no tokens, but is counted as a request."""
    async with raw_server(whole({"error": {"message": "no"}}, 500)) as raw:
        budget = BudgetTracker(Budget(tokens=5000))
        with pytest.raises(PromptEvaluationError):
            await Adapter(chat(raw), retry=ONCE).evaluate(PLAIN, "hi", budget=budget)
        assert (budget.spent()["tokens"], budget.spent()["requests"]) == (0, 1)


# --- the key -----------------------------------------------------------------------------------

KEY = "sk-planted-4b1d77"
SAYS_IT = {"message": f"Incorrect API key provided: {KEY}."}


def chain(error: BaseException | None) -> str:
    """Return all the text in an error and its causes."""
    if error is None:
        return ""
    held = f"{error!s}{error!r}{error.args!r}{vars(error)!r}"
    return (
        held
        + chain(error.__cause__)
        + (chain(error.__context__) if error.__context__ is not error.__cause__ else "")
    )


@pytest.mark.parametrize(
    ("wire", "answer", "stream"),
    [
        ("chat", whole({"error": SAYS_IT}), False),
        ("chat", streamed({"error": SAYS_IT}), True),
        ("chat", streamed([KEY]), True),
        ("chat", whole({"error": SAYS_IT}), True),
        ("chat", whole({"error": SAYS_IT}, 401), True),
        ("chat", b"nonsense\r\n\r\n", False),
        ("responses", whole({"status": "failed", "output": [], "error": SAYS_IT}), False),
        ("responses", streamed({"type": "error", "error": SAYS_IT}), True),
        ("messages", streamed({"type": "error", "error": SAYS_IT}), True),
        ("messages", whole({"said": KEY}), False),
    ],
)
async def test_a_provider_can_not_bring_the_key_out(
    wire: str, answer: bytes, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a provider echoes the key, neither the error nor its causes show it."""
    monkeypatch.setenv("PLANTED_KEY", KEY)
    async with raw_server(answer) as raw:
        model: Any = (
            AnthropicModel("m", base_url=raw.url, key_variable="PLANTED_KEY")
            if wire == "messages"
            else OpenAIModel("m", api=wire, base_url=raw.url, key_variable="PLANTED_KEY")  # pyright: ignore[reportArgumentType]  # `wire` is one of the literals
        )
        adapter = Adapter(model, retry=ONCE)
        with pytest.raises(PromptEvaluationError) as raised:
            await (adapter.stream(PLAIN, "hi").response if stream else adapter.evaluate(PLAIN, "hi"))
    assert KEY not in chain(raised.value)


# --- unusual answers ---------------------------------------------------------------------------


def piece(city: str, id: str, **more: Any) -> dict[str, Any]:
    """Return a complete call to `weather`, as one item of a chunk's `tool_calls`."""
    return {"id": id, "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'}, **more}


@pytest.mark.parametrize(
    "chunks",
    [
        [delta(tool_calls=[piece("Oslo", "a")]), delta(tool_calls=[piece("Rome", "b")])],
        [delta(tool_calls=[piece("Oslo", "a"), piece("Rome", "b")])],
        [delta(tool_calls=[piece("Oslo", "a", index=None), piece("Rome", "b", index=None)])],
        [delta(tool_calls=[piece("Oslo", "a", index=0)]), delta(tool_calls=[piece("Rome", "b", index=0)])],
        [delta(tool_calls=[piece("Oslo", "", index=0)]), delta(tool_calls=[piece("Rome", "", index=1)])],
        [
            delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "weather", "arguments": '{"ci'}}]),
            delta(tool_calls=[piece("Rome", "b", index=1)]),
            delta(tool_calls=[{"index": 0, "id": "z", "function": {"arguments": 'ty": "Os'}}]),
            delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "weather", "arguments": 'lo"}'}}]),
        ],
        [
            delta(tool_calls=[{"index": n, "function": {"name": "weather", "arguments": {"city": city}}}])
            for n, city in enumerate(("Oslo", "Rome"))
        ],
    ],
    ids=[
        "no index",
        "in one chunk",
        "null",
        "all 0",
        "no ids",
        "interleaved, ids and names again",
        "objects",
    ],
)
async def test_parallel_calls_are_kept_separate(chunks: list[Any]) -> None:
    """Parallel calls are kept separate, even if the server numbers them badly or not at all."""
    async with raw_server(
        streamed(*chunks, delta("tool_calls")), streamed(delta(content="Rain."), delta("stop"))
    ) as raw:
        response = await Adapter(chat(raw), retry=ONCE).stream(GUIDE, "hi").response
    assert response.text == "Rain."
    asked, *results = raw.bodies[1]["messages"][2:]
    assert [call["function"]["name"] for call in asked["tool_calls"]] == ["weather", "weather"]
    assert all(isinstance(call["function"]["arguments"], str) for call in asked["tool_calls"])
    assert [result["content"] for result in results] == ["It rains in Oslo.", "It rains in Rome."]


@pytest.mark.parametrize("stream", [False, True])
async def test_content_in_parts(stream: bool) -> None:
    """Text that a server sends in parts, with thinking between them, is joined."""
    parts = [
        {"type": "text", "text": "One "},
        {"type": "thinking", "thinking": []},
        {"type": "text", "text": "two."},
    ]
    answer = (
        streamed(delta(content=parts), delta(content="!"), delta("stop")) if stream else said([*parts, "!"])
    )
    async with raw_server(answer) as raw:
        adapter = Adapter(chat(raw), retry=ONCE)
        response = await (adapter.stream(PLAIN, "hi").response if stream else adapter.evaluate(PLAIN, "hi"))
    assert response.text == "One two.!"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_one_streamed_or_not(stream: bool) -> None:
    """A refusal has the stop reason `refused`, streamed or not."""
    answer = streamed(delta(refusal="No."), delta("stop")) if stream else said(None, refusal="No.")
    async with raw_server(answer) as raw:
        adapter = Adapter(chat(raw), retry=ONCE)
        response = await (adapter.stream(PLAIN, "hi").response if stream else adapter.evaluate(PLAIN, "hi"))
    assert (response.text, response.stop_reason) == ("No.", "refused")


# --- streams -----------------------------------------------------------------------------------


async def test_a_server_that_accepts_no_connection_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no connection is made in time, the error says so, and not that the server sent no data."""
    monkeypatch.setattr("handrail.models.http._CONNECT_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as opened:
        for _ in range(3):  # the system accepts only the connections that fit in the server's backlog
            filler = opened.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        model = OpenAIModel("m", base_url=f"http://127.0.0.1:{server.getsockname()[1]}", key_variable=None)
        with pytest.raises(PromptEvaluationError, match=r"no connection was made in 0\.05 seconds"):
            await Adapter(model, retry=ONCE).evaluate(PLAIN, "hi")


async def test_a_connection_is_used_again_after_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection is reused after a stream, because the stream is read to its end."""
    monkeypatch.setattr("handrail.models.http._LAST_BYTES", PATIENCE)
    monkeypatch.setattr(aiohttp, "TCPConnector", partial(aiohttp.TCPConnector, keepalive_timeout=PATIENCE))
    async with raw_server(streamed(delta(content="ok"), delta("stop"))) as raw:
        for _ in range(4):
            await Adapter(chat(raw)).stream(PLAIN, "hi").response
        assert raw.connections == 1


async def test_a_stream_that_stays_open_after_its_end_is_left() -> None:
    """A run does not wait for a server that keeps its stream open after the end of the answer."""
    answer = streamed(delta(content="ok"), delta("stop")).removesuffix(b"0\r\n\r\n")
    async with raw_server(answer) as raw, asyncio.timeout(PATIENCE):
        assert (await Adapter(chat(raw)).stream(PLAIN, "hi").response).text == "ok"


async def test_a_stream_may_begin_with_a_byte_order_mark() -> None:
    """A byte order mark at the start of a stream is skipped, and none of the answer is lost."""
    answer = streamed(delta(content="ok"), delta("stop"))
    marked = answer.replace(b"\r\n\r\n", b"\r\n\r\n3\r\n\xef\xbb\xbf\r\n", 1)
    async with raw_server(marked) as raw:
        assert (await Adapter(chat(raw), retry=ONCE).stream(PLAIN, "hi").response).text == "ok"


@pytest.mark.parametrize(
    ("headers", "limit"),
    [
        (
            {"x-ratelimit-remaining-requests": "9", "x-ratelimit-reset-requests": "1h2m3.5s"},
            RateLimit(9, None, NOW + timedelta(hours=1, minutes=2, seconds=3.5)),
        ),
        (
            {
                "x-ratelimit-remaining-tokens": "40000",
                "x-ratelimit-reset-requests": "20ms",
                "x-ratelimit-reset-tokens": "6m0s",
            },
            RateLimit(None, 40000, NOW + timedelta(minutes=6)),
        ),
        (
            {
                "anthropic-ratelimit-requests-remaining": "3",
                "anthropic-ratelimit-tokens-remaining": "5",
                "anthropic-ratelimit-requests-reset": "2026-01-01T00:00:30Z",
            },
            RateLimit(3, 5, NOW + timedelta(seconds=30)),
        ),
        (
            {"x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": "soon"},
            RateLimit(1),
        ),
        (
            {"x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": f"{'9' * 400}s"},
            RateLimit(1),
        ),
        ({"x-ratelimit-remaining-requests": "many"}, None),
    ],
)
async def test_a_tool_sees_what_is_left_of_the_providers_limits(
    headers: dict[str, str], limit: RateLimit | None
) -> None:
    """Tools see the remaining rate limits from OpenAI's and Anthropic's headers. Values that make no sense are left out."""
    seen: list[RateLimit | None] = []

    @tool(effect="pure")
    async def look(context: ToolContext) -> str:
        """Look at something."""
        seen.append(context.extras.get(RATE_LIMIT))
        return "seen"

    call = {"id": "c", "function": {"name": "look", "arguments": "{}"}}
    told = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
    asks = said(None, tool_calls=[call]).replace(b"content-type", told + b"content-type", 1)
    async with raw_server(asks, said("ok")) as raw:
        model = chat(raw)
        model._endpoint._clock = Standing()
        await Adapter(model).evaluate(Prompt("p", "Go.", tools=[look]), "hi")
    assert seen == [limit]


# --- event loops and programs that end ---------------------------------------------------------


def test_loops_that_have_ended_are_let_go() -> None:
    """Connections, deadlines and throttles do not keep closed event loops alive, except possibly the latest one."""
    throttle, loops = Throttle(at_once=1), list[weakref.ref[Any]]()

    async def evaluate() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        async with raw_server(said("ok")) as raw:
            adapter = Adapter(chat(raw), throttle=throttle)
            await asyncio.gather(
                *(adapter.evaluate(PLAIN, "hi", deadline=Deadline.after(PATIENCE)) for _ in range(2))
            )

    for _ in range(4):
        asyncio.run(evaluate())
    gc.collect()
    assert sum(loop() is not None for loop in loops) <= 1


SCRIPT = """
import atexit, http.server, threading
from handrail import Adapter, OpenAIModel, Prompt
from handrail.models.http import _clients

atexit.register(lambda: print("closed", [client.closed for client, _ in _clients.values()]))  # runs last

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        body = b'{"choices": [{"message": {"content": "ok"}}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
model = OpenAIModel("m", base_url=f"http://127.0.0.1:{server.server_port}", key_variable=None)
print(Adapter(model).evaluate(Prompt("p", "Go."), "hi").wait().text)
server.shutdown()
server.server_close()
"""


def test_a_script_ends_without_a_word_of_complaint() -> None:
    """A script's connections are closed without a warning when it ends."""
    ended = subprocess.run(
        [sys.executable, "-W", "always", "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == ("ok\nclosed [True]\n", "", 0)


# --- Anthropic ---------------------------------------------------------------------------------


@pytest.mark.parametrize("thinks", [False, True])
async def test_text_with_nothing_to_read_is_not_sent_back(thinks: bool) -> None:
    """Anthropic's API refuses a blank block, so blank text is left out. A message with nothing else gets a placeholder."""
    thoughts = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "z"},
    ]
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}}
    blocks = [*(thoughts if thinks else []), {"type": "text", "text": "\n\n"}, call]
    async with raw_server(
        whole({"content": blocks, "stop_reason": "tool_use"}),
        whole({"content": [{"type": "text", "text": " "}], "stop_reason": "end_turn"}),
    ) as raw:
        adapter, session = Adapter(AnthropicModel("m", base_url=raw.url, key_variable=None)), Session()
        await adapter.evaluate(GUIDE, "  ", session=session)
        await adapter.evaluate(GUIDE, "hi", session=session)
    said_first, called, _, empty, _ = raw.bodies[2]["messages"]
    assert called["content"] == [*(thoughts if thinks else []), call]
    for message in (said_first, empty):
        assert [block["text"].strip() != "" for block in message["content"]] == [True]


# --- schemas -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cat:
    """A cat."""

    kind: Literal["cat"]


@dataclass(frozen=True)
class Dog:
    """A dog."""

    kind: Literal["dog"]


@dataclass(frozen=True)
class Told:
    """A pet in a union with a discriminator."""

    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


@dataclass(frozen=True)
class Untold:
    """A pet in a union without a discriminator."""

    pet: Cat | Dog


@dataclass(frozen=True)
class Described:
    """A pet whose schema has a description beside a reference."""

    pet: Annotated[Cat, Field(description="The one on the sofa.")]


@dataclass(frozen=True)
class Several:
    """Pet names without repeats."""

    names: set[str]


@pytest.mark.parametrize(
    ("wanted", "strict"), [(Untold, True), (Told, False), (Described, False), (Several, False)]
)
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_strict_is_only_said_of_what_a_strict_mode_takes(
    wanted: type[Any], strict: bool, api: Literal["chat", "responses"]
) -> None:
    """Strict mode is requested only for schemas that it supports."""
    async with raw_server(whole({"error": {"message": "no"}}, 400)) as raw:
        with pytest.raises(PromptEvaluationError):
            await Adapter(chat(raw, api=api)).evaluate(Prompt("p", "Go.", output=wanted), "hi")
    body = raw.bodies[0]
    sent = body["response_format"]["json_schema"] if api == "chat" else body["text"]["format"]
    assert sent["strict"] is strict


class Table(ModuleType):
    """A price table like `genai-prices`: one dollar per token, a quarter more for cache writes, and nothing for cache reads."""

    @dataclass
    class Usage:
        """Counts of tokens and web searches."""

        input_tokens: int = 0
        output_tokens: int = 0
        cache_read_tokens: int | None = None
        cache_write_tokens: int | None = None
        web_searches: int | None = None

    @staticmethod
    def calc_price(usage: Any, model_ref: str, provider_id: str) -> Any:
        read, written = usage.cache_read_tokens or 0, usage.cache_write_tokens or 0
        if read + written > usage.input_tokens:
            raise ValueError(f"cache tokens cannot exceed input_tokens ({usage.input_tokens})")
        price = Decimal(usage.input_tokens - read + usage.output_tokens) + Decimal(written) / 4
        prices = SimpleNamespace(input_mtok=1_000_000, output_mtok=1_000_000)
        return SimpleNamespace(total_price=price, model_price=prices)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace `genai_prices` with `Table`, whether or not the extra is installed."""
    monkeypatch.setitem(sys.modules, "genai_prices", Table("genai_prices"))
    prices._from_table.cache_clear()
    yield
    prices._from_table.cache_clear()


@pytest.mark.usefixtures("table")
async def test_what_is_written_to_a_cache_is_reserved_too() -> None:
    """The reserved bound allows for cache writes, which cost more than plain input."""
    usage = {"input_tokens": 0, "cache_creation_input_tokens": 40, "output_tokens": 1}
    answer = whole({"content": [{"type": "text", "text": "ok"}], "stop_reason": "end_turn", "usage": usage})
    async with raw_server(answer) as raw:
        adapter = Adapter(AnthropicModel("m", base_url=raw.url, key_variable=None), max_tokens=1)
        with pytest.raises(PromptEvaluationError, match="budget for money"):
            await adapter.evaluate(PLAIN, "x" * 1000, budget=Budget(money=1100))
        assert not raw.bodies
        assert (await adapter.evaluate(PLAIN, "x" * 1000, budget=Budget(money=1400))).cost == 51


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 50}},
        {"prompt_tokens": "10", "completion_tokens": -1, "prompt_tokens_details": None},
        {"prompt_tokens": 10.0, "completion_tokens": None},
    ],
)
async def test_usage_that_makes_no_sense_ends_no_run(usage: Any) -> None:
    """An answer whose usage makes no sense does not fail the run, and the budget's spent and remaining tokens still add up."""
    async with raw_server(said("ok", usage)) as raw:
        budget = BudgetTracker(Budget(money=10_000, tokens=10_000))
        assert (await Adapter(chat(raw), max_tokens=9).evaluate(PLAIN, "hi", budget=budget)).text == "ok"
        assert budget.remaining()["tokens"] == 10_000 - budget.spent()["tokens"]


async def test_keys_as_they_are_found_in_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trailing line break in a key is harmless. One in the middle raises an error that names the variable."""
    async with raw_server(said("ok")) as raw:
        adapter = Adapter(chat(raw, key_variable="PLANTED_KEY"), retry=ONCE)
        monkeypatch.setenv("PLANTED_KEY", f"{KEY}\n")
        assert (await adapter.evaluate(PLAIN, "hi")).text == "ok"
        monkeypatch.setenv("PLANTED_KEY", f"{KEY}\nmore")
        with pytest.raises(PromptEvaluationError, match="PLANTED_KEY contains a control character"):
            await adapter.evaluate(PLAIN, "hi")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base_url": "https://me:hunter2@host/v1"}, "user name or password"),
        (
            {"base_url": "http://host/v1", "headers": {"x-team": "a\r\nb: c"}},
            "'x-team' contains a control character",
        ),
    ],
)
def test_addresses_and_headers_are_looked_at_when_a_model_is_made(options: Any, words: str) -> None:
    """An address or header that can't be sent or would leak a password is refused when the model is made."""
    with pytest.raises(DefinitionError, match=words) as raised:
        OpenAIModel("m", **options)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("", "{}"),
        ('{"city": "Os', '{"unreadable":"{\\"city\\": \\"Os"}'),
        ("[1]", '{"unreadable":"[1]"}'),
        ("none", '{"unreadable":"none"}'),
        ('{"a": 1, "a": 2}', '{"a":2}'),
        (f'{{"a": {{"b": "ø", "b": {10**30}}}}}', f'{{"a":{{"b":{10**30}}}}}'),
        ('{"a": [{"b": 1}, {"b": 1}], "c": "x: y"}', '{"a": [{"b": 1}, {"b": 1}], "c": "x: y"}'),
    ],
)
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_arguments_go_back_as_an_object_whatever_they_were(
    arguments: str, wanted: str, api: Literal["chat", "responses"]
) -> None:
    """Invalid arguments of an earlier call are sent back as a JSON object, because llama.cpp and vLLM refuse anything else.

    Of a repeated key, only the last value is sent back.
    """
    history = [
        UserMessage("u"),
        AssistantMessage("", (CallAsked("a", "weather", arguments),)),
        ToolMessage((CallAnswered("a", "weather", "These arguments do not fit.", True),)),
    ]
    async with raw_server(whole({"error": {"message": "no"}}, 400)) as raw:
        with pytest.raises(PromptEvaluationError):
            await Adapter(chat(raw, api=api)).evaluate(GUIDE, "hi", history=history)
    body = raw.bodies[0]
    sent = body["messages"][2]["tool_calls"][0]["function"] if api == "chat" else body["input"][1]
    assert sent["arguments"] == wanted


@dataclass(frozen=True)
class Score:
    """A score with bounds. One field is named like a bound."""

    points: Annotated[int, Field(ge=0, le=10)]
    pattern: Annotated[str, Field(min_length=1)]
    tags: Annotated[list[str], Field(max_length=3)]


async def test_bounds_are_checked_here_and_not_sent_to_anthropic() -> None:
    """Bounds are not sent to Anthropic, whose API refuses them. The answer is validated, and the model corrects it."""

    def answer(points: int) -> bytes:
        text = json.dumps({"points": points, "pattern": "x", "tags": []})
        return whole({"content": [{"type": "text", "text": text}], "stop_reason": "end_turn"})

    async with raw_server(answer(11), answer(7)) as raw:
        model = AnthropicModel("m", base_url=raw.url, key_variable=None)
        response = await Adapter(model).evaluate(Prompt("p", "Go.", output=Score), "hi")
    assert response.output == Score(7, "x", [])
    sent = raw.bodies[0]["output_config"]["format"]["schema"]
    assert sent["properties"] == {
        "points": {"type": "integer"},
        "pattern": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
    }
    assert sent["required"] == ["points", "pattern", "tags"]
