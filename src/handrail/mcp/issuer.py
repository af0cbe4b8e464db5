"""`Issuer`: an OAuth 2.1 authorization server whose access tokens an MCP server accepts.

The MCP server is then a resource server: it publishes which issuer it trusts, and verifies the tokens that clients send.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import httpx2
import jwt
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.routes import create_protected_resource_routes
from pydantic import AnyHttpUrl
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError
from handrail.serve.middleware import RESOURCE_METADATA
from handrail.serve.people import RESERVED
from handrail.serve.principals import is_principal
from handrail.serve.refusals import RequestRefused
from handrail.serve.requests import prefix_of

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""The accepted signature algorithms. All are asymmetric, so that only the issuer can sign."""
LEEWAY = 60.0
"""Seconds by which the issuer's clock and this machine's clock may differ."""
_KEYS_SECONDS = 60.0
"""Seconds for which the issuer's keys are not read again, even if a token names an unknown key."""
_RETRY_SECONDS = 5.0
"""Seconds after a failed attempt before the issuer's keys are read again."""
_FETCH_SECONDS = 20.0
"""Maximum seconds to wait for the issuer's next bytes, or for a connection to it."""
_SCOPE = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]+")
"""Matches a scope (RFC 6749)."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_TYPES = frozenset(["at+jwt", "application/at+jwt"])
"""The types, in a token's header, that only access tokens have (RFC 9068)."""
_PLAIN_TYPES = frozenset(["", "jwt", "application/jwt"])
"""The types that any token may have. A token with one of them must show in its claims that it is an access token."""
_OTHER_TOKENS = frozenset(["nonce", "at_hash", "c_hash", "s_hash", "events"])
"""Claims that only other tokens have: ID tokens, logout tokens and security events."""
_KINDS = {"typ": frozenset(["bearer", *_TYPES]), "token_use": frozenset(["access"])}
"""Claims with which some issuers name the kind of a token, with the values that stand for access tokens."""
IS_CURRENT = "handrail.is_current"
"""The key in a request's scope for a function that returns whether the request's access token has not expired."""


class Issuer:
    """Verifies access tokens that are JWTs (RFC 9068), and publishes the metadata of the resource server (RFC 9728).

    A token must be signed by the issuer, be for this server's `audience`, not have expired, and have all `scopes`. It must also
    be recognisable as an access token (`is_access_token`), because issuers sign other tokens with the same keys. Its subject
    is the principal. `resource` is the address of the MCP endpoint as clients see it. It is also the default for `audience`.
    Raises `DefinitionError` if the issuer's address is neither https nor http on loopback, or if a scope is malformed, and
    pydantic's `ValidationError` if `resource` is not an http or https address.
    """

    def __init__(
        self,
        address: str,
        *,
        resource: str,
        audience: str = "",
        scopes: Sequence[str] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not _is_safe(address):
            raise DefinitionError(
                f"the issuer {address!r} is not an https:// URL. Give an https:// URL; http:// is accepted only on loopback."
            )
        self.address = address.rstrip("/")
        self.audience = audience or resource
        self.scopes = tuple(scopes)
        wrong = [each for each in self.scopes if not _SCOPE.fullmatch(each)]
        if wrong:
            raise DefinitionError(
                f"{wrong[0]!r} can't be a scope. Pass one scope at a time, without spaces, quotes or backslashes."
            )
        self._resource = AnyHttpUrl(resource)
        self._clock = clock
        self._keys: dict[str, Any] = {}
        self._read_again = clock.monotonic()
        self._reading = asyncio.Lock()

    def routes(self) -> Sequence[BaseRoute]:
        """Return the route that serves the metadata, from which clients learn where to get a token.

        It serves every path that could belong to the resource. RFC 9728 puts the resource's whole path at its end, and below a
        prefix only what follows the prefix arrives here.
        """
        issuers = [AnyHttpUrl(self.address)]
        [made] = create_protected_resource_routes(self._resource, issuers, list(self.scopes) or None)
        return [Route(f"{RESOURCE_METADATA}{{place:path}}", made.endpoint, methods=["GET", "OPTIONS"])]

    async def authenticate(self, request: Request) -> str:
        """Return the principal who sent a request.

        Raises `RequestRefused` if the token is missing, is invalid or lacks a scope, if its subject can't be a principal, or
        if the issuer's keys can't be read.
        """
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise self._refused(request, "TokenMissing", "this server needs an access token", "")
        found = await self.verify_token(token.strip())
        if found is None or not found.subject:
            problem = "the token is not valid, has expired, is not for this server, or is not an access token"
            raise self._refused(request, "TokenWrong", problem, 'error="invalid_token", ')
        if not is_principal(found.subject) or found.subject == RESERVED:
            problem = f"the subject of the access token can't be a principal: {found.subject[:80]!r}"
            raise self._refused(request, "SubjectRefused", problem, 'error="invalid_token", ')
        missing = [each for each in self.scopes if each not in found.scopes]
        if missing:
            problem = f"the access token lacks the scope {missing[0]!r}"
            raise self._refused(request, "ScopeMissing", problem, 'error="insufficient_scope", ', 403)
        until, clock = (found.expires_at or 0) + LEEWAY, self._clock
        request.scope[IS_CURRENT] = lambda: clock.now().timestamp() < until
        return found.subject

    async def verify_token(self, token: str) -> AccessToken | None:
        """Return the claims of a token, or None if it is invalid.

        A valid token is signed by the issuer, is an access token for this audience, has a subject, and has not expired. The
        scopes are not checked. Raises `RequestRefused` if the issuer's keys can't be read.
        """
        try:
            named = jwt.get_unverified_header(token)
            key = await self._key(str(named.get("kid", "")))
            if key is None:
                return None
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                audience=self.audience,
                issuer=[self.address, f"{self.address}/"],
                leeway=LEEWAY,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.PyJWTError:
            return None
        if not is_access_token(named, claims):
            return None
        client = claims.get("client_id", claims.get("azp", ""))
        return AccessToken(
            token=token,
            client_id=str(client),
            scopes=_scopes_in(claims),
            expires_at=int(claims["exp"]),
            resource=self.audience,
            subject=claims["sub"],
            claims=claims,
        )

    async def _key(self, id: str) -> Any:
        """Return the issuer's key with this id, or None if the issuer has no such key.

        For the id "", from a token that names no key, this returns the issuer's only key if it has only one.

        Raises `RequestRefused` if the keys can't be read, or if the issuer has none.
        """
        async with self._reading:
            if id not in self._keys and self._clock.monotonic() >= self._read_again:
                self._read_again = self._clock.monotonic() + _RETRY_SECONDS
                found = await self._read_keys()
                self._keys = {key.key_id or "": key for key in found.keys}
                self._read_again = self._clock.monotonic() + _KEYS_SECONDS
        if not self._keys:
            raise _unreachable("none were found")
        if not id and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(id)

    async def _read_keys(self) -> jwt.PyJWKSet:
        try:
            async with httpx2.AsyncClient(timeout=_FETCH_SECONDS) as http:
                metadata = await self._read_metadata(http)
                keys = str(metadata["jwks_uri"])
                if not _is_safe(keys):
                    raise ValueError("the address of the keys is not https")
                answer = await http.get(keys)
                answer.raise_for_status()
                return jwt.PyJWKSet.from_dict(answer.json())
        except (httpx2.HTTPError, ValueError, LookupError, TypeError, jwt.PyJWTError) as error:
            raise _unreachable(type(error).__name__) from error

    async def _read_metadata(self, http: httpx2.AsyncClient) -> dict[str, Any]:
        """Return the issuer's metadata, from the address that OAuth (RFC 8414) or OpenID Connect defines.

        Raises `ValueError` if the metadata is not JSON or names a different issuer, `LookupError` or `TypeError` if it has an
        unexpected shape, and the HTTP client's error if the request fails.
        """
        where = urlsplit(self.address)
        oauth = where._replace(path=f"/.well-known/oauth-authorization-server{where.path}").geturl()
        answer = await http.get(oauth)
        if answer.status_code != 200:
            answer = await http.get(f"{self.address}/.well-known/openid-configuration")
            answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        if str(found["issuer"]).rstrip("/") != self.address:
            raise ValueError("the metadata names a different issuer")
        return found

    def _refused(
        self, request: Request, kind: str, problem: str, error: str, status: int = 401
    ) -> RequestRefused:
        wanted = f'scope="{" ".join(self.scopes)}", ' if self.scopes else ""
        return RequestRefused(
            status,
            kind,
            f"{problem}. Get a token from {self.address}, and send it as `Authorization: Bearer TOKEN`.",
            challenge=f'Bearer {error}{wanted}resource_metadata="{self._metadata_at(request)}"',
        )

    def _metadata_at(self, request: Request) -> str:
        """Return the address of the metadata. Below a prefix it is there too, because nothing else of the host leads to this server."""
        where, prefix = urlsplit(str(self._resource)), prefix_of(request)
        path = where.path.rstrip("/")
        below = path.removeprefix(prefix) if path.startswith(f"{prefix}/") else path
        return where._replace(path=f"{prefix}{RESOURCE_METADATA}{below}", query="").geturl()


def is_access_token(header: Mapping[str, Any], claims: Mapping[str, Any]) -> bool:
    """Return whether the header and the claims of a token show that it is an access token.

    Its type says so (RFC 9068), or it has a plain type and names scopes or the client that it was issued to. A token with a
    claim that only other tokens have is refused in any case, and so is one whose issuer is its own subject, as in a client's
    authentication.
    """
    kind = str(header.get("typ") or "").lower()
    is_other = any(name in claims for name in _OTHER_TOKENS) or any(
        name in claims and str(claims[name]).lower() not in kinds for name, kinds in _KINDS.items()
    )
    if is_other or claims.get("iss") == claims.get("sub"):
        return False
    return kind in _TYPES or (kind in _PLAIN_TYPES and bool(_scopes_in(claims) or claims.get("client_id")))


def _is_safe(address: str) -> bool:
    """Return whether an address is https, or http on loopback, so that nobody on the network can alter its responses."""
    where = urlsplit(address)
    return where.scheme == "https" or (where.scheme == "http" and where.hostname in _LOOPBACK)


def _scopes_in(claims: Mapping[str, Any]) -> list[str]:
    """Return the scopes in a token's claims, each a string with spaces between them, or a list of strings."""
    scopes: list[str] = []
    for claim in (claims.get("scope"), claims.get("scp")):
        listed = claim.split() if isinstance(claim, str) else claim
        if isinstance(listed, list):
            scopes += [each for each in cast("list[Any]", listed) if isinstance(each, str)]
    return scopes


def _unreachable(why: str) -> RequestRefused:
    return RequestRefused(
        503,
        "IssuerUnreachable",
        f"the issuer's keys can't be read ({why}). Try again soon.",
        retry_after=_RETRY_SECONDS,
    )
