"""Text that comes in pieces, as lines that fit the screen. A line that was given out never changes."""

from __future__ import annotations

import re

from rich.cells import cell_len
from rich.text import Text

from handrail.environment.text import escape

_INLINE = re.compile(r"(?P<code>`[^`]+`)|(?P<bold>\*\*[^*]+\*\*)")


class TextFlow:
    """Breaks streamed text into lines of at most `width` cells, at spaces where there are some.

    `tail` is the line still being written. Nothing jumps: what was shown as part of a line stays there,
    but for the word at its end, which moves down when it does not fit.
    """

    def __init__(self, width: int) -> None:
        self.width = max(width, 10)
        self.tail = ""
        self._return = False

    def feed(self, piece: str) -> list[str]:
        """Take another piece; the lines that are full now."""
        if self._return:
            piece, self._return = f"\r{piece}", False
        if piece.endswith("\r"):  # it may be half of a line's end
            piece, self._return = piece[:-1], True
        *whole, last = f"{self.tail}{escape(piece)}".expandtabs(4).split("\n")
        lines = [part for line in whole for part in self._wrapped(line)]
        *full, self.tail = self._wrapped(last)
        return lines + full

    def end(self) -> list[str]:
        """The line still being written, if there is any: the text ends here."""
        left, self.tail, self._return = self.tail, "", False
        return [left] if left else []

    def _wrapped(self, line: str) -> list[str]:
        lines: list[str] = []
        while cell_len(line) > self.width:
            fits = _prefix(line, self.width)
            space = fits.rfind(" ") if len(fits) < len(line) and line[len(fits)] != " " else len(fits)
            at = space if space > 0 and fits[:space].strip() else len(fits)
            lines.append(line[:at].rstrip())
            line = line[at:].lstrip(" ")
        return [*lines, line]


def _prefix(text: str, width: int) -> str:
    """As much of the text as fits into so many cells."""
    used = 0
    for at, character in enumerate(text):
        used += cell_len(character)
        if used > width:
            return text[: max(at, 1)]
    return text


class Markdown:
    """Markdown, lightly: colour for what is a heading, code or bold. Every character stays where it is."""

    def __init__(self) -> None:
        self._in_code = False

    def line(self, line: str) -> Text:
        """One line, given in order: whether it is code depends on those before it."""
        if line.lstrip().startswith("```"):
            self._in_code = not self._in_code
            return Text(line, style="dim")
        return self.peek(line)

    def peek(self, line: str) -> Text:
        """The same for a line that is not whole yet."""
        if self._in_code:
            return Text(line, style="cyan")
        if re.match(r"#{1,6} ", line):
            return Text(line, style="bold")
        text = Text(line)
        for found in _INLINE.finditer(line):
            text.stylize("cyan" if found["code"] else "bold", *found.span())
        return text
