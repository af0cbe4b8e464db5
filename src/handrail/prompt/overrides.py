"""`Overrides`: tuned texts for prompts, kept in files beside the code.

A file has, for one prompt, other texts for its sections' bodies and summaries and for its tools'
descriptions and examples. Each one identifies its original by a hash. If the original has changed since, the
override is stale: it is reported and not applied.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from handrail.errors import FileInTheWay, PromptDefinitionError, ToolDefinitionError
from handrail.prompt.override_file import Kind, Original, Override, originals, read_overrides, starter
from handrail.prompt.plan import AnyTool, Words
from handrail.prompt.section import Section, check_placeholders, read_template
from handrail.prompt.template import fields_of

if TYPE_CHECKING:
    from handrail.prompt.definition import Prompt

State = Literal["applied", "stale", "unknown", "refused"]


@dataclass(frozen=True, slots=True)
class OverrideReport:
    """What happened to one override, and what to do if it is not applied."""

    path: str
    """The path of a section, or the name of a tool."""
    kind: Kind
    state: State
    hint: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.path!r} is {self.state}. {self.hint}".rstrip()


class Overrides:
    """A folder of overrides, with one file `<prompt's name>.toml` for each prompt that has some.

    A file is read when its prompt is defined. `check` reads it again and reports for each override whether it
    is *applied*, *stale* (its original has changed), *unknown* (there is nothing of that name), or *refused*
    (by `accepts_overrides=False`).
    """

    __slots__ = ("folder",)

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"Overrides({str(self.folder)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Overrides) and other.folder == self.folder

    def __hash__(self) -> int:
        return hash(self.folder)

    def file_of(self, prompt: Prompt[Any]) -> Path:
        """The file for the overrides of a prompt, whether it exists or not."""
        return self.folder / f"{prompt.name}.toml"

    def check(self, prompt: Prompt[Any]) -> tuple[OverrideReport, ...]:
        """A report on each override that the prompt's file has now."""
        return self.apply(prompt, prompt.params_type).reports

    def apply(self, prompt: Prompt[Any], params_type: Any) -> TunedWords:
        """Return the prompt's texts with its overrides applied, or raise the error for one that does not fit."""
        return TunedWords(self.file_of(prompt), tuple(originals(prompt)), params_type)

    def write_starter(self, prompt: Prompt[Any]) -> Path:
        """Write a file with every text that can be overridden, to be edited. An existing file is kept."""
        file = self.file_of(prompt)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with file.open("x", encoding="utf-8", newline="\n") as written:
                written.write(starter(prompt.name, originals(prompt)))
        except FileExistsError:
            problem = "there are overrides already; move the file away to start again"
            raise FileInTheWay(str(file), problem) from None
        return file


def stale_overrides(prompt: Prompt[Any]) -> tuple[OverrideReport, ...]:
    """Reports on the overrides of a prompt whose originals have changed."""
    reports = () if prompt.overrides is None else prompt.overrides.check(prompt)
    return tuple(report for report in reports if report.state == "stale")


class TunedWords(Words):
    """A prompt's words with its overrides applied."""

    def __init__(self, file: Path, known: Sequence[Original], params_type: Any) -> None:
        self.file = file
        self._params_type = params_type
        self._texts: dict[tuple[Kind, str], str] = {}
        self._tools: dict[int, AnyTool] = {}
        self._known = known
        self.reports = tuple(self._apply(override) for override in read_overrides(file))

    def body(self, path: str, section: Section[Any]) -> str:
        return self._texts.get(("body", path), section.template)

    def summary(self, path: str, section: Section[Any]) -> str | None:
        return self._texts.get(("summary", path), section.summary)

    def tool(self, tool: AnyTool) -> AnyTool:
        return self._tools.get(id(tool), tool)

    def _apply(self, override: Override) -> OverrideReport:
        """Apply one override, or say why not."""
        found = [one for one in self._known if (one.kind, one.path) == (override.kind, override.path)]
        accepting = [one for one in found if one.accepts]
        fitting = [one for one in accepting if one.replaces == override.replaces]
        state: State
        if not found:
            state, hint = "unknown", self._unknown_hint(override)
        elif not accepting:
            state = "refused"
            hint = "It has accepts_overrides=False: take the override out, or allow it there."
        elif not fitting:
            state = "stale"
            hint = f'The words in the code have changed: look again, then write replaces = "{accepting[0].replaces}".'
        else:
            state, hint = "applied", ""
            for original in fitting:
                self._replace(override, original)
        return OverrideReport(override.path, override.kind, state, hint)

    def _unknown_hint(self, override: Override) -> str:
        of_section = override.kind in ("body", "summary")
        kinds = ("body", "summary") if of_section else ("description", "examples")
        paths = sorted({one.path for one in self._known if one.kind in kinds})
        what = "section" if of_section else "tool"
        if override.path in paths:
            return f"That {what} has no {override.kind} to replace."
        known = f"There are {', '.join(map(repr, paths))}." if paths else ""
        return f"There is no such {what}. {known}".rstrip()

    def _replace(self, override: Override, original: Original) -> None:
        value = override.value
        if original.tool is not None:
            self._reword(override, original.tool)
        elif isinstance(value, str):
            place = f"overrides {self.file}, section {override.path!r}"
            what = "template" if override.kind == "body" else override.kind
            template = read_template(place, what, value)
            check_placeholders(place, what, template, fields_of(self._params_type), self._params_type)
            self._texts[override.kind, override.path] = value

    def _reword(self, override: Override, tool: AnyTool) -> None:
        changed: Mapping[str, Any] = {override.kind: override.value}
        try:
            self._tools[id(tool)] = self.tool(tool).with_words(**changed)
        except ToolDefinitionError as error:
            place = f"overrides {self.file}, tool {tool.name!r}"
            raise PromptDefinitionError(place, error.problem, error.hint) from None
