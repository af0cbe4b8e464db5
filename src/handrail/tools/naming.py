"""Names that a model has to write: tools and prompts."""

from __future__ import annotations

import re

ALLOWED = "Use 1 to 64 of the characters a-z, 0-9, '_' and '-'"

_NAME = re.compile(r"[a-z0-9_-]{1,64}\Z")


def is_name(name: object) -> bool:
    """May a tool or a prompt be called this?"""
    return isinstance(name, str) and _NAME.match(name) is not None


def mend_for(name: object, otherwise: str = "my_tool") -> str:
    """What to write instead of a name that is not allowed."""
    if not isinstance(name, str) or not name:
        return f"{ALLOWED}."
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    suggested = re.sub(r"[^a-z0-9_-]+", "_", words).strip("_")[:64] or otherwise
    return f"{ALLOWED}, for example {suggested!r}."
