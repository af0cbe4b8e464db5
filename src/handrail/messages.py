"""Messages between a run and its model: the conversation, requests, the parts of an answer, and usage.

A conversation is a `Sent[Message]`, which only grows. Each message is encoded once for each wire and kept as bytes, so
that the cost of encoding a turn does not grow with the conversation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import msgspec

if TYPE_CHECKING:
    from handrail.schema import Schema
    from handrail.tools import Tool

T = TypeVar("T")

# --- messages ----------------------------------------------------------------------------------


class CallAsked(msgspec.Struct, frozen=True):
    """One tool call in a model's message, as the model wrote it. It has not been checked yet."""

    id: str
    name: str
    arguments: str
    """The arguments as JSON text, or whatever the model sent instead."""


class Kept(msgspec.Struct, frozen=True):
    """Data that must be sent back to its provider unchanged, such as signed thinking. Only that provider's wire reads it."""

    wire: str
    data: bytes


class UserMessage(msgspec.Struct, frozen=True, tag="user"):
    """A message to the model, from a person, a program, or the run itself."""

    text: str
    by_run: bool = False
    """Whether the run itself wrote the message, for example as advice or to request a correction."""


class AssistantMessage(msgspec.Struct, frozen=True, tag="assistant"):
    """A message from the model, with its text and the calls that it requests."""

    text: str = ""
    calls: tuple[CallAsked, ...] = ()
    kept: Kept | None = None


class CallAnswered(msgspec.Struct, frozen=True):
    """The result of one call."""

    id: str
    name: str
    text: str
    failed: bool = False
    shows: tuple[str, ...] = ()
    """The names of the tools that are offered from this message on."""


class ToolMessage(msgspec.Struct, frozen=True, tag="tool"):
    """The results of one turn: one for each call in the preceding message, in the same order."""

    results: tuple[CallAnswered, ...]

    @property
    def text(self) -> str:
        """The texts of the results, each on its own line."""
        return "\n".join(result.text for result in self.results)


Message = UserMessage | AssistantMessage | ToolMessage

Encode = Callable[[Any], bytes]
"""A function that encodes an item as JSON for one wire: one array element, or several separated by commas."""


class Sent(Generic[T]):
    """An append-only sequence that caches its encoding for each wire.

    `encoded(encode)` joins the items with commas. Each encoder encodes an item only once. Encoders are compared by
    identity, so a wire must use one function for all its requests.
    """

    __slots__ = ("_encoded", "_items")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = list(items)
        self._encoded: dict[Encode, tuple[int, bytearray]] = {}

    def append(self, item: T) -> None:
        self._items.append(item)

    def encoded(self, encode: Encode) -> bytes:
        """Return all items, encoded for one wire and separated by commas."""
        items = self._items
        done, written = self._encoded.get(encode, (0, None))
        if written is None:
            written = bytearray()
        whole = len(written)
        try:
            for item in items[done:] if done else items:
                if written:
                    written += b","
                written += encode(item)
        except BaseException:
            del written[whole:]  # otherwise the items before the invalid one would be added twice
            raise
        self._encoded[encode] = (len(items), written)
        return bytes(written)

    def since(self, start: int) -> list[T]:
        """Return the items from index `start` to the end."""
        return self._items[start:]

    def copy(self) -> Sent[T]:
        """Return a copy with the same items that grows independently."""
        copied = Sent(self._items)
        copied._encoded = {encode: (done, bytearray(raw)) for encode, (done, raw) in self._encoded.items()}
        return copied

    def __getitem__(self, index: int) -> T:
        return self._items[index]

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._items))

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Sent({self._items!r})"


# --- the parts of an answer --------------------------------------------------------------------

StopReason = Literal["done", "calls", "length", "refused"]
"""Why a model stopped: it is done, requests calls, reached the length limit, or refused to answer."""


class Usage(msgspec.Struct, frozen=True):
    """Token counts as the provider reported them."""

    input: int = 0
    """All input tokens, including those read from or written to the provider's cache."""
    output: int = 0
    cached: int = 0
    """Input tokens read from the provider's cache."""
    cache_writes: int = 0
    """Input tokens written to the provider's cache."""
    requests: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input + other.input,
            self.output + other.output,
            self.cached + other.cached,
            self.cache_writes + other.cache_writes,
            self.requests + other.requests,
        )

    @property
    def tokens(self) -> int:
        """Input and output tokens together."""
        return self.input + self.output


class SentPart(msgspec.Struct, frozen=True):
    """The request was sent. This part holds its body and headers without secrets, its id, and the remaining rate limit."""

    body: bytes
    headers: dict[str, str]
    request_id: str = ""
    requests_left: int | None = None
    tokens_left: int | None = None
    resets_at: datetime | None = None
    extras: dict[str, Any] = {}
    """Further JSON values for `context.extras` in the calls of the answer, by the names of their keys."""


class TextPart(msgspec.Struct, frozen=True):
    """A chunk of the answer's text."""

    text: str


class ThinkingPart(msgspec.Struct, frozen=True):
    """A chunk of the model's thinking. It is shown to people but is never part of the answer."""

    text: str


class CallPart(msgspec.Struct, frozen=True):
    """A call, or a chunk of one. Chunks of the same call have the same `index`."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class UsagePart(msgspec.Struct, frozen=True):
    """The token counts of the request. If there are several such parts, the last one counts."""

    usage: Usage


class StopPart(msgspec.Struct, frozen=True):
    """The answer is complete. A stream that ends without this was cut off."""

    reason: StopReason
    kept: Kept | None = None


ModelPart = SentPart | TextPart | ThinkingPart | CallPart | UsagePart | StopPart


class Offered(msgspec.Struct, frozen=True):
    """A tool as it is offered to a model."""

    tool: Tool[Any, Any]
    deferred: bool = False
    """Whether the tool was added after the conversation had begun."""


class ModelRequest(msgspec.Struct, frozen=True):
    """One request to a model: the conversation so far, the tools, and the required output."""

    system: str
    messages: Sent[Message]
    tools: Sent[Offered]
    output: Schema[Any] | None = None
    """The schema of the answer; None unless the provider can enforce it."""
    temperature: float | None = None
    max_tokens: int | None = None
    stream: bool = False
    """Whether to stream the answer while the model writes it."""
    must_call: bool = False
    """Whether the model must answer with a call."""


class Price(msgspec.Struct, frozen=True):
    """Prices in US dollars per million tokens."""

    input: Decimal
    output: Decimal
    cached: Decimal | None = None
    """Price of input tokens read from the provider's cache; None if they cost the same as other input tokens."""


class Traits(msgspec.Struct, frozen=True):
    """The features that a model's provider supports, and the model's price."""

    price: Price | None = None
    """The model's price; None to look it up in the price table."""

    native_output: bool = False
    """Whether the provider can enforce a JSON Schema. Otherwise the answer is requested as a tool call."""


class Model(Protocol):
    """A model: it has a name, traits, and one method that returns a stream of answer parts.

    The stream ends with a `StopPart`, or raises a `ModelError`. Ending it early, by cancellation or
    `aclose()`, closes the connection.
    """

    @property
    def name(self) -> str:
        """The model's name in the form `provider:name`."""
        ...

    @property
    def traits(self) -> Traits: ...

    def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]: ...
