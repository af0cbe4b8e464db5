"""Who is on the other side of a run: here, a person at a terminal."""

from handrail.environment.terminal import Screen, Terminal

__all__ = ["Screen", "Terminal"]
