"""`Folders`: the folders that a commit changes, held open while it is applied."""

from __future__ import annotations

import os
from pathlib import Path

from handrail.resources.directory.disk import Disk
from handrail.resources.directory.jail import Jail


class Folders:
    """The folders that a commit changes. Each is opened once, through the jail."""

    def __init__(self, jail: Jail, slots: Path) -> None:
        self._jail = jail
        self._open: dict[str, int] = {}
        self.slots = os.open(slots, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def open(self, folder: str) -> int:
        fd = self._open.get(folder)
        if fd is None:
            fd = self._open[folder] = self._jail.folder(folder, os.O_RDONLY)
        return fd

    def sync(self, disk: Disk) -> None:
        """Sync every folder that was opened.

        A rename changes two folders atomically, so the slots' folder need not be synced.
        """
        for fd in self._open.values():
            disk.sync_folder(fd)

    def close(self) -> None:
        for fd in (*self._open.values(), self.slots):
            os.close(fd)
        self._open.clear()
