"""Writing the few forms of TOML that a file of overrides is made of."""

from __future__ import annotations

import re

_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")
_SHORT = {"\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"'}
_ESCAPED = re.compile(r'[\\"\x00-\x1f\x7f]')
_LITERAL = re.compile(r"""[^'\x00-\x1f\x7f]*["\\][^'\x00-\x1f\x7f]*\Z""")
"""What would need escapes and can do without them in single quotes, such as JSON."""
# In a long text, line ends and tabs stay as they are, and so does a quote that no other follows.
_ESCAPED_LONG = re.compile(r'[\\\x00-\x08\x0b-\x1f\x7f]|"(?="|\Z)')


def key(*parts: str) -> str:
    """A dotted key: `tools.weather`, `sections."guidance.search"`."""
    return ".".join(part if _BARE.match(part) else _quoted(part) for part in parts)


def string(text: str) -> str:
    """A text as a value: on one line, or over several where it has several."""
    if "\n" not in text:
        return f"'{text}'" if _LITERAL.match(text) else _quoted(text)
    return f'"""\n{_ESCAPED_LONG.sub(_escape, text)}"""'


def _quoted(text: str) -> str:
    return f'"{_ESCAPED.sub(_escape, text)}"'


def _escape(match: re.Match[str]) -> str:
    found = match[0]
    return _SHORT.get(found) or f"\\u{ord(found):04x}"
