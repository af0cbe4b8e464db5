"""What a model wrote, as it may be seen: arguments that a tool declares as secret are masked.

The conversation in memory keeps what the model wrote, since its provider has it already. Everybody else,
and every record, gets what is made here: the events, the session, the journal, and tools that look at the
request which led to them. Where no tool of a run takes secrets, nothing here is ever called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import pydantic_core

from handrail.dispatch.frame import Frame
from handrail.messages import AssistantMessage, CallAsked, CallPart, Kept, Message
from handrail.schema.secrets import WITHHELD

if TYPE_CHECKING:
    from handrail.adapter.conversation import Conversation
    from handrail.dispatch.attempt import Attempt
    from handrail.tools import Tool


class _Asker(NamedTuple):
    """Who looks for a worker, as a call would."""

    frame: Frame
    parent: Attempt | None


class Masking:
    """The masking of one run, by the tools it has at the moment; of what was masked before, as it was then."""

    __slots__ = ("_conversation", "_frame")

    def __init__(self, frame: Frame, conversation: Conversation) -> None:
        self._frame = frame
        self._conversation = conversation

    def message(self, message: Message) -> Message:
        """A message as it may be seen; the same one where nothing in it is secret."""
        if not isinstance(message, AssistantMessage) or not message.calls:
            return message
        calls = self.calls(message.calls)
        if calls == message.calls:
            return message
        return AssistantMessage(message.text, calls, self.kept(message.kept, message.calls, calls))

    def calls(self, calls: tuple[CallAsked, ...]) -> tuple[CallAsked, ...]:
        return tuple([self._call(call) for call in calls])

    def _call(self, call: CallAsked) -> CallAsked:
        tool = self._frame.tools.get(call.name) or self._worker(call.name)
        if not tool.secret if tool is not None else call.arguments.strip() in ("", "{}"):
            return call
        shown = WITHHELD if tool is None else tool.mask(call.arguments)
        return CallAsked(call.id, call.name, shown)

    def _worker(self, name: str) -> Tool[Any, Any] | None:
        frame = self._frame
        return None if frame.workers is None else frame.workers.find(name, _Asker(frame, frame.outer))

    def kept(
        self, kept: Kept | None, calls: tuple[CallAsked, ...], shown: tuple[CallAsked, ...]
    ) -> Kept | None:
        """What a provider wants back, which may have the calls in it once more; None where they can't be found."""
        if kept is None:
            return None
        swaps = Swaps()
        swaps.add(calls, shown)
        try:
            data = swaps.made_in(pydantic_core.from_json(kept.data))
        except ValueError:
            return None
        return Kept(kept.wire, pydantic_core.to_json(data)) if swaps.all_made else None

    def body(self, body: Any, messages: list[Message]) -> Any:
        """The body of a request that had these messages of the conversation, the first ones, on whatever wire."""
        swaps = Swaps()
        for message, shown in zip(messages, self._conversation.shown_since(0), strict=False):
            if isinstance(message, AssistantMessage):
                if isinstance(shown, AssistantMessage) and shown is not message:
                    swaps.add(message.calls, shown.calls)
                else:
                    swaps.add(message.calls, self.calls(message.calls))
        return swaps.made_in(body) if swaps else body

    # While it is written.

    def may_be_seen(self, name: str) -> bool:
        """May the arguments of a call be seen before it is whole? Its name may still grow."""
        tools = self._frame.tools
        tool = tools.get(name)
        if tool is None or tool.secret:
            return False
        return not any(each.secret and each.name.startswith(name) for each in tools.values())

    def whole(self, writing: _Writing) -> str:
        return self._call(CallAsked("", writing.name, writing.arguments)).arguments


class Swaps:
    """Arguments to be replaced in plain JSON: as text, and as the object that the text stands for."""

    __slots__ = ("_found", "_objects", "_texts")

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._objects: list[tuple[Any, Any, str]] = []
        self._found: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._texts)

    def add(self, calls: tuple[CallAsked, ...], shown: tuple[CallAsked, ...]) -> None:
        for call, masked in zip(calls, shown, strict=True):
            if call.arguments != masked.arguments:
                self._texts[call.arguments] = masked.arguments
                try:
                    plain = pydantic_core.from_json(call.arguments)
                except ValueError:
                    continue
                self._objects.append((plain, pydantic_core.from_json(masked.arguments), call.arguments))

    @property
    def all_made(self) -> bool:
        """Was each of them found?"""
        return self._found == self._texts.keys()

    def made_in(self, value: Any) -> Any:
        if isinstance(value, str):
            if value in self._texts:
                self._found.add(value)
                return self._texts[value]
            return value
        if isinstance(value, dict):
            for plain, masked, text in self._objects:
                if value == plain:
                    self._found.add(text)
                    return masked
            return {key: self.made_in(one) for key, one in cast("Mapping[str, Any]", value).items()}
        if isinstance(value, list):
            return [self.made_in(one) for one in cast("list[Any]", value)]
        return value


class _Writing(msgspec.Struct):
    name: str = ""
    arguments: str = ""
    seen: int = 0
    """How much of the arguments was seen."""


class Writing:
    """The calls of one streamed answer: their arguments are seen as they come, or masked when they are whole."""

    __slots__ = ("_calls", "_masking")

    def __init__(self, masking: Masking) -> None:
        self._masking = masking
        self._calls: dict[int, _Writing] = {}

    def take(self, part: CallPart) -> CallPart:
        """What may be seen of one more piece."""
        call = self._calls.setdefault(part.index, _Writing())
        call.name += part.name
        call.arguments += part.arguments
        piece = ""
        if self._masking.may_be_seen(call.name):
            piece, call.seen = call.arguments[call.seen :], len(call.arguments)
        return CallPart(part.index, part.id, part.name, piece)

    def rest(self) -> Iterator[CallPart]:
        """The answer is whole: what was not seen yet, masked."""
        for index, call in self._calls.items():
            if not call.seen and call.arguments:
                yield CallPart(index, arguments=self._masking.whole(call))
