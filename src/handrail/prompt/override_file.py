"""The file of a prompt's overrides: what it can replace, reading it, and writing one to start from."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import pydantic_core

from handrail.errors import PromptDefinitionError
from handrail.prompt.plan import AnyTool, example_words
from handrail.prompt.section import Section, walk
from handrail.tools import ToolExample

if TYPE_CHECKING:
    from handrail.prompt.definition import Prompt

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
    """The hash that an override of it names."""
    accepts: bool
    tool: AnyTool | None = None


def originals(prompt: Prompt[Any]) -> Iterator[Original]:
    """Everything of a prompt that can be overridden, in declaration order."""
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
    """The hash with which an override names the text it replaces."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- reading -------------------------------------------------------------------------------------

_KINDS: dict[str, tuple[Kind, ...]] = {"sections": ("body", "summary"), "tools": ("description", "examples")}


@dataclass(frozen=True, slots=True)
class Override:
    """One override from the file."""

    kind: Kind
    path: str
    replaces: str
    value: str | tuple[ToolExample[Any, Any], ...]


def read_overrides(file: Path) -> tuple[Override, ...]:
    """Every override in a file; none if there is no file."""
    import tomllib  # only those who use overrides pay for it

    try:
        text = file.read_bytes().decode()
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptDefinitionError(
            f"overrides {file}", f"can't be read: {error}", "Make it a TOML file."
        ) from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PromptDefinitionError(
            f"overrides {file}", f"is not TOML: {error}", "Correct it there."
        ) from None
    return tuple(_Reader(file).all(data))


class _Reader:
    """Reads the decoded file. Errors name the file and the place in it."""

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
            raise self.error(f"`{where}`", f"has no {name!r}", "Give it, as a string.")
        if not isinstance(table[name], str):
            raise self.error(f"`{where}.{name}`", f"is {table[name]!r}", "Make it a string.")
        return table[name]


# --- writing -------------------------------------------------------------------------------------

_HEAD = """\
# The words of the prompt {prompt}, to be tuned here instead of in the code.
#
# Change a text and leave its `replaces` as it is: that is the hash of the text in the code. When the text in
# the code changes, yours is no longer applied and is reported, until you have compared both and written the
# new hash. What you do not change can be deleted. Names, types and structure stay in the code.
"""


def starter(prompt: str, known: Iterable[Original]) -> str:
    """Return the content of a file of overrides in which every text is still the one in the code."""
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
"""What needs no escapes in single quotes, such as JSON."""
# In a long text, line ends and tabs stay as they are, and so does a quote that no other follows.
_ESCAPED_LONG = re.compile(r'[\\\x00-\x08\x0b-\x1f\x7f]|"(?="|\Z)')


def toml_key(*parts: str) -> str:
    """A dotted key: `tools.weather`, `sections."guidance.search"`."""
    return ".".join(part if _BARE.match(part) else _quoted(part) for part in parts)


def toml_string(text: str) -> str:
    """A text as a value, on as many lines as it has."""
    if "\n" not in text:
        return f"'{text}'" if _LITERAL.match(text) else _quoted(text)
    return f'"""\n{_ESCAPED_LONG.sub(_escape, text)}"""'


def _quoted(text: str) -> str:
    return f'"{_ESCAPED.sub(_escape, text)}"'


def _escape(match: re.Match[str]) -> str:
    found = match[0]
    return _SHORT.get(found) or f"\\u{ord(found):04x}"
