"""Which tests a worker of xdist is given together, and which are begun first.

A file goes to one worker as a whole, so what its tests share is made once. The files that take longest are begun
first: the rest then fills both workers to the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from xdist.scheduler import LoadScopeScheduling  # pyright: ignore[reportMissingTypeStubs]  # it has none

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
    "tests/adapter/test_ticket_redeeming.py",
    "tests/resources/directory",
    "tests/resources/shell",
    "tests/serve",
)
"""Files and folders, about in the order of the seconds they take."""

TOGETHER = ("tests/serve/page",)
"""Folders that are one piece of work: their tests share a browser."""

APART = ("tests/testing/test_simulation.py",)
"""Files of which each test is a piece of work, since one takes as long as other files do."""


class Schedule(LoadScopeScheduling):
    """Gives each worker a file at a time, in the order of `arranged`."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file in APART:
            return nodeid
        return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def arranged(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests, those of the longest files first."""

    def place(item: pytest.Item) -> int:
        found = (at for at, path in enumerate(LONGEST) if item.nodeid.startswith(path))
        return next(found, len(LONGEST))

    return sorted(items, key=place)
