"""`CommandResult`: how a command ended and what it printed."""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass
from typing import Literal

from handrail.resources.shell.rules import shown

Backend = Literal["overlay", "copy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How a command ended. Everything it started has ended too, and its writes are in the upper layer."""

    argv: tuple[str, ...]
    exit_code: int | None = 0
    """None if a signal ended it."""
    signal: int | None = None
    timed_out: bool = False
    output: str = ""
    """Both streams, in the order they were written. Long output is cut in the middle."""
    omitted: int = 0
    """Bytes of output cut from the middle."""
    seconds: float = 0.0
    backend: Backend = "overlay"
    contained: bool = True
    """Whether it ran in a sandbox."""
    notes: tuple[str, ...] = ()
    """Remarks for the reader, such as that the command worked on a copy and what that cost."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def truncated(self) -> bool:
        return self.omitted > 0

    @property
    def ending(self) -> str:
        """How it ended, in words: `exit code 1`, `killed by SIGSEGV`, `stopped after 60 s`."""
        if self.timed_out:
            return f"stopped after {self.seconds:.3g} s, with everything it had started"
        if self.signal is not None:
            names = {number.value: number.name for number in signals.Signals}
            return f"killed by {names.get(self.signal, f'signal {self.signal}')}"
        return f"exit code {self.exit_code}"

    def render(self) -> str:
        """The result as a model reads it: how the command ended, then its output."""
        lines = [f"`{shown(self.argv)}`: {self.ending}", *self.notes]
        return "\n".join([*lines, self.output] if self.output else [*lines, "(no output)"])
