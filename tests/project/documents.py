"""Find the Python examples in Markdown files, and run them as a reader would.

In the README each block runs in its own namespace and folder. On a page of `docs/`, all blocks share one namespace and
one folder. These marks, each on the line directly before a fence, have an effect:

- `<!-- continues -->` before a python fence in the README continues the previous python block.
- `<!-- anew -->` before a python fence on a page starts again with an empty namespace and folder.
- `<!-- runs on NAME -->` before a python fence says that the code needs another library. It runs where that library is
  installed.
- `<!-- prints -->` before a text fence says that the python block before it prints exactly this text.
"""

import contextlib
import io
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from support import ROOT

DOCS = ROOT / "docs"
FENCE = re.compile(r"(?P<indent> *)(?P<ticks>`{3,})\s*(?P<language>[\w+-]*)[^`]*")
CONTINUES, ANEW, PRINTS = "<!-- continues -->", "<!-- anew -->", "<!-- prints -->"
ELSEWHERE = re.compile(r"<!-- runs on (?P<library>\w+) -->")


@dataclass
class Block:
    """A python block, with the line of the document on which its code begins."""

    line: int
    code: str
    continues: bool
    prints: str | None = None
    library: str | None = None
    """Another library that the block needs, or None if it needs none."""


class BadDocument(ValueError):
    """Raised when a document has a mark in the wrong place, or a fence that is not closed."""


def is_story(document: Path) -> bool:
    """Return whether the blocks of this document share one namespace."""
    return document.is_relative_to(DOCS)


def extract(document: Path, story: bool | None = None) -> list[Block]:
    """Return the python blocks of a document, in order. Raises `BadDocument` if a mark or a fence is wrong."""
    story = is_story(document) if story is None else story
    lines = document.read_text(encoding="utf-8").splitlines()
    blocks: list[Block] = []
    position = 0
    while position < len(lines):
        opening = FENCE.fullmatch(lines[position])
        mark = lines[position - 1].strip() if position else ""
        elsewhere = ELSEWHERE.fullmatch(mark)
        language = opening["language"] if opening else ""
        here = f"{document}:{position + 1}"
        position += 1
        if (mark in (CONTINUES, ANEW) or elsewhere) and language != "python":
            raise BadDocument(f"{here}: a python fence must follow {mark} directly")
        if mark == (CONTINUES if story else ANEW):
            raise BadDocument(f"{here}: {mark} has no effect here; remove it")
        if mark == PRINTS and language != "text":
            raise BadDocument(f"{here}: a text fence must follow {PRINTS} directly")
        if not opening:
            continue
        line = position + 1
        content = ""
        while position < len(lines) and not re.fullmatch(rf" *{opening['ticks']}`*\s*", lines[position]):
            content += lines[position].removeprefix(opening["indent"]) + "\n"
            position += 1
        if position == len(lines):
            raise BadDocument(f"{here}: this fence is never closed")
        position += 1
        if mark in (CONTINUES, PRINTS) and not blocks:
            raise BadDocument(f"{here}: there is no python block before this")
        if language == "python":
            continues = mark != ANEW if story else mark == CONTINUES
            library = elsewhere["library"] if elsewhere else None
            blocks.append(Block(line, content, continues, library=library))
        elif mark == PRINTS:
            blocks[-1].prints = content
    return blocks


def chains(document: Path, library: str | None = None) -> list[list[Block]]:
    """Return the blocks whose `library` is the given one, in groups that each run in one namespace."""
    groups: list[list[Block]] = []
    for block in extract(document):
        if block.library != library:
            continue
        if block.continues and groups:
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def run(document: Path, blocks: list[Block], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Run the blocks in order as a reader would, as `__main__` and in `folder`.

    Fails the test if a block raises, or does not print what the document shows.
    """
    patch.chdir(folder)
    module = ModuleType("__main__")
    patch.setitem(sys.modules, "__main__", module)
    for block in blocks:
        printed = io.StringIO()
        try:
            # Leading empty lines give the traceback the document's line numbers.
            code = compile("\n" * (block.line - 1) + block.code, str(document), "exec", dont_inherit=True)
            with contextlib.redirect_stdout(printed):
                exec(code, module.__dict__)
        except (Exception, SystemExit) as error:
            line = failing_line(error, document) or block.line
            trace = "".join(traceback.format_exception(error))
            pytest.fail(f"{document}:{line}: the example raised {error!r}\n\n{trace}", pytrace=False)
        compare(document, block, printed.getvalue())


def compare(document: Path, block: Block, printed: str) -> None:
    """Fail if a block does not print what the document shows."""
    if block.prints is not None and printed != block.prints:
        pytest.fail(
            f"{document}:{block.line}: the example printed\n\n{printed}\n"
            f"but the document says it prints\n\n{block.prints}",
            pytrace=False,
        )


def failing_line(error: BaseException, document: Path) -> int | None:
    """Return the document's innermost line in the error's traceback, or None if the document is not in it."""
    if isinstance(error, SyntaxError) and error.filename == str(document):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == str(document)), None)


def documents() -> list[Path]:
    """Return the README and every page of the docs."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
