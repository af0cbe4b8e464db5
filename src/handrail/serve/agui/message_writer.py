"""What a model writes, as it writes it: text, reasoning and calls, each begun once and ended once."""

from __future__ import annotations

from typing import Any

from ag_ui.core import (
    ReasoningEndEvent,
    ReasoningMessageEndEvent,
    ReasoningMessageStartEvent,
    ReasoningStartEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    ToolCallEndEvent,
    ToolCallResultEvent,
    ToolCallStartEvent,
)

from handrail.events import CallDelta
from handrail.messages import AssistantMessage, CallAsked
from handrail.serve.agui.book import Known, RunUnderWay, Writing
from handrail.serve.agui.wire_events import Event, clean, delta, sent

_NOT_MADE = "This call was not made: the answer it was part of came to nothing."


class Pen:
    """Tells what the models of one thread's runs write."""

    def __init__(self, known: Known) -> None:
        self._known = known

    # As it is written.

    def text(self, run: RunUnderWay, piece: str) -> list[Event]:
        """More of an answer's text."""
        if not piece:
            return []
        content = delta("TEXT_MESSAGE_CONTENT", "messageId", run.message_id, piece, run.tag)
        if run.text is not None:
            run.text += piece
            return [content]
        begun = [*self._end_thought(run), self._start_text(run), content]
        run.text = piece
        return begun

    def thought(self, run: RunUnderWay, piece: str) -> list[Event]:
        """More of what a model says it thinks."""
        if not piece:
            return []
        begun: list[Event] = []
        if run.thought is None:
            run.thought = ""
            run.thoughts += 1
            begun = self._start_thought(run)
        run.thought += piece
        return [*begun, delta("REASONING_MESSAGE_CONTENT", "messageId", run.thought_id, piece, run.tag)]

    def call(self, run: RunUnderWay, piece: CallDelta) -> list[Event]:
        """More of a call. One whose id may not stay as it is, is told when the whole answer is there.

        Ids that a model repeats are replaced then. Which of two nested runs at work side by side keeps
        one is not known before, so only the outermost run's calls are told while they are written.
        """
        writing = run.writing.get(piece.index)
        if writing is None:
            writing = run.writing[piece.index] = Writing()
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

    def whole(self, run: RunUnderWay, message: AssistantMessage) -> list[Event]:
        """The whole answer: what was not told of it yet, and the end of everything that was begun."""
        told = self._end_thought(run)
        if run.text is None and message.text:
            told += self.text(run, message.text)
        elif run.text is not None and message.text.startswith(run.text):
            told += self.text(run, message.text[len(run.text) :])
        if run.text is not None:
            told.append(self._end_text(run))
        begun = {writing.id: writing for writing in run.writing.values() if writing.shown}
        for asked in message.calls:
            told += self._whole_call(run, asked, begun.pop(asked.id, None))
        for left in begun.values():
            told += self._not_made(run, left)
        run.forget_answer()
        return told

    def _whole_call(self, run: RunUnderWay, asked: CallAsked, begun: Writing | None) -> list[Event]:
        told: list[Event] = []
        rest = asked.arguments
        if begun is None:
            self._known.calls.add(asked.id)
            told.append(self._start_call(run, asked.id, asked.name))
        else:
            rest = rest[len(begun.arguments) :] if rest.startswith(begun.arguments) else ""
        return [*told, *self._arguments(run, asked.id, rest), self._end_call(run, asked.id)]

    # What comes to nothing, or is left.

    def drop(self, run: RunUnderWay) -> list[Event]:
        """End what was begun of an answer that will not come. The calls in it were not made."""
        told = self._end_thought(run)
        if run.text is not None:
            told.append(self._end_text(run))
        for writing in run.writing.values():
            if writing.shown:
                told += self._not_made(run, writing)
        thoughts = run.thoughts  # those of the next try are others
        run.forget_answer()
        run.thoughts = thoughts
        return told

    def _not_made(self, run: RunUnderWay, writing: Writing) -> list[Event]:
        self._known.calls.discard(writing.id)
        return [self._end_call(run, writing.id), self.result(writing.id, _NOT_MADE, run.tag)]

    def so_far(self, run: RunUnderWay) -> list[Event]:
        """What somebody has to be told who joins in the middle of an answer."""
        told: list[Event] = []
        if run.thought is not None:
            told += self._start_thought(run)
            told.append(delta("REASONING_MESSAGE_CONTENT", "messageId", run.thought_id, run.thought, run.tag))
        if run.text is not None:
            told.append(self._start_text(run))
            told.append(delta("TEXT_MESSAGE_CONTENT", "messageId", run.message_id, run.text, run.tag))
        for writing in run.writing.values():
            if writing.shown:
                told.append(self._start_call(run, writing.id, writing.name))
                told += self._arguments(run, writing.id, writing.arguments)
        return told

    def messages(self, run: RunUnderWay) -> list[dict[str, Any]]:
        """The same as messages: what is open of an answer, for a list of all messages."""
        tag = {} if run.tag is None else {"subagentRunId": run.tag}
        open: list[dict[str, Any]] = []
        if run.thought is not None:
            open.append({"id": run.thought_id, "role": "reasoning", "content": run.thought, **tag})
        calls = [call_json(each.id, each.name, each.arguments) for each in run.writing.values() if each.shown]
        if run.text is not None or calls:
            said: dict[str, Any] = {"id": run.message_id, "role": "assistant", "content": run.text or ""}
            open.append({**said, **({"toolCalls": calls} if calls else {}), **tag})
        return open

    def result(self, call_id: str, text: str, tag: str | None) -> Event:
        """What a model is told of a call."""
        result = ToolCallResultEvent(message_id=result_id(call_id), tool_call_id=call_id, content=clean(text))
        return sent(result, tag)

    # One event each.

    def _start_text(self, run: RunUnderWay) -> Event:
        return sent(TextMessageStartEvent(message_id=run.message_id, role="assistant"), run.tag)

    def _end_text(self, run: RunUnderWay) -> Event:
        run.text = None
        return sent(TextMessageEndEvent(message_id=run.message_id), run.tag)

    def _start_thought(self, run: RunUnderWay) -> list[Event]:
        id = run.thought_id
        message = ReasoningMessageStartEvent(message_id=id, role="reasoning")
        return [sent(ReasoningStartEvent(message_id=id), run.tag), sent(message, run.tag)]

    def _end_thought(self, run: RunUnderWay) -> list[Event]:
        if run.thought is None:
            return []
        run.thought = None
        message = sent(ReasoningMessageEndEvent(message_id=run.thought_id), run.tag)
        return [message, sent(ReasoningEndEvent(message_id=run.thought_id), run.tag)]

    def _start_call(self, run: RunUnderWay, id: str, name: str) -> Event:
        begun = ToolCallStartEvent(tool_call_id=id, tool_call_name=name, parent_message_id=run.message_id)
        return sent(begun, run.tag)

    def _arguments(self, run: RunUnderWay, id: str, piece: str) -> list[Event]:
        return [delta("TOOL_CALL_ARGS", "toolCallId", id, piece, run.tag)] if piece else []

    def _end_call(self, run: RunUnderWay, id: str) -> Event:
        return sent(ToolCallEndEvent(tool_call_id=id), run.tag)


def result_id(call_id: str) -> str:
    """The id of the message that a call's result becomes."""
    return f"{call_id}/result"


def call_json(id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as a message has it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
