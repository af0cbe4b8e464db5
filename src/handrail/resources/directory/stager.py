"""Staging: writes a fork's changes to the staging folder, with the manifest of their commit."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Generator, Iterator
from pathlib import Path

import msgspec

from handrail.concurrency.claims import Pace
from handrail.errors import Conflict, FileError
from handrail.journal.records import CallKey
from handrail.resources.directory.area import Area
from handrail.resources.directory.commit import Commit, Manifest, Step, folder_digest, shown_version
from handrail.resources.directory.content import (
    Folder,
    Held,
    OnDisk,
    Special,
    facts_of,
    identity,
    version_of,
)
from handrail.resources.directory.disk import Jail, as_file_error
from handrail.resources.directory.layers import copy_out
from handrail.resources.directory.roots import status_of
from handrail.resources.facts import Facts, born_in, write_attributes, write_facts
from handrail.resources.mount import strip_marks
from handrail.resources.paths import ancestors, join, on_disk, reach, split
from handrail.resources.tree import Link, Node, Over


class Change(msgspec.Struct, frozen=True, gc=False):
    """One changed path of a fork: the new node and the node it replaces."""

    path: str
    node: Node
    base: Node


def in_order(over: Over) -> Iterator[Change]:
    """Yield a fork's changes in the order in which to apply them.

    Removals come first, from the inside out, and then additions and replacements, from the outside in. Removing a folder
    removes everything in it, in one step.
    """
    folders = sorted(over, key=len)
    trees = {
        join(folder, name)
        for folder in folders
        for name, (node, base) in over[folder].items()
        if base.is_folder and not node.is_folder
    }
    for folder in reversed(folders):
        if folder in trees or any(path in trees for path in ancestors(folder)):
            continue
        for name, (node, base) in over[folder].items():
            if base.version and not node.version:
                yield Change(join(folder, name), node, base)
    for folder in folders:
        for name, (node, base) in over[folder].items():
            if node.version and not (node.is_folder and base.is_folder and not isinstance(node, Folder)):
                yield Change(join(folder, name), node, base)


def tree_digest(over: Over, path: str) -> str:
    """Return a digest of the content that a fork saw in a folder that it removes."""
    prefix = f"{path}/"
    return folder_digest(
        (join(folder, name)[len(prefix) :], shown_version(base.version))
        for folder, changes in over.items()
        if folder == path or folder.startswith(prefix)
        for name, (_, base) in changes.items()
        if base.version
    )


def stage_commit(
    jail: Jail, area: Area, over: Over, key: CallKey, pace: Pace, *, synced: bool
) -> Commit | None:
    """Stage these changes and the manifest of their commit. Returns the commit, or None if there are no changes.

    Raises `Conflict` if a file has changed meanwhile, and `FileError` if the folder was moved or replaced, if a path can't be
    committed, or if the disk reports an error. Raises `GaveUp`, with nothing left behind, if `pace` says that the work must stop.
    """
    changes = list(in_order(over))
    if not changes:
        return None
    root = jail.check_in_place()
    try:
        return _stage(jail, area, root, over, changes, key, pace, synced=synced)
    except FileNotFoundError:
        # Somebody has deleted the staging folder, so the second attempt creates it again. If that attempt fails in the same way, something
        # else is wrong.
        area.abandon()
    try:
        return _stage(jail, area, root, over, changes, key, pace, synced=synced)
    except FileNotFoundError as error:
        raise as_file_error(".", error) from None


def _stage(
    jail: Jail,
    area: Area,
    root: os.stat_result,
    over: Over,
    changes: list[Change],
    key: CallKey,
    pace: Pace,
    *,
    synced: bool,
) -> Commit:
    try:
        stager = _Stager(jail, area, area.commit_folder(key.journal, synced=synced), root, pace)
    except (FileError, FileNotFoundError):
        raise
    except OSError as error:
        raise as_file_error(".", error) from None
    try:
        steps = stager.steps(changes, over)
        manifest = Manifest(
            call_id=key.call_id,
            run_id=key.run_id,
            place=key.place,
            root=str(jail.root),
            root_id=area.root_id,
            staging=str(area.folder),
            folder=f"{stager.folder.parent.name}/{stager.folder.name}",
            journal=key.journal,
            steps=steps,
        )
        size = area.write_manifest(stager.folder, manifest)
        if synced:
            slots = [step.slot for step in steps if step.do == "put"]
            area.sync(stager.folder, pace.each(slots, "syncing files"))
    except BaseException as error:
        if isinstance(error, FileNotFoundError) and not stager.folder.exists():
            raise
        area.forget(stager.folder)
        if isinstance(error, OSError) and not isinstance(error, FileError):
            raise as_file_error(stager.at, error) from None
        raise
    return area.commit(stager.folder, manifest, size)


class _Stager:
    """Fills the slots of one commit with its new content."""

    def __init__(self, jail: Jail, area: Area, folder: Path, root: os.stat_result, pace: Pace) -> None:
        self._pace = pace
        self._jail = jail
        self._area = area
        self._root = root
        self.folder = folder
        self.at = "."
        """The path being staged, for error messages."""
        self._slots = 0
        self._known: set[str] = {""}
        self._born: dict[str, Facts | None] = {}
        """For each folder that was checked or made, what `born_in` returned. The root is added on first use."""

    def steps(self, changes: list[Change], over: Over) -> tuple[Step, ...]:
        steps: list[Step] = []
        for change in self._pace.each(changes, "staging files"):
            self.at = change.path
            if change.node.version:
                steps += self._folders_for(change.path)
            self._check_folder(split(change.path)[0])
            steps.append(self._step(change, over))
        return tuple(steps)

    def _step(self, change: Change, over: Over) -> Step:
        node, base, path = change.node, change.base, change.path
        if node.is_folder and base.is_folder:
            old_facts = facts_of(base) or self._jail.facts(path)
            return Step(path=path, do="change", facts=facts_of(node), old_facts=old_facts)
        before = shown_version(base.version)
        tree = tree_digest(over, change.path) if base.is_folder else ""
        slot = self._slot()
        if not node.version:
            return Step(path=path, do="take", slot=slot, before=before, tree=tree)
        after = self._fill(slot, path, node)
        return Step(
            path=path, do="put", slot=slot, before=before, tree=tree, after=after, folder=node.is_folder
        )

    def _fill(self, slot: str, path: str, node: Node) -> str:
        disk, data, at = self._area.disk, node.data, self.folder / slot
        if data is None:
            facts = facts_of(node)
            self._make_folder(slot, path, facts)
        elif isinstance(data, Link):
            with self._birthplace(at, path, None) as birthplace:
                disk.symlink(data.target, birthplace)
        elif isinstance(data, Held):
            facts = data.facts
            with self._birthplace(at, path, facts) as birthplace:
                disk.write(birthplace, data.data, facts)
        elif isinstance(data, OnDisk):
            self._bring(data, at)
        return shown_version(version_of(os.lstat(at)))

    def _make_folder(self, slot: str, path: str, facts: Facts | None) -> None:
        at = self.folder / slot
        with self._birthplace(at, path, facts) as birthplace:
            self._area.disk.folder(birthplace, 0o777)
            if facts is not None:
                write_facts(birthplace, facts)
        self._known.add(path)
        self._born[path] = born_in(str(at), os.stat(at))

    @contextlib.contextmanager
    def _birthplace(self, at: Path, path: str, facts: Facts | None) -> Generator[Path]:
        """Yield the path at which to create the content of the slot `at`, and then move it to the slot.

        If new files in the target folder inherit facts from it, such as its group, the path is in a temporary folder from
        which they inherit the same facts. Otherwise, it is the slot itself. With `facts` that set a group, nothing is inherited.
        """
        born = None if facts is not None and facts.gid >= 0 else self._inherited(split(path)[0])
        if born is None:
            yield at
            return
        nursery = self.folder / f"{at.name}.born"
        os.mkdir(nursery, 0o700)
        write_facts(nursery, born)
        yield nursery / at.name
        os.rename(nursery / at.name, at)
        os.rmdir(nursery)

    def _inherited(self, folder: str) -> Facts | None:
        """Return what `born_in` returns for the root, or for a folder that was checked or made before."""
        if not folder and folder not in self._born:
            self._born[folder] = born_in(f"/proc/self/fd/{self._jail.fd}", self._root)
        return self._born[folder]

    def _bring(self, data: OnDisk, slot: Path) -> None:
        """Stage a file: move it if a command wrote it, and link or copy it otherwise. For a new pipe or socket, create one.

        Raises `Conflict` if a file that was moved or linked has changed since it was looked up.
        """
        if isinstance(data, Special) and data.is_new:
            self._area.disk.special(slot, data.found)
            write_attributes(slot, data.facts.attributes)
            return
        if data.staged is not None:
            with reach(data.staged) as staged:
                os.rename(staged, slot)
            if identity(version_of(os.lstat(slot))) != identity(data.version):
                raise Conflict([data.path])  # a process that the command left behind has written to it since
            strip_marks(slot)
            return
        folder, name = split(data.path)
        fd = self._jail.folder(folder)
        try:
            self._area.disk.link(fd, on_disk(name), slot)
        except OSError:
            copy_out(self._jail, self._area, data, slot)
            return
        finally:
            os.close(fd)
        if identity(version_of(os.lstat(slot))) != identity(data.version):
            raise Conflict([data.path])

    def _folders_for(self, path: str) -> list[Step]:
        """Return the steps that create the missing parents of a path. Raises `FileError` if one can't be created."""
        missing: list[str] = []
        folder = split(path)[0]
        while folder not in self._known:
            found = self._jail.look(folder)
            if found is not None and stat.S_ISDIR(found[0].st_mode):
                break
            missing.append(folder)
            folder = split(folder)[0]
        steps: list[Step] = []
        for folder in reversed(missing):
            slot = self._slot()
            self._check_folder(split(folder)[0])
            self._make_folder(slot, folder, None)
            after = shown_version(version_of(os.lstat(self.folder / slot)))
            steps.append(Step(path=folder, do="put", slot=slot, after=after, folder=True))
        return steps

    def _check_folder(self, folder: str) -> None:
        """Raise `FileError` if files can't be renamed into this folder, before the commit changes anything in the root."""
        if not folder or folder in self._born:
            return
        self._known.add(folder)
        try:
            fd = self._jail.folder(folder)
        except OSError as error:
            raise as_file_error(folder, error) from None
        try:
            status = os.fstat(fd)
            if status_of(fd).mount != status_of(self._jail.fd).mount:
                problem = "it is on a different disk or mount from the root, so it can't be part of the same commit. Choose another path"
                raise FileError(folder, problem)
            if not os.access(f"/proc/self/fd/{fd}", os.W_OK | os.X_OK):
                problem = "permission denied: the folder is not writable. Choose another, or change its mode"
                raise FileError(folder, problem)
            self._born[folder] = born_in(f"/proc/self/fd/{fd}", status)
        finally:
            os.close(fd)

    def _slot(self) -> str:
        self._slots += 1
        return str(self._slots)
