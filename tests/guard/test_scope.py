"""The scope of `CapabilityPolicy` is checked before a commit, for the paths that actually changed, with links resolved."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import Allow, CapabilityPolicy, PathArg, Session, Shell, Tool, ToolContext, ToolResult, tool
from handrail.events import ApprovalRequested
from handrail.resources.memory import MemoryFilesystem
from handrail.run import open_gate
from handrail.testing import Person
from support.filesystems import Folders, tree

Work = Callable[[Any], object]
SCOPE = CapabilityPolicy({"proc.exec": "allow"}, scope=["docs"])
START = {"docs/a": "a", "docs/deep/b": "b", "src/c": "c", "src/deep/d": "d", "e": "e"}


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
def files(folders: Folders) -> Any:
    """Provide a folder in which `docs` contains links to paths outside it, and the link `self`, which stays inside."""
    made = folders(START)
    root = Path(made.root)
    (root / "docs" / "src").symlink_to("../src")
    (root / "docs" / "e").symlink_to("../e")
    (root / "docs" / "self").symlink_to("../docs/deep")
    (root / "docs" / "up").symlink_to("deep/../../src")
    (root / "docs" / "absolute").symlink_to(root / "src")
    return made


OUTSIDE: dict[str, Work] = {
    "writes": lambda files: files.write("src/c", "new"),
    "writes a new file": lambda files: files.write("src/new", "new"),
    "writes at the top": lambda files: files.write("new", "new"),
    "writes through a link to a folder": lambda files: files.write("docs/src/c", "new"),
    "writes through a link to a file": lambda files: files.write("docs/e", "new"),
    "writes through a link with `..`": lambda files: files.write("docs/up/new", "new"),
    "deletes": lambda files: files.delete("src/c"),
    "deletes a folder": lambda files: files.delete("src", recursive=True),
    "deletes through a link": lambda files: files.delete("docs/src/c"),
    "moves in": lambda files: files.move("src/c", "docs/c"),
    "moves out": lambda files: files.move("docs/a", "src/a"),
    "moves a folder in": lambda files: files.move("src", "docs/other"),
    "makes a folder": lambda files: files.mkdir("lib"),
    "changes both": lambda files: (files.write("docs/a", "new"), files.write("e", "new")),
}
INSIDE: dict[str, Work] = {
    "writes": lambda files: files.write("docs/a", "new"),
    "writes a new file in a new folder": lambda files: files.write("docs/x/y/z", "new"),
    "writes through a link that stays": lambda files: files.write("docs/self/b", "new"),
    "deletes": lambda files: files.delete("docs/deep", recursive=True),
    "moves": lambda files: files.move("docs/a", "docs/z"),
    "writes outside, and takes it back": lambda files: (files.write("new", "x"), files.delete("new")),
    "reads outside": lambda files: files.read("src/c"),
    "reads through a link": lambda files: files.read("docs/src/c"),
}


@pytest.mark.parametrize("effect", ["staged", "idempotent"])
@pytest.mark.parametrize("how", sorted(OUTSIDE))
async def test_what_a_call_changed_outside_its_scope_is_asked_about(files: Any, how: str, effect: Any):
    """A person is asked about changes outside the scope. The question names a path with its links resolved. Only an approval commits the changes."""
    policy = CapabilityPolicy(effects={"idempotent": "allow"}, scope=["docs"])
    before = tree(files)
    for approve in (False, True):
        person, session = Person(approve=approve), Session()
        gate = open_gate(
            [working(OUTSIDE[how], effect=effect)],
            policies=[policy],
            filesystem=files,
            environment=person,
            session=session,
        )
        result = await gate.invoke("work")
        [question] = person.questions
        assert [request.policy for request in session[ApprovalRequested].all()] == ["capability"]
        assert "work changes paths outside its scope: " in question.message
        assert "docs/src" not in question.message
        assert result.success == approve
        assert (tree(files) != before) == approve


@pytest.mark.parametrize("how", sorted(OUTSIDE))
async def test_without_a_person_nothing_outside_the_scope_is_changed(files: Any, how: str):
    """If nobody can be asked, a call that changes paths outside the scope is denied, and the model is told why."""
    before = tree(files)
    gate = open_gate([working(OUTSIDE[how])], policies=[SCOPE], filesystem=files)
    result = await gate.invoke("work")
    assert not result.success
    assert "outside its scope" in result.message
    assert tree(files) == before


@pytest.mark.parametrize("how", sorted(INSIDE))
async def test_what_stays_inside_the_scope_is_allowed(files: Any, how: str):
    """Changes inside the scope, and reads anywhere, need no approval."""
    person = Person()
    gate = open_gate([working(INSIDE[how])], policies=[SCOPE], filesystem=files, environment=person)
    result = await gate.invoke("work")
    assert result.success, result.message
    assert person.questions == []


@pytest.mark.parametrize(
    ("path", "leads"),
    [("docs/src/c", "src/c"), ("docs/src/new", "src/new"), ("docs/e", "e"), ("docs/up/c", "src/c")],
)
async def test_a_named_path_that_leads_out_through_a_link_is_asked_about_once(
    files: Any, path: str, leads: str
):
    """If a declared path leads out of the scope, the question says where it leads, and its approval covers the change."""
    person = Person(approve=True)
    gate = open_gate([write], policies=[SCOPE], filesystem=files, environment=person)
    result = await gate.invoke("write", {"path": path, "text": "new"})
    assert result.success, result.message
    [question] = person.questions
    assert f"{path}, which leads to {leads}" in question.message
    assert files.read(leads) == "new"


async def test_an_absolute_link_that_leads_inside_the_folder_is_no_way_out(files: Any):
    """A write through a link with an absolute target outside the scope fails and changes nothing."""
    gate = open_gate([write], policies=[SCOPE], filesystem=files)
    assert not (await gate.invoke("write", {"path": "docs/absolute/c", "text": "new"})).success
    assert files.read("src/c") == "c"


@pytest.mark.parametrize("link", ["../src", "deep/../../src"])
async def test_a_link_that_a_command_made_is_no_way_out(files: Any, link: str):
    """A call that makes a link and then writes through it counts as changing what the link leads to."""
    script = f"ln -s {link} docs/made && echo new > docs/made/c"
    gate = open_gate([running(script)], policies=[SCOPE], filesystem=files)
    result = await gate.invoke("run")
    assert "run changes paths outside its scope: src/c" in result.message
    assert files.read("src/c") == "c"
    assert not os.path.lexists(Path(files.root) / "docs" / "made")


def running(script: str) -> Tool[Any, Any]:
    """Return a tool that runs a shell script on the run's files."""
    shell = Shell([Allow(...)])

    @tool(effect="staged", capabilities={"proc.exec"})
    async def run(context: ToolContext) -> str:
        """Run a command."""
        return (await shell.run_on(context.filesystem, ["sh", "-c", script])).output

    return run


@pytest.mark.parametrize(
    "script", ["echo new > src/c", "rm -r src", "mv docs/a .", "mkdir lib", "cp docs/a docs/src/"]
)
async def test_a_command_that_changes_files_outside_the_scope_is_asked_about(files: Any, script: str):
    """A person is asked about an allowed command that changes files outside the scope, directly or through a link."""
    before = tree(files)
    person = Person()
    gate = open_gate([running(script)], policies=[SCOPE], filesystem=files, environment=person)
    assert not (await gate.invoke("run")).success
    [question] = person.questions
    assert "run changes paths outside its scope: " in question.message
    assert tree(files) == before


async def test_a_command_that_stays_inside_the_scope_is_allowed(files: Any):
    """A command may change files inside the scope without a question."""
    gate = open_gate([running("cat src/c > docs/a && mkdir docs/x")], policies=[SCOPE], filesystem=files)
    result = await gate.invoke("run")
    assert result.success, result.message
    assert files.read("docs/a") == "c"


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["write", "delete", "move", "mkdir"]),
            st.sampled_from(["docs/a", "docs/n/m", "docs/deep", "src/c", "src/n", "e", "docs", "src"]),
            st.sampled_from(["docs/z", "docs/n2/x", "src/z", "z"]),
        ),
        max_size=5,
    )
)
def test_only_what_is_inside_the_scope_changes_without_a_question(
    steps: list[tuple[str, str, str]],
):
    """If nobody can be asked, a call that changes anything outside the scope is rejected. Any other call is committed."""

    def work(files: Any) -> None:
        for what, one, two in steps:
            try:
                if what == "write":
                    files.write(one, "new")
                elif what == "delete":
                    files.delete(one, recursive=True)
                elif what == "move":
                    files.move(one, two)
                else:
                    files.mkdir(one)
            except Exception:  # a step that is impossible changes nothing
                pass

    alone = MemoryFilesystem(START)
    work(alone)
    before, after = tree(MemoryFilesystem(START)), tree(alone)
    changed = {path for path in {**before, **after} if before.get(path, 0) != after.get(path, 0)}
    outside = {path for path in changed if path != "docs" and not path.startswith("docs/")}
    files = MemoryFilesystem(START)
    result = asyncio.run(open_gate([working(work)], policies=[SCOPE], filesystem=files).invoke("work"))
    assert result.success == (not outside), result.message
    assert tree(files) == (before if outside else after)


def calling(inner: str, arguments: dict[str, Any], more: str = "") -> Tool[Any, Any]:
    """Return a tool that calls another one, and may then write a file itself."""

    async def handler(params: None, *, context: ToolContext) -> ToolResult[str]:
        result = await context.call(inner, **arguments)
        if more:
            context.filesystem.write(more, "new")
        return ToolResult.ok(result.message, result.message)

    return Tool("outer", "Call another tool.", handler, effect="staged")


@pytest.mark.parametrize(("more", "count"), [("", 1), ("docs/a", 1), ("e", 2)])
async def test_what_was_approved_in_a_nested_call_is_not_asked_about_again(files: Any, more: str, count: int):
    """A person is asked about an outer call only if it changes a path outside the scope that was not approved in its inner call."""
    person = Person(approve=True)
    outer = calling("write", {"path": "src/c", "text": "new"}, more)
    gate = open_gate([write, outer], policies=[SCOPE], filesystem=files, environment=person)
    result = await gate.invoke("outer")
    assert result.success, result.message
    assert [question.payload["tool"] for question in person.questions] == ["write", "outer"][:count]
    assert files.read("src/c") == "new"


@pytest.mark.parametrize("path", ["docs/a", "src/c"])
async def test_a_nested_call_does_not_leave_the_scope(files: Any, path: str):
    """A nested call that changes an undeclared path outside the scope is rejected, even under `approve_all`."""

    @tool(effect="staged")
    async def sly(path: Annotated[str, PathArg("write")], context: ToolContext) -> str:
        """Write the declared file and an undeclared one."""
        context.filesystem.write(path, "new")
        context.filesystem.write("e", "new")
        return path

    for mode in ("approve_all", "strict"):
        gate = open_gate(
            [sly, calling("sly", {"path": path})], policies=[SCOPE], filesystem=files, approvals=mode
        )
        result = await gate.invoke("outer")
        assert "sly" in result.message
        assert "outside its scope" in result.message
        assert (files.read("docs/a"), files.read("e"), files.read("src/c")) == ("a", "e", "c")
