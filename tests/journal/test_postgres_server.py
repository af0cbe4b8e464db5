"""The PostgreSQL server that the journal tests start: who runs it, and when it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import PATIENCE, postgres

pytestmark = pytest.mark.once  # PostgreSQL starts slowly

_USER = """
import sys
from support import postgres
print(postgres.server_folder(), flush=True)
sys.stdin.read()
"""


def _postmaster() -> int:
    return int((postgres.server_folder() / "data/postmaster.pid").read_text().split()[0])


def test_the_server_is_run_by_an_ordinary_user() -> None:
    assert os.stat(f"/proc/{_postmaster()}").st_uid != 0


def test_the_server_ends_with_the_tests_even_if_they_are_killed() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    user = subprocess.Popen(
        [sys.executable, "-c", _USER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with user:
        assert user.stdout is not None
        folder = Path(user.stdout.readline().strip())
        server = os.pidfd_open(int((folder / "data/postmaster.pid").read_text().split()[0]))
        supervisor = os.pidfd_open(int((folder / "ready").read_text()))
        try:
            user.send_signal(signal.SIGKILL)
            for process in (server, supervisor):
                assert select.select([process], [], [], PATIENCE)[0], "it still runs"
        finally:
            os.close(server)
            os.close(supervisor)
    assert not list(folder.parent.glob(f"{folder.name}*"))


def test_debians_newest_programs_are_used_and_else_those_from_npm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    debian, installed = tmp_path / "debian", tmp_path / "npm"
    monkeypatch.setattr(postgres, "_DEBIAN", debian)
    monkeypatch.setattr(postgres, "_INSTALLED", installed)
    find = postgres.programs.__wrapped__
    with pytest.raises(RuntimeError, match=r"apt install postgresql"):
        find()
    expected = [installed / "linux-x64/native/bin", debian / "9/bin", debian / "17/bin"]
    for each in expected:
        each.mkdir(parents=True)
        (each / "initdb").touch()
        assert find() == each


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    over = subprocess.Popen([sys.executable, "-c", ""])
    over.wait()
    with pytest.raises(RuntimeError, match="ProcessLookupError"):
        postgres._start(tmp_path / "server", over.pid)
    assert not list(tmp_path.iterdir())
