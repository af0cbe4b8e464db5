"""A free port for a program that can't choose one itself."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator


@contextlib.contextmanager
def reserved_port(host: str = "127.0.0.1") -> Generator[int]:
    """Yield a port on this address that the system assigns to nobody else until the block ends.

    This process keeps a socket bound to the port, but does not listen on it. A server that sets `SO_REUSEADDR`, as
    almost all do, can therefore listen on it.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind((host, 0))
        yield kept.getsockname()[1]
