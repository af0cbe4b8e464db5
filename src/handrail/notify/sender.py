"""`Sender`: how a message reaches its receiver. `NetworkSender` sends it as a signed webhook or by apprise."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import ssl
import sys
from functools import cache
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError
from handrail.notify import apprise_child
from handrail.notify.address import Address
from handrail.notify.message import Message, words_of

_WEBHOOK_SECONDS = 15.0
_APPRISE_SECONDS = 45.0
_MOST_HEAD = 16 * 1024
"""Maximum bytes of a response's head that are read. Its body is not read at all."""
SEND_SECONDS = 60.0
"""Seconds after which a message certainly is not being sent any more, and another process may send it."""
_MISSING = "apprise is not installed. Install it: pip install 'handrail[notify]'"
_PROBLEMS = {
    apprise_child.FAILED: "the receiver refused it, or could not be reached",
    apprise_child.NO_APPRISE: _MISSING,
    apprise_child.NO_SUCH_URL: "apprise can't use this URL",
}


class Sender(Protocol):
    """Sends messages to receivers. `handrail.testing.RecordingSender` is one for tests."""

    async def send(self, address: Address, message: Message, /) -> str:
        """Send a message once, and return "" if the receiver has it, or else why not, in words without secrets.

        A message may have arrived although this says that it has not.
        """
        ...


class NetworkSender:
    """Sends signed webhooks (https://www.standardwebhooks.com), and everything else through apprise.

    `key` is the journal's, from which each webhook's secret is derived. Redirects are not followed, and time, memory and what is read
    of a response are limited.
    """

    def __init__(self, key: bytes, clock: Clock = SYSTEM_CLOCK) -> None:
        self._key = key
        self._clock = clock

    async def send(self, address: Address, message: Message, /) -> str:
        try:
            if address.is_webhook:
                async with asyncio.timeout(_WEBHOOK_SECONDS):
                    status = await self._post(address, message)
                return "" if 200 <= status < 300 else f"it answered {status}{_why(status)}"
            title, text = words_of(message.body)
            async with asyncio.timeout(_APPRISE_SECONDS):
                code = await _call_apprise(address, title, text)
            return "" if code == apprise_child.ARRIVED else _PROBLEMS.get(code, "apprise failed")
        except TimeoutError:
            return "it did not answer in time"
        except ssl.SSLError as error:
            return f"its certificate or TLS is not accepted ({error.reason or type(error).__name__})"
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            # Only the kind of error: its text may contain the URL.
            return f"it can't be reached, or its answer is not HTTP ({type(error).__name__})"

    async def _post(self, address: Address, message: Message) -> int:
        """Post a signed message, and return the status of the response."""
        url, body = urlsplit(address.url), message.body
        at = str(int(self._clock.now().timestamp()))
        secret = base64.b64decode(address.secret(self._key).removeprefix("whsec_"))
        signed = hmac.digest(secret, f"{message.id}.{at}.".encode() + body, hashlib.sha256)
        headers = {
            "Host": url.netloc,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            "User-Agent": "handrail",
            "webhook-id": message.id,
            "webhook-timestamp": at,
            "webhook-signature": f"v1,{base64.b64encode(signed).decode()}",
        }
        target = f"{url.path or '/'}{f'?{url.query}' if url.query else ''}"
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        tls = _tls() if url.scheme == "https" else None
        port = url.port or (80 if tls is None else 443)
        reader, writer = await asyncio.open_connection(url.hostname, port, ssl=tls, limit=_MOST_HEAD)
        try:
            writer.write(f"POST {target} HTTP/1.1\r\n{head}\r\n".encode() + body)
            await writer.drain()
            while True:
                version, status = (await reader.readuntil(b"\r\n")).split(b" ", 2)[:2]
                if not version.startswith(b"HTTP/1.") or len(status.strip()) != 3:
                    raise ValueError("not a response of HTTP/1.1")
                if int(status) >= 200:
                    return int(status)
                while await reader.readuntil(b"\r\n") != b"\r\n":  # the headers of an interim response
                    pass
        finally:
            writer.transport.abort()  # nothing more is read, and nobody waits for a receiver to close


async def _call_apprise(address: Address, title: str, body: str) -> int:
    """Hand a message to apprise in a process of its own, and return the process's exit code."""
    command = (sys.executable, "-P", str(Path(apprise_child.__file__)))
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        given = json.dumps({"url": address.url, "title": title, "body": body})
        await process.communicate(given.encode())
        return process.returncode or 0
    finally:
        if process.returncode is None:
            process.kill()
            await asyncio.shield(process.wait())


async def check(address: Address) -> None:
    """Raise `DefinitionError` if apprise is needed for an address and is not installed, or can't use it. Sends nothing."""
    if address.is_webhook:
        return
    code = await _call_apprise(address, "", "")
    if code != apprise_child.ARRIVED:
        problem = _PROBLEMS.get(code, "apprise failed")
        raise DefinitionError(
            f"{address} can't be notified: {problem}. apprise lists its URLs: apprise --details"
        )


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _why(status: int) -> str:
    return ", and redirects are not followed" if 300 <= status < 400 else ""
