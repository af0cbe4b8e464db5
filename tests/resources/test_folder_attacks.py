"""Attacks on previews, commands, searches, diffs, file tools and completion."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
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
    open_gate,
    tool,
)
from handrail.errors import Conflict, ContextExpired, FileError
from handrail.events import Advised, ToolInvoked
from handrail.guard import CommandPassing
from handrail.protocols import Fork
from handrail.question import Question
from handrail.resources.bindings import given
from handrail.resources.directory import store
from handrail.resources.shell import Allow, Layers, Shell
from handrail.resources.staging import fork_behind
from handrail.sections import FileTools
from handrail.testing import FakeShell, Person

ASK = CapabilityPolicy({"*": "ask"})
SHELL = Shell([Allow(...)])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Provide a folder with one file."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("one\n")
    return work


@pytest.fixture(params=["memory", "directory"])
def files(request: pytest.FixtureRequest, root: Path) -> Any:
    if request.param == "directory":
        return DirectoryFilesystem(root)
    found = MemoryFilesystem()
    found.write("a.txt", "one\n")
    return found


@tool(effect="staged", capabilities={"fs.write"})
async def command(script: str, context: ToolContext) -> str:
    """Run a script."""
    finished = await SHELL.run_on(context.filesystem, ["sh", "-c", script])
    assert finished.ok, finished.output
    return finished.output


def previewed(files: Any, script: str) -> tuple[Any, str]:
    """Run a script in a call that a person approves, and return the call's result and the diff that the person saw."""
    shown: list[str] = []

    def approve(question: Question) -> bool:
        shown.append(question.payload["diff"])
        return True

    gate = open_gate([command], filesystem=files, policies=[ASK], environment=Person(approve=approve))
    result = gate.invoke("command", {"script": script}).wait()
    return result, "".join(shown)


# --- previews ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["written", "deleted", "committed into", "committed late"])
def test_what_was_shown_is_not_changed_by_who_still_holds_the_files(files: Any, how: str) -> None:
    """Code that still holds a call's files can't change them during the review, so exactly what was shown is committed."""
    held: list[Any] = []
    refused: list[str] = []

    @tool(effect="staged", capabilities={"fs.write"})
    async def act(context: ToolContext) -> str:
        """Write a file, and keep the fork and an inner fork for later."""
        context.filesystem.write("a.txt", "harmless\n")
        inner = fork_behind(context.filesystem).fork("inner")
        inner.write("a.txt", "EVIL\n")
        if how == "committed late":
            inner.prepare()
        held.extend([context.filesystem, inner])
        return "done"

    def approve(question: Question) -> bool:
        outer, inner = held
        try:
            if how == "written":
                outer.write("a.txt", "EVIL\n")
            elif how == "deleted":
                outer.delete("a.txt")
            elif how == "committed into":
                inner.prepare()
                inner.apply()
            else:
                inner.apply()
        except ContextExpired:
            refused.append(how)
        assert "+harmless" in question.payload["diff"]
        return True

    gate = open_gate([act], filesystem=files, policies=[ASK], environment=Person(approve=approve))
    assert gate.invoke("act").wait().success
    assert files.read("a.txt") == "harmless\n"
    assert refused == ([] if how == "committed late" else [how])


def test_what_was_shown_is_not_changed_by_a_command_nobody_waited_for(root: Path) -> None:
    """During the review no command can start on the fork. If its layer changes, the call fails and commits nothing."""
    held: list[Any] = []

    @tool(effect="staged", capabilities={"fs.write"})
    async def act(context: ToolContext) -> str:
        """Write a file with a command, and keep the fork for later."""
        await SHELL.run_on(context.filesystem, ["sh", "-c", "echo harmless > a.txt"])
        fork = fork_behind(context.filesystem)
        held[:] = [fork, fork.layers().upper]
        return "done"

    def approve(question: Question) -> bool:
        fork, upper = held
        with pytest.raises(ContextExpired):
            fork.layers()
        (upper / "a.txt").write_text("EVIL, as a command would\n")
        return True

    files = DirectoryFilesystem(root)
    gate = open_gate([act], filesystem=files, policies=[ASK], environment=Person(approve=approve))
    assert not gate.invoke("act").wait().success
    assert files.read("a.txt") == "one\n"


# --- commands ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "script",
    [
        "mv a.txt b.txt",
        "mv a.txt b.txt; echo two >> b.txt",
        "ln a.txt b.txt",
        "mkdir n; mv a.txt n/b.txt",
        "mv a.txt d/b.txt",
    ],
)
def test_a_command_may_rename_a_file(root: Path, script: str, nested: bool) -> None:
    """A command may rename, move or link a file from a lower layer without a conflict."""
    (root / "d").mkdir()
    files = DirectoryFilesystem(root)

    @tool(effect="staged")
    async def around(context: ToolContext) -> str:
        """Call the tool from inside another call."""
        context.filesystem.write("other.txt", "other\n")
        result = await context.call("command", script=script)
        assert result.success, result.message
        return "done"

    gate = open_gate([command, around], filesystem=files)
    result = (gate.invoke("around") if nested else gate.invoke("command", {"script": script})).wait()
    assert result.success, result.message
    (moved,) = root.rglob("b.txt")
    assert moved.read_text().startswith("one\n")
    assert (root / "a.txt").exists() == script.startswith("ln")


def wait_for_disk_time(layers: Layers) -> None:
    """Wait until the disk's clock, which moves in steps of a few milliseconds, is past the time of the mount."""
    while os.stat(layers.work).st_ctime_ns <= layers.mounted_at:
        os.utime(layers.work)


@pytest.mark.parametrize("nested", [False, True])
def test_a_file_deleted_under_a_command_that_changes_it_is_a_conflict(root: Path, nested: bool) -> None:
    """If somebody deletes a file while a command changes it, the change is a conflict."""
    files = DirectoryFilesystem(root)
    outer = files.fork("outer")
    fork = outer.fork("inner") if nested else files.fork("inner")
    layers = fork.layers()
    wait_for_disk_time(layers)
    (outer if nested else files).delete("a.txt")
    (layers.upper / "a.txt").write_text("one\ntwo\n")
    os.setxattr(layers.upper / "a.txt", "user.overlay.origin", b"x")
    with pytest.raises(Conflict, match=r"a\.txt"):
        fork.absorb(layers.mounted_at)
    fork.drop()
    outer.drop()


def test_many_commands_of_one_call_stay_readable(root: Path) -> None:
    """When one call runs many commands, their layers are merged, and the files can still be read, shown and committed."""

    @tool(effect="staged", capabilities={"many"})
    async def many(context: ToolContext) -> str:
        """Run commands one after another, each in its own call."""
        for number in range(20):
            result = await context.call(
                "command", script=f"echo {number} > f{number}; echo {number} >> a.txt"
            )
            assert result.success, result.message
        return context.filesystem.read("f3") + context.filesystem.read("a.txt")

    shown: list[str] = []

    def approve(question: Question) -> bool:
        shown.append(question.payload["diff"])
        return True

    gate = open_gate(
        [command, many],
        filesystem=DirectoryFilesystem(root),
        policies=[CapabilityPolicy({"many": "ask"})],
        environment=Person(approve=approve),
    )
    result = gate.invoke("many").wait()
    assert result.success, result.message
    assert result.value == "3\none\n" + "".join(f"{number}\n" for number in range(20))
    assert "+++ b/f3\n@@ -0,0 +1 @@\n+3\n" in shown[0]
    assert (root / "f3").read_text() == "3\n"


# --- searches ----------------------------------------------------------------------------------


@pytest.fixture
def many(root: Path, monkeypatch: pytest.MonkeyPatch) -> DirectoryFilesystem:
    """Provide a folder with enough files for a search to use ripgrep."""
    program = Path(sys.executable).parent / "rg"
    assert program.exists(), "ripgrep is missing: run scripts/venv"
    monkeypatch.setattr(store, "_ripgrep", lambda: str(program))
    for number in range(2 * store.WORTH):
        (root / f"{number}.txt").write_text("nothing\n")
    return DirectoryFilesystem(root)


def test_a_file_that_was_moved_is_searched_and_not_what_lay_there(many: DirectoryFilesystem) -> None:
    """A search finds a moved file's content at its new path, not the content that is still on disk there."""
    fork = many.fork("mover")
    fork.delete("0.txt")
    fork.move("a.txt", "0.txt")
    assert [match.path for match in fork.grep("one")] == ["0.txt"]
    fork.drop()


def test_what_can_not_be_asked_of_ripgrep_is_found_without_it(many: DirectoryFilesystem) -> None:
    """A search for a pattern that can't be passed on a command line does not fail."""
    assert many.grep("\ud800") == ()


def test_a_pattern_that_is_too_long_is_refused_with_its_beginning(many: DirectoryFilesystem) -> None:
    """A pattern over the limit is refused. The error is short, because a model reads it."""
    with pytest.raises(FileError, match="200000 characters, and the limit is 1000") as refused:
        many.grep("x" * 200_000)
    assert len(str(refused.value)) < 500


def test_a_ripgrep_that_is_gone_is_done_without(
    many: DirectoryFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search works even if ripgrep is uninstalled while the program runs."""
    monkeypatch.setattr(store, "_ripgrep", lambda: "/nowhere/rg")
    assert [match.path for match in many.grep("one")] == ["a.txt"]


# --- diffs -------------------------------------------------------------------------------------


def test_a_name_can_not_pass_for_a_line_of_the_diff(root: Path) -> None:
    """A file name with line breaks or control characters is shown to the person escaped, on one line."""
    script = "touch 'x\n+harmless' 'b\tc' \"$(printf 'd\\033[2J')\""
    result, shown = previewed(DirectoryFilesystem(root), script)
    assert result.success
    names = [line for line in shown.splitlines() if line.startswith("diff")]
    assert shown.splitlines() == [each for name in names for each in (name, "new file mode 644")]
    assert names == [
        r"diff --git a/b\x09c b/b\x09c",
        r"diff --git a/d\x1b[2J b/d\x1b[2J",
        r"diff --git a/x\x0a+harmless b/x\x0a+harmless",
    ]


def test_what_moves_the_cursor_is_written_out(files: Any) -> None:
    """Control and text-direction characters in a file are escaped in the diff, so that they can't hide a change on a terminal."""
    fork = files.fork("call")
    fork.write("a.txt", "one\r\nrm -rf /\r+ls\n\x1b[8mhidden\u202etxt\n")
    assert fork.diff().splitlines()[3:] == [
        "@@ -1 +1,3 @@",
        "-one",
        "+one\\x0d",
        "+rm -rf /\\x0d+ls",
        "+\\x1b[8mhidden\\u202etxt",
    ]
    fork.drop()


def test_the_mode_of_a_folder_is_shown_although_something_in_it_changed_too(root: Path) -> None:
    """A folder's new mode is shown even if something inside the folder has also changed."""
    (root / "d").mkdir(mode=0o755)
    script = "chmod 777 d; echo 1 > d/f; mkdir -m 1777 n; echo 1 > n/f; mkdir usual; touch usual/f"
    result, shown = previewed(DirectoryFilesystem(root), script)
    assert result.success
    assert "diff --git a/d b/d\nold mode 755\nnew mode 777\n" in shown
    assert "diff --git a/n b/n\nnew folder mode 1777\n" in shown
    assert "b/usual\n" not in shown


def test_what_can_not_be_shown_is_named(root: Path) -> None:
    """The preview says that a pipe was removed, although a pipe has no content to show, and the call succeeds."""
    os.mkfifo(root / "pipe")
    result, shown = previewed(DirectoryFilesystem(root), "rm pipe")
    assert result.success, result.message
    assert shown.splitlines()[0] == "diff --git a/pipe b/pipe"
    assert "deleted pipe mode 644" in shown.splitlines()
    assert not (root / "pipe").exists()


class Counter:
    """A forkable resource that can't describe its changes."""

    def __init__(self) -> None:
        self.count = 0

    def fork(self, owner: str, /, *, writable: bool = True) -> CounterFork:
        return CounterFork(self)


class CounterFork(Counter, Fork):
    def __init__(self, of: Counter) -> None:
        self.count, self._of = of.count, of

    def stale(self) -> tuple[str, ...]:
        return ()

    def prepare(self) -> None:
        pass

    def apply(self) -> None:
        self._of.count = self.count

    def drop(self) -> None:
        pass


@dataclass(frozen=True)
class Noted:
    what: Any


def test_a_resource_or_state_without_words_is_named_in_the_preview() -> None:
    """If a resource or an event can't be shown, the preview names it and says so."""
    counter, shown = Counter(), list[str]()

    @tool(effect="staged", capabilities={"count"})
    async def count(context: ToolContext) -> str:
        """Change a resource and the state."""
        context.resources.get(Counter).count += 1
        context.session.dispatch(Noted(object()))
        return "done"

    def approve(question: Question) -> bool:
        shown.append(question.payload["diff"])
        return True

    gate = open_gate(
        [count], resources=[given(Counter, counter)], policies=[ASK], environment=Person(approve=approve)
    )
    result = gate.invoke("count").wait()
    assert result.success, result.message
    assert counter.count == 1
    assert shown == [
        "CounterFork: it was used, and its changes can't be shown\n"
        "state: Noted (its contents can't be shown)\n"
    ]


# --- tools -------------------------------------------------------------------------------------


def told(files: Any, *calls: ToolCall, sections: Any = None) -> list[tuple[bool, str]]:
    """Make these calls in one run, in order. Return for each whether it succeeded and the text that the model received."""
    session = Session()
    prompt = Prompt("p", sections or [FileTools()])
    Adapter(ScriptedModel([*calls, "Done."])).evaluate(prompt, "go", session=session, filesystem=files).wait()
    return [(each.result.success, each.result.render()) for each in session[ToolInvoked].all()]


def test_a_link_that_leads_out_is_refused_in_words_and_can_be_deleted(root: Path) -> None:
    """Writing through a link that leads outside is refused with an explanation, and the link can be deleted."""
    (root / "out").symlink_to("/etc/hostname")
    (written, deleted) = told(
        DirectoryFilesystem(root),
        ToolCall("write_file", {"path": "out", "text": "x"}),
        ToolCall("delete_file", {"path": "out"}),
    )
    assert not written[0]
    assert "leads out of the root" in written[1]
    assert deleted == (True, "Deleted out.")


def test_a_line_has_one_number(root: Path) -> None:
    """A search and a read give a line the same number, even after unusual line separators."""
    (root / "old.c").write_text("one\n\x0ctwo\x85\u2028\nthree\r\nfour\rfive\n")
    found, shown = told(
        DirectoryFilesystem(root),
        ToolCall("search_files", {"pattern": "three"}),
        ToolCall("read_file", {"path": "old.c", "from_line": 3, "lines": 1}),
    )
    assert found == (True, "old.c:3: three")
    assert shown == (True, "3\tthree\n(lines 3 to 3 of 4. Continue with from_line=4.)")


# --- commands that check completion ------------------------------------------------------------


def test_a_command_that_has_to_pass_can_not_be_in_conflict(root: Path) -> None:
    """The writes of a command that checks completion are discarded, so the command never conflicts with a concurrent edit."""

    def edited(command: tuple[str, ...], layers: Any) -> int:
        (layers.upper / "a.txt").write_text("written by the command\n")
        wait_for_disk_time(layers)
        (root / "a.txt").write_text("edited by a person meanwhile\n")
        return 1

    session = Session()
    check = CommandPassing(FakeShell({"make": edited}), "make", cap=1)
    prompt = Prompt("p", [FileTools()], completion=[check])
    files = DirectoryFilesystem(root)
    Adapter(ScriptedModel(["Done.", "Done."])).evaluate(
        prompt, "go", session=session, filesystem=files
    ).wait()
    (said,) = session[Advised].all()
    assert (said.failed, said.text) == (False, "This must pass: `make`: exit code 1\n(no output)")
    assert files.read("a.txt") == "edited by a person meanwhile\n"
