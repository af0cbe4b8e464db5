"""Tests for the translation of run events into AG-UI events: waiting, resumed and nested runs, and concurrent calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import Adapter, Prompt, ScriptedModel, Session, Tool, ToolCall, ToolContext, ToolResult, tool
from handrail.errors import PromptEvaluationError, RunParked
from handrail.events import MessageAdded
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import AssistantMessage, Message, Price, Traits, Usage
from handrail.models import ModelUnavailable
from handrail.models.scripted import Reply
from handrail.protocols import Environment, PolicyDecision
from handrail.question import Answer, Question
from handrail.serve.agui.message_writer import Known
from handrail.serve.agui.translator import Translator, messages_snapshot
from handrail.serve.agui.wire_events import Event
from handrail.tools import RunMode
from serve.agui.agui_grammar import Checker, Wrong
from support.parked_runs import answer_to

# --- the plan of a run: the model's answers and the calls' steps -----------------------------------------


@dataclass(frozen=True)
class Act:
    """One call in a plan, with its steps in order and how it ends."""

    does: tuple[Any, ...] = ()
    """Each step is `progress`, `emit`, `ask`, `inner`, a `Plan` (a nested run) or a tuple of concurrent plans."""
    ends: str = "ok"
    """`ok`, `fails`, `raises`, `risky` (needs approval), `unknown` (no such tool) or `broken` (invalid JSON)."""


@dataclass(frozen=True)
class Turn:
    """One model answer."""

    text: str = ""
    thinking: str = ""
    acts: tuple[Act, ...] = ()
    ids: str = "none"
    """`none`: no ids. `own`: distinct ids. `same`: the same ids in every turn of the root run, and distinct ids in nested runs."""
    fails: tuple[str, ...] = ()
    """The text that each failed request before this answer had streamed, or `call` for a part of a call."""


@dataclass(frozen=True)
class Plan:
    """A run, given by all its model's answers except the last one, which is plain text."""

    turns: tuple[Turn, ...] = ()


TEXTS = st.sampled_from(["", "Well.", "It rains in Oslo.", "  ", "ä 🌍 x"])
ENDS = st.sampled_from(["ok", "ok", "ok", "fails", "raises", "risky", "unknown", "broken"])


def plans(depth: int) -> st.SearchStrategy[Plan]:
    does: st.SearchStrategy[Any] = st.sampled_from(["progress", "progress", "emit", "ask", "inner"])
    if depth:
        inner = plans(depth - 1)
        does = st.one_of(does, inner, st.tuples(inner, inner))
    # `builds` is not used here, since printing its nested values takes too long.
    acts = st.tuples(st.lists(does, max_size=3).map(tuple), ENDS).map(lambda made: Act(*made))
    turns = st.tuples(
        TEXTS,
        TEXTS,
        st.lists(acts, min_size=1, max_size=2).map(tuple),
        st.sampled_from(["none", "same", "own"]),
        st.lists(st.sampled_from(["", "Half an ans", "call"]), max_size=2).map(tuple),
    ).map(lambda made: Turn(*made))
    return st.lists(turns, max_size=2).map(lambda made: Plan(tuple(made)))


@dataclass
class Landed:
    """An event that a tool emits."""

    at: float


@dataclass
class Choice:
    """An answer to a question."""

    word: str


class AsksForRisky:
    """A policy that asks about risky calls only."""

    name = "asks"

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        return PolicyDecision.ask("it is risky") if tool.name == "risky" else PolicyDecision.allow()

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        return None


class Stage:
    """The tools and the model that carry out plans."""

    def __init__(self) -> None:
        self.plans: dict[str, Plan] = {}
        self.failed: dict[tuple[str, int], int] = {}
        stage = self

        @tool(name="act", description="Do what the plan says.", effect="idempotent")
        async def act(key: str, context: ToolContext) -> str:
            return await stage.play(key, context)

        @tool(name="risky", description="Do it, if somebody approves.", effect="irreversible")
        async def risky(key: str, context: ToolContext) -> str:
            return "done"

        @tool(name="small", description="A call inside a call.", effect="read")
        async def small(context: ToolContext) -> str:
            context.report_progress("inside", done=1, total=2)
            return "small"

        self.tools = (act, risky, small)
        self.prompt = Prompt("root", "Play.", tools=self.tools, policies=[AsksForRisky()])
        self.model = ScriptedModel(
            self.answer, traits=Traits(native_output=True, price=Price(Decimal(1), Decimal(1)))
        )

    def act_of(self, key: str) -> Act:
        plan, turn, number = key.rsplit("/", 2)
        return self.plans[plan].turns[int(turn)].acts[int(number)]

    async def play(self, key: str, context: ToolContext) -> str:
        act = self.act_of(key)
        for number, what in enumerate(act.does):
            if what == "progress":
                context.report_progress(f"at {number}", done=number, total=float("inf"))
            elif what == "emit":
                context.emit(Landed(float("nan")))
            elif what == "ask":
                assert context.wait_for is not None
                await context.wait_for("word", {"key": key}, Choice)
            elif what == "inner":
                await context.call("small")
            else:
                nested: tuple[Plan, ...] = what if isinstance(what, tuple) else (what,)
                runs: list[Awaitable[Any]] = []
                for place, plan in enumerate(nested):
                    name = f"{key}/{number}/{place}"
                    self.plans[name] = plan
                    prompt = Prompt("helper", "Help.", tools=self.tools, policies=[AsksForRisky()])
                    runs.append(context.adapter.evaluate(prompt, name))
                await asyncio.gather(*runs)
        if act.ends == "raises":
            raise ValueError("it went wrong")
        assert act.ends != "fails", "it failed"
        return f"result of {key}"

    def answer(self, request: Any) -> Reply:
        said = list(request.messages)
        starts = [number for number, each in enumerate(said) if getattr(each, "by_run", None) is False]
        key = said[starts[-1]].text
        turn = sum(isinstance(each, AssistantMessage) for each in said[starts[-1] :])
        plan, usage = self.plans[key], Usage(10, 3, requests=1)
        if turn >= len(plan.turns):
            return Reply(f"Done with {key}.", usage=usage)
        meant = plan.turns[turn]
        failed = self.failed.get((key, turn), 0)
        if failed < len(meant.fails):
            self.failed[key, turn] = failed + 1
            half = meant.fails[failed]
            calls = [ToolCall("act", '{"key": "', f"{key}-{turn}-0")] if half == "call" else []
            return Reply(half, calls=calls, error=ModelUnavailable("scripted:script", "it is gone"))
        return Reply(meant.text, thinking=meant.thinking, calls=self.calls(key, turn, meant), usage=usage)

    def calls(self, key: str, turn: int, meant: Turn) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for number, act in enumerate(meant.acts):
            name = {"risky": "risky", "unknown": "nothing"}.get(act.ends, "act")
            arguments: Any = "{" if act.ends == "broken" else {"key": f"{key}/{turn}/{number}"}
            # a resumed session does not know the call ids of finished nested runs, so nested runs never repeat them
            ids = "own" if meant.ids == "same" and "/" in key else meant.ids
            id = {"none": None, "same": f"call_{number}", "own": f"{key}-{turn}-{number}"}[ids]
            calls.append(ToolCall(name, arguments, id))
        return calls


# --- a minimal thread that runs plans and streams their events ---------------------------------------------


@dataclass
class Window:
    """A viewer of the thread with either the newest client or an older one."""

    checker: Checker
    older: bool

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            data = event.older if self.older else event.data
            if data is not None:
                self.checker.take(data)


@dataclass
class Small(Environment):
    """A thread that runs, waits, parks, resumes and cancels as the server's threads do, with two viewers."""

    stage: Stage
    journal: MemoryJournal = field(default_factory=MemoryJournal)
    known: Known = field(default_factory=Known)
    run_mode: RunMode = "user"
    parks: bool = True
    keeps_secrets: bool = True

    def __post_init__(self) -> None:
        self.windows = [Window(Checker(), False), Window(Checker(older=True), True)]
        self.questions: list[Question] = []
        self.rested = asyncio.Event()
        self.is_parked = False
        self.stirred = 0
        self.legs = 0
        self.cut_after: int | None = None
        self.task: asyncio.Task[Any] | None = None
        self.translator: Translator | None = None
        self.current: Session | None = None
        self.wrong: list[Exception] = []

    # --- the environment ---

    async def ask(self, question: Question, /) -> Answer | None:
        self.questions.append(question)
        self.tell(self.now.ask(question))
        return None

    def run_waiting(self, parking: Any) -> None:
        """End the leg before the run can continue. Park the run if `is_parked` is set."""
        if self.now.leg is not None:
            self.tell(self.now.interrupt(list(self.questions)))
        if self.is_parked:
            assert parking.park()
        self.rested.set()

    # --- the stream ---

    @property
    def now(self) -> Translator:
        assert self.translator is not None
        return self.translator

    def tell(self, events: Sequence[Event]) -> None:
        for window in self.windows:
            window.take(events)

    def heard(self, event: object) -> None:
        """Translate an event and send it to the viewers. An exception is kept for the test, since the bus would only log it."""
        self.stirred += 1
        try:
            self.tell(self.now.take(event))
        except Exception as error:
            self.wrong.append(error)
        if self.cut_after is not None and self.stirred >= self.cut_after and self.task is not None:
            self.task.cancel()

    def next_leg(self) -> str:
        self.legs += 1
        return f"leg-{self.legs}"

    def messages(self, session: Session) -> list[dict[str, Any]]:
        """Return the model's finished messages, its calls and their results, as the first viewer received them."""
        known = self.windows[0].checker
        calls: list[dict[str, Any]] = [
            {"id": id, "type": "function", "function": {"name": known.names[id], "arguments": text}}
            for id, text in known.calls.items()
            if id in self.known.calls
        ]
        said: list[dict[str, Any]] = [
            {"id": id, "role": "assistant", "content": text, **_tag(known, "message", id)}
            for id, text in known.texts.items()
            if id not in known._open.get("message", {})
        ]
        for call in calls:
            tag = _tag(known, "call", call["id"])
            said.append({"id": f"of {call['id']}", "role": "assistant", "toolCalls": [call], **tag})
            if call["id"] in known.results:
                text = known.results[call["id"]]
                said.append(
                    {
                        "id": f"re {call['id']}",
                        "role": "tool",
                        "toolCallId": call["id"],
                        "content": text,
                        **tag,
                    }
                )
        return said

    # --- a run ---

    async def run(self, key: str, plan: Plan, says: Callable[[Question], Answer], parks: bool) -> str:
        """Run a plan, and return how it ended. Whenever all calls wait, answer all questions."""
        self.stage.plans[key], self.is_parked = plan, parks
        session = self.current or self.session()
        adapter = self.new_adapter()
        self.translator = self.translator_of(key, session)
        self.tell(self.now.begin_leg(self.next_leg()))
        stream = adapter.stream(self.stage.prompt, key, session=session, run_id=f"run-{key}")
        self.task = asyncio.ensure_future(stream.response)
        while True:
            await self.until_it_rests()
            if self.task.done() or self.wrong:
                break
            asked, self.questions = self.questions, []
            if parks:
                await asyncio.wait([self.task])
                assert isinstance(self.task.exception(), RunParked), self.task
                session = self.session()
                self.translator = self.translator_of(
                    key, session, said_in(session)
                )  # as if another process continued the run
            if self.now.leg is None:
                self.tell(self.now.begin_leg(self.next_leg()))
            for question in asked:
                self.journal.questions.answer(says(question))
            if parks:
                resumed = adapter.resume(f"run-{key}", self.stage.prompt, session=session)
                self.task = asyncio.ensure_future(resumed)
        return self.end()

    def end(self) -> str:
        if self.wrong:
            raise self.wrong[0]
        assert self.task is not None
        if self.task.cancelled():
            self.tell(self.now.cancel())
            return "cancelled"
        error = self.task.exception()
        if error is None:
            self.tell(self.now.finish(output=self.task.result().output))
            return "done"
        assert isinstance(error, PromptEvaluationError), error
        self.tell(self.now.fail(str(error), "failed"))
        return "failed"

    async def until_it_rests(self) -> None:
        assert self.task is not None
        rested = asyncio.ensure_future(self.rested.wait())
        await asyncio.wait({rested, self.task}, return_when=asyncio.FIRST_COMPLETED)
        rested.cancel()
        self.rested.clear()

    def session(self) -> Session:
        session = self.current = Session(id="thread")
        session.dispatcher.subscribe(object, self.heard)
        return session

    def new_adapter(self) -> Adapter:
        from handrail.run.adapter import Retry

        return Adapter(
            self.stage.model, environment=self, journal=self.journal, retry=Retry(attempts=3, first_wait=0.0)
        )

    def translator_of(
        self, key: str, session: Session, said: Callable[[str], Sequence[Message]] | None = None
    ) -> Translator:
        return Translator(
            "thread", f"run-{key}", known=self.known, history=lambda: self.messages(session), said=said
        )


def said_in(session: Session) -> Callable[[str], list[Message]]:
    """Return a function that returns the messages that the session has recorded for a run."""

    def said(run_id: str) -> list[Message]:
        facts = session[MessageAdded].all()
        return [
            each.message
            for each in facts
            if run_id == (each.run_id if each.conversation == "root" else each.conversation)
        ]

    return said


def _tag(checker: Checker, kind: str, id: str) -> dict[str, str]:
    owner = checker._owners.get((kind, id))
    return {} if owner is None else {"subagentRunId": owner}


def answers(word: str = "tea", approved: bool = True) -> Callable[[Question], Answer]:
    """Return a function that answers questions: approvals with `approved`, and all others with `word`."""

    def says(question: Question) -> Answer:
        value: Any = {"approved": approved} if question.kind == "approval" else {"word": word}
        return answer_to(question, value)

    return says


def check_told(small: Small, *, done: bool) -> None:
    """Check that every leg has ended and, if `done`, that every call that was started has a result."""
    if small.wrong:
        raise small.wrong[0]
    for window in small.windows:
        assert window.checker.leg is None
        if done:
            assert window.checker.calls.keys() == window.checker.results.keys()


# --- valid streams for any plan ---------------------------------------------------------------------------


@given(plan=plans(2), parks=st.booleans(), approved=st.booleans(), again=plans(1))
async def test_a_run_told_in_legs_is_a_stream_by_the_grammar(
    plan: Plan, parks: bool, approved: bool, again: Plan
) -> None:
    """Whatever a run does, and however often it is parked and resumed, every client gets a valid stream."""
    small = Small(Stage())
    for key, each in (("a", plan), ("b", again)):
        came = await small.run(key, each, answers(approved=approved), parks)
        assert came == "done"
        check_told(small, done=True)
        told = small.windows[0].checker.texts
        said = [*(turn.text for turn in each.turns), f"Done with {key}."]
        assert [told.get(f"run-{key}/{number}", "") for number in range(1, len(said) + 1)] == said
        assert not any("Half an ans" in text for text in told.values()), (
            "the text of a failed request is still shown"
        )


@given(plan=plans(2), after=st.integers(1, 60))
async def test_a_run_that_is_cut_anywhere_is_told_to_its_end(plan: Plan, after: int) -> None:
    """A run that is cancelled at any event leaves nothing open, and every started call has a result."""
    small = Small(Stage())
    small.cut_after = after
    came = await small.run("a", plan, answers(), False)
    check_told(small, done=True)
    assert small.windows[0].checker.outcomes[-1] == ("cancelled" if came == "cancelled" else "success")


# --- single features --------------------------------------------------------------------------------------


async def test_the_cost_of_a_run_that_was_stopped_is_unknown() -> None:
    """The end of a run reports its cost, if requests that were cut off have changed what is known of it."""
    asked = asyncio.Event()

    async def answer(request: Any) -> Any:
        if len(request.messages) == 1:
            return Reply(calls=[ToolCall("nothing")], usage=Usage(10, 5, requests=1))
        asked.set()
        await asyncio.Event().wait()

    session, told = Session(), Translator("t", "r")
    costs: list[Any] = []

    def take(event: object) -> None:
        found = [each.data for each in told.take(event)]
        costs.extend(each["value"]["cost"] for each in found if each.get("name") == "handrail.usage")

    session.dispatcher.subscribe(object, take)
    adapter = Adapter(ScriptedModel(answer, traits=Traits(Price(Decimal(1_000_000), Decimal(0)))))
    run = asyncio.ensure_future(adapter.evaluate(Prompt("p", "Do."), "go", session=session, run_id="r"))
    await asked.wait()
    run.cancel()
    await asyncio.wait([run])
    assert costs == ["10", None]


async def test_what_the_page_is_told_of_calls() -> None:
    """The page's events report each call's start, waits and end, its inner calls, and the cost of nested runs."""
    small = Small(Stage())
    inner = Plan((Turn(acts=(Act(("ask",)),)),))
    await small.run("a", Plan((Turn(acts=(Act(("inner", inner)), Act(ends="raises"))),)), answers(), False)
    check_told(small, done=True)
    facts = list(small.windows[0].checker.named("handrail.call"))
    one, two = (
        id for id, name in small.windows[0].checker.names.items() if id.count("-") == 2 and name == "act"
    )
    assert [each["status"] for each in facts if each["call_id"] == two] == ["running", "error"]
    (small_one,) = {each["call_id"] for each in facts if each["tool"] == "small"}
    assert {each.get("parent_call_id") for each in facts if each["call_id"] == small_one} == {one}
    last = [each for each in facts if each["call_id"] == one][-1]
    assert (last["status"], last["usage"], last["cost"]) == ("ok", {"input": 20, "output": 6}, "0.000026")
    asked = next(small.windows[0].checker.named("handrail.question"))
    assert [each["status"] for each in facts if each["call_id"] == asked["call_id"]] == [
        "running",
        "waiting",
        "running",
        "ok",
    ]
    assert next(small.windows[0].checker.named("handrail.question.closed"))["outcome"] == "answered"
    assert list(small.windows[0].checker.named("handrail.usage"))[-1]["usage"] == {"input": 40, "output": 12}


async def test_progress_is_shown_anew_in_each_leg() -> None:
    """In each leg, a call's progress begins with a snapshot, for clients that join in that leg."""
    small = Small(Stage())
    await small.run(
        "a", Plan((Turn(acts=(Act(("progress", "ask", "progress", "progress")),)),)), answers(), False
    )
    check_told(small, done=True)


@pytest.mark.parametrize("parks", [False, True])
@pytest.mark.parametrize("other", ["broken", "unknown", "raises", "ok"])
async def test_a_call_that_ends_beside_a_question_is_told_before_the_rest(other: str, parks: bool) -> None:
    """A call that ends while a question is open is reported before the leg ends. Nothing follows until the answer."""
    small = Small(Stage())
    plan = Plan((Turn(acts=(Act(ends=other), Act(ends="risky"), Act(ends=other))),))
    await small.run("a", plan, answers(), parks)
    check_told(small, done=True)
    assert small.windows[0].checker.legs == ["leg-1", "leg-2"]
    assert small.windows[0].checker.outcomes == ["interrupt", "success"]


async def test_a_client_that_joins_in_the_middle_reads_a_valid_stream() -> None:
    """A client that joins in the middle first receives everything that is open, so its stream is valid."""
    small = Small(Stage())
    joined: list[Checker] = []
    heard = small.heard

    def joining(event: object) -> None:
        heard(event)
        if small.now.leg is None:
            return
        checker = Checker()
        checker.take(small.now.started(f"{small.now.leg}-{len(joined)}").data)
        checker.take(messages_snapshot(small.messages(Session())).data)
        for told in small.now.open():
            checker.take(told.data)
        joined.append(checker)

    small.heard = joining  # pyright: ignore[reportAttributeAccessIssue]  # for this test
    inner = Plan((Turn("inside", "hm", (Act(("progress",)),)),))
    plan = Plan((Turn("some words", "a thought", (Act(("progress", (inner, inner))),), "own"),))
    await small.run("a", plan, answers(), False)
    check_told(small, done=True)
    assert len(joined) > 40
    assert any(checker._subagents for checker in joined)


async def test_the_state_is_told_by_what_changed() -> None:
    """Each change to the state is sent as one patch that produces the new state. Without a change, nothing is sent."""
    checker = Checker()
    told = Translator("t", "r")
    states: list[Any] = [
        {"Note": []},
        {"Note": [{"text": "one"}]},
        {"Note": [{"text": "one"}, {"text": "two"}], "a/b~c": [1]},
        {"Note": [{"text": "two"}], "a/b~c": [1]},
        {"Note": [{"text": "two"}]},
    ]
    checker.feed(event.data for event in told.begin_leg("leg", states[0]))
    for state in states[1:]:
        (change,) = told.changed(state)
        checker.take(change.data)
        assert checker.state == state
    assert told.changed(states[-1]) == []


def test_a_valid_stream_passes_the_grammar() -> None:
    checker = Checker()
    for event in Translator("t", "r").begin_leg("leg"):
        checker.take(event.data)
    checker.take({"type": "RUN_FINISHED", "threadId": "t", "runId": "leg"})
    assert checker.outcomes == ["success"]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("TEXT_MESSAGE_START", {"messageId": "m"}),
        ("TOOL_CALL_RESULT", {"messageId": "m", "toolCallId": "c", "content": "x"}),
        ("TOOL_CALL_START", {"toolCallId": "c", "toolCallName": "t"}),
        ("ACTIVITY_DELTA", {"messageId": "m", "activityType": "progress", "patch": []}),
        ("STATE_DELTA", {"delta": []}),
        ("SUBAGENT_STARTED", {"subagentRunId": "s", "name": "n"}),
        ("RUN_FINISHED", {"threadId": "t", "runId": "another"}),
        ("RUN_FINISHED", {"threadId": "t", "runId": "r", "more": 1}),
    ],
)
def test_the_grammar_refuses_what_clients_let_pass(kind: str, fields: dict[str, Any]) -> None:
    """The checker refuses each of these malformed streams."""
    checker = Checker()
    checker.take({"type": "RUN_STARTED", "threadId": "t", "runId": "r"})

    def told() -> None:
        checker.take({"type": kind, **fields})
        checker.take({"type": "RUN_FINISHED", "threadId": "t", "runId": "r"})

    with pytest.raises(Wrong):
        told()
