"""`SecretMask`: masks the arguments that a tool declares as secret, wherever a model wrote them.

The conversation in memory keeps the secrets, since the provider has them already. Everything else gets the
masked form: events, session, journal, and the request that tools can see. Nothing is masked in a run if neither its tools,
its answer nor its conversation can contain a secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import pydantic_core

from handrail.messages import AssistantMessage, CallAsked, CallPart, Kept, Message
from handrail.run.run import Run
from handrail.schema.secrets import WITHHELD

if TYPE_CHECKING:
    from handrail.run.attempt import Attempt
    from handrail.run.conversation import Conversation
    from handrail.tools import Tool


class _Asker(NamedTuple):
    """A minimal stand-in for a call, used to look up a worker."""

    run: Run
    parent: Attempt | None


class SecretMask:
    """The mask of one run, based on the tools that it offers now. Whatever was masked before stays masked."""

    __slots__ = ("_conversation", "_run")

    def __init__(self, run: Run, conversation: Conversation) -> None:
        self._run = run
        self._conversation = conversation

    def message(self, message: Message) -> Message:
        """Return the message with the secrets of its calls masked. Messages without calls are returned as they are.

        The arguments of a call to an unknown tool are withheld, because they could contain secrets.
        """
        if not isinstance(message, AssistantMessage) or not message.calls:
            return message
        calls = self.calls(message.calls)
        if calls == message.calls:
            return message
        kept = self.kept(message.kept, message.calls, calls)
        return msgspec.structs.replace(message, calls=calls, kept=kept)

    def calls(self, calls: tuple[CallAsked, ...]) -> tuple[CallAsked, ...]:
        return tuple([self._call(call) for call in calls])

    def _call(self, call: CallAsked) -> CallAsked:
        tool = self._run.tools.get(call.name) or self._worker(call.name)
        if not tool.secret if tool is not None else call.arguments.strip() in ("", "{}"):
            return call
        shown = WITHHELD if tool is None else tool.mask(call.arguments)
        return CallAsked(call.id, call.name, shown)

    def _worker(self, name: str) -> Tool[Any, Any] | None:
        run = self._run
        return None if run.workers is None else run.workers.find(name, _Asker(run, run.outer))

    def kept(
        self, kept: Kept | None, calls: tuple[CallAsked, ...], shown: tuple[CallAsked, ...]
    ) -> Kept | None:
        """Return the provider's own form of the message, masked; None if there is none, or the arguments can't be found in it."""
        if kept is None or not kept.has_arguments:
            return kept
        swaps = Swaps()
        swaps.add(calls, shown)
        try:
            data = swaps.made_in(pydantic_core.from_json(kept.data))
        except ValueError:
            return None
        return Kept(kept.wire, pydantic_core.to_json(data)) if swaps.all_made else None

    def body(self, body: Any, messages: list[Message]) -> Any:
        """Return a request's body with its secrets masked, whatever the provider's format.

        `messages` are the first messages of the conversation, which the request contains.
        """
        swaps = Swaps()
        for message, shown in zip(messages, self._conversation.shown_since(0), strict=False):
            if isinstance(message, AssistantMessage):
                if isinstance(shown, AssistantMessage) and shown is not message:
                    swaps.add(message.calls, shown.calls)
                else:
                    swaps.add(message.calls, self.calls(message.calls))
        return swaps.made_in(body) if swaps else body

    # Partial calls, during streaming.

    def may_be_seen(self, name: str) -> bool:
        """Return whether the arguments of a partial call may be shown. The name may still be incomplete."""
        tools = self._run.tools
        tool = tools.get(name)
        if tool is None or tool.secret:
            return False
        return not any(each.secret and each.name.startswith(name) for each in tools.values())

    def whole(self, call: _PartialCall) -> str:
        return self._call(CallAsked("", call.name, call.arguments)).arguments


class Swaps:
    """Arguments to replace in plain JSON, both as text and as the object that the text encodes."""

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
        """Whether every text to replace was found."""
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


class _PartialCall(msgspec.Struct):
    name: str = ""
    arguments: str = ""
    seen: int = 0
    """The number of characters of the arguments that have been shown."""


class StreamMask:
    """The calls of one streamed answer. Arguments that may contain secrets are held back until they are complete."""

    __slots__ = ("_calls", "_mask")

    def __init__(self, mask: SecretMask) -> None:
        self._mask = mask
        self._calls: dict[int, _PartialCall] = {}

    def take(self, part: CallPart) -> CallPart:
        """Return a copy of the part with only the arguments that may be shown."""
        call = self._calls.setdefault(part.index, _PartialCall())
        call.name += part.name
        call.arguments += part.arguments
        piece = ""
        if self._mask.may_be_seen(call.name):
            piece, call.seen = call.arguments[call.seen :], len(call.arguments)
        return CallPart(part.index, part.id, part.name, piece)

    def rest(self) -> Iterator[CallPart]:
        """Yield the arguments that were not shown during streaming, masked."""
        for index, call in self._calls.items():
            if not call.seen and call.arguments:
                yield CallPart(index, arguments=self._mask.whole(call))
