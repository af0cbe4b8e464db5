"""Erasing a person from a journal, and exporting everything of theirs before that.

The order makes an erasure that is cut off harmless. First, copies outside the journal go: those that folders keep for undo, and this
host's copies of workspaces. Then one transaction deletes everything in the journal. Then the account and the audit log follow, and
the files are rewritten without the bytes of what was deleted. Called again, it goes on where it was cut off.
"""

from __future__ import annotations

import contextlib
import glob
import shutil
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.threads import run_in_thread
from handrail.errors import ErasureRefused, HandrailError, JournalAltered, RunError
from handrail.journal.protocol import Note
from handrail.journal.records import CallKey, Holdings
from handrail.resources.workspace.workspace import default_cache
from handrail.runs.catalog import cancel as cancel_run
from handrail.runs.copies import export, get_files, make_empty, write_file

if TYPE_CHECKING:
    from handrail.journal.protocol import Accounts, Journal

_PATIENCE = 60.0
"""Maximum seconds to wait for processes that cancel their runs."""


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """What was erased of a person, or would be, and what stays."""

    holdings: Holdings
    """What the journal held."""
    has_account: bool = False
    entries: int = 0
    """The number of entries of the audit log by this person, or naming them."""
    folders: Sequence[str] = ()
    """The folders that their calls have changed. The files there stay. What was kept to undo these calls is deleted."""
    unreachable: Sequence[str] = ()
    """Those of the folders that could not be opened, so that what they keep for undo stays."""
    copies: Sequence[str] = ()
    """Copies of the journal beside it, which an upgrade has left. They stay."""
    is_compact: bool = True
    """Whether no deleted bytes are left in the files. If not, another process was reading: erase the person again to try again."""

    @property
    def has_any(self) -> bool:
        """Whether there was anything of this person."""
        held = self.holdings
        return bool(
            held.sessions or held.runs or held.votes or held.shared or self.has_account or self.entries
        )


async def erase(
    journal: Journal,
    principal: str,
    *,
    cancel: bool = False,
    dry: bool = False,
    accounts: Accounts | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Erasure:
    """Delete everything of a person: runs, sessions, decisions, blobs, workspaces that only they used, account and audit entries.

    `accounts` are the users of a server whose journal is a file. For a journal in PostgreSQL, they are found there. With `cancel`,
    unfinished runs are cancelled first. With `dry`, nothing is changed, and the outcome says what would be deleted. Their votes in
    the runs of others stay, and are listed. What was erased can't be restored, except from a backup.

    Raises `ErasureRefused`, and deletes nothing, if one of their runs is not over, or if a call's file changes are not applied.
    Raises `JournalAltered` if something other than Handrail has altered the lists of sessions. Raises `JournalError` if a file can't be
    rewritten, for example because the disk is full; everything is deleted then, and the call can be repeated.
    """
    accounts = journal.accounts if accounts is None else accounts
    held = await journal.upkeep.holdings(principal)
    if cancel and not dry:
        held = await _without_unfinished(journal, held, clock)
    if (held.unfinished or held.unapplied) and not dry:
        raise ErasureRefused(principal, held.unfinished, held.unapplied)
    folders, unreachable = await _forget_copies(journal, held, dry)
    entries, has_account = 0, accounts is not None and accounts.find(principal) is not None
    if accounts is not None:
        entries = sum(note.is_about(principal) for _, note in accounts.notes(who=None, after=0, limit=None))
    is_compact = True
    if not dry:
        held = await journal.upkeep.erase(principal)
        if accounts is not None:
            details = {"digest": held.digest, "runs": len(held.runs), "entries": entries}
            text = msgspec.json.encode(details).decode()
            note = Note(journal.clock.now().timestamp(), "", "person erased", "", text)
            accounts.erase(principal, note)
        is_compact = await journal.upkeep.compact()
        if accounts is not None:
            is_compact &= await run_in_thread(accounts.compact)
    return Erasure(
        holdings=held,
        has_account=has_account,
        entries=entries,
        folders=folders,
        unreachable=unreachable,
        copies=sorted(glob.glob(f"{glob.escape(journal.path)}.schema-*")),
        is_compact=is_compact,
    )


async def _without_unfinished(journal: Journal, held: Holdings, clock: Clock) -> Holdings:
    """Cancel the unfinished runs, also those that begin because one has ended, and wait for the processes that execute them."""
    until = clock.monotonic() + _PATIENCE
    while held.unfinished and clock.monotonic() < until:
        for run_id, _ in held.unfinished:
            await cancel_run(journal, run_id)
        held = await journal.upkeep.holdings(held.principal)
        if held.unfinished:
            await journal.queue.wait(1.0)
    return held


async def _forget_copies(journal: Journal, held: Holdings, dry: bool) -> tuple[list[str], list[str]]:
    """Delete the copies of a person's files outside the journal. Returns the folders, and those that could not be opened."""
    kept: dict[tuple[str, str], list[CallKey]] = {}
    unreachable: list[str] = []
    for run_id in held.runs:
        try:
            units = await journal.calls.load(run_id)
        except JournalAltered:  # what it says about folders can't be trusted
            unreachable.append(f"those of the altered run {run_id}")
            continue
        for unit in units:
            for manifest in unit.files:
                place = str(manifest["root"]), str(manifest["staging"])
                kept.setdefault(place, []).append(CallKey(unit.call_id, run_id, unit.place, journal.id))

    def forget() -> list[str]:
        for name in held.workspaces:
            shutil.rmtree(default_cache() / journal.id / name, ignore_errors=True)
        return [place[0] for place, calls in kept.items() if not _forget_kept(*place, calls)]

    if not dry:
        unreachable += await run_in_thread(forget)
    return sorted({root for root, _ in kept}), unreachable


def _forget_kept(root: str, staging: str, calls: Sequence[CallKey]) -> bool:
    from handrail.resources.directory import DirectoryFilesystem

    with contextlib.suppress(HandrailError, OSError):
        if not Path(staging).exists():
            return Path(root).exists()
        with DirectoryFilesystem(root, staging=staging) as files:
            files.forget(calls)
            return True
    return False


class PersonExport(msgspec.Struct, frozen=True, kw_only=True):
    """What was exported of a person."""

    folder: str
    runs: Sequence[str] = ()
    left_out: Sequence[tuple[str, str]] = ()
    """The runs that can't be exported, such as those that have not begun, with the reason."""
    workspaces: Sequence[str] = ()


async def export_person(
    journal: Journal, principal: str, folder: str | PathLike[str], *, accounts: Accounts | None = None
) -> PersonExport:
    """Write everything of a person to a new or empty folder, which only its owner can read.

    Each run is a file that `import_` reads, and each workspace that only they used is a folder. `person.json` has the account, the
    sign-ins, the audit entries, and what else `erase` would list. Raises `FileError` if the folder is not empty or can't be written.
    """
    accounts = journal.accounts if accounts is None else accounts
    target, held = Path(folder).absolute(), await journal.upkeep.holdings(principal)
    make_empty(target)
    target.chmod(0o700)
    files: dict[str, str] = {}
    left_out: list[tuple[str, str]] = []
    for number, run_id in enumerate(held.runs, 1):
        name = f"run-{number}.jsonl"
        try:
            await export(journal, run_id, target / name)
            files[name] = run_id
        except RunError as error:
            left_out.append((run_id, str(error)))
    for name in held.workspaces:
        await get_files(journal, name, target / "workspaces" / name)
    about: dict[str, Any] = {"holdings": held, "files": files, "left_out": left_out}
    if accounts is not None:
        account = accounts.find(principal)
        if account is not None:
            about["account"] = {
                "name": account.name,
                "roles": account.roles,
                "added_at": account.added_at,
                "notify": account.notify,
            }
        about["sign_ins"] = [
            {"host": each.host, "address": each.address, "began_at": each.began_at, "ends_at": each.ends_at}
            for each in accounts.sessions()
            if each.name == principal
        ]
        notes = accounts.notes(who=None, after=0, limit=None)
        about["audit"] = [note for _, note in notes if note.is_about(principal)]
    encoded = msgspec.json.format(msgspec.json.encode(about), indent=2)
    write_file(principal, target / "person.json", [encoded, b"\n"])
    return PersonExport(
        folder=str(target), runs=list(files.values()), left_out=left_out, workspaces=held.workspaces
    )
