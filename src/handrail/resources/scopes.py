"""What was made for a run or for one call, and how it is closed: last first, whatever else fails."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Callable, Generator, Iterable
from typing import Any

from handrail.cancellation import await_foreign, open_scope
from handrail.errors import ResourceError
from handrail.protocols import Forkable

log = logging.getLogger("handrail.resources")

_CLOSE_SECONDS = 30.0
"""How long closing one resource may take: a call can't end before, not even when it is cancelled."""


class Kept:
    """A thing that was made for a scope."""

    __slots__ = ("forkable", "thing")

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        self.forkable = isinstance(thing, Forkable)


class Closer:
    """How to close one thing."""

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
                    await await_foreign(closing)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise ResourceError(
                    self.name, f"closing it took longer than {_CLOSE_SECONDS:g} seconds", "Make it quicker."
                ) from error


class Scoped:
    """The things made in one scope, and how to close them."""

    __slots__ = ("_closers", "made", "opening", "waits")

    def __init__(self) -> None:
        self.made: dict[type, Kept] = {}
        self.opening: dict[type, asyncio.Future[None]] = {}
        """What is being made by somebody who awaits it; done once it was made or could not be."""
        self.waits: dict[type, set[type]] = {}
        """What each of these waits for, to find circles that run through several calls."""
        self._closers: list[Closer] = []

    def closes(self, closer: Closer) -> None:
        self._closers.append(closer)

    def forget(self, closer: Closer) -> bool:
        """Take a closer back; False if it was used already."""
        try:
            self._closers.remove(closer)
        except ValueError:
            return False
        return True

    @property
    def empty(self) -> bool:
        return not self._closers

    async def close(self) -> list[Exception]:
        """Close everything, last made first. One that raises does not keep the others open."""
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
                    errors.append(ResourceError(closer.name, "closing it was cancelled", "Let it end."))
            except Exception as error:
                error.add_note(f"while closing the resource {closer.name}")
                errors.append(error)
        self.made.clear()
        if cancelled is not None:
            raise cancelled
        return errors


@contextlib.contextmanager
def waiting(scope: Scoped, protocol: type, path: tuple[type, ...]) -> Generator[None]:
    """While somebody else makes what `path` needs; refused if they wait for something on it."""
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
        log.exception("closing the resource %s raised", closer.name)


def circle(path: Iterable[type]) -> ResourceError:
    names = [name_of(each) for each in path]
    return ResourceError(
        names[0],
        f"it needs itself: {' -> '.join(names)}",
        "Break the circle: let one of them take the other later.",
    )


def name_of(protocol: Any) -> str:
    return getattr(protocol, "__name__", str(protocol))
