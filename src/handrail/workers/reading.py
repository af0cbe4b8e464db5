"""Reading a worker's file: its YAML with the line of every value, and nothing in it that does more than say so."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pydantic_core

from handrail.errors import ToolValidationError
from handrail.schema.problems import location_of
from handrail.workers.extra import needed
from handrail.workers.front_matter import FRONT_MATTER, FrontMatter
from handrail.workers.problem import Finder

MOST_BYTES = 256 * 1024
"""A worker's file is something a person reads."""
MOST_FRONT_MATTER = 64 * 1024
_DEEPEST = 24

Place = tuple[str | int, ...]

_FENCE = re.compile(r"---[ \t]*\Z")
_AS = re.compile(r" \(as .*\)\Z")
_KINDS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null"))


class Text(msgspec.Struct, frozen=True):
    """A worker's file, taken apart and checked by itself."""

    front: FrontMatter
    body: str
    body_line: int
    """The line of the file at which the body begins."""
    lines: dict[str, int]
    """Where each value of the front matter stands, by its place: `limits.requests`."""

    def line_of(self, where: str) -> int:
        """The line of what is at this place, or of what it would be in."""
        return _line_of(where, self.lines)


def has_front_matter(text: str) -> bool:
    return bool(_FENCE.match(text.removeprefix("\ufeff").split("\n", 1)[0].rstrip("\r")))


def read_text(path: Path, find: Finder) -> str | None:
    """A file's text; None where it can't be read, which `find` then says."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        find.add(1, f"it can't be read: {error.strerror}", "Make it a readable file.")
        return None
    if len(raw) > MOST_BYTES:
        find.add(1, f"it has more than {MOST_BYTES} bytes", "Shorten it.")
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        find.add(raw.count(b"\n", 0, error.start) + 1, "it is not UTF-8", "Save it as UTF-8.")
        return None


def take_apart(text: str, find: Finder) -> Text | None:
    """The file's front matter and body; None where they can't be told, which `find` then says."""
    lines = [line.rstrip("\r") for line in text.removeprefix("\ufeff").split("\n")]
    if not _FENCE.match(lines[0]):
        find.add(
            1, "it has no front matter", "Begin the file with a line `---`, its settings, and another `---`."
        )
        return None
    end = next((number for number, line in enumerate(lines[1:], 1) if _FENCE.match(line)), None)
    if end is None:
        find.add(1, "its front matter has no end", "Put a line `---` below the settings.")
        return None
    front = "\n".join(lines[1:end])
    if len(front) > MOST_FRONT_MATTER:
        find.add(1, f"its front matter has more than {MOST_FRONT_MATTER} characters", "Shorten it.")
        return None
    before = len(find.problems)
    data, places = _Yaml(front, find).read()
    if len(find.problems) > before:
        return None
    taken = _validated(data, places, find)
    if taken is None:
        return None
    body = "\n".join(lines[end + 1 :]).rstrip()
    found = {location_of(place): line for place, line in places.items()}
    return Text(taken, body, end + 2, found)


def _validated(data: Any, places: dict[Place, int], find: Finder) -> FrontMatter | None:
    try:
        return FRONT_MATTER.parse(pydantic_core.to_json(data, inf_nan_mode="constants"))
    except ToolValidationError as error:
        said: dict[str, str] = {}
        for problem in error.problems:  # where one of several forms is taken, each says why not: one problem
            where = _AS.sub("", problem.where)
            said[where] = f"{said[where]}; or {problem.what}" if where in said else problem.what
    for where, what in said.items():
        line = _line_of(where, {location_of(place): line for place, line in places.items()})
        mend = "Correct it; worker.schema.json says what may be there."
        find.add(line, f"`{where}` {what}" if where else what, mend)
    return None


def _line_of(where: str, lines: dict[str, int]) -> int:
    """The line of what is at this place, or of what it would be in."""
    while where and where not in lines:
        where = where[: max(where.rfind("."), where.rfind("["), 0)]
    return lines.get(where, 1)


def _whole(text: str) -> str:
    """The text with the halves that JSON writes a letter in put together: YAML takes them one by one."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise ValueError("half a letter") from None


class _Yaml:
    """Takes YAML in as plain data. Aliases, tags, repeated keys and depth are refused, with their lines."""

    def __init__(self, text: str, find: Finder) -> None:
        self._text = text
        self._find = find
        self._yaml: Any = needed("yaml")
        self._places: dict[Place, int] = {(): 1}

    def read(self) -> tuple[Any, dict[Place, int]]:
        yaml = self._yaml
        try:
            if not self._is_plain():
                return None, self._places
            loader = yaml.SafeLoader(self._text)
            try:
                node = loader.get_single_node()
                return ({} if node is None else self._value(loader, node, ())), self._places
            finally:
                loader.dispose()
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            said = getattr(error, "problem", None) or str(error).split("\n", 1)[0]
            line, column = (1, None) if mark is None else (mark.line + 2, mark.column + 1)
            self._find.add(
                line, f"it is not YAML: {said}", "Correct it; quote texts that hold `: ` or `#`.", column
            )
        return None, self._places

    def _is_plain(self) -> bool:
        """Does it hold nothing that could make it larger than it looks? Seen before anything is made of it."""
        yaml = self._yaml
        depth = 0
        for event in yaml.parse(self._text, Loader=yaml.SafeLoader):
            line, column = event.start_mark.line + 2, event.start_mark.column + 1
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                self._find.add(line, "an anchor or alias is not taken here", "Write the value out.", column)
                return False
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                self._find.add(line, f"it is nested more than {_DEEPEST} deep", "Make it flatter.", column)
                return False
        return True

    def _value(self, loader: Any, node: Any, place: Place) -> Any:
        yaml = self._yaml
        self._places.setdefault(place, node.start_mark.line + 2)
        if isinstance(node, yaml.MappingNode) and node.tag.endswith(":map"):
            return dict(self._members(loader, node, place))
        if isinstance(node, yaml.SequenceNode) and node.tag.endswith(":seq"):
            items = enumerate(cast("list[Any]", node.value))
            return [self._value(loader, item, (*place, index)) for index, item in items]
        if not isinstance(node, yaml.ScalarNode):
            return self._tagged(node)
        if node.tag == "tag:yaml.org,2002:timestamp":
            return node.value  # a date is a text like any other here
        if node.tag not in _KINDS:
            return self._tagged(node)
        try:
            value = loader.construct_object(node)
            if isinstance(value, str):
                return _whole(value)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError("not a finite number")
            return value
        except ValueError as error:
            self._find.add(node.start_mark.line + 2, f"{str(node.value)[:40]!a} is {error}", "Correct it.")
            return None

    def _members(self, loader: Any, node: Any, place: Place) -> Iterator[tuple[str, Any]]:
        seen: dict[str, int] = {}
        for key, value in node.value:
            line, column = key.start_mark.line + 2, key.start_mark.column + 1
            name = key.value if isinstance(key, self._yaml.ScalarNode) else None
            if name is None or key.tag == "tag:yaml.org,2002:merge":
                self._find.add(line, "a key is not a plain word", "Write `key: value`.", column)
                continue
            if name in seen:
                self._find.add(
                    line, f"`{name}` is given twice, first in line {seen[name]}", "Keep one of them.", column
                )
                continue
            try:
                _whole(name)
            except ValueError as error:
                self._find.add(line, f"a key is {error}", "Correct it.", column)
                continue
            seen[name] = line
            self._places[*place, name] = line
            yield name, self._value(loader, value, (*place, name))

    def _tagged(self, node: Any) -> None:
        self._find.add(
            node.start_mark.line + 2, f"the tag {node.tag!r} is not taken here", "Write a plain value."
        )
