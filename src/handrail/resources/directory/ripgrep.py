"""Which files of a folder hold a text: asked of ripgrep where it is installed.

It only ever narrows down what has to be read: what is found in the files that are left is decided by the
same code as without it, so results do not depend on it. Nothing of what it prints but names is looked at.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

_PLAIN = re.compile(r"[^\\.^$*+?{}\[\]|()\x00-\x1f]+\Z")
"""Patterns that stand for themselves: whatever line fits one holds it as it is written."""
_AT_ONCE = 500
"""Files named to one run: their names have to fit into a command line."""
WORTH = 32
"""From so many files on it is quicker to ask."""


def plain_text(pattern: str) -> str | None:
    """The text that every fitting line holds; None where a pattern is more than text."""
    return pattern if _PLAIN.match(pattern) else None


def files_holding(root: Path, text: str, paths: Sequence[str]) -> set[str] | None:
    """Those of the files under the root that hold this text; None where nobody can be asked."""
    program = _ripgrep()
    if program is None:
        return None
    holding: set[str] = set()
    left = iter(paths)
    while some := list(islice(left, _AT_ONCE)):
        found = _holding(program, root, text, some)
        if found is None:
            return None
        holding |= found
    return holding


def _holding(program: str, root: Path, text: str, paths: list[str]) -> set[str] | None:
    told = ["--no-config", "--files-with-matches", "--fixed-strings", "--case-sensitive", "--text", "--null"]
    told += ["--encoding", "none", "--no-messages", "--threads", "2", "--regexp", text, "--"]
    names = [f"./{path}" for path in paths]
    try:
        ran = subprocess.run(
            [program, *told, *names], cwd=root, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except (OSError, UnicodeError):  # it is gone, or this is no text, or too much of it, for a command line
        return None
    if ran.returncode not in (0, 1):  # 2: something went wrong, so it is not to be relied on
        return None
    return {os.fsdecode(name).removeprefix("./") for name in ran.stdout.split(b"\0") if name}


@lru_cache(maxsize=1)
def _ripgrep() -> str | None:
    return shutil.which("rg")
