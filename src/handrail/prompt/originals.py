"""What of a prompt can be overridden: each text as it stands in the code, and its hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from handrail.prompt.plan import AnyTool, example_words
from handrail.prompt.section import Section, walk
from handrail.tools import ToolExample

if TYPE_CHECKING:
    from handrail.prompt.definition import Prompt

Kind = Literal["body", "summary", "description", "examples"]


@dataclass(frozen=True, slots=True)
class Original:
    """One thing that an override can replace."""

    kind: Kind
    path: str
    """The path of a section, or the name of a tool."""
    value: str | tuple[ToolExample[Any, Any], ...]
    replaces: str
    """The hash that an override of it must name."""
    accepts: bool
    tool: AnyTool | None = None


def originals(prompt: Prompt[Any]) -> Iterator[Original]:
    """Everything of a prompt that could be overridden, in the order in which it is written."""
    yield from _of_tools(prompt.tools)
    for path, section in walk(prompt.sections):
        yield from _of_section(path, section)
        yield from _of_tools(section.tools)


def _of_section(path: str, section: Section[Any]) -> Iterator[Original]:
    accepts = section.accepts_overrides
    yield Original("body", path, section.template, digest(section.template), accepts)
    if section.summary is not None:
        yield Original("summary", path, section.summary, digest(section.summary), accepts)


def _of_tools(tools: Sequence[AnyTool]) -> Iterator[Original]:
    for tool in tools:
        words = [example_words(tool, example) for example in tool.examples]
        accepts = tool.accepts_overrides
        yield Original("description", tool.name, tool.description, digest(tool.description), accepts, tool)
        yield Original("examples", tool.name, tool.examples, digest(json.dumps(words)), accepts, tool)


def digest(text: str) -> str:
    """The hash by which an override names the text it replaces."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
