"""What of a long conversation is sent to the model, so that it fits the model's window.

A conversation only grows. When it nears the window, a `Compaction` names the messages that are sent from then on: whole, as stubs, or not
at all. Until the next one, only new messages are added to them, so that the provider's cache of the beginning stays valid. It is recorded
before the answer that it precedes, like everything that a resumed run has to find again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from handrail.errors import DefinitionError
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    Compaction,
    Message,
    Piece,
    Sent,
    ToolMessage,
    UserMessage,
)
from handrail.models.media import token_bound_of

_PERSONS_SHARE = 0.25
"""The share of the limit for what the person said, newest first. What does not fit becomes stubs."""
_STUBS_SHARE = 0.125
"""The share of the limit for stubs of what the person said. What does not fit either is left out."""
_SHORT = 200
"""Maximum number of characters of a text that a stub keeps. A text that is not longer than twice that stays whole."""
_PER_MESSAGE = 16
"""Upper bound for the tokens that a provider adds to each message, call and result."""


SUMMARY = "[Older messages were left out here, because the conversation outgrew the model's window. A summary of all of it:]\n\n"
"""What the model is told before a summary."""


def pieces_at(compaction: Compaction | None, length: int) -> tuple[Piece, ...]:
    """Return what is sent of the first `length` messages of a conversation, of which this was the last compaction."""
    return (*range(length),) if compaction is None else (*compaction.pieces, *range(compaction.upto, length))


class Effect(NamedTuple):
    """What a compaction has changed, as indices of messages."""

    left_out: list[int]
    """The messages that were sent before, whole or as stubs, and are not sent any more."""
    shortened: list[int]
    """The messages that were sent whole before, and are sent as stubs from now on."""


def effect_of(compaction: Compaction, earlier: Compaction | None) -> Effect:
    """Return what a compaction has changed since the one before it in the same conversation, if there was one."""
    sent = {piece for piece in compaction.pieces if isinstance(piece, int)}
    before = [each for each in pieces_at(earlier, compaction.upto) if isinstance(each, int)]
    left_out = [max(each, ~each) for each in before if each not in sent and ~each not in sent]
    return Effect(left_out, [each for each in before if each >= 0 and ~each in sent])


def stand_in(compaction: Compaction) -> str:
    """Return the summary, or what a function wrote, in place of what is left out; "" if it was only trimmed."""
    texts = (
        ()
        if compaction.by == "trim"
        else [each.text for each in compaction.pieces if not isinstance(each, int)]
    )
    return "\n\n".join(texts).removeprefix(SUMMARY)


def sent_under(compaction: Compaction, messages: Sent[Message]) -> Sent[Message]:
    """Return what is sent of a conversation."""
    sent: Sent[Message] = Sent(message_of(piece, messages) for piece in compaction.pieces)
    for message in messages.since(compaction.upto):
        sent.append(message)
    return sent


def message_of(piece: Piece, messages: Sent[Message]) -> Message:
    """Return the message that a piece stands for."""
    if not isinstance(piece, int):
        return piece
    return messages[piece] if piece >= 0 else stub_of(messages[~piece])


def stub_of(message: Message) -> Message:
    """Return a message of a person or of tools with its long texts shortened, and without its attachments."""
    if isinstance(message, UserMessage):
        return replace(message, text=_short(message.text, message.attachments), attachments=())
    if isinstance(message, ToolMessage):
        return ToolMessage(tuple([_stub(result) for result in message.results]))
    return message


def _stub(result: CallAnswered) -> CallAnswered:
    text = _short(result.text, result.attachments, f" from {result.id}")
    return replace(result, text=text, attachments=())


def _short(text: str, attachments: Collection[Any], whose: str = "") -> str:
    files = f" [{len(attachments)} attachments are left out]" if attachments else ""
    if len(text) <= 2 * _SHORT:
        return f"{text}{files}"
    return f"{text[:_SHORT]} [… {len(text) - _SHORT:,} more characters are left out{whose}]{files}"


def weight_of(message: Message) -> int:
    """Return an upper bound for the tokens of a message. Each byte of a text counts as one, because no tokenizer makes more."""
    if isinstance(message, AssistantMessage):
        calls = sum(len(call.name.encode()) + len(call.arguments.encode()) for call in message.calls)
        made = token_bound_of(message) if message.attachments else 0
        return len(message.text.encode()) + calls + made + _PER_MESSAGE * (1 + len(message.calls))
    if isinstance(message, ToolMessage):
        return sum(
            len(result.text.encode()) + _PER_MESSAGE + sum(each.token_bound for each in result.attachments)
            for result in message.results
        )
    return len(message.text.encode()) + _PER_MESSAGE + sum(each.token_bound for each in message.attachments)


class _Unit:
    """A user message, or an answer of the model together with the results of its calls."""

    __slots__ = ("first", "pieces", "whole")

    def __init__(self, piece: Piece, messages: Sent[Message]) -> None:
        self.first = message_of(piece, messages)
        self.pieces = [piece]
        self.whole = weight_of(self.first)

    def add(self, piece: Piece, messages: Sent[Message]) -> None:
        self.pieces.append(piece)
        self.whole += weight_of(message_of(piece, messages))

    @property
    def is_persons(self) -> bool:
        return isinstance(self.first, UserMessage) and not self.first.by_run

    def stubs(self) -> list[Piece]:
        """Return the pieces with stubs in place of whole messages. What the model said stays whole."""
        is_answer = isinstance(self.first, AssistantMessage)
        return [
            ~piece if isinstance(piece, int) and piece >= 0 and not (is_answer and at == 0) else piece
            for at, piece in enumerate(self.pieces)
        ]

    def results(self, messages: Sent[Message]) -> Iterator[CallAnswered]:
        for piece in self.pieces:
            message = message_of(piece, messages)
            if isinstance(message, ToolMessage):
                yield from message.results


def trimmed(
    pieces: Sequence[Piece],
    messages: Sent[Message],
    *,
    room: int,
    limit: int,
    pinned: Collection[str] = (),
    note: str = "",
) -> tuple[Piece, ...]:
    """Return the pieces that are sent from now on, of those that are sent now. The weights of `room` and `limit` are in bytes.

    The newest unit always stays; stubs take its results' place if it does not fit, but a message of the person stays whole. Before
    older units are considered, these are kept: what the person said, up to its share of the limit; units that opened sections; and the newest result of each pinned tool.
    The rest of the room goes to the newest units, whole or as stubs. What is left out is told in a note at the beginning.
    """
    units = _units(pieces, messages)
    chosen: dict[int, list[Piece]] = {}

    def take(at: int, most: int) -> int:
        """Keep a unit, whole or as stubs, if it has at most this weight, and return its weight; 0 if it was not kept."""
        unit, stubs = units[at], units[at].stubs()
        for kept, weight in (
            (unit.pieces, unit.whole),
            (stubs, sum(weight_of(message_of(each, messages)) for each in stubs)),
        ):
            if weight <= most:
                chosen[at] = kept
                return weight
        return 0

    newest = len(units) - 1
    if units[newest].is_persons:
        room = max(room, units[newest].whole)
    room -= take(newest, room) or take(newest, sum(unit.whole for unit in units))
    seen: set[str] = set()
    for at in range(newest, -1, -1):
        names = {result.name for result in units[at].results(messages)} & set(pinned) - seen
        seen |= names
        if at not in chosen and (names or any(result.shows for result in units[at].results(messages))):
            room -= take(at, room)
    persons, stubs = int(limit * _PERSONS_SHARE), int(limit * _STUBS_SHARE)
    for at in range(newest, -1, -1):
        unit = units[at]
        if at in chosen or not unit.is_persons:
            continue
        if unit.whole <= min(persons, room):
            chosen[at] = unit.pieces
            persons -= unit.whole
            room -= unit.whole
        else:
            persons = 0  # older ones are shorter than newer ones, never longer
            taken = take(at, min(stubs, room))
            stubs -= taken
            room -= taken
    for at in range(newest, -1, -1):
        if at not in chosen and not units[at].is_persons:
            taken = take(at, room)
            if not taken:
                break
            room -= taken
    kept = tuple(piece for at in sorted(chosen) for piece in chosen[at])
    if note or len(chosen) < len(units):
        return (UserMessage(note or _LEFT_OUT, True), *kept)
    return kept


_LEFT_OUT = "[Older messages of this conversation were left out here, because it outgrew the model's window.]"


def _units(pieces: Sequence[Piece], messages: Sent[Message]) -> list[_Unit]:
    units: list[_Unit] = []
    for piece in pieces:
        if isinstance(piece, UserMessage) and piece.by_run:
            continue  # the note of an earlier compaction, which a new one replaces
        if units and isinstance(message_of(piece, messages), ToolMessage):
            units[-1].add(piece, messages)
        else:
            units.append(_Unit(piece, messages))
    return units


def pieces_of(
    returned: Sequence[Message], given: Sequence[Piece], messages: Sent[Message]
) -> tuple[Piece, ...]:
    """Return what a function returned as pieces. Raises `DefinitionError` if it has a message of the model that was not sent before."""
    known: dict[int, Piece] = {
        id(message_of(piece, messages)): piece for piece in given if isinstance(piece, int) and piece >= 0
    }
    equal: dict[Message, Piece] = {}
    pieces: list[Piece] = []
    for number, message in enumerate(returned, 1):
        piece = known.get(id(message))
        if piece is None and not equal:
            equal = {message_of(each, messages): each for each in given}
        piece = equal.get(message) if piece is None else piece
        if piece is not None:
            pieces.append(piece)
        elif isinstance(message, AssistantMessage):
            raise DefinitionError(
                f"message {number} is the model's, and it was changed. Leave it out with the results of its calls, or as it is."
            )
        else:
            pieces.append(message)
    return tuple(pieces)
