"""The folders an overlay is made of: what lies below, and where the writes go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Layers:
    """A folder and the writes over it, in the format of Linux overlay mounts.

    A regular file is its content, a character device 0:0 is a deletion, and a folder with the
    attribute `user.overlay.opaque` set to `y` hides what lies below it.
    """

    lowers: tuple[Path, ...]
    """Read only, the topmost first; the last one is the real folder."""
    upper: Path
    """Where writes go. It may hold earlier ones."""
    work: Path
    """A folder of nobody else's, on the same filesystem as `upper`."""

    @property
    def root(self) -> Path:
        """The real folder."""
        return self.lowers[-1]
