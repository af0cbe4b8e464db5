"""`Secret`: a string that must not be written to a recording, in any of the forms it can have in HTTP traffic."""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import quote, quote_plus

SCRUBBED = "[secret]"
"""The text that replaces a secret."""
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{4,}={0,2}")
_ESCAPE = re.compile(r"%[0-9A-F]{2}")


@dataclass(frozen=True)
class Secret:
    """A secret string. It is found as plain text, escaped in JSON, percent-encoded, and inside base64."""

    text: str

    def replaced_in(self, text: str) -> str:
        """Return `text` with `[secret]` in place of every occurrence of the secret, in any of its forms."""
        for form in self._forms:
            text = text.replace(form, SCRUBBED)
        return _BASE64.sub(lambda found: self._replaced_in_base64(found[0]), text)

    @cached_property
    def _forms(self) -> list[str]:
        """The forms of the secret in text, the longest first, since one form can contain another."""
        escaped = [form for once in _json_forms(self.text) for form in (once, *_json_forms(once))]
        in_urls = [quote(self.text, safe=""), quote(self.text), quote_plus(self.text)]
        in_urls += [_ESCAPE.sub(lambda found: found[0].lower(), form) for form in in_urls]
        return sorted({self.text, *escaped, *in_urls}, key=lambda form: (-len(form), form))

    def _replaced_in_base64(self, run: str) -> str:
        """Return a run of base64 characters with the secret replaced in the bytes that it encodes.

        The bytes may begin at any of the first four characters, because other base64 characters may stand before them.
        """
        bare = run.rstrip("=")
        for start in range(4):
            found = _decoded(bare[start:])
            if self.text.encode() in found:
                clean = base64.b64encode(found.replace(self.text.encode(), SCRUBBED.encode())).decode()
                return bare[:start] + (clean if run != bare else clean.rstrip("="))
        return run


def _json_forms(text: str) -> list[str]:
    """Return the forms that `text` can have in a JSON string. Some servers also escape slashes."""
    forms = [json.dumps(text, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)]
    return [*forms, *(form.replace("/", "\\/") for form in forms)]


def _decoded(text: str) -> bytes:
    """Decode base64 without padding. Returns b"" if it is invalid. A last character that encodes no byte is ignored."""
    whole = text[:-1] if len(text) % 4 == 1 else text
    try:
        return base64.b64decode(
            whole + "=" * (-len(whole) % 4), altchars=b"-_" if "-" in whole or "_" in whole else None
        )
    except (binascii.Error, ValueError):
        return b""
