"""Tests for the definition of tools that a provider runs itself."""

from __future__ import annotations

from typing import Any

import pytest

from handrail import MarkdownSection, Prompt, ProviderTool
from handrail.errors import ToolDefinitionError


def test_it_is_a_tool_that_no_one_calls() -> None:
    """A provider's tool has an effect and capabilities for policies, and is not among the tools that a model calls."""
    search = ProviderTool("web_search", max_uses=3, allowed_domains=["python.org"])
    assert (search.effect, search.capabilities) == ("read", {"net", "provider.web_search"})
    assert ProviderTool("code_execution").capabilities == {"provider.code_execution"}
    rendered = Prompt("p", "Be brief.", tools=[search]).render()
    assert (rendered.tools, rendered.provider_tools) == ((), (search,))


def test_its_limits_are_part_of_its_value() -> None:
    """Two tools are equal only if their limits and options are, and the repr shows the limits but no options."""
    search = ProviderTool("web_search", max_uses=3, options={"token": "x"})
    assert search == ProviderTool("web_search", max_uses=3, options={"token": "x"})
    assert search != ProviderTool("web_search", max_uses=2, options={"token": "x"})
    assert search != ProviderTool("web_search", max_uses=3)
    assert repr(search) == "ProviderTool('web_search', max_uses=3)"
    assert len({search, ProviderTool("web_search")}) == 2


@pytest.mark.parametrize(
    ("name", "limits", "problem"),
    [
        ("browse", {}, "it is not a known provider tool. Pass one of web_search, web_fetch,"),
        ("web_search", {"max_uses": 0}, "max_uses is 0"),
        ("web_search", {"max_uses": True}, "max_uses is True"),
        ("web_search", {"allowed_domains": "a.com"}, "Pass a list of strings: allowed_domains="),
        ("web_search", {"allowed_domains": ["a"], "blocked_domains": ["b"]}, "Pass only one of them"),
        ("file_search", {}, "it has no stores to search. Pass their ids"),
        ("file_search", {"stores": [""]}, "Pass a list of strings: stores="),
    ],
)
def test_a_wrong_definition_says_what_to_pass(name: Any, limits: dict[str, Any], problem: str) -> None:
    """An unknown name, an invalid limit, or a missing or invalid store is refused when the tool is defined."""
    with pytest.raises(ToolDefinitionError) as raised:
        ProviderTool(name, **limits)
    assert problem in str(raised.value)


def test_a_section_shows_it_only_when_it_is_open() -> None:
    """A provider's tool in a section that is shown as a summary is offered once the section is opened."""
    search = ProviderTool("web_search")
    web = MarkdownSection("Web", "web", "Search.", tools=[search], summary="The web.", visibility="summary")
    rendered = Prompt("p", [web]).render()
    assert rendered.provider_tools == ()
    assert rendered.open(["web"]).rendered.provider_tools == (search,)
