"""Links below the root that lead out of it: no command and no tool writes through them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handrail import DirectoryFilesystem, Shell, ToolContext, open_gate, tool
from handrail.resources.shell import Support, probe
from handrail.resources.shell import execution as execution_module
from support.folders import Folder, Tree, anything, tree

WAYS = ["overlay", "copy", "without a sandbox"]


@pytest.fixture(params=WAYS)
def shell(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Return a shell for each way in which a command can see its folder.

    Skips the ways that are not available here.
    """
    if request.param == "without a sandbox":
        support = Support("none", False, ("namespaces of its own: no",))
        monkeypatch.setattr(execution_module, "probe", lambda folder: support)
        return anything(contained=False)
    support = probe(tmp_path)
    if not support.contained or (request.param == "overlay" and not support.overlay):
        pytest.skip(f"not available here: {'; '.join(support.missing)}")
    return anything(request.param)


class World:
    """A folder with links, and a home beside it that must stay as it is."""

    def __init__(self, base: Path) -> None:
        self.folder = Folder(base / "project")
        self.home = base / "home"
        (self.home / "bin").mkdir(parents=True)
        (self.home / ".bashrc").write_text("mine\n")
        (self.home / "bin" / "run").write_text("#!/bin/sh\necho ran\n")
        (self.home / "bin" / "run").chmod(0o755)
        self.folder.add("docs/one.md", "one\n")
        for name, target in self.links().items():
            link = self.folder.root / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
        self.before = self.look()

    def links(self) -> dict[str, str]:
        home, root = self.home, self.folder.root
        return {
            "file": f"{home}/.bashrc",
            "relative": "../../home/.bashrc",
            "folder": f"{home}",
            "missing": f"{home}/new",
            "first": "second",
            "second": "folder/.bashrc",
            "docs/up": "../../../home/.bashrc",
            "around": f"{root}/docs/../../../home/.bashrc",
            "loop": "loop",
        }

    def look(self) -> tuple[Tree, Tree]:
        return tree(self.home, exact=True), self.folder.real()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    assert made.look() == made.before


LEADING_TO_FILES = ["file", "relative", "missing", "first", "second", "docs/up", "around", "loop"]


@pytest.mark.parametrize("link", LEADING_TO_FILES)
@pytest.mark.parametrize(
    "script", ["echo x > {0}", "echo x >> {0}", "cp docs/one.md {0}", "chmod 600 {0}", "touch {0}"]
)
def test_no_command_writes_through_a_link_to_a_file(
    world: World, shell: Shell, link: str, script: str
) -> None:
    """Whatever a command writes through a link that leads out, neither the files outside nor the real folder change."""
    world.folder.sh(shell, script.format(link))
    assert world.look() == world.before


@pytest.mark.parametrize(
    "script",
    [
        "echo x > folder/.bashrc",
        "echo x > folder/new",
        "mkdir folder/made",
        "rm -f folder/.bashrc",
        "rm -rf folder/",
        "mv docs/one.md folder/one.md",
        "cd folder && echo x > .bashrc",
        "ln -s folder other; echo x > other/.bashrc",
        "mv folder moved; echo x > moved/.bashrc",
    ],
)
def test_no_command_writes_through_a_link_to_a_folder(world: World, shell: Shell, script: str) -> None:
    """Nothing in a folder outside is changed, created, deleted or moved through a link to it."""
    world.folder.sh(shell, script)
    assert world.look() == world.before


def test_a_link_that_leads_back_into_the_folder_leads_to_what_the_command_sees(
    world: World, shell: Shell
) -> None:
    """A write through an absolute link into the folder goes to the upper layer, and the link itself stays as it is."""
    link = world.folder.root / "absolute"
    link.symlink_to(world.folder.root / "docs" / "one.md")
    world.before = world.look()
    finished = world.folder.sh(shell, "echo two >> absolute; cat docs/one.md")
    assert finished.output == "one\ntwo\n"
    assert world.folder.caught() == [("folder", "docs"), ("written", "docs/one.md")]


def test_a_link_that_a_command_makes_to_its_folder_outlives_the_command(world: World, shell: Shell) -> None:
    """If a command makes or moves an absolute link into the folder, the link keeps its target after the command has ended."""
    root = os.path.realpath(world.folder.root)
    (world.folder.root / "absolute").symlink_to(f"{root}/docs/one.md")
    world.before = world.look()
    world.folder.sh(shell, 'ln -s "$PWD/docs" made; mv absolute moved')
    assert os.readlink(world.folder.upper / "made") == f"{root}/docs"
    assert os.readlink(world.folder.upper / "moved") == f"{root}/docs/one.md"


def test_links_that_a_command_leaves_alone_stay(world: World, shell: Shell) -> None:
    """Links that a command does not touch stay as they are, whether or not the command could see their targets."""
    finished = world.folder.sh(shell, "echo x > x")
    assert world.folder.caught() == [("written", "x")]
    assert set(world.links()) < set(world.folder.merged())
    if not finished.contained:
        assert finished.notes[-1] == "2 links lead out of the folder and are not in the copy."


def test_without_a_sandbox_a_program_outside_still_runs_through_its_link(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a sandbox, a command sees a copy of a program in place of a link to it, such as a virtual environment's python."""
    support = Support("none", False, ("namespaces of its own: no",))
    monkeypatch.setattr(execution_module, "probe", lambda folder: support)
    (world.folder.root / "run").symlink_to(world.home / "bin" / "run")
    world.before = world.look()
    finished = world.folder.sh(anything(contained=False), "./run; echo changed > run")
    assert finished.output == "ran\n"
    assert world.folder.caught() == [("written", "run")]
    assert not (world.folder.upper / "run").is_symlink()


@pytest.mark.parametrize("link", [*LEADING_TO_FILES, "folder/.bashrc", "folder/new"])
async def test_no_tool_writes_through_a_link(tmp_path: Path, link: str) -> None:
    """A tool that writes, appends to or edits a path that leads out fails, and nothing outside changes."""
    world = World(tmp_path)

    @tool(effect="staged")
    def write(way: str, context: ToolContext) -> str:
        """Write through the link."""
        files: Any = context.filesystem
        if way == "edit":
            files.edit(link, "mine", "theirs")
        else:
            getattr(files, way)(link, "theirs")
        return "written"

    with DirectoryFilesystem(world.folder.root) as files:
        gate = open_gate([write], filesystem=files)
        for way in ("write", "append", "edit"):
            assert not (await gate.invoke("write", {"way": way})).success
    assert world.look() == world.before


async def test_a_command_of_a_tool_writes_nothing_through_links(tmp_path: Path, shell: Shell) -> None:
    """If a call's command writes through links that lead out, nothing outside changes. What it writes in the folder is kept."""
    world = World(tmp_path)

    @tool(effect="irreversible", capabilities={"proc.exec"})
    async def run(context: ToolContext) -> str:
        """Write through every link, and to a file of the folder."""
        script = "for each in file relative folder/.bashrc missing first docs/up; do echo x > $each; done; echo x > own"
        return (await shell.run_on(context.filesystem, ["sh", "-c", script])).output

    home = tree(world.home, exact=True)
    with DirectoryFilesystem(world.folder.root) as files:
        result = await open_gate([run], filesystem=files).invoke("run")
    assert result.success, result.message
    assert (world.folder.root / "own").read_text() == "x\n"
    assert tree(world.home, exact=True) == home
