"""Copies of runs: forks, which continue independently, and exported files."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import RunError
from handrail.ids import check_id, random_id, why_unfit
from handrail.journal.protocol import Journal
from handrail.journal.records import CommitUnit, Entry, RunCopy, RunRow
from handrail.models.names import is_of_providers
from handrail.run.answer import RecordedAnswer
from handrail.run.place import RUN, Place, leading_call
from handrail.run.record.begin import RunBegin, check_begun, decode_begin
from handrail.run.record.lineage import Lineage, lineage_of
from handrail.session.serialization import under_id


def detach(begin: RunBegin, lineage: Lineage, session_id: str, **changes: object) -> bytes:
    """Encode a run's beginning for a session with this id, so that it does not depend on other runs."""
    base = None if lineage.base is None else under_id(lineage.base, session_id)
    return msgspec.msgpack.encode(
        msgspec.structs.replace(
            begin,
            base=base,
            events=lineage.events,
            said=lineage.said,
            shown=lineage.shown,
            logged=lineage.logged,
            denied=lineage.denied,
            **changes,
        )
    )


# --- forks ----------------------------------------------------------------------------------------


async def fork(
    journal: Journal, run_id: str, step: int, new_id: str | None = None, *, clock: Clock = SYSTEM_CLOCK
) -> RunRow:
    """Create a run with the first `step` model answers of another run, and the results of their calls.

    When the fork is resumed, open questions of these calls are asked again, and then the model is asked for the next answer.
    If the last of the answers ended the original run, it ends the fork too. The fork has its own session, which starts like
    the original run's. Files are not changed: the fork sees them as they are now, whatever the shared calls did to them.

    Raises `RunError` if the run has not begun or has no such step, if an earlier run of its session is not over, or if the
    journal already has a run with the id `new_id`.
    """
    row = await journal.runs.get(run_id)
    check_begun(row)
    record, begin = row.record, decode_begin(row.record)
    new_id = random_id() if new_id is None else new_id
    check_id("run id", new_id)
    entries, units = await journal.calls.entries(run_id), await journal.calls.load(run_id)
    kept = _calls_until(run_id, entries, step)
    now = clock.now().timestamp()
    entries = list(_kept(entries, step, kept, units))
    last = max((entry.at for entry in entries), default=record.began_at)
    deadline = None if begin.deadline is None else begin.deadline + now - last
    copy = RunCopy(
        row=RunRow(
            record=msgspec.structs.replace(
                record,
                id=new_id,
                session_id=new_id,
                began_at=now,
                forked_from=f"{run_id}#{step}",
                begin=detach(begin, await lineage_of(journal, row), new_id, deadline=deadline),
            ),
            status="parked",
            changed_at=now,
        ),
        entries=entries,
        units=[_detach_unit(unit, new_id) for unit in units if (leading_call(unit.place) or 0) <= kept],
        steps=[
            (f"{new_id}{key.removeprefix(run_id)}", value)
            for key, value in await journal.steps.load(run_id)
            if key.startswith(run_id) and (leading_call(key.removeprefix(run_id)) or 0) <= kept
        ],
        blobs=await _blobs(journal, run_id),
        forked_from=f"{run_id}#{step}",
    )
    await journal.runs.add(copy)
    return await journal.runs.get(new_id)


async def _blobs(journal: Journal, run_id: str) -> list[bytes]:
    return [await journal.blobs.get(digest) for digest in await journal.blobs.list(run_id)]


def _calls_until(run_id: str, entries: Sequence[Entry], step: int) -> int:
    """Return how many calls the first `step` answers led to. Raises `RunError` if the run has no such step."""
    answers = {
        place: entry
        for entry in entries
        if entry.kind == "model answer" and (place := Place.parse(entry.key)).parent == RUN
    }
    if not 0 <= step <= len(answers):
        raise RunError(
            run_id, f"it has no step {step}", f"Pass a step from 0, its beginning, to {len(answers)}."
        )
    bodies = (answers[RUN.answer(number)].body for number in range(1, step + 1))
    return sum(len(msgspec.msgpack.decode(body, type=RecordedAnswer).calls) for body in bodies)


def _kept(entries: Sequence[Entry], step: int, calls: int, units: Sequence[CommitUnit]) -> Iterator[Entry]:
    """Yield the entries of the first `calls` calls, and those that the run itself recorded before its answer `step + 1`."""
    places = {unit.call_id: unit.place for unit in units}
    after = ("model answer", str(RUN.answer(step + 1)))
    until = next((at for at, entry in enumerate(entries) if (entry.kind, entry.key) == after), len(entries))
    for at, entry in enumerate(entries):
        place = places.get(entry.key, "") if entry.kind in ("undone", "undoing") else entry.key
        call = leading_call(place)
        if at < until if call is None else call <= calls:
            yield entry


def _detach_unit(unit: CommitUnit, new_id: str) -> CommitUnit:
    """Return a committed call as a fork records it.

    Its files and paths are left out, because they belong to the original run.
    """
    return msgspec.structs.replace(
        unit,
        run_id=new_id,
        session_id=new_id,
        files=(),
        workspaces=(),
        root="",
        reads=[place for place in unit.reads if not place.startswith("file ")],
        writes=[place for place in unit.writes if not place.startswith("file ")],
    )


# --- files ----------------------------------------------------------------------------------------

_HINT = "Pass a file that `export` wrote."
FORMAT = 1
"""The version of the file format. A newer version is refused."""


_NOT_AT_PLACES = frozenset(("undoing", "undone", "emitted", "parked"))
"""The kinds of entries whose keys are not places. All other keys are checked."""


class _Head(msgspec.Struct):
    handrail: str
    version: int
    run_id: str = ""


async def export(journal: Journal, run_id: str, path: str | PathLike[str]) -> int:
    """Write a run to a file as lines of JSON, which only its owner can read. Returns the number of lines.

    The file contains the session as it was when the run began, so no other run is needed. It does not contain secrets (the
    journal masks them), questions (open ones are asked again), or data that folders keep for undo. Raises `RunError` if the
    run has not begun, if an earlier run of its session is not over, or if the file can't be written.
    """
    row = await journal.runs.get(run_id)
    check_begun(row)
    record = row.record
    begin = detach(decode_begin(record), await lineage_of(journal, row), record.session_id)
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
    lines += [{"unit": msgspec.structs.replace(unit, files=(), workspaces=(), root="")} for unit in units]
    lines += [{"step": step} for step in await journal.steps.load(run_id)]
    lines += [{"blob": data} for data in await _blobs(journal, run_id)]
    target = Path(path)
    unfinished = ""
    try:
        opened, unfinished = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with open(opened, "wb") as file:
            file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)
        os.replace(unfinished, target)
    except OSError as error:
        problem = f"it can't be written to {target}: {error.strerror}"
        raise RunError(run_id, problem, "Pass a path in a writable folder.") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
    return len(lines)


async def import_(
    journal: Journal, path: str | PathLike[str], *, run_id: str | None = None, session_id: str | None = None
) -> RunRow:
    """Import an exported run, and return its row. It keeps its id unless `run_id` is passed.

    Without `session_id`, it keeps the id of its session, or gets a new session if the journal already has that
    one. What the file names as the run's app, MCP servers, and models in modules is left out, so that resuming the run loads no code
    that the file chose. Raises `RunError` if the file can't be read, is damaged or is not an exported run of a known format, if an id
    contains characters that can't be printed, or if the journal already has a run with this id.
    """
    copy = _read(Path(path))
    was, record = copy.row.record.id, copy.row.record
    new_id = was if run_id is None else run_id
    for what, id in (
        ("id", new_id),
        ("session's id", record.session_id if session_id is None else session_id),
    ):
        problem = why_unfit(id)
        if problem:
            raise RunError(
                Path(path).name, f"the {what} {problem}", "Give the run and its session other ids."
            )
    if session_id is None:
        taken = await journal.runs.list(session_id=record.session_id)
        session_id = new_id if taken else record.session_id
    try:
        begin = decode_begin(record)
    except ValueError as error:
        raise RunError(Path(path).name, f"it is not an exported run: {error}", _HINT) from None
    # The original run's permission to change startup files does not apply in this journal. Nor is any code loaded or started
    # because the file names it: whoever resumes the run names its app, its servers, and models in modules.
    again = detach(
        begin,
        Lineage(begin.base, begin.events, begin.said, begin.shown, begin.logged, begin.denied),
        session_id,
        startup_files=[],
        sources={},
        models={worker: name for worker, name in begin.models.items() if is_of_providers(name)},
    )
    record = msgspec.structs.replace(
        record,
        id=new_id,
        session_id=session_id,
        app="",
        code="",
        model=record.model if is_of_providers(record.model) else record.model.rpartition(":")[2],
        begin=again,
    )
    status = "parked" if copy.row.status == "running" else copy.row.status
    await journal.runs.add(
        RunCopy(
            row=msgspec.structs.replace(copy.row, record=record, status=status),
            entries=copy.entries,
            units=[
                # Like `export`, this leaves out what a call has changed in folders and workspaces, which are not this journal's.
                msgspec.structs.replace(
                    unit, run_id=new_id, session_id=session_id, files=(), workspaces=(), root=""
                )
                for unit in copy.units
            ],
            steps=[(f"{new_id}{key.removeprefix(was)}", value) for key, value in copy.steps],
            blobs=copy.blobs,
        )
    )
    return await journal.runs.get(new_id)


def _read(path: Path) -> RunCopy:
    name, hint = path.name, _HINT
    try:
        lines = path.read_bytes().splitlines()
        if not lines:
            raise RunError(name, "it is not an exported run: it is empty", hint)
        head = msgspec.json.decode(lines[0], type=_Head)
    except OSError as error:
        raise RunError(name, f"it can't be read: {error.strerror}", hint) from None
    except ValueError as error:
        raise RunError(name, f"it is not an exported run: {error}", hint) from None
    if head.handrail != "run":
        raise RunError(name, "it is not an exported run", hint)
    if head.version > FORMAT:
        raise RunError(
            head.run_id,
            f"it was exported in format {head.version}, and this version of Handrail reads format {FORMAT}",
            "Import it with the version of Handrail that exported it, or a newer one.",
        )
    found: dict[str, list[Any]] = {"run": [], "entry": [], "unit": [], "step": [], "blob": []}
    kinds: dict[str, Any] = {
        "run": RunRow,
        "entry": Entry,
        "unit": CommitUnit,
        "step": tuple[str, bytes | None],
        "blob": bytes,
    }
    for number, line in enumerate(lines[1:], 2):
        try:
            ((kind, body),) = msgspec.json.decode(line, type=dict[str, msgspec.Raw]).items()
            found[kind].append(_with_place(msgspec.json.decode(body, type=kinds[kind])))
        except (ValueError, KeyError) as error:
            raise RunError(
                head.run_id, f"line {number} of {name} is damaged: {error}", "Export it again."
            ) from None
    if len(found["run"]) != 1:
        raise RunError(head.run_id, f"{name} is truncated", "Export it again.")
    return RunCopy(
        row=found["run"][0],
        entries=found["entry"],
        units=found["unit"],
        steps=found["step"],
        blobs=found["blob"],
    )


def _with_place(line: Any) -> Any:
    """Return a decoded line unchanged. Raises `ValueError` if it has a place that can't be parsed."""
    if isinstance(line, CommitUnit):
        Place.parse(line.place)
    elif isinstance(line, Entry) and line.kind not in _NOT_AT_PLACES:
        Place.parse(line.key)
    return line
