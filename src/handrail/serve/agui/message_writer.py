"""`MessageWriter`: builds AG-UI events from the text, reasoning and calls that models stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ag_ui import core as wire

from handrail.content import Attachment
from handrail.events import CallDelta
from handrail.messages import AssistantMessage, CallAsked
from handrail.run.place import split_run_id
from handrail.serve.agui.wire_events import Event, plain_event, wire_event
from handrail.serve.attachments import facts_of
from handrail.tools.result import clean_text

MOST_CHARACTERS = 100_000
"""Maximum number of characters of a call's result that are sent to clients."""
MADE = "handrail.attachment"
"""The type of the activity for a picture, a sound or another file that a model made."""
COMPACTED = "handrail.compacted"
"""The type of the activity for a compaction of the conversation."""
WITHDRAWN = "handrail.withdrawn"
"""The type that such an activity gets if its answer fails, because older clients keep activities that a snapshot lacks."""
_NOT_MADE = "This call was not made, because it is not in a complete answer of the model."


@dataclass(slots=True)
class Known:
    """The calls and results that have been sent to clients, so that none is sent twice.

    An outermost run and the runs nested in it share one `Known`. For a resumed run, `of` builds it from the thread's
    recorded messages.
    """

    calls: set[str] = field(default_factory=set[str])
    results: set[str] = field(default_factory=set[str])

    @classmethod
    def of(cls, messages: list[dict[str, Any]]) -> Known:
        """Return the calls and results that these messages contain."""
        known = cls()
        for message in messages:
            if message["role"] == "tool":
                known.results.add(message["toolCallId"])
            known.calls.update(call["id"] for call in message.get("toolCalls", ()))
        return known


@dataclass(slots=True)
class PartialCall:
    """A call that a model is still writing."""

    id: str = ""
    name: str = ""
    arguments: str = ""
    shown: bool = False
    """Whether the call's start has been sent to clients. If so, its end must be sent too."""


@dataclass(slots=True)
class OpenRun:
    """A run, outermost or nested, and the answer that its model is writing."""

    id: str
    tag: str | None
    """The subagent id in the run's events, or None for the outermost run."""
    name: str = ""
    begun: bool = False
    turn: int = 0
    """Number of answers that the run's model has completed."""
    calls: int = 0
    """Number of calls in the completed answers."""
    said: int = 0
    """Number of messages that people have sent to the run since the last completed answer."""
    parts: list[str | Attachment] = field(default_factory=list[str | Attachment])
    """The parts of the answer that are complete: what the model made, and the texts before it."""
    text: str | None = None
    """The text of the open message, or None if no message is open."""
    thought: str | None = None
    """The text of the open reasoning, or None if no reasoning is open."""
    thoughts: int = 0
    writing: dict[int, PartialCall] = field(default_factory=dict[int, PartialCall])
    """The calls that the run's model is writing, by index."""
    failed: Event | None = None
    """What clients were told of the last request, if it failed and no answer has begun since."""

    @property
    def message_id(self) -> str:
        """The id of the message that the run's model is writing. The text after an attachment is a message of its own."""
        return part_id(self.answer_id, self.made)

    @property
    def answer_id(self) -> str:
        """The id of the first message of the answer."""
        return f"{self.id}/{self.turn + 1}"

    @property
    def made(self) -> int:
        """Number of attachments in the answer so far."""
        return sum(isinstance(part, Attachment) for part in self.parts)

    @property
    def thought_id(self) -> str:
        return f"{self.answer_id}/thought-{self.thoughts}"

    @property
    def is_writing(self) -> bool:
        return self.text is not None or self.thought is not None or bool(self.parts) or bool(self.writing)

    def clear_answer(self) -> None:
        """Discard the answer that the run's model was writing."""
        self.text = self.thought = self.failed = None
        self.thoughts = 0
        self.parts.clear()
        self.writing.clear()


class MessageWriter:
    """Converts the answers of models, in a run and in the runs nested in it, to AG-UI events.

    Every message, reasoning and call that is started is also ended.
    """

    def __init__(self, known: Known) -> None:
        self._known = known

    def said(self, id: str, text: str) -> list[Event]:
        """Return the events that add a user's message to the conversation of every client."""
        return [
            plain_event("TEXT_MESSAGE_START", None, messageId=id, role="user"),
            plain_event("TEXT_MESSAGE_CONTENT", None, messageId=id, delta=text),
            plain_event("TEXT_MESSAGE_END", None, messageId=id),
        ]

    # Streaming.

    def text(self, run: OpenRun, piece: str) -> list[Event]:
        """Return the events for the next piece of an answer's text. An empty piece has none."""
        if not piece:
            return []
        content = plain_event("TEXT_MESSAGE_CONTENT", run.tag, messageId=run.message_id, delta=piece)
        if run.text is not None:
            run.text += piece
            return [content]
        events = [*self._end_thought(run), self._start_text(run), content]
        run.text = piece
        return events

    def thought(self, run: OpenRun, piece: str) -> list[Event]:
        """Return the events for the next piece of a model's reasoning. An empty piece has none."""
        if not piece:
            return []
        events: list[Event] = []
        if run.thought is None:
            run.thought = ""
            run.thoughts += 1
            events = self._start_thought(run)
        run.thought += piece
        return [
            *events,
            plain_event("REASONING_MESSAGE_CONTENT", run.tag, messageId=run.thought_id, delta=piece),
        ]

    def attachment(self, run: OpenRun, attachment: Attachment) -> list[Event]:
        """Return the events for a picture or another file that a model made. It is an activity, since a message has only text.

        If it is the first part of the answer, an empty message comes before it.
        """
        events = self._end_thought(run)
        if run.text is None and not run.parts:
            events += [self._start_text(run)]
            run.text = ""
        if run.text is not None:
            run.parts.append(run.text)
            events.append(self._end_text(run))
        run.parts.append(attachment)
        return [*events, self._attachment(run, run.made, attachment)]

    def call(self, run: OpenRun, piece: CallDelta) -> list[Event]:
        """Return the events for the next piece of a call, or none if the call is sent later.

        A call is sent while it is being written only if its id is final. When an answer is complete, ids that were used
        before are replaced, so a call whose id clients already know is sent only then. All calls of nested runs are also
        sent only then: if two concurrent nested runs use the same id, it is not known earlier which of them keeps it.
        """
        writing = run.writing.get(piece.index)
        if writing is None:
            writing = run.writing[piece.index] = PartialCall()
        writing.id = writing.id or piece.call_id
        writing.name += piece.name
        writing.arguments += piece.arguments
        if writing.shown:
            return self._arguments(run, writing.id, piece.arguments)
        unsure = run.tag is not None or not writing.id or writing.id in self._known.calls
        if unsure or not writing.name:
            return []
        writing.shown = True
        self._known.calls.add(writing.id)
        return [
            *self._end_thought(run),
            self._start_call(run, writing.id, writing.name),
            *self._arguments(run, writing.id, writing.arguments),
        ]

    def complete(self, run: OpenRun, message: AssistantMessage) -> list[Event]:
        """Return the events that send the rest of a complete answer, and end everything that the answer started.

        If the complete text, or a call's complete arguments, do not begin with what was sent, the rest is not sent.
        Reasoning is sent only if none has been sent yet.
        """
        events = self.thought(run, message.thought) if not run.thoughts else []
        events += self._end_thought(run)
        for part in _after(message.parts, run.made):
            if isinstance(part, Attachment):
                events += self.attachment(run, part)
            elif run.text is None:
                events += self.text(run, part)
            elif part.startswith(run.text):
                events += self.text(run, part[len(run.text) :])
        if run.text is not None:
            events.append(self._end_text(run))
        begun = {writing.id: writing for writing in run.writing.values() if writing.shown}
        for asked in message.calls:
            events += self._complete_call(run, asked, begun.pop(asked.id, None))
        for left in begun.values():
            events += self._not_made(run, left)
        run.clear_answer()
        return events

    def _complete_call(self, run: OpenRun, asked: CallAsked, begun: PartialCall | None) -> list[Event]:
        events: list[Event] = []
        rest = asked.arguments
        if begun is None:
            self._known.calls.add(asked.id)
            events.append(self._start_call(run, asked.id, asked.name))
        else:
            rest = rest[len(begun.arguments) :] if rest.startswith(begun.arguments) else ""
        return [*events, *self._arguments(run, asked.id, rest), self._end_call(run, asked.id)]

    # Failed answers, and clients that join in the middle of an answer.

    def drop(self, run: OpenRun) -> list[Event]:
        """Return the events that end the started parts of a failed answer, and report that its calls were not made."""
        events = self._end_thought(run)
        if run.text is not None:
            events.append(self._end_text(run))
        for writing in run.writing.values():
            if writing.shown:
                events += self._not_made(run, writing)
        for number in range(1, run.made + 1):
            id = made_id(run.answer_id, number)
            withdrawn = wire.ActivitySnapshotEvent(message_id=id, activity_type=WITHDRAWN, content={})
            events.append(wire_event(withdrawn, run.tag))
        thoughts = run.thoughts  # the retry must not reuse the ids of this reasoning
        run.clear_answer()
        run.thoughts = thoughts
        return events

    def _not_made(self, run: OpenRun, writing: PartialCall) -> list[Event]:
        self._known.calls.discard(writing.id)
        return [self._end_call(run, writing.id), self.result(writing.id, _NOT_MADE, run.tag)]

    def so_far(self, run: OpenRun) -> list[Event]:
        """Return the events that show an unfinished answer to a client that joins now."""
        events: list[Event] = []
        if run.thought is not None:
            events += self._start_thought(run)
            events.append(
                plain_event("REASONING_MESSAGE_CONTENT", run.tag, messageId=run.thought_id, delta=run.thought)
            )
        number = 0
        for part in run.parts:
            if isinstance(part, Attachment):
                number += 1
                events.append(self._attachment(run, number, part))
                continue
            id = part_id(run.answer_id, number)
            events.append(plain_event("TEXT_MESSAGE_START", run.tag, messageId=id, role="assistant"))
            if part:
                events.append(plain_event("TEXT_MESSAGE_CONTENT", run.tag, messageId=id, delta=part))
            events.append(plain_event("TEXT_MESSAGE_END", run.tag, messageId=id))
        if run.text is not None:
            events.append(self._start_text(run))
            events.append(
                plain_event("TEXT_MESSAGE_CONTENT", run.tag, messageId=run.message_id, delta=run.text)
            )
        for writing in run.writing.values():
            if writing.shown:
                events.append(self._start_call(run, writing.id, writing.name))
                events += self._arguments(run, writing.id, writing.arguments)
        return events

    def messages(self, run: OpenRun) -> list[dict[str, Any]]:
        """Return an unfinished answer as messages, for a snapshot of all messages."""
        tag = {} if run.tag is None else {"subagentRunId": run.tag}
        open: list[dict[str, Any]] = []
        if run.thought is not None:
            open.append({"id": run.thought_id, "role": "reasoning", "content": run.thought, **tag})
        calls = [call_json(each.id, each.name, each.arguments) for each in run.writing.values() if each.shown]
        if run.text is not None or run.parts or calls:
            parts = [*run.parts, *([] if run.text is None else [run.text])]
            open += [{**each, **tag} for each in answer_json(run.answer_id, parts, calls)]
        return open

    def result(self, call_id: str, text: str, tag: str | None) -> Event:
        """Return the event with the text of a call's result."""
        message_id = result_id(call_id)
        return plain_event(
            "TOOL_CALL_RESULT", tag, messageId=message_id, toolCallId=call_id, content=clean_text(text)
        )

    # Single events.

    def _start_text(self, run: OpenRun) -> Event:
        return plain_event("TEXT_MESSAGE_START", run.tag, messageId=run.message_id, role="assistant")

    def _end_text(self, run: OpenRun) -> Event:
        run.text = None
        return plain_event("TEXT_MESSAGE_END", run.tag, messageId=run.message_id)

    def _start_thought(self, run: OpenRun) -> list[Event]:
        id = run.thought_id
        message = plain_event("REASONING_MESSAGE_START", run.tag, messageId=id, role="reasoning")
        return [plain_event("REASONING_START", run.tag, messageId=id), message]

    def _end_thought(self, run: OpenRun) -> list[Event]:
        if run.thought is None:
            return []
        run.thought = None
        message = plain_event("REASONING_MESSAGE_END", run.tag, messageId=run.thought_id)
        return [message, plain_event("REASONING_END", run.tag, messageId=run.thought_id)]

    def _start_call(self, run: OpenRun, id: str, name: str) -> Event:
        message_id = run.message_id
        return plain_event(
            "TOOL_CALL_START", run.tag, toolCallId=id, toolCallName=name, parentMessageId=message_id
        )

    def _arguments(self, run: OpenRun, id: str, piece: str) -> list[Event]:
        return [plain_event("TOOL_CALL_ARGS", run.tag, toolCallId=id, delta=piece)] if piece else []

    def _attachment(self, run: OpenRun, number: int, attachment: Attachment) -> Event:
        made = wire.ActivitySnapshotEvent(
            message_id=made_id(run.answer_id, number), activity_type=MADE, content=facts_of([attachment])[0]
        )
        return wire_event(made, run.tag)

    def _end_call(self, run: OpenRun, id: str) -> Event:
        return plain_event("TOOL_CALL_END", run.tag, toolCallId=id)


def _after(parts: Sequence[str | Attachment], made: int) -> Sequence[str | Attachment]:
    """Return the parts of an answer after this number of attachments."""
    for at, part in enumerate(parts):
        if not made:
            return parts[at:]
        made -= isinstance(part, Attachment)
    return ()


def part_id(answer_id: str, made: int) -> str:
    """Return the id of the message with the text that follows this number of attachments in an answer."""
    return f"{answer_id}/after-{made}" if made else answer_id


def made_id(answer_id: str, number: int) -> str:
    """Return the id of the activity for the attachment with this number in an answer."""
    return f"{answer_id}/made-{number}"


def answer_json(
    answer_id: str, parts: Sequence[str | Attachment], calls: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return an answer in the form of AG-UI messages: its texts as messages, and its attachments as activities.

    The calls belong to the text after the last attachment. The first message is there even if it is empty, so that clients
    find the answer among the messages.
    """
    made = 0
    said: list[dict[str, Any]] = [{"id": answer_id, "role": "assistant", "content": ""}]
    for part in parts:
        if isinstance(part, Attachment):
            made += 1
            content = facts_of([part])[0]
            said.append(
                {
                    "id": made_id(answer_id, made),
                    "role": "activity",
                    "activityType": MADE,
                    "content": content,
                }
            )
        elif made:
            said.append({"id": part_id(answer_id, made), "role": "assistant", "content": part})
        else:
            said[0]["content"] += part
    if calls and said[-1]["role"] == "activity":
        said.append({"id": part_id(answer_id, made), "role": "assistant", "content": ""})
    if calls:
        said[-1]["toolCalls"] = list(calls)
    return said


def result_id(call_id: str) -> str:
    """Return the id of the message that carries a call's result."""
    return f"{call_id}/result"


def call_json(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call in the form that AG-UI messages use."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def shorten(text: str, run_id: str) -> str:
    """Return a call's result. If it has more than `MOST_CHARACTERS`, it is cut, with a note on how to read all of it.

    The model and the journal have the whole result. Clients are sent less because many results may arrive at once,
    and a reader that falls too far behind in a feed is disconnected.
    """
    left_out = len(text) - MOST_CHARACTERS
    if left_out <= 0:
        return text
    root, _ = split_run_id(run_id)
    return (
        f"{text[:MOST_CHARACTERS]}\n\n[{left_out:,} of {len(text):,} characters are not shown. "
        f"To read the whole result: GET /threads/THREAD/runs/{root}]"
    )
