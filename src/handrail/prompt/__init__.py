"""Prompts: trees of instructions, tools and policies, and their rendering for a model."""

from handrail.prompt.prompt import Prompt
from handrail.prompt.rendering import OPENER, ClosedSection, Opening, RenderedPrompt, ScopedPolicy
from handrail.prompt.section import MarkdownSection, Section, Visibility

__all__ = [
    "OPENER",
    "ClosedSection",
    "MarkdownSection",
    "Opening",
    "Prompt",
    "RenderedPrompt",
    "ScopedPolicy",
    "Section",
    "Visibility",
]
