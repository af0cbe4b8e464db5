"""What is said between a run and its model: messages, the parts of an answer, and their cost in tokens.

A conversation is a `Sent[Message]`: it only grows, and what was encoded for a wire once is kept as
bytes, so that a turn costs the same however long the conversation has become.
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
    """One tool call in a model's message, as it was sent: nothing of it has been checked."""

    id: str
    name: str
    arguments: str
    """JSON text, or what the model sent in its place."""


class Kept(msgspec.Struct, frozen=True):
    """What a provider wants back exactly as it was, such as signed thoughts; only its own wire reads it."""

    wire: str
    data: bytes


class UserMessage(msgspec.Struct, frozen=True, tag="user"):
    """What the other side says: a person, a program, or the run itself where it holds a model to its task."""

    text: str
    by_run: bool = False
    """Said by the run itself: advice, or what is to be corrected."""


class AssistantMessage(msgspec.Struct, frozen=True, tag="assistant"):
    """What a model said, and the calls it asked for."""

    text: str = ""
    calls: tuple[CallAsked, ...] = ()
    kept: Kept | None = None


class CallAnswered(msgspec.Struct, frozen=True):
    """The one result of one call."""

    id: str
    name: str
    text: str
    failed: bool = False
    shows: tuple[str, ...] = ()
    """The tools that are offered from here on."""


class ToolMessage(msgspec.Struct, frozen=True, tag="tool"):
    """The results of a turn: one for every call of the message before it, in the same order."""

    results: tuple[CallAnswered, ...]

    @property
    def text(self) -> str:
        """What the results say, one after the other."""
        return "\n".join(result.text for result in self.results)


Message = UserMessage | AssistantMessage | ToolMessage

Encode = Callable[[Any], bytes]
"""Turns one item into the JSON of one wire: one element, or several with commas between them."""


class Sent(Generic[T]):
    """A sequence that only grows, and that keeps what each wire made of it.

    `encoded(encode)` joins the items with commas; an item is encoded once for each encoder. Encoders
    are told apart by identity, so a wire uses one function for all its requests.
    """

    __slots__ = ("_encoded", "_items")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = list(items)
        self._encoded: dict[Encode, tuple[int, bytearray]] = {}

    def append(self, item: T) -> None:
        self._items.append(item)

    def encoded(self, encode: Encode) -> bytes:
        """All items as one wire writes them, commas between."""
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
            del written[whole:]  # else what came before the item at fault would be written again
            raise
        self._encoded[encode] = (len(items), written)
        return bytes(written)

    def since(self, start: int) -> list[T]:
        """The items from this one on."""
        return self._items[start:]

    def copy(self) -> Sent[T]:
        """Another that starts with the same items, and grows by itself."""
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


# --- what an answer is made of -----------------------------------------------------------------

StopReason = Literal["done", "calls", "length", "refused"]
"""Why a model stopped: it was done, it wants calls run, it ran out of room, or it will not answer."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens, as the provider counted them."""

    input: int = 0
    """All that was sent, also what came from the provider's cache."""
    output: int = 0
    cached: int = 0
    """How much of the input came from the provider's cache."""
    cache_writes: int = 0
    """How much of the input was put there."""
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
        """Input and output."""
        return self.input + self.output


class SentPart(msgspec.Struct, frozen=True):
    """The request is on its way: what was sent, without secrets, and what the answer's headers say."""

    body: bytes
    headers: dict[str, str]
    request_id: str = ""
    requests_left: int | None = None
    tokens_left: int | None = None
    resets_at: datetime | None = None


class TextPart(msgspec.Struct, frozen=True):
    """More of the text."""

    text: str


class ThinkingPart(msgspec.Struct, frozen=True):
    """More of what a model says it thinks: shown to whoever watches, never taken for the answer."""

    text: str


class CallPart(msgspec.Struct, frozen=True):
    """A call, or more of one. `index` says which: pieces of one call have the same."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class UsagePart(msgspec.Struct, frozen=True):
    """What the request used; the last one counts."""

    usage: Usage


class StopPart(msgspec.Struct, frozen=True):
    """The answer is whole. A stream that ends without one was cut off."""

    reason: StopReason
    kept: Kept | None = None


ModelPart = SentPart | TextPart | ThinkingPart | CallPart | UsagePart | StopPart


class Offered(msgspec.Struct, frozen=True):
    """A tool as it is offered to a model."""

    tool: Tool[Any, Any]
    deferred: bool = False
    """It was added to a conversation that had begun."""


class ModelRequest(msgspec.Struct, frozen=True):
    """One request to a model: the conversation so far, what it may call, and what it is to answer."""

    system: str
    messages: Sent[Message]
    tools: Sent[Offered]
    output: Schema[Any] | None = None
    """What the answer must be, where the model can be held to it by its provider."""
    temperature: float | None = None
    max_tokens: int | None = None
    stream: bool = False
    """Is somebody there to see the answer while it is written?"""
    must_call: bool = False
    """The answer has to be a call."""


class Price(msgspec.Struct, frozen=True):
    """US dollars for a million tokens."""

    input: Decimal
    output: Decimal
    cached: Decimal | None = None
    """For input that came from the provider's cache; None when it costs what other input does."""


class Traits(msgspec.Struct, frozen=True):
    """What a model's provider can do, and what it takes for it."""

    price: Price | None = None
    """None: look it up in the table of prices."""

    native_output: bool = False
    """It can be held to a JSON Schema; elsewhere the answer is asked for as the call of a tool."""
    defers_tools: bool = False
    """Tools can be added to a running conversation without the loss of its cache."""


class Model(Protocol):
    """A model: one method, a stream of parts.

    The stream ends in a `StopPart`, or raises a `ModelError`. Ending it early, by cancellation or
    `aclose()`, closes the connection.
    """

    @property
    def name(self) -> str:
        """`provider:name`."""
        ...

    @property
    def traits(self) -> Traits: ...

    def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]: ...
