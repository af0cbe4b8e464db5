"""Keyed digests: what an answer is bound to, so that it fits nothing but what was seen."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any

import msgspec
import pydantic_core


def new_key() -> bytes:
    """A key for digests that nobody else has."""
    return secrets.token_bytes(32)


def digest(key: bytes, *parts: Any) -> str:
    """A digest over JSON values, in this order; nobody without the key can make one."""
    body = b"\0".join(
        msgspec.json.encode(pydantic_core.to_jsonable_python(part), order="sorted") for part in parts
    )
    return hmac.digest(key, b"handrail question\0" + body, hashlib.sha256).hex()
