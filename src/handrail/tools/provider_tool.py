"""`ProviderTool`: a tool that a model's provider runs itself, such as a web search."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, cast

from handrail.errors import ToolDefinitionError
from handrail.text.spelling import checked_arguments
from handrail.tools.definition import Tool

ProviderToolName = Literal["web_search", "web_fetch", "code_execution", "file_search"]

_KNOWN: Mapping[str, tuple[str, frozenset[str]]] = {
    "web_search": ("Searches the web.", frozenset({"net"})),
    "web_fetch": ("Reads web pages.", frozenset({"net"})),
    "code_execution": ("Runs code in the provider's sandbox.", frozenset()),
    "file_search": ("Searches files that are stored at the provider.", frozenset()),
}
"""The description of each tool, and its capabilities besides `provider.NAME`."""
PROVIDER_TOOLS: frozenset[str] = frozenset(_KNOWN)
"""The names of all provider tools. A provider may have only some of them."""


@checked_arguments
@dataclasses.dataclass(frozen=True, init=False, repr=False)
class ProviderTool(Tool[Any, Any]):
    """A tool that the model's provider runs itself: `tools=[ProviderTool("web_search", max_uses=3)]`.

    The provider runs it before Handrail sees the answer. So its calls do not pass through the gate, and can't be
    approved one by one. Instead, policies decide whether the tool is offered, before each answer is requested. They see
    a tool with the effect `read` and the capability `provider.NAME`, and also `net` for `web_search` and `web_fetch`.
    If a policy denies the tool, the request is sent without it. If a policy asks, the run fails, because nobody can be
    asked before the provider runs the tool.

    `max_uses` limits how often the provider runs it for one request. `allowed_domains` and `blocked_domains` limit
    where it looks, and `stores` names the provider's stores that `file_search` searches. `options` are further fields
    of the tool in the provider's API. If the provider does not support the tool or one of the limits, the request fails
    before it is sent, with an error that names what is missing.
    """

    max_uses: int | None
    allowed_domains: tuple[str, ...]
    blocked_domains: tuple[str, ...]
    stores: tuple[str, ...]
    options: Mapping[str, Any] = dataclasses.field(hash=False)

    def __init__(
        self,
        name: ProviderToolName,
        *,
        max_uses: int | None = None,
        allowed_domains: Sequence[str] = (),
        blocked_domains: Sequence[str] = (),
        stores: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if name not in _KNOWN:
            raise ToolDefinitionError(
                str(name), "it is not a known provider tool", f"Pass one of {', '.join(_KNOWN)}."
            )
        description, capabilities = _KNOWN[name]
        super().__init__(
            name,
            description,
            capabilities=capabilities | {f"provider.{name}"},
            effect="read",
            accepts_overrides=False,
        )
        given: Any = max_uses
        if given is not None and (type(given) is not int or given < 1):
            raise ToolDefinitionError(
                name, f"max_uses is {given!r}", "Pass a whole number of at least 1, or None."
            )
        limits = {
            "max_uses": max_uses,
            "allowed_domains": _texts(name, "allowed_domains", allowed_domains),
            "blocked_domains": _texts(name, "blocked_domains", blocked_domains),
            "stores": _texts(name, "stores", stores),
            "options": MappingProxyType(dict(options or {})),
        }
        if allowed_domains and blocked_domains:
            raise ToolDefinitionError(
                name, "it has both allowed_domains and blocked_domains", "Pass only one of them."
            )
        if name == "file_search" and not stores:
            raise ToolDefinitionError(
                name, "it has no stores to search", "Pass their ids: stores=['vs_123']."
            )
        for field, value in limits.items():
            object.__setattr__(self, field, value)

    def limits(self) -> dict[str, Any]:
        """Return the limits that were set, by name, apart from `options`."""
        names = ("max_uses", "allowed_domains", "blocked_domains", "stores")
        return {name: value for name in names if (value := getattr(self, name))}

    def __repr__(self) -> str:
        said = "".join(f", {name}={value!r}" for name, value in self.limits().items())
        return f"ProviderTool({self.name!r}{said})"


def _texts(tool: str, field: str, given: Any) -> tuple[str, ...]:
    is_list = isinstance(given, list | tuple | set | frozenset)
    found = tuple(cast("Sequence[Any]", given)) if is_list else ()
    if not is_list or not all(isinstance(each, str) and each for each in found):
        raise ToolDefinitionError(tool, f"{field} is {given!r}", f"Pass a list of strings: {field}=['...'].")
    return found
