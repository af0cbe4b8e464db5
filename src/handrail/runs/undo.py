"""Undo of a committed call: restores its files and drops its events, unless a later call depends on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from handrail.adapter.run_record import heed_undone
from handrail.adapter.undone_calls import UndoneCall, undone_in
from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import RunBusy, RunError, UndoRefused
from handrail.journals import Journal
from handrail.records import CommitUnit, Entry, RunRow
from handrail.session import Session
from handrail.threads import run_in_thread


class UndoesFiles(Protocol):
    """A filesystem that keeps the files that its commits replace, such as a `DirectoryFilesystem`."""

    def undo(
        self, call_id: str, /, *, run_id: str = "", place: str = "", journal: str = ""
    ) -> tuple[str, ...]: ...


class Undoing(msgspec.Struct, frozen=True):
    """The outcome of an undo."""

    call_id: str
    tool: str
    paths: Sequence[str]
    """The paths of the restored files."""
    slices: Sequence[str]
    stands: Sequence[str]
    """The call's external effects, which an undo does not reverse."""


async def undo(
    journal: Journal,
    run_id: str,
    call_id: str,
    filesystem: UndoesFiles | None = None,
    *,
    session: Session | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Undoing:
    """Undo a committed call: restore its files, and drop its changes to the session. External effects are not undone.

    The model is told about the undo in the session's next turn. Pass the `session` if this process has it in memory, so
    that it drops the call immediately; otherwise that happens when the session is next evaluated.

    Raises `UndoRefused`, and changes nothing, if a later commit read or wrote the same paths or slices, which the error
    names. It is also raised if the call failed, was undone or discarded before, has changes that are not applied, belongs
    to the run that this one was forked from, or changed files and no `filesystem` was passed. Raises `RunError` if the run
    has no such call, and `RunBusy` if a live process owns a run of the session.
    """
    row = await journal.runs.get(run_id)
    await check_nobody_works(journal, row)
    unit = await _unit_of(journal, run_id, call_id)
    entries = {(entry.kind, entry.key): entry for entry in await journal.calls.entries(run_id)}
    done = entries.get(("undone", call_id))
    if done is not None:
        given_up = msgspec.msgpack.decode(done.body, type=UndoneCall).discarded
        raise UndoRefused(call_id, (), f"it has already been {'discarded' if given_up else 'undone'}")
    if any((each.run_id, each.call_id) == (run_id, call_id) for each in await journal.calls.unapplied()):
        problem = "its changes are not applied yet. Open its folder with this journal first, or discard them"
        raise UndoRefused(call_id, (), problem)
    _refuse_built_on(unit, await journal.calls.later(unit))
    now = clock.now().timestamp()
    paths: Sequence[str] = ()
    if unit.files:
        if filesystem is None:
            raise UndoRefused(
                call_id, (), f"it changed files in {unit.root!r}. Pass the filesystem of that folder"
            )
        begun = ("undoing", call_id) in entries
        await journal.calls.note(run_id, Entry("undoing", call_id, now, b""), from_outside=True)
        paths = await run_in_thread(lambda: _undo_files(filesystem, unit, journal.id, begun))
    elif unit.diff:
        raise UndoRefused(
            call_id, (), f"its files belong to the run {row.record.forked_from!r}, so undo it there"
        )
    slices = [place for place in unit.writes if place.startswith("slice ")]
    undone = UndoneCall(unit.tool, [*slices, *(f"file {path}" for path in paths)], list(unit.effects))
    await journal.calls.note(
        run_id, Entry("undone", call_id, now, msgspec.msgpack.encode(undone)), from_outside=True
    )
    if session is not None:
        await heed_undone(journal, session, await undone_in(journal, row.record.session_id))
    return Undoing(call_id, unit.tool, paths, slices, unit.effects)


async def check_nobody_works(journal: Journal, row: RunRow) -> None:
    """Raise `RunBusy` if a live process owns a run of the same session."""
    for other in await journal.runs.list(session_id=row.record.session_id):
        if other.held:
            raise RunBusy(other.record.id, other.owner)


async def _unit_of(journal: Journal, run_id: str, call_id: str) -> CommitUnit:
    units = await journal.calls.load(run_id)
    found = next((unit for unit in units if call_id in (unit.call_id, unit.place)), None)
    if found is None or found.call_id != call_id:
        near = (
            f"The call at that place has the id {found.call_id!r}."
            if found is not None
            else "`handrail runs show` lists its calls."
        )
        raise RunError(run_id, f"it has no finished call {call_id!r}", near)
    if found.status != "ok":
        raise UndoRefused(call_id, (), f"it failed ({found.status}), so it changed nothing")
    return found


def _undo_files(filesystem: UndoesFiles, unit: CommitUnit, journal: str, begun: bool) -> Sequence[str]:
    try:
        return filesystem.undo(unit.call_id, run_id=unit.run_id, place=unit.place, journal=journal)
    except UndoRefused as refused:
        if begun and not refused.places:  # the process ended between changing the files and recording it
            return [place.removeprefix("file ") for place in unit.writes if place.startswith("file ")]
        raise


def _refuse_built_on(unit: CommitUnit, later: Iterable[CommitUnit]) -> None:
    against: dict[str, None] = {}
    for other in later:
        against.update(dict.fromkeys(built_on(unit, other)))
    if against:
        raise UndoRefused(unit.call_id, list(against), "a later call has read or changed what it wrote")


def built_on(unit: CommitUnit, other: CommitUnit) -> list[str]:
    """Return the places that `unit` changed and that `other`, a later commit, read or changed.

    Slices belong to a session; paths belong to a folder, no matter which session uses it. A listed folder counts
    as read if something directly in it changed, and a path counts as changed if its folder changed.
    """
    touched = (*other.reads, *other.writes)
    found: list[str] = []
    for place in unit.writes:
        if place.startswith("file "):
            if other.is_in(unit.root, unit.root_id) and any(
                meet(place[5:], each[5:]) for each in touched if each.startswith("file ")
            ):
                found.append(place)
        elif unit.session_id == other.session_id and place in touched:
            found.append(place)
    return found


def meet(written: str, touched: str) -> bool:
    """Return whether a change at one path is visible at another. A path with a trailing slash is a folder's listing."""
    if touched.endswith("/") or not touched:  # the folder was listed
        folder = touched.rstrip("/")
        return written == folder or written.rpartition("/")[0] == folder or folder.startswith(f"{written}/")
    return written == touched or touched.startswith(f"{written}/") or written.startswith(f"{touched}/")
