"""Who has a run: one process at a time, for as long as it lives and says so."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from functools import lru_cache
from pathlib import Path

LEASE_SECONDS = 30.0
"""How long a process has a run without renewing it."""


def new_owner() -> str:
    """A name for this process: its machine, its number, when it started, and chance."""
    return f"{_host()}/{os.getpid()}/{_started_here()}/{secrets.token_hex(4)}"


def is_free(owner: str, leased_until: float, now: float, me: str) -> bool:
    """May `me` take a run that this owner has until then?"""
    return not owner or owner == me or now >= leased_until or is_dead(owner)


def is_dead(owner: str) -> bool:
    """Has the owner ended, as far as can be seen from here? Another machine's can't be seen."""
    host, _, rest = owner.partition("/")
    pid, _, rest = rest.partition("/")
    started = rest.partition("/")[0]
    if host != _host() or not pid.isdecimal():
        return False
    return _started(int(pid)) != started


@lru_cache(maxsize=1)
def _host() -> str:
    """Where process numbers mean what they mean here: containers may share all but the last part."""
    boot = numbers = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        numbers = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{socket.gethostname()}.{boot}.{numbers}".replace("/", "_")


@lru_cache(maxsize=1)
def _started_here() -> str:
    """When this process started: every run without a journal is given a name too, and none need look again."""
    return _started(os.getpid())


os.register_at_fork(after_in_child=_started_here.cache_clear)


def _started(pid: int) -> str:
    """When a process started, as the system counts; "" where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]
