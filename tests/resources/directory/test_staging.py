"""The staging folder: nothing planted in it is applied, a replaced root is noticed, and mount points work."""

import logging
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from handrail import DirectoryFilesystem
from handrail.errors import FileError, UndoRefused
from handrail.journal.records import CallKey
from handrail.resources.directory.area import MANIFEST, read_manifest
from handrail.resources.directory.commit import Manifest, Step
from support import TESTS
from support.filesystems import fill


@pytest.mark.parametrize("kind", ["replaced", "moved"])
def test_a_folder_that_is_replaced_while_it_is_open_is_noticed(tmp_path: Path, kind: str):
    """If the open folder is moved or replaced, reads still see the original, and commits, commands and undo are refused."""
    root = tmp_path / "root"
    fill(root, {"a": "old"})
    files = DirectoryFilesystem(root)
    fork = files.fork("call")
    fork.write("a", "new")
    root.rename(tmp_path / "away")
    if kind == "replaced":
        fill(root, {"a": "different"})
    assert files.read("a") == "old"
    fork.prepare()
    moved = "was moved or replaced while it was open, so nothing was changed. Open the folder again"
    with pytest.raises(FileError, match=moved):
        fork.apply()
    with pytest.raises(FileError, match=moved):
        files.fork("call").layers()
    with pytest.raises(FileError, match=moved):
        files.undo("call")
    fork = files.fork("call")
    assert (tmp_path / "away" / "a").read_text() == "old"
    if kind == "replaced":
        assert (root / "a").read_text() == "different"
        shutil.rmtree(root)
    (tmp_path / "away").rename(root)
    files.write("a", "new")
    assert (root / "a").read_text() == "new"
    files.close()


def test_a_folder_that_is_replaced_while_a_command_runs_is_noticed(tmp_path: Path):
    """If the open folder is replaced while a command runs, the command's changes are refused."""
    root = tmp_path / "root"
    fill(root, {"a": "old"})
    with DirectoryFilesystem(root) as files:
        fork = files.fork("call")
        layers = fork.layers()
        (layers.upper / "b").write_text("by a command")
        root.rename(tmp_path / "away")
        fill(root, {"a": "different"})
        with pytest.raises(FileError, match="was moved or replaced"):
            fork.absorb(layers.mounted_at)
        fork.drop()


# --- planted manifests ------------------------------------------------------------------------------------


def leave_commit(files: DirectoryFilesystem) -> Path:
    """Leave a staged commit as if its process had died. Returns the commit's folder."""
    fork = files.fork("call")
    fork.write("a", "new")
    fork.write("b", "new")
    fork.prepare()
    assert fork.stage(CallKey("c")) is not None
    (commit,) = (files.staging / "at-work").glob("*/commit*")
    aside = files.staging / "at-work" / "dead"
    aside.mkdir()
    return commit.rename(aside / commit.name)


def test_a_short_secret_signs_no_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """A secret that could be guessed is not used, and a warning says so. Commits are then signed with a key of this process."""
    monkeypatch.setenv("HANDRAIL_KEY", "guessed")
    root = tmp_path / "root"
    fill(root, {"a": "old"})
    with DirectoryFilesystem(root) as files:
        commit = leave_commit(files)
        assert read_manifest(commit) is not None
        monkeypatch.delenv("HANDRAIL_KEY")
        assert read_manifest(commit) is None
        commit.rename(commit.with_name("gone"))
    assert "the key in HANDRAIL_KEY has 7 bytes, so it could be guessed" in caplog.text


@pytest.mark.parametrize("how", ["unsigned", "altered", "signed with a different key", "genuine"])
def test_a_planted_manifest_is_never_carried_out(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Only a commit whose manifest this user's Handrail signed is applied. Any other is reported and left where it is."""
    root = tmp_path / "root"
    fill(root, {"a": "old"})
    files = DirectoryFilesystem(root)
    if how == "signed with a different key":
        monkeypatch.setenv("HANDRAIL_KEY", "a stolen secret, long enough")
    commit = leave_commit(files)
    monkeypatch.delenv("HANDRAIL_KEY", raising=False)
    manifest = commit / MANIFEST
    found = read_manifest(commit)
    os.rename(commit / "1", root / "done")  # one step looks applied, so recovery applies the others
    if how == "unsigned":
        steps = (Step(do="put", path="a", slot="1", after="x"),)
        manifest.write_bytes(
            msgspec.msgpack.encode(Manifest(call_id="c", root="", staging="", folder="", steps=steps))
        )
    elif how == "altered":
        assert found is not None
        mac, body = msgspec.msgpack.decode(manifest.read_bytes())
        other = msgspec.structs.replace(found, call_id="other")
        assert msgspec.msgpack.encode(other) != body
        manifest.write_bytes(msgspec.msgpack.encode((mac, msgspec.msgpack.encode(other))))
    files.close()
    before = {path.name: path.read_text() for path in root.iterdir()}
    with caplog.at_level(logging.WARNING), DirectoryFilesystem(root) as files:
        files.write("mine", "1")
    now = {path.name: path.read_text() for path in root.iterdir() if path.name != "mine"}
    if how == "genuine":
        assert now == {**before, "b": "new"}
        assert not commit.exists()
    else:
        assert now == before
        assert f"the commit in {commit} was not signed by this user's Handrail" in caplog.text
        assert manifest.exists()


def test_a_planted_history_is_not_undone(tmp_path: Path):
    """A call can't be undone if the manifest of its commit has no valid signature."""
    root = tmp_path / "root"
    fill(root, {"a": "old"})
    with DirectoryFilesystem(root) as files:
        files.write("a", "new")
        (kept,) = (files.staging / "done").iterdir()
        found = read_manifest(kept)
        assert found is not None
        (kept / MANIFEST).write_bytes(msgspec.msgpack.encode((b"", msgspec.msgpack.encode(found))))
    with DirectoryFilesystem(root) as files, pytest.raises(UndoRefused):
        files.undo("direct (0)")
    assert (root / "a").read_text() == "new"


# --- mount points -----------------------------------------------------------------------------------------

ON_A_MOUNT = """
    import asyncio, os, subprocess, sys
    from pathlib import Path
    from handrail import DirectoryFilesystem, SqliteJournal, Shell
    from handrail.resources.shell import Allow
    from resources.directory.crashing import FILES, attempt
    from support.filesystems import fill

    base, kind = Path(sys.argv[1]), sys.argv[2]
    root, elsewhere = base / "root", base / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    mount = lambda *words: subprocess.run(["mount", *words], check=True)
    if kind == "tmpfs":
        mount("-t", "tmpfs", "none", root)
    else:
        (base / "volume").mkdir()
        mount("--bind", base / "volume", root)
    fill(root, FILES)

    def seen():
        paths = [path for path in root.rglob("*") if path.is_file() and ".staging.handrail" not in path.parts]
        return {str(path.relative_to(root)): path.read_text() for path in paths}

    async def run(argv):
        with DirectoryFilesystem(root) as files:
            fork = files.fork("command")
            shell = Shell([Allow(...)])
            result = await shell.run_on(fork, argv)
            fork.prepare()
            fork.apply()
            return result

    with DirectoryFilesystem(root) as files:
        files.write("a.txt", "written")
        assert files.staging == root / ".staging.handrail", files.staging
        assert (root / "a.txt").read_text() == "written"
        assert not any("handrail" in info.path for info in files.list())
    files = DirectoryFilesystem(root)
    assert files.undo("direct (0)") == ("a.txt",)
    files.close()
    result = asyncio.run(run(["sh", "-c", "ls -A; rm -rf .staging.handrail; echo x > by-a-command"]))
    assert result.ok, result
    assert "handrail" not in result.output, result.output
    assert result.backend == "copy", result
    assert any("because changes are staged in the folder itself" in note for note in result.notes), result.notes
    assert (root / "by-a-command").read_text() == "x\\n"
    assert (root / ".staging.handrail" / "identity").exists()

    def crash(at):
        child = os.fork()
        if child == 0:
            try:
                attempt({"base": str(base), "at": at, "seed": 5, "edited": "", "durability": "process"})
            except BaseException as error:
                print(repr(error))
            os._exit(0)
        os.waitpid(child, 0)

    async def recover(at):
        journal = SqliteJournal(base / "journal.db")
        files = DirectoryFilesystem(at)
        try:
            recovered = await files.recover(journal)
            return recovered, await journal.calls.load("run"), await journal.calls.unapplied()
        finally:
            files.close()
            journal.close()

    outcomes = set()
    for point in (20, 40, 60, 70, 80):
        for path in base.glob("journal.db*"):
            path.unlink()
        subprocess.run(["find", root, "-mindepth", "1", "-delete"], check=True)
        fill(root, FILES)
        before = seen()
        crash(point)
        mount("--bind", root, elsewhere)  # not --move, which an ordinary user's namespace may refuse
        subprocess.run(["umount", root], check=True)
        recovered, units, unapplied = asyncio.run(recover(root))  # the disk is no longer mounted there
        assert len(unapplied) == len(recovered.unapplied), recovered
        assert list(root.iterdir()) == []
        waited = len(unapplied)
        recovered, units, unapplied = asyncio.run(recover(elsewhere))
        assert not unapplied, recovered
        mount("--bind", elsewhere, root)
        subprocess.run(["umount", elsewhere], check=True)
        now = seen()
        if not units:
            assert now == before, point
        else:
            assert now != before and now["a.txt"] == "a after\\n", point
        outcomes.add((bool(units), waited))
    assert (True, 1) in outcomes and (False, 0) in outcomes, outcomes
    print("all held")
"""


@pytest.mark.once
@pytest.mark.parametrize("kind", ["tmpfs", "bind"])
def test_a_folder_that_is_a_mount_point_works(tmp_path: Path, kind: str):
    """In a folder that is a mount point, writes, undo and commands work. Recovery works after the disk is mounted elsewhere."""
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-r", "-m"]
    if subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(ON_A_MOUNT))
    base = tmp_path / "base"
    base.mkdir()
    ran = subprocess.run(
        [*unshare, sys.executable, script, base, kind],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
    )
    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["all held"]), ran.stdout + ran.stderr
