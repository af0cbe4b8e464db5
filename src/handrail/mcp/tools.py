"""`McpTool`: a tool of an MCP server, with the server's JSON Schema as it is.

The server is not trusted. Its names are mapped to names that a model can call, its schemas are checked and bounded, and what it
says about the effect of a tool is believed only if the user says so.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from mcp_types import Tool as Described

from handrail.context import ToolContext
from handrail.errors import DefinitionError
from handrail.schema.raw import RawSchema, check_foreign
from handrail.tools import Effect, Tool, ToolResult
from handrail.tools.definition import deep_copy

MAX_NAME = 64
MAX_TOOLS = 1_000
"""Maximum number of tools that one server may have."""

_UNFIT = re.compile(r"[^A-Za-z0-9_-]")


Call = Callable[["McpTool", dict[str, Any], ToolContext], Awaitable[ToolResult[Any]]]
"""Calls a server's tool with these arguments, and returns its result."""


class McpTool(Tool[Any, Any]):
    """A tool of an MCP server. Its arguments are plain JSON, checked against the server's schema."""

    remote: str
    """The server's name for the tool."""
    source: ServersFile | None

    def is_called(self, names: Names) -> bool:
        """Return whether the tool has this name and this capability. The server is not compared."""
        return self.name == names.name and names.capability in self.capabilities


class ServersFile(NamedTuple):
    """The file that names a server. `handrail runs resume` reads it again."""

    path: str
    digest: str
    """The SHA-256 digest of the file."""


class ToolRules(NamedTuple):
    """The user's rules for a server's tools."""

    prefix: str = ""
    effects: Mapping[str, Effect] = {}
    trusted: bool = False
    """Whether the server's claims about effects are believed."""
    timeout: float | None = None
    source: ServersFile | None = None
    gateway: str = ""
    """The gateway that offers the tools, as approvers and records name it; "" if there is none."""
    first: frozenset[str] | None = None
    """The names of the tools that the server listed first; None if it has not listed its tools yet."""

    def effect_of(self, described: Described) -> Effect:
        """Return the effect of a tool: the user's, or else the server's claim if it is trusted, or else `irreversible`."""
        given = self.effects.get(described.name)
        hints = described.annotations
        if given is not None or not self.trusted or hints is None:
            return given or "irreversible"
        if hints.read_only_hint:
            return "read"
        return "idempotent" if hints.idempotent_hint else "irreversible"


class Names(NamedTuple):
    """The names of one tool: the one that a model calls, its capability, and the server that it belongs to."""

    name: str
    capability: str
    server: str


def build_tool(described: Described, names: Names, rules: ToolRules, call: Call) -> McpTool:
    """Build the tool that a server describes. Raises `DefinitionError` if its schema can't be used."""
    owner = f"the tool {described.name!r} of the MCP server {names.server!r}"
    schema = cast("Mapping[str, Any]", described.input_schema)
    check_foreign(schema, owner)
    if schema.get("type", "object") != "object":
        raise DefinitionError(f'the schema of {owner} must have "type": "object".')

    async def handler(params: None, *, context: ToolContext) -> ToolResult[Any]:
        return await call(made, cast("Any", params), context)

    made = McpTool(
        "mcp",
        "A tool of an MCP server.",
        handler,
        effect=rules.effect_of(described),
        timeout=rules.timeout,
        capabilities=frozenset({names.capability}),
        accepts_overrides=False,
    )
    # Handrail's rules for names, params and descriptions do not apply to a server's tools.
    raw = RawSchema(schema)
    for field, value in (
        ("name", names.name),
        ("origin", f"server {names.server}" + (f" of the {rules.gateway}" if rules.gateway else "")),
        ("remote", described.name),
        ("source", rules.source),
        ("is_late", rules.first is not None and names.name not in rules.first),
        ("description", (described.description or described.title or "").strip() or described.name),
        ("_schema", raw),
        ("json_schema", raw.json_schema),
        ("secret", raw.secret),
        ("copy_params", deep_copy),
    ):
        object.__setattr__(made, field, value)
    return made


def map_names(remote: Sequence[str], prefix: str) -> dict[str, str]:
    """Return a name that a model can call for each of a server's names, in the same order.

    Characters that a tool's name can't contain become `_`. If that makes names equal, the one that needed no change stays as it
    is. The others, and names that are empty or too long, end with a digest of the original name. So no name depends on the
    order, and a tool whose name needed no change keeps it when the server adds other tools.
    """
    return _mapped({name: prefix + _UNFIT.sub("_", name) for name in remote}, prefix)


def capabilities_of(server: str, remote: Sequence[str]) -> dict[str, str]:
    """Return a capability in lower case for each of a server's names, such as `mcp.files.write_file`, by the rules of `map_names`."""
    start = _start_of(server)
    folded = {name: start + _UNFIT.sub("_", name).lower() for name in remote}
    return _mapped(folded, start)


def may_be_of(server: str, capability: str) -> bool:
    """Return whether a capability that a policy names could be one of this server's tools, or one that no server has by its name."""
    first, _, rest = capability.partition(".")
    of_a_tool = first == "mcp" and "." in rest and not rest.startswith("*")
    return not of_a_tool or capability.startswith(_start_of(server))


def _start_of(server: str) -> str:
    return f"mcp.{_UNFIT.sub('_', server).lower()}."


def _mapped(plain: Mapping[str, str], prefix: str) -> dict[str, str]:
    count = Counter(plain.values())
    return {
        name: mapped
        if name and (count[mapped] == 1 or mapped == prefix + name) and len(mapped) <= MAX_NAME
        else _digested(mapped, name)
        for name, mapped in plain.items()
    }


def _digested(mapped: str, name: str) -> str:
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{mapped[: MAX_NAME - 9]}_{digest}"
