"""The built-in sections for files and commands, as a model uses them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from handrail import Adapter, DirectoryFilesystem, MemoryFilesystem, Prompt, ScriptedModel, Session, ToolCall
from handrail.errors import DefinitionError
from handrail.events import Advised, ToolInvoked
from handrail.guard import CommandPassing
from handrail.resources.shell import Allow, Shell
from handrail.resources.shell.shell_errors import CommandRefused
from handrail.sections import FileTools, ShellTools
from handrail.sections import files as section

GIT = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@b",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@b",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Provide a folder with a few files."""
    root = tmp_path / "work"
    (root / "src").mkdir(parents=True)
    (root / "src" / "main.py").write_text("import os\nprint('one')\nprint('two')\n")
    (root / "notes.txt").write_text("".join(f"line {number}\n" for number in range(1, 1001)))
    return root


def run(files: Any, *calls: ToolCall, sections: Any = None, **options: Any) -> list[tuple[bool, str]]:
    """Make these calls in order in one run, and return each call's success and rendered result."""
    session = Session()
    model = ScriptedModel([*calls, "Done."])
    prompt = Prompt("p", sections or [FileTools()], **options)
    Adapter(model).evaluate(prompt, "go", session=session, filesystem=files).wait()
    return [(each.result.success, each.result.render()) for each in session[ToolInvoked].all()]


@pytest.fixture(params=["memory", "directory"])
def files(request: pytest.FixtureRequest, folder: Path) -> Any:
    """Provide the same files, once in memory and once on disk."""
    if request.param == "directory":
        return DirectoryFilesystem(folder)
    found = MemoryFilesystem()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found.write(str(path.relative_to(folder)), path.read_text())
    return found


# --- files -------------------------------------------------------------------------------------


def test_a_file_is_read_in_pages(files: Any) -> None:
    """A long file is read in pages with line numbers, and each page but the last says how to continue."""
    (_, first), (_, last), (_, past) = run(
        files,
        ToolCall("read_file", {"path": "notes.txt"}),
        ToolCall("read_file", {"path": "notes.txt", "from_line": 999, "lines": 10}),
        ToolCall("read_file", {"path": "notes.txt", "from_line": 5000}),
    )
    assert first.startswith("1\tline 1\n2\tline 2\n")
    assert first.endswith("400\tline 400\n(lines 1 to 400 of 1000. Continue with from_line=401.)")
    assert last == "999\tline 999\n1000\tline 1000\n(lines 999 to 1000 of 1000.)"
    assert past == "notes.txt has 1000 lines; there is no line 5000."


@pytest.mark.parametrize("text", ["a\nbb\n\nccc\n\n", "\n", "a", "\n\n\n\nabcdefgh\nx", "a\r\nb\r\n"])
def test_every_line_is_found_in_a_file_that_is_not_split(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A page starts at the right line, however many characters are searched for line endings at a time."""
    lines = text.removesuffix("\n").split("\n")
    for step in (1, 2, 3, 100):
        monkeypatch.setattr(section, "_STEP", step)
        for number, line in enumerate(lines, 1):
            shown = section.page_of("a", text, number, 1)
            assert shown.split("\n")[0] == f"{number}\t{line.removesuffix(chr(13))}"
            assert f"lines {number} to {number} of {len(lines)}." in shown or len(lines) == 1


def test_a_file_is_edited_after_it_was_read(files: Any) -> None:
    """A file must be read before it is edited. An edit whose old text is missing or ambiguous is refused with the reason."""
    edit = {"path": "src/main.py", "old": "print('one')", "new": "print('three')"}
    told = run(
        files,
        ToolCall("edit_file", edit),
        ToolCall("read_file", {"path": "./src/main.py"}),
        ToolCall("edit_file", edit),
        ToolCall("edit_file", edit),
        ToolCall("edit_file", {**edit, "old": "print"}),
        ToolCall("edit_file", {**edit, "old": "print", "new": "log", "all": True}),
    )
    assert [ok for ok, _ in told] == [False, True, True, False, False, True]
    assert "Read it first" in told[0][1]
    assert told[2][1] == "Changed src/main.py in 1 place."
    assert "does not contain the text" in told[3][1]
    assert "2 times" in told[4][1]
    assert told[5][1] == "Changed src/main.py in 2 places."
    assert files.read("src/main.py") == "import os\nlog('three')\nlog('two')\n"


def test_files_are_written_moved_deleted_listed_and_found(files: Any) -> None:
    """Files can be written, moved, deleted, listed, found and searched, and the model is told what happened."""
    told = run(
        files,
        ToolCall("write_file", {"path": "docs/new.md", "text": "# New\n"}),
        ToolCall("move_file", {"source": "docs/new.md", "target": "docs/old.md"}),
        ToolCall("list_folder"),
        ToolCall("list_folder", {"path": "docs"}),
        ToolCall("find_files", {"pattern": "**/*.py"}),
        ToolCall("find_files", {"pattern": "*.rs"}),
        ToolCall("search_files", {"pattern": "print.*o", "files": "src/**"}),
        ToolCall("delete_file", {"path": "docs"}),
        ToolCall("delete_file", {"path": "docs", "recursive": True}),
        ToolCall("read_file", {"path": "docs/old.md"}),
        ToolCall("read_file", {"path": "../outside"}),
    )
    texts = [text for _, text in told]
    assert texts[0] == "Wrote 6 bytes to docs/new.md."
    assert texts[1] == "Moved docs/new.md to docs/old.md."
    assert texts[2] == "docs/\nnotes.txt  (8893 bytes)\nsrc/"
    assert texts[3] == "docs/old.md  (6 bytes)"
    assert texts[4] == "src/main.py"
    assert texts[5] == "No file matches *.rs."
    assert texts[6] == "src/main.py:2: print('one')\nsrc/main.py:3: print('two')"
    assert "not empty" in texts[7]
    assert texts[8] == "Deleted docs."
    assert not told[9][0]
    assert not told[10][0]


@pytest.mark.parametrize(
    "pattern",
    [".*.*.*.*.*.*x", "(a|a)+$", "(a+)+$", "(.*,){3,}x", "(a?){30}b", r"\w{1,64}@\w{1,64}(\.\w{1,64})?"],
)
def test_no_pattern_stops_the_server(pattern: str) -> None:
    """A search ends, without a match, even for a pattern that is slow in a backtracking engine."""
    files = MemoryFilesystem()
    files.write("a.txt", "a" * 20_000 + "!\n")
    ((ok, said),) = run(files, ToolCall("search_files", {"pattern": pattern}))
    assert ok
    assert said == f"No line matches {pattern}."


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a(?=b)", "can't contain lookahead"),
        (r"(a)\1", "can't contain a backreference"),
        ("(a?){20000}", "the pattern is too large"),
        ("(", "not a valid regular expression: unclosed group"),
    ],
)
def test_a_pattern_that_can_not_be_searched_for_is_refused(pattern: str, reason: str) -> None:
    """If a pattern is unsupported, too large or invalid, the model is told why."""
    ((ok, said),) = run(MemoryFilesystem(), ToolCall("search_files", {"pattern": pattern}))
    assert not ok
    assert reason in said


def test_a_line_too_long_for_a_pattern_is_reported() -> None:
    """A line too long for a pattern is not searched, and the result says so. Plain text is still found in it."""
    files = MemoryFilesystem()
    files.write("a.txt", "x" * 100_000 + "\naxb\n")
    searches = [ToolCall("search_files", {"pattern": pattern}) for pattern in ("[xy]{900}|axb", "x")]
    (_, one), (_, two) = run(files, *searches)
    assert one.splitlines()[0].startswith("a.txt:1: (not searched: the line has 100000 characters")
    assert one.splitlines()[1] == "a.txt:2: axb"
    assert two.startswith("a.txt:1: xxx")


def test_only_reading() -> None:
    """With `writes=False`, all file tools only read, and the section has no policies."""
    section = FileTools(writes=False)
    assert {tool.effect for tool in section.tools} == {"read"}
    assert section.policies == ()
    assert {tool.effect for tool in FileTools().tools} == {"read", "staged"}
    assert all(tool.capabilities for tool in FileTools().tools)


# --- commands ----------------------------------------------------------------------------------

SHELL = Shell(
    [
        Allow("cat", ...),
        Allow("touch", ...),
        Allow("rm", ...),
        Allow("make", ...),
        Allow("git", "commit", ...),
    ],
    environment=GIT,
)


def snapshot(root: Path) -> dict[str, Any]:
    """Return everything in a folder, with bytes, modes, inodes and modification times."""
    found: dict[str, Any] = {}
    for path in sorted([root, *root.rglob("*")]):
        status = path.lstat()
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = (status.st_mode, status.st_ino, status.st_mtime_ns, data)
    return found


def test_a_command_sees_and_makes_the_calls_own_changes(folder: Path) -> None:
    """A command sees what earlier calls wrote, and later calls see what it wrote."""
    told = run(
        DirectoryFilesystem(folder),
        ToolCall("write_file", {"path": "a.txt", "text": "hello"}),
        ToolCall("run_command", {"command": ["cat", "a.txt"]}),
        ToolCall("run_command", {"command": ["touch", "b.txt"], "folder": "src"}),
        ToolCall("find_files", {"pattern": "**/b.txt"}),
        sections=[FileTools(), ShellTools(SHELL)],
    )
    assert told[1] == (True, "`cat a.txt`: exit code 0\nhello")
    assert told[3] == (True, "src/b.txt")
    assert (folder / "src" / "b.txt").exists()


@pytest.mark.parametrize("how", ["make", "rm", "git"])
def test_a_command_that_fails_half_way_leaves_the_folder_as_it_was(folder: Path, how: str) -> None:
    """A command that fails halfway leaves the folder byte-identical, including `.git`."""
    (folder / "Makefile").write_text(
        "all:\n\techo x > made.txt\n\trm notes.txt\n\tfalse\ncommit:\n\tgit commit -qam x\n\tfalse\n"
    )
    environment = {**os.environ, **GIT}
    for command in (["git", "init", "-q"], ["git", "add", "."], ["git", "commit", "-qm", "first"]):
        subprocess.run(command, cwd=folder, check=True, env=environment)
    (folder / "notes.txt").write_text("changed\n")
    before = snapshot(folder)
    command = {
        "make": ["make", "all"],
        "rm": ["rm", "-rf", "src", "notes.txt", ".git", "/nowhere/x", "."],
        "git": ["make", "commit"],
    }[how]
    ((ok, said),) = run(
        DirectoryFilesystem(folder),
        ToolCall("run_command", {"command": command}),
        sections=[ShellTools(SHELL)],
    )
    assert not ok
    assert "exit code" in said
    assert snapshot(folder) == before


def test_what_may_not_run_is_refused_in_words(folder: Path) -> None:
    """A command that no rule allows is refused, and the model is told which ones are allowed."""
    ((ok, said),) = run(
        DirectoryFilesystem(folder),
        ToolCall("run_command", {"command": ["curl", "x"]}),
        sections=[ShellTools(SHELL)],
    )
    assert not ok
    assert "is not allowed" in said
    assert "touch" in said


def test_commands_need_a_real_folder() -> None:
    """Commands on files in memory are refused, and the error says what to use instead."""
    ((ok, said),) = run(
        MemoryFilesystem(), ToolCall("run_command", {"command": ["cat", "a"]}), sections=[ShellTools(SHELL)]
    )
    assert not ok
    assert "DirectoryFilesystem" in said


def test_the_section_says_what_may_run() -> None:
    """The section tells the model which commands are allowed. Its tool is irreversible if commands can reach the network."""
    text = Prompt("p", [ShellTools(SHELL)]).render().text
    assert "- `git commit …`" in text
    assert ShellTools(SHELL).tools[0].effect == "staged"
    assert ShellTools(Shell([Allow("cat", ...)], network=True)).tools[0].effect == "irreversible"


# --- CommandPassing ----------------------------------------------------------------------------


def test_a_run_is_held_until_a_command_passes(folder: Path) -> None:
    """With `CommandPassing`, a run continues until the command passes. The model is told how it failed.

    The check itself changes no files.
    """
    (folder / "Makefile").write_text("test:\n\ttouch tested.txt\n\tcat fixed.txt\n")
    model = ScriptedModel(
        ["Done.", ToolCall("write_file", {"path": "fixed.txt", "text": "yes\n"}), "Now it is."]
    )
    prompt = Prompt("p", [FileTools()], completion=[CommandPassing(SHELL, "make", "test")])
    response = Adapter(model).evaluate(prompt, "go", filesystem=DirectoryFilesystem(folder)).wait()
    assert (response.text, response.stop_reason) == ("Now it is.", "done")
    assert "fixed.txt: No such file" in model.requests[1].messages[-1].text
    assert [each.failed for each in response.session[Advised].all()] == [False]
    assert not (folder / "tested.txt").exists()


def test_a_command_that_could_not_run_has_not_passed(folder: Path) -> None:
    """If the command of `CommandPassing` can't be run, the model is told why, and the run ends as incomplete."""
    shell = Shell([Allow("no-such-program")])
    model = ScriptedModel(["Done.", "Done again."])
    prompt = Prompt("p", [FileTools()], completion=[CommandPassing(shell, "no-such-program", cap=1)])
    response = Adapter(model).evaluate(prompt, "go", filesystem=DirectoryFilesystem(folder)).wait()
    assert (response.text, response.stop_reason) == ("Done again.", "incomplete")
    assert "could not run: `no-such-program`" in model.requests[1].messages[-1].text


def test_a_command_that_may_not_run_is_found_when_the_checker_is_made() -> None:
    """`CommandPassing` without a command, or with one that no rule allows, raises an error when it is created."""
    with pytest.raises(CommandRefused):
        CommandPassing(SHELL, "pytest")
    with pytest.raises(DefinitionError, match="runs nothing"):
        CommandPassing(SHELL)
