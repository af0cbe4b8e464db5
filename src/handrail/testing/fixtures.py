"""Pytest fixtures. Import the ones you want in `conftest.py`: `from handrail.testing.fixtures import cassette`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

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
