"""`Address`: where a person or a channel is told about questions. `check_page`: where people open the page."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from handrail.errors import DefinitionError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[!-~]+")
_FORMS = (
    "Give https://HOST/PATH for a webhook, or another URL that apprise knows, such as slack://… or mailto://…"
)


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """The URL of a webhook, or one that apprise reaches. It may contain secrets, so its text form names only the host of a webhook.

    Raises `DefinitionError` for anything else.
    """

    url: str

    def __post_init__(self) -> None:
        if not _URL.fullmatch(self.url):
            raise DefinitionError(
                f"an address to notify is not a URL, in ASCII and without spaces, so it can't be notified. {_FORMS}"
            )
        if self.is_webhook and not _is_plain(self.url):
            raise DefinitionError(
                f"an address to notify can't be notified: a webhook needs a host and a valid port, and no password or fragment. {_FORMS}"
            )

    @property
    def is_webhook(self) -> bool:
        """Whether messages are sent here as signed webhooks, and not by apprise."""
        return self.url.lower().startswith(("https://", "http://"))

    def __str__(self) -> str:
        host = f"{urlsplit(self.url).netloc}/" if self.is_webhook else ""
        return f"{self.url.partition('://')[0].lower()}://{host}…"

    def __repr__(self) -> str:
        return f"Address({str(self)!r})"

    def receiver(self, key: bytes) -> str:
        """Return the digest by which a journal with this key names the address."""
        return _digest(key, "receiver", self.url).hex()[:32]

    def secret(self, key: bytes) -> str:
        """Return the secret with which a webhook's receiver verifies messages from a journal with this key."""
        return f"whsec_{base64.b64encode(_digest(key, 'webhook', self.url)).decode()}"


def check_page(url: str) -> str:
    """Return the URL at which people open the page, with a slash at its end.

    Raises `DefinitionError` unless it is an http or https URL with a host, and without a query or fragment.
    """
    if not _URL.fullmatch(url) or not _is_plain(url) or "?" in url:
        raise DefinitionError(
            f"the public URL {url!r} is not the address of a page. Give the one that people open, such as https://chat.example/agents/."
        )
    return f"{url.rstrip('/')}/"


def link_to(page: str, question_id: str) -> str:
    """Return the link to a question. It gives nobody a right: people sign in first, and see only what they may answer."""
    return f"{page}#/q/{quote(question_id, safe='')}"


def _is_plain(url: str) -> bool:
    """Return whether a URL is of HTTP, has a host and a valid port, and no user, password or fragment."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    has_extras = "@" in parts.netloc or "#" in url
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not has_extras


def _digest(key: bytes, purpose: str, url: str) -> bytes:
    return hmac.digest(key, f"handrail notify {purpose}\0{url}".encode(), hashlib.sha256)
