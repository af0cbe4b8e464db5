"""Scopes: each holds the resources created for a run or a call, and closes them.

Resources are closed in reverse order of creation. If closing one fails, the others are still closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any

from handrail.concurrency.cancellation import open_scope
from handrail.concurrency.user_code import isolated
from handrail.errors import ResourceError
from handrail.protocols import Forkable

log = logging.getLogger("handrail.resources")

_CLOSE_SECONDS = 30.0
"""Maximum seconds for closing one resource, if closing it is async. A cancelled call also waits for its resources to close."""


class Instance:
    """A resource created in a scope."""

    __slots__ = ("forkable", "thing", "thread")

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        self.forkable = isinstance(thing, Forkable)
        self.thread = threading.get_ident() if _is_sqlite_connection(thing) else None
        """The thread that created a connection to SQLite; None for any other resource."""

    def check_thread(self, name: str) -> None:
        """Raise `ResourceError` if this is a connection to SQLite that can't be used on the current thread."""
        if self.thread == threading.get_ident():
            return
        try:
            self.thing.cursor().close()
        except Exception as error:
            if not _is_about_threads(error):
                return  # another problem, such as a closed connection, is reported when the connection is used
            raise ResourceError(
                name, "it was created on a different thread, and SQLite allows its use only there", _SHARE_IT
            ) from error


_SHARE_IT = "Create it with `sqlite3.connect(..., check_same_thread=False)`."


def _is_sqlite_connection(thing: Any) -> bool:
    sqlite3 = sys.modules.get("sqlite3")  # if the module was never imported, there are no connections
    return sqlite3 is not None and isinstance(thing, sqlite3.Connection)


def _is_about_threads(error: Exception) -> bool:
    return type(error).__name__ == "ProgrammingError" and "created in a thread" in str(error)


class Closer:
    """The name of a resource, and the function that closes it."""

    __slots__ = ("close", "name")

    def __init__(self, name: str, close: Callable[[], Any]) -> None:
        self.name = name
        self.close = close

    async def run(self) -> None:
        closing = self.close()
        if inspect.isawaitable(closing):
            limit = asyncio.timeout(_CLOSE_SECONDS)
            try:
                async with limit:
                    await isolated(closing)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise ResourceError(
                    self.name,
                    f"closing it took longer than {_CLOSE_SECONDS:g} seconds",
                    "Make closing faster.",
                ) from error


class Scoped:
    """The resources created in one scope, and the functions that close them."""

    __slots__ = ("_closers", "made", "opening", "waits")

    def __init__(self) -> None:
        self.made: dict[type, Instance] = {}
        self.opening: dict[type, asyncio.Future[None]] = {}
        """A future for each resource that `open` is creating, unless it is `fresh`. Each future is done once the creation has ended."""
        self.waits: dict[type, set[type]] = {}
        """The protocols that each creation is waiting for. Used to find cycles that span several calls."""
        self._closers: list[Closer] = []

    def closes(self, closer: Closer) -> None:
        self._closers.append(closer)

    def forget(self, closer: Closer) -> bool:
        """Remove a closer. Returns False if it is running or has already run."""
        try:
            self._closers.remove(closer)
        except ValueError:
            return False
        return True

    @property
    def empty(self) -> bool:
        return not self._closers

    @property
    def has_forkable(self) -> bool:
        """Whether a resource in this scope is forkable, so that calls may have their own forks of it."""
        return any(kept.forkable for kept in self.made.values())

    def adopt(self, inner: Scoped) -> None:
        """Take over an inner scope's closers, so that its resources are closed with this scope instead."""
        self._closers += inner._closers
        inner._closers.clear()

    async def close(self) -> list[Exception]:
        """Close all resources, last created first, and return the errors that closing them raised.

        If the caller is cancelled meanwhile, the current close is interrupted. The other resources are still closed, and
        then `CancelledError` is raised and the errors are lost.
        """
        errors: list[Exception] = []
        cancelled: asyncio.CancelledError | None = None
        while self._closers:
            closer = self._closers.pop()
            scope = open_scope()
            try:
                await closer.run()
            except asyncio.CancelledError as error:
                if scope.interrupted:
                    cancelled = error
                else:
                    errors.append(
                        ResourceError(
                            closer.name,
                            "closing it was cancelled",
                            "Don't cancel the current task while closing it.",
                        )
                    )
            except SystemExit as error:
                problem = ResourceError(
                    closer.name, "closing it raised SystemExit", "Don't call `sys.exit()` while closing it."
                )
                problem.__cause__ = error
                errors.append(problem)
            except Exception as error:
                if _is_sqlite_connection(getattr(closer.close, "__self__", None)) and _is_about_threads(
                    error
                ):
                    error.add_note(f"It was created on a different thread. {_SHARE_IT}")
                with contextlib.suppress(Exception):  # an exception may reject notes
                    error.add_note(f"while closing the resource {closer.name}")
                errors.append(error)
        self.made.clear()
        if cancelled is not None:
            raise cancelled
        return errors


@contextlib.contextmanager
def waiting(scope: Scoped, protocol: type, path: tuple[type, ...]) -> Generator[None]:
    """Record that the creations in `path` are waiting for `protocol`, while the block runs.

    Raises `ResourceError` if this would make creations wait for each other in a cycle.
    """
    looked: set[type] = set()
    ahead = {protocol}
    while ahead:
        each = ahead.pop()
        if each in path:
            raise circle((*path[path.index(each) :], protocol, each))
        looked.add(each)
        ahead |= scope.waits.get(each, set()) - looked
    for each in path:
        scope.waits.setdefault(each, set()).add(protocol)
    try:
        yield
    finally:
        for each in path:
            scope.waits[each].discard(protocol)


async def close_logged(closer: Closer) -> None:
    try:
        await closer.run()
    except Exception:
        log.exception("closing the resource %s failed", closer.name)


def circle(path: Iterable[type]) -> ResourceError:
    names = [name_of(each) for each in path]
    return ResourceError(
        names[0],
        f"it needs itself: {' -> '.join(names)}",
        "Break the cycle: let one of them request the other on first use instead of on creation.",
    )


def name_of(protocol: Any) -> str:
    return getattr(protocol, "__name__", str(protocol))
