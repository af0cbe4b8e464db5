"""The prefix below which browsers reach an app that is mounted in another app or behind a proxy."""

from __future__ import annotations

import re
from urllib.parse import quote

from starlette.requests import HTTPConnection
from starlette.types import Scope

from handrail.errors import DefinitionError

_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~-]+)*")


def parse_prefix(text: str) -> str:
    """Return a prefix without a slash at its end, "" for none. Raises `DefinitionError` if it is not a path."""
    prefix = text.rstrip("/")
    if not _PREFIX.fullmatch(prefix):
        raise DefinitionError(
            f"{text!r} is not a prefix. Give the path that comes before the app's own paths, such as /agents."
        )
    return prefix


def placed(scope: Scope, prefix: str) -> Scope:
    """Return a request's scope in which `root_path` is the app's prefix and `path` begins with it, as ASGI specifies.

    `prefix` is the configured one. If it is "", the app has the prefix that its server names, such as where it is mounted. It
    makes no difference whether a proxy has removed the prefix from the path or passes it on.
    """
    root = scope.get("root_path", "").rstrip("/")
    outer = scope.get("app_root_path", "").rstrip(
        "/"
    )  # what a proxy in front of all mounted apps has removed
    path = _below(scope["path"], root, root.removeprefix(outer), prefix)
    root = prefix or root
    return {**scope, "path": root + path, "root_path": root, "app_root_path": root}


def _below(path: str, *prefixes: str) -> str:
    """Return what follows the first of the prefixes that a path has. A path that has none is returned as it is."""
    for prefix in prefixes:
        if prefix and (path == prefix or path.startswith(f"{prefix}/")):
            return path.removeprefix(prefix)
    return path


def route_path(request: HTTPConnection) -> str:
    """Return a request's path below the app's prefix. It is "" for the prefix itself, without a slash at its end."""
    return request.scope["path"].removeprefix(request.scope.get("root_path", ""))


def prefix_of(request: HTTPConnection) -> str:
    """Return the app's prefix as it is written in an address, "" for none."""
    return quote(request.scope.get("root_path", ""))
