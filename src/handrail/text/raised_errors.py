"""Raised errors: describe them, log them, and keep them without the frames that they refer to.

The functions work for any error, even for one whose `__str__` raises.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from handrail.errors import HandrailError

_GROUP: Any = BaseExceptionGroup
_members_of: Any = BaseExceptionGroup.exceptions.__get__  # pyright: ignore[reportUnknownMemberType, reportFunctionMemberAccess, reportAttributeAccessIssue]  # a descriptor
_SHORT = 300
"""Maximum length of an error's message in a description, in characters."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""The names of the folders of installed libraries."""
_LEAVES = 5
"""Maximum number of errors in a group that are described."""
_MOST_NODES = 20_000
"""Maximum number of errors in a group that are looked at, including nested groups."""


# --- errors as text -----------------------------------------------------------------------------------


def words_of(error: BaseException) -> str:
    """Return an error's message; "" if it has none, or if its `__str__` raises."""
    try:
        return str(error)
    except BaseException:  # whatever it raises, there is already an error to report
        return ""


def in_short(error: BaseException) -> str:
    """Describe an error in one line. A group is described by the errors in it, since its own message says little."""
    if isinstance(error, _GROUP):
        leaves = list(leaves_of(error))
        told = [_one_line(each) for each in leaves[:_LEAVES]]
        more = f"; and {len(leaves) - _LEAVES} more" if len(leaves) > _LEAVES else ""
        if told:
            return f"{'; '.join(dict.fromkeys(told))}{more}"
    return _one_line(error)


def described(error: BaseException) -> str:
    """Return an error's message as the reason why a run failed. Errors that are not Handrail's are named, since a message such as `'x'` says little."""
    return (words_of(error) if isinstance(error, HandrailError) else "") or in_short(error)


def with_place(error: BaseException) -> str:
    """Describe an error in an app's code in one line, with the place where it was raised: `KeyError: 'x' (app.py, line 3)`."""
    place = "" if isinstance(error, SyntaxError) else place_of(error)  # a syntax error names its line itself
    return f"{in_short(error)} ({place})" if place else in_short(error)


def place_of(error: BaseException) -> str:
    """Return the innermost line that an error came through and that is not Handrail's, as `FILE, line N`.

    A line of an app is preferred to one of an installed library. Returns "" if there were only lines of Handrail and of the
    standard library: then the error is not the app's.
    """
    import sysconfig  # only errors need it
    import traceback

    own, python = str(Path(__file__).parent), sysconfig.get_path("stdlib")
    found = ""
    for filename, line in reversed(
        [(each.filename, each.lineno) for each in traceback.extract_tb(error.__traceback__)]
    ):
        is_installed = not _INSTALLED.isdisjoint(Path(filename).parts)
        is_python = filename.startswith("<frozen ") or (filename.startswith(python) and not is_installed)
        if filename.startswith(own) or is_python:
            continue
        if not is_installed:
            return f"{filename}, line {line}"
        found = found or f"{filename}, line {line}"
    return found


def _one_line(error: BaseException) -> str:
    text = words_of(error).strip().split("\n", 1)[0]
    if len(text) > _SHORT:
        text = text[: _SHORT - 1] + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def log_error(log: logging.Logger, level: int, message: str, *words: object, error: BaseException) -> None:
    """Log an error with its traceback, or without one if the traceback can't be formatted, for example because it is too deep."""
    if not log.isEnabledFor(level):
        return
    try:
        log.log(level, message, *words, exc_info=(type(error), error, error.__traceback__))
    except Exception as problem:
        log.log(level, f"{message} (%s)", *words, f"its traceback can't be shown: {type(problem).__name__}")


# --- groups of errors ---------------------------------------------------------------------------------


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in an exception group that are not groups themselves, at any depth, in order and each once.

    An error that is not a group is yielded itself. At most `_MOST_NODES` errors are looked at.
    """
    pending, seen = [error], set[int]()
    while pending and len(seen) < _MOST_NODES:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, _GROUP):
            members: tuple[BaseException, ...] = _members_of(each)
            pending += reversed(members)
        else:
            yield each


# --- errors that are kept -----------------------------------------------------------------------------


def forget_frames(error: BaseException) -> None:
    """Remove an error's traceback, and the object of an `AttributeError`. Either would keep the finished call in memory.

    The same is done for its causes and, if it is a group, for the errors in it. Clearing the variables of the
    frames would not be enough, because a frame refers to its caller's frame, which may still be running.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = None
        pending += [each.__cause__, each.__context__]
        if isinstance(each, _GROUP):
            pending += _members_of(each)
        elif isinstance(each, AttributeError):
            each.obj = None  # the object that has no such attribute, for example the call's context


def without_frames(error: BaseException) -> BaseException:
    """Return a copy of an error without its frames, to be kept while the error itself propagates and collects more.

    If it can't be copied, a `RuntimeError` that describes it is returned.
    """
    try:
        made = type(error).__new__(type(error), *error.args)
        made.__dict__.update(error.__dict__)
    except Exception:  # for example because its `__new__` takes other arguments
        return RuntimeError(in_short(error))
    return made
