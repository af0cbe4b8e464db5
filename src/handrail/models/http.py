"""`Endpoint`: requests to one provider over HTTP.

It reads JSON or a stream of events, and raises a `ModelError` for every failed request. aiohttp is imported with the
first request. This module also has the helpers that all models over HTTP share.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is validated.

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.threads import forget_closed
from handrail.errors import DefinitionError, ModelError
from handrail.ids import tracing
from handrail.messages import (
    CallPart,
    Encode,
    Message,
    ModelPart,
    Sent,
    SentPart,
    StopPart,
    TextPart,
    ThinkingPart,
)
from handrail.models import (
    ModelAnswerBroken,
    ModelKeyMissing,
    ModelRateLimited,
    ModelRequestRefused,
    ModelRequestTooLong,
    ModelUnavailable,
)
from handrail.models.blocks import decode, encode
from handrail.text.secrets import Secrets, replace_secret
from handrail.tools.result import clean_text

if TYPE_CHECKING:
    import aiohttp

    from handrail.models.providers import Key, ModelServer

# --- errors that a provider reports inside an answer ---

_PASSING_IN_ANSWER = frozenset({408, 409, 425})
"""Statuses below 500, apart from 429, after which a retry may help."""
_FAILURES: tuple[tuple[str, type[ModelError]], ...] = (
    ("context_length", ModelRequestTooLong),
    ("insufficient_quota", ModelRequestRefused),
    ("billing", ModelRequestRefused),
    ("rate_limit", ModelRateLimited),
    ("resource_exhausted", ModelRateLimited),
    ("too_many_requests", ModelRateLimited),
    ("tool_use_failed", ModelAnswerBroken),
    ("json_validate_failed", ModelAnswerBroken),
    ("overloaded", ModelUnavailable),
    ("timeout", ModelUnavailable),
    ("unavailable", ModelUnavailable),
    ("server_error", ModelUnavailable),
    ("internal", ModelUnavailable),
    ("invalid", ModelRequestRefused),
    ("authentication", ModelRequestRefused),
    ("permission", ModelRequestRefused),
    ("forbidden", ModelRequestRefused),
    ("not_found", ModelRequestRefused),
    ("too_large", ModelRequestRefused),
    ("policy", ModelRequestRefused),
    ("moderation", ModelRequestRefused),
)
"""Words in a code, status or type, and the errors that they mean. The first that is found counts."""

_TOO_LONG = re.compile(
    r"context[ _](length|window|size)|(prompt|input|request) is too long|too many (input )?tokens|token count .* exceeds|"
    r"exceeds? the (maximum|max) (number of )?(input )?tokens",
    re.IGNORECASE,
)
"""What providers say about a request with more tokens than the model's window."""


def failure_in_answer(endpoint: Endpoint, error: Any) -> ModelError:
    """Create the error for a failure that the provider reported inside an answer, after its response had begun.

    Such a failure has no HTTP status. Its kind is recognised by its code, status or type, which are numbers or words
    depending on the provider. A failure of an unknown kind becomes `ModelUnavailable`, which is retried.
    """
    said = error.get("message") or error if isinstance(error, dict) else error
    kind, status = _failure_kind(error)
    if kind is ModelRequestRefused and _TOO_LONG.search(_shown(said)):
        kind = ModelRequestTooLong
    problem = f"it failed in the middle of its answer: {endpoint.quoted(said)}"
    return kind(endpoint.model, problem, status=status)


def _failure_kind(error: Any) -> tuple[type[ModelError], int | None]:
    marks = list(_marks(error))
    words = " ".join(mark.lower() for mark in marks if isinstance(mark, str) and not mark.isdecimal())
    for word, kind in _FAILURES:
        if word in words:
            return kind, None
    for mark in marks:
        status = int(mark) if isinstance(mark, str) and mark.isdecimal() and len(mark) == 3 else mark
        if type(status) is int and 400 <= status < 600:
            return _by_status(status), status
    return ModelUnavailable, None


def _marks(error: Any) -> Iterator[Any]:
    """Yield the values that identify the kind of an error, beginning with its code."""
    if not isinstance(error, dict):
        return
    for name in ("code", "status", "status_code", "type"):
        value = error.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            yield value
    metadata = error.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("error_type"), str):
        yield metadata["error_type"]


def _by_status(status: int) -> type[ModelError]:
    if status == 429:
        return ModelRateLimited
    return ModelUnavailable if status >= 500 or status in _PASSING_IN_ANSWER else ModelRequestRefused


# --- recorders ---

Send = Callable[[], AbstractAsyncContextManager[Any]]
"""Sends a request. The response is an aiohttp response, or has those of its members that `models/http.py` uses."""


class Recorder(Protocol):
    """Intercepts the requests that models post through an `Endpoint` while it is in use, and may answer them itself."""

    @property
    def replays(self) -> bool:
        """Whether the answers come from a recording, so that no key is needed."""
        ...

    def post(
        self, send: Send, url: str, body: bytes, secrets: Iterable[str]
    ) -> AbstractAsyncContextManager[Any]:
        """Return the response to a request. Calling `send` sends the request to the provider. `secrets` are sent with it."""
        ...


_recorders: list[Recorder] = []


@contextmanager
def recording(recorder: Recorder) -> Generator[None]:
    """Let a recorder intercept the requests of all endpoints in this process. If several are in use, only the newest does."""
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.remove(recorder)


def current_recorder() -> Recorder | None:
    """Return the recorder in use, or None if nothing is recorded or replayed."""
    return _recorders[-1] if _recorders else None


# --- rate limits ---

_RESETS = (
    *("x-ratelimit-reset-requests", "x-ratelimit-reset-tokens"),
    *("anthropic-ratelimit-requests-reset", "anthropic-ratelimit-tokens-reset"),
)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN_PIECE = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", re.ASCII)
_SPAN = re.compile(rf"(?:{_SPAN_PIECE.pattern})+", re.ASCII)
_MOST_DIGITS = 15


def requests_left(headers: Mapping[str, str]) -> int | None:
    """Return how many requests the provider still accepts, or None if no header has a valid number."""
    return _number(
        headers.get("x-ratelimit-remaining-requests") or headers.get("anthropic-ratelimit-requests-remaining")
    )


def tokens_left(headers: Mapping[str, str]) -> int | None:
    """Return how many tokens the provider still accepts, or None if no header has a valid number."""
    return _number(
        headers.get("x-ratelimit-remaining-tokens") or headers.get("anthropic-ratelimit-tokens-remaining")
    )


def resets_at(headers: Mapping[str, str], clock: Clock) -> datetime | None:
    """Return the latest of the times at which the provider's rate limits reset, or None if it sent none."""
    said = [headers[name] for name in _RESETS if name in headers]
    found = [at for each in said if (at := _moment(each, clock)) is not None]
    return max(found, default=None)


def retry_after(headers: Mapping[str, str], body: bytes, clock: Clock) -> float | None:
    """Return how many seconds to wait before the next request, or None if the response gives no valid time."""
    milliseconds = headers.get("retry-after-ms")
    said = headers.get("retry-after")
    try:
        if milliseconds is not None:
            wait = float(milliseconds) / 1000
        elif said is None:
            wait = _retry_delay(body, clock)
        elif said.strip().replace(".", "", 1).isdigit():
            wait = float(said)
        else:
            when = parsedate_to_datetime(said)
            when = when if when.tzinfo else when.replace(tzinfo=UTC)
            wait = max((when - clock.now()).total_seconds(), 0.0)
    except (ValueError, OverflowError):
        return None
    return wait if wait is not None and 0 <= wait < math.inf else None


def _retry_delay(body: bytes, clock: Clock) -> float | None:
    """Return the seconds in the `RetryInfo` of a Google error, such as `"retryDelay": "34.07s"`; None if there are none."""
    if b"retryDelay" not in body:
        return None
    try:
        data: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    first = data[0] if isinstance(data, list) and data else data
    error = first.get("error") if isinstance(first, dict) else None
    details = error.get("details") if isinstance(error, dict) else None
    for detail in details if isinstance(details, list) else ():
        if isinstance(detail, dict) and isinstance(said := detail.get("retryDelay"), str):
            at = _moment(said, clock)
            return None if at is None else (at - clock.now()).total_seconds()
    return None


def _moment(text: str, clock: Clock) -> datetime | None:
    """Parse an ISO 8601 time, or a duration from now such as `6m0s` or `20ms`. Returns None if the string is neither."""
    try:
        if _SPAN.fullmatch(text):
            return clock.now() + sum(
                (
                    timedelta(seconds=float(number) * _UNITS[unit])
                    for number, unit in _SPAN_PIECE.findall(text)
                ),
                timedelta(),
            )
        at = datetime.fromisoformat(text)
        return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) <= _MOST_DIGITS else None


# --- endpoints ---

_LARGE = 1 << 20
"""Size in bytes from which a request body is passed to aiohttp as a file, to be read in chunks."""
_PASSING = frozenset({408, 425, 500, 502, 503, 504, 520, 522, 524, 529})
_SHOWN = frozenset({"content-type", "anthropic-version", "anthropic-beta", "openai-beta", "accept"})
_MOST_SAID = 500
_CONNECT_SECONDS = 30.0
"""Maximum seconds until a connection to a provider is open."""
_LAST_BYTES = 1.0
"""Maximum seconds to wait for the bytes after a stream's last event."""
_BOM = b"\xef\xbb\xbf"
_DONE = b"[DONE]"
"""The data of the event that ends a stream of chat completions."""


Read = Callable[[Any], Iterable[ModelPart]]
"""A function that converts a complete answer, or one event of a stream, to parts."""
_UNEXPECTED = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError)
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)


class Endpoint:
    """The address, headers and key of one model's requests.

    The key is read from the environment and sent with each request. It appears nowhere else: not in a view of the request,
    not in an error, not in a repr. Values of `headers` do not appear there either. Raises `DefinitionError` if the address or a header is invalid. Each request raises
    `DefinitionError` if aiohttp is not installed.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        *,
        keys: tuple[Key, ...],
        key_needed: bool,
        headers: Mapping[str, str] | None = None,
        silence: float = 300.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise DefinitionError(
                f"model {model!r}: {base_url!r} is not a valid address. Write it like 'https://host/v1'."
            )
        if "@" in base_url.removeprefix("https://").removeprefix("http://").split("/", 1)[0]:
            raise DefinitionError(
                f"model {model!r}: its address contains a user name or password, which would be shown with the address. "
                "Remove them, and name an environment variable with the key in `key_variable`."
            )
        if "?" in base_url or "#" in base_url:
            raise DefinitionError(
                f"model {model!r}: its address contains a query or a fragment, but the paths of requests are added to its end. "
                "Remove it, and name an environment variable with the key in `key_variable`, or pass `headers`."
            )
        for name, value in (headers or {}).items():
            if not _fits_header(name + value):
                raise DefinitionError(
                    f"model {model!r}: the header {name!r} contains a control character, such as a line break. Remove it."
                )
        self.model = model
        self._base_url = base_url.rstrip("/")
        self._keys = keys
        self._key_needed = key_needed
        self._headers = {
            "content-type": "application/json",
            **{k.lower(): v for k, v in (headers or {}).items()},
        }
        self._secrets = Secrets.of(
            {}, {name: value for name, value in self._headers.items() if name not in _SHOWN}
        )
        self._silence = silence
        """Seconds without data after which a provider counts as unreachable."""
        self._clock = clock

    @classmethod
    def of(cls, server: ModelServer, headers: Mapping[str, str], silence: float) -> Endpoint:
        """Return the endpoint of a model's server. `headers` come before those that the provider's row names."""
        return cls(
            server.model,
            server.address,
            keys=server.keys,
            key_needed=server.row.needs_key(server.address),
            headers={**server.row.find_headers(), **headers},
            silence=silence,
        )

    def __repr__(self) -> str:
        return f"Endpoint({self.model!r}, {self._base_url!r})"

    # Answers, complete or streamed.

    async def parts(
        self,
        path: str,
        body: bytes,
        *,
        whole: Read | None = None,
        take: Read | None = None,
        done: Callable[[], Iterable[ModelPart]] | None = None,
    ) -> AsyncGenerator[ModelPart]:
        """Send one request, and yield what was sent, then the parts of the answer. The stop reason, if any, is last.

        Pass `whole` to convert a complete answer, or `take` to convert each event of a stream. `done` yields the
        last parts of a stream that ended with `[DONE]` and gave no stop reason. Raises `ModelError` if the request fails or the
        answer can't be converted.
        """
        if whole is not None:
            sent, answer = await self.fetch(path, body)
            yield sent
            try:
                for part in whole(answer):
                    yield _checked(part)
            except ModelError:
                raise
            except _UNEXPECTED:
                raise self.broken("the answer has an unexpected shape", answer) from None
        if take is None:
            return
        stop: StopPart | None = None
        async for event in self.events(path, body):
            if isinstance(event, SentPart):
                yield event
                continue
            if event is not _DONE:
                parts = take(self.decoded(event))
            elif stop is None and done is not None:
                parts = done()
            else:
                break
            try:
                for part in parts:
                    if isinstance(part, StopPart):
                        stop = part
                    else:
                        yield _checked(part)
            except ModelError:
                raise
            except _UNEXPECTED:
                raise self.broken("a part of the answer has an unexpected shape", repr(event)) from None
        if stop is not None:
            yield stop

    async def fetch(self, path: str, body: bytes) -> tuple[SentPart, Any]:
        """Send one request. Returns what was sent, and the complete answer as decoded JSON.

        Raises `ModelError` if the request fails or the answer is not JSON.
        """
        async with self._post(path, body) as response:
            raw = await response.read()
            return self._sent(body, response), self.decoded(raw)

    async def events(self, path: str, body: bytes) -> AsyncGenerator[SentPart | bytes]:
        """Send one request, and yield what was sent, then the data of each event as it arrives, up to `_DONE`.

        Raises `ModelError` if the request fails or the answer is not a stream of events.
        """
        async with self._post(path, body) as response:
            yield self._sent(body, response)
            if "event-stream" not in response.headers.get("content-type", ""):
                came = (await response.read()).decode(errors="replace")
                raise self.broken("the answer is not the stream that was requested", repr(came))
            async for data in _event_data(response.content):
                if data.strip() == _DONE:
                    await _read_out(response)
                    yield _DONE
                    return
                yield data
            await _read_out(response)

    async def get(self, path: str, seconds: float) -> Any:
        """Fetch JSON, and return it decoded. Raises `ModelError` if that fails, or takes longer than `seconds`."""
        client, aiohttp = await _client(), _aiohttp()
        timeout = aiohttp.ClientTimeout(total=seconds)
        at, headers = self._base_url + path, self._with_key()
        try:
            async with client.get(at, headers=headers, timeout=timeout, allow_redirects=False) as response:
                if response.status != 200:
                    raise await self._failure(response)
                return self.decoded(await response.read())
        except (aiohttp.ClientError, TimeoutError):
            problem = f"nothing answers at {self._base_url}"
        raise ModelUnavailable(self.model, problem)

    def quoted(self, said: object, most: int = 300) -> str:
        """Return a provider's message, shortened, and without the key and the values of headers."""
        return self._without_key(_shown(said))[:most]

    def broken(self, what: str, said: object) -> ModelAnswerBroken:
        """Create the error for an answer in an unexpected form. It quotes the beginning of `said`."""
        return ModelAnswerBroken(self.model, f"{what}: {self.quoted(said, 200)}")

    def decoded(self, data: bytes) -> Any:
        """Decode JSON from the provider. Raises `ModelAnswerBroken` if it is invalid."""
        try:
            return decode(data)
        except _UNREADABLE as error:
            raise ModelAnswerBroken(self.model, f"the answer can't be decoded: {error}") from None

    @asynccontextmanager
    async def _post(self, path: str, body: bytes) -> AsyncGenerator[aiohttp.ClientResponse]:
        recorder = current_recorder()
        headers = self._headers if recorder is not None and recorder.replays else self._with_key()
        if started := tracing.outbound(self._base_url):
            headers = {**headers, "traceparent": started}
        client = await _client()
        aiohttp, url = _aiohttp(), self._base_url + path
        data: Any = io.BytesIO(body) if len(body) >= _LARGE else body
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=self._silence)
        failure: ModelError
        try:
            send = partial(
                client.post, url, data=data, headers=headers, timeout=timeout, allow_redirects=False
            )
            async with (
                send()
                if recorder is None
                else recorder.post(send, url, body, self._recorded_secrets()) as response
            ):
                if response.status != 200:
                    raise await self._failure(response)
                yield response
        except ModelError:
            raise
        except aiohttp.ConnectionTimeoutError:
            failure = ModelUnavailable(self.model, f"no connection was made in {_CONNECT_SECONDS:g} seconds")
        except TimeoutError:
            failure = ModelUnavailable(self.model, f"no data arrived for {self._silence:g} seconds")
        except aiohttp.ClientPayloadError:
            failure = ModelAnswerBroken(self.model, "the connection was lost in the middle of the answer")
        except aiohttp.ClientError as error:
            said = self.quoted(getattr(error, "message", "") or error) or type(error).__name__
            failure = ModelUnavailable(self.model, f"it can't be reached: {said}")
        else:
            return
        raise failure from None  # raised outside `except`: aiohttp's error, which may hold the headers, must not become its context

    # Secrets.

    def _recorded_secrets(self) -> tuple[str, ...]:
        """Return what a recording must not contain: the key, and the values of headers whose names suggest a secret.

        The values of other headers may be common words, which would be replaced in the conversation.
        """
        key = next(filter(None, (key.find() for key in self._keys)), "")
        return (key, *Secrets.of(self._headers, {}).values)

    def _with_key(self) -> dict[str, str]:
        for key in self._keys:
            value = key.find()
            if not value:
                continue
            if not _fits_header(value):
                problem = (
                    f"its key is invalid: {key.variable} contains a control character, such as a line break"
                )
                raise ModelRequestRefused(self.model, problem)
            return {**self._headers, key.header: key.prefix + value}
        if self._key_needed:
            raise ModelKeyMissing(self.model, [key.variable for key in self._keys])
        return self._headers

    def _without_key(self, text: str) -> str:
        """Return a message without the keys and the values of headers, because some providers echo them in errors."""
        for value in filter(None, (key.find() for key in self._keys)):
            text = replace_secret(text, value, "[the key]")
        return self._secrets.hide(text)

    # Responses.

    def _sent(self, body: bytes, response: aiohttp.ClientResponse) -> SentPart:
        headers = response.headers
        return SentPart(
            body,
            {name: value if name in _SHOWN else "[redacted]" for name, value in self._headers.items()},
            self._without_key(clean_text(headers.get("x-request-id") or headers.get("request-id") or "")),
            requests_left(headers),
            tokens_left(headers),
            resets_at(headers, self._clock),
        )

    async def _failure(self, response: aiohttp.ClientResponse) -> ModelError:
        raw = await response.read()
        said = self.quoted(_message_in(raw), _MOST_SAID)
        status = response.status
        wait = retry_after(response.headers, raw, self._clock)
        if status == 429:
            return ModelRateLimited(self.model, said, status=status, retry_after=wait)
        if status in _PASSING:
            return ModelUnavailable(self.model, said, status=status, retry_after=wait)
        too_long = status in (400, 413) and _TOO_LONG.search(said)
        return (ModelRequestTooLong if too_long else ModelRequestRefused)(self.model, said, status=status)


def _fits_header(text: str) -> bool:
    return not any(char < " " or char == "\x7f" for char in text)


def _shown(value: object) -> str:
    """Return any value from a provider as text. If Python can't convert it, the text names only its type."""
    try:
        return str(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that can't be shown"


def _checked(part: ModelPart) -> ModelPart:
    """Return a part unchanged. Raises `TypeError` if a text in it is not a string, since a server can send anything."""
    if isinstance(part, TextPart | ThinkingPart):
        texts: tuple[object, ...] = (part.text,)
    elif isinstance(part, CallPart):
        texts = (part.id, part.name, part.arguments)
    else:
        return part
    for text in texts:
        if type(text) is not str:
            raise TypeError
    return part


def _message_in(raw: bytes) -> str:
    """Return the message in a provider's error response. Without one, returns the whole error or response, or says that it is empty."""
    try:
        data: Any = decode(raw)
    except _UNREADABLE:
        return raw.decode(errors="replace").strip() or "the response is empty"
    if isinstance(data, list) and len(data) == 1:
        data = data[0]  # Google sends the error of a stream as a list
    error = data.get("error", data) if isinstance(data, dict) else data
    return _shown(error.get("message") or error if isinstance(error, dict) else error)


async def _event_data(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events, one at a time."""
    rest: list[bytes] = []
    """The pieces of the line whose end has not arrived. A line with a picture is many megabytes long."""
    data: list[bytes] = []
    first = True
    async for chunk in content.iter_any():
        *lines, last = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join([*rest, lines[0]])
            rest.clear()
        rest.append(last)
        for line in lines:
            line = line.removesuffix(b"\r")
            if first:
                line, first = line.removeprefix(_BOM), False
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []
    end = b"".join(rest)
    if end.startswith(b"data:"):
        data.append(end[5:].strip())
    if data:
        yield b"\n".join(data)


async def _read_out(response: aiohttp.ClientResponse) -> None:
    """Wait briefly for the last bytes, because a connection can be reused only if it was read to its end."""
    with contextlib.suppress(TimeoutError, _aiohttp().ClientError):
        async with asyncio.timeout(_LAST_BYTES):
            await response.content.read()


# --- one client per loop ----------------------------------------------------------------------


def _aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError as error:
        raise DefinitionError(
            "models over HTTP need aiohttp, which is not installed. Run `pip install 'handrail[models]'`."
        ) from error
    return aiohttp


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Any, AsyncGenerator[Any]]] = WeakKeyDictionary()


async def _client() -> aiohttp.ClientSession:
    """Return the HTTP client of the running event loop. It is closed with the loop's async generators."""
    loop = asyncio.get_running_loop()
    kept = _clients.get(loop)
    if kept is None:
        forget_closed(_clients)
        keeper = _keep_client()
        kept = _clients[loop] = (await anext(keeper), keeper)
    return kept[0]


async def _keep_client() -> AsyncGenerator[aiohttp.ClientSession]:
    aiohttp = _aiohttp()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), auto_decompress=True, cookie_jar=aiohttp.DummyCookieJar()
    ) as client:
        yield client


# --- the JSON of requests ---

_SMALL = 1 << 15
"""Maximum length of a string whose JSON is cached. Longer strings would take too much memory."""


def text_json(text: str) -> bytes:
    """Encode a string as JSON. Unless the string is long, the result is cached, because prompts are sent repeatedly."""
    return _kept_json(text) if len(text) <= _SMALL else encode(text)


_kept_json = lru_cache(maxsize=64)(encode)


@lru_cache(maxsize=256)
def encoder(encode_message: Callable[..., bytes], *given: Hashable) -> Encode:
    """Return the function that encodes a message with `encode_message`, which gets `given` and the message.

    Equal arguments give the same function, because encoded messages are cached under it.
    """
    return partial(encode_message, *given)


def names_in(messages: Sent[Message], names: Encode) -> frozenset[str]:
    """Return the names that `names` gives for messages, as text separated by commas. Each message is asked for them once."""
    return frozenset(bytes(messages.encoded(names)).decode().split(",")) - {""}


_MOST_TOKENS = 1 << 53
"""Maximum token count. A larger count is the server's mistake."""


def count(value: Any) -> int:
    """Return a token count from a server as an integer from 0 to `_MOST_TOKENS`; 0 if it is not a number."""
    if type(value) is msgspec.Raw:
        value = float(bytes(value))
    return int(min(max(value, 0), _MOST_TOKENS)) if type(value) in (int, float) else 0


def body_of(fields: Mapping[str, Any], **written: tuple[bytes | bytearray, ...]) -> bytes:
    """Build the JSON of a request body from plain values, and from values that are already encoded, each in pieces.

    The pieces are joined only once, because a conversation with attachments can be many megabytes long.
    """
    parts: list[bytes | bytearray] = [encode(fields)[:-1]]
    comma = b"," if fields else b""
    for name, pieces in written.items():
        parts.append(b'%s"%s":' % (comma, name.encode()))
        parts += pieces
        comma = b","
    parts.append(b"}")
    return b"".join(parts)


_NOT_STRICT = frozenset(
    {"allOf", "contains", "default", "dependentRequired", "if", "not", "oneOf", "patternProperties"}
    | {"prefixItems", "propertyNames", "unevaluatedProperties", "uniqueItems"}
)
"""Schema keywords that make a provider's strict mode refuse the whole request."""


def is_strict(schema: Any) -> bool:
    """Return whether a provider's strict mode, which requires every property, can enforce this schema."""
    if isinstance(schema, list):
        return all(is_strict(each) for each in schema)
    if not isinstance(schema, Mapping):
        return True
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and set(properties) != set(schema.get("required", ())):
        return False
    if schema.get("type") == "object" and schema.get("additionalProperties") is not False:
        return False
    if not _NOT_STRICT.isdisjoint(schema) or ("$ref" in schema and len(schema) > 1):
        return False
    return all(is_strict(each) for each in schema.values())
