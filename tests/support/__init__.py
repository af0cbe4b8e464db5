"""Shared support for the tests: models, servers, tools, programs, and the path of the repository."""

import os
from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent

PATIENCE = 300.0
"""Seconds to wait for something that must happen. This is enough even on a busy machine."""


def importing_support() -> dict[str, str]:
    """Return this process's environment with a PYTHONPATH from which this package can be imported."""
    path = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
