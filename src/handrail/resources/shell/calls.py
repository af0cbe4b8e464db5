"""System calls that no namespace holds, so they are refused by number.

Some kinds of sockets reach past a network namespace (to the host of a virtual machine, to hardware),
`io_uring` opens any socket without the call that is looked at, and keys, tracing and programs in the
kernel belong to the machine. What is refused fails as if the kernel did not have it.
"""

from __future__ import annotations

import errno
import os
import struct

_LOAD = 0x20
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_GREATER = 0x25
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_FAIL = 0x00050000

_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_FOREIGN = 0x3FFFFFFF
"""Numbers above this belong to another way of calling, which has numbers of its own."""

# AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
FAMILIES = (1, 2, 10, 16)

# Of each machine: its own number, `socket`, and add_key, request_key, keyctl, perf_event_open, bpf, userfaultfd.
_MACHINES = {
    "x86_64": (0xC000003E, 41, (248, 249, 250, 298, 321, 323)),
    "aarch64": (0xC00000B7, 198, (217, 218, 219, 241, 280, 282)),
}
_IO_URING = (425, 426, 427)


def program() -> bytes | None:
    """The filter, as the kernel takes it; None for a machine whose numbers are not known here.

    A program for another architecture than this machine's own does not run at all under it.
    """
    known = _MACHINES.get(os.uname().machine)
    if known is None:
        return None
    architecture, socket, refused = known
    lines = [(_LOAD, 0, 0, _ARCHITECTURE), (_JUMP_IF_EQUAL, 1, 0, architecture), _fail(errno.ENOSYS)]
    lines += [(_LOAD, 0, 0, _NUMBER), (_JUMP_IF_GREATER, 0, 1, _FOREIGN), _fail(errno.ENOSYS)]
    for number in (*refused, *_IO_URING):
        lines += [(_JUMP_IF_EQUAL, 0, 1, number), _fail(errno.ENOSYS)]
    # Any other call but `socket` jumps over what follows, to the end.
    lines += [(_JUMP_IF_EQUAL, 0, len(FAMILIES) + 2, socket), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    lines += [(_JUMP_IF_EQUAL, len(FAMILIES) - at, 0, family) for at, family in enumerate(FAMILIES)]
    lines += [_fail(errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _fail(error: int) -> tuple[int, int, int, int]:
    return _RETURN, 0, 0, _FAIL | error
