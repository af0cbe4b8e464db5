"""`Worker`: an agent kept in a file and called by name. `Draft`: a worker's file while it is being checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handrail.clock import Clock
from handrail.concurrency.deadline import Deadline
from handrail.errors import DefinitionError, WorkerError
from handrail.guard import (
    CapabilityPolicy,
    RateLimitPolicy,
    ReadBeforeWritePolicy,
    SequentialDependencyPolicy,
)
from handrail.messages import Model
from handrail.models.names import check_name, model_named, split_name, split_names
from handrail.prompt import OPENER, MarkdownSection, Prompt, Section
from handrail.prompt.compact import Compact
from handrail.protocols import ToolPolicy
from handrail.resources.shell import Allow, Shell
from handrail.run.large_results import READER
from handrail.run.limits import Budget
from handrail.run.response import ANSWER_TOOL
from handrail.schema import JsonSchema
from handrail.sections import FileTools, ShellTools
from handrail.session.slices import declare
from handrail.tools import EFFECTS, Effect, Tool
from handrail.tools.definition import is_name, name_hint
from handrail.workers.attachments import NO_ATTACHMENTS, READ_ATTACHMENT
from handrail.workers.front_matter import (
    AttachmentRule,
    CreationDefaults,
    Finder,
    FrontMatter,
    Limits,
    PolicyEntry,
    Refuse,
    ShellEntry,
    Text,
    WorkerProblem,
    parse_file,
    suggest,
)
from handrail.workers.functions import Functions
from handrail.workers.instructions import Instructions, rendered
from handrail.workers.output_schema import output_type

if TYPE_CHECKING:
    from handrail.workers.registry import WorkerRegistry


@declare  # a run is recorded with its params
@dataclasses.dataclass(frozen=True)
class Rendered:
    """The params of a worker's prompt: its instructions, rendered for one run."""

    instructions: str


@dataclasses.dataclass(frozen=True)
class InstructionsSection(MarkdownSection[Rendered]):
    """A worker's instructions, without a heading."""

    def heading(self, depth: int) -> str:
        return ""


@dataclasses.dataclass(frozen=True, eq=False)
class Worker:
    """An agent kept in a file or, if a model created it, in a session. Later changes to the file do not affect this value."""

    name: str
    description: str
    path: Path
    """The worker's file. A created worker has none: its path is only `NAME.md`."""
    model: str | None
    """The model's name, `provider:name` or `module:name`, or several, separated by commas; None for the caller's."""
    limits: Limits
    attachments: AttachmentRule
    """The rule for the files that the worker may be given."""
    tools: tuple[str, ...]
    """The names of the worker's tools: the functions and tools that it lists from `tools.py`, and its file and shell tools."""
    workers: tuple[str, ...]
    """The names of the workers that this one may call."""
    locked: bool
    create: bool
    """Whether the worker's model may create workers."""
    creation_defaults: CreationDefaults
    instructions: str
    """The template of the instructions, as written in the file."""
    output_schema: JsonSchema | None
    front: FrontMatter = dataclasses.field(repr=False)
    prompt: Prompt[Any] = dataclasses.field(repr=False)
    """The prompt, with instructions, tools and policies.

    Its params are a `Rendered`, which `render` returns.
    """
    effect: Effect
    """The effect of a call to this worker: `idempotent` or `irreversible`."""
    registry: WorkerRegistry = dataclasses.field(repr=False)
    _template: Instructions = dataclasses.field(repr=False)

    def render(self, input: str, attachments: Sequence[str] = ()) -> Rendered:
        """Render the instructions for one run. Raises `WorkerError` if that fails, or if the result is empty."""
        return Rendered(rendered(self._template, self.name, input, attachments))

    def budget(self) -> Budget | None:
        """Return the budget of one run, or None if the worker's file sets none."""
        limits = self.limits
        budget = Budget(limits.tokens, limits.money, limits.requests, limits.tool_calls)
        return budget if budget.limits() else None

    def deadline(self, clock: Clock) -> Deadline | None:
        """Return the deadline of a run that begins now, or None if the worker's file sets none."""
        seconds = self.limits.seconds
        return None if seconds is None else Deadline.after(seconds, clock=clock)

    @property
    def commits_each(self) -> bool:
        """Whether each of the worker's calls commits separately, and stands even if the worker fails later."""
        return self.front.commit == "each"

    def find_model(self) -> Model | None:
        """Return the model that the worker's file names, or None if it names none.

        The module of a `module:name` may be in the worker's folder. Raises `DefinitionError` if there is no such model.
        """
        return None if self.model is None else model_named(self.model, self.registry.folder)

    def without_model(self) -> WorkerError:
        """Return the error for a run of this worker for which no model was named."""
        return WorkerError(
            f"no model is set for the worker {self.name!r}. Write `model: provider:name` into "
            f"{self.path}, or give one: model='provider:name'; on the command line, --model provider:name."
        )


def rule_of(front: FrontMatter) -> AttachmentRule:
    return NO_ATTACHMENTS if front.attachments is None else front.attachments


# --- from file to worker ---

CREATE = "create_worker"
CALL = "call_worker"
FILES = {"files": True, "files.read": False}
"""Names that stand for a group of file tools. True means that the group includes tools that write."""
BUILT_IN: frozenset[str] = frozenset(
    [
        *(tool.name for tool in FileTools().tools),
        "run_command",
        READ_ATTACHMENT.name,
        CREATE,
        CALL,
        ANSWER_TOOL,
        OPENER,
        READER,
    ]
)
"""Names of the built-in tools. No worker may have one of these names."""


class Draft:
    """A worker's file while it is checked, with the problems found so far."""

    def __init__(self, path: Path, text: str | None, find: Finder) -> None:
        self.path = path
        self.find = find
        self.text: Text | None = None if text is None else parse_file(text, find)
        named = None if self.text is None else self.text.front.name
        self.name: str = path.stem if named is None else named
        self.tools: list[Tool[Any, Any]] = []
        self.sections: list[Section[Any]] = []
        if not is_name(self.name):
            self.refuse(
                "name", f"the worker's name {self.name!r} is not allowed", name_hint(self.name, "worker")
            )
        elif self.name in BUILT_IN:
            self.refuse(
                "name", f"{self.name!r} is the name of a built-in tool", "Give the worker another name."
            )

    @property
    def description(self) -> str:
        said = None if self.text is None else self.text.front.description
        return said or f"Run the worker {self.name}."

    @property
    def effects(self) -> list[Effect]:
        """The effects of the draft's own tools, or only `irreversible` if its file can't be read or parsed."""
        if self.text is None:
            return ["irreversible"]
        return [tool.effect for part in (self, *self.sections) for tool in part.tools]

    def refuse(self, where: str, problem: str, hint: str) -> None:
        self.find.add(1 if self.text is None else self.text.line_of(where), problem, hint)

    def listed(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names of the workers that the draft may call. `names` are the names of all workers in the folder."""
        if self.text is None:
            return ()
        given = self.text.front.workers
        return tuple(name for name in names if name != self.name) if given == "*" else tuple(given)

    def equip(self, functions: Functions) -> None:
        """Look up the draft's tools and sections, and report those that are unknown, invalid, ambiguous or listed twice.

        If `tools.py` can't be loaded, unknown names are not reported.
        """
        if self.text is None:
            return
        front = self.text.front
        seen: set[str] = set()
        for index, entry in enumerate(front.tools):
            where = f"tools[{index}]"
            called = "shell" if isinstance(entry, ShellEntry) else entry
            if called in seen:
                self.refuse(where, f"{called!r} is listed twice", "Keep one of them.")
                continue
            seen.add(called)
            # If the file lists policies, the file tools add none.
            policies: Any = None if front.policies is None else ()
            if isinstance(entry, ShellEntry):
                self._add_shell(entry, where)
            elif entry in FILES:
                self.sections.append(FileTools(writes=FILES[entry], policies=policies))
            elif functions.defines(entry) and len(lines := functions.lines_of(entry)) > 1:
                at = " and ".join(f"{functions.path.name}:{line}" for line in lines)
                self.refuse(
                    where, f"there are {len(lines)} tools named {entry!r}: {at}", "Rename all but one."
                )
            elif functions.defines(entry):
                made = functions.tool(entry, self.find)
                self.tools += [] if made is None else [made]
            else:
                self._missing(entry, where, functions)
        if {"files", "files.read"} <= seen:
            self.refuse("tools", "`files` already includes `files.read`", "Keep one of them.")

    def _add_shell(self, entry: ShellEntry, where: str) -> None:
        try:
            rules = [Allow(*[... if each == "..." else each for each in command]) for command in entry.shell]
            self.sections.append(ShellTools(Shell(rules)))
        except DefinitionError as error:
            self.refuse(where, *error.parts)

    def _missing(self, name: str, where: str, functions: Functions) -> None:
        if functions.problems().problems:
            return  # `tools.py` could not be loaded, which is reported separately
        there = [*functions.names, *FILES]
        hint = suggest(name, there)
        if not functions.path.is_file():
            hint = (
                f"Define it in {functions.path}, which does not exist yet, or use one of {', '.join(FILES)}."
            )
        problem = f"there is no function {name!r} defined in {functions.path.name}"
        self.refuse(where, problem, hint + functions.note)

    def check_against(self, drafts: Sequence[Draft], functions: Functions) -> None:
        """Report if another worker or a function has the draft's name, or if a worker that it lists does not exist."""
        for other in drafts:
            if other is not self and other.name == self.name:
                self.refuse("name", f"{other.path} is also a worker named {self.name!r}", "Rename one.")
        if self.name in functions.names:
            place = f"{functions.path}:{functions.line_of(self.name)}"
            self.refuse("name", f"{place} also defines a function {self.name!r}", "Rename one.")
        if self.text is None or self.text.front.workers == "*":
            return
        names = [each.name for each in drafts]
        for index, name in enumerate(self.text.front.workers):
            if name not in names:
                problem = f"there is no worker {name!r} in this folder"
                self.refuse(f"workers[{index}]", problem, suggest(name, names))

    def unknown_models(self) -> list[WorkerProblem]:
        """Return a problem for each model in the file whose name is malformed, or names no known provider or module.

        These problems are kept apart from the draft's other ones, because a worker whose provider or module is unknown can
        still run on another model that its caller names.
        """
        if self.text is None:
            return []
        front, found = self.text.front, Finder(self.find.file)
        created = front.creation_defaults
        for where, name in (("model", front.model), ("creation_defaults.model", created and created.model)):
            try:
                if name is not None:
                    check_name(name, self.path.parent)
            except DefinitionError as error:
                found.add(self.text.line_of(where), *error.parts)
        return found.problems

    def finish(
        self,
        registry: WorkerRegistry,
        workers: Mapping[str, Tool[Any, Any]],
        effect: Effect,
        creation_tools: Callable[[Effect], Sequence[Tool[Any, Any]]],
        defaults: CreationDefaults,
    ) -> Worker | None:
        """Create the worker. If the draft has problems, reports them and returns None."""
        text = self.text
        if text is None:
            return None
        front = text.front
        if front.model is not None:
            try:
                for each in split_names(front.model):
                    split_name(each)  # checks only the form; whether the model exists is checked later
            except DefinitionError as error:
                self.refuse("model", *error.parts)
        template = Instructions(text.body, str(self.path), text.body_line)
        if not text.body.strip():
            self.find.add(text.body_line, "it has no instructions", "Write them below the front matter.")
        template.check(self.find)
        output = None if front.output is None else output_type(front.output, self.refuse)
        policies = policies_of(self.name, front.policies, self.refuse)
        if self.find.problems:
            return None
        rule = rule_of(front)
        tools = [*self.tools, *workers.values(), *(creation_tools(effect) if front.create else ())]
        body: Section[Any] = InstructionsSection("Instructions", "instructions", "$instructions")
        options: dict[str, Any] = {} if output is None else {"output": output}
        if front.settings.model_fields_set:
            options["model_settings"] = front.settings.model_settings()
        if front.compact.model_fields_set:
            options["compact"] = Compact(**front.compact.model_dump())
        if front.result_limit is not None:
            options["result_limit"] = front.result_limit
        try:
            prompt = Prompt[Any](
                self.name,
                [body, *self.sections],
                tools=[*tools, READ_ATTACHMENT] if rule.count else tools,
                policies=policies,
                **options,
            )
        except DefinitionError as error:
            self.refuse("tools", *error.parts)
            return None
        sections = [tool.name for section in self.sections for tool in section.tools]
        return Worker(
            name=self.name,
            description=self.description,
            path=self.path,
            model=front.model,
            limits=front.limits,
            attachments=rule,
            tools=(*(tool.name for tool in self.tools), *sections),
            workers=tuple(workers),
            locked=front.locked,
            create=front.create,
            creation_defaults=_over(defaults, front.creation_defaults),
            instructions=text.body,
            output_schema=front.output,
            front=front,
            prompt=prompt,
            effect=effect,
            registry=registry,
            _template=template,
        )


def _over(defaults: CreationDefaults, own: CreationDefaults | None) -> CreationDefaults:
    """Return the defaults for created workers: the registry's, overridden by those in the worker's file."""
    if own is None:
        return defaults
    return defaults.model_copy(update={name: value for name, value in own if value is not None})


# --- policies ---


def policies_of(worker: str, given: list[Any] | None, refuse: Refuse) -> tuple[ToolPolicy, ...]:
    """Create a worker's policies, and report invalid ones with `refuse`. The default is a `CapabilityPolicy`.

    A policy's state is stored under the policy's name. Except for `read_before_write`, that name includes the
    worker's name, so that workers do not share the state.
    """
    if given is None:
        return (CapabilityPolicy(name=f"{worker}.capability"),)
    made: list[ToolPolicy] = []
    for index, entry in enumerate(given):
        where = f"policies[{index}]"
        try:
            policy = _policy(worker, entry, where, refuse)
        except DefinitionError as error:
            refuse(where, *error.parts)
            continue
        if policy is not None and any(each.name == policy.name for each in made):
            refuse(where, f"there are two policies {policy.name!r}", "Merge them into one.")
        elif policy is not None:
            made.append(policy)
    return tuple(made)


def _policy(worker: str, entry: Any, where: str, refuse: Refuse) -> ToolPolicy | None:
    if entry == "read_before_write":
        return ReadBeforeWritePolicy()
    if entry == "capability":
        return CapabilityPolicy(name=f"{worker}.capability")
    rules: PolicyEntry = entry
    given = [rules.capability, rules.rate_limit, rules.sequential]
    if sum(each is not None for each in given) != 1:
        refuse(where, "a policy has one of `capability`, `rate_limit` and `sequential`", "Set exactly one.")
        return None
    if rules.rate_limit is not None:
        rate = rules.rate_limit
        return RateLimitPolicy(rate.most, rate.per_seconds, tools=rate.tools, name=f"{worker}.rate_limit")
    if rules.sequential is not None:
        return SequentialDependencyPolicy(rules.sequential, name=f"{worker}.sequential")
    words = rules.capability
    assert words is not None, "one of the three is given"
    verdicts: dict[str, Any] = {}
    for verdict in ("allow", "ask", "deny"):
        for word in getattr(words, verdict):
            if word in EFFECTS:
                refuse(
                    f"{where}.capability.{verdict}",
                    f"{word!r} is an effect, not a capability",
                    f"Write a capability of the tools, as in `{verdict}: [mail.send]`; "
                    "a tool declares it with `@tool(capabilities={'mail.send'})`.",
                )
                continue
            if word in verdicts:
                refuse(where, f"{word!r} is listed twice", "Keep one of them.")
            verdicts[word] = verdict
    scope = (".",) if words.scope is None else words.scope
    return CapabilityPolicy(verdicts, scope=scope, name=f"{worker}.capability")
