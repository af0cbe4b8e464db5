"""From a worker's file to a worker: everything that is wrong with it is found on the way, and said at once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handrail.adapter.output import ANSWER_TOOL
from handrail.errors import DefinitionError
from handrail.prompt import OPENER, Section
from handrail.resources.shell import Allow, Shell
from handrail.sections import FileTools, ShellTools
from handrail.tools import Effect, Tool
from handrail.tools.checks import is_name, name_hint
from handrail.workers.attachments import READ_ATTACHMENT
from handrail.workers.front_matter import CreationDefaults, ShellEntry
from handrail.workers.functions import Functions
from handrail.workers.output import output_type
from handrail.workers.policies import policies_of
from handrail.workers.problem import Finder
from handrail.workers.reading import Text, take_apart
from handrail.workers.template import Instructions
from handrail.workers.worker import Worker, prompt_of, rule_of

if TYPE_CHECKING:
    from handrail.workers.registry import WorkerRegistry

CREATE = "create_worker"
CALL = "call_worker"
FILES = {"files": True, "files.read": False}
"""The sections of files, and whether they write."""
BUILT_IN: frozenset[str] = frozenset(
    [
        *(tool.name for tool in FileTools().tools),
        "run_command",
        READ_ATTACHMENT.name,
        CREATE,
        CALL,
        ANSWER_TOOL,
        OPENER,
    ]
)
"""The names that tools of ours have in a worker."""


class Draft:
    """A worker's file on its way to being a worker."""

    def __init__(self, path: Path, text: str | None, find: Finder) -> None:
        self.path = path
        self.find = find
        self.text: Text | None = None if text is None else take_apart(text, find)
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
                "name", f"{self.name!r} is the name of a tool of Handrail", "Call the worker otherwise."
            )

    @property
    def description(self) -> str:
        said = None if self.text is None else self.text.front.description
        return said or f"Run the worker {self.name}."

    @property
    def effects(self) -> list[Effect]:
        """Of its own tools; of a file that can't be read, the worst."""
        if self.text is None:
            return ["irreversible"]
        return [tool.effect for part in (self, *self.sections) for tool in part.tools]

    def refuse(self, where: str, problem: str, mend: str) -> None:
        self.find.add(1 if self.text is None else self.text.line_of(where), problem, mend)

    def listed(self, names: Iterable[str]) -> tuple[str, ...]:
        """The workers it may call."""
        if self.text is None:
            return ()
        given = self.text.front.workers
        return tuple(name for name in names if name != self.name) if given == "*" else tuple(given)

    def equip(self, functions: Functions) -> None:
        """Find its tools."""
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
            # A list of policies stands for all of them; without one, files bring their own.
            policies: Any = None if front.policies is None else ()
            if isinstance(entry, ShellEntry):
                self._add_shell(entry, where)
            elif entry in FILES:
                self.sections.append(FileTools(writes=FILES[entry], policies=policies))
            elif entry in functions.names:
                made = functions.tool(entry, self.find)
                self.tools += [] if made is None else [made]
            else:
                self._missing(entry, where, functions)
        if {"files", "files.read"} <= seen:
            self.refuse("tools", "`files` has what `files.read` has", "Keep one of them.")

    def _add_shell(self, entry: ShellEntry, where: str) -> None:
        try:
            rules = [Allow(*[... if each == "..." else each for each in command]) for command in entry.shell]
            self.sections.append(ShellTools(Shell(rules)))
        except DefinitionError as error:
            self.refuse(where, *error.parts)

    def _missing(self, name: str, where: str, functions: Functions) -> None:
        if functions.problems().problems:
            return  # what keeps tools.py from being loaded is said where it is
        there = [*functions.names, *FILES]
        near = difflib.get_close_matches(name, there, n=1)
        mend = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(there)}."
        if not functions.path.is_file():
            mend = f"Define it in {functions.path}, which is not there; or use one of {', '.join(FILES)}."
        self.refuse(where, f"there is no function {name!r} defined in {functions.path.name}", mend)

    def check_against(self, drafts: Sequence[Draft], functions: Functions) -> None:
        """Names that stand for two things, and workers that are not there."""
        for other in drafts:
            if other is not self and other.name == self.name:
                self.refuse("name", f"{other.path} is a worker called {self.name!r} as well", "Rename one.")
        if self.name in functions.names:
            place = f"{functions.path}:{functions.line_of(self.name)}"
            self.refuse("name", f"{place} defines a function {self.name!r} as well", "Rename one.")
        if self.text is None or self.text.front.workers == "*":
            return
        names = [each.name for each in drafts]
        for index, name in enumerate(self.text.front.workers):
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                mend = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(names)}."
                self.refuse(f"workers[{index}]", f"there is no worker {name!r} in this folder", mend)

    def finish(
        self,
        registry: WorkerRegistry,
        workers: Mapping[str, Tool[Any, Any]],
        effect: Effect,
        creating: Callable[[Effect], Sequence[Tool[Any, Any]]],
        defaults: CreationDefaults,
    ) -> Worker | None:
        """The worker, or None where something is wrong with it, which has then been said."""
        text = self.text
        if text is None:
            return None
        front = text.front
        if front.model is not None and not all(front.model.partition(":")):
            mend = "Write provider:name, for example openai:gpt-5."
            self.refuse("model", f"{front.model!r} is not the name of a model", mend)
        template = Instructions(text.body, str(self.path), text.body_line)
        if not text.body.strip():
            self.find.add(text.body_line, "it has no instructions", "Write them below the front matter.")
        template.check(self.find)
        output = None if front.output is None else output_type(front.output, self.refuse)
        policies = policies_of(self.name, front.policies, self.refuse)
        if self.find.problems:
            return None
        own = [*self.tools, *workers.values(), *(creating(effect) if front.create else ())]
        try:
            prompt = prompt_of(self.name, own, self.sections, policies, output, rule_of(front))
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
            attachments=rule_of(front),
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
    """The registry's defaults, with what the worker's own file says in their place."""
    if own is None:
        return defaults
    said = {
        name: getattr(own, name) for name in CreationDefaults.model_fields if getattr(own, name) is not None
    }
    return defaults.model_copy(update=said)
