"""`DirectoryFork`: one call's version of a real folder, until it is committed or dropped."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from handrail.concurrency.claims import SLICE, Places, Stop
from handrail.errors import Conflict, ContextError, ContextExpired, FileError
from handrail.journal.protocol import Journal
from handrail.journal.records import CallKey
from handrail.resources.directory.claim_table import FolderClaim
from handrail.resources.directory.commit import Commit
from handrail.resources.directory.content import (
    FIRST_VERSION,
    NOT_REGULAR,
    Folder,
    Held,
    OnDisk,
    Special,
    facts_for_new_content,
    facts_of,
    identity,
    is_pipe_or_socket,
    version_of,
)
from handrail.resources.directory.disk import read_open
from handrail.resources.directory.layers import Entry, LayerStack
from handrail.resources.directory.recovery import recover
from handrail.resources.directory.stager import stage_commit
from handrail.resources.directory.store import DirectoryStore, Links, startup_links
from handrail.resources.facts import Attributes, Facts, is_portable, read_attributes
from handrail.resources.mount import Layers
from handrail.resources.paths import ParsedPath, ancestors, join, on_disk, reach, split
from handrail.resources.staging import PREPARED, FileChange, FileFork, LinkedFileView
from handrail.resources.startup_files import is_allowed, makes_repository, run_by, run_by_folder
from handrail.resources.store import Files
from handrail.resources.tree import (
    ABSENT,
    TOP,
    Base,
    Content,
    FileTree,
    Link,
    Listing,
    Node,
    is_file,
    is_link,
    writes,
)

DIRECT = "direct"
"""The owner of a fork that no call made, but a write directly to the folder."""
_KEPT_FILE, _KEPT = 1024 * 1024, 64 * 1024 * 1024
"""Maximum bytes per file, and in total, that a fork keeps in memory for repeatable reads."""


class DirectoryTree(FileTree):
    """The tree of a fork of a real folder. It refuses changes to the installation that runs Handrail."""

    __slots__ = ("programs", "store")

    def __init__(self, base: Base, store: DirectoryStore) -> None:
        super().__init__(base, store.tick)
        self.store = store
        self.programs: Mapping[str, str] | None = None
        """The changed or deleted startup files, each with the program that runs it; None if they must be found again."""

    def put(self, folder: str, name: str, node: Node, old: Node, base: Node | None = None) -> None:
        if self.store.jail.installed:
            self.store.refuse_installed(join(folder, name), around=not node.is_folder)
        if self.over is None:
            _ = self.store.area.mine  # report a read-only folder now, not at the commit
        self.programs = None
        if isinstance(node.data, bytes):
            node = Node(node.version, Held(node.data, facts_for_new_content(old)), node.modified)
        super().put(folder, name, node, old, base)


class DirectoryFork(FileFork):
    """A fork of a real folder. Its writes are kept in memory and in the staging folder until it commits.

    Small files that it has read are kept in memory, up to a limit. Other files are read from the disk each time. A commit to
    the folder checks that nobody else wrote the same paths and then renames the writes into place. Until then the folder is unchanged.
    Besides the operations of `Filesystem`, the fork provides layers for a command's overlay (`layers`) and takes over what
    the command wrote (`absorb`).
    """

    __slots__ = (
        "_began",
        "_checked_at",
        "_claimed_places",
        "_commit",
        "_kept_bytes",
        "_links",
        "_mounted",
        "_run",
        "_stack",
        "_token",
    )

    _tree: DirectoryTree  # pyright: ignore[reportIncompatibleVariableOverride]  # set once
    _store: DirectoryStore  # pyright: ignore[reportIncompatibleVariableOverride]  # set once
    _links: Links  # pyright: ignore[reportIncompatibleVariableOverride]  # set once

    is_durable: ClassVar[bool] = True

    def __init__(
        self, parent: Files, line: tuple[FileFork, ...], store: DirectoryStore, owner: str, writable: bool
    ) -> None:
        super().__init__(parent, line, store, owner, writable, DirectoryTree(parent._tree, store))
        self._links = Links(store, self._tree)  # pyright: ignore[reportIncompatibleVariableOverride]  # set once
        self._commit: Commit | None = None
        self._stack: LayerStack | None = None
        self._kept_bytes = 0
        self._mounted = 0
        self._began = 0 if line else self._store.area.table.position()
        self._checked_at: int | None = None
        """The position in the table of claims that was noted before this fork's reads were checked; None if they were not yet."""
        self._claimed_places: Places | None = None
        """What this fork claims; None for everything that it read and changed."""
        self._run = ""
        """The run that commits this fork, with its journal; "" if none does."""
        self._token: Path | None = None
        """A folder that stands for this fork in the table of claims, if it claims something but changes nothing."""

    @property
    def is_large(self) -> bool:
        """Whether going through the fork's files could stop the event loop, so that a thread must do it."""
        if self._stack is not None:
            return True  # a command may have made any number of files, also some that were not absorbed
        left = SLICE
        for by_folder in (self._tree.over, self._tree.seen, self._tree.listed):
            for found in by_folder.values() if by_folder else ():
                left -= len(found.members if isinstance(found, Listing) else found) or 1
                if left < 0:
                    return True
        return False

    def handler_view(self) -> LinkedFileView:
        return LinkedFileView(self)

    # --- hooks for links and the disk -------------------------------------------------------------

    def resolved(self, path: str, /) -> str:
        """Return where a path leads in this fork: normalized, with every link resolved.

        Raises `PathRefused` if the path is invalid or hidden, has too many links, or leads out of the root.
        """
        with self._store.lock:
            return self._at(path).path

    def _keep(self, content: Content, data: bytes) -> None:
        if isinstance(content, OnDisk) and not content.kept and len(data) <= _KEPT_FILE:
            self._kept_bytes += len(data)
            if self._kept_bytes <= _KEPT:
                content.keep(data)

    def _save(self, at: ParsedPath, data: bytes, old: Node) -> None:
        if isinstance(old.data, Special):
            raise FileError(at.path, NOT_REGULAR)
        super()._save(at, data, old)

    def _put_again(self, folder: str, name: str, node: Node, source: str) -> None:
        facts = self._facts_of(source, node) if node.is_folder else None
        if facts is None:
            super()._put_again(folder, name, node, source)
        else:
            new = Folder(self._store.tick(), None, node.modified, facts)
            self._tree.put(folder, name, new, self._tree.look(folder, name))

    def _facts_of(self, path: str, node: Node) -> Facts | None:
        if node.is_folder and node.version >= FIRST_VERSION:
            return self._store.jail.facts(path)
        return facts_of(node)

    # --- replay -----------------------------------------------------------------------------------

    def _lasting(self, path: str, node: Node) -> str:
        return f"{node.version:x}" if node.version >= FIRST_VERSION else ""

    def _change(self, path: str, node: Node, base: str) -> FileChange:
        if isinstance(node.data, Link):
            return FileChange(path, "link", os.fsencode(node.data.target), base=base)
        if isinstance(node.data, Special):
            kind, facts = node.data.kind, node.data.facts
            if kind != "device":
                return FileChange(path, "pipe" if kind == "pipe" else "socket", facts=facts, base=base)
        return super()._change(path, node, base)

    def _node_again(self, change: FileChange, old: Node) -> Node:
        tick, now, facts = self._store.tick(), self._store.clock.now(), change.facts
        if change.kind == "link":
            return Node(tick, Link(os.fsdecode(change.data)), now)
        if change.kind in _KINDS:
            return Node(tick, _new_special(change.path, _KINDS[change.kind], facts), now)
        if change.kind == "folder":
            return Node(tick, None, now) if facts is None else Folder(tick, None, now, facts)
        return Node(tick, Held(change.data, facts), now)

    def _bytes_of(self, data: Any) -> bytes:
        """Return a file's content; for a link, its target as written; for a pipe, a socket or a device, no bytes."""
        if isinstance(data, Special):
            return b""
        return os.fsencode(data.target) if isinstance(data, Link) else super()._bytes_of(data)

    def startup_files(self) -> list[tuple[str, str]]:
        """Return each changed or deleted startup file with the program that runs it, except the files that are allowed by name."""
        if not self._tree.over:
            return []
        with self._store.lock:
            found, allowed = self._run_later(), self._store.startup_files
            return sorted((path, program) for path, program in found.items() if not is_allowed(path, allowed))

    def _run_later(self) -> Mapping[str, str]:
        # While the fork is open, somebody may create a link to a changed file. A prepared fork keeps the last result,
        # on which the approval was decided.
        if self._tree.programs is None or self._state != PREPARED:
            self._tree.programs = self._find_programs()
        return self._tree.programs

    def _find_programs(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        through = self._links.run_as
        for path, node, base in self._each(list(self._tree.changes())):
            if is_file(node) or is_file(base):
                is_linked = is_link(node) or is_link(base)
                found[path] = (
                    run_by(path, is_link=is_linked)
                    or run_by_folder(path, self._has_ever, is_link=is_linked)
                    or through.get(path, "")
                )
            if not found.get(path) and makes_repository(path, self._had, self._has):
                found[path] = "git"
        # A file also counts if a link at the path of a startup file, such as `.git/hooks/pre-commit`, leads to it or to a
        # folder that contains it. Such links are looked for at the root and in every folder around a change.
        around = dict.fromkeys(("", *(folder for path in found for folder in ancestors(path))))
        for link, target in startup_links(self._store.jail, around) if found else ():
            for path in self._each(list(found)):
                if not found[path] and (path == target or path.startswith(f"{target}/")):
                    found[path] = f"{run_by(link, is_link=True)}, as {link}"
        return {path: program for path, program in found.items() if program}

    def _has(self, path: str) -> bool:
        return self._tree.look(*split(path)).version > 0

    def _had(self, path: str) -> bool:
        return self._tree.base.look(*split(path)).version > 0

    def _has_ever(self, path: str) -> bool:
        return self._has(path) or self._had(path)

    # --- the end of a call ------------------------------------------------------------------------

    def stage(self, key: CallKey, /, *, synced: bool = False) -> Mapping[str, Any] | None:
        """Write everything that the commit needs to the staging folder, after `prepare`.

        Returns the manifest, from which another process can finish the commit, or None if there is nothing
        to commit. `key` names the call and the journal that will record it. Without a journal, the commit
        counts as made as soon as anything is renamed. With `synced`, the staged files survive a power cut.
        Raises `ContextError` unless the fork is prepared and has no outer fork, `Conflict` if a file has changed meanwhile,
        and `FileError` if the folder was moved, if a path can't be committed, or if the disk reports an error.
        """
        with self._store.lock:
            if self._state != PREPARED or self._line:
                raise ContextError(
                    f"the fork of {self._owner!r} is not prepared, or it has an outer fork, so it can't be staged. "
                    "Call prepare() first, and stage only an outermost fork"
                )
        store = self._store
        self._run = f"{key.journal}/{key.run_id}" if key.journal and key.run_id else ""
        if self._tree.over and self._commit is None:
            commit = self._commit = stage_commit(
                store.jail, store.area, self._tree.over, key, self.pace, synced=synced
            )
            if commit is not None:
                commit.claim = self._claim(commit.claim.id, key.journal)
        return None if self._commit is None else msgspec.to_builtins(self._commit.manifest)

    def places(self, *, reads: bool = True) -> dict[str, int]:
        places = super().places(reads=reads)
        self._claimed_places = places
        return places

    def stale(self) -> tuple[str, ...]:
        if not self._line:
            self._checked_at = self._store.area.table.position()
        return super().stale()

    def prepare(self) -> None:
        if not self._line and self._checked_at is None:
            self._checked_at = self._store.area.table.position()
        super().prepare()

    def others_committed(self) -> bool:
        """Return whether a call of any process has, or may have, committed to the folder since this fork was made."""
        own = "" if self._commit is None else self._commit.claim.id
        return self._store.area.table.has_commits_since(self._began, own)

    def enter(self, stop: Stop, *, keep: bool) -> None:
        """Claim what this fork read and changes, so that no other process changes it before `apply`. Call `stage` first.

        Waits for clashing commits of other processes until `stop` returns True. With `keep`, the claim is held until the fork is applied
        or dropped. Otherwise the changes are checked when they are applied, and what was only read is checked now.
        Raises the errors of `ClaimTable.enter`.
        """
        area = self._store.area
        area.enter_root()
        if self._commit is not None:
            if keep:
                self._commit.enter(stop)
            return
        keep = keep and area.is_own()
        if keep and self._token is None:  # a second try keeps the first one's
            self._token = area.new_folder("claim")
        id = "" if self._token is None else f"{self._token.parent.name}/{self._token.name}"
        area.table.enter(self._claim(id), keep=keep, stop=stop)

    def _claim(self, id: str, journal: str = "") -> FolderClaim:
        places = self.places() if self._claimed_places is None else self._claimed_places
        is_call = self._owner != DIRECT
        return FolderClaim(
            id, places, journal, self._checked_at, is_call=is_call, run=self._run, recheck=self._recheck
        )

    def _recheck(self) -> None:
        """Raise `Conflict` if what this fork read, or based its changes on, is no longer the same file. Staging may have linked it."""
        with self._store.lock:
            based = [(folder, name, base) for folder, name, _, base in writes(self._tree.over or {})]
            changed = {
                join(folder, name)
                for folder, name, node in self._each([*based, *self._tree.reads()])
                if identity(self._tree.base.look(folder, name).version) != identity(node.version)
            }
            listed = (self._tree.listed or {}).items()
            changed |= {
                f"{folder}/" for folder, listing in listed if self._tree.base.stamp(folder) != listing.stamp
            }
        if changed:
            raise Conflict(sorted(changed))

    async def recover(self, journal: Journal) -> None:
        """Finish the commits to this folder that a journal recorded and a dead process did not apply."""
        store = self._store
        await recover(store.jail, store.area, store.direct, journal)

    def apply(self, *, synced: bool = False) -> None:
        """Commit the changes to the parent, which is the folder itself or an outer fork.

        A commit to the folder can still fail. Then everything is restored, or the error names the paths that could not be
        restored. Raises `Conflict` if someone has changed a file since `prepare`, and `FileError` if another program is
        writing to a file or the disk reports an error. Raises `ContextError` unless the fork is prepared. With `synced`, a
        commit to the folder survives a power cut.
        """
        if self._line:
            self._apply_inside()
            return
        asked_for = self._commit is not None
        if self._state == PREPARED and self._tree.over:
            try:
                self.stage(CallKey(f"{self._owner} ({self._store.area.number()})"), synced=synced)
                if self._commit is not None:
                    self._commit.apply(synced=synced, pace=self.pace)
            except BaseException:
                if not asked_for:
                    self.drop()
                raise  # a caller that staged the commit drops it itself, once it knows that the commit is not recorded
            self._tree.over = None  # the changes are part of the folder now
        super().apply()
        self._clear()
        if not asked_for:
            self.applied()

    def _apply_inside(self) -> None:
        with self._store.lock:
            parent = self._line[-1]
            was_over = self._is_outer_over()
            super().apply()
            if isinstance(parent, DirectoryFork):
                parent._links.run_as.update(self._links.run_as)
            is_over = was_over or self._is_outer_over()
            if self._stack is not None and isinstance(parent, DirectoryFork) and not is_over:
                parent._open_stack().adopt(self._stack, parent._tree.over or {})
                self._stack = None
        self._clear()

    def applied(self) -> None:
        """Mark the commit as finished, and keep what it displaced for `undo`."""
        commit, self._commit = self._commit, None
        if commit is not None:
            self._put_away(commit)
        self._give_up_claim()

    def _give_up_claim(self) -> None:
        token, self._token = self._token, None
        if token is not None:
            self._store.area.disk.forget(token)

    def _put_away(self, commit: Commit) -> None:
        """Keep the files that a finished commit displaced, for `undo`."""
        self._store.area.retire(commit)

    def revert(self) -> None:
        """Revert an applied commit, because another part of the transaction failed.

        Call `drop` afterwards to discard the commit.
        """
        if self._commit is not None:
            self._commit.revert()

    def drop(self) -> None:
        """Close the fork and discard its changes."""
        with self._store.lock:
            super().drop()
            commit, self._commit = self._commit, None
        if commit is not None:
            self._store.area.discard(commit)
        self._give_up_claim()
        self._clear()

    def _clear(self) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.forget()

    # --- commands ---------------------------------------------------------------------------------

    def layers(self) -> Layers:
        """Return the layers to mount so that a command sees this fork and writes into it.

        All changes so far are written to disk. The layers of outer forks do not change while this fork exists. Only
        one command may run at a time, and nothing else may change this fork before `absorb`. Raises `ContextExpired` if
        this fork accepts no more changes, and `FileError` if the folder was moved or replaced.
        """
        with self._store.lock:
            self._enter()
            if self._sealed:
                raise ContextExpired(self._owner)
            self._store.jail.check_in_place()
            lowers: list[Path] = [self._store.jail.root]
            for fork in self._line:
                if isinstance(fork, DirectoryFork):
                    outer = fork._open_stack()
                    outer.write_ahead(fork._tree.over or {}, self._turn)
                    lowers[:0] = outer.freeze(fork._tree.over or {})
            stack = self._open_stack()
            stack.write_ahead(self._tree.over or {}, self._turn)
            upper = stack.ready(self._tree.over or {})
            lowers[:0] = stack.below
            work = stack.work()
            self._mounted = self._store.tick()
            return Layers(tuple(lowers), upper.folder, work, os.stat(work).st_ctime_ns)

    def absorb(self, mounted_at: int) -> tuple[str, ...]:
        """Take over every path that a command changed in the upper layer, as if this call had written it.

        `mounted_at` is `Layers.mounted_at`. Returns the paths taken over, sorted; a folder's path ends in `/`.
        Raises `Conflict` with the paths that someone else has also changed since the mount, because the command may
        have seen either version. Raises `FileError` if the folder was moved or replaced, or if a path can't be taken over,
        such as a device, which could lead out of the folder. Raises `EffectRefused` if the fork is read-only and a path was
        changed. After any of these errors, the fork must be dropped. Raises `ContextError` if `layers` has not been called.
        """
        with self._store.lock:
            self._enter()
            stack = self._open_stack()
            top = stack.top
            if top is None:
                raise ContextError(f"the fork of {self._owner!r} has no layers. Call layers() first")
            self._store.jail.check_in_place()  # the command opened the folder by its path, where a different folder may be now
            entries: list[Entry] = []
            for some in top.changed():
                entries += some
                self._turn()
            for entry in self._each(entries):
                if entry.kind == "other" and not is_pipe_or_socket(entry.status):
                    problem = "a command created a device here, which could lead out of the folder. Remove it"
                    raise FileError(entry.path, problem)
            newer = {entry.path for entry in self._each(entries) if self._is_newer(entry, mounted_at)}
            if newer:
                raise Conflict(sorted(newer))
            taken: list[str] = []
            for entry in self._each(entries):
                self._enter(entry.path)
                if self._take(entry, top.folder, stack):
                    taken.append(f"{entry.path}/" if entry.kind == "folder" else entry.path)
            return tuple(sorted(taken))

    def _turn(self) -> None:
        """Give up the lock for a moment. Raises `ContextExpired` if the fork, or an outer one, was dropped meanwhile."""
        self.pace.turn(self._store.lock)
        self._enter()

    def _open_stack(self) -> LayerStack:
        if self._stack is None:
            self._stack = LayerStack(self._store.area)
        return self._stack

    def _is_newer(self, entry: Entry, mounted_at: int) -> bool:
        """Return whether someone else has, or may have, changed the path of this entry since the mount."""
        folder, name = split(entry.path)
        now = self._tree.base.look(folder, name)
        if not now.version:
            # If the file was copied up from a lower layer, either someone has deleted it since, or the command moved it to this path.
            return entry.copied and self._other_names(folder, mounted_at)
        if now.is_folder and (entry.kind != "folder" or entry.opaque):
            below = self._parent._below(entry.path, now)
            return any(self._since(node, mounted_at) for _, _, node in below)
        return self._since(now, mounted_at)

    def _other_names(self, folder: str, mounted_at: int) -> bool:
        """Return whether names in a folder may have changed since the mount.

        If the folder does not exist, its nearest existing parent is checked instead.
        """
        for fork in self._line:
            if (fork._tree.stamps or {}).get(folder, 0) > self._mounted:
                return True
        found = self._store.jail.look(folder or ".")
        while found is None:
            folder = split(folder)[0]
            found = self._store.jail.look(folder or ".")
        return found[0].st_ctime_ns > mounted_at

    def _since(self, node: Node, mounted_at: int) -> bool:
        if node.version >= FIRST_VERSION:
            return not node.is_folder and node.version & (1 << 64) - 1 > mounted_at
        return node.version > self._mounted

    def _take(self, entry: Entry, top: Path, stack: LayerStack) -> bool:
        """Take over the state of a path after a command. Returns False if nothing changed."""
        changed = False
        folder, name = split(entry.path)
        old = self._tree.look(folder, name)
        if old.is_folder and (entry.kind != "folder" or entry.opaque):
            if entry.kind != "folder":
                self._store.refuse_around(entry.path)
            for inside, each, node in reversed(self._below(entry.path, old)):
                path = join(inside, each)
                if entry.kind != "folder" or not _exists(top / on_disk(path)):
                    self._tree.put(inside, each, ABSENT, node)
                    stack.took(path, ABSENT)
                    changed = True
        node = self._made(entry, top / on_disk(entry.path), old)
        if node is not old:
            if not self._tree.has_folder(folder):
                self._make_folders(folder, force=True)
            self._tree.put(folder, name, node, old)
            changed = True
        stack.took(entry.path, node)
        return changed

    def _made(self, entry: Entry, at: Path, old: Node) -> Node:
        status = entry.status
        if entry.kind == "gone" or status is None:
            return ABSENT if old.version else old
        tick = self._store.tick()
        if entry.kind == "folder":
            facts = self._facts_left(entry, old)
            return old if facts is None else Folder(tick, None, status.st_mtime, facts)
        if entry.kind == "link":
            with reach(at) as link:
                return Node(tick, Link(os.readlink(link)), status.st_mtime)
        source = _Staged(at, self._store.limits.max_file_size)
        content = (Special if entry.kind == "other" else OnDisk)(entry.path, status, source, at)
        return Node(tick, content, status.st_mtime)

    def _facts_left(self, entry: Entry, old: Node) -> Facts | None:
        """Return the facts that a command gave a folder, or None if they are unchanged.

        A folder may keep its set-ID bits and inherit the set-group-ID bit of the folder above, but gains no others. For a
        folder that existed before, attributes that only root can set don't count as changed. If this process is not root, a
        different owner does not count either, nor a different group that is this process's own.
        """
        before = self._facts_of(entry.path, old) if old.is_folder else None
        left = entry.facts or Facts(0o755)
        above = self._facts_of(
            folder := split(entry.path)[0], self._tree.look(*split(folder)) if folder else TOP
        )
        inherited = 0 if above is None else above.mode & stat.S_ISGID
        mode = left.mode & (0o1777 | inherited | (before.mode if before else 0))
        if before is None:
            return Facts(mode, left.uid, left.gid, left.attributes)
        attributes = tuple(each for each in left.attributes if is_portable(each[0]))
        attributes += tuple(each for each in before.attributes if not is_portable(each[0]))
        uid, gid = left.uid, left.gid
        if os.geteuid() != 0:
            uid, gid = before.uid, before.gid if gid == os.getegid() else gid
        after = Facts(mode, uid, gid, tuple(sorted(attributes)))
        return None if after == before else after


_KINDS = {"pipe": stat.S_IFIFO, "socket": stat.S_IFSOCK}


def _new_special(path: str, kind: int, facts: Facts | None) -> Special:
    """Return a pipe or a socket that does not exist on disk yet."""
    facts = facts or Facts(0o600, os.geteuid(), os.getegid())
    fields = (kind | facts.mode, 0, 0, 1, facts.uid, facts.gid, 0, 0, 0, 0)
    status = os.stat_result(fields, dict.fromkeys(("st_atime_ns", "st_mtime_ns", "st_ctime_ns"), 0))
    return Special(path, status, _Nowhere(facts.attributes))


class _Nowhere:
    """The source of a pipe or a socket that does not exist on disk yet."""

    __slots__ = ("_attributes",)

    def __init__(self, attributes: Attributes) -> None:
        self._attributes = attributes

    def read(self, path: str, version: int) -> bytes:
        raise FileError(path, NOT_REGULAR)

    def attributes(self, path: str) -> Attributes:
        return self._attributes


class _Staged:
    """Reads one file in the layer to which a command wrote it."""

    __slots__ = ("_at", "_limit")

    def __init__(self, at: Path, limit: int) -> None:
        self._at = at
        self._limit = limit

    def read(self, path: str, version: int) -> bytes:
        with reach(self._at) as at:
            fd = os.open(at, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            now = version_of(os.fstat(fd))
            # The identity leaves out the ctime, which changes when another layer links the file.
            if identity(now) != identity(version):
                raise Conflict([path])
            return read_open(fd, path, now, self._limit)
        finally:
            os.close(fd)

    def attributes(self, path: str) -> Attributes:
        with reach(self._at) as at:
            return read_attributes(at)


def _exists(path: Path) -> bool:
    with reach(path) as at:
        return os.path.lexists(at)
