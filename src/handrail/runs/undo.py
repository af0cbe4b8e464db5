"""Undo of a committed call: restores its files and drops its events, unless a later call depends on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from handrail.adapter.run_lease import acquire_run, is_executing
from handrail.adapter.run_record import heed_undone
from handrail.adapter.undone_calls import UndoneCall, undone_in
from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import RunBusy, RunError, UndoRefused
from handrail.journals import Journal
from handrail.place import Place
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
    """The paths whose earlier state was restored."""
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

    Inner calls that committed separately are undone with it, last first, even if the call itself failed.
    Changes to a workspace are undone on any host, and need no `filesystem`.
    The model is told about the undo in the session's next turn. If this process has the session in memory, pass it as
    `session`, so that it drops the call immediately. Otherwise it drops the call when it is next evaluated.

    Raises `UndoRefused`, and changes nothing, if a later commit read or wrote the same paths or slices, which the error
    names, or if the call

    - failed, and has no committed inner call left to undo,
    - was undone or discarded before,
    - has changes that are not applied,
    - changed files in a folder, and no `filesystem` was passed, or
    - changed files that are not recorded, or that belong to the run from which this one was forked.

    `UndoRefused` is also raised if someone else has changed a file since, or if the folder no longer keeps what the call
    replaced. Inner calls that were undone before that stay undone, and the error's `undone` lists them.
    Raises `RunError` if the run has no such call, `RunBusy` or `SessionBusy` if a live process owns a run of the session, and
    `WorkspaceBusy` while a different run has the workspace.
    """
    await check_nobody_works(journal, await journal.runs.get(run_id))
    async with acquire_run(journal, run_id, turn="same") as row:
        return await _undo(journal, row, call_id, filesystem, session, clock)


async def _undo(
    journal: Journal,
    row: RunRow,
    call_id: str,
    filesystem: UndoesFiles | None,
    session: Session | None,
    clock: Clock,
) -> Undoing:
    """Undo a call of a run that this process has acquired, so that no other run works on its session meanwhile."""
    run_id = row.record.id
    entries = {(entry.kind, entry.key): entry for entry in await journal.calls.entries(run_id)}
    units = _units_of(await journal.calls.load(run_id), run_id, call_id, entries)
    await _refuse_unapplied(journal, units)
    own = {(unit.run_id, unit.call_id) for unit in units}
    for unit in units:
        later = await journal.calls.later(unit)
        _refuse_built_on(unit, [each for each in later if (each.run_id, each.call_id) not in own])
        _refuse_files(unit, row, filesystem)
    undone: list[Undoing] = []
    try:
        for unit in reversed(units[:-1]):
            undone.append(await _undo_one(journal, unit, filesystem, clock, entries, outer=call_id))
        undone.append(await _undo_one(journal, units[-1], filesystem, clock, entries, undone))
    except UndoRefused as refused:
        before = [each.call_id for each in undone]
        raise UndoRefused(refused.call_id, refused.places, refused.problem, before) from None
    finally:
        if session is not None:
            await heed_undone(journal, session, await undone_in(journal, row.record.session_id))
    return undone[-1]


async def _undo_one(
    journal: Journal,
    unit: CommitUnit,
    filesystem: UndoesFiles | None,
    clock: Clock,
    entries: Mapping[tuple[str, str], Entry],
    inner: Sequence[Undoing] = (),
    outer: str = "",
) -> Undoing:
    """Undo one commit, and record that it is undone.

    `inner` has the outcomes for its inner calls, which were undone first. If this commit is an inner call that is undone
    with its outer call, `outer` is the id of that outer call.
    """
    now, call_id, run_id = clock.now().timestamp(), unit.call_id, unit.run_id
    paths: Sequence[str] = ()
    if unit.files and filesystem is not None:
        begun = ("undoing", call_id) in entries
        await journal.calls.note(run_id, Entry("undoing", call_id, now, b""))
        paths = await run_in_thread(lambda: _undo_files(filesystem, unit, journal.id, begun))
    elif unit.workspaces:
        paths = sorted(change.path for delta in unit.workspaces for change in delta.changes)
    slices = [place for place in unit.writes if place.startswith("slice ")]
    done = Undoing(call_id, unit.tool, paths, slices, unit.effects)
    if inner:
        every = (*inner, done)
        done = Undoing(
            call_id,
            unit.tool,
            _all(each.paths for each in every),
            _all(each.slices for each in every),
            _all(each.stands for each in every),
        )
    undone = UndoneCall(
        unit.tool,
        [*done.slices, *(f"file {path}" for path in done.paths)],
        list(done.stands),
        outer=outer,
        is_inner=Place.parse(unit.place).outer is not None,
    )
    entry = Entry("undone", call_id, now, msgspec.msgpack.encode(undone))
    if unit.workspaces:
        await journal.workspaces.undo(unit, entry)
    else:
        await journal.calls.note(run_id, entry)
    return done


def _all(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(each for found in lists for each in found))


async def check_nobody_works(journal: Journal, row: RunRow) -> None:
    """Raise `RunBusy` if a live process owns a run of the same session. A run that this process could not release does not count."""
    for other in await journal.runs.list(session_id=row.record.session_id):
        is_left = other.owner == journal.owner and not is_executing(journal, other.record.id)
        if other.held and not is_left:
            raise RunBusy(other.record.id, other.owner)


def _units_of(
    units: Sequence[CommitUnit], run_id: str, call_id: str, entries: Mapping[tuple[str, str], Entry]
) -> list[CommitUnit]:
    """Return the commits to undo: those of the inner calls that committed separately, then the call's own.

    Raises `RunError` if there is no such call, and `UndoRefused` if it was undone or discarded before, or if it failed and
    has no committed inner call left to undo.
    """
    found = next((unit for unit in units if call_id in (unit.call_id, unit.place)), None)
    if found is None or found.call_id != call_id:
        near = (
            f"The call at that place has the id {found.call_id!r}."
            if found is not None
            else "`handrail runs show` lists its calls."
        )
        raise RunError(run_id, f"it has no finished call {call_id!r}", near)
    done = entries.get(("undone", call_id))
    if done is not None:
        given_up = msgspec.msgpack.decode(done.body, type=UndoneCall).discarded
        raise UndoRefused(call_id, (), f"it has already been {'discarded' if given_up else 'undone'}")
    call = Place.parse(found.place)
    inner = [
        unit
        for unit in units
        if unit.status == "ok"
        and Place.parse(unit.place).attempt_at(call)
        and ("undone", unit.call_id) not in entries
    ]
    if found.status != "ok" and not inner:
        raise UndoRefused(
            call_id, (), f"it failed ({found.status}), and nothing that it committed is left to undo"
        )
    return [*inner, found]


async def _refuse_unapplied(journal: Journal, units: Sequence[CommitUnit]) -> None:
    waiting = {(each.run_id, each.call_id) for each in await journal.calls.unapplied()}
    for unit in units:
        if (unit.run_id, unit.call_id) in waiting:
            problem = (
                "its changes are not applied yet. Open its folder with this journal first, or discard them"
            )
            raise UndoRefused(unit.call_id, (), problem)


def _refuse_files(unit: CommitUnit, row: RunRow, filesystem: UndoesFiles | None) -> None:
    if unit.files and filesystem is None:
        raise UndoRefused(
            unit.call_id, (), f"it changed files in {unit.root!r}. Pass the filesystem of that folder"
        )
    changed = unit.diff or any(place.startswith("file ") for place in unit.writes)
    if changed and not unit.files and not unit.workspaces:
        origin = row.record.forked_from.rpartition("#")[0]
        problem = f"its files belong to the run {origin!r}, so undo it there"
        raise UndoRefused(unit.call_id, (), problem if origin else "it changed files that are not recorded")


def _undo_files(filesystem: UndoesFiles, unit: CommitUnit, journal: str, begun: bool) -> Sequence[str]:
    try:
        return filesystem.undo(unit.call_id, run_id=unit.run_id, place=unit.place, journal=journal)
    except UndoRefused as refused:
        if begun and not refused.places:  # an earlier undo restored the files, but was not recorded
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

    Slices belong to a session; paths belong to a folder, no matter which session uses it. The listing of a folder depends on
    the folder, everything directly in it, and the folders above it. Any other path depends on the paths above and below it.
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
    """Return whether a change at `written` is visible at `touched`, which is a folder's listing if it is empty or ends in a slash."""
    if touched.endswith("/") or not touched:  # the folder was listed
        folder = touched.rstrip("/")
        return written == folder or written.rpartition("/")[0] == folder or folder.startswith(f"{written}/")
    return written == touched or touched.startswith(f"{written}/") or written.startswith(f"{touched}/")
