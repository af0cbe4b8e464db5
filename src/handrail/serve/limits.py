"""`Limits`: how much work a server accepts.

`Rate` limits how often something may happen, and `Quota` how many of something may be held at once.
"""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict
from dataclasses import dataclass, fields
from functools import lru_cache

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError
from handrail.serve.refusals import RequestRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a server. The response to a refused request says which limit was reached.

    Raises `DefinitionError` if a limit is not a positive, finite number.
    """

    body_bytes: int = 2**20
    """Maximum size of a request body. For a message, room for the largest attachments, in base64, is added.

    Routes that need no more, such as `/login`, take 4 KiB.
    """
    attachment_bytes: int = 8 * 2**20
    """Maximum total size of one message's attachments."""
    attachments: int = 50
    """Maximum number of attachments of one message. It is limited because each one is recorded in a transaction of its own."""
    body_seconds: float = 20.0
    """Seconds that a request body may take to arrive."""
    header_bytes: int = 16 * 1024
    header_seconds: float = 10.0
    """Seconds that a request's headers may take to arrive. Only Handrail's own server applies this limit."""
    idle_seconds: float = 15.0
    """Seconds that an idle connection is kept open for its next request. Only Handrail's own server applies this limit."""
    write_seconds: float = 30.0
    """Seconds that a client may leave data unread before it is disconnected. Only Handrail's own server applies this limit."""
    connections: int = 1000
    """Maximum number of requests in progress, including open streams. `/health` is answered even beyond it."""
    requests: int = 250
    """Maximum number of requests in progress of each principal, besides open streams, and of each address on paths that
    need no credentials.

    All addresses of an IPv6 /64 network count as one.
    """
    streams: int = 256
    """Maximum number of open streams for each principal."""
    requests_per_second: float = 50.0
    """Maximum rate of each principal's requests, and of those that each address sends to paths that need no credentials."""
    burst: int = 200
    """Maximum number of requests that a principal or an address may send at once after a quiet period."""
    wrong_tokens: int = 10
    """Maximum number of wrong tokens, passwords and links that one address may send at once, and then one every six seconds.

    All addresses of an IPv6 /64 network count as one. For one user name, all addresses together may send ten times as many
    at once.
    """
    idle_per_address: int = 100
    """Maximum number of idle connections from one address. When there are more, the longest idle one is closed.

    All addresses of an IPv6 /64 network count as one. Only Handrail's own server applies this limit.
    """
    runs: int = 1000
    """Maximum number of active runs in this process. Runs that wait for an answer are not counted."""
    runs_per_principal: int = 100
    """Maximum number of unfinished runs for each principal. Runs that wait for an answer are counted."""
    message_chars: int = 100_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise DefinitionError(
                    f"Limits({field.name}={value!r}) is invalid. The limit must be a positive, finite number."
                )


@lru_cache(maxsize=1_000)
def network_of(address: str) -> str:
    """Return the key under which a client is counted: its address, or for IPv6 its /64 network.

    A single client usually has a whole /64 network. An IPv6 address that maps an IPv4 address counts as the IPv4 address.
    """
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found, 64), strict=False))


class Rate:
    """A rate limiter with a token bucket for each key.

    Beyond `most` buckets, the one from which a token was taken longest ago is dropped.
    """

    def __init__(
        self, per_second: float, burst: int, *, clock: Clock = SYSTEM_CLOCK, most: int = 10_000
    ) -> None:
        self._per_second, self._burst, self._most = per_second, burst, most
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str) -> float:
        """Take a token and return 0.0. If there is none, returns the seconds until the next token."""
        left, now = self._now(key)
        if left < 1.0:
            return (1.0 - left) / self._per_second
        self._left[key] = (left - 1.0, now)
        self._left.move_to_end(key)
        if len(self._left) > self._most:
            self._left.popitem(last=False)
        return 0.0

    def wait(self, key: str) -> float:
        """Return the seconds until a token is available, or 0.0 if one is. Takes no token."""
        left, _ = self._now(key)
        return 0.0 if left >= 1.0 else (1.0 - left) / self._per_second

    def _now(self, key: str) -> tuple[float, float]:
        now = self._clock.monotonic()
        left, at = self._left.get(key, (float(self._burst), now))
        return min(float(self._burst), left + (now - at) * self._per_second), now


class Quota:
    """Limits how many of something each principal may hold at once, and how many all principals may hold together.

    `message` says so to whoever is refused. It may contain `{held}`, which stands for how many the principal holds.
    """

    def __init__(self, each: int, kind: str, message: str, total: float = math.inf) -> None:
        self._each, self._most = each, total
        self._kind, self._message = kind, message
        self.held: dict[str, int] = {}
        """How many each principal holds. A principal who holds none is left out."""
        self.total = 0

    def take(self, principal: str, amount: int = 1, *, beside: int = 0, beside_total: int = 0) -> None:
        """Count more for a principal. Raises `RequestRefused` if the principal, or all together, would hold more than the maximum.

        `beside` is how many more the principal holds that are counted elsewhere, and `beside_total` how many more all
        principals hold.
        """
        held = self.held.get(principal, 0)
        if held + beside + amount > self._each or self.total + beside_total + amount > self._most:
            raise RequestRefused(429, self._kind, self._message.format(held=held), retry_after=5.0)
        self.held[principal] = held + amount
        self.total += amount

    def give_back(self, principal: str, amount: int = 1) -> None:
        self.held[principal] -= amount
        self.total -= amount
        if not self.held[principal]:
            del self.held[principal]
