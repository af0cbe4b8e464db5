"""Workers are killed and frozen while they execute runs. Nothing is lost, and nothing is done twice that must not be."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import PATIENCE, chaos, importing_support, postgres

pytestmark = pytest.mark.skipif(
    not os.environ.get("HANDRAIL_DEEP"), reason="starts and kills processes for up to a minute"
)


async def test_a_worker_is_killed_while_it_executes_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One of two workers is killed while both execute runs, and is replaced. All checks hold.

    Three runs finish, and the one with too small a budget fails.
    """
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    some = chaos.Chaos(f"{postgres.new_url()}&lease=2", tmp_path, dispatcher="journal", workers=2, seed=1)
    try:
        await some.run(4, 0.5, itertools.repeat(some.kill), PATIENCE)
        assert await some.check() == []
        assert (some.happened["kill -9"], some.happened["done"], some.happened["failed"]) == (1, 3, 1)
    finally:
        some.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dispatcher", ["journal", "dbos", "procrastinate"])
def test_workers_are_killed_and_frozen_and_the_database_is_restarted(dispatcher: str):
    command = [sys.executable, chaos.__file__, "--dispatcher", dispatcher, "--workers", "4", "--runs", "40"]
    ended = subprocess.run(
        [*command, "--seconds", "20", "--patience", "400"],
        capture_output=True,
        text=True,
        check=False,
        env=importing_support(),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
