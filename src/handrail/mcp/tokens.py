"""The tokens of an OAuth login, in a file that several processes may share.

The SDK stores neither when a token expires nor which server issued it, and reads stored tokens only once. Without this module,
the person would have to log in again when a stored token has expired, or when another process has refreshed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, NamedTuple, cast

import httpx2
from mcp.client.auth import OAuthClientProvider
from mcp.shared.auth import OAuthClientInformationFull, OAuthMetadata, OAuthToken, ProtectedResourceMetadata
from pydantic import ValidationError

from handrail.clock import SYSTEM_CLOCK, Clock

_LOCK_SECONDS = 30.0
"""Maximum seconds to wait for another process that refreshes the tokens."""
_POLL = 0.05


class Stored(NamedTuple):
    """The tokens in a file, with what is needed to refresh them."""

    tokens: OAuthToken
    expires_at: float | None
    """When the access token expires, in seconds since 1970; None if that is unknown."""
    server: OAuthMetadata | None
    """The metadata of the server that issued the tokens; None if it is unknown."""
    resource: ProtectedResourceMetadata | None


class TokenFile:
    """The tokens for one server, and the client's registration with it, in a file that only its owner can read."""

    def __init__(
        self, path: Path, known: OAuthClientInformationFull | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.path = path
        self._known = known
        self._clock = clock
        self.context: Any = None
        """The context of the SDK's login, whose metadata is stored with the tokens; None until a `SharedLogin` uses this file."""

    async def get_tokens(self) -> OAuthToken | None:
        return self._read("tokens", OAuthToken)

    async def set_tokens(self, tokens: OAuthToken) -> None:
        lasts, context = tokens.expires_in, self.context
        self._write(
            tokens=_plain(tokens),
            expires_at=None if lasts is None else self._clock.now().timestamp() + lasts,
            server=None if context is None else _plain(context.oauth_metadata),
            resource=None if context is None else _plain(context.protected_resource_metadata),
        )

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self._known or self._read("client", OAuthClientInformationFull)

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self._write(client=_plain(client_info))

    def stored(self) -> Stored | None:
        """Return the tokens in the file, which may have expired, or None if the file has none or they can't be read."""
        tokens = self._read("tokens", OAuthToken)
        if tokens is None:
            return None
        expires: Any = self._load().get("expires_at")
        return Stored(
            tokens,
            float(expires) if isinstance(expires, int | float) else None,
            self._read("server", OAuthMetadata),
            self._read("resource", ProtectedResourceMetadata),
        )

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncGenerator[None]:
        """Keep other processes from refreshing the tokens during the block.

        If another process holds the lock for 30 seconds, the block runs without it.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for _ in range(int(_LOCK_SECONDS / _POLL)):
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                await asyncio.sleep(_POLL)
            yield
        finally:
            os.close(handle)

    def _load(self) -> dict[str, Any]:
        try:
            found: Any = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return {}
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

    def _read(self, key: str, kind: Any) -> Any:
        try:
            return kind.model_validate(self._load()[key])
        except (KeyError, ValidationError):
            return None

    def _write(self, **changes: Any) -> None:
        data = {**self._load(), **changes}
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The file is created for its owner alone, so that there is no moment at which others can read it.
        handle, name = tempfile.mkstemp(dir=self.path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(data, file)
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def _plain(value: Any) -> Any:
    return None if value is None else value.model_dump(mode="json", exclude_none=True)


class SharedLogin(OAuthClientProvider):
    """The SDK's login, with tokens that other processes and later runs can use and refresh too.

    A refresh token is sent only to the server that issued it.
    """

    def __init__(self, url: str, about: Any, file: TokenFile, *handlers: Any, **options: Any) -> None:
        super().__init__(url, about, file, *handlers, **options)
        file.context = self.context
        self._file = file
        self._last: Stored | None = None

    async def async_auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        async with contextlib.AsyncExitStack() as held:
            if await self._must_refresh():
                await held.enter_async_context(self._file.lock())
                if not await self._must_refresh():  # another process has refreshed them
                    await held.aclose()
            flow = super().async_auth_flow(request)
            try:
                sent = await anext(flow)
                while True:
                    response = yield sent
                    sent = await flow.asend(response)
                    await held.aclose()  # the refreshed tokens are stored
            except StopAsyncIteration:
                return
            finally:
                await flow.aclose()

    async def _must_refresh(self) -> bool:
        """Switch to the tokens in the file if they have changed. Returns whether they have expired and can be refreshed."""
        context = self.context
        context.client_info = context.client_info or await self._file.get_client_info()
        stored = self._file.stored()
        if stored is not None and stored != self._last:
            self._last = stored
            context.current_tokens = stored.tokens
            context.oauth_metadata = stored.server or context.oauth_metadata
            context.protected_resource_metadata = stored.resource or context.protected_resource_metadata
            # Without metadata it is not known where to refresh the tokens, so they are used until the server refuses them.
            context.token_expiry_time = None if stored.server is None else stored.expires_at
        return not context.is_token_valid() and context.can_refresh_token()
