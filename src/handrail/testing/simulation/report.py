"""What a simulation found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

NOWHERE = "no crash"


class Broken(NamedTuple):
    """A law that did not hold, and the crash point at which it did not."""

    law: str
    at: str
    """Repeats it: `simulate(scenario, at=...)`; `no crash` where the run itself went wrong."""
    what: str

    def __str__(self) -> str:
        return f"at {self.at!r}: {self.law}: {self.what}"


class Report(NamedTuple):
    """How many crash points a scenario has, how many were tried, and what broke."""

    scenario: str
    writes: int
    """How many writes of the journal an uncrashed run makes; each is two crash points."""
    steps: int
    """How many steps its event loop takes; each is one."""
    tried: dict[str, int]
    """How many points of each kind were tried."""
    processes: int
    seconds: float
    broken: Sequence[Broken]

    def assert_kept(self) -> None:
        """Fail with what is broken and where."""
        assert not self.broken, str(self)

    def __str__(self) -> str:
        tried = ", ".join(f"{count} {kind}" for kind, count in self.tried.items())
        lines = [
            f"{self.scenario}: {self.writes} journal writes and {self.steps} steps of the loop",
            f"{sum(self.tried.values())} crash points tried in {self.processes} processes and {self.seconds:.1f} s: {tried}",
            f"{len(self.broken)} broken laws",
        ]
        lines += [
            f"  {law}: {times} times" for law, times in Counter(each.law for each in self.broken).items()
        ]
        lines += [f"  {each}" for each in self.broken[:20]]
        if len(self.broken) > 20:
            lines.append(f"  and {len(self.broken) - 20} more")
        return "\n".join(lines)
