"""Workers are killed and frozen while they execute runs. No run is lost, and no effect that must happen once is repeated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleet import chaos
from support import PATIENCE, importing_support, postgres


@pytest.mark.once
async def test_a_worker_is_killed_while_it_executes_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One of two workers is killed once a run has begun.

    Afterwards every run ends once, and the journal is intact.
    """
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    some = chaos.Chaos(f"{postgres.new_url()}&lease=2", tmp_path, dispatcher="journal", workers=2, seed=1)
    try:
        await some.begin(4, PATIENCE)
        some.kill()
        await some.finish(PATIENCE)
        assert await some.check() == []
        assert (some.happened["done"], some.happened["failed"]) == (3, 1)
    finally:
        some.close()


@pytest.mark.skipif(not os.environ.get("HANDRAIL_DEEP"), reason="kills processes for up to a minute")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dispatcher", ["journal", "dbos", "procrastinate"])
def test_workers_are_killed_frozen_and_cut_off_and_the_database_is_restarted(dispatcher: str):
    command = [sys.executable, chaos.__file__, "--dispatcher", dispatcher, "--workers", "4", "--runs", "40"]
    ended = subprocess.run(
        [*command, "--seconds", "20", "--patience", "400"],
        capture_output=True,
        text=True,
        check=False,
        env=importing_support(),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
