"""The installation that runs Handrail can't be changed by calls, and a sandbox shows nothing that a link in its folder leads to.

Most tests start a Python of their own, from a virtual environment inside the folder that its calls work on.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import handrail
from handrail import DirectoryFilesystem
from handrail.errors import PathRefused, UndoRefused
from handrail.journal.records import CallKey
from handrail.resources.directory import disk
from handrail.resources.shell import Allow, Shell, probe
from handrail.resources.shell.shell_errors import CommandRefused

PACKAGES = [str(Path(handrail.__file__).parents[1]), *(path for path in sys.path if "site-packages" in path)]
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
LIBRARY = f".venv/lib/{VERSION}/site-packages"

START = """
import asyncio, json, os, sys
from pathlib import Path
import handrail
from handrail import DirectoryFilesystem, open_gate
from handrail.resources.shell import Allow, Shell
from handrail.sections.commands import run_command_tool
from handrail.sections.files import WRITING

root, backend, steps = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])

async def main():
    files = DirectoryFilesystem(root, startup_files=["*", "**"])
    shell = Shell([Allow(...)], backend=backend)
    gate = open_gate([*WRITING, run_command_tool(shell)], filesystem=files)
    said = []
    for name, arguments in steps:
        result = await gate.invoke(name, arguments)
        said.append([result.success, f"{result.message}{result.value}"])
    print(json.dumps(said))

asyncio.run(main())
"""


@pytest.fixture(params=["overlay", "copy"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    support = probe(tmp_path)
    assert support.contained, support.missing
    assert support.overlay or request.param == "copy", support.missing
    return request.param


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with a virtual environment, beside the private folder of somebody else."""
    root = tmp_path / "work"
    venv.create(root / ".venv", symlinks=True)
    package = root / LIBRARY / "handrail"
    package.mkdir()
    (package / "clock.py").write_text("before\n")
    (root / LIBRARY / "some.pth").write_text("")
    (root / "plain.txt").write_text("plain\n")
    (root / "sub").mkdir()
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / ".env").write_text("hunter2\n")
    return root


def run_in(
    root: Path,
    backend: str,
    *steps: tuple[str, dict[str, Any]],
    python: str = ".venv/bin/python",
    libraries: Sequence[Path] = (),
    start: str = START,
) -> Any:
    """Run these calls in a Handrail that the virtual environment in the folder runs. Returns each result's success and message."""
    done = subprocess.run(
        [root / python, "-c", start, str(root), backend, json.dumps(steps)],
        env={"PYTHONPATH": os.pathsep.join([*map(str, libraries), *PACKAGES]), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def snapshot(folder: Path) -> dict[str, Any]:
    """Return what is in a folder, without bytecode."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def sh(script: str) -> tuple[str, dict[str, Any]]:
    return "run_command", {"command": ["sh", "-c", script]}


COMMANDS = {
    "append": f"echo evil >> {LIBRARY}/handrail/clock.py",
    "add": f"echo evil > {LIBRARY}/evil.pth",
    "delete": f"rm {LIBRARY}/some.pth",
    "replace the folder by a link": f"rm -r {LIBRARY}; ln -s /etc {LIBRARY}",
    "move it away": f"mv {LIBRARY} lib && mkdir {LIBRARY}",
    "move the environment": "mv .venv other",
    "replace the interpreter": "rm .venv/bin/python; echo evil > .venv/bin/python",
    "the configuration": "echo home = /evil > .venv/pyvenv.cfg",
    "its mode": f"chmod 777 {LIBRARY}/some.pth",
    "through a link": f"ln -s {LIBRARY} x; echo evil > x/evil.pth",
    "through a hard link": f"ln {LIBRARY}/handrail/clock.py x && echo evil >> x",
    "a script": "echo evil > .venv/bin/handrail",
}


def test_no_command_changes_the_environment_that_runs_handrail(root: Path, backend: str) -> None:
    """Whatever commands do to a virtual environment in their folder, nothing there changes, even if all startup files are allowed."""
    before = snapshot(root / ".venv")
    results = run_in(root, backend, *map(sh, COMMANDS.values()))
    assert snapshot(root / ".venv") == before
    assert {way for way, (ok, _) in zip(COMMANDS, results, strict=True) if ok} <= MAY_SUCCEED


@pytest.mark.parametrize("what", ["outer", "sub"])
def test_a_folder_that_contains_the_environment_stays(root: Path, backend: str, what: str) -> None:
    """A command can't move or remove a folder that contains the environment."""
    (root / "sub" / "deep").mkdir()
    os.rename(root / ".venv", root / "sub" / "deep" / ".venv")
    before = snapshot(root)
    script = {"outer": "mv sub other", "sub": "rm -rf sub; echo x > sub"}[what]
    ((ok, _),) = run_in(root, backend, sh(script), python="sub/deep/.venv/bin/python")
    assert not ok
    assert snapshot(root) == before


MAY_SUCCEED = {"through a hard link"}
"""Where an overlay or a copy has no hard link to the file, only the other name changes."""

TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "write": ("write_file", {"path": f"{LIBRARY}/evil.pth", "text": "evil"}),
    "through a link": ("write_file", {"path": "linked/evil.pth", "text": "evil"}),
    "move into": ("move_file", {"source": "plain.txt", "target": f"{LIBRARY}/evil.pth"}),
    "move away": ("move_file", {"source": ".venv", "target": "other"}),
    "move a part": ("move_file", {"source": LIBRARY, "target": "other"}),
    "delete a part": ("delete_file", {"path": f"{LIBRARY}/handrail", "recursive": True}),
    "delete": ("delete_file", {"path": ".venv", "recursive": True}),
}


def test_no_tool_changes_the_environment_that_runs_handrail(root: Path) -> None:
    """No verb of a tool's files changes the environment, even if all startup files are allowed. The error says why."""
    (root / "linked").symlink_to(LIBRARY)
    before = snapshot(root)
    for ok, message in run_in(root, "copy", *TOOLS.values()):
        assert not ok
        assert "installation that runs Handrail" in message
    assert snapshot(root) == before


def test_commands_still_use_the_environment(root: Path, backend: str) -> None:
    """A command can run the environment's Python, and its own changes to other files are kept."""
    script = ".venv/bin/python -c 'import sys; print(sys.prefix)' > seen; cat seen"
    ((ok, message),) = run_in(root, backend, sh(script))
    assert ok
    assert (root / "seen").read_text() == f"{root}/.venv\n"
    assert str(root / ".venv") in message


def test_a_link_planted_before_the_start_shows_nothing(root: Path, backend: Any, tmp_path: Path) -> None:
    """If a library of the environment is a link in the folder, a command does not see what it leads to."""
    (root / "vendor").mkdir()
    (root / "vendor" / "site-packages").symlink_to(tmp_path / "private")
    PACKAGES.append(str(root / "vendor" / "site-packages"))
    try:
        ((_, message),) = run_in(root, backend, sh(f"cat {tmp_path}/private/.env vendor/site-packages/.env"))
    finally:
        PACKAGES.pop()
    assert "hunter2" not in message


def test_an_environment_that_is_a_link_stays_one(root: Path, backend: Any, tmp_path: Path) -> None:
    """A link in the folder that leads to the environment can't be replaced. Where it leads outside, nothing is shown."""
    os.rename(root / ".venv", tmp_path / "elsewhere")
    (root / ".venv").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "secret").write_text("hunter2")
    results = run_in(
        root,
        backend,
        sh("rm .venv; ln -s ../private .venv"),
        ("delete_file", {"path": ".venv"}),
        sh(f"cat {tmp_path}/elsewhere/secret"),
    )
    assert [ok for ok, _ in results] == [False, False, False]
    assert "installation that runs Handrail" in results[0][1]
    assert "hunter2" not in str(results)
    assert os.readlink(root / ".venv") == str(tmp_path / "elsewhere")


def test_handrail_s_own_checkout_is_part_of_it(root: Path) -> None:
    """Where Handrail runs from a checkout in the folder, its package can't be changed. The rest of the checkout can."""
    package = Path(handrail.__file__).parent
    shutil.copytree(
        package, root / "src" / "handrail", ignore=shutil.ignore_patterns("__pycache__", "vendor")
    )
    results = run_in(
        root,
        "copy",
        ("write_file", {"path": "src/handrail/guard/evil.py", "text": ""}),
        ("write_file", {"path": "src/other.py", "text": ""}),
        ("move_file", {"source": "src", "target": "lib"}),
        python=os.path.relpath(sys.executable, root),
        libraries=[root / "src"],
    )
    assert [ok for ok, _ in results] == [False, True, False]


@pytest.mark.parametrize("where", [LIBRARY, f"{LIBRARY}/handrail"])
def test_a_root_in_the_environment_can_not_be_changed(root: Path, backend: str, where: str) -> None:
    """If a root lies in the environment's libraries, neither a tool nor a command changes anything in it."""
    steps = ("write_file", {"path": "x.py", "text": ""}), sh("echo x > x.py")
    python = os.path.relpath(root / ".venv" / "bin" / "python", root / where)
    assert [ok for ok, _ in run_in(root / where, backend, *steps, python=python)] == [False, False]
    assert not (root / where / "x.py").exists()


def test_without_a_sandbox_the_environment_in_the_copy_is_discarded(root: Path) -> None:
    """Without a sandbox, a command's changes to the environment in its copy of the folder are discarded, and the result says so."""
    start = START.replace("Allow(...)]", "Allow(...)], contained=False").replace(
        "async def main",
        'from handrail.resources.shell import Support, execution\nexecution.probe = lambda folder: Support("none", False)\n\nasync def main',
    )
    before = snapshot(root / ".venv")
    ((ok, message),) = run_in(
        root, "copy", sh(f"rm -r {LIBRARY}; echo x > .venv/new; echo new > plain.txt"), start=start
    )
    assert ok
    assert "Changes to the installation that runs Handrail are discarded: .venv." in message
    assert snapshot(root / ".venv") == before
    assert (root / "plain.txt").read_text() == "new\n"


def test_undo_does_not_change_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that was made while another installation ran Handrail can't be undone by the one that it changed."""
    with closing(DirectoryFilesystem(root, startup_files=["**"])) as files:
        fork = files.fork("call")
        fork.write(f"{LIBRARY}/handrail/clock.py", "after\n")
        fork.prepare()
        fork.stage(CallKey("call"))
        fork.apply()
        fork.applied()
    monkeypatch.setattr(disk, "installed_in", lambda root: (".venv",))
    with (
        closing(DirectoryFilesystem(root)) as files,
        pytest.raises(UndoRefused, match="installation that runs Handrail") as error,
    ):
        files.undo("call")
    assert error.value.places == (f"{LIBRARY}/handrail/clock.py",)
    assert (root / LIBRARY / "handrail" / "clock.py").read_text() == "after\n"


def test_nested_and_repeated_changes_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nested fork can't change it either, and a recorded change is not repeated."""
    with closing(DirectoryFilesystem(root)) as files:
        recorded = files.fork("before")
        recorded.write(f"{LIBRARY}/new.py", "")
        changes = recorded.file_changes()
        recorded.drop()
    monkeypatch.setattr(disk, "installed_in", lambda root: (".venv",))
    with closing(DirectoryFilesystem(root)) as files:
        outer = files.fork("outer")
        inner = outer.fork("inner")
        for change in (
            lambda: inner.write(f"{LIBRARY}/new.py", ""),
            lambda: inner.append(f"{LIBRARY}/handrail/clock.py", ""),
            lambda: inner.edit(f"{LIBRARY}/handrail/clock.py", "before", "after"),
            lambda: inner.mkdir(".venv/new/folder"),
            lambda: inner.redo(changes),
            lambda: files.write(f"{LIBRARY}/new.py", ""),
        ):
            with pytest.raises(PathRefused, match="installation that runs Handrail"):
                change()
        inner.drop()
        outer.drop()


BIND = """
import os, subprocess, sys
from handrail.resources import installation
os.makedirs(sys.argv[2])
subprocess.run(["mount", "--bind", sys.argv[1], sys.argv[2]], check=True)
print(installation.installed_in(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("mounted", "found"),
    [("", "('.venv',)"), (".venv", f"{('bin', 'lib', 'lib64', 'pyvenv.cfg')}"), (LIBRARY, "('',)")],
)
def test_a_folder_that_is_mounted_twice_counts(root: Path, tmp_path: Path, mounted: str, found: str) -> None:
    """The environment is recognised where it, a folder in it or the folder around it is mounted at a second place."""
    if not probe(tmp_path).contained:
        pytest.skip("mounts need a namespace")
    done = subprocess.run(
        [
            "unshare",
            "--map-root-user",
            "--mount",
            root / ".venv/bin/python",
            "-c",
            BIND,
            root / mounted,
            tmp_path / "second",
        ],
        env={"PYTHONPATH": os.pathsep.join(PACKAGES), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == (found, "")


# --- what a shell exposes ---------------------------------------------------------------------------


def shown(shell: Shell, root: Path, *argv: str) -> str:
    """Run a command on a folder, and return its output."""
    files = DirectoryFilesystem(root)
    with closing(files):
        fork = files.fork("call")
        try:
            return asyncio.run(shell.run(argv, fork.layers())).output
        finally:
            fork.drop()


def test_an_exposed_path_that_becomes_a_link_shows_nothing(root: Path, backend: Any, tmp_path: Path) -> None:
    """If a command replaces an exposed path in its folder by a link, the next command does not see what it leads to."""
    (root / "vendor").mkdir()
    (root / "vendor" / ".env").write_text("ours\n")
    shell = Shell([Allow(...)], backend=backend, expose=[root / "vendor"])
    read = ("sh", "-c", f"cat vendor/.env {tmp_path}/private/.env 2>&1")
    assert "ours" in shown(shell, root, *read)
    shutil.rmtree(root / "vendor")
    (root / "vendor").symlink_to(tmp_path / "private")
    assert "hunter2" not in shown(shell, root, *read)
    with pytest.raises(CommandRefused, match="leads through a link in the command's folder"):
        shown(Shell([Allow(...)], backend=backend, expose=[root / "vendor"]), root, *read)


def test_an_exposed_path_is_resolved_once(root: Path, backend: Any, tmp_path: Path) -> None:
    """An exposed path outside the folder that becomes a link later, or lies in a folder that does, shows nothing new."""
    for place in ("tools", "above/inner"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / ".env").write_text("ours\n")
    places = [tmp_path / "tools", tmp_path / "above" / "inner"]
    shell = Shell([Allow(...)], backend=backend, expose=places)
    read = ("sh", "-c", f"cat {places[0]}/.env {places[1]}/.env 2>&1")
    assert shown(shell, root, *read) == "ours\nours\n"
    for link, target in ((places[0], tmp_path / "private"), (tmp_path / "above", tmp_path / "other")):
        shutil.rmtree(link)
        link.symlink_to(target)
    (tmp_path / "other" / "inner").mkdir(parents=True)
    (tmp_path / "other" / "inner" / ".env").write_text("hunter2\n")
    assert "hunter2" not in shown(shell, root, *read)


def test_an_exposed_link_outside_the_folder_is_followed(root: Path, backend: Any, tmp_path: Path) -> None:
    """A link that lies outside the folder, where no command can change it, can be exposed."""
    (tmp_path / "link").symlink_to(tmp_path / "private")
    shell = Shell([Allow(...)], backend=backend, expose=[tmp_path / "link"])
    assert shown(shell, root, "cat", f"{tmp_path}/link/.env") == "hunter2\n"
