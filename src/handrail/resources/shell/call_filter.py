"""The seccomp filter for commands. It refuses system calls that no namespace isolates, as a kernel without them would."""

from __future__ import annotations

import errno
import os
import struct

_LOAD = 0x20
_AND = 0x54
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_GREATER = 0x25
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_FAIL = 0x00050000

_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_FOREIGN = 0x3FFFFFFF
"""Highest system call number of the native calling convention.

Higher numbers belong to a different calling convention, which has its own table of system calls.
"""

_UNIX = 1
_NETWORKS = (2, 10, 16)  # AF_INET, AF_INET6, AF_NETLINK
_DATAGRAM, _KINDS = 2, 0xF

# For each machine: the architecture number, the numbers of `socket` and `socketpair`, and the numbers of add_key,
# request_key, keyctl, perf_event_open, bpf and userfaultfd.
_MACHINES = {
    "x86_64": (0xC000003E, 41, 53, (248, 249, 250, 298, 321, 323)),
    "aarch64": (0xC00000B7, 198, 199, (217, 218, 219, 241, 280, 282)),
}
_IO_URING = (425, 426, 427)

Line = tuple[int, int, int, int]


def call_filter(*, unix: bool) -> bytes | None:
    """Build the filter, or return None on a machine whose system call numbers are not known.

    The filter allows only IP, netlink and unix sockets. Other kinds can reach past a network namespace, for example to
    hardware or to the host of a virtual machine. Without `unix`, a command can use unix sockets only as connected pairs, and
    not for datagrams. The filter also refuses `io_uring`, which can open any socket without the filtered calls, and calls for
    keys, tracing and kernel programs, which no namespace isolates. Programs for a different architecture can make no
    system calls.
    """
    known = _MACHINES.get(os.uname().machine)
    if known is None:
        return None
    architecture, socket, pair, refused = known
    lines: list[Line] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_IF_EQUAL, 1, 0, architecture),
        _fail(errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_IF_GREATER, 0, 1, _FOREIGN),
        _fail(errno.ENOSYS),
    ]
    for number in (*refused, *_IO_URING):
        lines += [(_JUMP_IF_EQUAL, 0, 1, number), _fail(errno.ENOSYS)]
    if not unix:
        # A datagram socket from a connected pair could send to any address.
        kinds: list[Line] = [
            (_LOAD, 0, 0, _SECOND_ARGUMENT),
            (_AND, 0, 0, _KINDS),
            (_JUMP_IF_EQUAL, 0, 1, _DATAGRAM),
            _fail(errno.EAFNOSUPPORT),
            (_RETURN, 0, 0, _ALLOW),
        ]
        lines += [(_JUMP_IF_EQUAL, 0, len(kinds), pair), *kinds]
    families = (_UNIX, *_NETWORKS) if unix else _NETWORKS
    # Every call except `socket` jumps to the end.
    lines += [(_JUMP_IF_EQUAL, 0, len(families) + 2, socket), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    lines += [(_JUMP_IF_EQUAL, len(families) - at, 0, family) for at, family in enumerate(families)]
    lines += [_fail(errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _fail(error: int) -> Line:
    return _RETURN, 0, 0, _FAIL | error
