"""Reading a file of overrides. Whatever it says that can't be meant is an error that names the file."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pydantic_core

from handrail.errors import PromptDefinitionError
from handrail.prompt.originals import Kind
from handrail.tools import ToolExample

_KINDS: dict[str, tuple[Kind, ...]] = {"sections": ("body", "summary"), "tools": ("description", "examples")}
_FIXED = "Names, types and structure stay in the code."


@dataclass(frozen=True, slots=True)
class Override:
    """One override as it is written."""

    kind: Kind
    path: str
    replaces: str
    value: str | tuple[ToolExample[Any, Any], ...]


def read_overrides(file: Path) -> tuple[Override, ...]:
    """Every override in a file; none where there is no file."""
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
    """Reads the decoded file, knowing where it is for the words of an error."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def refuse(self, where: str, problem: str, mend: str) -> PromptDefinitionError:
        return PromptDefinitionError(f"overrides {self.file}", f"{where} {problem}".strip(), mend)

    def all(self, data: Mapping[str, Any]) -> Iterator[Override]:
        for group, named in self.table("", data, tuple(_KINDS)).items():
            for path, kinds in self.table(group, named, None).items():
                where = f"{group}.{path}"
                for kind, given in self.table(where, kinds, _KINDS[group]).items():
                    yield self.override(f"{where}.{kind}", cast(Kind, kind), path, given)

    def table(self, where: str, given: Any, known: tuple[str, ...] | None) -> Mapping[str, Any]:
        if not isinstance(given, Mapping):
            raise self.refuse(f"`{where}`", f"is {given!r}", "Make it a table.")
        found = cast("Mapping[str, Any]", given)
        for key in found:
            if known is not None and key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                mend = (
                    f"Did you mean {near[0]!r}?"
                    if near
                    else f"Known are {', '.join(map(repr, known))}. {_FIXED}"
                )
                raise self.refuse(f"`{where}`" if where else "it", f"has the key {key!r}", mend)
        return found

    def override(self, where: str, kind: Kind, path: str, given: Any) -> Override:
        value_key = "example" if kind == "examples" else "text"
        table = self.table(where, given, ("replaces", value_key))
        replaces = self.text(where, table, "replaces")
        if kind != "examples":
            return Override(kind, path, replaces, self.text(where, table, "text"))
        examples: Any = table.get("example")
        if not isinstance(examples, list):
            raise self.refuse(f"`{where}`", "has no examples", f"Write each under [[{where}.example]].")
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
            mend = 'Write it as JSON in a string, for example \'{"city": "Rome"}\'.'
            raise self.refuse(f"`{where}.{name}`", f"is not JSON: {error}", mend) from None

    def text(self, where: str, table: Mapping[str, Any], name: str) -> str:
        if name not in table:
            raise self.refuse(f"`{where}`", f"has no {name!r}", "Give it, as a string.")
        if not isinstance(table[name], str):
            raise self.refuse(f"`{where}.{name}`", f"is {table[name]!r}", "Make it a string.")
        return table[name]
