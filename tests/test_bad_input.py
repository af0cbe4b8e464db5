"""Invalid calls, paths, keys, snapshots, answers, limits, policies, bindings and events.

A row of a table has the action, the error class, and two parts of the message: what is wrong, and usually what to do. The
mistakes in `TOLD` are made in a call, so the model is told about them.
"""

import asyncio
import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any

import msgspec
import pytest

from handrail import Deadline, HandrailError, PathArg, Tool, ToolContext, UserContext, tool
from handrail.errors import (
    AnswerRefused,
    BudgetExceededError,
    Conflict,
    DefinitionError,
    EditRefused,
    EventRefused,
    FileInTheWay,
    FileLimitReached,
    FileMissing,
    PathRefused,
    ReducerError,
    ResourceError,
    SessionError,
)
from handrail.events import ToolInvoked
from handrail.guard import (
    Broker,
    CapabilityPolicy,
    RateLimitPolicy,
    ReadBeforeWritePolicy,
    SequentialDependencyPolicy,
)
from handrail.journal.sqlite import MemoryJournal
from handrail.protocols import Filesystem
from handrail.question import Answer, Question
from handrail.resources import Binding, RunResources, given
from handrail.resources.memory import FileLimits, MemoryFilesystem
from handrail.run import open_gate
from handrail.run.limits import Budget, BudgetTracker
from handrail.session import Session, kept, load, save
from handrail.testing import Nobody, Person, RecordingSubscriber, VirtualClock, run_virtual

# Many calls here are wrong on purpose, so they use names that pyright does not check.
any_gate: Any = open_gate
any_binding: Any = Binding
any_resources: Any = RunResources
any_capability: Any = CapabilityPolicy
any_rate: Any = RateLimitPolicy
any_sequence: Any = SequentialDependencyPolicy
any_broker: Any = Broker
any_budget: Any = Budget
any_after: Any = Deadline.after
any_kept: Any = kept
any_answer: Any = Answer
any_fact: Any = ToolInvoked

Row = tuple[Callable[[], Any], type[HandrailError], str, str]


@dataclass(frozen=True)
class Plan:
    text: str


@dataclass(frozen=True)
class Broken:
    text: str


def raises(contents: Any, event: Any) -> Any:
    raise ZeroDivisionError("in the reducer")


class Store:
    pass


def files() -> MemoryFilesystem:
    return MemoryFilesystem(
        {"docs/a.txt": "one two one", "docs/b.txt": "b"}, limits=FileLimits(max_file_size=100)
    )


# --- sessions and events -------------------------------------------------------------------------


def restore_foreign() -> None:
    Session(id="here").restore(Session(id="there").snapshot())


def load_changed(**changes: Any) -> None:
    session = Session(id="s")
    session.dispatch(Plan("x"))
    load(json.dumps({**json.loads(save(session)), **changes}), types=[Plan])


def load_without_types() -> None:
    session = Session(id="s")
    session.dispatch(Plan("x"))
    load(save(session))


def reducer_that_raises() -> None:
    session = Session(id="s")
    session.register(Plan, on=Broken, reducer=raises)
    session.dispatch(Broken("x"))


def commit_over_another() -> None:
    session = Session(id="s")
    fork = session.fork("call")
    fork[Plan].all()
    session.dispatch(Plan("of somebody else"))
    fork.commit()


def get_by_key() -> None:
    session = Session(id="s")
    session.dispatch(Plan("x"))
    session[Plan].get("x")


async def journaled_event() -> None:
    session = Session(id="s")
    open_gate([], session=session, journal=MemoryJournal())
    session.dispatch(Plan(object()))  # pyright: ignore[reportArgumentType]  # wrong on purpose


SESSIONS: dict[str, Row] = {
    "snapshot of another session": (
        restore_foreign,
        SessionError,
        "session 'here'",
        "Restore it into that session",
    ),
    "slice by a name": (
        lambda: Session(id="s")["Plan"],  # pyright: ignore[reportArgumentType]  # wrong on purpose
        SessionError,
        "'Plan' is not a type",
        "session[Plan]",
    ),
    "slice without keys": (get_by_key, DefinitionError, "no keys", "@kept(key=...)"),
    "saved text that is none": (
        lambda: load("{"),
        SessionError,
        "it is not a saved session",
        "Pass what `save` returned",
    ),
    "saved in another version": (
        lambda: load_changed(version=99),
        SessionError,
        "format 99",
        "Load it with the version",
    ),
    "saved without its parts": (
        lambda: load_changed(slices=3),
        SessionError,
        "session 's'",
        "`save` returned",
    ),
    "saved types unknown here": (
        load_without_types,
        SessionError,
        "unknown types",
        "types=[...]",
    ),
    "kept in no kind": (
        lambda: any_kept(kind="stats"),
        DefinitionError,
        "'stats'",
        "Use kind='state' or kind='log'",
    ),
    "kept by a text": (
        lambda: any_kept(key="id"),
        DefinitionError,
        "'id', not a function",
        "key=lambda item: item.id",
    ),
    "event that is a dict": (
        lambda: Session().dispatch({"text": "x"}),
        EventRefused,
        "event dict: it is a value of a built-in type",
        "Make it a frozen dataclass",
    ),
    "published event that is a text": (
        lambda: Session().dispatcher.publish("x"),
        EventRefused,
        "event str: it is a value",
        "Make it a frozen dataclass",
    ),
    "subscription to a name": (
        lambda: Session().dispatcher.subscribe("Plan", print),  # pyright: ignore[reportArgumentType]  # wrong on purpose
        EventRefused,
        "only a type can be subscribed to",
        "Pass the event's class",
    ),
    "reducer that raises": (
        reducer_that_raises,
        ReducerError,
        "'raises' failed on the event Broken with ZeroDivisionError",
        "not applied",
    ),
    "stale commit": (commit_over_another, Conflict, "Plan", "Look at the new state and try again"),
    "event that can't be saved": (
        journaled_event,
        EventRefused,
        "event Plan",
        "Use plain data for its fields",
    ),
}


# --- paths and files -----------------------------------------------------------------------------

FILES: dict[str, Row] = {
    "path out": (
        lambda: files().read("../etc/passwd"),
        PathRefused,
        "'../etc/passwd'",
        "Write the path from the root",
    ),
    "path absolute": (
        lambda: files().write("/etc/passwd", "x"),
        PathRefused,
        "'/etc/passwd'",
        "as in 'docs/notes.txt'",
    ),
    "path empty": (lambda: files().read(""), PathRefused, "the path is empty", "Name a file"),
    "path with a zero byte": (
        lambda: files().read("a\0b"),
        PathRefused,
        "control character",
        "Remove it",
    ),
    "path of Windows": (
        lambda: files().read("docs\\a.txt"),
        PathRefused,
        "backslash",
        "Separate folders with '/'",
    ),
    "path of home": (
        lambda: files().read("~/a"),
        PathRefused,
        "no home folder",
        "Write the path",
    ),
    "path that is a number": (
        lambda: files().read(3),  # pyright: ignore[reportArgumentType]  # wrong on purpose
        PathRefused,
        "must be a str, not an int",
        "Pass a str",
    ),
    "path misspelt": (lambda: files().read("docs/A.txt"), FileMissing, "'docs/A.txt'", "docs/a.txt"),
    "folder read": (lambda: files().read("docs"), HandrailError, "'docs'", "older"),
    "folder over a file": (lambda: files().mkdir("docs/a.txt"), FileInTheWay, "'docs/a.txt'", "file"),
    "edit of what is not there": (
        lambda: files().edit("docs/a.txt", "three", "3"),
        EditRefused,
        "'docs/a.txt'",
        "not",
    ),
    "edit of what is there twice": (
        lambda: files().edit("docs/a.txt", "one", "1"),
        EditRefused,
        "'docs/a.txt'",
        "all=True",
    ),
    "file too large": (lambda: files().write("docs/c", "x" * 101), FileLimitReached, "'docs/c'", "100"),
}


# --- answers -------------------------------------------------------------------------------------


def asked(clock: VirtualClock) -> Question:
    return Question(
        id="q1",
        kind="input",
        name="pick",
        message="?",
        payload=None,
        schema={},
        digest="d",
        principal="ada",
        asked_by=(),
        call_id="c",
        asked_at=clock.now(),
        expires_at=clock.now() + timedelta(seconds=60),
    )


async def answered(**wrong: Any) -> None:
    clock = VirtualClock()
    journal = MemoryJournal(clock)
    asking = asyncio.ensure_future(journal.questions.ask(asked(clock)))
    await asyncio.sleep(wrong.pop("after", 1))
    try:
        journal.questions.answer(any_answer(**{"question_id": "q1", "digest": "d", "by": "ada", **wrong}))
    finally:
        asking.cancel()


async def asked_twice() -> None:
    clock = VirtualClock()
    journal = MemoryJournal(clock)
    first = asyncio.ensure_future(journal.questions.ask(asked(clock)))
    await asyncio.sleep(1)
    try:
        await journal.questions.ask(msgspec.structs.replace(asked(clock), digest="other"))
    finally:
        first.cancel()


ANSWERS: dict[str, Row] = {
    "answer to nothing": (
        lambda: answered(question_id="q9"),
        AnswerRefused,
        "answer to 'q9' refused: there is no such question",
        "open questions",
    ),
    "answer to something else": (
        lambda: answered(digest="e"),
        AnswerRefused,
        "'q1'",
        "Read the question again",
    ),
    "answer of somebody else": (
        lambda: answered(by="bob"),
        AnswerRefused,
        "'bob' may not answer it",
        "Only 'ada' may",
    ),
    "answer too late": (
        lambda: answered(after=61),
        AnswerRefused,
        "the question has expired",
        "It ended without an answer, and its run continues without one",
    ),
    "answer of no kind": (
        lambda: answered(outcome="yes"),
        AnswerRefused,
        "'yes' is not a valid outcome",
        "Use one of 'answered'",
    ),
    "two questions of one id": (asked_twice, AnswerRefused, "'q1'", "Give each question its own id"),
}


# --- limits --------------------------------------------------------------------------------------

LIMITS: dict[str, Row] = {
    "deadline without a zone": (
        lambda: Deadline(datetime(2030, 1, 1)),
        DefinitionError,
        "2030-01-01",
        "`Deadline.after(300)`",
    ),
    "deadline in no time": (
        lambda: Deadline.after(0),
        DefinitionError,
        "after 0 seconds",
        "Pass a positive number",
    ),
    "deadline that is no number": (
        lambda: Deadline.after(math.nan),
        DefinitionError,
        "after nan",
        "Pass a positive number",
    ),
    "deadline beyond the calendar": (
        lambda: Deadline.after(1e15),
        DefinitionError,
        "too far in the future",
        "Leave it out",
    ),
    "deadline that is none": (
        lambda: any_after(None),
        DefinitionError,
        "after None seconds",
        "Pass a positive number",
    ),
    "approvals beyond the calendar": (
        lambda: open_gate([], approval_seconds=math.inf),
        DefinitionError,
        "approval_seconds is inf",
        "or None for no limit",
    ),
    "approvals in a text": (
        lambda: any_gate([], approval_seconds="5"),
        DefinitionError,
        "approval_seconds is '5'",
        "Pass a positive number of seconds",
    ),
    "depth in a text": (lambda: any_gate([], depth_limit="5"), DefinitionError, "limit '5'", "at least 0"),
    "budget below nothing": (
        lambda: Budget(tokens=-1),
        DefinitionError,
        "a budget of -1 tokens",
        "Pass a number",
    ),
    "budget that is no number": (
        lambda: any_budget(money=math.nan),
        DefinitionError,
        "nan money",
        "or None for no limit",
    ),
    "budget that is a truth": (
        lambda: any_budget(requests=True),
        DefinitionError,
        "True requests",
        "at least 0",
    ),
    "budget spent": (
        lambda: BudgetTracker(Budget(tokens=3)).reserve(tokens=4),
        BudgetExceededError,
        "the run's budget for tokens is too low",
        "4 wanted, 3 left",
    ),
    "unknown price under a budget": (
        lambda: BudgetTracker(Budget(money=1)).reserve(money=None),
        BudgetExceededError,
        "money",
        "Give the model a price",
    ),
    "depth below nothing": (
        lambda: open_gate([], depth_limit=-1),
        DefinitionError,
        "depth limit -1",
        "at least 0",
    ),
    "depth that is a truth": (
        lambda: open_gate([], depth_limit=True),
        DefinitionError,
        "depth limit True",
        "at least 0",
    ),
}


# --- policies and approvals ----------------------------------------------------------------------

POLICIES: dict[str, Row] = {
    "rate of nothing": (
        lambda: RateLimitPolicy(0, 1),
        DefinitionError,
        "0 calls in 1 seconds",
        "a whole number of calls, at least 1",
    ),
    "rate in no time": (
        lambda: RateLimitPolicy(1, 0),
        DefinitionError,
        "1 calls in 0 seconds",
        "a positive, finite time",
    ),
    "rate of a half": (
        lambda: any_rate(1.5, 1),
        DefinitionError,
        "1.5 calls",
        "a whole number of calls",
    ),
    "rate of a truth": (
        lambda: any_rate(True, 1),
        DefinitionError,
        "True calls",
        "a whole number of calls",
    ),
    "rate for ever": (
        lambda: RateLimitPolicy(1, math.inf),
        DefinitionError,
        "inf seconds",
        "a positive, finite time",
    ),
    "rate of a name": (lambda: any_rate(1, 1, tools="pay"), DefinitionError, "tools is a string", "{'pay'}"),
    "sequence of a name": (
        lambda: any_sequence({"b": "a"}),
        DefinitionError,
        "'b' requires the string 'a', not a set",
        "{'a'}",
    ),
    "sequence of itself": (
        lambda: any_sequence({"b": {"b"}}),
        DefinitionError,
        "'b' requires itself",
        "Remove it from its own set",
    ),
    "verdict that is none": (
        lambda: any_capability({"net": "yes"}),
        DefinitionError,
        "the verdict on 'net' is 'yes'",
        "Use 'allow', 'ask', 'deny' or ask(role=..., approvals=...)",
    ),
    "pattern that matches nothing": (
        lambda: any_capability({"fs.wri*": "deny"}),
        DefinitionError,
        "'fs.wri*' is neither a capability nor a pattern",
        "'fs.*' or '*'",
    ),
    "effect that is none": (
        lambda: any_capability(effects={"write": "ask"}),
        DefinitionError,
        "'write' is not an effect",
        "Use one of pure, read, staged",
    ),
    "scope in a text": (
        lambda: any_capability(scope="docs"),
        DefinitionError,
        "the scope is a string",
        "['docs']",
    ),
    "scope that leads out": (lambda: CapabilityPolicy(scope=[".."]), PathRefused, "'..'", "from the root"),
    "two policies of one name": (
        lambda: open_gate([], policies=[CapabilityPolicy(), CapabilityPolicy()]),
        DefinitionError,
        "two policies are named 'capability'",
        "a different `name`",
    ),
    "mode that is none": (
        lambda: any_gate([], approvals="yes"),
        DefinitionError,
        "approval mode 'yes'",
        "'interactive', 'approve_all', 'strict', or None",
    ),
    "mode of a broker that is none": (
        lambda: any_broker(MemoryJournal(), None, "always"),
        DefinitionError,
        "approval mode 'always'",
        "'approve_all'",
    ),
}


# --- tools of a gate, resources ------------------------------------------------------------------


def nothing_taken() -> Store:
    return Store()


def plain(text: str) -> str:
    """Return the text."""
    return text


GATES: dict[str, Row] = {
    "function that is no tool": (
        lambda: any_gate([plain]),
        DefinitionError,
        "plain is not a tool",
        "Pass a function decorated with `@tool`",
    ),
    "two tools of one name": (
        lambda: open_gate([tool(plain), tool(plain)]),
        DefinitionError,
        "two tools are named 'plain'",
        "Rename one of them",
    ),
    "binding in no scope": (
        lambda: any_binding(Store, lambda _: Store(), "session"),
        ResourceError,
        "resource Store: the scope is 'session'",
        "Use 'run', 'call' or 'fresh'",
    ),
    "binding of a thing": (
        lambda: any_binding(Store, Store()),
        ResourceError,
        "resource Store",
        "`given(protocol, object)`",
    ),
    "binding of a class": (
        lambda: any_binding(Store, Store),
        ResourceError,
        "resource Store",
        "`lambda resources: ...`",
    ),
    "binding of a function of nothing": (
        lambda: any_binding(Store, nothing_taken),
        ResourceError,
        "must take the resources",
        "`lambda resources: ...`",
    ),
    "binding to a name": (
        lambda: any_binding("Store", lambda _: 1),
        ResourceError,
        "resource Store",
        "a protocol or a class",
    ),
    "two bindings of one": (
        lambda: RunResources([given(Store, Store()), given(Store, Store())]),
        ResourceError,
        "resource Store: it is bound twice",
        "Keep one of the bindings",
    ),
    "a thing for a binding": (
        lambda: any_resources([Store()]),
        ResourceError,
        "resource Store",
        "Write `Binding(protocol, provider)`",
    ),
    "two filesystems": (
        lambda: open_gate(
            [],
            filesystem=files(),
            resources=[given(Filesystem, files())],
        ),
        ResourceError,
        "resource Filesystem: it is bound twice",
        "Keep one",
    ),
}

TABLE = {**SESSIONS, **FILES, **ANSWERS, **LIMITS, **POLICIES, **GATES}


@pytest.mark.parametrize("name", TABLE)
def test_a_mistake_is_refused_with_its_name_and_a_hint(name: str):
    """A mistake raises a Handrail error of the expected class, whose message is one line with both parts."""
    act, kind, thing, hint = TABLE[name]

    async def main() -> None:
        done = act()
        if inspect.isawaitable(done):
            await done

    with pytest.raises(HandrailError) as caught:
        run_virtual(main)
    assert isinstance(caught.value, kind)
    text = str(caught.value)
    assert thing in text
    assert hint in text
    assert "\n" not in text


def test_the_table_is_long_enough():
    """The tables list at least 75 mistakes, and no row of one table replaces a row of another."""
    assert len(TABLE) == sum(map(len, (SESSIONS, FILES, ANSWERS, LIMITS, POLICIES, GATES)))
    assert len(TABLE) + len(TOLD) >= 75


# --- messages to the model -----------------------------------------------------------------------


@tool(effect="staged", capabilities={"fs.write"})
async def write(path: Annotated[str, PathArg("write")], text: str, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return "written"


@tool
async def choose(context: UserContext) -> int:
    """Let somebody choose."""
    return await context.wait_for("pick", {}, int, timeout=10)


def doing(body: Callable[[ToolContext], Any], **options: Any) -> Tool[Any, Any]:
    @tool(name="do", description="Do it.", **options)
    async def do(context: ToolContext) -> Any:
        done = body(context)
        return await done if inspect.isawaitable(done) else done

    return do


declared = Tool("declared", "Only declared.")

Told = tuple[list[Tool[Any, Any]], dict[str, Any], tuple[str, Any], str, str, str]

TOLD: dict[str, Told] = {
    "no such tool": ([write], {}, ("wrote", {}), "invalid", "no tool 'wrote'", "Did you mean write?"),
    "no tool at all": ([], {}, ("wrote", {}), "invalid", "no tool 'wrote'", "Available tools: none"),
    "only declared": (
        [declared],
        {},
        ("declared", {}),
        "invalid",
        "no tool 'declared' that can be called",
        "Available tools: none",
    ),
    "not JSON": (
        [write],
        {},
        ("write", "{path"),
        "invalid",
        "arguments of write",
        "Correct them and call again",
    ),
    "an argument too many": (
        [write],
        {},
        ("write", {"path": "a", "text": "b", "mode": "w"}),
        "invalid",
        "mode",
        "Correct them",
    ),
    "an argument missing": ([write], {}, ("write", {"path": "a"}), "invalid", "text", "Correct them"),
    "an argument of another type": (
        [write],
        {},
        ("write", {"path": 3, "text": "b"}),
        "invalid",
        "path: must be text",
        "3",
    ),
    "arguments where there are none": ([doing(print)], {}, ("do", {"x": 1}), "invalid", "x", "Correct them"),
    "a path that leads out": (
        [write],
        {},
        ("write", {"path": "../a", "text": ""}),
        "error",
        "'../a'",
        "from the root",
    ),
    "no filesystem": (
        [write],
        {"filesystem": None},
        ("write", {"path": "a", "text": ""}),
        "error",
        "resource Filesystem: nothing is bound to it",
        "Pass `resources=[given(protocol, object)]`",
    ),
    "nothing bound": (
        [doing(lambda context: context.resources.get(Store))],
        {"resources": [given(int, 3)]},
        ("do", {}),
        "error",
        "resource Store: nothing is bound to it",
        "Bound: Filesystem, int",
    ),
    "asked for by a name": (
        [doing(lambda context: context.resources.get("Store"))],  # pyright: ignore[reportArgumentType]  # wrong on purpose
        {},
        ("do", {}),
        "error",
        "resource Store",
        "Pass `resources=[given(protocol, object)]`",
    ),
    "asked for by a list": (
        [doing(lambda context: context.resources.get([]))],  # pyright: ignore[reportArgumentType]  # wrong on purpose
        {},
        ("do", {}),
        "error",
        "resource []",
        "Pass `resources=[given(protocol, object)]`",
    ),
    "nobody to ask": (
        [choose],
        {"environment": None},
        ("choose", {}),
        "error",
        "needs 'wait_for'",
        "a person can be asked",
    ),
    "nobody to ask, headless": (
        [choose],
        {"environment": Nobody()},
        ("choose", {}),
        "error",
        "'wait_for'",
        "a person",
    ),
    "nobody answers": (
        [choose],
        {"environment": Person(after=60)},
        ("choose", {}),
        "error",
        "'pick'",
        "nobody answered in time",
    ),
    "no answer fits": (
        [choose],
        {"environment": Person(answers={"pick": "x"})},
        ("choose", {}),
        "error",
        "'pick'",
        "no valid answer",
    ),
    "not approved": (
        [doing(print)],
        {"policies": [CapabilityPolicy()]},
        ("do", {}),
        "denied",
        "do was not approved",
        "nobody",
    ),
    "not read before": (
        [write],
        {"policies": [ReadBeforeWritePolicy()]},
        ("write", {"path": "docs/a.txt", "text": "b"}),
        "denied",
        "docs/a.txt",
        "Read it first, then write",
    ),
    "out of order": (
        [doing(print)],
        {"policies": [SequentialDependencyPolicy({"do": {"test"}})]},
        ("do", {}),
        "denied",
        "do may run only after test succeeded",
        "Call test first",
    ),
    "once where all can be undone": (
        [doing(lambda context: context.once("pay", print), effect="staged")],
        {},
        ("do", {}),
        "error",
        "tool 'do' declares effect='staged'",
        "Declare the effect that it really has",
    ),
    "a write where it only reads": (
        [doing(lambda context: context.session.dispatch(Plan("x")), effect="read")],
        {},
        ("do", {}),
        "error",
        "it may not dispatch Plan",
        "Declare the effect",
    ),
    "a fact of ours": (
        [doing(lambda context: context.session.dispatch(INVOKED))],
        {},
        ("do", {}),
        "error",
        "event ToolInvoked",
        "an event class of your own",
    ),
    "a fact of ours published": (
        [doing(lambda context: context.event_bus.publish(INVOKED))],
        {},
        ("do", {}),
        "error",
        "event ToolInvoked",
        "of your own",
    ),
    "too deep": (
        [doing(lambda context: context.call("do"))],
        {"depth_limit": 0},
        ("do", {}),
        "error",
        "the limit is 0: do > do",
        "raise the run's depth limit",
    ),
    "a question that may wait beyond the calendar": (
        [doing(lambda context: context.wait_for("pick", {}, int, timeout=1e15))],  # pyright: ignore[reportOptionalCall]  # the environment has a person
        {"environment": Person()},
        ("do", {}),
        "error",
        "the timeout is 1000000000000000.0",
        "or None for no timeout",
    ),
    "a worker where there is none": (
        [doing(lambda context: context.call_worker("x", "y"))],
        {},
        ("do", {}),
        "error",
        "context.call_worker",
        "use the tool in a worker",
    ),
}

INVOKED: Any = any_fact("c", "t", (), "ok", None, None, 0, 1, (), None, None)


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.virtual_time
async def test_a_wrong_call_is_told_to_the_model(name: str):
    """An invalid call fails with a message that says what is wrong and what to do. It changes nothing."""
    tools, options, (called, arguments), status, thing, hint = TOLD[name]

    session = Session()
    seen = RecordingSubscriber(session)
    there = files()
    gate = any_gate(tools, session=session, **{"filesystem": there, "clock": VirtualClock(), **options})
    result = await gate.invoke(called, arguments)
    seen.assert_paired()
    assert not result.success
    assert thing in result.message
    assert hint in result.message
    assert "Traceback" not in result.message
    assert seen.statuses()[-1][1] == status
    assert there.glob("**") == files().glob("**")
    assert len(session[Plan]) == 0
