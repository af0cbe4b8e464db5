"""Roots that overlap: their claims could not see each other, so the second one is refused."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from handrail import DirectoryFilesystem, ToolContext, open_gate, tool
from handrail.errors import FileError
from handrail.resources.directory import area

USING = """
    import sys
    from handrail import DirectoryFilesystem

    files = DirectoryFilesystem(sys.argv[1])
    files.write("mine", "1")
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(("first", "second"), [("a", "a/b/c"), ("a/b/c", "a")])
def test_a_root_that_overlaps_with_one_in_use_is_refused(tmp_path: Path, first: str, second: str):
    """A root inside a root in use, or around one, is refused until that one is closed."""
    (tmp_path / "a/b/c").mkdir(parents=True)
    with DirectoryFilesystem(tmp_path / first) as one, DirectoryFilesystem(tmp_path / second) as two:
        one.write("x", "1")
        with pytest.raises(FileError, match="overlap") as refused:
            two.write("y", "1")
        assert str(tmp_path / first) in str(refused.value)
        one.close()
        two.write("y", "1")
        assert two.read("y") == "1"


@pytest.mark.once
def test_a_root_of_another_process_counts_until_the_process_dies(tmp_path: Path):
    """A root inside one that another process uses is refused, and accepted once that process was killed."""
    (tmp_path / "a/b").mkdir(parents=True)
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(USING), str(tmp_path / "a")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        with DirectoryFilesystem(tmp_path / "a/b") as files:
            with pytest.raises(FileError, match=f"the process {other.pid}"):
                files.write("y", "1")
            other.kill()
            other.communicate()
            files.write("y", "1")
    finally:
        other.kill()
        other.communicate()


def test_a_call_that_only_reads_is_refused_too(tmp_path: Path):
    """A call that reads below a root in use fails, because the commits of that root could not be told apart from its reads."""

    @tool(effect="read")
    async def look(context: ToolContext) -> str:
        """Look."""
        return context.filesystem.read("x")

    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/x").write_text("1")
    with DirectoryFilesystem(tmp_path / "a") as outer, DirectoryFilesystem(tmp_path / "a/b") as inner:
        outer.write("z", "1")
        result = open_gate([look], filesystem=inner).invoke("look").wait()
        assert not result.success
        assert "overlap" in result.message


def test_the_same_root_and_roots_beside_each_other_are_accepted(tmp_path: Path):
    """One root may be opened twice, and roots beside each other don't overlap, even if one's name begins with the other's."""
    (tmp_path / "a").mkdir()
    (tmp_path / "ab").mkdir()
    with (
        DirectoryFilesystem(tmp_path / "a") as one,
        DirectoryFilesystem(tmp_path / "a") as again,
        DirectoryFilesystem(tmp_path / "ab") as beside,
    ):
        for files in (one, again, beside):
            files.write("x", "1")
        assert again.read("x") == beside.read("x") == "1"


def test_a_network_filesystem_is_named_in_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """If other machines can change the folder too, one warning says so, and names the workspace."""
    monkeypatch.setattr(area, "network_type", lambda fd: "nfs4")
    with caplog.at_level(logging.WARNING, "handrail.files"), DirectoryFilesystem(tmp_path) as files:
        files.write("x", "1")
        files.write("x", "2")
    assert [("nfs4" in each.message, "Workspace" in each.message) for each in caplog.records] == [
        (True, True)
    ]
