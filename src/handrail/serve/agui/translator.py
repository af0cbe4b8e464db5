"""`Translator`: translates the events of a Handrail run to AG-UI events.

A run is sent in one or more *legs*. To AG-UI clients, each leg is a run with its own id. A leg ends when the run ends,
or when everything in the run waits for answers. The next leg continues the same run.

These rules hold whatever happens in the run:

- everything that a leg starts (messages, reasoning, calls, nested runs) ends in the same leg;
- a call that a model made is sent in one leg only, and its result is sent once, in that leg or a later one;
- if a request to a model fails, its partial answer is withdrawn: the messages are sent again without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from ag_ui import core as wire

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.events import (
    Advised,
    ApprovalDecided,
    AttachmentDelta,
    BackgroundStarted,
    CallDelta,
    ConversationCompacted,
    Emitted,
    MessageAdded,
    MessageQueued,
    ModelFailed,
    ModelResponded,
    Progress,
    PromptExecuted,
    PromptRendered,
    QuestionAnswered,
    TextDelta,
    ThoughtDelta,
    ToolInvoked,
    ToolResumed,
    ToolRolledBack,
    ToolStarted,
)
from handrail.messages import AssistantMessage, Message, ToolMessage, Usage, UserMessage
from handrail.question import Question
from handrail.run.place import is_in_run
from handrail.serve.agui.background_runs import background_event, ended_json, started_json
from handrail.serve.agui.call_states import CallStates, Subagents, usage_json
from handrail.serve.agui.interrupts import interrupt_leg, question_json
from handrail.serve.agui.message_writer import (
    COMPACTED,
    MADE,
    WITHDRAWN,
    Known,
    MessageWriter,
    OpenRun,
    shorten,
)
from handrail.serve.agui.queued_messages import queued_event
from handrail.serve.agui.wire_events import PROTOCOL, Event, custom, dump, plain_json, state_patch, wire_event
from handrail.serve.attachments import parts_of
from handrail.serve.thread_messages import user_id
from handrail.tools.result import clean_text, shown_text

CANCELLED = "The run was cancelled."
_CUT = "The outcome of this call is unknown, because the call that contained it ended first."


class Translator:
    """Translates the events of one run and of the runs nested in it, in the order in which they are published.

    `history` returns the thread's current messages, including those of nested runs. For a resumed run, `known` holds the
    calls and results that have already been sent, `said` returns the recorded messages of a nested run, and `usage` and
    `cost` are what the run used before it was resumed.
    """

    def __init__(
        self,
        thread_id: str,
        run_id: str,
        *,
        known: Known | None = None,
        history: Callable[[], list[dict[str, Any]]] | None = None,
        said: Callable[[str], Sequence[Message]] | None = None,
        usage: Usage | None = None,
        cost: Decimal | None = Decimal(0),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.thread_id = thread_id
        self.run_id = run_id
        self._known = Known() if known is None else known
        self._history = history
        self._said_before = said
        self._leg: str | None = None
        self._legs = 0
        self._calls = CallStates(run_id, clock)
        self._nested = Subagents(run_id, self._calls.at)
        self._writer = MessageWriter(self._known)
        self._state: Any = None
        self._asked: dict[str, str] = {}
        """The id of the call that asked each open question, by the question's id."""
        self._usage = usage or Usage()
        self._cost = cost
        self._spent: dict[str, Usage] = {}
        """The usage in this leg, by model."""
        self._is_told = False
        """Whether the next message of the user is what was sent to the run while it works."""
        self._takes: dict[type, Callable[[Any, OpenRun], list[Event]]] = {
            TextDelta: lambda event, run: self._writer.text(run, event.text),
            ThoughtDelta: lambda event, run: self._writer.thought(run, event.text),
            CallDelta: lambda event, run: self._writer.call(run, event),
            AttachmentDelta: lambda event, run: self._writer.attachment(run, event.attachment),
            PromptRendered: self._rendered,
            MessageAdded: self._added,
            MessageQueued: self._queued,
            ToolStarted: self._calls.start,
            ToolResumed: self._calls.start,
            ToolInvoked: self._over,
            ToolRolledBack: self._calls.roll_back,
            Progress: self._calls.progress,
            Emitted: self._emitted,
            QuestionAnswered: self._answered,
            ApprovalDecided: self._decided,
            ModelResponded: self._responded,
            ModelFailed: self._failed,
            Advised: self._advised,
            ConversationCompacted: self._compacted,
            BackgroundStarted: lambda event, run: [background_event(started_json(event), run.tag)],
            PromptExecuted: self._executed,
        }

    # --- legs ------------------------------------------------------------------------------------

    @property
    def leg(self) -> str | None:
        """The id of the open leg, or None if no leg is open."""
        return self._leg

    def begin_leg(self, leg_id: str, state: Any | None = None) -> list[Event]:
        """Open a leg and return its first events: its start and, if there is a state, a snapshot of it."""
        self._leg = leg_id
        self._legs += 1
        return [self.started(leg_id), *self._snapshot(state)]

    def started(self, leg_id: str) -> Event:
        """Return the event that starts a leg. It is also sent to clients that join in the middle of the leg."""
        begun = wire.RunStartedEvent(
            thread_id=self.thread_id,
            run_id=leg_id,
            protocol_version=PROTOCOL,
            metadata={"handrail": {"run_id": self.run_id}},
        )
        return wire_event(begun)

    def interrupt(self, questions: Sequence[Question], state: Any | None = None) -> list[Event]:
        """Return the events that end the leg because everything in the run waits for answers."""
        events = [*self._end_writing(), *self._nested.suspend(questions), *self._snapshot(state)]
        leg_id, usage = self._leg_id(events), self._token_usage()
        return self._end_leg(events, interrupt_leg(self.thread_id, leg_id, questions, self._calls.at, usage))

    def finish(self, *, output: object = None, stop_reason: str = "done") -> list[Event]:
        """Return the events that end the leg because the run has finished. If it was ordered to, they say so."""
        events = [*self._end_writing(), *self._nested.abandon("cancelled")]
        result = None if output is None else plain_json(output)
        finished = self._finished(events, wire.RunFinishedSuccessOutcome(), result)
        if stop_reason != "done":
            finished.metadata = {"handrail": {"stop_reason": stop_reason}}
        return self._end_leg(events, wire_event(finished))

    def cancel(self) -> list[Event]:
        """Return the events that end the leg because the run was cancelled. Older clients are sent an error instead."""
        events = [*self._end_writing(), *self._nested.abandon("cancelled")]
        finished = self._finished(events, wire.RunFinishedCancelledOutcome())
        older = wire.RunErrorEvent(message=CANCELLED, code="cancelled", usage=finished.usage)
        return self._end_leg(events, Event(dump(finished), False, dump(older)))

    def fail(self, message: str, code: str = "failed") -> list[Event]:
        """Return the events that end the leg with an error."""
        events = [*self._end_writing(), *self._nested.abandon("failed")]
        self._leg_id(events)
        error = wire.RunErrorEvent(message=clean_text(message), code=code, usage=self._token_usage())
        return self._end_leg(events, wire_event(error))

    def _finished(self, events: list[Event], outcome: Any, result: Any = None) -> wire.RunFinishedEvent:
        return wire.RunFinishedEvent(
            thread_id=self.thread_id,
            run_id=self._leg_id(events),
            outcome=outcome,
            result=result,
            usage=self._token_usage(),
        )

    def open(self) -> list[Event]:
        """Return the events that bring a newly joined client up to date.

        They are sent after the leg's start, the messages and the state.
        """
        events = self._nested.so_far()
        for run in self._nested:
            events += self._writer.so_far(run)
            if run.failed is not None and not run.is_writing:
                events.append(run.failed)
        events += self._calls.so_far()
        if self._usage.requests:
            events.append(self._spending())
        return events

    def _leg_id(self, events: list[Event]) -> str:
        """Return the id of the open leg. If no leg is open, start one and insert its events before `events`."""
        if self._leg is None:
            events[:0] = self.begin_leg(f"{self.run_id}-{self._legs + 1}")
        assert self._leg is not None
        return self._leg

    def _end_leg(self, events: list[Event], last: Event) -> list[Event]:
        self._leg = None
        self._nested.end_leg()
        self._calls.end_leg()
        self._spent.clear()
        return [*events, last]

    def _end_writing(self) -> list[Event]:
        """Return the events that end unfinished answers, and a snapshot of the messages without them.

        Returns no events if there are no unfinished answers. When a leg ends, an answer is unfinished only if its run
        ended or failed while the model was writing.
        """
        cut = [run for run in self._nested if run.is_writing]
        events = [event for run in cut for event in self._writer.drop(run)]
        return [*events, *self._messages()] if cut else events

    def _snapshot(self, state: Any) -> list[Event]:
        if state is None:
            return []
        self._state = state
        return [wire_event(wire.StateSnapshotEvent(snapshot=state))]

    def _token_usage(self) -> list[wire.TokenUsage] | None:
        """Return the token usage in this leg by model, or None if there was none."""
        return [_token_usage(model, usage) for model, usage in self._spent.items()] or None

    # --- reports from outside the run --------------------------------------------------------------

    def changed(self, state: Any) -> list[Event]:
        """Return the event with the changes since the last state, or no event if nothing changed or no leg is open."""
        before, self._state = self._state, state
        operations = state_patch(before, state)
        if not operations or self._leg is None:
            return []
        return [wire_event(wire.StateDeltaEvent.model_validate({"delta": operations}))]

    def ask(self, question: Question) -> list[Event]:
        """Return the events that announce an open question.

        The page shows the question at once, before the run is interrupted.
        """
        self._asked[question.id] = question.call_id
        return [
            *self._calls.set_waiting(question.call_id, True),
            custom("handrail.question", question_json(question)),
        ]

    def close(self, question_id: str, outcome: str, by: str = "") -> list[Event]:
        """Return the events that announce that a question was closed, or none if it was not open."""
        call_id = self._asked.pop(question_id, None)
        if call_id is None:
            return []
        waits = call_id in self._asked.values()
        value = {"question_id": question_id, "outcome": outcome, "by": by}
        return [*self._calls.set_waiting(call_id, waits), custom("handrail.question.closed", value)]

    def committed(self, call_id: str, diff: str, paths: Sequence[str]) -> list[Event]:
        """Return the event that reports the files that a finished call changed, or no event if it changed none."""
        return [self._calls.commit(call_id, diff, list(paths))] if diff or paths else []

    def recall(self, run_id: str, said: Sequence[Message]) -> None:
        """Record that these messages of a run, outermost or nested, were already sent, so that they are not sent again."""
        run = self._nested.run(run_id)
        run.begun, run.turn, run.calls, run.said = True, 0, 0, 0
        for message in said:
            if isinstance(message, AssistantMessage):
                self._calls.number(run, message)
                self._known.calls.update(call.id for call in message.calls)
                run.turn, run.said = run.turn + 1, 0
            elif isinstance(message, UserMessage):
                run.said += message.midway
            else:
                self._known.results.update(result.id for result in message.results)

    # --- events of the run -----------------------------------------------------------------------

    def take(self, event: object) -> list[Event]:
        """Return the AG-UI events for one event of the run or of a run nested in it.

        There are none for events of other runs and for types that are not translated. If no leg is open, and the events
        need one, the first of them start it.
        """
        taken = self._takes.get(type(event))
        if taken is None:
            return []
        run_id = _run_of(event)
        if not is_in_run(run_id, self.run_id):
            return []
        run = self._nested.run(run_id)
        events = taken(event, run)
        if events and run.tag is not None and type(event) is not PromptExecuted:
            events = [*self._nested.enter(run), *events]
        if self._leg is None and any(each.data["type"] != "CUSTOM" for each in events):
            # no answer opened a leg in this process: for example, a question timed out, or was answered in another process
            self._leg_id(events)
        return events

    def _rendered(self, event: PromptRendered, run: OpenRun) -> list[Event]:
        """Prepare for the start or the replay of a run. Returns the events that start it if it is nested."""
        run.name = event.prompt
        run.clear_answer()
        self.recall(run.id, () if self._said_before is None else self._said_before(run.id))
        return [] if run.tag is None else self._nested.enter(run)

    def _added(self, event: MessageAdded, run: OpenRun) -> list[Event]:
        message = event.message
        if isinstance(message, ToolMessage):
            return [events for each in message.results for events in self._result(each.id, each.text, run)]
        if not run.begun:
            return []  # this is history from before the run
        if isinstance(message, AssistantMessage):
            self._calls.number(run, message)
            events = self._writer.complete(run, message)
            run.turn, run.said = run.turn + 1, 0
            return events
        return self._said(message, run)

    def _said(self, message: UserMessage, run: OpenRun) -> list[Event]:
        """Return the event that shows the user's message in other windows of the page. The sender already has it.

        What was sent to the run while it works is a new message for every client. Returns no event for a message in a nested
        run, or for one that the run itself wrote, except those of the ends of background runs that it tells.
        """
        id = user_id(run.id, run.turn, message, run.said)
        run.said += message.midway
        if run.tag is not None or message.by_run:
            return [background_event(ended_json(end), run.tag) for end in message.ends]
        is_told, self._is_told = self._is_told, False
        if is_told:
            return self._writer.said(id, clean_text(message.text))
        return [
            custom(
                "handrail.message",
                {
                    "id": id,
                    "role": "user",
                    "content": parts_of(clean_text(message.text), message.attachments),
                },
            )
        ]

    def _queued(self, event: MessageQueued, run: OpenRun) -> list[Event]:
        message = event.message
        if message.state == "told" and (message.text or message.order == "wrap up"):
            self._is_told = True  # an order without words is no message
        return [queued_event(self.run_id, event.message)]

    def _result(self, call_id: str, text: str, run: OpenRun) -> list[Event]:
        """Return the event with a call's result, or no event if clients don't know the call or already have its result."""
        known = self._known
        if call_id not in known.calls or call_id in known.results:
            return []
        known.results.add(call_id)
        return [self._writer.result(call_id, shorten(text, self.run_id), run.tag)]

    def _over(self, event: ToolInvoked, run: OpenRun) -> list[Event]:
        events = [*self._close_inside(event.call_id), *self._calls.finish(event, run)]
        return [*events, *self._result(event.call_id, shown_text(event.result), run)]

    def _close_inside(self, call_id: str) -> list[Event]:
        """Return the events that close the unfinished calls in runs nested in a call, and then close these runs.

        The outer call is over, so these runs are never resumed.
        """
        events: list[Event] = []
        cut: dict[str, OpenRun] = {}
        for id, place in self._calls.inside(call_id):
            if id not in self._known.results:
                run_id = place.run.id(self.run_id)
                inner = cut[run_id] = self._nested.run(run_id)
                events += [*self._nested.enter(inner), *self._result(id, _CUT, inner)]
        return [
            *events,
            *(end for inner in reversed(cut.values()) for end in self._nested.end(inner, "cancelled")),
        ]

    def _emitted(self, event: Emitted, run: OpenRun) -> list[Event]:
        value = {
            "type": type(event.event).__name__,
            "event": plain_json(event.event),
            "call_id": event.call_id,
            "run_id": event.run_context.run_id,
        }
        return [custom(event.tool, value, run.tag)]

    def _answered(self, event: QuestionAnswered, run: OpenRun) -> list[Event]:
        return self.close(event.question_id, event.outcome, event.by)

    def _decided(self, event: ApprovalDecided, run: OpenRun) -> list[Event]:
        return self.close(event.question_id, event.approval.outcome, event.approval.by)

    def _responded(self, event: ModelResponded, run: OpenRun) -> list[Event]:
        self._spent[event.model] = self._spent.get(event.model, Usage()) + event.usage
        self._usage += event.usage
        self._cost = None if self._cost is None or event.cost is None else self._cost + event.cost
        self._calls.add_usage(event)
        return [self._spending()]

    def _spending(self) -> Event:
        cost = None if self._cost is None else str(self._cost)
        return custom(
            "handrail.usage", {"usage": usage_json(self._usage), "cost": cost, "run_id": self.run_id}
        )

    def _failed(self, event: ModelFailed, run: OpenRun) -> list[Event]:
        events = [*self._writer.drop(run), *self._messages()] if run.is_writing else []
        if event.retry_in is None and not event.next_model:
            return events  # this failure ends the run, which reports it
        value = {
            "model": event.model,
            "error": clean_text(event.error),
            "attempt": event.attempt,
            "retry_in": event.retry_in,
            "next_model": event.next_model,
        }
        run.failed = custom(MODEL_FAILED, value, run.tag)
        return [*events, run.failed]

    def _messages(self) -> list[Event]:
        """Return the event with a snapshot of all messages, or no event without a `history`.

        Clients drop every message that is not in the snapshot.
        """
        if self._history is None:
            return []
        all = [*self._history(), *(each for run in self._nested for each in self._writer.messages(run))]
        return [messages_snapshot(all)]

    def _advised(self, event: Advised, run: OpenRun) -> list[Event]:
        value = {"kind": event.kind, "by": event.by, "text": clean_text(event.text), "failed": event.failed}
        return [custom("handrail.advised", value, run.tag)]

    def _compacted(self, event: ConversationCompacted, run: OpenRun) -> list[Event]:
        """Return the event for the last compaction in the history, which is this one."""
        history = () if self._history is None else reversed(self._history())
        for each in history:
            if each.get("activityType") == COMPACTED and each.get("subagentRunId") == run.tag:
                activity = wire.ActivitySnapshotEvent(
                    message_id=each["id"], activity_type=COMPACTED, content=each["content"]
                )
                return [wire_event(activity, run.tag)]
        return []

    def _executed(self, event: PromptExecuted, run: OpenRun) -> list[Event]:
        if run.tag is None:
            # `finish`, `fail` and `cancel` report the end of the outermost run. Requests that were cut off are in its cost only.
            is_known, self._usage, self._cost = self._cost == event.cost, event.usage, event.cost
            return [] if is_known else [self._spending()]
        if event.cost is None:
            self._calls.lose_cost(run.id)
        events = self._writer.drop(run) if run.is_writing else []
        return [*events, *self._nested.end(run, event.stop_reason)]


MODEL_FAILED = "handrail.model_failed"
"""The custom event that tells that a model's request failed, and is repeated, or another model is asked."""
_REPLACED = {"@ag-ui/client": {"authoritativeActivityTypes": [MADE, WITHDRAWN, COMPACTED]}}
"""The types of activities that a snapshot replaces, in the form that AG-UI's own client reads."""


def messages_snapshot(messages: Sequence[Mapping[str, Any]]) -> Event:
    """Return the event with a snapshot of a thread's messages.

    Older clients are sent the snapshot without the messages of nested runs. Clients drop what models made, but not other
    activities, if it is not in the snapshot.
    """
    event = wire.MessagesSnapshotEvent.model_validate({"messages": messages, "metadata": _REPLACED})
    data = dump(event)
    own = [each for each in data["messages"] if "subagentRunId" not in each]
    return Event(data, False, None if len(own) == len(data["messages"]) else {**data, "messages": own})


def _run_of(event: Any) -> str:
    context = getattr(event, "run_context", None)
    return event.run_id if context is None else context.run_id


def _token_usage(model: str, usage: Usage) -> wire.TokenUsage:
    provider, _, name = model.rpartition(":")
    return wire.TokenUsage(
        provider=provider or None,
        model=name,
        input_tokens=usage.input,
        output_tokens=usage.output,
        total_tokens=usage.tokens,
        cached_input_tokens=usage.cached or None,
        cache_write_input_tokens=usage.cache_writes or None,
    )
