"""`mcp.json` files of other programs, read as they are.

The servers are under `mcpServers`, or `servers` in some programs. Each has a `command` with `args`, `env` and `cwd`, or a `url`
with `headers`. `${NAME}` and `${env:NAME}` stand for environment variables, and `${NAME:-text}` has a default. Keys that only concern the other program are
ignored.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from handrail.errors import DefinitionError
from handrail.mcp.section import McpTools

_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def load_servers(path: str | Path, **options: Any) -> tuple[McpTools, ...]:
    """Return a section for each server in an `mcp.json` file. `options` are passed on to `McpTools`.

    If there are several servers, the name of each is the prefix of its tools. A server marked as disabled is left out.
    Raises `DefinitionError` if the file can't be read or is invalid.
    """
    try:
        found: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DefinitionError(f"{path} can't be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise DefinitionError(f"{path} is not valid JSON: {error}.") from None
    whole: dict[str, Any] = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    servers: Any = whole.get("mcpServers", whole.get("servers"))
    if not isinstance(servers, dict) or not servers:
        raise DefinitionError(
            f'{path} names no servers. Write {{"mcpServers": {{"name": {{"command": "…"}}}}}}.'
        )
    named: dict[str, Any] = {
        name: entry
        for name, entry in cast("dict[str, Any]", servers).items()
        if not (isinstance(entry, dict) and cast("dict[str, Any]", entry).get("disabled") is True)
    }
    alone = len(named) == 1
    return tuple(
        _section(str(path), name, entry, "" if alone else _prefix(name), options)
        for name, entry in named.items()
    )


def _prefix(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:30] + "_"


def _section(path: str, name: str, entry: Any, prefix: str, options: Mapping[str, Any]) -> McpTools:
    where = f"{path}, server {name!r}"
    if not isinstance(entry, dict):
        raise DefinitionError(f"{where} is not an object with a command or a url.")
    given = cast("dict[str, Any]", entry)
    command, arguments, url = given.get("command"), given.get("args", []), given.get("url")
    if not isinstance(command or url, str) or not isinstance(arguments, list):
        raise DefinitionError(f'{where} needs a "command", with "args" as a list, or a "url".')
    if given.get("type") == "sse" or given.get("transport") == "sse":
        raise DefinitionError(f"{where} uses the old SSE transport. Use its streamable HTTP address.")
    words = [str(word) for word in (command, *cast("list[Any]", arguments)) if word is not None]
    cwd = given.get("cwd")
    made: dict[str, Any] = {
        "command": [_fill(where, word) for word in words] if command else (),
        "url": "" if command else _fill(where, str(url)),
        "cwd": None if cwd is None else _fill(where, str(cwd)),
        "prefix": prefix,
        "env": _filled(where, given.get("env", {})),
        "headers": _filled(where, given.get("headers", {})),
    }
    return McpTools(name, **{**made, **options})


def _filled(where: str, given: Any) -> dict[str, str]:
    if not isinstance(given, dict):
        raise DefinitionError(f'{where}: "env" and "headers" are objects of strings.')
    return {str(key): _fill(where, str(value)) for key, value in cast("dict[str, Any]", given).items()}


def _fill(where: str, text: str) -> str:
    """Replace the environment variables in a text. Raises `DefinitionError` if one is not set."""

    def value(match: re.Match[str]) -> str:
        default: str | None = match[2]
        found = os.environ.get(match[1], default)
        if found is None:
            raise DefinitionError(f"{where} needs the environment variable {match[1]}, which is not set.")
        return found

    return _VARIABLE.sub(value, text)
