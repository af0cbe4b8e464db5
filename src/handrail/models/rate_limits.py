"""Rate limits: what a provider's response says about the requests and tokens left, and about when to try again."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is validated.

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from handrail.clock import Clock

_RESETS = (
    *("x-ratelimit-reset-requests", "x-ratelimit-reset-tokens"),
    *("anthropic-ratelimit-requests-reset", "anthropic-ratelimit-tokens-reset"),
)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN_PIECE = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", re.ASCII)
_SPAN = re.compile(rf"(?:{_SPAN_PIECE.pattern})+", re.ASCII)
_MOST_DIGITS = 15


def requests_left(headers: Mapping[str, str]) -> int | None:
    """Return how many requests the provider still accepts, or None if no header has a valid number."""
    return _number(
        headers.get("x-ratelimit-remaining-requests") or headers.get("anthropic-ratelimit-requests-remaining")
    )


def tokens_left(headers: Mapping[str, str]) -> int | None:
    """Return how many tokens the provider still accepts, or None if no header has a valid number."""
    return _number(
        headers.get("x-ratelimit-remaining-tokens") or headers.get("anthropic-ratelimit-tokens-remaining")
    )


def resets_at(headers: Mapping[str, str], clock: Clock) -> datetime | None:
    """Return the latest of the times at which the provider's rate limits reset, or None if it sent none."""
    said = [headers[name] for name in _RESETS if name in headers]
    found = [at for each in said if (at := _moment(each, clock)) is not None]
    return max(found, default=None)


def retry_after(headers: Mapping[str, str], body: bytes, clock: Clock) -> float | None:
    """Return how many seconds to wait before the next request, or None if the response gives no valid time."""
    milliseconds = headers.get("retry-after-ms")
    said = headers.get("retry-after")
    try:
        if milliseconds is not None:
            wait = float(milliseconds) / 1000
        elif said is None:
            wait = _retry_delay(body, clock)
        elif said.strip().replace(".", "", 1).isdigit():
            wait = float(said)
        else:
            when = parsedate_to_datetime(said)
            when = when if when.tzinfo else when.replace(tzinfo=UTC)
            wait = max((when - clock.now()).total_seconds(), 0.0)
    except (ValueError, OverflowError):
        return None
    return wait if wait is not None and 0 <= wait < math.inf else None


def _retry_delay(body: bytes, clock: Clock) -> float | None:
    """Return the seconds in the `RetryInfo` of a Google error, such as `"retryDelay": "34.07s"`; None if there are none."""
    if b"retryDelay" not in body:
        return None
    try:
        data: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    first = data[0] if isinstance(data, list) and data else data
    error = first.get("error") if isinstance(first, dict) else None
    details = error.get("details") if isinstance(error, dict) else None
    for detail in details if isinstance(details, list) else ():
        if isinstance(detail, dict) and isinstance(said := detail.get("retryDelay"), str):
            at = _moment(said, clock)
            return None if at is None else (at - clock.now()).total_seconds()
    return None


def _moment(text: str, clock: Clock) -> datetime | None:
    """Parse an ISO 8601 time, or a duration from now such as `6m0s` or `20ms`. Returns None if the string is neither."""
    try:
        if _SPAN.fullmatch(text):
            return clock.now() + sum(
                (
                    timedelta(seconds=float(number) * _UNITS[unit])
                    for number, unit in _SPAN_PIECE.findall(text)
                ),
                timedelta(),
            )
        at = datetime.fromisoformat(text)
        return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) <= _MOST_DIGITS else None
