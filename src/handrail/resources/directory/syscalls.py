"""Two Linux calls that Python lacks, `openat2` and `renameat2`, with fallbacks.

Nothing here follows a symbolic link. Without `openat2`, a path is opened one name at a time with
`O_NOFOLLOW`: the same result, only slower. Without an exchange of names, callers fall back to links.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

_OPENAT2 = 437
"""The same on every Linux architecture."""
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x02, 0x04, 0x08
_RESOLVE = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
_NOREPLACE, _EXCHANGE = 1, 2
_UNKNOWN = {errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.E2BIG}
"""Errors from a kernel, or a filter in front of it, that does not have the call."""
_TRIES = 100


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def _libc(name: str, *arguments: Any) -> Any:
    """Return a function of the C library, or None if it does not exist."""
    try:
        function: Any = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError):
        return None
    function.argtypes = arguments
    function.restype = ctypes.c_long
    return function


_syscall = _libc(
    "syscall", ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_How), ctypes.c_size_t
)
_renameat2 = _libc("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)


def _probe() -> bool:
    if _syscall is None or os.uname().sysname != "Linux":
        return False
    try:
        os.close(_openat2(-100, b".", os.O_PATH))  # -100 is the current folder
    except OSError as error:
        return error.errno not in _UNKNOWN
    return True


def _openat2(folder: int, path: bytes, flags: int) -> int:
    how = _How(flags | os.O_CLOEXEC, 0, _RESOLVE)
    number = errno.EAGAIN
    for _ in range(_TRIES):
        found = _syscall(_OPENAT2, folder, path, how, ctypes.sizeof(how))
        if found >= 0:
            return found
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number), os.fsdecode(path))


def open_by_steps(folder: int, path: bytes, flags: int) -> int:
    """Open a path under a folder one name at a time, without following links."""
    *above, last = [name for name in path.split(b"/") if name != b"."] or [b"."]
    here = folder
    try:
        for name in above:
            inner = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            if here != folder:
                os.close(here)
            here = inner
        return os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
    finally:
        if here != folder:
            os.close(here)


has_openat2 = _probe()


def open_beneath(folder: int, path: str, flags: int) -> int:
    """Open a path under a folder. A link anywhere in it is refused by the kernel (`ELOOP`).

    The last name may be a link only with `O_PATH | O_NOFOLLOW`, which opens the link itself.
    """
    encoded = os.fsencode(path) or b"."
    if has_openat2:
        try:
            return _openat2(folder, encoded, flags)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
    return open_by_steps(folder, encoded, flags)


def move_into(source: int, name: str, target: int, new_name: str) -> None:
    """Rename, unless the target exists (`FileExistsError`)."""
    try:
        _rename(source, name, target, new_name, _NOREPLACE)
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
        _move_by_link(source, name, target, new_name)


def exchange(source: int, name: str, target: int, other: str) -> None:
    """Exchange two existing names. Raises `NotImplementedError` if the disk can't."""
    try:
        _rename(source, name, target, other, _EXCHANGE)
    except OSError as error:
        if error.errno in _UNKNOWN:
            raise NotImplementedError from None
        raise


def _rename(source: int, name: str, target: int, new_name: str, how: int) -> None:
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _renameat2(source, os.fsencode(name), target, os.fsencode(new_name), how) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), new_name)


def _move_by_link(source: int, name: str, target: int, new_name: str) -> None:
    """Emulate `move_into` with a link, which fails if the target exists."""
    try:
        os.link(name, new_name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    except PermissionError:  # a folder can't be linked; an empty one in its place would be replaced
        if os.path.lexists(f"/proc/self/fd/{target}/{new_name}"):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new_name) from None
        os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)
    else:
        os.unlink(name, dir_fd=source)
