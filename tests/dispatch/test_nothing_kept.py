"""Nothing is kept of a call that is over, except its facts in the session's log."""

from __future__ import annotations

import asyncio
import os

import pytest

from support.kept_objects import Ending, endings, measure

COUNT = 10_000 if os.environ.get("HANDRAIL_DEEP") else 25


@pytest.mark.parametrize("ending", endings(), ids=lambda ending: ending.name)
def test_calls_leave_only_their_facts(ending: Ending) -> None:
    """After many calls that end so, no object of ours is left but the facts, and nothing of a document of 100 kB."""
    kept = asyncio.run(measure(ending, COUNT))
    assert not kept.objects
    assert kept.kept_bytes < COUNT * 10_000
    assert not kept.after_session
    assert kept.after_session_bytes < 100_000 + COUNT * 100
