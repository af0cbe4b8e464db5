"""`ReadBeforeWritePolicy` checks the files that a call changed in its fork, and not only the paths that it declared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import (
    Adapter,
    Allow,
    CapabilityPolicy,
    MarkdownSection,
    PathArg,
    Prompt,
    ReadBeforeWritePolicy,
    ScriptedModel,
    Session,
    Shell,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    tool,
)
from handrail.errors import FileError
from handrail.events import ToolInvoked
from handrail.protocols import Filesystem
from handrail.resources.bindings import Binding
from handrail.resources.memory import MemoryFilesystem
from handrail.run import open_gate
from handrail.testing import Person
from support.filesystems import Folders, NewFiles, tree

Work = Callable[[Any], object]


@tool(effect="read")
async def read(path: Annotated[str, PathArg("read")], context: ToolContext) -> str:
    """Read a file."""
    return context.filesystem.read(path)


@tool(effect="staged")
async def write(path: Annotated[str, PathArg("write")], text: str, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return path


def working(work: Work, name: str = "work", effect: Any = "staged") -> Tool[Any, Any]:
    """Return a tool that works on files and declares none of them."""

    async def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
        work(context.filesystem)
        return ToolResult.ok(None, "worked")

    return Tool(name, "Work on files.", handler, effect=effect)


@pytest.fixture
def files(new_files: NewFiles) -> Any:
    return new_files({path: f"old {path}" for path in ("a", "b", "docs/c", "docs/d")})


WRONG: dict[str, Work] = {
    "overwrites": lambda files: files.write("b", "new"),
    "appends": lambda files: files.append("b", "more"),
    "edits": lambda files: files.edit("b", "old", "new"),
    "deletes": lambda files: files.delete("b"),
    "moves away": lambda files: files.move("b", "z"),
    "deletes a folder": lambda files: files.delete("docs", recursive=True),
    "looks whether it is there, and overwrites": lambda files: files.exists("b") and files.write("b", "new"),
    "deletes and makes again": lambda files: (files.delete("b"), files.write("b", "new")),
    "spelt otherwise": lambda files: files.write("./b", "new"),
}

RIGHT: dict[str, Work] = {
    "changes what was read": lambda files: files.write("a", "new"),
    "deletes what was read": lambda files: files.delete("a"),
    "writes a new file": lambda files: files.write("new/file", "text"),
    "writes a new file twice": lambda files: (files.write("new", "text"), files.write("new", "more")),
    "writes the same bytes": lambda files: files.write("b", "old b"),
    "makes a folder": lambda files: files.mkdir("empty"),
    "reads": lambda files: files.read("b"),
}


@pytest.mark.parametrize("effect", ["staged", "idempotent", "irreversible"])
@pytest.mark.parametrize("how", sorted(WRONG))
async def test_a_call_that_changes_a_file_that_was_not_read_is_rejected(files: Any, how: str, effect: Any):
    """If a call changes a file that was not read, none of its changes are committed, and the model is told which file to read."""
    gate = open_gate(
        [working(WRONG[how], effect=effect)], policies=[ReadBeforeWritePolicy()], filesystem=files
    )
    result = await gate.invoke("work")
    assert not result.success
    assert "Read it first" in result.message
    assert "docs/" in result.message or "'b'" in result.message
    assert [files.read(path) for path in ("a", "b", "docs/c")] == ["old a", "old b", "old docs/c"]


@pytest.mark.parametrize("how", sorted(RIGHT))
async def test_a_call_may_change_what_was_read_and_make_what_is_new(files: Any, how: str):
    """A call may change files whose current content was read, create files and folders, rewrite a file unchanged, and read any file."""
    gate = open_gate([read, working(RIGHT[how])], policies=[ReadBeforeWritePolicy()], filesystem=files)
    assert (await gate.invoke("read", {"path": "a"})).success
    result = await gate.invoke("work")
    assert result.success, result.message


async def test_a_file_that_the_session_wrote_is_free_even_if_it_was_not_declared(files: Any):
    """A call may change a file that an earlier call wrote, unless somebody else has changed it since."""
    counts = iter(range(9))
    work = working(lambda files: files.write("new", f"text {next(counts)}"))
    gate = open_gate([work], policies=[ReadBeforeWritePolicy()], filesystem=files)
    assert (await gate.invoke("work")).success
    assert (await gate.invoke("work")).success
    files.write("new", "somebody else's")
    assert not (await gate.invoke("work")).success
    assert files.read("new") == "somebody else's"


async def test_what_was_read_before_somebody_changed_it_was_not_read(files: Any):
    """A read counts only if the file still has the content that was read."""
    gate = open_gate(
        [read, working(WRONG["overwrites"])], policies=[ReadBeforeWritePolicy()], filesystem=files
    )
    await gate.invoke("read", {"path": "b"})
    files.write("b", "newer")
    assert not (await gate.invoke("work")).success
    assert files.read("b") == "newer"


async def test_a_call_that_declares_one_file_and_changes_a_different_one_is_rejected(files: Any):
    """Declaring a path covers no other path, and declaring a folder does not cover writes to the files in it."""

    @tool(effect="staged", capabilities={"fs.write"})
    async def save(path: Annotated[str, PathArg("write")], also: str, context: ToolContext) -> str:
        """Save a file and a second, undeclared one."""
        if not context.filesystem.exists(path):
            context.filesystem.write(path, "new")
        context.filesystem.write(also, "new")
        return path

    gate = open_gate([save], policies=[ReadBeforeWritePolicy()], filesystem=files)
    assert "'b'" in (await gate.invoke("save", {"path": "x", "also": "b"})).message
    assert "'docs/c'" in (await gate.invoke("save", {"path": "docs", "also": "docs/c"})).message
    assert (await gate.invoke("save", {"path": "x", "also": "y"})).success
    assert files.read("b") == "old b"


async def test_a_declared_folder_may_be_deleted(files: Any):
    """A call may delete a folder that it declares, although the files in it were not read."""

    @tool(effect="staged", capabilities={"fs.write"})
    async def remove(path: Annotated[str, PathArg("write")], context: ToolContext) -> str:
        """Delete a folder."""
        context.filesystem.delete(path, recursive=True)
        return path

    gate = open_gate([remove], policies=[ReadBeforeWritePolicy()], filesystem=files)
    assert (await gate.invoke("remove", {"path": "docs"})).success
    assert not files.exists("docs")


# --- inner calls -----------------------------------------------------------------------------------


def outer_tool(*steps: tuple[str, str] | Work) -> Tool[Any, Any]:
    """Return a tool that takes these steps in order. Each step calls another tool or works on files itself."""

    async def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
        for step in steps:
            if callable(step):
                step(context.filesystem)
            else:
                name, path = step
                await context.call(
                    name, **({"path": path} if name == "read" else {"path": path, "text": "inner"})
                )
        return ToolResult.ok(None, "worked")

    return Tool("outer", "Work on files.", handler, effect="staged")


@pytest.mark.parametrize(
    ("steps", "success", "b"),
    [
        ([("read", "b"), ("write", "b")], True, "inner"),
        ([("read", "b"), WRONG["overwrites"]], True, "new"),
        ([("read", "b"), ("write", "b"), WRONG["overwrites"]], True, "new"),
        ([("write", "b")], True, "old b"),  # only the inner call is denied
        ([("read", "a"), WRONG["overwrites"]], False, "old b"),
        ([WRONG["overwrites"], ("read", "b")], False, "old b"),
        ([WRONG["overwrites"], ("read", "b"), ("write", "b")], False, "old b"),
        ([("write", "new"), lambda files: files.write("new", "outer")], True, "old b"),
    ],
)
async def test_what_inner_calls_read_and_write_counts_for_the_outer_call(
    files: Any, steps: Any, success: bool, b: str
):
    """Files that inner calls read or wrote count as read for the outer call's later changes, but not its earlier ones."""
    gate = open_gate([read, write, outer_tool(*steps)], policies=[ReadBeforeWritePolicy()], filesystem=files)
    result = await gate.invoke("outer")
    assert result.success is success, result.message
    assert files.read("b") == b


# --- compositions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("approve", [True, False])
async def test_an_approved_preview_of_a_file_that_was_not_read_is_not_committed(files: Any, approve: bool):
    """A change to a file that was not read is rejected even if a person approves its diff."""
    policies = [CapabilityPolicy(effects={"staged": "ask"}), ReadBeforeWritePolicy()]
    person = Person(approve=approve)
    gate = open_gate([working(WRONG["overwrites"])], policies=policies, filesystem=files, environment=person)
    assert not (await gate.invoke("work")).success
    assert files.read("b") == "old b"


async def test_an_approved_preview_of_a_file_that_was_read_is_committed(files: Any):
    """An approved change to a file that was read before is committed."""
    policies = [CapabilityPolicy(effects={"staged": "ask"}), ReadBeforeWritePolicy()]
    tools = [read, working(WRONG["overwrites"])]
    gate = open_gate(tools, policies=policies, filesystem=files, environment=Person(approve=True))
    await gate.invoke("read", {"path": "b"})
    assert (await gate.invoke("work")).success
    assert files.read("b") == "new"


def test_a_sections_policy_judges_only_the_tools_of_its_section(files: Any):
    """A section's policy can reject results of its own section's tools, but not those of other sections' tools."""

    def prompt_with(section: str) -> Prompt[Any]:
        work = working(WRONG["overwrites"])
        guarded = [read, work] if section == "guarded" else [read]
        return Prompt(
            "p",
            [
                MarkdownSection(
                    "Guarded", "guarded", "T.", policies=[ReadBeforeWritePolicy()], tools=guarded
                ),
                MarkdownSection("Free", "free", "T.", tools=[] if section == "guarded" else [work]),
            ],
        )

    for section, status in (("guarded", "denied"), ("free", "ok")):
        session = Session()
        model = ScriptedModel([ToolCall("work", {}), "Done."])
        Adapter(model).evaluate(prompt_with(section), "go", filesystem=files, session=session).wait()
        (ended,) = session[ToolInvoked].all()
        assert ended.status == status


async def test_files_that_are_bound_as_a_resource_are_judged(files: Any):
    """The policy also checks changes to a filesystem that is bound as a resource."""
    binding: Any = Binding(Filesystem, lambda resources: files)  # pyright: ignore[reportArgumentType]  # a protocol as a key
    gate = open_gate([working(WRONG["overwrites"])], policies=[ReadBeforeWritePolicy()], resources=[binding])
    assert not (await gate.invoke("work")).success
    assert files.read("b") == "old b"


@pytest.mark.parametrize("script", ["echo new > b", "rm b", "rm -r docs", "mv b z"])
async def test_a_command_that_changes_a_file_that_was_not_read_is_rejected(folders: Folders, script: str):
    """Changes that a command makes in the fork are checked like those that a handler makes."""
    files = folders({"a": "old a", "b": "old b", "docs/c": "old c"})
    shell = Shell([Allow(...)])

    @tool(effect="staged", capabilities={"proc.exec"})
    async def run(context: ToolContext) -> str:
        """Run a command."""
        return (await shell.run_on(context.filesystem, ["sh", "-c", script])).output

    gate = open_gate([read, run], policies=[ReadBeforeWritePolicy()], filesystem=files)
    result = await gate.invoke("run")
    assert "was not read" in result.message
    assert [files.read(path) for path in ("b", "docs/c")] == ["old b", "old c"]
    for path in ("b", "docs/c"):
        await gate.invoke("read", {"path": path})
    assert (await gate.invoke("run")).success


# --- the law ---------------------------------------------------------------------------------------

NAMES = ("a", "b", "docs/c", "docs/d", "new", "docs/new")


@dataclass(frozen=True)
class Step:
    verb: str
    path: str
    text: str


steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(["write", "append", "delete", "move", "read", "exists"]),
        st.sampled_from(NAMES),
        st.sampled_from(["x", "y"]),
    ),
    max_size=4,
)


def play(files: Any, script: list[Step]) -> None:
    for step in script:
        try:
            if step.verb in ("write", "append"):
                getattr(files, step.verb)(step.path, step.text)
            elif step.verb == "move":
                files.move(step.path, f"{step.path}-{step.text}")
            else:
                getattr(files, step.verb)(step.path)
        except FileError:
            continue


async def check_law(read_first: set[str], scripts: list[list[Step]]) -> None:
    files = MemoryFilesystem({path: f"old {path}" for path in NAMES[:4]})
    playing = iter(scripts)
    work = working(lambda files: play(files, next(playing)))
    gate = open_gate([read, work], policies=[ReadBeforeWritePolicy()], filesystem=files)
    known = {path for path in read_first if (await gate.invoke("read", {"path": path})).success}
    for script in scripts:
        before, imagined = tree(files), files.fork("imagined")
        play(imagined, script)
        now = tree(imagined)
        imagined.drop()
        changed = {path for path in before.keys() | now.keys() if before.get(path) != now.get(path)}
        existing = {path for path in changed if before.get(path) is not None}
        result = await gate.invoke("work")
        assert result.success is (existing <= known), (script, result.message)
        assert tree(files) == (now if result.success else before)
        known |= changed if result.success else set()


@given(read_first=st.sets(st.sampled_from(NAMES)), scripts=st.lists(steps, min_size=1, max_size=3))
def test_no_committed_call_changes_a_file_that_nobody_read_or_wrote(
    read_first: set[str], scripts: list[list[Step]]
):
    """A call is committed if and only if the session has read or written every existing file that the call changes."""
    asyncio.run(check_law(read_first, scripts))
