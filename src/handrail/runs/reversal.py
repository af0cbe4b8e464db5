"""Undo of a committed call: restores its files and drops its events, unless a later call depends on them.

And file changes that are recorded but not applied, for example because their folder or their staged files are missing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.threads import run_in_thread
from handrail.errors import Conflict, FileError, HandrailError, RunBusy, RunError, RunUnknown, UndoRefused
from handrail.events import CallUndone
from handrail.journal.protocol import Journal
from handrail.journal.records import CallKey, CommitUnit, Entry, RunRecord, RunRow
from handrail.run.place import Place
from handrail.run.record.begin import decode_begin, heed_undone
from handrail.run.record.format import InnerCall
from handrail.run.record.lease import acquire_run, is_executing
from handrail.run.record.notices import UndoneCall, runs_of_others, undone_in
from handrail.runs.catalog import cancel
from handrail.session import Session
from handrail.session.bus import publish_everywhere

if TYPE_CHECKING:
    from handrail.resources.directory.recovery import Unapplied


@runtime_checkable
class UndoesFiles(Protocol):
    """A filesystem that keeps the files that its commits replace, such as a `DirectoryFilesystem`."""

    def undo(
        self, call_id: str, /, *, run_id: str = "", place: str = "", journal: str = ""
    ) -> tuple[str, ...]: ...

    def check_undo(self, calls: Iterable[CallKey], /) -> None: ...


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
    Background runs that it has begun are cancelled, and what they have done stands.
    The model is told about the undo in the session's next turn. If this process has the session in memory, pass it as
    `session`, so that it drops the call immediately. Otherwise it drops the call when it is next evaluated.

    Raises `UndoRefused`, and changes nothing, if a later commit read or wrote the same paths or slices, which the error
    names, or if the call

    - failed, and has no committed inner call left to undo,
    - was undone or discarded before, or is itself the compensation of another call,
    - has changed nothing but what an undo does not reverse,
    - has changes that are not applied,
    - changed files in a folder, and no `filesystem` was passed,
    - changed files that are not recorded, or that belong to the run from which this one was forked, or
    - changed files that someone else has changed since, or whose earlier content is no longer kept.

    The same holds for each inner call that is undone with it. Only if someone changes a file while calls are being undone,
    the inner calls that were undone before that stay undone. The error's `undone` lists them. In a workspace, all are undone
    or none. If the disk reports an error, `FileError` is raised, and the calls that were undone before it stay undone.

    Raises `RunError` if the run has no such call, `RunBusy` or `SessionBusy` if a live process owns a run of the session, and
    `WorkspaceBusy` while a different run has the workspace.
    """
    began = clock.monotonic()
    await check_nobody_works(journal, await journal.runs.get(run_id))
    async with acquire_run(journal, run_id, turn="same") as row:
        done = await _undo(journal, row, call_id, filesystem, session, clock)
        started = decode_begin(row.record).traceparent
    seconds = clock.monotonic() - began
    publish_everywhere(CallUndone(call_id, done.tool, run_id, started, tuple(done.stands), seconds))
    return done


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
    waiting = {(each.run_id, each.call_id) for each in await journal.calls.unapplied()}
    own = {(unit.run_id, unit.call_id) for unit in units}
    others = await runs_of_others(journal, row.record.session_id, row.record.principal)
    for unit in units:
        _refuse_unapplied(unit, waiting)
        later = await journal.calls.later(unit)
        _refuse_built_on(unit, [each for each in later if (each.run_id, each.call_id) not in own], others)
        _refuse_files(unit, row.record, filesystem)
    effects = _all(unit.effects for unit in units)
    if effects and not any(unit.writes or unit.spawned for unit in units):
        raise UndoRefused(call_id, (), f"an undo does not reverse what it did: {', '.join(effects)}")
    *inner, outer = units
    order, undone = [*reversed(inner), outer], list[Undoing]()
    try:
        if any(unit.files for unit in units) and filesystem is not None:
            begun = {unit.call_id for unit in units if ("undoing", unit.call_id) in entries}
            await run_in_thread(lambda: _check_folder(filesystem, order, journal.id, begun))
            for unit in order:
                paths = await _undo_files(filesystem, unit, journal, clock, unit.call_id in begun)
                stopped = await _stop_spawned(journal, unit)
                done = _outcome(stopped, paths, undone if unit is outer else ())
                await _record(journal, [(unit, done)], call_id, clock)
                undone.append(done)
        else:
            stopped = [await _stop_spawned(journal, unit) for unit in order]
            every = [_outcome(unit, _paths_of(unit)) for unit in stopped[:-1]]
            every.append(_outcome(stopped[-1], _paths_of(outer), every))
            await _record(journal, [*zip(order, every, strict=True)], call_id, clock)
            undone = every
    except UndoRefused as refused:
        before = [each.call_id for each in undone]
        raise UndoRefused(refused.call_id, refused.places, refused.problem, before) from None
    finally:
        if session is not None:
            undone_now = await undone_in(journal, row.record.session_id, row.record.principal)
            await heed_undone(journal, session, undone_now)
    return undone[-1]


async def _stop_spawned(journal: Journal, unit: CommitUnit) -> CommitUnit:
    """Cancel the background runs that a call has begun. Returns the call with what they have done as its effects."""
    done = await _cancel_spawned(journal, unit) if unit.spawned else []
    return msgspec.structs.replace(unit, effects=[*unit.effects, *done]) if done else unit


async def _cancel_spawned(journal: Journal, unit: CommitUnit) -> list[str]:
    """Cancel the background runs that a call has begun, and those that they have begun. Returns what they had done."""
    done: list[str] = []
    for each in unit.spawned:
        try:
            await cancel(journal, each.run.id)
        except RunUnknown:
            continue  # it was forgotten, or this is a fork of the run that has begun it
        for own in await journal.calls.load(each.run.id):
            what = ", ".join([*own.effects, *own.writes])
            if own.status == "ok" and what:
                done.append(f"{what} (by the background run {each.run.id})")
            done += await _cancel_spawned(journal, own)
    return done


def _outcome(unit: CommitUnit, paths: Sequence[str], inner: Sequence[Undoing] = ()) -> Undoing:
    """Return the outcome of undoing a commit, with those of its inner calls, which were undone first."""
    slices = [place for place in unit.writes if place.startswith("slice ")]
    done = Undoing(unit.call_id, unit.tool, paths, slices, unit.effects)
    if not inner:
        return done
    every = (*inner, done)
    return Undoing(
        unit.call_id,
        unit.tool,
        _all(each.paths for each in every),
        _all(each.slices for each in every),
        _all(each.stands for each in every),
    )


def _paths_of(unit: CommitUnit) -> Sequence[str]:
    """Return the paths that a unit changed in workspaces."""
    return tuple(sorted(change.path for delta in unit.workspaces for change in delta.changes))


async def _record(
    journal: Journal, undone: Sequence[tuple[CommitUnit, Undoing]], call_id: str, clock: Clock
) -> None:
    """Record that commits are undone, and reverse their changes to workspaces, all or nothing.

    `call_id` is the id of the call that was to be undone. Other commits are those of its inner calls.
    """
    now, entries = clock.now().timestamp(), list[tuple[CommitUnit, Entry]]()
    for unit, done in undone:
        call = UndoneCall(
            unit.tool,
            [*done.slices, *(f"file {path}" for path in done.paths)],
            list(done.stands),
            outer="" if unit.call_id == call_id else call_id,
            is_inner=Place.parse(unit.place).outer is not None,
        )
        entries.append((unit, Entry("undone", unit.call_id, now, msgspec.msgpack.encode(call))))
    if any(unit.workspaces for unit, _ in undone):
        await journal.workspaces.undo(entries)
    else:
        for unit, entry in entries:
            await journal.calls.note(unit.run_id, entry)


def _all(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(each for found in lists for each in found))


async def undo_problems(
    journal: Journal, session_id: str, filesystem: UndoesFiles | None = None, *, principal: str
) -> Mapping[tuple[str, str], str]:
    """Return why those calls of a principal's session that changed files can't be undone now, by run id and call id. Changes nothing.

    `undo` may still refuse a call that is left out: whether calls of other sessions have used the same files since is not
    checked, because that takes reading all later runs. A problem may contain the path of the folder.
    """
    others = await runs_of_others(journal, session_id, principal)
    units = [unit for unit in await journal.calls.load_session(session_id) if unit.run_id not in others]
    changing = [unit for unit in units if any(place.startswith("file ") for place in unit.writes)]
    if not changing:
        return {}
    rows = {run_id: await journal.runs.get(run_id) for run_id in {unit.run_id for unit in changing}}
    try:
        await check_nobody_works(journal, rows[changing[0].run_id])
    except RunBusy:
        return {(unit.run_id, unit.call_id): "a run of its session is in progress" for unit in changing}
    waiting = {(each.run_id, each.call_id) for each in await journal.calls.unapplied()}
    marks = {run_id: dict[tuple[str, str], Entry]() for run_id in {unit.run_id for unit in units}}
    for run_id, entry in await journal.calls.marks(session_id):
        marks.setdefault(run_id, {})[entry.kind, entry.key] = entry
    since: dict[str, int] = {}
    for delta in (delta for unit in changing for delta in unit.workspaces):
        since[delta.name] = min(since.get(delta.name, delta.base), delta.base)
    states = {name: await journal.workspaces.files(name, since=base + 1) for name, base in since.items()}
    place = {(unit.run_id, unit.call_id): at for at, unit in enumerate(units)}

    def check(call: CommitUnit) -> None:
        run = [unit for unit in units if unit.run_id == call.run_id]
        *inner, outer = _units_of(run, call.run_id, call.call_id, marks[call.run_id])
        own = {(unit.run_id, unit.call_id) for unit in (*inner, outer)}
        for unit in (*inner, outer):
            _refuse_unapplied(unit, waiting)
            later = (
                each
                for each in units[place[unit.run_id, unit.call_id] + 1 :]
                if (each.run_id, each.call_id) not in own
                and ("undone", each.call_id) not in marks[each.run_id]
            )
            _refuse_built_on(unit, later, others)
            _refuse_files(unit, rows[call.run_id].record, filesystem)
            changes = [(delta.name, each) for delta in unit.workspaces for each in delta.changes]
            changed = [
                each.path for name, each in changes if states[name].get(each.path, each.new) != each.new
            ]
            if changed:
                raise UndoRefused(unit.call_id, changed, "these paths have been changed since")
        if filesystem is not None:
            _check_folder(filesystem, [*reversed(inner), outer], journal.id, ())

    def check_all() -> Mapping[tuple[str, str], str]:
        problems: dict[tuple[str, str], str] = {}
        for unit in changing:
            try:
                check(unit)
            except UndoRefused as refused:
                where = f" ({', '.join(refused.places)})" if refused.places else ""
                problems[unit.run_id, unit.call_id] = f"{refused.problem}{where}"
            except (Conflict, FileError) as error:
                problems[unit.run_id, unit.call_id] = str(error)
        return problems

    return await run_in_thread(check_all)


async def check_nobody_works(journal: Journal, row: RunRow) -> None:
    """Raise `RunBusy` if a live process owns a run of the same session. A run that this process could not release does not count."""
    record = row.record
    for other in await journal.runs.list(session_id=record.session_id, principal=record.principal):
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
            else _around(units, call_id, entries) or "`handrail runs show` lists its calls."
        )
        raise RunError(run_id, f"it has no finished call {call_id!r}", near)
    done = entries.get(("undone", call_id))
    if done is not None:
        given_up = msgspec.msgpack.decode(done.body, type=UndoneCall).discarded
        raise UndoRefused(call_id, (), f"it has already been {'discarded' if given_up else 'undone'}")
    call = Place.parse(found.place)
    if call.kind != "call":
        raise UndoRefused(call_id, (), "it was made to undo another call, or to find out what that had done")
    inner = [
        unit
        for unit in units
        if unit.status == "ok"
        and unit.place.startswith(call.prefix())
        and ("undone", unit.call_id) not in entries
    ]
    if found.status != "ok" and not inner:
        raise UndoRefused(
            call_id, (), f"it failed ({found.status}), and nothing that it committed is left to undo"
        )
    return [*inner, found]


def _around(units: Sequence[CommitUnit], call_id: str, entries: Mapping[tuple[str, str], Entry]) -> str:
    """Return a sentence that names the call around an inner call that committed into it; "" if there is none."""
    for (kind, key), entry in entries.items():
        if kind == "inner call" and msgspec.msgpack.decode(entry.body, type=InnerCall).call_id == call_id:
            place = Place.parse(key)
            around = next((unit for unit in units if place.attempt_at(Place.parse(unit.place))), None)
            if around is not None:
                return f"It was made inside the call {around.call_id!r}, and is undone with that call."
    return ""


def _refuse_unapplied(unit: CommitUnit, waiting: Collection[tuple[str, str]]) -> None:
    if (unit.run_id, unit.call_id) in waiting:
        problem = "its changes are not applied yet. Open its folder with this journal first, or discard them"
        raise UndoRefused(unit.call_id, (), problem)


def _refuse_files(unit: CommitUnit, record: RunRecord, filesystem: UndoesFiles | None) -> None:
    if unit.files and not isinstance(filesystem, UndoesFiles):
        raise UndoRefused(
            unit.call_id, (), f"it changed files in {unit.root!r}. Pass the filesystem of that folder"
        )
    changed = unit.diff or any(place.startswith("file ") for place in unit.writes)
    if changed and not unit.files and not unit.workspaces:
        origin = record.forked_from.rpartition("#")[0]
        problem = f"its files belong to the run {origin!r}, so undo it there"
        raise UndoRefused(unit.call_id, (), problem if origin else "it changed files that are not recorded")


def _check_folder(
    filesystem: UndoesFiles, units: Iterable[CommitUnit], journal: str, begun: Collection[str]
) -> None:
    """Raise `UndoRefused` if the files of these units can't be undone in this order. An earlier undo may have restored those in `begun`."""
    keys: list[CallKey] = []
    for unit in units:
        key = CallKey(unit.call_id, unit.run_id, unit.place, journal)
        if unit.files and (unit.call_id not in begun or _is_kept(filesystem, key)):
            keys.append(key)
    filesystem.check_undo(keys)


def _is_kept(filesystem: UndoesFiles, key: CallKey) -> bool:
    try:
        filesystem.check_undo([key])
    except UndoRefused as refused:
        return bool(refused.places)
    return True


async def _undo_files(
    filesystem: UndoesFiles, unit: CommitUnit, journal: Journal, clock: Clock, begun: bool
) -> Sequence[str]:
    """Restore the files of a unit, in its folder. Its workspaces are restored when the undo is recorded. Returns the paths of both."""
    if not unit.files:
        return _paths_of(unit)
    await journal.calls.note(unit.run_id, Entry("undoing", unit.call_id, clock.now().timestamp(), b""))

    def restore() -> Sequence[str]:
        try:
            return filesystem.undo(unit.call_id, run_id=unit.run_id, place=unit.place, journal=journal.id)
        except UndoRefused as refused:
            if begun and not refused.places:  # an earlier undo restored the files, but was not recorded
                return [place.removeprefix("file ") for place in unit.writes if place.startswith("file ")]
            raise

    return [*await run_in_thread(restore), *_paths_of(unit)]


def _refuse_built_on(unit: CommitUnit, later: Iterable[CommitUnit], others: Collection[str]) -> None:
    """Raise `UndoRefused` if one of the later commits depends on this one. `others` are as for `built_on`."""
    against: dict[str, None] = {}
    for other in later:
        against.update(dict.fromkeys(built_on(unit, other, others)))
    if against:
        raise UndoRefused(unit.call_id, list(against), "a later call has read or changed what it wrote")


def built_on(unit: CommitUnit, other: CommitUnit, others: Collection[str] = ()) -> list[str]:
    """Return the places that `unit` changed and that `other`, a later commit, read or changed.

    `others` are the runs of other principals in sessions with the same id. Slices belong to a session; paths belong to a folder, no matter which session uses it. The listing of a folder depends on
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
        elif unit.session_id == other.session_id and other.run_id not in others and place in touched:
            found.append(place)
    return found


def meet(written: str, touched: str) -> bool:
    """Return whether a change at `written` is visible at `touched`, which is a folder's listing if it is empty or ends in a slash."""
    if touched.endswith("/") or not touched:  # the folder was listed
        folder = touched.rstrip("/")
        return written == folder or written.rpartition("/")[0] == folder or folder.startswith(f"{written}/")
    return written == touched or touched.startswith(f"{written}/") or written.startswith(f"{touched}/")


log = logging.getLogger("handrail.files")


async def unapplied(journal: Journal, run_id: str | None = None) -> Sequence[Unapplied]:
    """Return the calls whose recorded file changes are not applied, each with its folder and the reason.

    Without `run_id`, the calls of all runs are returned.
    """
    units = [unit for unit in await journal.calls.unapplied() if run_id in (None, unit.run_id)]
    if not units:
        return ()
    from handrail.resources.directory.recovery import unapplied_in

    return await run_in_thread(lambda: tuple(each for unit in units for each in unapplied_in(unit)))


async def discard(
    journal: Journal, run_id: str, call_id: str, *, clock: Clock = SYSTEM_CLOCK
) -> Sequence[str]:
    """Give up the file changes of a call that are recorded but not applied. Returns their paths.

    What the call changed in the session stays, and the model is told in the session's next turn that the files were not
    changed. Those changes that had already reached the folder are reverted, and other calls may change its files again: now, if the
    folder is where it was, or else when it is next opened with this journal. Raises `RunError` if the call has no such changes, and
    `RunBusy` or `SessionBusy` if a live process owns a run of the session.
    """
    await check_nobody_works(journal, await journal.runs.get(run_id))
    async with acquire_run(journal, run_id, turn="same"):
        return await _discard(journal, run_id, call_id, clock)


async def _discard(journal: Journal, run_id: str, call_id: str, clock: Clock) -> Sequence[str]:
    found = [
        unit for unit in await journal.calls.unapplied() if (unit.run_id, unit.call_id) == (run_id, call_id)
    ]
    if not found:
        raise RunError(
            run_id,
            f"its call {call_id!r} has no changes that wait to be applied",
            "`handrail runs show` lists the calls that have such changes.",
        )
    unit = found[0]
    places = [place for place in unit.writes if place.startswith("file ")]
    given_up = UndoneCall(unit.tool, places, discarded=True)
    now = clock.now().timestamp()
    await journal.calls.note(run_id, Entry("undone", call_id, now, msgspec.msgpack.encode(given_up)))
    await journal.calls.applied(unit)
    await _release(journal, unit)
    return [place.removeprefix("file ") for place in places]


async def _release(journal: Journal, unit: CommitUnit) -> None:
    """Revert and remove what a call that was given up has staged, where its folders are in place. Nobody else may do that."""
    from handrail.resources.directory import DirectoryFilesystem
    from handrail.resources.directory.recovery import pending_in

    for manifest in await run_in_thread(lambda: pending_in(unit)):
        try:
            with DirectoryFilesystem(manifest.root, staging=manifest.staging) as files:
                await files.recover(journal)
        except HandrailError as error:  # the next run with the folder and this journal tries again
            log.warning("what %r had staged in %r is still there: %s", unit.call_id, manifest.root, error)
