"""`handrail new`: a folder of workers that runs at once."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from handrail.cli.codes import DONE, FAILED, USAGE
from handrail.cli.ending import complain

STARTER = Path(__file__).with_name("starter")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_. -]{0,63}")


def new(name: str) -> int:
    """Make the folder, or say why not; the exit code. Nothing that is there is touched."""
    folder = Path(name)
    if not _NAME.fullmatch(folder.name) or folder.name.endswith((" ", ".")):
        complain(
            f"{name!r} is no name for a folder of workers. Use letters, digits, - and _, as in: handrail new demo"
        )
        return USAGE
    if not os.path.isdir(folder.parent):  # which takes a name that is too long for one that is not there
        complain(f"there is no folder {folder.parent}. Make it first, or name another place.")
        return USAGE
    if os.path.lexists(folder):
        complain(f"{folder} is there already, and is left as it is. Choose another name, or move it away.")
        return USAGE
    try:
        shutil.copytree(STARTER, folder)
        (folder / "tools.py.txt").rename(
            folder / "tools.py"
        )  # no module of ours while it lies in the package
    except OSError as error:
        complain(f"{folder} could not be made: {error.strerror or error}.")
        return FAILED
    sys.stdout.write(
        f"Made {folder} with two workers, their tools and a file of notes. Try:\n"
        f'  handrail run {folder}/main.md "buy bread"\n'
        f"  handrail chat {folder}/main.md\n"
    )
    return DONE
