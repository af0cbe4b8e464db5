"""Which files contain a text, according to ripgrep, if it is installed.

It only narrows down what must be read. Matches are always found by our own code, so results do not
depend on it. Only file names are taken from its output.
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
"""Patterns without special characters: every matching line contains the pattern literally."""
_AT_ONCE = 500
"""Files per ripgrep process, so that their names fit on a command line."""
WORTH = 32
"""From this many files on, ripgrep is faster."""


def plain_text(pattern: str) -> str | None:
    """Return the text that every matching line contains; None if the pattern is not plain text."""
    return pattern if _PLAIN.match(pattern) else None


def files_holding(root: Path, text: str, paths: Sequence[str]) -> set[str] | None:
    """Return the files under the root that contain this text; None if ripgrep is not available."""
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
    except (OSError, UnicodeError):  # ripgrep was removed, or the text can't be passed on a command line
        return None
    if ran.returncode not in (0, 1):  # 2: something failed, so the output is not reliable
        return None
    return {os.fsdecode(name).removeprefix("./") for name in ran.stdout.split(b"\0") if name}


@lru_cache(maxsize=1)
def _ripgrep() -> str | None:
    return shutil.which("rg")
