"""Tool search: a model finds tools by searching, so that their descriptions need not be sent with each request.

Where the provider can load tools that were sent as deferred, the model calls what it has found by name. Elsewhere it has two fixed
tools, `search_tools` and `call_tool`, and the list of tools that is sent never changes. A call of `call_tool` becomes a call of the
tool that it names before it reaches the gate, so everything there sees the real tool.
"""

from __future__ import annotations

import re
import sqlite3
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import msgspec
from pydantic import Field

from handrail.context import ToolContext
from handrail.messages import CallAsked
from handrail.tools import Tool, ToolResult

SEARCHER = "search_tools"
"""The name of the built-in tool that finds tools."""
CALLER = "call_tool"
"""The name of the built-in tool that calls a tool that was found."""
MOST_FOUND = 8
"""Maximum number of tools that a search finds."""

AnyTool = Tool[Any, Any]
_WORD = re.compile(r"[^\W_]+")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class ToolIndex:
    """Tools by the words of their names, descriptions and arguments. SQLite ranks them, in memory."""

    def __init__(self, tools: Sequence[AnyTool]) -> None:
        self._tools = tuple(tools)
        self._rows = sqlite3.connect(":memory:", check_same_thread=False)
        weakref.finalize(self, self._rows.close)
        self._rows.execute(
            "CREATE VIRTUAL TABLE tools USING fts5(name, description, arguments, tokenize='porter unicode61')"
        )
        texts = [
            (_split(each.name), _split(each.description), _arguments_of(each.json_schema))
            for each in self._tools
        ]
        self._rows.executemany("INSERT INTO tools VALUES (?, ?, ?)", texts)

    def find(self, query: str) -> list[AnyTool]:
        """Return at most `MOST_FOUND` tools that share a word with the query, the best first. A tool of exactly this name is the first."""
        exact = [each for each in self._tools if each.name == query.strip()]
        words = _WORD.findall(_split(query))
        if not words:
            return exact
        rows = self._rows.execute(
            "SELECT rowid FROM tools WHERE tools MATCH ? ORDER BY bm25(tools, 8, 4, 1), rowid LIMIT ?",
            (" OR ".join(f'"{word}"' for word in words), MOST_FOUND),
        )
        ranked = [self._tools[cast("int", row[0]) - 1] for row in rows]
        return [*exact, *(each for each in ranked if each not in exact)][:MOST_FOUND]


def _split(text: str) -> str:
    """Return a text with its `camelCase` and `snake_case` names split into words."""
    return _HUMP.sub(" ", text).replace("_", " ")


def _arguments_of(schema: Any) -> str:
    """Return the names and descriptions of a tool's arguments."""
    inner = cast("dict[str, dict[str, Any]]", schema.get("properties") or {})
    return " ".join(f"{_split(name)} {each.get('description', '')}" for name, each in inner.items())


@dataclass(frozen=True)
class Query:
    """Arguments of the tool that finds tools."""

    query: Annotated[
        str,
        Field(
            min_length=1, max_length=500, description="Words that say what the tool should do, or its name."
        ),
    ]


@dataclass(frozen=True)
class Named:
    """Arguments of the tool that calls a tool that was found."""

    name: Annotated[str, Field(description="The name of the tool, as search_tools gives it.")]
    arguments: Annotated[dict[str, Any], Field(description="The arguments of the tool, by its parameters.")]


class SearchTool(Tool[Any, Any]):
    """One of the fixed tools of a tool search, which only the model calls."""


class ToolSearch:
    """Which of a run's tools are found by searching, and the tools for that."""

    def __init__(self, *, deferring: bool) -> None:
        self.deferring = deferring
        """Whether the provider loads deferred tools, so that the model calls them by their own names."""
        self._tools: tuple[AnyTool, ...] = ()
        self._index: ToolIndex | None = None

    def use(self, tools: Sequence[AnyTool]) -> None:
        """Search these tools from now on."""
        if tuple(tools) != self._tools:
            self._tools, self._index = tuple(tools), None

    def tools(self) -> list[AnyTool]:
        """Return the fixed tools that a model is offered."""
        return [self._searcher(), *([] if self.deferring else [_caller()])]

    def _searcher(self) -> AnyTool:
        async def search_tools(params: Query, *, context: ToolContext) -> ToolResult[list[Any] | None]:
            if self._index is None:
                self._index = ToolIndex(self._tools)
            found = self._index.find(params.query)
            if not found:
                return ToolResult.error(
                    f"None of the {len(self._tools)} tools matches {params.query!r}. Search with other words: what the tool does, or "
                    "what it works on."
                )
            described: list[Any] = [
                {"name": each.name, "description": each.description, "parameters": each.json_schema}
                for each in found
            ]
            if self.deferring:
                names = ", ".join(each.name for each in found)
                return ToolResult.ok(described, f"Found: {names}.", exclude_value_from_context=True)
            lines = b"\n".join(map(msgspec.json.encode, described)).decode()
            return ToolResult.ok(None, lines, exclude_value_from_context=True)

        how = (
            "The tools that it finds can then be called."
            if self.deferring
            else f"Call what it finds with {CALLER}."
        )
        return SearchTool(
            SEARCHER,
            f"Find tools. Most tools are not listed: search before you say that something can't be done. {how}",
            search_tools,
            accepts_overrides=False,
            effect="pure",
        )


class _Definition(msgspec.Struct, frozen=True):
    name: str
    description: str
    parameters: dict[str, Any]


def loaded_by(name: str, value: Any) -> tuple[tuple[str, ...], str]:
    """Return the names of the tools that a call with this value has loaded, and their definitions as JSON; ((), "") if it was no search."""
    if name != SEARCHER:
        return (), ""
    try:
        definitions = msgspec.convert(value, tuple[_Definition, ...])
    except (
        msgspec.ValidationError
    ):  # of a search by `call_tool`, or of another tool of this name in an earlier run
        return (), ""
    return tuple(each.name for each in definitions), msgspec.json.encode(definitions).decode()


def _caller() -> AnyTool:
    async def call_tool(params: Named, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.error(
            f"{params.name} can't be called by {CALLER}. If it is listed, call it by its own name."
        )

    return SearchTool(
        CALLER,
        f"Call a tool that {SEARCHER} has found.",
        call_tool,
        accepts_overrides=False,
        effect="pure",
    )


class _Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def stands_for_another(name: str, tools: Mapping[str, AnyTool]) -> bool:
    """Return whether a call by this name is one of `call_tool`, unless a tool of the run's own is called that."""
    tool = tools.get(name)
    return name == CALLER and (tool is None or isinstance(tool, SearchTool))


def unwrapped(call: CallAsked, tools: Mapping[str, AnyTool]) -> CallAsked:
    """Return the call that a call of `call_tool` stands for; the call itself if it is any other, or can't be read.

    A tool with secret parameters is not called like this, because secrets are masked by the name under which they were written.
    """
    if not stands_for_another(call.name, tools):
        return call
    try:
        inner = msgspec.json.decode(call.arguments, type=_Inner)
    except msgspec.DecodeError:
        return call
    tool = tools.get(inner.name)
    if tool is not None and tool.secret:
        return call
    return CallAsked(call.id, inner.name, bytes(inner.arguments).decode())
