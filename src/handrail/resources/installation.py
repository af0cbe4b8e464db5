"""The installation that runs Handrail: Python, its libraries and Handrail's own package.

Its files run in the next process of Handrail, outside any sandbox. So no call can change them, wherever they lie and
whatever it is allowed. Commands see Python and the libraries, read-only.

The paths of the installation are resolved once, on first use. This module imports no other module of Handrail, because it
also runs in the keeper.
"""

from __future__ import annotations

import os
import re
import site
import sys
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from typing import NamedTuple

_LIBRARIES = ("site-packages", "dist-packages")
_PARTS = ("bin", "lib", "lib64", "pyvenv.cfg")
"""The names in a prefix that belong to the installation if the prefix contains the root, as `/usr` contains `/usr/src/app`."""
_FOLLOWED = 40
_ESCAPED = re.compile(rb"\\([0-7]{3})")


def is_below(path: str, folder: str) -> bool:
    """Return whether an absolute path is a folder, or in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


class Place(NamedTuple):
    """A path on the host, and where it led when it was resolved."""

    path: str
    real: str
    """The path with all links resolved."""
    links: tuple[str, ...]
    """The paths of the links that were resolved, each without a link above it."""

    def leads_through(self, folder: str) -> bool:
        """Return whether one of the links lies in a folder."""
        return any(is_below(link, folder) for link in self.links)


def resolve(path: str) -> Place:
    """Resolve the links in an absolute path, one name at a time. At most forty links are followed."""
    real, links, names = "/", list[str](), path.split("/")[::-1]
    while names:
        at = os.path.normpath(os.path.join(real, names.pop()))
        try:
            target = os.readlink(at) if len(links) < _FOLLOWED else ""
        except OSError:  # it is not a link, or does not exist
            target = ""
        if target:
            links.append(at)
            names += target.split("/")[::-1]
        if target.startswith("/"):
            real = "/"
        elif not target:
            real = at
    return Place(path, real, tuple(links))


def _prefixes() -> set[str]:
    return {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}


def _libraries() -> set[str]:
    return {path for path in sys.path if os.path.basename(path) in _LIBRARIES and os.path.isabs(path)}


@cache
def interpreter_places() -> tuple[Place, ...]:
    """Return the folders of the running Python and its libraries, which commands need to use it.

    A folder directly below `/`, or one that contains the home folder, is omitted.
    """
    home = os.path.realpath(os.path.expanduser("~"))
    places = map(resolve, sorted(_prefixes() | _libraries()))
    return tuple(each for each in places if each.path.count("/") > 1 and not is_below(home, each.real))


@cache
def _installation() -> tuple[frozenset[str], frozenset[str]]:
    """Return the paths of the prefixes, and those of everything else that belongs to the installation. Links on the way count too."""
    prefixes = {resolve(prefix) for prefix in _prefixes()}
    others = {f"{each.path}/{name}" for each in prefixes for name in _PARTS} | _libraries()
    others |= {
        sys.executable or os.__file__,
        os.path.dirname(os.__file__),
        os.path.dirname(os.path.dirname(__file__)),
    }
    if site.ENABLE_USER_SITE:
        others.add(site.getusersitepackages())
    wholes = frozenset(each.real for each in prefixes)
    links = {link for each in prefixes for link in each.links}
    parts = {path for each in map(resolve, others) for path in (each.real, *each.links)}
    return wholes, frozenset(links | parts) - wholes


@lru_cache(maxsize=64)
def installed_in(root: str) -> tuple[str, ...]:
    """Return the paths in a root, relative to it, that belong to the installation. "" stands for the whole root.

    A root that is mounted at a second place counts as the same folder.
    """
    wholes, parts = _installation()
    found: set[str] = set()
    mounts = list(_mounts())
    for known in ([], mounts):  # by path, and by place on the disk
        at = _on_device(root, known)
        for path in wholes | parts:
            place = _on_device(path, known)
            if is_below(place, at) and (place != at or path in parts):
                found.add(place[len(at) :].strip("/"))
            elif is_below(at, place) and path in parts:
                found.add("")
    return tuple(path for path in sorted(found) if not any(is_below(path, each) for each in found - {path}))


def _on_device(path: str, mounts: Iterable[tuple[str, str]]) -> str:
    """Return where a path is on its disk, in a form that is the same at each place where the disk is mounted."""
    for place, source in mounts:
        if is_below(path, place):
            return source.rstrip("/") + path[len(place.rstrip("/")) :]
    return path


def _mounts() -> Iterator[tuple[str, str]]:
    """Yield the path of each mount, with the disk and the path on it that is mounted there, the innermost and latest first."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            fields = [line.split(b" ") for line in file]
    except OSError:
        return
    named = [(_unescaped(each[4]), each[2].decode() + _unescaped(each[3])) for each in reversed(fields)]
    yield from sorted(named, key=lambda mount: -len(mount[0]))


def _unescaped(field: bytes) -> str:
    return os.fsdecode(_ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), field))
