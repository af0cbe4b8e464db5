"""`Translator`: the events of a Handrail run, as AG-UI events.

One run is told in one or more *legs*: a leg is what one AG-UI request is answered with. It ends when the
run is over, or when everything in it waits for a person; the next leg goes on with the same run.

What is promised, whatever happens in the run:
- everything that is started in a leg (messages, reasoning, calls, nested runs) is ended in it;
- a call is told once and its result once, in whatever legs;
- what a model wrote in a request that failed does not stand: the messages are given anew without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from ag_ui.core import (
    MessagesSnapshotEvent,
    RunErrorEvent,
    RunFinishedCancelledOutcome,
    RunFinishedEvent,
    RunFinishedSuccessOutcome,
    RunStartedEvent,
    StateDeltaEvent,
    StateSnapshotEvent,
    TokenUsage,
)

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.events import (
    Advised,
    ApprovalDecided,
    CallDelta,
    Emitted,
    MessageAdded,
    ModelFailed,
    ModelResponded,
    Progress,
    PromptExecuted,
    PromptRendered,
    QuestionAnswered,
    TextDelta,
    ThinkingDelta,
    ToolInvoked,
    ToolRolledBack,
    ToolStarted,
)
from handrail.messages import AssistantMessage, Message, ToolMessage, Usage, UserMessage
from handrail.place import is_in_run
from handrail.question import Question
from handrail.serve.agui.book import Known, RunUnderWay
from handrail.serve.agui.call_states import Calls, usage_json
from handrail.serve.agui.interrupts import question_json, rest
from handrail.serve.agui.message_writer import Pen
from handrail.serve.agui.patching import patch
from handrail.serve.agui.shortening import shortened
from handrail.serve.agui.subagents import Subagents
from handrail.serve.agui.wire_events import PROTOCOL, Event, clean, custom, plain_json, sent

CANCELLED = "The run was cancelled."
_CUT = "What came of this call is not known: the call around it ended without it."


class Translator:
    """Tells one run. It is fed with the run's events in the order they were published.

    `known` is what the thread has shown before, shared by its runs; `history` gives the thread's messages
    as they stand, nested ones too. For a run that is resumed, `said` gives what was said in it, or in one
    nested in it, before it came past its record; `usage` and `cost` are what it had spent.
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
        self._calls = Calls(run_id, clock)
        self._nested = Subagents(run_id, self._calls.at)
        self._pen = Pen(self._known)
        self._state: Any = None
        self._asked: dict[str, str] = {}
        """The questions that were told, and who asks."""
        self._usage = usage or Usage()
        self._cost = cost
        self._spent: dict[str, Usage] = {}
        """What this leg used, by model."""
        self._takes: dict[type, Callable[[Any, RunUnderWay], list[Event]]] = {
            TextDelta: self._text,
            ThinkingDelta: self._thought,
            CallDelta: self._call,
            PromptRendered: self._rendered,
            MessageAdded: self._added,
            ToolStarted: self._started,
            ToolInvoked: self._over,
            ToolRolledBack: self._rolled_back,
            Progress: self._progress,
            Emitted: self._emitted,
            QuestionAnswered: self._answered,
            ApprovalDecided: self._decided,
            ModelResponded: self._responded,
            ModelFailed: self._failed,
            Advised: self._advised,
            PromptExecuted: self._executed,
        }

    # --- legs ------------------------------------------------------------------------------------

    @property
    def leg(self) -> str | None:
        """The leg that is open."""
        return self._leg

    def begin_leg(self, leg_id: str, state: Any | None = None) -> list[Event]:
        """Begin to tell the run, or go on with it."""
        self._leg = leg_id
        self._legs += 1
        return [self.started(leg_id), *self._snapshot(state)]

    def started(self, leg_id: str) -> Event:
        """How a leg begins; also for somebody who joins in the middle of it."""
        begun = RunStartedEvent(
            thread_id=self.thread_id,
            run_id=leg_id,
            protocol_version=PROTOCOL,
            metadata={"handrail": {"run_id": self.run_id}},
        )
        return sent(begun)

    def interrupt(self, questions: Sequence[Question], state: Any | None = None) -> list[Event]:
        """Everything waits for answers."""
        told = [*self._end_writing(), *self._nested.suspend(questions), *self._snapshot(state)]
        told.append(rest(self.thread_id, self._leg_id(told), questions, self._calls.at, self._token_usage()))
        self._end_leg()
        return told

    def finish(self, *, output: object = None) -> list[Event]:
        """The run is done."""
        told = [*self._end_writing(), *self._nested.abandon("cancelled")]
        finished = RunFinishedEvent(
            thread_id=self.thread_id,
            run_id=self._leg_id(told),
            outcome=RunFinishedSuccessOutcome(),
            result=None if output is None else plain_json(output),
            usage=self._token_usage(),
        )
        told.append(sent(finished))
        self._end_leg()
        return told

    def cancel(self) -> list[Event]:
        """The run was cancelled. Older clients know no such end: for them it is an error that says so."""
        told = [*self._end_writing(), *self._nested.abandon("cancelled")]
        finished = RunFinishedEvent(
            thread_id=self.thread_id,
            run_id=self._leg_id(told),
            outcome=RunFinishedCancelledOutcome(),
            usage=self._token_usage(),
        )
        older = RunErrorEvent(message=CANCELLED, code="cancelled", usage=finished.usage)
        data = finished.model_dump(mode="json", by_alias=True)
        told.append(Event(data, False, older.model_dump(mode="json", by_alias=True)))
        self._end_leg()
        return told

    def fail(self, message: str, code: str = "failed") -> list[Event]:
        """The run has failed."""
        told = [*self._end_writing(), *self._nested.abandon("failed")]
        self._leg_id(told)
        told.append(sent(RunErrorEvent(message=clean(message), code=code, usage=self._token_usage())))
        self._end_leg()
        return told

    def open(self) -> list[Event]:
        """What somebody who joins now has to be told, beside the leg's start, the messages and the state."""
        told = self._nested.so_far()
        for run in self._nested:
            told += self._pen.so_far(run)
        told += self._calls.so_far()
        if self._usage.requests:
            told.append(self._spending())
        return told

    def _leg_id(self, told: list[Event]) -> str:
        """The open leg; where none is, one is begun in front of what is told."""
        if self._leg is None:
            told[:0] = self.begin_leg(f"{self.run_id}-{self._legs + 1}")
        assert self._leg is not None
        return self._leg

    def _end_leg(self) -> None:
        self._leg = None
        self._nested.end_leg()
        self._calls.end_leg()
        self._spent.clear()

    def _end_writing(self) -> list[Event]:
        """End what models were writing. A run that ends or rests has nothing of the kind, unless it was cut."""
        cut = [run for run in self._nested if run.streams]
        told = [event for run in cut for event in self._pen.drop(run)]
        return [*told, *self._messages()] if cut else told

    def _snapshot(self, state: Any) -> list[Event]:
        if state is None:
            return []
        self._state = state
        return [sent(StateSnapshotEvent(snapshot=state))]

    def _token_usage(self) -> list[TokenUsage] | None:
        """What this leg used itself, by model."""
        return [_token_usage(model, usage) for model, usage in self._spent.items()] or None

    # --- what is told from outside ------------------------------------------------------------------

    def changed(self, state: Any) -> list[Event]:
        """The state that is shown may have changed: what of it has."""
        before, self._state = self._state, state
        operations = patch(before, state)
        if not operations or self._leg is None:
            return []
        return [sent(StateDeltaEvent.model_validate({"delta": operations}))]

    def asked(self, question: Question) -> list[Event]:
        """Somebody is asked. Our own page shows it at once, before the rest of the run comes to rest."""
        self._asked[question.id] = question.call_id
        return [
            *self._calls.waits(question.call_id, True),
            custom("handrail.question", question_json(question)),
        ]

    def closed(self, question_id: str, outcome: str, by: str = "") -> list[Event]:
        """A question that was told is over."""
        call_id = self._asked.pop(question_id, None)
        if call_id is None:
            return []
        waits = call_id in self._asked.values()
        value = {"question_id": question_id, "outcome": outcome, "by": by}
        return [*self._calls.waits(call_id, waits), custom("handrail.question.closed", value)]

    def committed(self, call_id: str, diff: str, paths: Sequence[str]) -> list[Event]:
        """What a call that is over did to files, which the record knows."""
        return [self._calls.committed(call_id, diff, list(paths))] if diff or paths else []

    def recall(self, run_id: str, said: Sequence[Message]) -> None:
        """Let it be known what was said in a run, or in one nested in it: it is not told again."""
        run = self._nested.run(run_id)
        run.begun, run.turn, run.calls = True, 0, 0
        for message in said:
            if isinstance(message, AssistantMessage):
                self._calls.asked_for(run, message)
                self._known.calls.update(call.id for call in message.calls)
                run.turn += 1
            elif isinstance(message, ToolMessage):
                self._known.results.update(result.id for result in message.results)

    # --- what happens in the run --------------------------------------------------------------------

    def take(self, event: object) -> list[Event]:
        """One event of the run, or of one nested in it; anything else is let pass."""
        taken = self._takes.get(type(event))
        if taken is None:
            return []
        run_id = _run_of(event)
        if not is_in_run(run_id, self.run_id):
            return []
        run = self._nested.run(run_id)
        told = taken(event, run)
        if told and run.tag is not None and type(event) is not PromptExecuted:
            told = [*self._nested.enter(run), *told]
        if self._leg is None and any(each.data["type"] != "CUSTOM" for each in told):
            self._leg_id(told)  # a question has timed out, say: the run goes on without anybody having asked
        return told

    def _text(self, event: TextDelta, run: RunUnderWay) -> list[Event]:
        return self._pen.text(run, event.text)

    def _thought(self, event: ThinkingDelta, run: RunUnderWay) -> list[Event]:
        return self._pen.thought(run, event.text)

    def _call(self, event: CallDelta, run: RunUnderWay) -> list[Event]:
        return self._pen.call(run, event)

    def _rendered(self, event: PromptRendered, run: RunUnderWay) -> list[Event]:
        """A run begins, or is gone through again from its record."""
        run.name = event.prompt
        run.forget_answer()
        self.recall(run.id, () if self._said_before is None else self._said_before(run.id))
        return [] if run.tag is None else self._nested.enter(run)

    def _added(self, event: MessageAdded, run: RunUnderWay) -> list[Event]:
        message = event.message
        if isinstance(message, ToolMessage):
            return [told for each in message.results for told in self._result(each.id, each.text, run)]
        if not run.begun:
            return []  # what was said elsewhere, before the run
        if isinstance(message, AssistantMessage):
            self._calls.asked_for(run, message)
            told = self._pen.whole(run, message)
            run.turn += 1
            return told
        return self._said(message, run)

    def _said(self, message: UserMessage, run: RunUnderWay) -> list[Event]:
        """What the person said: whoever sent it has it, so only our own page is told, for other windows."""
        id = f"{run.id}/user"
        if run.tag is not None or message.by_run:
            return []
        return [custom("handrail.message", {"id": id, "role": "user", "content": clean(message.text)})]

    def _result(self, call_id: str, text: str, run: RunUnderWay) -> list[Event]:
        """The one result of a call that was told."""
        known = self._known
        if call_id not in known.calls or call_id in known.results:
            return []
        known.results.add(call_id)
        return [self._pen.result(call_id, shortened(text, self.run_id), run.tag)]

    def _started(self, event: ToolStarted, run: RunUnderWay) -> list[Event]:
        return self._calls.started(event, run)

    def _over(self, event: ToolInvoked, run: RunUnderWay) -> list[Event]:
        told = [*self._left_inside(event.call_id), *self._calls.over(event, run)]
        return [*told, *self._result(event.call_id, event.result.render(), run)]

    def _left_inside(self, call_id: str) -> list[Event]:
        """Calls of nested runs that were cut for good: what was around them is over, and nobody goes on with them."""
        told: list[Event] = []
        cut: dict[str, RunUnderWay] = {}
        for id, place in self._calls.inside(call_id):
            if id not in self._known.results:
                run_id = place.run.id(self.run_id)
                inner = cut[run_id] = self._nested.run(run_id)
                told += [*self._nested.enter(inner), *self._result(id, _CUT, inner)]
        return [
            *told,
            *(end for inner in reversed(cut.values()) for end in self._nested.over(inner, "cancelled")),
        ]

    def _rolled_back(self, event: ToolRolledBack, run: RunUnderWay) -> list[Event]:
        return self._calls.rolled_back(event)

    def _progress(self, event: Progress, run: RunUnderWay) -> list[Event]:
        return self._calls.progress(event, run)

    def _emitted(self, event: Emitted, run: RunUnderWay) -> list[Event]:
        name = type(event.event).__name__
        return [custom(name, plain_json(event.event), run.tag)]

    def _answered(self, event: QuestionAnswered, run: RunUnderWay) -> list[Event]:
        return self.closed(event.question_id, event.outcome, event.by)

    def _decided(self, event: ApprovalDecided, run: RunUnderWay) -> list[Event]:
        return self.closed(event.question_id, event.approval.outcome, event.approval.by)

    def _responded(self, event: ModelResponded, run: RunUnderWay) -> list[Event]:
        self._spent[event.model] = self._spent.get(event.model, Usage()) + event.usage
        self._usage += event.usage
        self._cost = None if self._cost is None or event.cost is None else self._cost + event.cost
        self._calls.spent(event)
        return [self._spending()]

    def _spending(self) -> Event:
        cost = None if self._cost is None else str(self._cost)
        return custom(
            "handrail.usage", {"usage": usage_json(self._usage), "cost": cost, "run_id": self.run_id}
        )

    def _failed(self, event: ModelFailed, run: RunUnderWay) -> list[Event]:
        if not run.streams:
            return []
        return [*self._pen.drop(run), *self._messages()]

    def _messages(self) -> list[Event]:
        """All messages anew: what is not among them does not stand."""
        if self._history is None:
            return []
        all = [*self._history(), *(each for run in self._nested for each in self._pen.messages(run))]
        return [messages_snapshot(all)]

    def _advised(self, event: Advised, run: RunUnderWay) -> list[Event]:
        value = {"kind": event.kind, "by": event.by, "text": clean(event.text), "failed": event.failed}
        return [custom("handrail.advised", value, run.tag)]

    def _executed(self, event: PromptExecuted, run: RunUnderWay) -> list[Event]:
        if run.tag is None:
            return []  # whoever runs it says how it ended
        told = self._pen.drop(run) if run.streams else []
        return [*told, *self._nested.over(run, event.stop_reason)]


def messages_snapshot(messages: Sequence[Mapping[str, Any]]) -> Event:
    """All messages of a thread; older clients do not get those of nested runs."""
    event = MessagesSnapshotEvent.model_validate({"messages": messages})
    data = event.model_dump(mode="json", by_alias=True)
    own = [each for each in data["messages"] if "subagentRunId" not in each]
    return Event(data, False, None if len(own) == len(data["messages"]) else {**data, "messages": own})


def _run_of(event: Any) -> str:
    context = getattr(event, "run_context", None)
    return event.run_id if context is None else context.run_id


def _token_usage(model: str, usage: Usage) -> TokenUsage:
    provider, _, name = model.rpartition(":")
    return TokenUsage(
        provider=provider or None,
        model=name,
        input_tokens=usage.input,
        output_tokens=usage.output,
        total_tokens=usage.tokens,
        cached_input_tokens=usage.cached or None,
        cache_write_input_tokens=usage.cache_writes or None,
    )
