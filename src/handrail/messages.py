"""Messages between a run and its model: the conversation, requests, the parts of an answer, and usage.

A conversation is a `Sent[Message]`, which only grows. A *wire* is the request format of a provider. Each message is
encoded once for each wire and kept as bytes, so that the cost of encoding a turn does not grow with the conversation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from datetime import datetime
from decimal import Decimal
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, cast

import msgspec

from handrail.content import Attachment

if TYPE_CHECKING:
    from handrail.schema import Schema
    from handrail.tools import ProviderTool, Tool

T = TypeVar("T")

# --- messages ----------------------------------------------------------------------------------


class CallAsked(msgspec.Struct, frozen=True):
    """One tool call in a model's message, as the model wrote it. It has not been checked yet."""

    id: str
    name: str
    arguments: str
    """The arguments as JSON text, or whatever the model sent instead."""


class Kept(msgspec.Struct, frozen=True):
    """Data that must be sent back to its provider unchanged, such as signed thinking. It is sent only over that provider's wire."""

    wire: str
    """The wire that the data came from, followed by the provider or model if only that one can read it, as in `chat:deepseek`."""
    data: bytes
    has_arguments: bool = True
    """Whether the data may repeat the arguments of the message's calls, so that secrets have to be masked in it."""


class BackgroundEnd(msgspec.Struct, frozen=True):
    """The end of a background run, as the model of the run that began it is told."""

    id: str
    """The id of the background run."""
    agent: str
    """The name of its prompt."""
    end: str
    """How it ended: `done`, `failed` or `cancelled`."""
    text: str
    """Its answer, or its error."""


class UserMessage(msgspec.Struct, frozen=True, tag="user"):
    """A message to the model, from a person, a program, or the run itself."""

    text: str
    by_run: bool = False
    """Whether the run itself wrote the message, for example as advice or to request a correction."""
    attachments: tuple[Attachment, ...] = ()
    """The files that come with the text. A file that the provider does not take is described in words."""
    midway: bool = False
    """Whether a person said it during the run, along with an answer to a question, and not to start the run."""
    ends: tuple[BackgroundEnd, ...] = ()
    """The ends of background runs that the message tells. It then tells nothing else, and is by the run."""


class AssistantMessage(msgspec.Struct, frozen=True, tag="assistant"):
    """A message from the model, with its text and the calls that it requests."""

    text: str = ""
    calls: tuple[CallAsked, ...] = ()
    kept: Kept | None = None
    thought: str = ""
    """The model's thinking before it answered, or a summary of it, and its requests to its provider's own tools.

    It is shown to people, and is not sent back. What a provider requires back is in `kept`.
    """
    attachments: tuple[Attachment, ...] = ()
    """The pictures, sounds and other files that the model made. Their bytes are not repeated in `kept`."""
    offsets: tuple[int, ...] = ()
    """For each attachment, how many characters of the text come before it. An attachment without an offset follows the text."""

    @property
    def parts(self) -> tuple[str | Attachment, ...]:
        """The text and the attachments in the order in which the model gave them. Empty pieces of text are left out."""
        parts: list[str | Attachment] = []
        start = 0
        for attachment, end in zip_longest(self.attachments, self.offsets[: len(self.attachments)]):
            end = len(self.text) if end is None else max(start, end)
            parts += (self.text[start:end], attachment)
            start = end
        return tuple(part for part in (*parts, self.text[start:]) if part != "")


class CallAnswered(msgspec.Struct, frozen=True):
    """The result of one call, as it is sent to the model."""

    id: str
    name: str
    text: str
    failed: bool = False
    shows: tuple[str, ...] = ()
    """The names of the tools that are offered from this message on."""
    attachments: tuple[Attachment, ...] = ()
    """The files that the call returned. A file that the provider does not take is described in words."""
    definitions: str = ""
    """The tools in `shows` as a JSON list of names, descriptions and parameters, if a search has found them."""


class ToolMessage(msgspec.Struct, frozen=True, tag="tool"):
    """The results of one turn: one for each call in the preceding message, in the same order."""

    results: tuple[CallAnswered, ...]

    @property
    def text(self) -> str:
        """The texts of the results, separated by line breaks."""
        return "\n".join(result.text for result in self.results)


Message = UserMessage | AssistantMessage | ToolMessage

Encode = Callable[[Any], bytes]
"""A function that encodes an item as JSON for one wire: one array element, or several separated by commas."""


Between = Callable[[Any, Any], bytes]
"""A function that returns the bytes between the encodings of two items. It may look only at these two."""


class Sent(Generic[T]):
    """An append-only sequence that caches its encoding for each wire.

    `encoded(encode)` joins the items with commas, or with what `between` returns. It keeps the result for each encoder, so that
    only new items have to be encoded later. Encoders are compared by identity, so a wire must use one function for all its
    requests, always with the same `between`.
    """

    __slots__ = ("_encoded", "_items")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = list(items)
        self._encoded: dict[Encode, tuple[int, bytearray]] = {}

    def append(self, item: T) -> None:
        self._items.append(item)

    def encoded(self, encode: Encode, between: Between | None = None) -> bytearray:
        """Return all items, encoded for one wire. This is the cache itself: it grows, and must not be changed.

        `between` returns the separator between two neighbouring items. Without it, they are separated by commas.
        """
        items = self._items
        done, written = self._encoded.get(encode, (0, None))
        if written is None:
            written = bytearray()
        whole = len(written)
        try:
            for at in range(done, len(items)):
                if at:
                    written += b"," if between is None else between(items[at - 1], items[at])
                written += encode(items[at])
        except BaseException:
            del written[whole:]  # otherwise the items before the invalid one would be added twice
            raise
        self._encoded[encode] = (len(items), written)
        return written

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


# --- compaction ---------------------------------------------------------------------------------

Why = Literal["full", "refused", "asked"]
Piece = int | UserMessage | ToolMessage
"""A part of what is sent: the index of a message, or its inverse (`~index`) for a stub of it, or a message that stands for others."""


class Compaction(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is sent of a conversation's first `upto` messages. All later messages are sent whole."""

    upto: int
    pieces: tuple[Piece, ...]
    by: str = "trim"
    """`trim`, `summary`, or the name of the function that decided."""
    tokens: int = 0
    """The number of tokens that were sent before, as far as it is known."""
    why: Why = "full"
    """Whether the window was nearly full, the request was refused as too long, or somebody asked for it."""
    before: Usage | None = None
    """The usage of the last request before it, with what the provider read from its cache and wrote to it; None if unknown."""
    spent: Usage | None = None
    """The usage of the request for a summary; None if there was none, or if the provider did not report it."""

    @property
    def left_out(self) -> int:
        """The number of messages that are not sent at all."""
        return self.upto - sum(isinstance(piece, int) for piece in self.pieces)


# --- the parts of an answer --------------------------------------------------------------------

StopReason = Literal["done", "calls", "length", "refused", "paused", "interrupted"]
"""Why a model stopped: it is done, requests calls, reached the length limit, or refused to answer.

`paused` means that the provider interrupted a long answer, and continues it when it gets the conversation back.
"""


class Usage(msgspec.Struct, frozen=True):
    """The tokens that the provider reported, the number of requests, and the web searches that the provider ran."""

    input: int = 0
    """All input tokens, including those read from or written to the provider's cache."""
    output: int = 0
    cached: int = 0
    """Input tokens read from the provider's cache."""
    cache_writes: int = 0
    """Input tokens written to the provider's cache."""
    requests: int = 0
    searches: int = 0
    """Web searches that the provider ran itself and charges for, if it reports them."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input + other.input,
            self.output + other.output,
            self.cached + other.cached,
            self.cache_writes + other.cache_writes,
            self.requests + other.requests,
            self.searches + other.searches,
        )

    @property
    def tokens(self) -> int:
        """Input and output tokens together."""
        return self.input + self.output


class SentPart(msgspec.Struct, frozen=True):
    """The request was sent. This part holds its body, its headers without secrets, its id, and the remaining rate limit."""

    body: bytes
    headers: dict[str, str]
    request_id: str = ""
    requests_left: int | None = None
    tokens_left: int | None = None
    resets_at: datetime | None = None
    extras: dict[str, Any] = {}
    """Further JSON values for `context.extras` in the calls of the answer, by key."""


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


class AttachmentPart(msgspec.Struct, frozen=True):
    """A picture, a sound or another file that the model made. It is complete."""

    attachment: Attachment


class UsagePart(msgspec.Struct, frozen=True):
    """The usage of the request so far. If there are several such parts, the last one counts."""

    usage: Usage


class StopPart(msgspec.Struct, frozen=True):
    """The answer is complete. A stream that ends without this was cut off."""

    reason: StopReason
    kept: Kept | None = None


ModelPart = SentPart | TextPart | ThinkingPart | AttachmentPart | CallPart | UsagePart | StopPart


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a model answers, apart from its temperature and the length of its answers.

    A setting that is None is left to the model. Nested runs inherit each setting, and may replace it. A request
    with a setting that its provider does not have is refused, because a setting that is silently dropped would seem
    to work.
    """

    effort: str | None = None
    """How much the model thinks before it answers, such as "low" or "high". Each model has its own levels."""
    verbosity: Literal["low", "medium", "high"] | None = None
    service_tier: str | None = None
    """The provider's service tier, such as "flex" or "priority"."""
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    """Texts at which the model stops writing."""
    parallel_calls: bool | None = None
    """Whether the model may request several calls at once."""
    tool_choice: str | None = None
    """"auto", "required", "none", or the name of the tool that the model must call."""
    cache_key: str | None = None
    """A key for requests that begin alike, so that the provider finds their common beginning in its cache more often."""
    cache_ttl: Literal["5m", "1h"] | None = None
    """How long a provider keeps the beginning of a request in its cache."""

    def __post_init__(self) -> None:
        wrong = [name for name in self.chosen() if not _is_setting(name, getattr(self, name))]
        if wrong:
            from handrail.errors import DefinitionError

            raise DefinitionError(
                f"ModelSettings({wrong[0]}={getattr(self, wrong[0])!r}) is invalid. Pass {_SETTINGS[wrong[0]][1]}, or None."
            )

    def chosen(self) -> tuple[str, ...]:
        """Return the names of the settings that are not left to the model."""
        return tuple(name for name in self.__struct_fields__ if getattr(self, name) is not None)

    def over(self, outer: ModelSettings) -> ModelSettings:
        """Return these settings. A setting that is None is taken from `outer`, the settings of an outer run."""
        if outer is DEFAULT_SETTINGS or self is outer:
            return self
        return msgspec.structs.replace(outer, **{name: getattr(self, name) for name in self.chosen()})


_SETTINGS: dict[str, tuple[Any, str]] = {
    "effort": (str, "a level such as 'low'"),
    "verbosity": (("low", "medium", "high"), "'low', 'medium' or 'high'"),
    "service_tier": (str, "the name of a tier"),
    "seed": (int, "an integer"),
    "stop": (tuple, "a non-empty tuple of non-empty strings"),
    "parallel_calls": (bool, "True or False"),
    "tool_choice": (str, "'auto', 'required', 'none' or the name of a tool"),
    "cache_key": (str, "a string"),
    "cache_ttl": (("5m", "1h"), "'5m' or '1h'"),
}
"""The type or the allowed values of each setting, and the words in which errors describe them."""


def _is_setting(name: str, value: Any) -> bool:
    wanted = _SETTINGS[name][0]
    if isinstance(wanted, tuple):
        return value in wanted
    if name == "stop":
        texts = cast("tuple[object, ...]", value if isinstance(value, tuple) else ())
        return bool(texts) and all(type(text) is str and text for text in texts)
    return type(value) is wanted and value != ""


DEFAULT_SETTINGS = ModelSettings()
"""The settings of a run that was given none."""


class Offered(msgspec.Struct, frozen=True):
    """A tool as it is offered to a model."""

    tool: Tool[Any, Any]
    deferred: bool = False
    """Whether a message shows the tool to the model: its section was opened during the conversation, or a search finds it."""
    searched: bool = False
    """Whether the model finds the tool by searching."""


class ModelRequest(msgspec.Struct, frozen=True):
    """One request to a model: the conversation so far, the tools, and the required output."""

    system: str
    messages: Sent[Message]
    tools: Sent[Offered]
    output: Schema[Any] | None = None
    """The schema that the provider enforces on the answer; None if there is none, or if the provider can't enforce it."""
    temperature: float | None = None
    max_tokens: int | None = None
    stream: bool = False
    """Whether to stream the answer while the model writes it."""
    must_call: bool = False
    """Whether the model must answer with a call."""
    settings: ModelSettings = DEFAULT_SETTINGS
    provider_tools: tuple[ProviderTool, ...] = ()
    """The provider's own tools that the model may use. The request is refused if the model's traits lack one of their names."""
    searcher: str = ""
    """The name of the tool with which the model finds deferred tools; "" if there is none."""


class Price(msgspec.Struct, frozen=True):
    """Prices in US dollars per million tokens, unless noted otherwise."""

    input: Decimal
    output: Decimal
    cached: Decimal | None = None
    """Price of input tokens read from the provider's cache; None if they cost the same as other input tokens."""
    cache_writes: Decimal | None = None
    """Price of input tokens written to the provider's cache; None if they cost the same as other input tokens."""
    searches: Decimal | None = None
    """Price of a thousand web searches that the provider runs itself; None if they cost nothing."""


class Takes(msgspec.Struct, frozen=True):
    """The media types of the attachments that a model takes. Every model takes text files, as text."""

    bytes: frozenset[str] = frozenset()
    """Media types that are taken as bytes. `*/*` stands for every type."""
    addresses: frozenset[str] = frozenset()
    """Media types that the provider fetches from an address."""

    def within(self, other: Takes) -> Takes:
        """Return what both this and `other` take."""
        return Takes(_both(self.bytes, other.bytes), _both(self.addresses, other.addresses))

    def sends(self, attachment: Attachment) -> bool:
        """Return whether an attachment is sent as bytes or by its address. A text file is sent as text instead."""
        if attachment.is_text or not (attachment.address or (attachment.is_here and attachment.size)):
            return False
        taken = self.addresses if attachment.address else self.bytes
        return attachment.media_type in taken or "*/*" in taken

    def problem(self, attachment: Attachment) -> str | None:
        """Return why an attachment can't be sent, such as "it takes no audio"; None if it can be sent, as it is or as text."""
        if self.sends(attachment) or attachment.is_text:
            return None
        if not attachment.address and not attachment.is_here:
            return "its bytes are no longer available"
        if not attachment.address and not attachment.size:
            return "it is empty"
        kind, media_type = attachment.kind, attachment.media_type
        if attachment.has_text_type and not attachment.address:
            return "its text is not valid UTF-8"
        if attachment.address and (media_type in self.bytes or "*/*" in self.bytes):
            return f"it takes no {kind} by its address, only as bytes"
        taken = self.bytes | self.addresses
        alike = sorted(each for each in taken if each.partition("/")[0] == media_type.partition("/")[0])
        if kind in ("image", "audio") and alike:
            return f"it takes no {media_type}, only {', '.join(alike)}"
        return f"it takes no {kind if kind in ('image', 'audio') else media_type}"


def _both(these: frozenset[str], those: frozenset[str]) -> frozenset[str]:
    if "*/*" in these:
        return those
    return these if "*/*" in those else these & those


class Traits(msgspec.Struct, frozen=True):
    """The features that a model's provider supports, and the model's price."""

    price: Price | None = None
    """The model's price; None to look it up in the price table."""

    native_output: bool = False
    """Whether the provider can enforce a JSON Schema. If not, an answer that needs a schema is requested as a tool call."""

    takes: Takes = Takes()
    """The attachments that the model takes, as far as that is known."""

    provider_tools: frozenset[str] = frozenset()
    """The names of the provider's own tools that a request can ask for, such as `web_search`."""

    window: int | None = None
    """The number of tokens that a request and its answer can have together; None to look it up in the price table."""

    loads_deferred: bool = False
    """Whether the provider loads deferred tools that the result of a call names, so that a tool search needs no `call_tool`."""


class Model(Protocol):
    """A model: it has a name, traits, and one method that returns a stream of answer parts.

    The stream ends with a `StopPart`, or raises a `ModelError`. Ending it early, by cancellation or
    `aclose()`, closes the connection.
    """

    @property
    def name(self) -> str:
        """The model's name, usually `provider:name`. A choice is named after its models, or after the function that chooses."""
        ...

    @property
    def traits(self) -> Traits: ...

    def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]: ...


def is_model(value: Any) -> bool:
    """Return whether a value has the attributes of a model and is not a class."""
    return not isinstance(value, type) and all(hasattr(value, each) for each in ("name", "traits", "stream"))


def is_choice(model: Model) -> bool:
    """Return whether a model stands for others. This is faster than `isinstance` with a protocol."""
    return hasattr(model, "candidates")
