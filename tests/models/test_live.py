"""Tests of the live tests (`make test-live`), run on the embedded model behind a real server instead of a provider."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from support import ROOT
from support.servers import Embedded

pytestmark = pytest.mark.once

UNABLE = "not test_what_is_refused and not (test_structured_output and (anthropic or responses))"
"""Deselects the cases that the embedded model's server can't play.

It answers for any model name, and constrains output to a schema on one wire only.
"""
SLOW = "not test_a_call and not test_structured_output"
"""Deselects the cases that take seconds on the embedded model. test_contract.py covers those."""
DEEP = bool(os.environ.get("HANDRAIL_DEEP"))


def live(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not re.search("KEY|HANDRAIL|PYTEST", name)}
    return subprocess.run(
        [sys.executable, "tests/live_providers.py", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=kept | variables,
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_every_case_runs_on_a_server(embedded_server: Embedded):
    """The selected live cases pass on both OpenAI wires and on Anthropic's. The embedded model's server stands in for the providers."""
    done = live(
        *("-k", UNABLE if DEEP else f"{UNABLE} and {SLOW}"),
        HANDRAIL_LIVE="openai:smollm2 anthropic:smollm2",
        HANDRAIL_LIVE_AT=embedded_server.url,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert f"{16 if DEEP else 9} passed" in done.stdout


def test_without_a_key_it_fails_and_says_which():
    """Without a key, the live tests fail and name the variables to set, instead of skipping silently."""
    done = live()
    assert done.returncode == 1
    assert done.stderr.startswith("No provider to try: set one of OPENAI_API_KEY")
