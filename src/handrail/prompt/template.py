"""Templates: text with `$name` in it, read once and filled many times."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from handrail.errors import PromptDefinitionError

_DOLLAR = re.compile(r"\$(?:(?P<dollar>\$)|(?P<bare>[^\W\d]\w*)|\{(?P<braced>[^\W\d]\w*)\}|(?P<wrong>))")


@dataclass(frozen=True, slots=True)
class Template:
    """A text with gaps. What fills a gap is put in as it is: a `$` in it means nothing."""

    parts: tuple[str, ...]
    """Text and names in turns, text first and last."""
    names: frozenset[str]

    def fill(self, values: Mapping[str, Any]) -> str:
        """The text with every gap filled by the `str()` of its value."""
        if not self.names:
            return self.parts[0]
        filled = [str(values[part]) if odd % 2 else part for odd, part in enumerate(self.parts)]
        return "".join(filled)


@lru_cache(maxsize=1024)
def template_of(text: str) -> Template:
    """Read a template, or `PromptDefinitionError` for a `$` that is neither a name nor a dollar.

    Indentation that all lines share and empty lines around the text are dropped, so that a template can be
    written with the indentation of the code around it.
    """
    whole = textwrap.dedent(text).rstrip()
    text = whole.lstrip("\n")
    parts: list[str] = []
    piece = ""
    at = 0
    for match in _DOLLAR.finditer(text):
        piece += text[at : match.start()]
        at = match.end()
        if match["wrong"] is not None:
            raise _wrong(text, match.start(), len(whole) - len(text) + 1)
        if match["dollar"]:
            piece += "$"
        else:
            parts += (piece, match["bare"] or match["braced"])
            piece = ""
    parts.append(piece + text[at:])
    return Template(tuple(parts), frozenset(parts[1::2]))


def _wrong(text: str, at: int, first: int) -> PromptDefinitionError:
    line = text.count("\n", 0, at) + first
    shown = text[at : at + 12].split("\n", 1)[0]
    return PromptDefinitionError(
        "template",
        f"{shown!r} in line {line} is no placeholder",
        "Write `$name` or `${name}` for a field, and `$$` for a dollar sign.",
    )
