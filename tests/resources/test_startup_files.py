"""Startup files are files that programs run automatically. Diffs mark them.

Creating or changing one on disk needs a person's approval, unless `startup_files` allows it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    CapabilityPolicy,
    DirectoryFilesystem,
    LaterEnvironment,
    MemoryFilesystem,
    Prompt,
    ScriptedModel,
    Session,
    SqliteJournal,
    ToolCall,
    ToolContext,
    open_gate,
    tool,
)
from handrail.errors import DefinitionError, RunParked
from handrail.question import Question
from handrail.resources.shell import Allow, Shell, probe
from handrail.resources.startup_files import is_allowed, run_by
from handrail.sections.commands import run_command_tool
from handrail.testing import Nobody, Person
from handrail.text.terminal import diff_style
from support.parked_runs import answer_to

ASK = CapabilityPolicy({"fs.write": "ask"})
MARK = "runs later: by "


@tool(effect="staged", capabilities={"fs.write"})
async def write(path: str, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, "new\n")
    return "written"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "work"
    (root / ".git" / "hooks").mkdir(parents=True)
    (root / "scripts").mkdir()
    (root / "scripts" / "check").write_text("old\n")
    (root / "plain.txt").write_text("old\n")
    (root / ".envrc").write_text("old\n")
    (root / "link.txt").symlink_to(".envrc")
    (root / ".git" / "hooks" / "pre-commit").symlink_to("../../scripts/check")
    return root


class Looker:
    """A person who records every question and gives the same answer to all of them."""

    def __init__(self, approves: bool) -> None:
        self.questions: list[Question] = []
        self.person = Person(approve=lambda question: self.questions.append(question) or approves)


# --- which files are startup files ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "program"),
    [
        (".git/hooks/pre-commit", "git"),
        ("deep/down/.git/hooks/post-merge", "git"),
        (".git/config", "git"),
        (".git", "git"),  # a file with this name points git to a different folder
        ("bare.git/hooks/update", "git"),
        (".git/modules/a/b/hooks/pre-commit", "git"),
        (".claude/hooks/check.sample", "an agent"),
        (".claude/modules/a", "an agent"),
        (".GIT/Hooks/pre-commit", "git"),
        (".g\u200cit/hooks/pre-commit", "git"),
        (".envrc", "direnv or mise"),
        ("sub/.EnvRC", "direnv or mise"),
        ("\uff0eenvrc", "direnv or mise"),
        ("tests/conftest.py", "pytest"),
        ("workers/tools.py", "Handrail"),
        ("sitecustomize.py", "Python"),
        ("sitecustomize/__init__.py", "Python"),
        ("lib/usercustomize.cpython-311-x86_64-linux-gnu.so", "Python"),
        (".git/commondir", "git"),
        (".git/worktrees/w/gitdir", "git"),
        (".git/modules/m/commondir", "git"),
        ("docs/HEAD", "git"),
        (".config/fish/functions/fish_prompt.fish", "a shell"),
        ("mise.local.toml", "direnv or mise"),
        (".venv/lib/python3.11/site-packages/x.pth", "Python"),
        (".venv/lib/python3.11/site-packages/package/module.py", "Python"),
        ("vendor/site-packages/x.so", "Python"),
        ("env/lib/python3/dist-packages/x.py", "Python"),
        (".hg/hgrc", "Mercurial"),
        (".dir-locals-2.el", "an editor"),
        (".helix/languages.toml", "an editor"),
        (".zed/tasks.json", "an editor"),
        (".mvn/jvm.config", "a package manager"),
        (".Rprofile", "an interpreter"),
        (".gitea/workflows/ci.yml", "a build service"),
        (".woodpecker.yml", "a build service"),
        (".opencode/plugin/x.ts", "an agent"),
        ("opencode.json", "an agent"),
        (".aider.conf.yml", "an agent"),
        ("app.code-workspace", "an editor"),
        (".perldb", "a debugger"),
        (".erlang", "an interpreter"),
        (".ocamlinit", "an interpreter"),
        (".yarn/releases/yarn-4.5.0.cjs", "a package manager"),
        ("bunfig.toml", "a package manager"),
        ("rust-toolchain.toml", "a package manager"),
        (".semaphore/semaphore.yml", "a build service"),
        (".venv/pyvenv.cfg", "Python"),
        ("any/name/bin/activate", "a shell"),
        (".venv/Scripts/Activate.ps1", "a shell"),
        (".venv/bin/activate_this.py", "Python"),
        (".venv/bin/python", "Python"),
        (".venv/bin/python3.12", "Python"),
        (".venv/lib/python3.11/site-packages/_virtualenv.py", "Python"),
        (".venv/lib/python3.11/site-packages/_distutils_hack/__init__.py", "Python"),
        (".venv/lib/python3.11/site-packages/__editable___app_1_0_finder.py", "Python"),
        (".bashrc", "a shell"),
        (".vscode/tasks.json", "an editor"),
        (".github/workflows/ci.yml", "a build service"),
        (".git/" * 500 + "x", "a program"),
    ],
)
def test_what_runs_by_itself(path: str, program: str) -> None:
    """A startup file is recognised in any folder, in upper or lower case, and with invisible or full-width characters."""
    assert run_by(path) == program


def test_a_virtual_environment_can_be_allowed_as_a_whole() -> None:
    """`.venv/*` allows everything in that folder, at any depth, and nothing beside it."""
    for path in (".venv/pyvenv.cfg", ".venv/bin/python", ".venv/lib/python3.11/site-packages/x.pth"):
        assert run_by(path)
        assert is_allowed(path, [".venv/*"])
    assert not is_allowed("sub/.venv/bin/python", [".venv/*"])


@pytest.mark.parametrize(
    "path",
    [
        "Makefile",
        "my_tools.py",
        "conftest.py/x",
        ".git/index",
        ".git/HEAD",
        ".git/logs/HEAD",
        ".git/worktrees/w/index",
        "head.txt",
        ".git/objects/ab/cd",
        ".git/refs/heads/config",
        ".git/hooks/pre-commit.sample",
        ".git/modules/a/HEAD",
        ".gitignore",
        "hooks/pre-commit",
        "src/activate",
        "bin/python-lint",
        "python",
        "lib/package/module.py",
    ],
)
def test_what_does_not_run_by_itself(path: str) -> None:
    """Ordinary files, files that run only when somebody runs or imports them, and git's data files are not startup files."""
    assert run_by(path) == ""


@pytest.mark.parametrize("place", [".git", ".git/hooks", ".github", ".github/workflows", "a/.vscode"])
def test_a_link_in_the_place_of_a_folder_of_them_counts(place: str) -> None:
    """A link in place of a folder with startup files counts as a startup file, because it decides which files are there."""
    assert run_by(place, is_link=True)
    assert place == ".git" or not run_by(place)


# --- ways to change a startup file ------------------------------------------------------------------


def _move(context: ToolContext) -> None:
    context.filesystem.write("other", "new\n")
    context.filesystem.move("other", ".bashrc")


def _move_folder(context: ToolContext) -> None:
    context.filesystem.write("mine/pre-push", "new\n")
    context.filesystem.move("mine", ".husky")


def _delete_and_create(context: ToolContext) -> None:
    context.filesystem.delete(".envrc")
    context.filesystem.write(".envrc", "new\n")


TOOLS: dict[str, tuple[Callable[[ToolContext], object], str]] = {
    "write": (lambda context: context.filesystem.write(".envrc", "new\n"), ".envrc"),
    "another case": (lambda context: context.filesystem.write("sub/.ENVRC", "new\n"), "sub/.ENVRC"),
    "move": (_move, ".bashrc"),
    "move a folder": (_move_folder, ".husky/pre-push"),
    "delete and create": (_delete_and_create, ".envrc"),
    "through a link": (lambda context: context.filesystem.write("link.txt", "new\n"), ".envrc"),
    "delete": (lambda context: context.filesystem.delete(".envrc"), ".envrc"),
    "delete a folder": (
        lambda context: context.filesystem.delete(".git", recursive=True),
        ".git/hooks/pre-commit",
    ),
    "move away": (lambda context: context.filesystem.move(".envrc", "x"), ".envrc"),
    "what a hook leads to": (
        lambda context: context.filesystem.write("scripts/check", "new\n"),
        "scripts/check",
    ),
}


REMOVALS = {"delete", "delete a folder", "move away"}


@pytest.mark.parametrize("approves", [True, False])
@pytest.mark.parametrize("way", TOOLS)
async def test_a_tool_that_changes_one_is_asked_about(root: Path, way: str, approves: bool) -> None:
    """Even if no policy asks, a person sees a tool's change to a startup file, marked in the diff, and decides about it."""
    change, path = TOOLS[way]
    before = (root / path).read_text() if (root / path).exists() else None

    @tool(effect="staged")
    async def work(context: ToolContext) -> str:
        """Make the change of this test case."""
        change(context)
        return "worked"

    looker = Looker(approves)
    gate = open_gate([work], filesystem=DirectoryFilesystem(root), environment=looker.person)
    result = await gate.invoke("work")
    (question,) = looker.questions
    assert f"files that later run automatically, outside the sandbox: {path} (run by " in question.message
    assert MARK in question.payload["diff"]
    assert "scopes" not in question.payload  # the answer can't be remembered
    assert result.success is approves
    after = (root / path).read_text() if (root / path).exists() else None
    assert after == ((None if way in REMOVALS else "new\n") if approves else before)


COMMANDS = {
    "write": ("echo new > .envrc", ".envrc"),
    "append": ("echo new >> .envrc", ".envrc"),
    "delete": ("rm .envrc", ".envrc"),
    "move away": ("mv .envrc x", ".envrc"),
    "another case": ("echo new > .ENVRC", ".ENVRC"),
    "rename": ("echo new > x; mv x .bashrc", ".bashrc"),
    "delete and create": ("rm .envrc; echo new > .envrc", ".envrc"),
    "through a link": ("echo new > link.txt", ".envrc"),
    "a second name": ("ln .envrc x; echo new > x", ".envrc"),
    "a link to it": ("ln -s plain.txt .zshrc", ".zshrc"),
    "a link in place of the folder": ("rm -r .git/hooks; mkdir mine; ln -s ../mine .git/hooks", ".git/hooks"),
    "a file in place of the folder": ("rm -r .git; echo gitdir: mine > .git", ".git"),
    "a folder of them": ("mkdir mine; echo new > mine/pre-push; mv mine .husky", ".husky/pre-push"),
    "its mode": ("chmod 755 .envrc", ".envrc"),
    "what a hook leads to": ("echo new > scripts/check", "scripts/check"),
}


@pytest.mark.parametrize("backend", ["overlay", "copy"])
@pytest.mark.parametrize("way", COMMANDS)
async def test_a_command_that_changes_one_is_asked_about(root: Path, way: str, backend: Any) -> None:
    """A command's change to a startup file is marked in the diff, and not applied if the person denies it."""
    support = probe(root)
    if not support.contained or (backend == "overlay" and not support.overlay):
        pytest.skip("; ".join(support.missing))
    script, path = COMMANDS[way]
    before = {each: os.lstat(each).st_mtime_ns for each in root.rglob("*")}
    looker = Looker(False)
    gate = open_gate(
        [run_command_tool(Shell([Allow(...)], backend=backend))],
        filesystem=DirectoryFilesystem(root),
        environment=looker.person,
    )
    result = await gate.invoke("run_command", {"command": ["sh", "-c", script]})
    (question,) = looker.questions
    assert f"{path} (run by " in question.message
    assert MARK in question.payload["diff"]
    assert "Its changes were not applied" in result.message
    assert {each: os.lstat(each).st_mtime_ns for each in root.rglob("*")} == before


async def test_an_inner_call_is_asked_about_with_the_outer_one(root: Path) -> None:
    """A person is asked once about a nested call's change, before the outermost call is committed."""

    @tool(effect="staged")
    async def outer(context: ToolContext) -> str:
        """Write a startup file with an inner call."""
        return str(await context.call("write", path=".envrc"))

    looker = Looker(False)
    gate = open_gate([outer, write], filesystem=DirectoryFilesystem(root), environment=looker.person)
    assert not (await gate.invoke("outer")).success
    assert [question.payload["tool"] for question in looker.questions] == ["outer"]
    assert (root / ".envrc").read_text() == "old\n"


async def test_a_file_that_was_made_and_removed_again_is_not_asked_about(root: Path) -> None:
    """Nobody is asked about a startup file that the call both creates and deletes."""

    @tool(effect="staged")
    async def work(context: ToolContext) -> str:
        """Create and delete a startup file."""
        context.filesystem.write("conftest.py", "x")
        context.filesystem.delete("conftest.py")
        return "worked"

    looker = Looker(False)
    gate = open_gate([work], filesystem=DirectoryFilesystem(root), environment=looker.person)
    assert (await gate.invoke("work")).success
    assert looker.questions == []


# --- only a person can approve ----------------------------------------------------------------------


@pytest.mark.parametrize("policies", [[], [ASK], [CapabilityPolicy({"fs.write": "allow"})]])
@pytest.mark.parametrize("how", ["approve_all", "headless", "nobody"])
async def test_it_is_denied_where_nobody_is_asked(root: Path, how: str, policies: list[Any]) -> None:
    """A change to a startup file is denied unless a person is asked, even if a policy allows it or everything is approved."""
    gate = open_gate(
        [write],
        filesystem=DirectoryFilesystem(root),
        policies=policies,
        approvals="approve_all" if how == "approve_all" else None,
        environment={"approve_all": Person(approve=True), "headless": Nobody(), "nobody": None}[how],
    )
    result = await gate.invoke("write", {"path": ".envrc"})
    assert not result.success
    assert (root / ".envrc").read_text() == "old\n"
    if how == "approve_all" or policies != [ASK]:  # otherwise the call was denied before it ran
        assert ".envrc (run by direnv or mise)" in result.message
        assert "startup_files=['.envrc']" in result.message
    assert (await gate.invoke("write", {"path": "plain.txt"})).success is (
        how == "approve_all" or policies != [ASK]
    )


async def test_what_is_remembered_does_not_cover_it(root: Path) -> None:
    """A remembered approval of a tool's other calls does not cover a change to a startup file.

    A denial of such a change is not remembered either.
    """
    asked: list[str] = []

    def approve(question: Question) -> Any:
        asked.append(question.message)
        scopes = question.payload.get("scopes")
        return {"approved": True, "remember": "scope", "scope": scopes[-1]} if scopes else False

    session = Session()
    gate = open_gate(
        [write],
        session=session,
        filesystem=DirectoryFilesystem(root),
        policies=[ASK],
        environment=Person(approve=approve),
    )
    assert (await gate.invoke("write", {"path": "a.txt"})).success
    assert (await gate.invoke("write", {"path": "a.txt"})).success
    assert len(asked) == 1  # the first answer was remembered for the second call
    assert not (await gate.invoke("write", {"path": ".zshrc"})).success
    assert not (
        await gate.invoke("write", {"path": ".zshrc"})
    ).success  # the first denial was not remembered, so the person is asked again
    assert len(asked) == 3
    assert not (root / ".zshrc").exists()


async def test_an_answer_that_wants_to_be_remembered_is_refused(root: Path) -> None:
    """An answer that asks to be remembered is refused, because the question did not offer that."""
    person = Person(approve=lambda question: {"approved": True, "remember": "exact"})
    gate = open_gate([write], filesystem=DirectoryFilesystem(root), environment=person)
    result = await gate.invoke("write", {"path": ".envrc"})
    assert not result.success
    assert (root / ".envrc").read_text() == "old\n"


@pytest.mark.parametrize("approved", [True, False])
async def test_a_parked_run_waits_for_it(root: Path, tmp_path: Path, approved: bool) -> None:
    """A run that changes a startup file is parked with a question, and its answer takes effect when the run is resumed."""
    prompt = Prompt("p", "Do.", tools=[write])
    model = ScriptedModel([ToolCall("write", {"path": ".envrc"}), "done"])
    with closing(SqliteJournal(tmp_path / "journal.db")) as journal:
        adapter = Adapter(
            model, journal=journal, filesystem=DirectoryFilesystem(root), environment=LaterEnvironment()
        )
        with pytest.raises(RunParked):
            await adapter.evaluate(prompt, "go", run_id="run")
        (question,) = await journal.questions.open("run")
        assert ".envrc (run by direnv or mise)" in question.message
        assert (root / ".envrc").read_text() == "old\n"
        journal.questions.answer(answer_to(question, {"approved": approved}))
        await adapter.resume("run", prompt)
    assert (root / ".envrc").read_text() == ("new\n" if approved else "old\n")


async def test_an_irreversible_call_is_not_run_again_for_another_diff(root: Path) -> None:
    """If a startup file changes while its diff is reviewed, an irreversible call fails instead of running again."""
    ran: list[int] = []

    @tool(effect="irreversible")
    async def pay(context: ToolContext) -> str:
        """Pay, and note it in a startup file."""
        ran.append(1)
        context.filesystem.write(".envrc", "new\n")
        return "paid"

    def approve(question: Question) -> bool:
        (root / ".envrc").write_text("by somebody else\n")
        return True

    gate = open_gate([pay], filesystem=DirectoryFilesystem(root), environment=Person(approve=approve))
    assert not (await gate.invoke("pay")).success
    assert ran == [1]
    assert (root / ".envrc").read_text() == "by somebody else\n"


async def test_a_staged_call_runs_again_and_is_asked_about_again(root: Path) -> None:
    """If a startup file changes while its diff is reviewed, a staged call runs again, and the person is asked about the new diff."""
    looker = Looker(True)

    def approve(question: Question) -> bool:
        looker.questions.append(question)
        if len(looker.questions) == 1:
            (root / ".envrc").write_text("by somebody else\n")
        return True

    gate = open_gate([write], filesystem=DirectoryFilesystem(root), environment=Person(approve=approve))
    assert (await gate.invoke("write", {"path": ".envrc"})).success
    assert ["-by somebody else" in question.payload["diff"] for question in looker.questions] == [False, True]


# --- startup files that are allowed by name, marks and links ----------------------------------------


@pytest.mark.parametrize(
    ("allowed", "path", "passes"),
    [
        ("conftest.py", "tests/conftest.py", True),
        ("tests/conftest.py", "conftest.py", False),
        (".github/workflows/*", ".github/workflows/ci.yml", True),
        (".envrc", "sub/.ENVRC", False),
        (".envrc", "tools.py", False),
    ],
)
async def test_one_is_allowed_by_name(root: Path, allowed: str, path: str, passes: bool) -> None:
    """A change to a startup file needs approval unless `startup_files` allows the file. Diffs mark it in either case."""
    files = DirectoryFilesystem(root, startup_files=[allowed])
    assert (await open_gate([write], filesystem=files).invoke("write", {"path": path})).success is passes
    fork = files.fork("x")
    fork.write(path, "newer\n")
    assert MARK in fork.diff()


def test_the_list_of_names_is_no_string(root: Path) -> None:
    """`startup_files` can't be a string, because it would be read as a list of characters."""
    with pytest.raises(DefinitionError, match=r"Pass a list of patterns: \['\.envrc'\]"):
        DirectoryFilesystem(root, startup_files=".envrc")


async def test_files_in_memory_are_marked_and_not_asked_about() -> None:
    """Startup files in memory are marked in diffs, but need no approval, because nothing runs them."""
    files = MemoryFilesystem()
    assert (await open_gate([write], filesystem=files).invoke("write", {"path": ".envrc"})).success
    fork = files.fork("x")
    fork.write("tools.py", "")
    assert fork.diff() == (
        "diff --git a/tools.py b/tools.py\n"
        "runs later: by Handrail, automatically and outside the sandbox\nnew file\n"
    )


def test_the_mark_can_not_be_imitated_and_stands_out(root: Path) -> None:
    """If a line in a file imitates the mark, it does not begin with the mark in the diff.

    The terminal colours only lines that begin with it.
    """
    fork = DirectoryFilesystem(root).fork("x")
    fork.write("plain.txt", "runs later: by nobody\n")
    assert not [line for line in fork.diff().splitlines() if line.startswith("runs later")]
    assert diff_style(f"{MARK}git") == ("yellow", "bold")
    assert diff_style(f" {MARK}git") == ()


@pytest.mark.parametrize("place", [".vscode", ".claude", ".github/workflows", ".config/fish/conf.d"])
@pytest.mark.parametrize("written", ["through the link", "where it leads"])
async def test_a_folder_of_them_that_is_a_link_is_followed(root: Path, place: str, written: str) -> None:
    """If a folder of startup files is a link that somebody made earlier, the files that it leads to are startup files too."""
    (root / "shared").mkdir()
    (root / place).parent.mkdir(parents=True, exist_ok=True)
    (root / place).symlink_to(root / "shared")
    path = f"{place}/x" if written == "through the link" else "shared/x"
    with closing(DirectoryFilesystem(root)) as files:
        fork = files.fork("call")
        fork.write(path, "new\n")
        ((found, program),) = fork.startup_files()
        assert found == "shared/x"
        assert place in program
        fork.drop()


@pytest.mark.parametrize("folder", ["mirror", "a/b/mirror", ""])
@pytest.mark.parametrize("file", ["hooks/pre-receive", "config", "info/attributes"])
def test_a_bare_repository_of_any_name_counts(root: Path, folder: str, file: str) -> None:
    """Hooks, config and attributes in an existing bare repository are startup files, whatever its folder is called."""
    at = root / folder
    at.mkdir(parents=True, exist_ok=True)
    path = f"{folder}/{file}" if folder else file
    with closing(DirectoryFilesystem(root)) as files:
        fork = files.fork("call")
        fork.write(path, "")
        assert fork.startup_files() == []
        fork.drop()
        (at / "HEAD").write_text("ref: refs/heads/main\n")
        fork = files.fork("call")
        fork.write(path, "")
        assert fork.startup_files() == [(path, "git")]
        assert "runs later: by git" in fork.diff()
        fork.drop()


_PARTS = {
    "HEAD": lambda fork, at: fork.write(f"{at}/HEAD", "ref: refs/heads/main\n"),
    "config": lambda fork, at: fork.write(f"{at}/config", "[core]\n\tfsmonitor = evil\n"),
    "objects": lambda fork, at: fork.mkdir(f"{at}/objects"),
    "refs": lambda fork, at: fork.mkdir(f"{at}/refs"),
}


@pytest.mark.parametrize("order", [*permutations(_PARTS)], ids=" ".join)
@pytest.mark.parametrize("folder", ["docs.git/sub", ".git/sub", "plain/sub"])
def test_no_order_of_calls_makes_a_repository_unasked(
    root: Path, folder: str, order: tuple[str, ...]
) -> None:
    """Whichever part of a repository comes last, one of the calls that make it is asked about, wherever the repository is."""
    asked: list[str] = []
    with closing(DirectoryFilesystem(root)) as files:
        for part in order:
            fork = files.fork("call")
            _PARTS[part](fork, folder)
            asked += [path for path, program in fork.startup_files() if program == "git"]
            assert (MARK in fork.diff()) is bool(fork.startup_files())
            fork.prepare()
            fork.apply()
    assert asked
    assert all(path.startswith(f"{folder}/") for path in asked)


def test_a_folder_that_completes_a_repository_is_marked_in_the_diff(root: Path) -> None:
    """If a folder that holds other new files completes a repository, it has its own entry in the diff, with the mark."""
    at = root / "docs.git" / "sub"
    (at / "objects").mkdir(parents=True)
    (at / "HEAD").write_text("ref: refs/heads/main\n")
    with closing(DirectoryFilesystem(root)) as files:
        fork = files.fork("call")
        fork.write("docs.git/sub/refs/heads/main", "0" * 40)
        assert fork.startup_files() == [("docs.git/sub/refs", "git")]
        assert "diff --git a/docs.git/sub/refs b/docs.git/sub/refs\nruns later: by git" in fork.diff()
        fork.drop()


def test_work_in_an_existing_repository_is_not_asked_about(root: Path) -> None:
    """What git changes when somebody commits, fetches or prunes is no startup file."""
    for name in ("objects", "refs/heads", "refs/remotes/origin", "logs"):
        (root / ".git" / name).mkdir(parents=True)
    for name in ("HEAD", "refs/heads/main", "refs/remotes/origin/HEAD"):
        (root / ".git" / name).write_text("ref: refs/heads/main\n")
    with closing(DirectoryFilesystem(root)) as files:
        fork = files.fork("call")
        fork.write(".git/HEAD", "ref: refs/heads/other\n")
        fork.write(".git/objects/ab/cd", "")
        fork.write(".git/refs/heads/other", "")
        fork.write(".git/logs/HEAD", "")
        fork.delete(".git/refs/heads/main")
        fork.delete(".git/refs/remotes/origin/HEAD")
        assert fork.startup_files() == []
        fork.drop()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda fork: fork.write("tools/env/lib/python3.12/os.py", ""), "tools/env/lib/python3.12/os.py"),
        (
            lambda fork: fork.delete("tools/env/lib/python3.12/site-packages/x.pth"),
            "tools/env/lib/python3.12/site-packages/x.pth",
        ),
        (lambda fork: fork.delete("tools/env/lib64"), "tools/env/lib64"),
        (lambda fork: fork.delete("tools/env/pyvenv.cfg"), "tools/env/pyvenv.cfg"),
    ],
)
def test_an_environment_of_any_name_counts(root: Path, change: Any, path: str) -> None:
    """The libraries of a virtual environment are startup files, whatever its folder is called, and so are the links to them."""
    library = root / "tools" / "env" / "lib" / "python3.12" / "site-packages"
    library.mkdir(parents=True)
    (library / "x.pth").write_text("")
    (root / "tools" / "env" / "lib64").symlink_to("lib")
    (root / "tools" / "env" / "pyvenv.cfg").write_text("")
    with closing(DirectoryFilesystem(root)) as files:
        fork = files.fork("call")
        change(fork)
        assert fork.startup_files() == [(path, "Python")]
        assert "runs later: by Python" in fork.diff()
        fork.drop()


@pytest.mark.parametrize("changed", ["step", "real"])
def test_every_link_on_the_way_to_one_counts(root: Path, changed: str) -> None:
    """If a startup file is a link to a link, a change to the second link or to its target counts as one to the startup file."""
    (root / "conftest.py").symlink_to("step")
    (root / "step").symlink_to("real")
    (root / "real").write_text("")
    (root / "other").write_text("")
    with closing(DirectoryFilesystem(root)) as files:
        fork = files.fork("call")
        if changed == "step":
            fork.delete("step")
            fork.move("other", "step")
        else:
            fork.write("real", "new")
        assert [path for path, _ in fork.startup_files()] == [changed]
        fork.drop()


@pytest.mark.parametrize("repository", ["libs/lib", "vendor/a/b"])
def test_a_link_in_a_repository_below_the_root_counts(root: Path, repository: str) -> None:
    """If a hook of a nested repository is a link, a change to the file in that repository that it leads to counts."""
    hooks = root / repository / ".git" / "hooks"
    hooks.mkdir(parents=True)
    (root / repository / "scripts").mkdir()
    (root / repository / "scripts" / "check").write_text("")
    (hooks / "pre-commit").symlink_to("../../scripts/check")
    with closing(DirectoryFilesystem(root)) as files:
        fork = files.fork("call")
        fork.write(f"{repository}/scripts/check", "new")
        ((path, program),) = fork.startup_files()
        assert path == f"{repository}/scripts/check"
        assert program == f"git, as {repository}/.git/hooks/pre-commit"
        fork.drop()


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("place", ["tests/conftest.py", "pkg/.envrc", "a/b/x.pth"])
def test_writing_through_a_link_at_any_depth_counts(root: Path, place: str, inner: bool) -> None:
    """A file that was changed by the path of a startup file, which is a link to it, counts as that startup file."""
    (root / place).parent.mkdir(parents=True, exist_ok=True)
    (root / "elsewhere").mkdir()
    (root / "elsewhere" / "real").write_text("")
    (root / place).symlink_to(root / "elsewhere" / "real")
    with closing(DirectoryFilesystem(root)) as files:
        fork = files.fork("call")
        writer = fork.fork("inner") if inner else fork
        writer.write(place, "new")
        if inner:
            writer.prepare()
            writer.apply()
        ((path, program),) = fork.startup_files()
        assert path == "elsewhere/real"
        assert program.endswith(f", as {place}")
        fork.drop()


@pytest.mark.parametrize("folder", ["", "a/b"])
def test_a_link_with_a_name_that_matches_a_pattern_counts(root: Path, folder: str) -> None:
    """The target of `x.pth` is a startup file, if the link is in a folder around it."""
    (root / folder / "lib").mkdir(parents=True)
    (root / folder / "lib" / "paths").write_text("")
    (root / folder / "x.pth").symlink_to("lib/paths")
    with closing(DirectoryFilesystem(root)) as files:
        fork = files.fork("call")
        fork.write(f"{folder}/lib/paths" if folder else "lib/paths", "new")
        ((_, program),) = fork.startup_files()
        assert program.startswith("Python, as ")
        fork.drop()


def test_a_large_root_is_not_listed_for_each_change(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a root with many files, the links at startup files' locations are found without listing the root."""
    (root / "conftest.py").symlink_to("real")
    (root / "real").write_text("")
    for number in range(400):
        (root / f"{number:0200}").touch()
    listed: list[str] = []
    listdir = os.listdir

    def list_and_note(path: Any = ".") -> list[str]:
        listed.append(str(path))
        return listdir(path)

    with closing(DirectoryFilesystem(root)) as files:
        fork = files.fork("call")
        fork.write("real", "new")
        monkeypatch.setattr(os, "listdir", list_and_note)
        assert [path for path, _ in fork.startup_files()] == ["real"]
        assert os.path.realpath(root) not in map(os.path.realpath, listed)
        fork.drop()
