"""Progressive disclosure: the built-in tool by which a model opens what it was shown in short."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from handrail.context import ToolContext
from handrail.errors import VisibilityExpansionRequired
from handrail.prompt import OPENER
from handrail.tools import Tool, ToolResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from handrail.prompt import RenderedPrompt


@dataclass(frozen=True)
class Sections:
    """Which sections to open."""

    sections: Annotated[
        list[str], Field(description="The paths of the sections, as their summaries give them.")
    ]


def opener(rendered: Callable[[], RenderedPrompt[Any]], in_place: bool) -> Tool[Sections, list[str]]:
    """The tool that opens sections of what is rendered now.

    Its result is their text, so everything said before stays as it was sent. Their tools can be called
    in the next turn. An adapter that can't do so `in_place` raises `VisibilityExpansionRequired`.
    """

    async def open_sections(params: Sections, *, context: ToolContext) -> ToolResult[list[str]]:
        opening = rendered().open(params.sections)
        if not in_place:
            raise VisibilityExpansionRequired(params.sections)
        names = ", ".join(tool.name for tool in opening.tools)
        more = f"\n\nThese tools can be called from now on: {names}." if names else ""
        return ToolResult.ok(params.sections, opening.text + more, exclude_value_from_context=True)

    return Tool(
        OPENER,
        "Show sections in full that were given as summaries, with their tools.",
        open_sections,
        accepts_overrides=False,
        effect="pure",
    )
