"""`Translator`: the events of one run, in AG-UI's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from handrail.events import CallDelta, MessageAdded, TextDelta, ToolInvoked
from handrail.messages import AssistantMessage, Usage
from handrail.question import Question
from handrail.serve.feed import Event


class Translator:
    """Placeholder of the walking skeleton: text and top-level calls only."""

    def __init__(self, thread_id: str, run_id: str, *, known: Any = None) -> None:
        self._thread_id, self._run_id = thread_id, run_id
        self._leg = ""
        self._text = ""
        self._messages = 0
        self._calls: dict[str, bool] = {}

    def begin_leg(self, leg_id: str, state: Any = None) -> list[Event]:
        self._leg = leg_id
        told = {
            "type": "RUN_STARTED",
            "threadId": self._thread_id,
            "runId": leg_id,
            "metadata": {"handrail": {"run_id": self._run_id}},
        }
        out = [Event(told)]
        if state is not None:
            out.append(Event({"type": "STATE_SNAPSHOT", "snapshot": state}))
        return out

    def take(self, event: object) -> list[Event]:
        if getattr(getattr(event, "run_context", None), "run_id", self._run_id) != self._run_id:
            return []
        if isinstance(event, TextDelta):
            out: list[Event] = []
            if not self._text:
                self._messages += 1
                self._text = f"{self._run_id}-m{self._messages}"
                out.append(
                    Event({"type": "TEXT_MESSAGE_START", "messageId": self._text, "role": "assistant"})
                )
            return [
                *out,
                Event({"type": "TEXT_MESSAGE_CONTENT", "messageId": self._text, "delta": event.text}),
            ]
        if isinstance(event, CallDelta):
            return []
        if isinstance(event, MessageAdded) and isinstance(event.message, AssistantMessage):
            out = self._end()
            for call in event.message.calls:
                out += [
                    Event({"type": "TOOL_CALL_START", "toolCallId": call.id, "toolCallName": call.name}),
                    Event({"type": "TOOL_CALL_ARGS", "toolCallId": call.id, "delta": call.arguments}),
                    Event({"type": "TOOL_CALL_END", "toolCallId": call.id}),
                ]
            return out
        if isinstance(event, ToolInvoked) and len(event.path) == 1:
            told = {
                "type": "TOOL_CALL_RESULT",
                "messageId": f"{event.call_id}-result",
                "toolCallId": event.call_id,
                "content": event.result.message,
                "role": "tool",
            }
            return [Event(told)]
        return []

    def ask(self, question: Question) -> list[Event]:
        """A question was asked: our page shows it before the rest of the run has come to rest."""
        return [
            Event({"type": "CUSTOM", "name": "handrail.question", "value": msgspec.to_builtins(question)})
        ]

    def interrupt(self, questions: Sequence[Question], state: Any = None) -> list[Event]:
        interrupts = [
            {
                "id": f"{each.id}#{each.digest[:16]}",
                "reason": "tool_call" if each.kind == "approval" else "input_required",
                "message": each.message,
                "toolCallId": each.call_id,
                "responseSchema": each.schema,
                "metadata": {"handrail": msgspec.to_builtins(each)},
            }
            for each in questions
        ]
        return [*self._end(), self._finished({"type": "interrupt", "interrupts": interrupts})]

    def finish(
        self, *, output: Any = None, usage: Usage | None = None, pending: Sequence[str] = ()
    ) -> list[Event]:
        return [*self._end(), self._finished({"type": "success"})]

    def fail(self, message: str, code: str) -> list[Event]:
        return [*self._end(), Event({"type": "RUN_ERROR", "message": message, "code": code})]

    def cancel(self) -> list[Event]:
        return [*self._end(), self._finished({"type": "cancelled"})]

    def open(self) -> list[Event]:
        return []

    def _end(self) -> list[Event]:
        ended, self._text = self._text, ""
        return [Event({"type": "TEXT_MESSAGE_END", "messageId": ended})] if ended else []

    def _finished(self, outcome: dict[str, Any]) -> Event:
        return Event(
            {"type": "RUN_FINISHED", "threadId": self._thread_id, "runId": self._leg, "outcome": outcome}
        )
