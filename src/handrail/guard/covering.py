"""What a decision covers: the keys of one request, and the scopes that can be offered for it.

A remembered decision is kept under a key. A request is covered by it exactly if it has that key among
its own, so what is offered to a person and what is covered afterwards can't come to differ.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
import pydantic_core

from handrail.errors import ToolValidationError
from handrail.journal.digest import digest, new_key
from handrail.resources.paths import split
from handrail.schema import to_json
from handrail.tools import Tool

Asks = Literal["call", "message", "permission"]
"""Who asks: a policy about a call, `request_approval`, or `request_permission`."""

NEVER_REMEMBERED = frozenset({"worker.create"})
"""Capabilities that somebody is asked about every time: no answer holds for a second call."""
_KEY = new_key()
"""For arguments that hold what nobody was shown, where no journal has a key for that: it means nothing elsewhere."""
_SHORT = 200
_MANY = 5
"""Files past which nobody reads their list, so it is not offered."""
_PLAIN = re.compile(r"[\w.@+-]+(/[\w.@+-]+)*", re.ASCII)


class Scope(msgspec.Struct, frozen=True):
    """More than one call, in words a person can agree to."""

    words: str
    key: str


class Covering(msgspec.Struct, frozen=True):
    """The keys of one request. They hold for one session and its principal only."""

    words: str
    """This very request, for a list of what is remembered."""
    exact: str
    """These arguments and, where the call was shown by its diff, this diff."""
    whatever_it_does: str
    """The same call however it is written, whatever the diff: what a denial is kept under."""
    scopes: tuple[Scope, ...]

    @property
    def approving(self) -> frozenset[str]:
        """An approval under one of these covers the request."""
        return frozenset((self.exact, *(scope.key for scope in self.scopes)))

    @property
    def denying(self) -> frozenset[str]:
        """A denial under one of these does."""
        return self.approving | {self.whatever_it_does}


def covering(
    tool: Tool[Any, Any],
    asks: Asks,
    name: str,
    *,
    whose: tuple[str, str],
    arguments: Any,
    shown: Any,
    diff: str,
    paths: Sequence[str] | None,
    spelled: Mapping[str, str],
    secret: bytes | None = None,
) -> Covering:
    """The keys of a request.

    `whose` is the session's id and principal; `arguments` are those that came and `shown` what a person
    sees of them; `paths` are the places it goes to in their one spelling, None where they are not known;
    `spelled` has the one spelling of each path as it was named; `secret` is what keys are made with where
    something of the arguments is not shown, so that nobody guesses it by them.
    """
    secret = _KEY if secret is None else secret
    given = _given(arguments)
    written = json.dumps([given, shown], sort_keys=True)
    about = ("exact", asks, name, _identity(tool))
    if _is_shown(given, shown):
        exactly = written
        however = json.dumps(_respelled(shown, spelled), sort_keys=True)
    else:
        exactly = digest(secret, written)
        however = digest(secret, json.dumps(_respelled([given, shown], spelled), sort_keys=True))
    return Covering(
        words=_in_short(f"exactly {_request(tool, asks, name)} {json.dumps(shown)}"),
        exact=_key(whose, *about, exactly, diff),
        whatever_it_does=_key(whose, "however", *about, however),
        scopes=tuple(
            Scope(words, _key(whose, "scope", *what)) for words, what in _offered(tool, asks, name, paths)
        ),
    )


def _offered(
    tool: Tool[Any, Any], asks: Asks, name: str, paths: Sequence[str] | None
) -> Iterable[tuple[str, tuple[Any, ...]]]:
    """Each scope in words, and what its key is made of; the narrowest first.

    None is offered for everything there is: that is for a mode or a policy to say, not for one answer.
    """
    if asks == "permission":
        yield _request(tool, asks, name), ("permission", name, _identity(tool))
    if asks != "call" or paths is None:
        return
    if not paths:
        if not tool.path_accesses:  # one that can name paths and names none would be let go anywhere
            yield f"{tool.name} (any arguments)", ("tool", _identity(tool))
        return
    words = " and ".join(sorted(tool.capabilities)) or tool.name
    which = (sorted(tool.capabilities), tool.effect, "" if tool.capabilities else _identity(tool))
    folder = _common([split(path)[0] for path in paths])
    files = sorted(set(paths))
    if not folder and len(files) <= _MANY:
        yield f"{words} of {', '.join(_said(path or '.') for path in files)}", ("files", files, *which)
    while folder:
        yield f"{words} under {_said(folder, '/')}", ("folder", folder, *which)
        folder = split(folder)[0]


def _request(tool: Tool[Any, Any], asks: Asks, name: str) -> str:
    if asks == "call":
        return tool.name
    return f"{_said(name)} {'for' if asks == 'permission' else 'from'} {tool.name}"


def _in_short(words: str) -> str:
    return words if len(words) <= _SHORT else f"{words[:_SHORT]}…"


def _common(folders: Sequence[str]) -> str:
    """The innermost folder that all of these are, or lie in."""
    names = [folder.split("/") for folder in folders]
    same: list[str] = []
    for each in zip(*names, strict=False):
        if len(set(each)) > 1:
            break
        same.append(each[0])
    return "/".join(same)


def _said(text: str, end: str = "") -> str:
    """A name out of a call as it may stand among our words: quoted unless it is plain."""
    return f"{text}{end}" if _PLAIN.fullmatch(text) else json.dumps(f"{text}{end}")


def _identity(tool: Tool[Any, Any]) -> Any:
    """What makes it this tool and not another of the same name."""
    return (tool.name, tool.json_schema, sorted(tool.capabilities), tool.effect)


def _given(arguments: Any) -> Any:
    """The arguments as plain JSON, whatever their order and spacing."""
    try:
        text = arguments if isinstance(arguments, str | bytes) else to_json(arguments)
        return pydantic_core.from_json(text) if text.strip() else {}
    except (ValueError, ToolValidationError):
        return str(arguments)


def _is_shown(given: Any, shown: Any) -> bool:
    """Is all of this to be seen there? Not what is masked, left out, or written otherwise."""
    if isinstance(given, Mapping) and isinstance(shown, Mapping):
        there = cast("Mapping[str, Any]", shown)
        return all(
            name in there and _is_shown(value, there[name])
            for name, value in cast("Mapping[str, Any]", given).items()
        )
    if isinstance(given, list) and isinstance(shown, list):
        some, others = cast("list[Any]", given), cast("list[Any]", shown)
        return len(some) == len(others) and all(map(_is_shown, some, others))
    return given == shown


def _respelled(value: Any, spelled: Mapping[str, str]) -> Any:
    """The same with every path in its one spelling: `./a` would otherwise pass a denial of `a`."""
    if isinstance(value, str):
        return spelled.get(value, value)
    if isinstance(value, Mapping):
        named = cast("Mapping[str, Any]", value)
        return {name: _respelled(each, spelled) for name, each in named.items()}
    if isinstance(value, list):
        return [_respelled(each, spelled) for each in cast("list[Any]", value)]
    return value


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
