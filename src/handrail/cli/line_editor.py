"""`LineEditor`: a line that is typed while a run is drawn on the terminal."""

from __future__ import annotations

import codecs
import re

_KEYS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.)?|.", re.DOTALL)
_LAST_WORD = re.compile(r"\S*\s*\Z")


class LineEditor:
    """A line that is typed while the terminal neither shows nor edits it.

    Backspace, Ctrl-W and Ctrl-U delete. Other keys that are not text are ignored. A line that ends in a backslash continues.
    """

    def __init__(self) -> None:
        self.text = ""
        """What was typed of the line so far."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, typed: bytes) -> list[str]:
        """Add what was typed, and return the lines that are now complete."""
        lines: list[str] = []
        for key in _KEYS.findall(self._decoder.decode(typed)):
            if key in ("\r", "\n") and self.text.endswith("\\"):
                self.text = f"{self.text[:-1]}\n"
            elif key in ("\r", "\n"):
                lines.append(self.take())
            elif key in ("\x7f", "\b"):
                self.text = self.text[:-1]
            elif key == "\x15":
                self.text = ""
            elif key == "\x17":
                self.text = _LAST_WORD.sub("", self.text, count=1)
            elif key.isprintable():
                self.text += key
        return lines

    def take(self) -> str:
        """Return what was typed of the line so far, and begin another one."""
        text, self.text = self.text, ""
        return text
