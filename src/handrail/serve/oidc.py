"""`OidcProvider`: lets people sign in with an OpenID Connect provider. Needs `pip install 'handrail[oidc]'`.

The provider identifies people, and the server's users file says what they may do. A person who is not one of the
server's users can't sign in.
"""

from __future__ import annotations

import importlib.util
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError
from handrail.serve import missing_extra
from handrail.serve.limits import Rate, network_of
from handrail.serve.middleware import CALLBACK
from handrail.serve.principals import Principals, address_of
from handrail.serve.refusals import RequestRefused
from handrail.serve.requests import EmptyBody, prefix_of, read

_REQUIRED = ("authlib", "httpx")
_MOST_PENDING = 10_000
_PENDING_SECONDS = 600.0
_FETCH_SECONDS = 20.0
"""Maximum seconds that `_fetch` waits for the provider's next bytes, or for a connection to it."""
_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A sign-in whose browser was sent to the provider and has not come back yet."""

    secret: str
    """What the page that began the sign-in keeps. No other page can finish the sign-in."""
    nonce: str
    verifier: str
    redirect: str
    until: float


class OidcProvider:
    """Signs people in with the authorization code flow, with PKCE, a state, and a nonce.

    Only the page that began a sign-in can finish it, with a secret that it keeps in its own storage. A cookie would not do:
    every port of a host can set the host's cookies, and so plant the sign-in of somebody else.

    A user's name is the value of `claim` in the ID token: `email`, which the provider must have verified, or another
    claim such as `sub`. Pass `address`, the page's address, if browsers see it at a different scheme, host or prefix than requests
    show, for example behind a proxy. Raises `DefinitionError` if a package is missing, or if the issuer is neither an https
    URL nor local.
    """

    def __init__(
        self,
        issuer: str,
        client_id: str,
        client_secret: str,
        *,
        claim: str = "email",
        address: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        missing = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
        if missing:
            raise missing_extra(missing[0], "oidc")
        where = urlsplit(issuer)
        if where.scheme != "https" and where.hostname not in ("127.0.0.1", "localhost", "::1"):
            raise DefinitionError(
                f"the issuer {issuer!r} is not an https:// URL. Give the provider's issuer URL."
            )
        self._issuer = issuer.rstrip("/")
        self._client_id, self._client_secret = client_id, client_secret
        self._claim = claim
        self._address = address.rstrip("/")
        self._clock = clock
        self._metadata: dict[str, Any] | None = None
        self._rate = Rate(0.5, 20, clock=clock)
        self._pending: OrderedDict[str, _Pending] = OrderedDict()

    def routes(self, principals: Principals) -> Sequence[BaseRoute]:
        """Return two routes: one begins a sign-in, and the other finishes it when the provider sends the browser back."""

        async def begin(request: Request) -> Response:
            principals.check_own_page(request)
            await read(request, EmptyBody)
            wait = self._rate.take(network_of(address_of(request)))
            if wait:
                raise RequestRefused(
                    429,
                    "TooManySignIns",
                    "too many sign-ins from this address. Try again after the time in the `Retry-After` header.",
                    retry_after=wait,
                )
            address = self._address or f"{request.url.scheme}://{request.headers['host']}{prefix_of(request)}"
            where, secret = await self.begin(f"{address}{CALLBACK}")
            return JSONResponse({"address": where, "secret": secret})

        async def finish(request: Request) -> Response:
            given = request.query_params
            name, secret = await self.finish(given.get("state", ""), given.get("code", ""))
            return RedirectResponse(f"../#link={principals.link_for(name, request, secret)}", 303)

        return [Route("/oidc/login", begin, methods=["POST"]), Route(CALLBACK, finish)]

    async def begin(self, redirect: str) -> tuple[str, str]:
        """Return the provider's URL to send the browser to, and a secret for the page that begins the sign-in.

        Raises `RequestRefused` if the provider's configuration can't be fetched, or names a different issuer.
        """
        metadata = await self._read_metadata()
        secret, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        async with self._client(redirect) as client:
            address, state = client.create_authorization_url(
                metadata["authorization_endpoint"], nonce=nonce, code_verifier=verifier
            )
        until = self._clock.monotonic() + _PENDING_SECONDS
        self._pending[state] = _Pending(secret, nonce, verifier, redirect, until)
        while len(self._pending) > _MOST_PENDING:
            self._pending.popitem(last=False)
        return address, secret

    async def finish(self, state: str, code: str) -> tuple[str, str]:
        """Return the name of the person whom the provider has signed in, and the secret of the page that began it.

        Raises `RequestRefused` if the sign-in fails.
        """
        pending = self._pending.pop(state, None)
        if pending is None or self._clock.monotonic() > pending.until:
            raise _refused("this sign-in is over or took too long")
        metadata = await self._read_metadata()
        try:
            claims = await self._exchange(metadata, pending, code)
        except RequestRefused:
            raise
        except Exception as error:  # the provider's response can be anything
            raise _refused(f"the provider's response is invalid ({type(error).__name__})") from error
        if self._claim == "email" and claims.get("email_verified") is not True:
            raise _refused("the provider has not verified your email address: verify it there first")
        name = claims.get(self._claim)
        if not isinstance(name, str) or not name:
            raise _refused(
                f"the provider's ID token has no {self._claim!r} claim: ask the operator to use another claim"
            )
        return name, pending.secret

    async def _exchange(self, metadata: dict[str, Any], pending: _Pending, code: str) -> dict[str, Any]:
        """Exchange a code for an ID token. Returns the token's claims after validating them.

        Raises `RequestRefused` or the libraries' errors if the exchange fails or a claim is wrong.
        """
        from joserfc import jwt
        from joserfc.jwk import KeySet

        async with self._client(pending.redirect) as client:
            token = await client.fetch_token(
                metadata["token_endpoint"], code=code, code_verifier=pending.verifier
            )
        published: Any = await self._fetch(metadata["jwks_uri"])
        keys = KeySet.import_key_set(published)
        claims = jwt.decode(token["id_token"], keys, algorithms=_ALGORITHMS).claims
        now = int(self._clock.now().timestamp())
        jwt.JWTClaimsRegistry(
            now=lambda: now,
            leeway=60,
            iss={"essential": True, "value": metadata["issuer"]},
            aud={"essential": True, "value": self._client_id},
            exp={"essential": True},
            nonce={"essential": True, "value": pending.nonce},
        ).validate(claims)
        if claims.get("azp", self._client_id) != self._client_id:
            raise _refused("the provider's ID token was issued to a different application")
        return claims

    def _client(self, redirect: str) -> Any:
        """Return an OAuth client from authlib, which has no type annotations."""
        from authlib.integrations.httpx_client import AsyncOAuth2Client

        return AsyncOAuth2Client(
            self._client_id,
            self._client_secret,
            scope="openid email profile",
            redirect_uri=redirect,
            code_challenge_method="S256",
        )

    async def _read_metadata(self) -> dict[str, Any]:
        if self._metadata is None:
            try:
                found = await self._fetch(f"{self._issuer}/.well-known/openid-configuration")
            except Exception as error:
                raise RequestRefused(
                    503,
                    "ProviderUnreachable",
                    f"the sign-in provider's configuration can't be fetched ({type(error).__name__}). Try again soon.",
                    retry_after=5.0,
                ) from error
            if str(found.get("issuer", "")).rstrip("/") != self._issuer:
                raise RequestRefused(
                    503,
                    "ProviderUnreachable",
                    "the sign-in provider's configuration names a different issuer. Ask the operator to correct the server's issuer.",
                )
            self._metadata = found
        return self._metadata

    async def _fetch(self, address: str) -> dict[str, Any]:
        import httpx

        async with httpx.AsyncClient(timeout=_FETCH_SECONDS) as client:
            answer = await client.get(address)
            answer.raise_for_status()
            return answer.json()


def _refused(why: str) -> RequestRefused:
    return RequestRefused(401, "SignInWrong", f"{why}. Open the page and sign in again.")
