"""Recorded cases as cases of an eval: the message, the answer, the calls and the files of a run that was exported."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from os import PathLike, fspath
from typing import Any, cast

import msgspec

from handrail.errors import DefinitionError
from handrail.protocols import Filesystem
from handrail.run.record.begin import decode_outcome
from handrail.runs.cases import Case

_PATH = "recorded"
"""The key in the metadata of a case or a sample for the path of the recorded case that it was made from."""

_COUNTED = ("ok", "denied", "cancelled")
"""The statuses of calls whose spans are no errors, which are those that `TrajectoryMatch` counts."""


class Recording(msgspec.Struct, frozen=True):
    """What an eval takes from a recorded case."""

    name: str
    message: str
    text: str
    """The recorded answer."""
    tools: list[str]
    """The tools of the run's own calls, in order, without those that failed."""
    metadata: dict[str, Any]


def read(path: str | PathLike[str]) -> Recording:
    """Read a recorded case.

    Raises `RunError` if the file is not a case, and `DefinitionError` if more than a message has begun the run.
    """
    case = Case.load(path)
    begin = case.begin
    more = {"params": begin.params, "a history": begin.history, "attachments": begin.attached}
    other = next((what for what, value in more.items() if value), "no message")
    if begin.message is None or other != "no message":
        raise DefinitionError(
            f"the case {case.name!r} can't be part of an eval, because its run began with {other}. Use replay_case for it."
        )
    units = sorted(case.record.units, key=lambda unit: unit.at)
    tools = [unit.tool for unit in units if unit.status in _COUNTED]
    return Recording(
        case.name, begin.message, decode_outcome(case.record.row).text, tools, {_PATH: fspath(path)}
    )


@contextlib.contextmanager
def opened(metadata: object) -> Generator[Filesystem | None]:
    """Open the files of the recorded case that the metadata names. Yields None if it names none, or if the case has no files."""
    path = cast("Mapping[str, Any]", metadata).get(_PATH) if isinstance(metadata, Mapping) else None
    with contextlib.nullcontext() if path is None else Case.load(path).opened() as files:
        yield files
