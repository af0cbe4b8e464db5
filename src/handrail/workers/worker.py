"""`Worker`: an agent kept in a file and called by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handrail.clock import Clock
from handrail.deadline import Deadline
from handrail.errors import WorkerError
from handrail.limits import Budget
from handrail.prompt import MarkdownSection, Prompt, Section
from handrail.protocols import ToolPolicy
from handrail.schema import JsonSchema
from handrail.tools import Effect, Tool
from handrail.workers.attachments import NO_ATTACHMENTS, READ_ATTACHMENT
from handrail.workers.front_matter import AttachmentRule, CreationDefaults, FrontMatter, Limits
from handrail.workers.template import Instructions, rendered

if TYPE_CHECKING:
    from pydantic import BaseModel

    from handrail.workers.registry import WorkerRegistry


@dataclasses.dataclass(frozen=True)
class Rendered:
    """What fills a worker's prompt: its instructions, rendered for one run."""

    instructions: str


@dataclasses.dataclass(frozen=True)
class InstructionsSection(MarkdownSection[Rendered]):
    """A worker's instructions; they have no heading."""

    def heading(self, depth: int) -> str:
        return ""


@dataclasses.dataclass(frozen=True, eq=False)
class Worker:
    """An agent kept in a file. A frozen value: the file is read once, by the registry."""

    name: str
    description: str
    path: Path
    model: str | None
    """`provider:name`; None for the caller's."""
    limits: Limits
    attachments: AttachmentRule
    """Which files it may be given."""
    tools: tuple[str, ...]
    """The names of its tools, those of built-in sections too."""
    workers: tuple[str, ...]
    """The names of the workers it may call."""
    locked: bool
    create: bool
    """May its model create workers?"""
    creation_defaults: CreationDefaults
    instructions: str
    """The template as it stands in the file."""
    output_schema: JsonSchema | None
    front: FrontMatter = dataclasses.field(repr=False)
    prompt: Prompt[Any] = dataclasses.field(repr=False)
    """Instructions, tools and policies. It takes `Rendered`, which `render` gives."""
    effect: Effect
    """What calling it may do at most."""
    registry: WorkerRegistry = dataclasses.field(repr=False)
    _template: Instructions = dataclasses.field(repr=False)

    def render(self, input: str, attachments: Sequence[str] = ()) -> Rendered:
        """The instructions for one run, or `WorkerError` with file and line."""
        return Rendered(rendered(self._template, self.name, input, attachments))

    def budget(self) -> Budget | None:
        """What one run may spend; None where its file does not say."""
        limits = self.limits
        budget = Budget(limits.tokens, limits.money, limits.requests, limits.tool_calls)
        return budget if budget.limits() else None

    def deadline(self, clock: Clock) -> Deadline | None:
        """When a run that begins now must have ended; None where its file does not say."""
        seconds = self.limits.seconds
        return None if seconds is None else Deadline.after(seconds, clock=clock)

    def without_model(self) -> WorkerError:
        """What is said where neither its file nor whoever runs it names a model."""
        return WorkerError(
            f"nothing says which model runs the worker {self.name!r}. Write `model: provider:name` into "
            f"{self.path}, or give one: model='provider:name'; on the command line, --model provider:name."
        )


def prompt_of(
    name: str,
    tools: Sequence[Tool[Any, Any]],
    sections: Sequence[Section[Any]],
    policies: Sequence[ToolPolicy],
    output: type[BaseModel] | None,
    rule: AttachmentRule,
) -> Prompt[Any]:
    """The prompt of a worker."""
    extra = [READ_ATTACHMENT] if rule.count else []
    body: Section[Any] = InstructionsSection("Instructions", "instructions", "$instructions")
    given: Any = {} if output is None else {"output": output}
    return Prompt(name, [body, *sections], tools=[*tools, *extra], policies=policies, **given)


def rule_of(front: FrontMatter) -> AttachmentRule:
    return NO_ATTACHMENTS if front.attachments is None else front.attachments
