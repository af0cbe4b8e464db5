"""`Ticket`: what another process needs to run a call's tool, passed on as signed text."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from datetime import datetime

import msgspec

from handrail.errors import TicketError

_VERSION = 1
_SHORTEST_KEY = 16


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What another process with the same journal must know to run this call's tool. It contains nothing secret.

    If the run has a budget, the ticket's share of it is already reserved, and its holder can spend no more than that. Changes
    made under a ticket are committed by the call that issued it, once the call's handler has succeeded.
    """

    run_id: str
    """The id of the run in its journal."""
    place: str
    """The place in the run where the ticket was issued. It is the same when a resumed run enters the handler again."""
    call_id: str
    session_id: str
    tool: str
    path: tuple[str, ...]
    depth: int
    deadline: datetime | None
    budget: dict[str, float]
    capabilities: tuple[str, ...]
    effect: str
    """The call's effect. If it is transactional, the tool that runs under the ticket must not have a stronger one."""

    def seal(self, key: bytes) -> str:
        """Encode the ticket as stable, URL-safe text, signed with `key`. Raises `TicketError` if the key is too short."""
        _check_key(key)
        body = msgspec.json.encode({"v": _VERSION, **msgspec.to_builtins(self)}, order="sorted")
        return f"{_text(body)}.{_text(_signature(body, key))}"

    @staticmethod
    def open(text: str, key: bytes) -> Ticket:
        """Decode a sealed ticket.

        Raises `TicketError` if the text is not a ticket or was altered, if it was sealed with another key or by another
        version, or if the key is too short.
        """
        _check_key(key)
        encoded, dot, signature = str(text).partition(".")
        try:
            body, signed = _bytes(encoded), _bytes(signature)
        except (binascii.Error, ValueError):
            dot = ""
            body = signed = b""
        if not dot:
            raise TicketError(
                "this is not a ticket", "Pass on the text that `context.ticket()` returned, unchanged."
            )
        if not hmac.compare_digest(signed, _signature(body, key)):
            raise TicketError(
                "its signature is wrong",
                "Pass it on unchanged, and use the key with which it was sealed.",
            )
        fields = msgspec.json.decode(body)
        version = fields.pop("v", None)
        if version != _VERSION:
            raise TicketError(
                f"its version is {version}, and this process supports {_VERSION}",
                "Run both sides on the same version of Handrail.",
            )
        return msgspec.convert(fields, Ticket)


def _check_key(key: bytes) -> None:
    if len(key) < _SHORTEST_KEY:
        raise TicketError(f"the key has {len(key)} bytes", f"Use at least {_SHORTEST_KEY} random bytes.")


def _signature(body: bytes, key: bytes) -> bytes:
    return hmac.digest(key, b"handrail ticket\0" + body, hashlib.sha256)


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
