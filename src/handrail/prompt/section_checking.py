"""The rules of what one section may be, found when it is made; what sections share is the prompt's to check."""

from __future__ import annotations

from typing import Any


def check_params_type(name: str, params: Any) -> None: ...
def check_section(section: Any) -> None:
    for name in ("tools", "policies", "children"):
        object.__setattr__(section, name, tuple(getattr(section, name)))
