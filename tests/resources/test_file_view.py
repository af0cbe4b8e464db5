"""What a call's handler and policies get of its files: every verb, and nothing with which they could commit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    CapabilityPolicy,
    DirectoryFilesystem,
    MemoryFilesystem,
    Prompt,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    ToolResult,
    Workspace,
    given,
    open_gate,
    tool,
)
from handrail.errors import EffectRefused
from handrail.events import ToolInvoked
from handrail.guard import CommandPassing
from handrail.journal.sqlite import MemoryJournal
from handrail.protocols import DurableFork, Filesystem, Fork, PolicyDecision
from handrail.question import Question
from handrail.resources.directory import DirectoryFork
from handrail.resources.paths import HasLinks
from handrail.resources.staging import FileFork, FileView, LinkedFileView
from handrail.resources.workspace import WorkspaceFork
from handrail.testing import FakeShell, Person

VERBS = {name for name in vars(Filesystem) if not name.startswith("_")}


@pytest.fixture(params=["memory", "directory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return MemoryFilesystem() if request.param == "memory" else DirectoryFilesystem(tmp_path)


def by_context(context: ToolContext) -> Any:
    return context.filesystem


def by_protocol(context: ToolContext) -> Any:
    return context.resources.get(Filesystem)


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def try_to_commit(files: Any) -> None:
    """Take the steps of a commit that these files have."""
    for step in ("prepare", "apply", "applied"):
        if hasattr(files, step):
            getattr(files, step)()


# --- handlers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [by_context, by_protocol])
@pytest.mark.parametrize("bound", ["filesystem", "resource"])
async def test_a_handler_can_not_commit_its_files(
    files: Any, way: Callable[[ToolContext], Any], bound: str
) -> None:
    """A handler's files have the verbs of `Filesystem` and no step of a commit, so a call that fails leaves nothing behind."""
    found: list[set[str]] = []

    @tool(effect="staged")
    async def act(context: ToolContext) -> str:
        """Write a file, try to commit it, and fail."""
        mine = way(context)
        mine.write("a.txt", "past the approval")
        found.append(public(mine))
        try_to_commit(mine)
        raise ValueError("no")

    options: Any = (
        {"filesystem": files} if bound == "filesystem" else {"resources": [given(Filesystem, files)]}
    )
    assert not (await open_gate([act], **options).invoke("act")).success
    assert not files.exists("a.txt")
    (members,) = found
    assert members - {"resolved"} == VERBS


async def test_nothing_is_written_while_a_person_is_asked(files: Any) -> None:
    """A call that waits for approval of its preview has changed nothing, whatever its handler tried."""
    there: list[bool] = []

    def deny(question: Question) -> bool:
        there.append(files.exists("a.txt"))
        return False

    @tool(effect="staged", capabilities={"fs.write"})
    async def act(context: ToolContext) -> str:
        """Write a file and try to commit it."""
        context.filesystem.write("a.txt", "not approved")
        try_to_commit(context.filesystem)
        return "done"

    policies = [CapabilityPolicy(effects={"staged": "ask"})]
    gate = open_gate([act], filesystem=files, policies=policies, environment=Person(approve=deny))
    assert not (await gate.invoke("act")).success
    assert there == [False]
    assert not files.exists("a.txt")


async def test_one_call_has_one_view(files: Any) -> None:
    """`context.filesystem` and the resource are one object, for the handler and for the policies of a call."""
    seen: list[Any] = []

    class Look:
        name = "look"

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            seen.extend((by_context(context), by_protocol(context)))
            return PolicyDecision.allow()

        def on_result(self, tool: Any, params: Any, result: ToolResult[Any], *, context: ToolContext) -> None:
            seen.extend((by_context(context), by_protocol(context)))

    @tool(effect="staged")
    async def act(context: ToolContext) -> str:
        """Look at the files twice."""
        seen.extend((by_context(context), by_protocol(context)))
        return "done"

    gate = open_gate([act], filesystem=files, policies=[Look()])
    assert (await gate.invoke("act")).success
    assert len(seen) == 6
    assert len({id(each) for each in seen}) == 1
    assert isinstance(seen[0], Filesystem)
    assert isinstance(seen[0], FileView)


async def test_an_inner_call_has_a_view_of_its_own(files: Any) -> None:
    """Inner calls and nested runs see the outer call's files through views of their own, and commit into that call."""
    seen: list[Any] = []

    @tool(effect="staged")
    async def inner(context: ToolContext) -> str:
        """Append to the file."""
        seen.append(context.filesystem)
        context.filesystem.append("a.txt", "inner\n")
        return "done"

    @tool(effect="staged")
    async def outer(context: ToolContext) -> str:
        """Append to the file, by itself, in a call and in a nested run."""
        seen.append(context.filesystem)
        context.filesystem.append("a.txt", "outer\n")
        assert (await context.call("inner")).success
        await context.adapter.evaluate(Prompt("nested", "Append.", tools=[inner]))
        return context.filesystem.read("a.txt")

    model = ScriptedModel([ToolCall("outer", {}), ToolCall("inner", {}), "Appended.", "Done."])
    session = Session()
    prompt = Prompt("p", "Append.", tools=[inner, outer])
    await Adapter(model).evaluate(prompt, "go", session=session, filesystem=files)
    assert [each.status for each in session[ToolInvoked].all()] == ["ok", "ok", "ok"]
    assert files.read("a.txt") == "outer\ninner\ninner\n"
    assert len({id(each) for each in seen}) == len(seen) == 3
    assert all(isinstance(each, FileView) for each in seen)


async def test_a_workspace_gives_a_view_too(tmp_path: Path) -> None:
    """The files of a workspace, which a journal records, can't be committed by a handler either."""
    found: list[set[str]] = []

    @tool(effect="staged")
    async def act(context: ToolContext) -> str:
        """Look at the files."""
        found.append(public(context.filesystem))
        return "done"

    model = ScriptedModel([ToolCall("act", {}), "Done."])
    await Adapter(model, journal=MemoryJournal()).evaluate(
        Prompt("p", "Look.", tools=[act]), "go", filesystem=Workspace("w", cache=tmp_path / "cache")
    )
    assert found == [VERBS | {"resolved"}]


async def test_a_call_that_may_only_read_can_not_write_through_its_view(files: Any) -> None:
    """A view refuses what its fork refuses."""
    refused: list[str] = []

    @tool(effect="read")
    async def act(context: ToolContext) -> str:
        """Try to write."""
        with pytest.raises(EffectRefused) as caught:
            context.filesystem.write("a.txt", "x")
        refused.append(str(caught.value))
        return "done"

    assert (await open_gate([act], filesystem=files).invoke("act")).success
    assert len(refused) == 1


# --- the classes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fork", [FileFork, DirectoryFork, WorkspaceFork])
def test_a_view_has_every_verb_as_its_fork_takes_it(fork: Any) -> None:
    """A view's verbs take the arguments of the fork's verbs, by the same names and with the same defaults."""
    view = LinkedFileView if issubclass(fork, HasLinks) else FileView
    for verb in VERBS:
        mine, behind = (inspect.signature(getattr(each, verb)) for each in (view, fork))
        assert [(each.name, each.kind, each.default) for each in mine.parameters.values()] == [
            (each.name, each.kind, each.default) for each in behind.parameters.values()
        ], verb


def test_a_view_has_no_member_of_a_fork() -> None:
    """No member of `Fork` or `DurableFork`, and none that only a fork has, is a member of a view."""
    own = {name for each in (Fork, DurableFork) for name in vars(each) if not name.startswith("_")}
    for fork, view in ((FileFork, FileView), (DirectoryFork, LinkedFileView)):
        assert public(view) & own == set()
        assert public(view) < public(fork)


# --- custom resources ------------------------------------------------------------------------------


class Ledger:
    """A forkable resource with a view of its own."""

    def __init__(self) -> None:
        self.entries: tuple[str, ...] = ()

    def fork(self, owner: str, /, *, writable: bool = True) -> LedgerFork:
        return LedgerFork(self)


class LedgerFork(Fork):
    def __init__(self, base: Ledger | LedgerFork) -> None:
        self.base, self.entries = base, base.entries

    def fork(self, owner: str, /, *, writable: bool = True) -> LedgerFork:
        return LedgerFork(self)

    def handler_view(self) -> LedgerView:
        return LedgerView(self)

    def stale(self) -> tuple[str, ...]:
        return ()

    def prepare(self) -> None: ...
    def apply(self) -> None:
        self.base.entries = self.entries

    def drop(self) -> None: ...


class LedgerView:
    def __init__(self, fork: LedgerFork) -> None:
        self._fork = fork

    def book(self, entry: str) -> None:
        self._fork.entries += (entry,)


async def test_a_custom_fork_names_what_handlers_get() -> None:
    """If a fork has a view, handlers get the view, the same one at each request, and the fork is committed."""
    ledger, seen = Ledger(), list[Any]()

    @tool(effect="staged")
    async def inner(context: ToolContext) -> str:
        """Book an entry."""
        seen.append(context.resources.get(Ledger))
        seen[-1].book("inner")
        return "done"

    @tool(effect="staged")
    async def outer(context: ToolContext) -> str:
        """Book an entry, and let an inner call book another."""
        seen.extend((context.resources.get(Ledger), await context.resources.open(Ledger)))
        seen[-1].book("outer")
        assert (await context.call("inner")).success
        return "done"

    result = await open_gate([inner, outer], resources=[given(Ledger, ledger)]).invoke("outer")
    assert result.success, result.message
    assert ledger.entries == ("outer", "inner")
    assert [type(each) for each in seen] == [LedgerView] * 3
    assert seen[0] is seen[1] is not seen[2]


# --- commands --------------------------------------------------------------------------------------


async def test_a_nested_runs_completion_check_runs_its_command_on_the_calls_files(tmp_path: Path) -> None:
    """A `CommandPassing` of a run inside a call works on the files of that call, although the call sees only a view of them."""
    seen: list[bool] = []

    def answer(command: Any, layers: Any) -> int:
        seen.append(any((layer / "a.txt").exists() for layer in layers.lowers[:-1]))
        return 0

    inner = Prompt("inner", "Check.", completion=[CommandPassing(FakeShell({"make": answer}), "make")])

    @tool(effect="staged")
    async def outer(context: ToolContext) -> str:
        """Write a file, and let a nested run check it."""
        context.filesystem.write("a.txt", "x")
        return (await context.adapter.evaluate(inner, "go")).text

    model = ScriptedModel([ToolCall("outer", {}), "Checked.", "Done."])
    files, session = DirectoryFilesystem(tmp_path), Session()
    await Adapter(model).evaluate(Prompt("p", "Go.", tools=[outer]), "go", filesystem=files, session=session)
    assert [each.status for each in session[ToolInvoked].all()] == ["ok"]
    assert seen == [True]
