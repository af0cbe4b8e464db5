"""`Recorder`: intercepts the requests that models post through an `Endpoint`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Protocol

Send = Callable[[], AbstractAsyncContextManager[Any]]
"""Sends a request. The response is an aiohttp response, or has those of its members that `models/http.py` uses."""


class Recorder(Protocol):
    """Intercepts the requests that models post through an `Endpoint` while it is in use, and may answer them itself."""

    @property
    def replays(self) -> bool:
        """Whether the answers come from a recording, so that no key is needed."""
        ...

    def post(
        self, send: Send, url: str, body: bytes, secrets: Iterable[str]
    ) -> AbstractAsyncContextManager[Any]:
        """Return the response to a request. Calling `send` sends the request to the provider. `secrets` are sent with it."""
        ...


_recorders: list[Recorder] = []


@contextmanager
def recording(recorder: Recorder) -> Generator[None]:
    """Let a recorder intercept the requests of all endpoints in this process. If several are in use, only the newest does."""
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.remove(recorder)


def current_recorder() -> Recorder | None:
    """Return the recorder in use, or None if nothing is recorded or replayed."""
    return _recorders[-1] if _recorders else None
