"""Conversations: the messages between runs and a model, in a form that every provider accepts, and the mask for secrets in them.

The conversation in memory keeps the secrets, since the provider has them already. Everything else gets the
masked form: events, session, journal, and the request that tools can see. Nothing is masked in a run if neither its tools,
its answer nor its conversation can contain a secret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import ref

import msgspec
import pydantic_core

from handrail.content import Attachment
from handrail.errors import ConversationBusy, DefinitionError
from handrail.events import ConversationCompacted, MessageAdded, SectionOpened
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    CallAsked,
    CallPart,
    Compaction,
    Kept,
    Message,
    Piece,
    Sent,
    ToolMessage,
    UserMessage,
)
from handrail.run.compaction import pieces_at, sent_under
from handrail.run.run import Run
from handrail.run.search import stands_for_another, unwrapped
from handrail.schema.problems import describe_kind
from handrail.schema.secrets import WITHHELD
from handrail.session import Session
from handrail.tools.result import clean_text

if TYPE_CHECKING:
    from handrail.run.call import Attempt
    from handrail.tools import Tool


ROOT = "root"
"""The key of a session's root conversation, which later evaluations on the session continue."""

_INTERRUPTED = (
    "This call was interrupted, and its outcome is unknown. Find out what it did before you repeat it."
)


NO_MESSAGE = "Do what the instructions say."
"""The user message of a run that was given neither a message nor attachments, because its prompt says everything."""


def first_text(message: str | None, attachments: Sequence[Attachment]) -> str:
    """Return the text of a run's first message. Without a message, it is "" if there are attachments, or else `NO_MESSAGE`."""
    return message if message is not None else "" if attachments else NO_MESSAGE


class Conversation:
    """The messages of one conversation in a session.

    - It is well-formed whenever it is sent: each call in a model's message has exactly one result in the next
      message, and ids are unique in the session.
    - It only grows. The session's log of `MessageAdded` is the record; this is the working copy.
    """

    __slots__ = (
        *("__weakref__", "_ids", "_session", "_shown"),
        *("busy", "compaction", "key", "masks", "messages", "opened", "sent"),
    )

    def __init__(self, session: Session, key: str) -> None:
        self.key = key
        self._session = ref(session)  # weak, because the session owns its conversations
        self.busy = False
        self.messages: Sent[Message] = Sent()
        self.sent = self.messages
        """What of the messages is sent: all of them, until the conversation is compacted."""
        self.compaction: Compaction | None = None
        """The newest compaction; None if everything is sent."""
        self._shown: dict[int, Message] = {}
        """Messages with secrets, by index, in the masked form that others may see."""
        self.masks = False
        """Whether the conversation contains a secret that others may not see."""
        self._ids = session.call_ids
        self.opened: list[str] = []
        """The sections that a model has opened in this conversation, in order."""

    def load(self) -> None:
        """Load this conversation from the session's log, and note the call ids in all conversations of the session."""
        session = self._of()
        for fact in session[MessageAdded].all():
            if fact.conversation == self.key:
                self.messages.append(fact.message)
            if isinstance(fact.message, AssistantMessage):
                self._ids.update((call.id, 1) for call in fact.message.calls)
        compactions = session[ConversationCompacted].where(lambda fact: fact.conversation == self.key)
        for last in [*compactions][-1:]:
            self._send(last.compaction)
        for opened in session[SectionOpened].where(lambda fact: fact.conversation == self.key):
            self.opened.append(opened.path)

    def add(
        self, message: Message, run_id: str, *, again: bool = False, shown: Message | None = None
    ) -> None:
        """Add a message. In user and tool messages, lone surrogates are replaced, since no provider accepts them.

        `again` means that the run is being replayed: the message is added but not published. `shown` is the form
        that others may see and that is recorded, if it differs from the message itself.
        """
        if shown is None or shown is message:
            shown = message = _sendable(message)
        else:
            self._shown[len(self.messages)] = shown
            self.masks = True
        self.messages.append(message)
        if self.sent is not self.messages:
            self.sent.append(message)
        session = self._of()
        (session.keep if again else session.record)(MessageAdded(self.key, shown, run_id))

    @property
    def is_to_be_compacted(self) -> bool:
        """Whether somebody has asked for the conversation to be compacted before the next request."""
        return self._of().is_to_be_compacted and self.key == ROOT

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What is sent, as the parts of a compaction."""
        return pieces_at(self.compaction, len(self.messages))

    def compact(self, compaction: Compaction, run_id: str, *, again: bool = False) -> None:
        """Send from now on what a compaction names, and what is added after it."""
        self._send(compaction)
        session = self._of()
        (session.keep if again else session.record)(ConversationCompacted(self.key, compaction, run_id))

    def _send(self, compaction: Compaction) -> None:
        self.compaction = compaction
        self.sent = sent_under(compaction, self.messages)

    def shown_since(self, start: int) -> list[Message]:
        """Return the messages from index `start` on, in the form in which they may be seen and recorded."""
        shown = self._shown
        return [shown.get(at, message) for at, message in enumerate(self.messages.since(start), start)]

    def open_section(self, path: str, run_id: str, *, again: bool = False) -> None:
        """Record that a section is shown in full from now on. With `again`, listeners already know it and are not told."""
        self.opened.append(path)
        session = self._of()
        (session.keep if again else session.record)(SectionOpened(self.key, path, run_id))

    def _of(self) -> Session:
        session = self._session()
        assert session is not None, "the session is alive while it is evaluated"
        return session

    def close_calls(self, run_id: str) -> None:
        """Add a result for each call that has none because an earlier run was interrupted."""
        last = self.messages[-1] if len(self.messages) else None
        if isinstance(last, AssistantMessage) and last.calls:
            left = tuple(CallAnswered(call.id, call.name, _INTERRUPTED, True) for call in last.calls)
            self.add(ToolMessage(left), run_id)

    def fresh_ids(self, calls: tuple[CallAsked, ...]) -> tuple[CallAsked, ...]:
        """Return the calls with unique ids, since some providers omit or repeat ids."""
        taken = self._ids
        if len(calls) == 1 and calls[0].id and calls[0].id not in taken:
            taken[calls[0].id] = 1
            return calls
        renamed: list[CallAsked] = []
        for call in calls:
            id, stem = call.id, call.id or self._stem()
            while not id or id in taken:
                number = taken[stem] = taken.get(stem, 0) + 1
                id = f"{stem}-{number}"
            taken[id] = 1
            renamed.append(call if id == call.id else CallAsked(id, call.name, call.arguments))
        return tuple(renamed)

    def _stem(self) -> str:
        """Return the prefix of generated ids.

        It differs between sessions, because several sessions may use one folder, whose history contains call ids. It also
        differs between conversations: a replayed run skips finished conversations, and must generate the
        same ids without them.
        """
        stem = f"call-{''.join(filter(str.isalnum, self._of().id))[:8]}"
        return stem if self.key == ROOT else f"{stem}-{hashlib.sha256(self.key.encode()).hexdigest()[:8]}"

    def begin_with(
        self, history: Iterable[Message], run_id: str, shown: Callable[[Message], Message] | None = None
    ) -> None:
        """Begin the conversation with messages from elsewhere.

        Raises `DefinitionError` if it has already begun, or if the messages are not well-formed.
        """
        said = list(history)
        if said and len(self.messages):
            raise DefinitionError(
                f"the conversation {self.key!r} of session {self._of().id!r} has already begun. "
                "Pass `history` with a new session."
            )
        check_well_formed(said)
        calls: tuple[CallAsked, ...] = ()
        for message in map(sendable, said):
            if isinstance(message, AssistantMessage):
                calls = self.fresh_ids(message.calls)
                message = msgspec.structs.replace(message, calls=calls)
            elif isinstance(message, ToolMessage):
                results = zip(message.results, calls, strict=True)
                message = ToolMessage(
                    tuple(msgspec.structs.replace(result, id=call.id) for result, call in results)
                )
            self.add(message, run_id, shown=None if shown is None else shown(message))

    def __enter__(self) -> Conversation:
        session = self._of()
        with session.lock:  # several threads, each with its own loop, may use the session
            if self.busy:
                raise ConversationBusy(session.id, self.key)
            self.busy = True
        return self

    def __exit__(self, *error: object) -> None:
        self.busy = False


def _sendable(message: Message) -> Message:
    """Replace lone surrogates, which file names can contain, in the text of a user or tool message, and return the message."""
    if isinstance(message, AssistantMessage):
        return message  # an answer is already valid text
    if not isinstance(message, ToolMessage):
        return (
            message
            if message.text.isascii()
            else msgspec.structs.replace(message, text=clean_text(message.text))
        )
    for result in message.results:
        if not result.text.isascii():
            return ToolMessage(
                tuple([msgspec.structs.replace(each, text=clean_text(each.text)) for each in message.results])
            )
    return message


def sendable(message: Message) -> Message:
    """Return a message from elsewhere with its lone surrogates replaced, since they can neither be sent nor recorded."""
    if isinstance(message, AssistantMessage):
        calls = [
            CallAsked(clean_text(call.id), clean_text(call.name), clean_text(call.arguments))
            for call in message.calls
        ]
        return msgspec.structs.replace(
            message, text=clean_text(message.text), calls=tuple(calls), thought=clean_text(message.thought)
        )
    if isinstance(message, ToolMessage):
        named = [
            msgspec.structs.replace(result, id=clean_text(result.id), name=clean_text(result.name))
            for result in message.results
        ]
        message = ToolMessage(tuple(named))
    return _sendable(message)


def check_well_formed(messages: Iterable[Message]) -> None:
    """Raise `DefinitionError` unless all items are messages and calls are directly followed by their results.

    There must be one result for each call, in the same order, and no other results.
    """
    open_calls: list[str] | None = None
    for number, message in enumerate(messages, 1):
        if not isinstance(message, UserMessage | AssistantMessage | ToolMessage):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
            raise DefinitionError(
                f"message {number} is {describe_kind(message)}. "
                "A history consists of UserMessage, AssistantMessage and ToolMessage."
            )
        if isinstance(message, ToolMessage):
            if open_calls != [result.id for result in message.results]:
                raise DefinitionError(
                    f"the results in message {number} do not match the calls in the message before it. "
                    "Give one result for every call, in the same order."
                )
            open_calls = None
            continue
        if open_calls:
            raise DefinitionError(
                f"message {number} comes before the results of the calls {', '.join(open_calls)}. "
                "Put a ToolMessage with one result for every call before it."
            )
        open_calls = [call.id for call in message.calls] if isinstance(message, AssistantMessage) else None
        open_calls = open_calls or None
    if open_calls:
        raise DefinitionError(f"the calls {', '.join(open_calls)} have no results. End with a ToolMessage.")


def root_conversation(session: Session) -> Conversation:
    """Return a session's root conversation, fully loaded. All callers share one object."""
    with session.lock:
        conversation: Conversation | None = session.root
        if conversation is None:
            conversation = Conversation(session, ROOT)
            if not session.is_new:
                conversation.load()
            session.root = conversation
    return conversation


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
        if stands_for_another(call.name, self._run.tools):
            inner = unwrapped(call, self._run.tools)
            is_known = inner is not call and self._call(inner) is inner
            return call if is_known else CallAsked(call.id, call.name, WITHHELD)
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
        if tool is None or tool.secret or stands_for_another(name, tools):
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
