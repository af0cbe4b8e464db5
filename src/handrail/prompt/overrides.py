"""`Overrides`: tuned texts for prompts, kept in files beside the code.

A file replaces the texts of one prompt: the bodies and summaries of its sections, and the descriptions and
examples of its tools. Each override identifies its original by a hash. If the original now has a different
hash, the override is stale: it is reported and not applied.

This module also lists the texts that can be replaced, reads override files, and writes starter files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import pydantic_core

from handrail.errors import FileInTheWay, PromptDefinitionError, ToolDefinitionError
from handrail.prompt.rendering import AnyTool, Words, example_words
from handrail.prompt.section import Section, check_placeholders, fields_of, read_template, walk
from handrail.tools import ToolExample

if TYPE_CHECKING:
    from handrail.prompt.prompt import Prompt


State = Literal["applied", "stale", "unknown", "refused"]


@dataclass(frozen=True, slots=True)
class OverrideReport:
    """The state of one override, and what to do if it is not applied."""

    path: str
    """The path of a section, or the name of a tool."""
    kind: Kind
    state: State
    hint: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.path!r} is {self.state}. {self.hint}".rstrip()


class Overrides:
    """A folder with one file of overrides, `<prompt's name>.toml`, for each prompt that has any.

    A file is read when its prompt is defined. `check` reads it again and reports for each override whether it
    is *applied*, *stale* (its original has changed), *unknown* (the prompt has no such text), or *refused*
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
        """Return the path of a prompt's override file, whether or not it exists."""
        return self.folder / f"{prompt.name}.toml"

    def check(self, prompt: Prompt[Any]) -> tuple[OverrideReport, ...]:
        """Read the prompt's file again, and return a report on each of its overrides.

        Raises `PromptDefinitionError` if the file, or a text in it, is invalid.
        """
        return self.apply(prompt, prompt.params_type).reports

    def apply(self, prompt: Prompt[Any], params_type: Any) -> TunedWords:
        """Return the prompt's texts with its overrides applied.

        Raises `PromptDefinitionError` if the file, or a text in it, is invalid.
        """
        return TunedWords(self.file_of(prompt), tuple(originals(prompt)), params_type)

    def write_starter(self, prompt: Prompt[Any]) -> Path:
        """Write a file to edit, with every text that can be overridden, and return its path.

        Raises `FileInTheWay` if the file exists.
        """
        file = self.file_of(prompt)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with file.open("x", encoding="utf-8", newline="\n") as written:
                written.write(starter(prompt.name, originals(prompt)))
        except FileExistsError:
            problem = "it already exists; move it away to start again"
            raise FileInTheWay(str(file), problem) from None
        return file


def stale_overrides(prompt: Prompt[Any]) -> tuple[OverrideReport, ...]:
    """Return a report on each stale override of a prompt. An override is stale if its original has changed."""
    reports = () if prompt.overrides is None else prompt.overrides.check(prompt)
    return tuple(report for report in reports if report.state == "stale")


class TunedWords(Words):
    """A prompt's texts with its overrides applied."""

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
        """Apply one override if its original has not changed and accepts it. Returns a report.

        Raises `PromptDefinitionError` if the new text is invalid.
        """
        found = [one for one in self._known if (one.kind, one.path) == (override.kind, override.path)]
        accepting = [one for one in found if one.accepts]
        fitting = [one for one in accepting if one.replaces == override.replaces]
        state: State
        if not found:
            state, hint = "unknown", self._unknown_hint(override)
        elif not accepting:
            state = "refused"
            hint = "It has accepts_overrides=False: remove the override, or allow it there."
        elif not fitting:
            state = "stale"
            hint = f'The text in the code has changed: compare both, then write replaces = "{accepting[0].replaces}".'
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


Kind = Literal["body", "summary", "description", "examples"]

# --- what can be overridden ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Original:
    """A text or a list of examples from the code, with its hash."""

    kind: Kind
    path: str
    """The path of a section, or the name of a tool."""
    value: str | tuple[ToolExample[Any, Any], ...]
    replaces: str
    """The hash by which an override identifies this original."""
    accepts: bool
    """Whether the section or tool accepts overrides."""
    tool: AnyTool | None = None


def originals(prompt: Prompt[Any]) -> Iterator[Original]:
    """Yield the texts and examples of a prompt's own tools, then those of its sections and their tools, in declaration order."""
    yield from _of_tools(prompt.tools)
    for path, section in walk(prompt.sections):
        yield from _of_section(path, section)
        yield from _of_tools(section.tools)


def _of_section(path: str, section: Section[Any]) -> Iterator[Original]:
    accepts = section.accepts_overrides
    yield Original("body", path, section.template, text_digest(section.template), accepts)
    if section.summary is not None:
        yield Original("summary", path, section.summary, text_digest(section.summary), accepts)


def _of_tools(tools: Sequence[AnyTool]) -> Iterator[Original]:
    for tool in tools:
        words = [example_words(tool, example) for example in tool.examples]
        accepts = tool.accepts_overrides
        yield Original(
            "description", tool.name, tool.description, text_digest(tool.description), accepts, tool
        )
        yield Original("examples", tool.name, tool.examples, text_digest(json.dumps(words)), accepts, tool)


def text_digest(text: str) -> str:
    """Return the hash by which an override identifies the text it replaces."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- reading -------------------------------------------------------------------------------------

_KINDS: dict[str, tuple[Kind, ...]] = {"sections": ("body", "summary"), "tools": ("description", "examples")}


@dataclass(frozen=True, slots=True)
class Override:
    """One override from an override file."""

    kind: Kind
    path: str
    replaces: str
    value: str | tuple[ToolExample[Any, Any], ...]


def read_overrides(file: Path) -> tuple[Override, ...]:
    """Read every override in a file. Returns an empty tuple if the file does not exist.

    Raises `PromptDefinitionError` if the file can't be read or is invalid.
    """
    import tomllib  # imported only if overrides are used

    try:
        text = file.read_bytes().decode()
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptDefinitionError(
            f"overrides {file}", f"can't be read: {error}", "Make it a readable TOML file in UTF-8."
        ) from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PromptDefinitionError(
            f"overrides {file}", f"is not TOML: {error}", "Correct the file."
        ) from None
    return tuple(_Reader(file).all(data))


class _Reader:
    """Reads a decoded override file. Errors name the file and the place in it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def error(self, where: str, problem: str, hint: str) -> PromptDefinitionError:
        return PromptDefinitionError(f"overrides {self.file}", f"{where} {problem}".strip(), hint)

    def all(self, data: Mapping[str, Any]) -> Iterator[Override]:
        for group, named in self.table("", data, tuple(_KINDS)).items():
            for path, kinds in self.table(group, named, None).items():
                where = f"{group}.{path}"
                for kind, given in self.table(where, kinds, _KINDS[group]).items():
                    yield self.override(f"{where}.{kind}", cast(Kind, kind), path, given)

    def table(self, where: str, given: Any, known: tuple[str, ...] | None) -> Mapping[str, Any]:
        if not isinstance(given, Mapping):
            raise self.error(f"`{where}`", f"is {given!r}", "Make it a table.")
        found = cast("Mapping[str, Any]", given)
        for key in found:
            if known is not None and key not in known:
                hint = (
                    f"It can have {', '.join(map(repr, known))}. Names, types and structure stay in the code."
                )
                raise self.error(f"`{where}`" if where else "it", f"has the key {key!r}", hint)
        return found

    def override(self, where: str, kind: Kind, path: str, given: Any) -> Override:
        value_key = "example" if kind == "examples" else "text"
        table = self.table(where, given, ("replaces", value_key))
        replaces = self.text(where, table, "replaces")
        if kind != "examples":
            return Override(kind, path, replaces, self.text(where, table, "text"))
        examples: Any = table.get("example")
        if not isinstance(examples, list):
            raise self.error(f"`{where}`", "has no examples", f"Write each under [[{where}.example]].")
        each = [self.example(f"{where}.example", one) for one in cast("list[Any]", examples)]
        return Override(kind, path, replaces, tuple(each))

    def example(self, where: str, given: Any) -> ToolExample[Any, Any]:
        table = self.table(where, given, ("description", "input", "output"))
        description = self.text(where, table, "description")
        values = {name: self.json(where, table, name) for name in ("input", "output")}
        return ToolExample(description, values["input"], values["output"])

    def json(self, where: str, table: Mapping[str, Any], name: str) -> Any:
        text = self.text(where, table, name)
        try:
            return pydantic_core.from_json(text, allow_inf_nan=False)
        except ValueError as error:
            hint = 'Write it as JSON in a string, for example \'{"city": "Rome"}\'.'
            raise self.error(f"`{where}.{name}`", f"is not JSON: {error}", hint) from None

    def text(self, where: str, table: Mapping[str, Any], name: str) -> str:
        if name not in table:
            raise self.error(f"`{where}`", f"has no {name!r}", "Add it as a string.")
        if not isinstance(table[name], str):
            raise self.error(f"`{where}.{name}`", f"is {table[name]!r}", "Make it a string.")
        return table[name]


# --- writing -------------------------------------------------------------------------------------

_HEAD = """\
# The texts of the prompt {prompt}, which can be tuned here instead of in the code.
#
# Change a text and leave its `replaces` as it is: that is the hash of the text in the code. When the text in
# the code changes, yours is no longer applied and is reported, until you have compared both and written the
# new hash. What you do not change can be deleted. Names, types and structure stay in the code.
"""


def starter(prompt: str, known: Iterable[Original]) -> str:
    """Return the content of a starter file: every original that accepts overrides, as it is in the code."""
    blocks = [_HEAD.format(prompt=prompt)]
    written: set[tuple[str, str]] = set()
    for original in known:
        if original.accepts and (original.kind, original.path) not in written:
            written.add((original.kind, original.path))
            blocks.append("\n".join(_lines(original)) + "\n")
    return "\n".join(blocks)


def _lines(original: Original) -> Iterator[str]:
    group = "sections" if original.tool is None else "tools"
    name = toml_key(group, original.path, original.kind)
    yield f"[{name}]"
    yield f"replaces = {toml_string(original.replaces)}"
    if isinstance(original.value, str):
        yield f"text = {toml_string(original.value)}"
    elif not original.value:
        yield f"example = []  # write each under [[{name}.example]]: description, and input and output as JSON"
    elif original.tool is not None:
        for example in original.value:
            yield f"[[{name}.example]]"
            for field, text in example_words(original.tool, example).items():
                yield f"{field} = {toml_string(text)}"


_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")
_SHORT = {"\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"'}
_ESCAPED = re.compile(r'[\\"\x00-\x1f\x7f]')
_LITERAL = re.compile(r"""[^'\x00-\x1f\x7f]*["\\][^'\x00-\x1f\x7f]*\Z""")
"""Matches text with double quotes or backslashes that needs no escapes in single quotes, such as most JSON."""
# In a multi-line string, newlines and tabs are not escaped. A quote is escaped only before another quote or at the end.
_ESCAPED_LONG = re.compile(r'[\\\x00-\x08\x0b-\x1f\x7f]|"(?="|\Z)')


def toml_key(*parts: str) -> str:
    """Format a dotted TOML key: `tools.weather`, `sections."guidance.search"`."""
    return ".".join(part if _BARE.match(part) else _quoted(part) for part in parts)


def toml_string(text: str) -> str:
    """Format a text as a TOML string. A text with newlines becomes a multi-line string."""
    if "\n" not in text:
        return f"'{text}'" if _LITERAL.match(text) else _quoted(text)
    return f'"""\n{_ESCAPED_LONG.sub(_escape, text)}"""'


def _quoted(text: str) -> str:
    return f'"{_ESCAPED.sub(_escape, text)}"'


def _escape(match: re.Match[str]) -> str:
    found = match[0]
    return _SHORT.get(found) or f"\\u{ord(found):04x}"
