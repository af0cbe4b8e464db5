"""The report of a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

NOWHERE = "no crash"


class Broken(NamedTuple):
    """A broken law, and the crash point at which it broke."""

    law: str
    at: str
    """Repeats it: `simulate(scenario, at=...)`; `no crash` if the run itself went wrong."""
    what: str

    def __str__(self) -> str:
        return f"at {self.at!r}: {self.law}: {self.what}"


class Report(NamedTuple):
    """How many crash points a scenario has, how many were tried, and what broke."""

    scenario: str
    writes: int
    """Journal writes of an uncrashed run; each is two crash points."""
    steps: int
    """Steps of its event loop; each is one crash point."""
    tried: dict[str, int]
    """The number of points tried, by kind."""
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
