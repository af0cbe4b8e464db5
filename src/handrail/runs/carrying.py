"""A run as one file: to keep, to send, to go on with elsewhere."""

from __future__ import annotations

import contextlib
import os
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from handrail.adapter.run_record import decode_begin
from handrail.errors import RunError
from handrail.journals import Journal
from handrail.records import CommitUnit, Entry, RunCopy, RunRow
from handrail.runs.lineage import Lineage, lineage_of, parted

FORMAT = 1
"""The version of the file. A newer one is refused, never guessed at."""


class _Head(msgspec.Struct):
    handrail: str
    version: int
    run_id: str = ""


async def export(journal: Journal, run_id: str, path: str | PathLike[str]) -> int:
    """Write a run into one file, in lines of JSON; returns how many.

    It holds the session as the run found it, so no other run is needed. Not in it: what the journal has
    not either (secrets are masked there), questions (those that are open are asked again), and what folders keep for undoing.
    """
    row = await journal.runs.get(run_id)
    record = row.record
    begin = parted(decode_begin(record), await lineage_of(journal, row), record.session_id)
    lines: list[Any] = [_Head("run", FORMAT, run_id)]
    lines.append(
        {
            "run": msgspec.structs.replace(
                row,
                record=msgspec.structs.replace(record, begin=begin),
                owner="",
                leased_until=0.0,
                questions=0,
            )
        }
    )
    lines += [{"entry": entry} for entry in await journal.calls.entries(run_id)]
    units = await journal.calls.load(run_id)
    lines += [{"unit": msgspec.structs.replace(unit, files=(), root="")} for unit in units]
    lines += [{"step": step} for step in await journal.steps.load(run_id)]
    target = Path(path)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)
        unfinished.replace(target)
    except OSError as error:
        problem = f"it can't be written to {target}: {error.strerror}"
        raise RunError(run_id, problem, "Name a file in a folder that can be written to.") from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return len(lines)


async def import_(
    journal: Journal, path: str | PathLike[str], *, run_id: str | None = None, session_id: str | None = None
) -> RunRow:
    """Bring a run in that was exported. `run_id` gives it another id, where the journal has one of that id."""
    copy = _read(Path(path))
    was, record = copy.row.record.id, copy.row.record
    new_id = run_id or was
    if session_id is None:
        taken = await journal.runs.list(session_id=record.session_id)
        session_id = new_id if taken else record.session_id
    begin = decode_begin(record)
    again = parted(
        begin, Lineage(begin.base, begin.events, begin.said, begin.shown, begin.denied), session_id
    )
    record = msgspec.structs.replace(record, id=new_id, session_id=session_id, begin=again)
    status = "parked" if copy.row.status == "running" else copy.row.status
    await journal.runs.add(
        RunCopy(
            row=msgspec.structs.replace(copy.row, record=record, status=status),
            entries=copy.entries,
            units=[
                msgspec.structs.replace(unit, run_id=new_id, session_id=session_id) for unit in copy.units
            ],
            steps=[(f"{new_id}{key.removeprefix(was)}", value) for key, value in copy.steps],
        )
    )
    return await journal.runs.get(new_id)


def _read(path: Path) -> RunCopy:
    name, mend = path.name, "Give a file that `export` wrote."
    try:
        lines = path.read_bytes().splitlines()
        if not lines:
            raise RunError(name, "it is not an exported run: it is empty", mend)
        head = msgspec.json.decode(lines[0], type=_Head)
    except OSError as error:
        raise RunError(name, f"it can't be read: {error.strerror}", mend) from None
    except ValueError as error:
        raise RunError(name, f"it is not an exported run: {error}", mend) from None
    if head.handrail != "run":
        raise RunError(name, "it is not an exported run", mend)
    if head.version > FORMAT:
        raise RunError(
            head.run_id,
            f"it was exported in version {head.version}, and this version of Handrail reads {FORMAT}",
            "Import it with the version that exported it, or a newer one.",
        )
    found: dict[str, list[Any]] = {"run": [], "entry": [], "unit": [], "step": []}
    kinds: dict[str, Any] = {
        "run": RunRow,
        "entry": Entry,
        "unit": CommitUnit,
        "step": tuple[str, bytes | None],
    }
    for number, line in enumerate(lines[1:], 2):
        try:
            ((kind, body),) = msgspec.json.decode(line, type=dict[str, msgspec.Raw]).items()
            found[kind].append(msgspec.json.decode(body, type=kinds[kind]))
        except (ValueError, KeyError) as error:
            raise RunError(
                head.run_id, f"line {number} of {name} is damaged: {error}", "Export it again."
            ) from None
    if len(found["run"]) != 1:
        raise RunError(head.run_id, f"{name} is cut off", "Export it again.")
    return RunCopy(row=found["run"][0], entries=found["entry"], units=found["unit"], steps=found["step"])
