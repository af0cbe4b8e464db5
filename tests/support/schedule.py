"""The schedule for xdist: when the workers collect, which tests run on the same worker, and which run first.

All tests of a file run on one worker, so that the file's fixtures are made only once (but see `APART`). The slowest
files start first, so that the workers finish at about the same time.
"""

from __future__ import annotations

import fcntl
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling  # pyright: ignore[reportMissingTypeStubs]  # xdist has no stubs

LONGEST = (
    "tests/project/test_inbox.py",
    "tests/models/test_contract.py",
    "tests/serve/page",
    "tests/testing/test_simulation.py",
    "tests/project/test_examples.py",
    "tests/cli/test_cli.py",
    "tests/models/test_local.py",
    "tests/project/test_types.py",
    "tests/project/test_docs.py",
    "tests/project/test_bench_peers.py",
    "tests/project/test_project.py",
    "tests/project/test_readme.py",
    "tests/models/test_live.py",
    "tests/serve/agui",
    "tests/serve/test_http.py",
    "tests/cli/test_screens.py",
    "tests/run/test_ticket_redemption.py",
    "tests/resources/directory",
    "tests/resources/shell",
    "tests/serve",
)
"""The slowest files and folders, roughly in descending order of duration."""

TOGETHER = ("tests/serve/page",)
"""Folders whose tests all run on one worker, since they share a browser."""

APART = ("tests/testing/test_simulation.py",)
"""Files whose tests are scheduled one by one, since some of these tests take as long as most whole files."""


@contextmanager
def collecting(config: pytest.Config) -> Generator[None]:
    """Let one worker collect before the others do. Outside an xdist worker, do nothing.

    The first worker writes the bytecode of the test files. Workers that collect a new clone at the same time would each
    compile every file.
    """
    if not hasattr(config, "workerinput"):
        yield
        return
    shared = Path(config.option.basetemp).parent  # xdist puts the workers' temporary folders into one folder
    with (shared / "collecting").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        collected = shared / "collected"
        if collected.exists():
            fcntl.flock(lock, fcntl.LOCK_UN)
        yield
        collected.touch()


class Schedule(LoadScopeScheduling):
    """Gives each worker one file, one folder of `TOGETHER` or one test of a file in `APART` at a time, in the order of `arranged`."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file in APART:
            return nodeid
        return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def arranged(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests in the order of `LONGEST`, followed by all others."""

    def place(item: pytest.Item) -> int:
        found = (at for at, path in enumerate(LONGEST) if item.nodeid.startswith(path))
        return next(found, len(LONGEST))

    return sorted(items, key=place)
