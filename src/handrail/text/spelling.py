"""Finds the known name that is closest to a misspelt one, and reports misspelt arguments."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from itertools import islice
from types import CodeType
from typing import Any, TypeVar

C = TypeVar("C", bound=type[Any])

_LONGEST = 100
_MOST = 500


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to `name`, or None if none is similar enough.

    Names may come from models, so the time for comparisons is bounded: long names are skipped, and at most the first
    few hundred known names are compared.
    """
    import difflib  # only errors need it

    if len(name) > _LONGEST:
        return None
    compared = (each for each in known if len(each) <= _LONGEST)
    return next(
        iter(difflib.get_close_matches(name, list(islice(compared, _MOST)), n=1, cutoff=cutoff)), None
    )


def check_arguments(
    called: str, known: Iterable[str], given: Iterable[str], positional: Sequence[str] = ()
) -> None:
    """Raise `TypeError` for the first given name that is not known.

    The message suggests a known name that is similar, or lists all of them if none is. `called` is the function as its
    caller wrote it, and `positional` are its arguments that can't be passed by name, of which the message says that.
    """
    names = frozenset(known)
    for name in given:
        if name in positional:
            example = ", ".join(positional[: positional.index(name) + 1])
            raise TypeError(
                f"{called} takes {name!r} by position, not by name. Write {called.removeprefix('@')}({example}), without `{name}=`."
            )
        if name not in names:
            near = nearest(name, sorted(names))
            takes = ", ".join(sorted(names)) or "no arguments by name"
            hint = f"Did you mean {near!r}?" if near else f"It takes {takes}."
            raise TypeError(f"{called} takes no argument {name!r}. {hint}")


def checked_arguments(cls: C) -> C:
    """Make the constructor of a class report unknown arguments as `check_arguments` does, under the class's name.

    The constructor must name all its arguments, without `**options`. A subclass that inherits the constructor is
    reported under its own name.
    """
    make: Any = cls.__init__
    code: CodeType = make.__code__
    end = code.co_argcount + code.co_kwonlyargcount
    first = max(1, code.co_posonlyargcount)  # after `self`
    positional, known = code.co_varnames[1:first], frozenset(code.co_varnames[first:end])

    @functools.wraps(make)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        if not named.keys() <= known:
            check_arguments(type(self).__name__, known, named, positional)
        make(self, *arguments, **named)

    cls.__init__ = __init__
    return cls
