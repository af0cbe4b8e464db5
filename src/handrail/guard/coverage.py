"""Coverage of a decision: the keys of one request, and the scopes that can be offered for it.

A remembered decision is stored under a key. It covers the requests that have this key among their own, so
what a person is offered and what is covered afterwards can't differ.
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
"""Capabilities that are asked about every time: no answer holds for a second call."""
_KEY = new_key()
"""Key for digests of arguments that were not shown in full, if no journal has one. Valid in this process."""
_SHORT = 200
_MANY = 5
"""A list of more files than this is not offered: nobody would read it."""
_PLAIN = re.compile(r"[\w.@+-]+(/[\w.@+-]+)*", re.ASCII)


class Scope(msgspec.Struct, frozen=True):
    """A set of calls in words that a person can agree to, and its key."""

    words: str
    key: str


class Coverage(msgspec.Struct, frozen=True):
    """The keys of one request. They are valid for one session and its principal only."""

    words: str
    """This request in words, for a list of decisions."""
    exact: str
    """Key of these arguments and, if a diff was shown, this diff."""
    any_diff: str
    """Key of the same call with paths normalised, whatever its diff. Denials are stored under it."""
    scopes: tuple[Scope, ...]

    @property
    def approving(self) -> frozenset[str]:
        """The keys under which an approval covers the request."""
        return frozenset((self.exact, *(scope.key for scope in self.scopes)))

    @property
    def denying(self) -> frozenset[str]:
        """The keys under which a denial covers the request."""
        return self.approving | {self.any_diff}


def coverage_of(
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
) -> Coverage:
    """The keys of a request.

    `whose` is the session's id and principal; `arguments` are those that were sent and `shown` what a person
    sees of them; `paths` are the normalised paths it names, None if they are not known; `spelled` maps each
    path as it was written to its normal form; `secret` keys the digests of arguments that are not shown in
    full, so that nobody can guess them from the keys.
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
    return Coverage(
        words=_in_short(f"exactly {_request(tool, asks, name)} {json.dumps(shown)}"),
        exact=_key(whose, *about, exactly, diff),
        any_diff=_key(whose, "however", *about, however),
        scopes=tuple(
            Scope(words, _key(whose, "scope", *what)) for words, what in _offered(tool, asks, name, paths)
        ),
    )


def _offered(
    tool: Tool[Any, Any], asks: Asks, name: str, paths: Sequence[str] | None
) -> Iterable[tuple[str, tuple[Any, ...]]]:
    """Each scope in words, and what its key is made of, the narrowest first.

    No scope covers everything: that is for a mode or a policy to say, not for one answer.
    """
    if asks == "permission":
        yield _request(tool, asks, name), ("permission", name, _identity(tool))
    if asks != "call" or paths is None:
        return
    if not paths:
        if not tool.path_accesses:  # a tool that can name paths would be allowed everywhere
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
    """The innermost folder that contains all of these."""
    names = [folder.split("/") for folder in folders]
    same: list[str] = []
    for each in zip(*names, strict=False):
        if len(set(each)) > 1:
            break
        same.append(each[0])
    return "/".join(same)


def _said(text: str, end: str = "") -> str:
    """A name from a call as it is shown among our words: quoted unless it is plain."""
    return f"{text}{end}" if _PLAIN.fullmatch(text) else json.dumps(f"{text}{end}")


def _identity(tool: Tool[Any, Any]) -> Any:
    """What tells this tool from another of the same name."""
    return (tool.name, tool.json_schema, sorted(tool.capabilities), tool.effect)


def _given(arguments: Any) -> Any:
    """The arguments as plain JSON."""
    try:
        text = arguments if isinstance(arguments, str | bytes) else to_json(arguments)
        return pydantic_core.from_json(text) if text.strip() else {}
    except (ValueError, ToolValidationError):
        return str(arguments)


def _is_shown(given: Any, shown: Any) -> bool:
    """Whether everything given is also shown, nothing of it masked, left out or changed."""
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
    """The value with every path in its normal form: `./a` would otherwise evade a denial of `a`."""
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
