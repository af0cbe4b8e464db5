"""Policies with a real gate: which calls may run, and what policies remember."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest

from handrail import (
    Adapter,
    MarkdownSection,
    PathArg,
    Prompt,
    ScriptedModel,
    Tool,
    ToolContext,
    ToolResult,
    TransientError,
    tool,
)
from handrail.errors import DefinitionError, FileError
from handrail.events import ApprovalRequested, ToolInvoked, ToolRolledBack
from handrail.guard import (
    CapabilityPolicy,
    RateLimitPolicy,
    ReadBeforeWritePolicy,
    SequentialDependencyPolicy,
)
from handrail.guard.policy import PolicyNote
from handrail.guard.rate_limit import CallCounted, RateCell, RateWindow
from handrail.protocols import PolicyDecision
from handrail.resources.memory import MemoryFilesystem
from handrail.run import open_gate
from handrail.run.gate import Gate
from handrail.session import Session, kept
from handrail.testing import Person, RecordingSubscriber, VirtualClock, run_virtual
from handrail.tools import Effect

pytestmark = pytest.mark.virtual_time


@dataclass(frozen=True)
class Note:
    text: str


@tool(effect="staged")
async def note(text: str, context: ToolContext) -> str:
    """Keep a note."""
    context.session.dispatch(Note(text))
    return text


class Rule:
    """A policy that makes a given decision and records the calls and results it saw."""

    def __init__(self, name: str = "rule", check: Any = None, on_result: Any = None) -> None:
        self.name = name
        self._check = check
        self._on_result = on_result
        self.checked: list[str] = []
        self.results: list[tuple[str, Any]] = []

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> Any:
        self.checked.append(tool.name)
        if self._check is None:
            return PolicyDecision.allow()
        return self._check(params, context) if callable(self._check) else self._check

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> Any:
        self.results.append((tool.name, result.value))
        return None if self._on_result is None else self._on_result(result, context)


def raises(*_: Any) -> Any:
    raise RuntimeError("the policy is broken")


async def raises_later(*_: Any) -> Any:
    await asyncio.sleep(1)
    raise RuntimeError("the policy is broken")


def later(decision: Any) -> Callable[..., Any]:
    async def decide(*_: Any) -> Any:
        await asyncio.sleep(1)
        return decision

    return decide


def one_call(policy: Any, **options: Any) -> tuple[ToolResult[Any], Session, RecordingSubscriber]:
    """Make one call to `note` under these policies, and return its result, the session and the recorded events."""

    async def main() -> tuple[ToolResult[Any], Session, RecordingSubscriber]:
        session = Session()
        seen = RecordingSubscriber(session)
        policies = policy if isinstance(policy, list) else [policy]
        gate = open_gate([note], session=session, policies=policies, **options)
        result = await gate.invoke("note", {"text": "hello"})
        seen.assert_paired()
        return result, session, seen

    return run_virtual(main)


# --- allow, deny, ask ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "approve", "status", "words"),
    [
        (PolicyDecision.allow(), False, "ok", "hello"),
        (later(PolicyDecision.allow()), False, "ok", "hello"),
        (PolicyDecision.deny("use memo instead"), True, "denied", "note is not allowed: use memo instead"),
        (later(PolicyDecision.deny("use memo")), True, "denied", "note is not allowed: use memo"),
        (PolicyDecision.ask("is it true?"), True, "ok", "hello"),
        (later(PolicyDecision.ask("is it true?")), True, "ok", "hello"),
        (PolicyDecision.ask("is it true?"), "it is not", "denied", "not approved (denied): it is not"),
        (raises, True, "denied", "The policy 'rule' could not decide, so note is denied."),
        (raises_later, True, "denied", "The policy 'rule' could not decide, so note is denied."),
        (later(True), True, "denied", "could not decide"),
        (lambda *_: None, True, "denied", "could not decide"),
        (lambda *_: True, True, "denied", "could not decide"),
        (lambda *_: "allow", True, "denied", "could not decide"),
        (PolicyDecision("allowed"), True, "denied", "note"),  # pyright: ignore[reportArgumentType]  # wrong on purpose
        (PolicyDecision("denied", "no"), True, "denied", "note"),  # pyright: ignore[reportArgumentType]  # wrong on purpose
    ],
)
def test_what_a_policy_decides_is_what_happens(check: Any, approve: Any, status: str, words: str):
    """An allowed call runs, a denial gives its reason, and `ask` asks a person. Anything else denies the call."""
    result, session, seen = one_call(Rule(check=check), environment=Person(approve))
    assert seen.statuses() == [("note", status)]
    assert words in result.render()
    assert [each.text for each in session[Note].all()] == (["hello"] if status == "ok" else [])


ASK = PolicyDecision.ask("sure?")


@pytest.mark.parametrize(
    ("policies", "ended", "asked"),
    [
        ([Rule("a"), Rule("b")], "", None),
        ([Rule("a"), Rule("b", PolicyDecision.deny("no"))], "b", None),
        ([Rule("a", ASK), Rule("b", later(ASK)), Rule("c")], "a", "a"),
        ([Rule("a", ASK), Rule("b", later(PolicyDecision.deny("no")))], "b", None),
        ([Rule("a"), Rule("b", raises)], "b", None),
        ([Rule("a"), Rule("b", on_result=raises)], "b", None),
        ([Rule("a"), CapabilityPolicy(name="files", effects={"staged": "deny"})], "files", None),
    ],
)
def test_the_events_name_the_policy_that_decided(policies: list[Any], ended: str, asked: str | None):
    """The end of a call names the policy that denied it, or that was the first to ask; a request for approval names who asked."""
    _, _, seen = one_call(policies, environment=Person(approve=True))
    assert [end.policy for end in seen.of(ToolInvoked)] == [ended]
    assert [request.policy for request in seen.of(ApprovalRequested)] == ([] if asked is None else [asked])


async def test_a_request_of_the_handler_names_no_policy():
    """An approval that the handler itself requests names no policy, even if a policy asked for the call's approval before."""

    @tool(effect="idempotent")
    async def pay(context: ToolContext) -> bool:
        """Pay."""
        return (await context.request_approval("Really?")).approved

    session = Session()
    with RecordingSubscriber(session) as seen:
        gate = open_gate([pay], session=session, policies=[Rule("a", ASK)], environment=Person(approve=True))
        assert (await gate.invoke("pay")).success
    assert [request.policy for request in seen.of(ApprovalRequested)] == ["a", ""]


@pytest.mark.parametrize("denies", [0, 1, 2])
def test_all_must_allow(denies: int):
    """If one policy denies a call, the call is denied, whatever the order of the policies, and nobody is asked."""
    rules = [Rule(f"rule {index}", PolicyDecision.ask("?")) for index in range(3)]
    rules[denies] = Rule("denier", PolicyDecision.deny("no"))
    person = Person(approve=True)
    result, session, _ = one_call(rules, environment=person)
    assert (result.success, result.message) == (False, "note is not allowed: no")
    assert person.questions == []
    assert len(session[Note]) == 0


def test_two_that_ask_are_one_question_with_the_first_reason():
    """If two policies ask, the person gets one question, with the first reason."""
    person = Person(approve=True)
    rules = [Rule("one", PolicyDecision.ask("because")), Rule("two", PolicyDecision.ask("also"))]
    result, _, _ = one_call(rules, environment=person)
    assert result.success
    assert [question.message for question in person.questions] == ["because"]


def test_policy_that_asks_without_a_reason_is_named():
    """If a policy asks without a reason, the person is told which policy asks."""
    person = Person(approve=True)
    one_call(Rule("careful", PolicyDecision.ask()), environment=person)
    assert [question.message for question in person.questions] == ["careful asks"]


@pytest.mark.parametrize("on_result", [raises, raises_later])
def test_on_result_that_raises_denies_and_rolls_back(on_result: Any):
    """If `on_result` raises, the call is denied and rolled back, although its handler ran."""
    result, session, seen = one_call(Rule(on_result=on_result))
    assert seen.statuses() == [("note", "denied")]
    assert result.message == "The policy 'rule' rejected the result of note: the policy is broken"
    assert len(session[Note]) == 0
    assert len(seen.of(ToolRolledBack)) == 1
    assert seen.of(Note) == []


async def test_on_result_is_for_successes_and_awaited():
    """An async `on_result` finishes before the call commits, and is not called for a failed call."""
    order: list[str] = []

    async def told(result: ToolResult[Any], context: ToolContext) -> None:
        await asyncio.sleep(1)
        order.append(f"told {len(context.session[Note].all())}")

    @tool(effect="staged")
    async def fail(context: ToolContext) -> str:
        """Fail."""
        raise ValueError("no")

    session = Session()
    session.dispatcher.subscribe(Note, lambda _: order.append("committed"))
    gate = open_gate([note, fail], session=session, policies=[Rule(on_result=told)])
    await gate.invoke("fail")
    await gate.invoke("note", {"text": "a"})
    assert order == ["told 1", "committed"]


async def test_policy_sees_the_results_of_every_tool_nested_ones_too():
    """Policies also check the calls that a tool makes, and see their results."""

    @tool
    async def outer(context: ToolContext) -> str:
        """Call `note`."""
        return (await context.call("note", text="inner")).value

    rule = Rule()

    gate = open_gate([note, outer], policies=[rule])
    assert (await gate.invoke("outer")).success
    assert (await gate.invoke("note", {"text": "mine"})).success
    assert rule.checked == ["outer", "note", "note"]
    assert rule.results == [("note", "inner"), ("outer", "inner"), ("note", "mine")]


@dataclass
class Transfer:
    to: str
    parts: list[int] = field(default_factory=list[int])


def test_policy_can_not_change_params():
    """A policy can't change the params that the handler receives, the person sees or the event carries."""
    got: list[Transfer] = []

    async def handler(params: Transfer, *, context: ToolContext) -> ToolResult[str]:
        got.append(params)
        return ToolResult.ok("sent")

    def meddle(params: Transfer, context: ToolContext) -> PolicyDecision:
        params.to = "mallory"
        params.parts.append(1000)
        return PolicyDecision.ask("may it?")

    person = Person(approve=True)

    async def main() -> RecordingSubscriber:
        session = Session()
        seen = RecordingSubscriber(session)
        pay = Tool("pay", "Pay somebody.", handler)
        gate = open_gate([pay], session=session, policies=[Rule(check=meddle)], environment=person)
        assert (await gate.invoke("pay", {"to": "alice", "parts": [1]})).success
        return seen

    seen = run_virtual(main)
    assert got == [Transfer("alice", [1])]
    assert person.questions[0].payload["arguments"] == {"to": "alice", "parts": [1]}
    assert seen.of(ToolInvoked)[0].params == Transfer("alice", [1])


@pytest.mark.parametrize("by", ["model", "tool"])
def test_arguments_changed_while_a_person_decides_are_not_used(by: str):
    """A call uses its arguments as they were checked and approved, even if the caller changes them meanwhile."""
    sent: list[list[int]] = []

    @tool
    async def pay(parts: list[int], context: ToolContext) -> str:
        """Pay."""
        sent.append(parts)
        return "paid"

    @tool
    async def sneak(context: ToolContext) -> str:
        """Pay, and change the arguments meanwhile."""
        parts = [1]
        paying = asyncio.ensure_future(context.call("pay", parts=parts))
        await asyncio.sleep(1)
        parts.append(1000)
        return (await paying).message

    person = Person(approve=True, after=2)
    asks = Rule(
        check=lambda params, context: (
            PolicyDecision.ask("?") if context.tool.name == "pay" else PolicyDecision.allow()
        )
    )

    async def main() -> None:
        gate = open_gate([pay, sneak], policies=[asks], environment=person)
        if by == "tool":
            assert (await gate.invoke("sneak")).success
            return
        arguments = {"parts": [1]}
        paying = asyncio.ensure_future(gate.invoke("pay", arguments))
        await asyncio.sleep(1)
        arguments["parts"].append(1000)
        assert (await paying).success

    run_virtual(main)
    assert person.questions[0].payload["arguments"] == {"parts": [1]}
    assert sent == [[1]]


@kept(kind="log")
@dataclass(frozen=True)
class Seen:
    policy: str


def test_policy_may_only_log_before_the_call():
    """If a policy's `check` writes state that is not a log, the call is denied: the state would outlive a failed call."""
    result, session, _ = one_call(Rule(check=lambda _, context: context.session.dispatch(Note("sneaky"))))
    assert result.message == "The policy 'rule' could not decide, so note is denied."
    assert len(session[Note]) == 0


def test_what_check_logs_stays_although_the_call_fails():
    """Log entries that a policy writes in `check` are kept even if the call is denied."""

    def count(params: Any, context: ToolContext) -> PolicyDecision:
        context.session.dispatch(Seen("rule"))
        return PolicyDecision.deny("no")

    _, session, _ = one_call(Rule(check=count))
    assert session[Seen].all() == (Seen("rule"),)


async def test_state_is_kept_in_the_session_by_the_policys_name():
    """Policies of one class keep separate state under their names, and a later gate on the session continues with it."""
    session = Session()
    first = SequentialDependencyPolicy({"a": {"note"}}, name="first")
    second = SequentialDependencyPolicy({"a": {"a"} - {"a"}}, name="second")
    await open_gate([note], session=session, policies=[first, second]).invoke("note", {"text": "x"})
    assert [(each.policy, each.key) for each in session[PolicyNote].all()] == [("first", "note")]
    again = open_gate(
        [tool_called("a")],
        session=session,
        policies=[SequentialDependencyPolicy({"a": {"note"}}, name="first")],
    )
    assert (await again.invoke("a")).success
    other = open_gate(
        [tool_called("a")],
        session=session,
        policies=[SequentialDependencyPolicy({"a": {"note"}}, name="other")],
    )
    assert not (await other.invoke("a")).success


# --- SequentialDependencyPolicy ------------------------------------------------------------------


def tool_called(name: str, effect: Effect = "staged", body: Any = None) -> Tool[Any, Any]:
    @tool(name=name, description=f"Do {name}.", effect=effect)
    async def called(context: ToolContext) -> Any:
        return name if body is None else await body(context)

    return called


def in_sequence(tools: list[Tool[Any, Any]], calls: list[str], **needs: set[str]) -> list[str]:
    """Make these calls one after another, and return each call's name and status."""

    async def main() -> list[str]:
        session = Session()
        seen = RecordingSubscriber(session)
        gate = open_gate(tools, session=session, policies=[SequentialDependencyPolicy(needs)])
        for name in calls:
            await gate.invoke(name)
        seen.assert_paired()
        return [f"{name} {status}" for name, status in seen.statuses()]

    return run_virtual(main)


def fails(context: ToolContext) -> Any:
    raise ValueError("no")


async def says_no(context: ToolContext) -> Any:
    return ToolResult.error("no")


def calls(*names: str, then: Any = None) -> Any:
    async def body(context: ToolContext) -> str:
        for name in names:
            await context.call(name)
        return "done" if then is None else then(context)

    return body


def test_b_needs_a():
    """A call is denied until the call that it requires has succeeded, and allowed from then on."""
    done = in_sequence([tool_called("a"), tool_called("b")], ["b", "a", "b", "b"], b={"a"})
    assert done == ["b denied", "a ok", "b ok", "b ok"]


async def test_every_one_that_is_missing_is_named():
    """The denial names all required tools that have not succeeded yet."""
    said = "deploy is not allowed: deploy may run only after build and test succeeded. Call build and test first."
    policy = SequentialDependencyPolicy({"deploy": {"test", "build", "lint"}})
    tools = [tool_called(name) for name in ("deploy", "test", "build", "lint")]
    gate = open_gate(tools, policies=[policy])
    await gate.invoke("lint")
    assert (await gate.invoke("deploy")).message == said


@pytest.mark.parametrize("body", [fails, says_no])
def test_a_that_failed_does_not_count(body: Any):
    """A call stays denied if the call that it requires has only failed."""
    done = in_sequence([tool_called("a", body=body), tool_called("b")], ["a", "b"], b={"a"})
    assert done == ["a error", "b denied"]


def test_a_inside_another_counts_there_and_afterwards():
    """A required call inside another call counts there, and also afterwards if the outer call succeeds."""
    outer = tool_called("outer", body=calls("a", "b"))
    done = in_sequence([outer, tool_called("a"), tool_called("b")], ["outer", "b"], b={"a"})
    assert done == ["a ok", "b ok", "outer ok", "b ok"]


def test_a_that_was_rolled_back_with_its_outer_call_does_not_count():
    """A call stays denied if the call that it requires was rolled back with its outer call."""
    outer = tool_called("outer", body=calls("a", "b", then=fails))
    done = in_sequence([outer, tool_called("a"), tool_called("b")], ["outer", "b"], b={"a"})
    assert done == ["a ok", "b ok", "outer error", "b denied"]


async def test_parallel_calls_that_are_watched_are_not_stale_for_it():
    """A policy's state does not make parallel calls stale, so no call reruns because of it."""
    runs: list[int] = []

    session = Session()
    seen = RecordingSubscriber(session)

    @tool(effect="staged")
    async def a(number: int, context: ToolContext) -> int:
        """Read the session, then take a while."""
        runs.append(number)
        assert context.session[Note].latest() is None
        await asyncio.sleep(number)
        return number

    gate = open_gate([a], session=session, policies=[SequentialDependencyPolicy({"b": {"a"}})])
    await asyncio.gather(*(gate.invoke("a", {"number": number}) for number in range(1, 7)))
    assert list(seen.statuses()) == [("a", "ok")] * 6
    assert runs == [1, 2, 3, 4, 5, 6]


# --- ReadBeforeWritePolicy -----------------------------------------------------------------------


@tool(effect="read", capabilities={"fs.read"})
async def read(path: Annotated[str, PathArg("read")], context: ToolContext) -> str:
    """Read a file."""
    return context.filesystem.read(path)


@tool(effect="staged", capabilities={"fs.write"})
async def write(path: Annotated[str, PathArg("write")], text: str, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return "written"


@tool(effect="read")
async def read_and_fail(path: Annotated[str, PathArg("read")], context: ToolContext) -> str:
    """Read a file and fail."""
    context.filesystem.read(path)
    raise ValueError("no")


@tool
async def read_inside(path: str, fail: bool, context: ToolContext) -> str:
    """Read and write a file through other tools."""
    await context.call("read", path=path)
    wrote = await context.call("write", path=path, text="inside")
    if fail:
        raise ValueError("no")
    return wrote.message


@tool(effect="staged")
async def remove(path: Annotated[str, PathArg("write")], context: ToolContext) -> str:
    """Remove a file."""
    context.filesystem.delete(path)
    return "gone"


FILE_TOOLS = [read, write, read_and_fail, read_inside, remove]


async def over(files: MemoryFilesystem | None) -> tuple[Gate, RecordingSubscriber]:
    session = Session()
    gate = open_gate(FILE_TOOLS, session=session, filesystem=files, policies=[ReadBeforeWritePolicy()])
    return gate, RecordingSubscriber(session)


async def test_an_existing_file_must_be_read_before_it_is_written():
    """Writing an existing file that was not read is denied with a hint. After one read, it may be written repeatedly."""
    files = MemoryFilesystem({"docs/a": "old"})
    gate, _ = await over(files)
    denied = await gate.invoke("write", {"path": "docs/a", "text": "new"})
    assert denied.message == (
        "write is not allowed: docs/a exists, and its current content was not read. Read it first, then write it."
    )
    assert files.read("docs/a") == "old"
    await gate.invoke("read", {"path": "docs/a"})
    assert (await gate.invoke("write", {"path": "docs/a", "text": "new"})).success
    assert (await gate.invoke("write", {"path": "docs/a", "text": "newer"})).success
    assert files.read("docs/a") == "newer"


@pytest.mark.parametrize(
    ("how_read", "how_written"), [("./a", "a"), ("a", "./a"), ("x/../a", "a"), ("a", "b")]
)
async def test_one_path_has_many_spellings(how_read: str, how_written: str):
    """`./a` and `a` count as the same path. A read of a different or invalid path does not count."""
    gate, _ = await over(MemoryFilesystem({"a": "old", "b": "old", "x/y": "old"}))
    await gate.invoke("read", {"path": how_read})
    assert (await gate.invoke("write", {"path": how_written, "text": "new"})).success == (
        how_read in ("./a", "a") and how_written != "b"
    )


async def test_a_file_changed_by_somebody_else_must_be_read_again():
    """An existing file may be written only while it has content that this session has read or written."""
    files = MemoryFilesystem({"a": "old"})
    gate, _ = await over(files)
    await gate.invoke("read", {"path": "a"})
    files.write("a", "of somebody else")
    assert not (await gate.invoke("write", {"path": "a", "text": "new"})).success
    assert files.read("a") == "of somebody else"
    files.write("a", "old")
    assert (await gate.invoke("write", {"path": "a", "text": "new"})).success
    files.write("a", "of somebody else")
    assert not (await gate.invoke("write", {"path": "a", "text": "newer"})).success


async def test_new_files_and_files_this_session_wrote_are_free():
    """New files, and files that this session wrote, may be written without being read first."""
    gate, _ = await over(MemoryFilesystem({"there": "x"}))
    assert (await gate.invoke("write", {"path": "new", "text": "1"})).success
    assert (await gate.invoke("write", {"path": "./new", "text": "2"})).success
    assert (await gate.invoke("remove", {"path": "new"})).success
    assert (await gate.invoke("write", {"path": "new", "text": "3"})).success
    assert not (await gate.invoke("remove", {"path": "there"})).success


@pytest.mark.parametrize("how", ["failed call", "outer failed", "missing"])
async def test_a_reading_that_failed_does_not_count(how: str):
    """A read does not count if the file was missing, or if the call or its outer call failed."""
    files = MemoryFilesystem({"a": "old"})
    gate, _ = await over(files)
    if how == "failed call":
        await gate.invoke("read_and_fail", {"path": "a"})
    elif how == "outer failed":
        await gate.invoke("read_inside", {"path": "a", "fail": True})
    else:
        files.delete("a")
        await gate.invoke("read", {"path": "a"})
        files.write("a", "old")
    assert (await gate.invoke("write", {"path": "a", "text": "new"})).success is False


async def test_reading_inside_another_call_counts():
    """A read in an inner call counts for the outer call's other inner calls and for later calls."""
    files = MemoryFilesystem({"a": "old"})
    gate, seen = await over(files)
    assert (await gate.invoke("read_inside", {"path": "a", "fail": False})).success
    assert [status for _, status in seen.statuses()] == ["ok", "ok", "ok"]
    assert files.read("a") == "inside"
    assert (await gate.invoke("write", {"path": "a", "text": "later"})).success


async def test_no_path_or_no_filesystem_is_denied():
    """A write without a declared path or without a filesystem is denied, because it can't be checked."""

    @tool(effect="staged", capabilities={"fs.write"})
    async def write_somewhere(text: str, context: ToolContext) -> str:
        """Write a file at an undeclared path."""
        context.filesystem.write("a", text)
        return text

    policy = ReadBeforeWritePolicy()
    gate = open_gate([write_somewhere], filesystem=MemoryFilesystem(), policies=[policy])
    denied = await gate.invoke("write_somewhere", {"text": "x"})
    assert "this call names no path to write" in denied.message
    gate, _ = await over(None)
    denied = await gate.invoke("write", {"path": "a", "text": "x"})
    assert "this run has no filesystem" in denied.message


async def test_a_reader_of_other_things_needs_no_filesystem_and_no_path_of_ours():
    """`ReadBeforeWritePolicy` allows reading a path outside the run's filesystem, with or without a filesystem."""

    @tool(effect="read")
    async def look(path: Annotated[Path, PathArg("read")]) -> str:
        """Look somewhere else."""
        return str(path)

    for files in (None, MemoryFilesystem()):
        gate = open_gate([look], filesystem=files, policies=[ReadBeforeWritePolicy()])
        assert (await gate.invoke("look", {"path": "/etc/hosts"})).value == "/etc/hosts"


def test_the_root_may_be_looked_at():
    """`ReadBeforeWritePolicy` allows a tool to read the root folder."""

    @tool(effect="read")
    async def look(path: Annotated[str, PathArg("read")], context: ToolContext) -> int:
        """Look at a folder."""
        return len(context.filesystem.list(path))

    gate = open_gate([look], filesystem=MemoryFilesystem(), policies=[ReadBeforeWritePolicy()])
    assert gate.invoke("look", {"path": "."}).wait().unwrap() == 0


async def test_a_file_that_can_not_be_read_is_not_free():
    """An existing file that can't be read does not count as new, so writing to it is denied."""

    class Unreadable(MemoryFilesystem):
        def read_bytes(self, path: str, /) -> bytes:
            raise FileError(path, "it is not yours to read")

    gate, _ = await over(Unreadable({"a": "old"}))
    assert (
        "a exists, and its current content"
        in (await gate.invoke("write", {"path": "a", "text": "new"})).message
    )


# --- CapabilityPolicy ----------------------------------------------------------------------------


def decided(policy: CapabilityPolicy, tool: Tool[Any, Any], arguments: Any = "{}") -> str:
    """Return what the policy decides about a call: "allow", "ask: …" with the reason, or the call's status."""

    async def main() -> str:
        session = Session()
        seen = RecordingSubscriber(session)
        gate = open_gate([tool], session=session, policies=[policy], filesystem=MemoryFilesystem())
        await gate.invoke(tool.name, arguments)
        ((_, status),) = seen.statuses()
        asked = seen.of(
            ApprovalRequested
        )  # nobody can be asked here, so a call that needs approval is denied
        if asked:
            assert status == "denied"
            return f"ask: {asked[0].reason}"
        return "allow" if status == "ok" else status

    return run_virtual(main)


def undo(params: Any, value: Any, *, context: ToolContext) -> None:
    pass


def doing(effect: Effect, *capabilities: str) -> Tool[Any, Any]:
    more: dict[str, Any] = {"compensate": undo} if effect == "compensable" else {}

    @tool(name="do", description="Do it.", effect=effect, capabilities=capabilities, **more)
    async def do(context: ToolContext) -> str:
        return "done"

    return do


@pytest.mark.parametrize(
    ("effect", "capabilities", "decision"),
    [
        ("pure", (), "allow"),
        ("read", ("fs.read",), "allow"),
        ("staged", ("fs.write",), "allow"),
        ("idempotent", ("net",), "ask: no rule says whether do may use net"),
        ("idempotent", (), "ask: no rule says whether do may run, as it declares no capability"),
        ("compensable", ("net",), "ask: do is compensable"),
        ("irreversible", (), "ask: do is irreversible"),
    ],
)
def test_effect_decides_unless_told_otherwise(effect: Effect, capabilities: Any, decision: str):
    """By default, pure, read and staged calls are allowed, and a person is asked about all others."""
    assert decided(CapabilityPolicy(), doing(effect, *capabilities)) == decision


EVERY: tuple[Effect, ...] = ("pure", "read", "staged", "idempotent", "compensable", "irreversible")


@pytest.mark.parametrize("effect", EVERY)
@pytest.mark.parametrize("verdict", ["allow", "ask", "deny"])
def test_a_capabilitys_own_verdict_comes_before_the_effect(effect: Effect, verdict: Any):
    """A capability's verdict takes precedence over the effect's, whatever the effect."""
    expected = {"allow": "allow", "ask": "ask: do uses 'net'", "deny": "denied"}[verdict]
    assert decided(CapabilityPolicy({"net": verdict}), doing(effect, "net")) == expected


@pytest.mark.parametrize("effect", EVERY)
@pytest.mark.parametrize("verdict", ["allow", "ask", "deny"])
def test_a_verdict_on_an_effect_replaces_the_tables(effect: Effect, verdict: Any):
    """A verdict on one effect replaces the default for it, and the other effects keep theirs."""
    expected = {"allow": "allow", "ask": f"ask: do is {effect}", "deny": "denied"}[verdict]
    assert decided(CapabilityPolicy(effects={effect: verdict}), doing(effect)) == expected
    other: Effect = "irreversible" if effect == "pure" else "pure"
    assert decided(CapabilityPolicy(effects={effect: verdict}), doing(other)) == decided(
        CapabilityPolicy(), doing(other)
    )


@pytest.mark.parametrize(
    ("verdicts", "capabilities", "decision"),
    [
        ({"fs.*": "deny"}, ("fs.write",), "denied"),
        ({"fs.*": "deny"}, ("fs.deep.down",), "denied"),
        ({"*": "deny"}, ("net",), "denied"),
        ({"*": "deny"}, (), "ask: do is irreversible"),
        ({"fs.*": "deny"}, ("fs",), "ask: do is irreversible"),
        ({"fs.*": "deny"}, ("fsx.write",), "ask: do is irreversible"),
        ({"fs.*": "deny", "fs.read": "allow"}, ("fs.read",), "allow"),
        ({"*": "allow", "fs.*": "ask", "fs.deep.*": "deny"}, ("fs.deep.x",), "denied"),
        ({"*": "allow", "fs.*": "ask", "fs.deep.*": "deny"}, ("fs.x",), "ask: do uses 'fs.x'"),
        ({"*": "allow", "fs.*": "ask", "fs.deep.*": "deny"}, ("net",), "allow"),
        ({"fs.read": "allow"}, ("fs.read", "net"), "ask: do is irreversible"),
        ({"fs.read": "allow", "net": "deny"}, ("fs.read", "net"), "denied"),
        ({"a": "ask", "b": "deny"}, ("a", "b"), "denied"),
        ({"a": "deny", "b": "ask"}, ("a", "b"), "denied"),
        ({"a": "allow", "b": "ask"}, ("a", "b"), "ask: do uses 'b'"),
        ({"a": "allow", "b": "allow"}, ("a", "b"), "allow"),
    ],
)
def test_the_nearest_pattern_counts_and_the_strictest_word(verdicts: Any, capabilities: Any, decision: str):
    """An exact name beats a pattern, and a longer pattern a shorter one. Of several capabilities' verdicts, the strictest wins."""
    assert decided(CapabilityPolicy(verdicts), doing("irreversible", *capabilities)) == decision


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("docs/a", True),
        ("./docs/./a", True),
        ("docs", True),
        ("notes/deep/er", True),
        ("docsx/a", False),
        ("src/a", False),
        ("docs/../src/a", False),
        ("/docs/a", False),
        ("../docs/a", False),
    ],
)
def test_staged_is_allowed_within_the_scope(path: str, inside: bool):
    """A staged call is allowed inside the scope. Outside it, the policy asks and names the path."""
    policy = CapabilityPolicy(scope=["docs", "./notes/"])
    expected = "allow" if inside else f"ask: write goes outside its scope: {path}"
    found = decided(policy, write, {"path": path, "text": "x"})
    assert found == expected or (inside and path == "docs" and found == "error")


@pytest.mark.parametrize("told", [{"verdicts": {"fs.write": "allow"}}, {"effects": {"staged": "allow"}}])
def test_the_scope_bounds_whatever_allows_a_write(told: Any):
    """A write that a verdict allows is still allowed only inside the scope."""
    policy = CapabilityPolicy(**told, scope=["docs"])
    assert decided(policy, write, {"path": "docs/a", "text": "x"}) == "allow"
    assert decided(policy, write, {"path": "src/a", "text": "x"}).startswith("ask")


def test_reading_is_not_bound_by_the_scope():
    """A call that only reads may read a path outside the scope."""

    @tool(effect="read")
    async def look(path: Annotated[str, PathArg("read")]) -> str:
        """Read a path."""
        return path

    assert decided(CapabilityPolicy(scope=["docs"]), look, {"path": "src/a"}) == "allow"


@pytest.mark.parametrize("verdicts", [{"fs.wrte": "ask"}, {"*": "allow", "fs.wirte": "deny"}])
def test_a_misspelt_capability_is_refused_once_the_tools_are_known(verdicts: Any):
    """A verdict on a misspelt capability that resembles a tool's is refused, by the gate and by a run."""
    policy, tools = CapabilityPolicy(verdicts), [doing("staged", "fs.write")]
    said = r"^policy 'capability': no tool has the capability 'fs\.wi?r?te'\. Did you mean 'fs\.write'\?$"
    with pytest.raises(DefinitionError, match=said):
        open_gate(tools, policies=[policy])

    def hidden(**more: Any) -> MarkdownSection[Any]:
        return MarkdownSection("Files", "files", "Write.", summary="Files.", tools=tools, **more)

    prompts: list[Prompt[Any]] = [
        Prompt("writer", "Write.", tools=tools, policies=[policy]),
        Prompt("writer", [hidden()], policies=[policy]),
        Prompt("writer", [hidden(policies=[policy])]),
    ]
    for prompt in prompts:
        with pytest.raises(DefinitionError, match=said[1:]):
            Adapter(ScriptedModel(["ok"])).evaluate(prompt).wait()


@pytest.mark.parametrize(
    ("verdicts", "capabilities"),
    [
        ({"s3.write": "ask"}, ["fs.write"]),
        ({"fs.head": "ask"}, ["fs.read"]),
        ({"fs.writes": "ask"}, ["fs.write", "fs.writes"]),
        ({"fs.writes": "ask", "fs.write": "ask"}, ["fs.write"]),
        ({"fs.*": "ask"}, ["fs.write"]),
        ({"fs.wrte": "ask"}, ["net"]),
    ],
)
def test_a_capability_that_no_tool_has_may_be_named(verdicts: Any, capabilities: list[str]):
    """A policy may name a pattern, a capability that a tool has, or one that resembles no tool's.

    It may also name one that resembles a tool's capability if it names that capability too.
    """
    open_gate([doing("staged", *capabilities)], policies=[CapabilityPolicy(verdicts)])


def test_a_policy_of_a_section_is_compared_with_the_tools_of_that_section():
    """A section's policy may name a capability that looks like a misspelling of one that only a tool outside the section has."""
    own: MarkdownSection[Any] = MarkdownSection(
        "Own", "own", "Own.", policies=[CapabilityPolicy({"fs.wrte": "ask"})]
    )
    prompt: Prompt[None] = Prompt("writer", [own], tools=[doing("staged", "fs.write")])
    assert Adapter(ScriptedModel(["ok"])).evaluate(prompt).wait().text == "ok"


# --- RateLimitPolicy -----------------------------------------------------------------------------


async def test_a_rate_slides_and_says_how_long_to_wait():
    """Each admitted call counts for the length of the window, and a denial says how long to wait."""
    limit = "a is not allowed: 2 calls in 10 seconds is the limit. Wait"
    # The calls are made at 0, 4, 5, 9.5, 10.5, 10.5, 13.9 and 14.1 seconds.
    policy = RateLimitPolicy(2, 10, clock=VirtualClock())
    gate = open_gate([tool_called("a")], policies=[policy])
    told: list[str] = []
    for pause in (0, 4, 1, 4.5, 1, 0, 3.4, 0.2):
        await asyncio.sleep(pause)
        told.append((await gate.invoke("a")).message)
    assert told == [
        *["", "", f"{limit} 5.0 seconds.", f"{limit} 0.5 seconds.", "", f"{limit} 3.5 seconds."],
        *[f"{limit} 0.1 seconds.", ""],
    ]


@pytest.mark.parametrize("body", [fails, says_no])
async def test_failures_count_too(body: Any):
    """Failed calls count towards a rate limit, so a model that repeats a mistake is limited too."""
    session = Session()
    seen = RecordingSubscriber(session)
    policy = RateLimitPolicy(2, 10, clock=VirtualClock())
    gate = open_gate([tool_called("a", body=body)], session=session, policies=[policy])
    for _ in range(3):
        await gate.invoke("a")
    assert [status for _, status in seen.statuses()] == ["error", "error", "denied"]


async def test_a_failed_outer_call_does_not_give_its_inner_calls_back():
    """Inner calls still count towards a rate limit after the outer call failed and was rolled back."""
    outer = tool_called("outer", body=calls("a", "a", then=fails))

    session = Session()
    seen = RecordingSubscriber(session)
    policy = RateLimitPolicy(2, 10, tools={"a"}, clock=VirtualClock())
    gate = open_gate([outer, tool_called("a")], session=session, policies=[policy])
    await gate.invoke("outer")
    await gate.invoke("a")
    assert list(seen.statuses()) == [("a", "ok"), ("a", "ok"), ("outer", "error"), ("a", "denied")]


async def test_a_call_that_is_tried_again_counts_once():
    """A call that Handrail retries counts once towards a rate limit."""
    tries: list[int] = []

    @tool(effect="idempotent")
    async def flaky(context: ToolContext) -> str:
        """Fail at first."""
        tries.append(context.invocation.attempt)
        if context.invocation.attempt < 3:
            raise TransientError("not yet", retry_after=1)
        return "done"

    gate = open_gate([flaky], policies=[RateLimitPolicy(2, 100, clock=VirtualClock())])
    assert [(await gate.invoke("flaky")).success for _ in range(3)] == [True, True, False]
    assert tries == [1, 2, 3, 1, 2, 3]


async def test_parallel_calls_do_not_pass_the_rate():
    """Concurrent calls do not exceed the rate: of eight, three run."""
    gate = open_gate([tool_called("a")], policies=[RateLimitPolicy(3, 10, clock=VirtualClock())])
    results = await asyncio.gather(*(gate.invoke("a") for _ in range(8)))
    assert sum(result.success for result in results) == 3


def test_the_count_itself_lets_in_no_more_than_may_be():
    """A rate window admits only as many calls as the rate allows, even if more calls are counted at once."""
    session = Session()
    for number in range(5):
        session.dispatch(CallCounted("rate_limit", f"call {number}", 100.0, 10, 3))
    window = RateWindow(session[RateCell], "rate_limit")
    assert [each.call for each in window] == ["call 0", "call 1", "call 2"]


async def test_a_rate_costs_the_same_however_many_calls_there_were():
    """After many calls, a stored window holds only as many calls as the rate allows. Denied calls are not counted."""
    session = Session()
    policy = RateLimitPolicy(3, 10, clock=VirtualClock())
    gate = open_gate([tool_called("a")], session=session, policies=[policy])
    seen = RecordingSubscriber(session)
    for _ in range(50):
        await gate.invoke("a")
        await asyncio.sleep(1)
    assert len(session[RateCell]) <= 1 + 3 + 3
    assert len(list(RateWindow(session[RateCell], "rate_limit"))) == 3
    assert len(session[CallCounted]) == 0
    assert len(seen.of(CallCounted)) == [status for _, status in seen.statuses()].count("ok") == 15


async def test_a_window_from_another_machines_clock_does_not_block():
    """A window saved under another machine's clock does not block the session on this machine."""
    session = Session()
    session.dispatch(CallCounted("rate_limit", "elsewhere", 9e6, 10, 1))
    gate = open_gate(
        [tool_called("a")], session=session, policies=[RateLimitPolicy(1, 10, clock=VirtualClock())]
    )
    assert (await gate.invoke("a")).success


async def test_rates_of_two_policies_are_apart():
    """Two rate policies count separately, so a call that one of them denies can count towards the other's limit."""
    clock = VirtualClock()
    policies = [
        RateLimitPolicy(3, 10, clock=clock, name="all"),
        RateLimitPolicy(1, 10, clock=clock, name="few", tools=["b"]),
    ]
    gate = open_gate([tool_called("a"), tool_called("b")], policies=policies)
    assert [(await gate.invoke(name)).success for name in ("a", "b", "b", "a")] == [True, True, False, False]
