"""Pytest fixtures, and the collection of cases.

Put `pytest_plugins = ["handrail.testing.fixtures"]` in the `conftest.py` of the root folder to use all of it. Or import the fixtures
that you want: `from handrail.testing.fixtures import cassette`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handrail.errors import HandrailError
from handrail.imports import search
from handrail.runs.cases import SUFFIX, CaseResult, replay_case
from handrail.testing.cassette import Cassette


@pytest.fixture
def cassette(request: pytest.FixtureRequest) -> Iterator[Cassette]:
    """Record or replay what models say in this test, in `cassettes/MODULE/TEST.json` beside the test's file.

    Define a fixture `cassette_options` to pass arguments to its `Cassette`, such as `{"secrets": ["..."]}`.
    """
    try:
        options: dict[str, Any] = request.getfixturevalue("cassette_options")
    except pytest.FixtureLookupError:
        options = {}
    folder = request.path.parent / "cassettes" / request.path.stem
    name = re.sub(r"[^\w.-]+", "-", request.node.name).strip("-")
    with Cassette(folder / f"{name}.json", **options) as used:
        yield used


def _replay(path: Path, **arguments: Any) -> CaseResult:
    """Replay a case, and fail the test if it differs. The agent's module may be in the current folder."""
    search(Path.cwd())
    problem = ""
    try:
        result = asyncio.run(replay_case(path, **arguments))
        if not result.differences:
            return result
        problem = f"{path.name} differs from its record {result}"
    except HandrailError as error:
        problem = f"{path.name}: {error}"
    pytest.fail(problem, pytrace=False)  # outside of `except`, since pytest would show the error twice


@pytest.fixture
def case(request: pytest.FixtureRequest) -> CaseResult:
    """Replay the case that the test's marker names: `@pytest.mark.handrail_case("cases/refund.case.json")`.

    The path is relative to the test's file. The other arguments of the marker are those of `replay_case`. The test fails if the replay differs from
    the record; otherwise it gets the `CaseResult`.
    """
    marker = request.node.get_closest_marker("handrail_case")
    if marker is None or len(marker.args) != 1:
        pytest.fail(
            'Name the case of this test: @pytest.mark.handrail_case("cases/refund.case.json").', pytrace=False
        )
    return _replay(request.path.parent / marker.args[0], **marker.kwargs)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "handrail_case(path, **arguments): the case that the fixture `case` replays"
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect each file whose name ends in `.case.json` as a test that replays the case."""
    if not file_path.name.endswith(SUFFIX):
        return None
    return CaseCollector.from_parent(parent, path=file_path)  # pyright: ignore[reportUnknownMemberType]


class CaseCollector(pytest.File):
    """The file of a case, which is a single test."""

    def collect(self) -> Iterator[pytest.Item]:
        name = self.path.name.removesuffix(SUFFIX)
        yield CaseItem.from_parent(self, name=name)  # pyright: ignore[reportUnknownMemberType]


class CaseItem(pytest.Item):
    """The replay of a case."""

    def runtest(self) -> None:
        _replay(self.path)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name
