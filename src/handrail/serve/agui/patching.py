"""What has changed in the state that is shown, as a JSON Patch.

The state is `{type name: [items]}`. Most changes add items at the end of a list, and are told as that; any
other change of a list gives the list anew.
"""

from __future__ import annotations

from typing import Any


def patch(before: Any, after: Any) -> list[dict[str, Any]]:
    """The operations that make the one out of the other; none where they are the same."""
    if before == after:
        return []
    if not isinstance(before, dict) or not isinstance(after, dict):
        return [{"op": "replace", "path": "", "value": after}]
    old: dict[str, Any] = before  # pyright: ignore[reportUnknownVariableType]  # plain JSON
    new: dict[str, Any] = after  # pyright: ignore[reportUnknownVariableType]  # plain JSON
    operations: list[dict[str, Any]] = []
    for name in old:
        if name not in new:
            operations.append({"op": "remove", "path": _pointer(name)})
    for name, items in new.items():
        if name not in old:
            operations.append({"op": "add", "path": _pointer(name), "value": items})
        elif old[name] != items:
            operations += _of_list(_pointer(name), old[name], items)
    return operations


def _of_list(path: str, old: Any, new: Any) -> list[dict[str, Any]]:
    if isinstance(old, list) and isinstance(new, list):
        grown: list[Any] = new  # pyright: ignore[reportUnknownVariableType]  # plain JSON
        count = len(old)  # pyright: ignore[reportUnknownArgumentType]  # plain JSON
        if grown[:count] == old:
            return [{"op": "add", "path": f"{path}/-", "value": item} for item in grown[count:]]
    return [{"op": "replace", "path": path, "value": new}]


def _pointer(name: str) -> str:
    return "/" + name.replace("~", "~0").replace("/", "~1")
