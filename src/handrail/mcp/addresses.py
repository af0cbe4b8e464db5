"""Where addresses are, and connections that do not lead from a public server into a private network."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import socket
from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import httpcore2

from handrail.mcp.tokens import LoginNeeded

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class Reach(IntEnum):
    """From where an address can be reached: the higher, the fewer."""

    PUBLIC = 0
    PRIVATE = 1
    LINK_LOCAL = 2
    LOOPBACK = 3

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")


def reach_of(address: str) -> Reach:
    """Return from where an IP address can be reached. An IPv6 address that stands for an IPv4 address is judged as the latter."""
    found: Any = ipaddress.ip_address(address)
    if found.version == 6:
        inner = found.ipv4_mapped or found.sixtofour
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        found = inner or found
    if found.is_loopback or found.is_unspecified:  # a connection to 0.0.0.0 or :: reaches this machine
        return Reach.LOOPBACK
    if found.is_link_local:
        return Reach.LINK_LOCAL
    is_public = found.is_global and not getattr(found, "is_site_local", False)
    return Reach.PUBLIC if is_public else Reach.PRIVATE


@dataclasses.dataclass
class Standing:
    """Where a server was found so far. All its connections share it, because a server can make this program connect again."""

    reach: Reach | None = None
    """The most public address at which the server was connected to; None if it was not yet."""


async def resolve(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host. Raises `OSError` if it has none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class Border(httpcore2.AsyncNetworkBackend):
    """Opens the connections to a server and, for its login, to the hosts that it names.

    A host that the server names is connected to only at addresses that are at least as public as the server's own. So a server on the
    internet reaches nothing in this machine or network through this program. The address that is connected to is the one that was
    checked, so a name that changes its address changes nothing. The server itself can't move to a less public address either,
    for as long as its `Standing` is used.
    """

    def __init__(
        self, inner: httpcore2.AsyncNetworkBackend, host: str, port: int, standing: Standing
    ) -> None:
        self._inner = inner
        self._own = (host, port)
        self._standing = standing
        self._reach: Reach | None = None
        """Where these connections lead; None before the first."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        options: Any = {"local_address": local_address, "socket_options": socket_options}
        if (host, port) == self._own:
            stream = await self._inner.connect_tcp(host, port, timeout, **options)
            try:
                self._enter(str(stream.get_extra_info("server_addr")[0]))
            except BaseException:
                await stream.aclose()
                raise
            return stream
        try:
            async with asyncio.timeout(timeout):
                addresses = await self._allowed(host, port)
        except TimeoutError as error:
            raise httpcore2.ConnectTimeout(str(error)) from error
        except socket.gaierror as error:
            raise httpcore2.ConnectError(str(error)) from error
        share = None if timeout is None else timeout / len(addresses)
        for address in addresses[:-1]:
            try:
                return await self._inner.connect_tcp(address, port, share, **options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        return await self._inner.connect_tcp(addresses[-1], port, share, **options)

    def _enter(self, address: str) -> None:
        """Note the address at which the server was connected to. Raises `ConnectError` if an earlier one was more public."""
        reach, before = reach_of(address), self._standing.reach
        if before is not None and reach > before:
            raise httpcore2.ConnectError(
                f"its address has changed from a {before} one to a {reach} one, so nothing is sent there. If this is "
                "right, start this program again"
            )
        self._standing.reach = self._reach = reach

    async def _allowed(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host that the server may name. Raises `LoginNeeded` if there are none, and `OSError`."""
        limit = self._reach
        if limit is None:  # expired tokens are refreshed before the server is connected to
            limit = min(map(reach_of, await resolve(*self._own)))
        addresses = await resolve(host, port)
        allowed = [each for each in addresses if reach_of(each) <= limit]
        if not allowed:
            raise LoginNeeded(
                f"its login leads to {host}, which has a {reach_of(addresses[0])} address, and its own address is {limit}"
            )
        return allowed

    async def connect_unix_socket(self, *_: Any, **__: Any) -> httpcore2.AsyncNetworkStream:
        raise NotImplementedError

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)
