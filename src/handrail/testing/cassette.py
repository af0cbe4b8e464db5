"""`Cassette`: records the HTTP requests to models and their answers, and replays the answers without a network or a key."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import re
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote, quote_plus

import msgspec

from handrail.models.http import Send, recording

SCRUBBED = "[secret]"
"""The text that replaces a secret."""
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{4,}={0,2}")
_ESCAPE = re.compile(r"%[0-9A-F]{2}")


@dataclass(frozen=True)
class Secret:
    """A secret string. It is found as plain text, escaped in JSON, percent-encoded, and inside base64."""

    text: str

    def replaced_in(self, text: str) -> str:
        """Return `text` with `[secret]` in place of every occurrence of the secret, in any of its forms."""
        for form in self._forms:
            text = text.replace(form, SCRUBBED)
        return _BASE64.sub(lambda found: self._replaced_in_base64(found[0]), text)

    @cached_property
    def _forms(self) -> list[str]:
        """The forms of the secret in text, the longest first, since one form can contain another."""
        escaped = [form for once in _json_forms(self.text) for form in (once, *_json_forms(once))]
        in_urls = [quote(self.text, safe=""), quote(self.text), quote_plus(self.text)]
        in_urls += [_ESCAPE.sub(lambda found: found[0].lower(), form) for form in in_urls]
        return sorted({self.text, *escaped, *in_urls}, key=lambda form: (-len(form), form))

    def _replaced_in_base64(self, run: str) -> str:
        """Return a run of base64 characters with the secret replaced in the bytes that it encodes.

        The bytes may begin at any of the first four characters, because other base64 characters may stand before them.
        """
        bare = run.rstrip("=")
        for start in range(4):
            found = _decoded(bare[start:])
            if self.text.encode() in found:
                clean = base64.b64encode(found.replace(self.text.encode(), SCRUBBED.encode())).decode()
                return bare[:start] + (clean if run != bare else clean.rstrip("="))
        return run


def _json_forms(text: str) -> list[str]:
    """Return the forms that `text` can have in a JSON string. Some servers also escape slashes."""
    forms = [json.dumps(text, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)]
    return [*forms, *(form.replace("/", "\\/") for form in forms)]


def _decoded(text: str) -> bytes:
    """Decode base64 without padding. Returns b"" if it is invalid. A last character that encodes no byte is ignored."""
    whole = text[:-1] if len(text) % 4 == 1 else text
    try:
        return base64.b64decode(
            whole + "=" * (-len(whole) % 4), altchars=b"-_" if "-" in whole or "_" in whole else None
        )
    except (binascii.Error, ValueError):
        return b""


# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Requests and answers are JSON data, whose types are not known.


Mode = Literal["auto", "record", "replay"]

_KEPT_HEADERS = ("content-type", "retry-after", "retry-after-ms", "x-request-id", "request-id")
_KEPT_PREFIXES = ("x-ratelimit-", "anthropic-ratelimit-")
_VERSION = 1
_SHORTEST_SECRET = 4
_SHOWN = 60
"""Maximum number of characters of a value that an error shows."""


class CassetteError(AssertionError):
    """Raised if a recording can't be made or used, or if the requests are not the recorded ones."""


class Response(msgspec.Struct, omit_defaults=True):
    """A provider's response."""

    status: int = 200
    headers: dict[str, str] = {}
    body: list[str] = []
    """The body as text, line by line, so that a changed recording is easy to read in a diff."""
    base64: str = ""
    """The body in base64, if it is not valid UTF-8; otherwise ""."""
    ending: Literal["complete", "cut", "silent"] = "complete"
    """Whether the body was complete, the connection was lost, or the application stopped waiting."""
    error: str = ""
    """Why there is no response at all; "" if there is one."""

    def data(self) -> bytes:
        return base64.b64decode(self.base64) if self.base64 else "".join(self.body).encode()


class Exchange(msgspec.Struct):
    """One request and its response."""

    url: str
    request: Any
    response: Response


class _File(msgspec.Struct):
    version: int
    exchanges: list[Exchange]


class Cassette:
    """Records models' HTTP traffic to a file, and replays it: `with Cassette("tests/weather.json"): ...`.

    With the mode "auto", a file that exists is replayed, and otherwise a new one is recorded. If `CI` is set, as on a
    build server, a missing file raises `CassetteError` instead. The environment variable `HANDRAIL_CASSETTES`
    (`record` or `replay`) overrides "auto".

    Keys are not written to the file, nor are the `secrets`, which are replaced wherever they occur. A request gets the
    answer to the first equal recorded request that was not used yet, so concurrent requests may come in any order. A
    request that was not recorded raises `CassetteError`, which names its first difference from a recorded request, if
    one is left. Later requests that were not recorded raise the same error, because they may differ in consequence. If a
    recorded request is not made, the end of the block raises `CassetteError`, unless the block, or the test whose fixture the
    block is in, has failed already. If a request contains something that changes, such as the time, pass `normalise`, which gets the
    request as JSON data and returns what to record and compare.

    Bridged models are not recorded, because they use HTTP clients of their own. The constructor raises `CassetteError` if a
    secret has fewer than four characters. The end of a recording raises it, and writes nothing, if an answer contains a secret
    that is split over several events.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: Mode = "auto",
        secrets: Iterable[str] = (),
        normalise: Callable[[Any], Any] | None = None,
    ) -> None:
        self.path = Path(path)
        self._mode: Mode = mode
        self._secrets = set[Secret]()
        self._normalise = normalise
        for secret in secrets:
            self._hide(secret, strict=True)
        self._exchanges: list[Exchange] = []
        self._left: list[Exchange] = []
        self._made = 0
        self._mismatch = ""
        """The message about the first request that was not recorded; "" if there is none."""
        self._last_error: object = None
        self._stack = ExitStack()
        self._replays = False

    @property
    def replays(self) -> bool:
        """Whether the answers come from the file. This is decided when the cassette is entered."""
        return self._replays

    def __enter__(self) -> Self:
        self._replays = self._decide()
        self._exchanges, self._made = (self._load() if self._replays else []), 0
        self._left, self._mismatch = list(self._exchanges), ""
        self._last_error = _last_error()
        self._stack.enter_context(recording(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._stack.close()
        before, self._last_error = self._last_error, None
        has_failed = _last_error() not in (None, before)
        if not self._replays:
            self._save()
        elif self._left and kind is None and not has_failed:
            first = self._left[0]
            raise CassetteError(
                self._mismatch
                or f"{self.path} has {len(self._exchanges)} recorded requests, of which {len(self._left)} were not made. "
                f"The first of them is request {self._exchanges.index(first) + 1}, to {first.url}. {self._advice()}"
            )

    def _decide(self) -> bool:
        mode = self._mode
        if mode == "auto":
            chosen = os.environ.get("HANDRAIL_CASSETTES", "")
            if chosen not in ("", "auto", "record", "replay"):
                raise CassetteError(f"HANDRAIL_CASSETTES is {chosen!r}. Use 'auto', 'record' or 'replay'.")
            if chosen in ("record", "replay"):
                return chosen == "replay"
            return self.path.exists() or bool(os.environ.get("CI"))
        return mode == "replay"

    # --- requests -----------------------------------------------------------------------------

    def post(self, send: Send, url: str, body: bytes, secrets: Iterable[str]) -> Any:
        """Answer a request from the file, or send it and record the answer.

        Raises `CassetteError` if the answers come from the file, and the file has no equal request left.
        """
        self._made += 1
        for secret in secrets:
            self._hide(secret)
        request = self._scrubbed(msgspec.json.decode(body))
        if self._normalise is not None:
            request = self._normalise(request)
        url = self._without_secrets(url)
        if self._replays:
            return _replayed(self._find(url, request).response)
        return self._recorded(send, url, request)

    @asynccontextmanager
    async def _recorded(self, send: Send, url: str, request: Any) -> AsyncGenerator[Any]:
        import aiohttp

        exchange = Exchange(url, request, Response())
        self._exchanges.append(exchange)
        response = exchange.response
        taped: _Taped | None = None
        try:
            async with send() as answer:
                response.status = answer.status
                response.headers = {
                    name.lower(): self._without_secrets(value)
                    for name, value in answer.headers.items()
                    if name.lower() in _KEPT_HEADERS or name.lower().startswith(_KEPT_PREFIXES)
                }
                taped = _Taped(answer.content)
                yield _Answer(response.status, answer.headers, taped)
        except aiohttp.ClientError as error:
            if taped is not None:
                response.ending = "cut"
            else:
                response.error = self._without_secrets(str(error)) or type(error).__name__
            raise
        except (asyncio.CancelledError, GeneratorExit, TimeoutError):
            response.ending = "silent"
            raise
        finally:
            _put_body(response, self._without_secrets_in(b"" if taped is None else bytes(taped.data)))

    def _find(self, url: str, request: Any) -> Exchange:
        for number, each in enumerate(self._left):
            if each.url == url and each.request == request:
                return self._left.pop(number)
        self._mismatch = self._mismatch or self._problem(url, request)
        raise CassetteError(self._mismatch)

    def _problem(self, url: str, request: Any) -> str:
        if not self._left:
            return (
                f"request {self._made} to {url} is not in {self.path}: all of its {len(self._exchanges)} recorded "
                f"requests were already answered. {self._advice()}"
            )
        nearest = next((each for each in self._left if each.url == url), self._left[0])
        number = self._exchanges.index(nearest) + 1
        where, recorded, made = _difference(
            {"url": nearest.url, "body": nearest.request}, {"url": url, "body": request}
        )
        return (
            f"request {self._made} is not in {self.path}. Its first difference from recorded request {number} is at "
            f"{where}: recorded {recorded}, now {made}. {self._advice()}"
        )

    def _advice(self) -> str:
        return (
            "If this change is intended, record it again: run the test with HANDRAIL_CASSETTES=record and the provider's "
            "key set, in the mode 'auto'."
        )

    # --- the file -----------------------------------------------------------------------------

    def _load(self) -> list[Exchange]:
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=_File)
        except FileNotFoundError:
            raise CassetteError(
                f"there is no recording {self.path}, and none may be made now. Run the test with "
                "HANDRAIL_CASSETTES=record and the provider's key set, in the mode 'auto'."
            ) from None
        except msgspec.MsgspecError as error:
            raise CassetteError(
                f"{self.path} is not a recording: {error}. Delete it and record it again."
            ) from None
        if found.version != _VERSION:
            raise CassetteError(
                f"{self.path} has the format {found.version}, but this version of Handrail reads {_VERSION}. Record it again."
            )
        return found.exchanges

    def _save(self) -> None:
        """Write the recording to a new file, and then replace the old one. Without any traffic, nothing is written.

        Raises `CassetteError` if an answer contains a secret in several pieces.
        """
        if not self._exchanges:
            return
        for number, each in enumerate(self._exchanges, 1):
            if any(self._without_secrets(text) != text for text in _joined(each.response.data())):
                raise CassetteError(
                    f"{self.path} was not written: the answer to request {number} contains a secret in several pieces, "
                    "which can't be replaced. Change the prompt so that the model does not repeat it."
                )
        file = msgspec.json.format(msgspec.json.encode(_File(_VERSION, self._exchanges)), indent=1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        new.write_bytes(file + b"\n")
        new.replace(self.path)

    # --- secrets ------------------------------------------------------------------------------

    def _hide(self, secret: str, *, strict: bool = False) -> None:
        if len(secret) >= _SHORTEST_SECRET:
            self._secrets.add(Secret(secret))
        elif strict:
            raise CassetteError(
                f"a secret of {len(secret)} characters can't be found reliably in a recording. "
                f"Use secrets of at least {_SHORTEST_SECRET} characters."
            )

    def _without_secrets(self, text: str) -> str:
        for secret in sorted(self._secrets, key=lambda each: len(each.text), reverse=True):
            text = secret.replaced_in(text)
        return text

    def _without_secrets_in(self, data: bytes) -> bytes:
        return self._without_secrets(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")

    def _scrubbed(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._without_secrets(value)
        if isinstance(value, list):
            return [self._scrubbed(each) for each in value]
        if isinstance(value, dict):
            return {self._without_secrets(name): self._scrubbed(each) for name, each in value.items()}
        return value


def _last_error() -> object:
    """Return the last error that nothing has handled. Pytest notes the error of a test there before the test's fixtures end."""
    return getattr(sys, "last_value", None)


# --- responses ------------------------------------------------------------------------------------


class _Content:
    """The body of a recorded response."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self._is_read = False

    async def iter_any(self) -> AsyncIterator[bytes]:
        if not self._is_read:
            self._is_read = True
            data = self._response.data()
            if data:
                yield data
        await _end(self._response.ending)

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.iter_any()])


class _Taped:
    """The body of a real response, which records what is read from it."""

    def __init__(self, content: Any) -> None:
        self._content = content
        self.data = bytearray()
        """The bytes so far."""

    async def iter_any(self) -> AsyncIterator[bytes]:
        async for chunk in self._content.iter_any():
            self.data += chunk
            yield chunk

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.iter_any()])


class _Answer:
    """The members of an aiohttp response that the models use."""

    def __init__(self, status: int, headers: Mapping[str, str], content: _Content | _Taped) -> None:
        self.status = status
        self.headers = headers
        self.content = content

    async def read(self) -> bytes:
        return await self.content.read()


@asynccontextmanager
async def _replayed(response: Response) -> AsyncGenerator[_Answer]:
    import aiohttp

    if response.error:
        raise aiohttp.ClientConnectionError(response.error)
    yield _Answer(response.status, response.headers, _Content(response))


async def _end(ending: str) -> None:
    import aiohttp

    if ending == "cut":
        raise aiohttp.ClientPayloadError("the recorded connection was lost here")
    if ending == "silent":
        await asyncio.Event().wait()


def _put_body(response: Response, data: bytes) -> None:
    try:
        response.body = data.decode().splitlines(keepends=True)
    except UnicodeDecodeError:
        response.base64 = base64.b64encode(data).decode()


def _joined(data: bytes) -> Iterable[str]:
    """Join the strings that a stream's events have at the same place, and return the joined strings.

    Events with an index, such as the pieces of several calls, are joined by index too.
    """
    texts: dict[str, str] = {}
    for line in data.decode(errors="replace").splitlines():
        if not line.startswith("data:"):
            continue
        try:
            event: Any = msgspec.json.decode(line[5:])
        except (msgspec.DecodeError, RecursionError):
            continue
        for where, index, text in _leaves(event):
            for place in {where, f"{where} {index}"}:
                texts[place] = texts.get(place, "") + text
    return texts.values()


def _leaves(value: Any, where: str = "", index: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield each string in an event, with its place and the indexes around it."""
    if isinstance(value, str):
        yield where, index, value
    elif isinstance(value, dict):
        index += "".join(f" {value[name]}" for name in ("index", "output_index") if name in value)
        for name, each in value.items():
            yield from _leaves(each, f"{where}.{name}", index)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _leaves(each, f"{where}[{number}]", index)


# --- differences ----------------------------------------------------------------------------------


def _difference(recorded: Any, made: Any, where: str = "") -> tuple[str, str, str]:
    """Return the place of the first difference between two values that differ, and both values there."""
    if isinstance(recorded, dict) and isinstance(made, dict):
        for name in [*recorded, *(each for each in made if each not in recorded)]:
            place = f"{where}.{name}" if where else str(name)
            if name not in made:
                return place, _shown(recorded[name]), "nothing"
            if name not in recorded:
                return place, "nothing", _shown(made[name])
            if recorded[name] != made[name]:
                return _difference(recorded[name], made[name], place)
    if isinstance(recorded, list) and isinstance(made, list):
        for number, (old, new) in enumerate(zip(recorded, made, strict=False)):
            if old != new:
                return _difference(old, new, f"{where}[{number}]")
        place = f"{where}[{min(len(recorded), len(made))}]"
        longer = recorded if len(recorded) > len(made) else made
        shown = _shown(longer[min(len(recorded), len(made))])
        return (place, shown, "nothing") if longer is recorded else (place, "nothing", shown)
    if isinstance(recorded, str) and isinstance(made, str):
        pairs = enumerate(zip(recorded, made, strict=False))
        differs = next((number for number, (old, new) in pairs if old != new), min(len(recorded), len(made)))
        start = max(0, differs - _SHOWN // 2)
        return where, _shown(recorded[start:]), _shown(made[start:])
    return where, _shown(recorded), _shown(made)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"
