"""`mcp.json` files of other programs, read as they are.

The servers are under `mcpServers`, or under `servers` in some programs. Each has a `command` with `args`, `env` and
`cwd`, or a `url` with `headers`. `${NAME}` and `${env:NAME}` stand for environment variables, and `${NAME:-text}` has a
default. Keys that only concern the other program are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, cast

from handrail.errors import DefinitionError
from handrail.mcp.login import Login
from handrail.mcp.section import McpTools
from handrail.mcp.tools import ServersFile
from handrail.mcp.transport import StdioServer
from handrail.mcp.url_transport import UrlServer
from handrail.text.secrets import is_secret_name

_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def load_servers(path: str | Path, **options: Any) -> tuple[McpTools, ...]:
    """Return a section for each server in an `mcp.json` file. `options` are passed on to `McpTools`.

    A server marked as disabled is left out. If several servers remain, the tools of each have a prefix made from its name,
    unless `options` has a `prefix`. Raises `DefinitionError` if the file can't be read, if it or an option is invalid, or if a
    server that is not disabled uses an environment variable that is not set and has no default.
    """
    try:
        text = Path(path).read_bytes()
        found: Any = json.loads(text.decode("utf-8-sig"))
    except OSError as error:
        raise DefinitionError(
            f"{path} can't be read: {error.strerror or error}. Pass the path of an mcp.json."
        ) from None
    except (ValueError, RecursionError) as error:
        raise DefinitionError(f"{path} is not valid JSON: {error}. Correct the file.") from None
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
    prefixes = _prefixes(path, list(named))
    sections = tuple(
        _section(str(path), name, entry, "" if len(named) == 1 else prefixes[name], options)
        for name, entry in named.items()
    )
    for section in sections:
        section.server.source = ServersFile(str(Path(path).resolve()), hashlib.sha256(text).hexdigest())
    return sections


def _prefixes(path: str | Path, names: Sequence[str]) -> dict[str, str]:
    """Return the prefix of each server's tools.

    No prefix begins with the prefix of another server, so no server can list a tool under the name of another server's tool.
    Raises `DefinitionError` if two servers have names that policies could not tell apart.
    """
    plain = {name: re.sub(r"[^A-Za-z0-9_-]", "_", name) for name in names}
    for one, other in combinations(names, 2):
        if plain[one].lower() == plain[other].lower():
            raise DefinitionError(
                f"{path}: the servers {one!r} and {other!r} have names that policies can't tell apart. Rename one of them."
            )
    found = {name: f"{each[:30]}_" for name, each in plain.items()}
    for name, prefix in tuple(found.items()):
        others = [found[other].lower() for other in names if other != name]
        if any(other.startswith(prefix.lower()) for other in others):
            digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
            found[name] = f"{prefix[:22]}{'' if prefix[:22].endswith('_') else '_'}{digest}_"
    return found


def _section(path: str, name: str, entry: Any, prefix: str, options: Mapping[str, Any]) -> McpTools:
    where = f"{path}, server {name!r}"
    if not isinstance(entry, dict):
        raise DefinitionError(
            f'{where} is not an object. Write {{"command": "…", "args": […]}} or {{"url": "…"}}.'
        )
    given = {key: each for key, each in cast("dict[str, Any]", entry).items() if each is not None}
    command, arguments, url = given.get("command"), given.get("args", []), given.get("url")
    if not isinstance(command or url, str) or not isinstance(arguments, list):
        raise DefinitionError(
            f'{where} needs a "command" as a string, with "args" as a list, or a "url" as a string.'
        )
    if given.get("type") == "sse" or given.get("transport") == "sse":
        raise DefinitionError(
            f'{where} uses the old SSE transport. Write its streamable HTTP address, and "http" instead of "sse".'
        )
    words = [str(word) for word in (command, *cast("list[Any]", arguments)) if word is not None]
    cwd = given.get("cwd")
    fill = _Filler(where)
    env, headers = fill.mapping(given.get("env", {})), fill.mapping(given.get("headers", {}))
    filled = [fill.text(word) for word in words]
    folder = None if cwd is None else fill.text(str(cwd))
    address = "" if command else fill.text(str(url))
    try:
        server = (
            StdioServer(filled, env, folder, secrets=fill.secrets)
            if command
            else UrlServer(address, headers, _login(where, given.get("oauth"), headers), secrets=fill.secrets)
        )
    except DefinitionError as error:
        raise DefinitionError(f"{where}: {error}") from None
    made: dict[str, Any] = {"server": server, "prefix": prefix, **options}
    return McpTools(name, **made)


def _login(where: str, oauth: Any, headers: Mapping[str, str]) -> Login | None:
    """Return how to log in to a server; None if its headers include `Authorization`.

    `oauth` may name the `issuer` and the `endpoints` of `Login`. Raises `DefinitionError` if they are not strings.
    """
    if any(name.lower() == "authorization" for name in headers):
        return None
    given: dict[str, Any] = cast("dict[str, Any]", oauth) if isinstance(oauth, dict) else {}
    issuer, listed = given.get("issuer", ""), given.get("endpoints", [])
    endpoints: list[Any] = cast("list[Any]", listed) if isinstance(listed, list) else [None]
    if not all(isinstance(each, str) for each in (issuer, *endpoints)):
        raise DefinitionError(
            f'{where}: "oauth" is not valid. Write {{"issuer": "https://…", "endpoints": ["https://…"]}}.'
        )
    return Login(issuer=issuer, endpoints=tuple(endpoints))


class _Filler:
    """Replaces the environment variables in the settings of one server, and notes the values that are secrets."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.secrets: list[str] = []

    def mapping(self, given: Any) -> dict[str, str]:
        if not isinstance(given, dict):
            raise DefinitionError(
                f'{self._where}: "env" and "headers" must be objects of strings. Write {{"NAME": "text"}}.'
            )
        return {str(key): self.text(str(value)) for key, value in cast("dict[str, Any]", given).items()}

    def text(self, text: str) -> str:
        """Replace the variables in a text. Raises `DefinitionError` if one is not set and has no default."""
        return _VARIABLE.sub(self._value, text)

    def _value(self, match: re.Match[str]) -> str:
        default: str | None = match[2]
        found = os.environ.get(match[1], default)
        if found is None:
            raise DefinitionError(
                f"{self._where} needs the environment variable {match[1]}, which is not set. Set it, or write a default: ${{{match[1]}:-text}}."
            )
        if is_secret_name(match[1]):
            self.secrets.append(found)
        return found
