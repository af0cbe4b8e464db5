"""Read-only dicts and lists, for plain data that is shown to tools and shared between calls.

They are subclasses of `dict` and `list`, so that JSON encoders and type checks accept them. A deep copy is plain and can be
changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, SupportsIndex, cast

_HINT = "It is read-only, because it is shared. Change a copy of it: copy.deepcopy(...)."


def _refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
    raise TypeError(_HINT)


class ReadOnlyDict(dict[str, Any]):
    """A dict that can't be changed."""

    __slots__ = ()
    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = cast("Callable[..., NoReturn]", _refuse)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: copy.deepcopy(value, memo) for key, value in self.items()}

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return ReadOnlyDict, (dict(self),)


class ReadOnlyList(list[Any]):
    """A list that can't be changed."""

    __slots__ = ()
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = remove = reverse = sort = cast(
        "Callable[..., NoReturn]", _refuse
    )

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return [copy.deepcopy(value, memo) for value in self]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return ReadOnlyList, (list(self),)


def read_only(value: Any) -> Any:
    """Copy plain data so that nothing in it can be changed, at any depth. Objects of other classes are kept as they are."""
    if isinstance(value, ReadOnlyDict | ReadOnlyList):
        return value
    if isinstance(value, Mapping):
        return ReadOnlyDict({key: read_only(each) for key, each in cast("Mapping[Any, Any]", value).items()})
    if isinstance(value, list):
        return ReadOnlyList(map(read_only, cast("list[Any]", value)))
    if type(value) is tuple:
        return tuple(map(read_only, cast("tuple[Any, ...]", value)))
    if isinstance(value, set):
        return frozenset(cast("set[Any]", value))
    return bytes(value) if isinstance(value, bytearray) else value
