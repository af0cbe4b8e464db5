"""Report files and functions that have grown too long.

    python scripts/lengths.py [FOLDER]      (FOLDER is src by default)

Anything over the limit is a finding, which makes the exit status 1. Anything over the lower mark is a note.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_NOTE, FILE_LIMIT = 400, 500
FUNCTION_NOTE, FUNCTION_LIMIT = 60, 80
# errors.py contains all exception classes that cross layers, so that people find them in one place.
OWN_LIMITS = {"errors.py": 800}


def lengths(file: Path) -> Iterator[tuple[str, int, int, int]]:
    """Yield (description, lines, note mark, limit) for the file and each function in it."""
    text = file.read_text(encoding="utf-8")
    yield f"{file}:1: the file", len(text.splitlines()), FILE_NOTE, OWN_LIMITS.get(file.name, FILE_LIMIT)
    for node in ast.walk(ast.parse(text, str(file))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield f"{file}:{node.lineno}: {node.name}", lines, FUNCTION_NOTE, FUNCTION_LIMIT


def main(folder: Path) -> int:
    """Print every finding and note under `folder`, and return the exit status."""
    if not folder.is_dir():
        print(f"{folder}: no such folder")
        return 2
    findings = 0
    for file in sorted(folder.rglob("*.py")):
        for what, lines, mark, limit in lengths(file):
            if lines > limit:
                findings += 1
                print(f"{what} has {lines} lines, over {limit}; split it")
            elif lines > mark:
                print(f"{what} has {lines} lines (note: over {mark})")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "src")))
