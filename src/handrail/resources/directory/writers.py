"""Writers: checks whether any program has a file open for writing.

If a program kept writing to a file after a commit had displaced it, those writes would be lost. The kernel knows the
writers of a file: it grants a lease only for a file that nobody has open for writing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
from collections.abc import Callable, Generator


class Unexpected(Exception):
    """Raised if a path does not hold the content that a step expects there."""


class Busy(Unexpected):
    """Raised if a program is writing to the file that a step displaces."""


_SET_SIGNAL = 10
"""Number of the `F_SETSIG` command of `fcntl`, which Python does not name."""


@contextlib.contextmanager
def unwritten(folder: int, name: str, found: os.stat_result) -> Generator[Callable[[], bool]]:
    """Check that no program has a file open for writing, and yield a function that returns whether this is still so.

    `found` is the file's status. Raises `Busy` if a program has the file open for writing. Some files count as unwritten
    without a check: files that this process can't open or lease, such as those of other users; files on a disk without
    leases; pipes and other special files.
    """
    fd = -1
    try:
        with contextlib.suppress(OSError):  # somebody has replaced the file, or this process may not read it
            if stat.S_ISREG(found.st_mode):
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
                # If somebody opens a leased file, this process gets a signal. The default signal would end the process.
                fcntl.fcntl(fd, _SET_SIGNAL, signal.SIGURG)
        if fd >= 0 and not _has_no_writer(fd):
            raise Busy
        yield lambda: fd < 0 or _has_no_writer(fd)
    finally:
        if fd >= 0:
            os.close(fd)


def _has_no_writer(fd: int) -> bool:
    """Return False if somebody has a file open for writing, and True if nobody has or the kernel can't tell."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno != errno.EAGAIN  # any other error means that this process can't get a lease at all
    return True
