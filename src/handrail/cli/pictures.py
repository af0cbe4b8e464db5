"""Pictures drawn in a terminal, with the protocol of kitty or of iTerm2."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Literal

from rich.console import Console, ConsoleOptions
from rich.segment import ControlType, Segment

from handrail.content import Attachment, guess_type

Protocol = Literal["kitty", "iterm"]

_TERMINALS: Mapping[str, Protocol] = {
    "iterm.app": "iterm",
    "wezterm": "iterm",
    "mintty": "iterm",
    "ghostty": "kitty",
    "kitty": "kitty",
}
"""The protocol of each terminal, by its `TERM_PROGRAM` in lower case."""
_TYPES: Mapping[Protocol, frozenset[str]] = {
    "kitty": frozenset({"image/png"}),
    "iterm": frozenset({"image/png", "image/jpeg", "image/gif"}),
}
_ROWS = 16
"""Height of a picture in lines of text."""
_MOST_BYTES = 4_000_000
_CHUNK = 4096
"""Maximum length of the base64 text in one of kitty's escape sequences. kitty refuses longer ones."""


def protocol_of(environment: Mapping[str, str]) -> Protocol | None:
    """Return the protocol that the terminal's environment variables suggest, or None if it is unknown.

    Inside a multiplexer, such as tmux, it is None, because pictures do not reach the terminal.
    """
    term = environment.get("TERM", "")
    if environment.get("TMUX") or environment.get("STY") or term.startswith(("screen", "tmux")):
        return None
    known = _TERMINALS.get(environment.get("TERM_PROGRAM", "").lower())
    if known is not None:
        return known
    if environment.get("KITTY_WINDOW_ID") or term in ("xterm-kitty", "xterm-ghostty"):
        return "kitty"
    return "iterm" if environment.get("LC_TERMINAL", "").lower() == "iterm2" else None


class Picture:
    """A picture that rich can print. The cursor is below it afterwards."""

    def __init__(self, sequence: str) -> None:
        self.sequence = sequence

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        yield Segment(self.sequence, None, [(ControlType.CARRIAGE_RETURN,)])  # rich writes controls unchanged
        yield Segment.line()


def pictures_in(attachments: Iterable[Attachment], protocol: Protocol | None) -> list[Picture]:
    """Return a picture for each attachment that the terminal can draw and that is not too large.

    Without a protocol, there are no pictures.
    """
    if protocol is None:
        return []
    draw = _kitty if protocol == "kitty" else _iterm
    return [
        Picture(draw(each))
        for each in attachments
        if each.is_here and each.size <= _MOST_BYTES and guess_type(each.content) in _TYPES[protocol]
    ]


def _kitty(attachment: Attachment) -> str:
    data = base64.b64encode(attachment.content).decode()
    chunks = [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)]
    keys = f"a=T,f=100,q=2,r={_ROWS},"  # send and show a PNG, and ask the terminal for no reply
    sequences: list[str] = []
    for number, chunk in enumerate(chunks, 1):
        sequences.append(f"\x1b_G{keys}m={int(number < len(chunks))};{chunk}\x1b\\")
        keys = ""
    return "".join(sequences)


def _iterm(attachment: Attachment) -> str:
    name = base64.b64encode(attachment.filename.encode(errors="replace")).decode()
    data = base64.b64encode(attachment.content).decode()
    how = f"name={name};size={attachment.size};height={_ROWS};preserveAspectRatio=1;inline=1"
    return f"\x1b]1337;File={how}:{data}\x07"
