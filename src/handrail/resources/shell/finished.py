"""How a command ended."""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass
from typing import Literal

from handrail.resources.shell.rules import shown

Backend = Literal["overlay", "copy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a command ended. All that it started has ended too, and what it wrote is in the upper layer."""

    argv: tuple[str, ...]
    exit_code: int | None = 0
    """None when a signal ended it."""
    signal: int | None = None
    timed_out: bool = False
    output: str = ""
    """Both streams, in the order they were written. What was left out is left out of the middle."""
    omitted: int = 0
    """Bytes of output that were left out."""
    seconds: float = 0.0
    backend: Backend = "overlay"
    contained: bool = True
    """Whether walls stood around it."""
    notes: tuple[str, ...] = ()
    """What somebody who reads the result should know: that it worked on a copy, and what that cost."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def truncated(self) -> bool:
        return self.omitted > 0

    @property
    def ending(self) -> str:
        """In words: `exit code 1`, `killed by SIGSEGV`, `stopped after 60 s`."""
        if self.timed_out:
            return f"stopped after {self.seconds:.3g} s, with all it had started"
        if self.signal is not None:
            names = {number.value: number.name for number in signals.Signals}
            return f"killed by {names.get(self.signal, f'signal {self.signal}')}"
        return f"exit code {self.exit_code}"

    def render(self) -> str:
        """For a model: how it ended, then what it said."""
        lines = [f"`{shown(self.argv)}`: {self.ending}", *self.notes]
        return "\n".join([*lines, self.output] if self.output else [*lines, "(no output)"])
