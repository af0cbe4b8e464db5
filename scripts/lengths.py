"""Note the files and functions in which a second noun may be hiding, because they are long.

    python scripts/lengths.py [FOLDER]      (FOLDER is src by default)

A note is a place to look at, not a finding: a file is a noun with its verbs, whatever its length.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_NOTE, FUNCTION_NOTE = 700, 80


def lengths(file: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (description, lines, note mark) for the file and each function in it."""
    text = file.read_text(encoding="utf-8")
    yield f"{file}:1: the file", len(text.splitlines()), FILE_NOTE
    for node in ast.walk(ast.parse(text, str(file))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield f"{file}:{node.lineno}: {node.name}", lines, FUNCTION_NOTE


def main(folder: Path) -> int:
    """Print every note under `folder`, and return the exit status."""
    if not folder.is_dir():
        print(f"{folder}: no such folder")
        return 2
    for file in sorted(folder.rglob("*.py")):
        for what, lines, mark in lengths(file):
            if lines > mark:
                print(f"{what} has {lines} lines (note: over {mark})")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "src")))
