"""What tests share: models, servers, tools and programs to try things with, and where the repository is."""

import os
from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent


def importing_support() -> dict[str, str]:
    """The environment of a Python process that imports this package, as the tests do."""
    path = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
