"""Shared support for the tests: models, servers, tools, programs, and the path of the repository."""

import os
from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent

PATIENCE = 300.0
"""Seconds to wait for something that must happen. It is enough for a busy machine."""


def importing_support() -> dict[str, str]:
    """Return environment variables that let a Python process import this package, as the tests do."""
    path = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
