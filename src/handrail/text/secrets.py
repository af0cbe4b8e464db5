"""`Secrets`: the secret values in the settings of an MCP server or a model, which are hidden in what the server sends.

A server receives its secrets in environment variables, headers and its address, and may repeat them in an error, a result or
a log line. Libraries may log them too, so `hide_all` hides the secrets of all servers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import quote
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from pydantic import BaseModel

_Model = TypeVar("_Model", bound="BaseModel")

HIDDEN = "[secret]"
"""The text that replaces a secret."""
_MIN_LENGTH = 6
"""Minimum length of a value that is hidden wherever it occurs. A shorter value may occur inside ordinary words."""
_NAMED = re.compile(
    r"key|token|secret|passw|passphrase|credential|auth|cookie|session|bearer|signature|private|pwd|dsn|jwt|\bpat\b|_pat\b",
    re.IGNORECASE,
)
_PUBLIC_HEADERS = frozenset(
    [
        "accept",
        "accept-language",
        "content-type",
        "user-agent",
        "mcp-protocol-version",
        "http-referer",
        "x-title",
    ]
)


def is_secret_name(name: str) -> bool:
    """Return whether the name of a variable suggests that its value is a secret."""
    return _NAMED.search(name) is not None


def replace_secret(text: str, secret: str, hidden: str = HIDDEN) -> str:
    """Return a text with `hidden` in place of each occurrence of a secret.

    A secret of fewer than six characters, such as the `x` that a local server takes as its key, may occur inside ordinary
    words. It is replaced only where it stands alone: not beside a letter, a digit or `_`.
    """
    if secret not in text:
        return text
    if len(secret) >= _MIN_LENGTH:
        return text.replace(secret, hidden)
    return re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", lambda _: hidden, text)


def escaped(secret: str) -> set[str]:
    """Return the forms in which a secret may occur in a text: as it is, and as it is escaped in Python's literals and in JSON."""
    literals = repr(secret)[1:-1], repr(secret.encode(errors="surrogatepass"))[2:-1]
    beside_quotes = repr(f"{secret}\"'")[1:-4]  # which quotes are escaped depends on the text around
    texts = (json.dumps(secret, ensure_ascii=each)[1:-1] for each in (True, False))
    return {secret, *literals, beside_quotes, *texts}


class Secrets:
    """Secret values, with methods that hide them in texts, bytes and JSON values."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        found: set[str] = set()
        for value in values:
            # The words of `Bearer TOKEN` are hidden too, since a server may repeat the token alone.
            parts = [part for part in (value, *value.split()) if len(part) >= _MIN_LENGTH]
            # In an address, some characters are percent-encoded.
            for part in parts:
                found |= {quote(part), quote(part, safe="")} | escaped(part)
        self.values = tuple(sorted(found, key=lambda value: (-len(value), value)))
        if self.values:
            _all[id(self)] = self

    @classmethod
    def of(cls, env: Mapping[str, str], headers: Mapping[str, str], more: Iterable[str] = ()) -> Secrets:
        """Return the secrets of a server.

        These are the variables whose names suggest a secret, the headers except a few public ones, and the values in `more`.
        """
        named = [value for name, value in env.items() if is_secret_name(name)]
        sent = [value for name, value in headers.items() if name.lower() not in _PUBLIC_HEADERS]
        return cls([*named, *sent, *more])

    def __bool__(self) -> bool:
        return bool(self.values)

    def hide(self, text: str) -> str:
        """Return a text with `[secret]` in place of each secret."""
        for value in self.values:
            text = replace_secret(text, value)
        return text

    def hide_in_bytes(self, content: bytes) -> bytes:
        """Return content with `[secret]` in place of the UTF-8 bytes of each secret."""
        for value in self.values:
            content = content.replace(value.encode(errors="surrogatepass"), HIDDEN.encode())
        return content

    def hide_in_model(self, model: _Model, *, except_for: str = "") -> _Model:
        """Return a message of the protocol with its secrets hidden, except in the field `except_for`."""
        if not self.values:
            return model
        hidden: Any = self.hide_in(model.model_dump(by_alias=True, exclude_unset=True))
        if except_for:
            hidden[except_for] = getattr(model, except_for)
        return type(model).model_validate(hidden)

    def hide_in(self, value: Any) -> Any:
        """Return a JSON value with the secrets in its strings and keys hidden."""
        if not self.values:
            return value
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, dict):
            named = cast("dict[str, Any]", value)
            return {self.hide(name): self.hide_in(each) for name, each in named.items()}
        if isinstance(value, list):
            return [self.hide_in(each) for each in cast("list[Any]", value)]
        return value


_all: WeakValueDictionary[int, Secrets] = WeakValueDictionary()


def hide_all(text: str) -> str:
    """Return a text with `[secret]` in place of the secrets of all servers that this process has settings of."""
    for reference in _all.valuerefs():  # a copy, since other threads may add secrets
        secrets = reference()
        if secrets is not None:
            text = secrets.hide(text)
    return text
