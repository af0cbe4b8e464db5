"""The soak finds what it looks for: what a process that leaks holds on to, and a run that did not end as it should."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from fleet import soak, soak_app, soak_laws
from fleet.chaos_laws import Ledger
from fleet.soak_laws import Figures, grown
from handrail import Adapter, MemoryFilesystem, Prompt, ScriptedModel, SqliteJournal, ToolCall
from support import importing_support

MOUNT = """
libc = ctypes.CDLL(None)
libc.unshare(0x20000 | (0x10000000 if os.geteuid() else 0))
libc.mount(None, b"/", None, 0x44000, None)  # private, so that nobody else sees the mount
if libc.mount(b"none", os.environb[b"TMPDIR"], b"tmpfs", 0, None):
    sys.exit()
"""
LEAKS = {
    "memory": "kept.append(bytearray(b'x' * (60 << 20)))",
    "descriptors": "kept.extend(os.open('/dev/null', os.O_RDONLY) for _ in range(20))",
    "threads": "[threading.Thread(target=sys.stdin.read, daemon=True).start() for _ in range(9)]",
    "children": "kept.append(subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE))",
    "files": "kept.append(tempfile.mkstemp())",
    "mounts": MOUNT,
}
"""What a process may do that makes one of its figures grow."""


@pytest.mark.once
@pytest.mark.parametrize("what", LEAKS)
def test_a_process_that_leaks_is_found(tmp_path: Path, what: str) -> None:
    """The only figure that is reported as grown is the one that leaks. Without a leak, none is."""
    code = f"import ctypes, os, subprocess, sys, tempfile, threading\nkept = []\nprint()\ninput()\n{LEAKS[what]}\nprint()\ninput()"
    command = [sys.executable, "-uc", code]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as process:  # pyright: ignore[reportArgumentType, reportCallIssue]  # plain options
        try:
            assert process.stdin
            assert process.stdout
            process.stdout.readline()
            start = Figures.of(process.pid, tmp_path, [tmp_path])
            assert list(grown("it", start, Figures.of(process.pid, tmp_path, [tmp_path]))) == []
            process.stdin.write(b"\n")
            process.stdin.flush()
            if not process.stdout.readline():
                pytest.skip("nothing can be mounted here")
            broken = list(grown("it", start, Figures.of(process.pid, tmp_path, [tmp_path])))
        finally:
            process.kill()
    assert [each.what.split()[1] for each in broken] == [what]


async def found(journal: SqliteJournal, ledger: Path, text: str, kept: Sequence[str] = ()) -> list[str]:
    """Check the only run of a journal as that of a person who said `text`, and return the laws that it violates."""
    turns, counts = {"r": text}, dict[str, int]()
    checked = soak_laws.check_turns(journal, turns, Ledger(ledger), kept, counts.__setitem__)
    return [each.law async for each in checked]


async def test_a_run_that_ended_otherwise_is_found(tmp_path: Path) -> None:
    """Violations are found in how a run ended, in the files it changed, and in the ledger of its effects."""
    ledger, journal = tmp_path / "ledger", SqliteJournal(tmp_path / "runs.db")
    model = ScriptedModel([ToolCall("keep", {"order": "5"}), "kept"])
    adapter = Adapter(model, filesystem=MemoryFilesystem(), journal=journal)
    await adapter.evaluate(Prompt("p", "Do.", tools=[soak_app.keep]), "keep 5", run_id="r")
    assert await found(journal, ledger, "keep 5", ["5", "6"]) == []
    assert await found(journal, ledger, "keep 5", ["6"]) == ["files right"]
    assert await found(journal, ledger, "keep 5", ["5", "5"]) == ["files right"]
    assert await found(journal, ledger, "rest 5") == ["every run finished"]
    assert await found(journal, ledger, "spend 5") == ["effects settled at most once"]
    ledger.write_text("end spend 5 key\n")
    assert await found(journal, ledger, "spend 5") == []
    journal.close()


@pytest.mark.skipif(not os.environ.get("HANDRAIL_DEEP"), reason="soaks for several minutes")
@pytest.mark.timeout(1500)
def test_a_short_soak() -> None:
    """Nothing grows and every law is kept while all faults follow one after the other for 45 seconds."""
    command = [sys.executable, soak.__file__, "--seconds", "45"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=importing_support())
    assert ended.returncode == 0, ended.stdout + ended.stderr
