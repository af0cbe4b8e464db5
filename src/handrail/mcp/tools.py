"""`McpTool`: a tool of an MCP server, with the server's JSON Schema as it is.

The server is not trusted. Its names are mapped to names that a model can call, its schemas are checked and bounded, and what it
says about the effect of a tool is believed only if the user says so.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol, cast

import pydantic_core
from mcp_types import Tool as Described

from handrail.context import ToolContext
from handrail.errors import DefinitionError, ToolValidationError
from handrail.schema import refuse_masks, to_json
from handrail.schema.foreign import check_foreign
from handrail.schema.misfits import misfits
from handrail.schema.problems import asks_for_secrets
from handrail.schema.read_only import read_only
from handrail.schema.secrets import WITHHELD, masked
from handrail.schema.size import check_size
from handrail.tools import Effect, Tool, ToolResult

MAX_NAME = 64
MAX_TOOLS = 1_000
"""Maximum number of tools of one server."""

_UNFIT = re.compile(r"[^A-Za-z0-9_-]")


class Call(Protocol):
    """Calls a tool of the server, by the server's name for it."""

    def __call__(
        self, tool: McpTool, arguments: dict[str, Any], context: ToolContext, /
    ) -> Awaitable[ToolResult[Any]]: ...


class McpTool(Tool[Any, Any]):
    """A tool of an MCP server. Its arguments are plain JSON, checked against the server's schema."""

    remote: str
    """The server's name for the tool."""

    def parse(self, arguments: str | bytes | Mapping[str, Any]) -> Any:
        """Return the arguments as JSON. Raises `ToolValidationError` if they do not match the server's schema.

        Unknown arguments are refused only if the schema forbids them. The server checks the rest of its schema.
        """
        value: Any = arguments
        if isinstance(arguments, str | bytes):
            check_size(arguments)
            try:
                value = pydantic_core.from_json(arguments or "{}", allow_inf_nan=False)
            except ValueError as error:
                raise ToolValidationError(f"the arguments are not valid JSON: {error}") from None
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise ToolValidationError("the arguments are not a JSON object. Send an object: {...}.")
        if self.secret:
            refuse_masks(to_json(cast("object", value)))
        wrong = misfits(self.json_schema, cast("object", value), secret=self.secret)
        if wrong:
            raise ToolValidationError("; ".join(map(str, wrong)))
        return cast("dict[str, Any]", value)

    def dump(self, params: Any) -> bytes:
        return to_json(masked(params, self.json_schema) if self.secret else params)

    def clear(self, params: Any) -> bytes:
        return to_json(params)

    def mask(self, arguments: str | bytes | Mapping[str, Any]) -> str:
        try:
            data = arguments if isinstance(arguments, str | bytes) else to_json(arguments)
            return self.dump(pydantic_core.from_json(data)).decode()
        except ValueError:
            return WITHHELD


def build_tool(
    described: Described, name: str, server: str, effect: Effect, timeout: float | None, call: Call
) -> McpTool:
    """Build the tool that a server describes. Raises `DefinitionError` if its schema can't be used."""
    owner = f"the tool {described.name!r} of the MCP server {server!r}"
    schema = cast("Mapping[str, Any]", described.input_schema)
    check_foreign(schema, owner)
    if schema.get("type", "object") != "object":
        raise DefinitionError(f'the schema of {owner} must have "type": "object".')
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise DefinitionError(
                f"the schema of {owner} refers to {reference[:80]!r}. Only references inside the schema are followed."
            )

    async def handler(params: None, *, context: ToolContext) -> ToolResult[Any]:
        return await call(made, cast("Any", params), context)

    made = McpTool(
        "mcp",
        "A tool of an MCP server.",
        handler,
        effect=effect,
        timeout=timeout,
        capabilities=frozenset({"mcp"}),
        accepts_overrides=False,
    )
    # Handrail's rules for names, params and descriptions do not apply to a server's tools.
    whole = {**schema, "type": "object", "properties": schema.get("properties", {})}
    for field, value in (
        ("name", name),
        ("remote", described.name),
        ("description", (described.description or described.title or "").strip() or described.name),
        ("json_schema", read_only(whole)),
        ("secret", asks_for_secrets(whole, whole)),
        ("copy_params", _copied),
    ):
        object.__setattr__(made, field, value)
    return made


def _copied(params: Any, arguments: str | bytes | Mapping[str, Any]) -> Any:
    return deepcopy(params)


def _references(schema: Any) -> Iterator[str]:
    """Yield every reference in a schema, whose size is already bounded."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            named = cast("dict[str, Any]", part)
            yield from (named[word] for word in ("$ref", "$dynamicRef") if isinstance(named.get(word), str))
            left.extend(named.values())
        elif isinstance(part, list):
            left.extend(cast("list[Any]", part))


def map_names(remote: Sequence[str], prefix: str) -> dict[str, str]:
    """Return a callable name for each of a server's names, in the same order.

    Characters that models can't write become `_`. A name that is then too long, or equal to another one,
    ends with a digest of the server's name, so that it does not depend on the order.
    """
    plain = {name: prefix + _UNFIT.sub("_", name) for name in remote}
    count: dict[str, int] = {}
    for name in plain.values():
        count[name] = count.get(name, 0) + 1
    return {
        name: mapped if name and count[mapped] == 1 and len(mapped) <= MAX_NAME else _digested(mapped, name)
        for name, mapped in plain.items()
    }


def _digested(mapped: str, name: str) -> str:
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{mapped[: MAX_NAME - 9]}_{digest}"


def effect_of(described: Described, trusted: bool) -> Effect:
    """Return the effect of a tool. A server's claims count only if they are trusted. Otherwise the tool is irreversible."""
    hints = described.annotations
    if not trusted or hints is None:
        return "irreversible"
    if hints.read_only_hint:
        return "read"
    return "idempotent" if hints.idempotent_hint else "irreversible"
