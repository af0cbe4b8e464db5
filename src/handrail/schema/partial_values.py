"""`PartialValue`: a value that is read from JSON text while the text arrives."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Literal, cast

import msgspec
import pydantic_core
from pydantic_core import core_schema

from handrail.schema import infinities_in

_LONGEST = 4_000_000
"""Maximum number of characters that are read."""
_DEEPEST = 8
"""Maximum number of objects and lists inside each other that are seen while they are incomplete."""
_AROUND = frozenset(
    [
        *("definitions", "nullable", "default", "model", "dataclass", "custom-error"),
        *("function-before", "function-after", "function-wrap"),
    ]
)
"""Core schemas whose values are written like those of the schema inside."""
_IN_STRING = re.compile(r'[^"\\]*')
_IN_NESTED = re.compile(r'[^"\[\]{}]*')
_IN_SCALAR = re.compile(r"[^,\]}\s]*")
_UNKNOWN: Any = object()


class PartialType:
    """A type of values that can be seen while they are incomplete, made from pydantic's core schema of the type.

    With `plain`, the values are the JSON that was sent, once it is valid for the type.
    """

    def __init__(
        self,
        core: Any,
        *,
        plain: bool = False,
        definitions: Mapping[str, Any] | None = None,
        config: Any = None,
    ) -> None:
        self._core = core
        self._plain = plain
        if definitions is None:
            definitions = {each["ref"]: each for each in core.get("definitions", ())}
        self._definitions = definitions
        self._config = config

    @cached_property
    def object(self) -> Named | Entries | None:
        """How the type's objects are read; None if it has none, or several kinds of them."""
        shapes = [each for each in self._shapes if not isinstance(each, Items)]
        return shapes[0] if len(shapes) == 1 else None

    @cached_property
    def list(self) -> Items | None:
        """How the type's lists are read; None if it has none, or several kinds of them."""
        shapes = [each for each in self._shapes if isinstance(each, Items)]
        return shapes[0] if len(shapes) == 1 else None

    def parse(self, text: str) -> Any:
        """Return the value of a complete JSON text; `_UNKNOWN` if it is invalid, or is valid only in its place."""
        try:
            if next(infinities_in(text, {}), None) is None:
                value = self._validator.validate_json(text, strict=True, extra="forbid")
                return pydantic_core.from_json(text) if self._plain else value
        except Exception:  # raised by pydantic, or by the user's validator
            pass
        return _UNKNOWN

    @cached_property
    def _validator(self) -> pydantic_core.SchemaValidator:
        core = self._core
        if core["type"] != "definitions":
            core = core_schema.definitions_schema(core, [*self._definitions.values()])
        return pydantic_core.SchemaValidator(core, self._config)

    @cached_property
    def _shapes(self) -> tuple[Named | Entries | Items, ...]:
        return tuple(self._shapes_of(self._core, self._config, set()))

    def _shapes_of(self, core: Any, config: Any, references: set[str]) -> Iterator[Named | Entries | Items]:
        kind, config = core["type"], core.get("config", config)
        inner: list[Any] = []
        if kind in _AROUND:
            inner = [core["schema"]]
        elif kind == "definition-ref" and core["schema_ref"] not in references:
            references.add(core["schema_ref"])
            inner = [self._definitions[core["schema_ref"]]]
        elif kind in ("json-or-python", "lax-or-strict"):
            inner = [core.get("json_schema") or core["strict_schema"]]
        elif kind == "union":
            inner = [each[0] if isinstance(each, tuple) else each for each in core["choices"]]
        elif kind == "tagged-union":
            inner = [*core["choices"].values()]
        elif kind in ("model-fields", "typed-dict", "dataclass-args"):
            yield Named(self._fields(core["fields"], config))
        elif kind in ("dict", "any"):
            parts = {each: core[each] for each in ("keys_schema", "values_schema") if each in core}
            yield Entries(self._part({"type": "dict", **parts}, config))
        if kind in ("list", "set", "frozenset", "any"):
            yield Items(self._part(core.get("items_schema", {"type": "any"}), config))
        elif kind == "tuple" and core.get("variadic_item_index") == 0 and len(core["items_schema"]) == 1:
            yield Items(self._part(core["items_schema"][0], config))
        for each in inner:
            yield from self._shapes_of(each, config, references)

    def _fields(self, fields: Any, config: Any) -> dict[str, tuple[str, PartialType]]:
        """Return the fields that can be sent, by their names in JSON: the name in Python, and the type of each."""
        if not isinstance(fields, dict):  # those of a dataclass are in a list
            fields = {each["name"]: each for each in fields}
        named: dict[str, tuple[str, PartialType]] = {}
        for name, field in cast("dict[str, Any]", fields).items():
            alias = field.get("validation_alias", name)
            if isinstance(alias, str) and field.get("init", True):
                named[alias] = (alias if self._plain else name, self._part(field["schema"], config))
        return named

    def _part(self, core: Any, config: Any) -> PartialType:
        return PartialType(core, plain=self._plain, definitions=self._definitions, config=config)


class Named(msgspec.Struct, frozen=True):
    """Objects with known fields, by their names in JSON. Each has its name in Python and its type."""

    fields: dict[str, tuple[str, PartialType]]


class Entries(msgspec.Struct, frozen=True):
    """Objects with any keys. `type` is that of an object with a single entry."""

    type: PartialType


class Items(msgspec.Struct, frozen=True):
    """Lists. `type` is that of an item."""

    type: PartialType


class _Open(msgspec.Struct):
    """An object or a list whose end has not arrived."""

    type: PartialType
    shape: Named | Entries | Items
    start: int
    values: Any
    """What is complete: a dict or a list."""
    key: str = ""
    """The key of the current entry, as JSON text."""
    name: str = ""
    """The name of the current field in Python, and its type; "" and None if it is not known, or there are no fields."""
    field: PartialType | None = None

    @property
    def end(self) -> str:
        return "]" if isinstance(self.shape, Items) else "}"

    def take_key(self, text: str) -> None:
        """Begin an entry. Raises `ValueError` if its key is not a JSON string."""
        self.key, key = text, pydantic_core.from_json(text)
        if isinstance(self.shape, Named):
            self.name, self.field = self.shape.fields.get(key, ("", None))

    def add(self, text: str) -> bool:
        """Add the text of a complete item, entry or field. Returns whether the text could be used."""
        if isinstance(self.shape, Items):
            value = self.shape.type.parse(text)
            if value is not _UNKNOWN:
                self.values.append(value)
        elif isinstance(self.shape, Entries):
            value = self.shape.type.parse(f"{{{self.key}:{text}}}")
            if value is not _UNKNOWN:
                self.values.update(value)
        else:
            value = _UNKNOWN if self.field is None else self.field.parse(text)
            if value is not _UNKNOWN:
                self.values[self.name] = value
        return value is not _UNKNOWN


class PartialValue:
    """A value, read from JSON text while the text arrives. The time is linear in the length of the text.

    While it is incomplete, an object is a dict of its complete fields, and a list has its complete items. They have been
    validated and have their types. An object or a list in a field of such an object is seen while it is incomplete, too. Anything
    else, such as an item of a list, is seen only once it is complete.

    A field that does not match its type is left out. Reading stops at an item that does not match its type, at text that is not
    JSON, and after `_LONGEST` characters. A Markdown fence before the value is skipped.

    With `within`, the value is read from this field of the outermost object.
    """

    def __init__(self, kind: PartialType, within: str = "") -> None:
        self._kind = kind
        self._outer = 1 if within else 0
        """The number of objects around the value."""
        self._text = io.StringIO()
        self._open: list[_Open] = []
        self._awaited: _Awaited = "value"
        self._value: Any = _UNKNOWN
        self._fenced = False
        # A token is a key, or a value that is not seen until it is complete.
        self._start = -1
        """Where the current token starts; -1 if there is none."""
        self._nested = 0
        """The number of objects and lists that are open in the token."""
        self._in_string = self._escaped = False
        self.is_list = False
        self.changes = 0
        """How often the value has changed; 0 until it has begun."""

    @property
    def is_over(self) -> bool:
        """Whether the value is complete, or reading has stopped."""
        return self._awaited == "end"

    @property
    def is_complete(self) -> bool:
        return self._value is not _UNKNOWN

    @property
    def size(self) -> int:
        """The number of values that a copy holds, without those inside complete ones."""
        return sum(len(each.values) + 1 for each in self._open[self._outer :])

    def copy(self) -> Any:
        """Return the value so far, which must have begun."""
        value = self._value
        if value is _UNKNOWN:
            for each in reversed(self._open[self._outer :]):
                outer = each.values.copy()
                if value is not _UNKNOWN:
                    outer[each.name] = value
                value = outer
        return value

    def take(self, piece: str) -> None:
        """Read the next piece of the text."""
        if self.is_over:
            return
        before, at = self._text.tell(), 0
        self._text.write(piece)
        if self._text.tell() > _LONGEST:
            self._stop()
        while at < len(piece) and not self.is_over:
            if self._start >= 0:
                at, is_whole = self._skip_token(piece, at)
                if is_whole:
                    self._end_token(before + at)
            elif self._awaited == "fence":
                at += 1
                if piece[at - 1] == "\n":
                    self._awaited = "value"
            elif piece[at] in " \t\n\r":
                at += 1
            else:
                self._take_mark(piece[at], before + at)
                at += 1

    def _stop(self) -> None:
        self._awaited = "end"
        self._text.close()

    def _slice(self, start: int, end: int) -> str:
        self._text.seek(start)
        text = self._text.read(end - start)
        self._text.seek(0, io.SEEK_END)
        return text

    # What is outside of tokens.

    def _take_mark(self, mark: str, place: int) -> None:
        """Take a character that is not a space and not in a token. A token may begin with it."""
        awaited, inside = self._awaited, self._open[-1] if self._open else None
        if awaited == "colon" and mark == ":":
            self._awaited = "value"
        elif awaited == "comma" and mark == "," and inside is not None:
            self._awaited = "value" if inside.end == "]" else "key"
        elif inside is not None and mark == inside.end and awaited in ("comma", "first key", "first value"):
            self._close(place + 1)
        elif awaited in ("key", "first key") and mark == '"':
            self._begin_token(mark, place)
        elif awaited in ("value", "first value") and mark not in ",:]}":
            self._begin_value(mark, place, inside)
        else:
            self._stop()  # the text is not JSON

    def _begin_value(self, mark: str, place: int, inside: _Open | None) -> None:
        kind = self._kind if inside is None else inside.field
        if kind is not None and len(self._open) < _DEEPEST and mark in "[{":
            shape = kind.list if mark == "[" else kind.object
            if shape is not None:
                self._open.append(_Open(kind, shape, place, [] if mark == "[" else {}))
                self._awaited = "first value" if mark == "[" else "first key"
                if len(self._open) > self._outer:
                    self.is_list = self.is_list if self.changes else mark == "["
                    self.changes += 1
                return
        if inside is not None:
            self._begin_token(mark, place)
        elif mark == "`" and not self._fenced:
            self._fenced, self._awaited = True, "fence"
        else:
            self._stop()

    def _close(self, place: int) -> None:
        """End the innermost object or list."""
        closed = self._open.pop()
        if len(self._open) > self._outer:
            self._add(self._slice(closed.start, place))
        elif len(self._open) == self._outer:
            self._end(closed.type, self._slice(closed.start, place))
        else:
            self._stop()  # the field that would have the value is missing

    # Tokens.

    def _begin_token(self, mark: str, place: int) -> None:
        self._start, self._in_string, self._nested = place, mark == '"', int(mark in "[{")

    def _skip_token(self, piece: str, at: int) -> tuple[int, bool]:
        """Return where the token or the piece ends, whichever comes first, and whether the token is whole."""
        while at < len(piece):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                at = _end_of(_IN_STRING, piece, at)
                self._in_string = not piece.startswith('"', at)
                self._escaped = piece.startswith("\\", at)
                if not self._in_string and not self._nested:
                    return at + 1, True
            elif self._nested:
                at = _end_of(_IN_NESTED, piece, at)
                self._in_string = piece.startswith('"', at)
                self._nested += piece.startswith(("[", "{"), at) - piece.startswith(("]", "}"), at)
                if not self._nested:
                    return at + 1, True
            else:
                at = _end_of(_IN_SCALAR, piece, at)
                return at, at < len(piece)
            at += 1
        return len(piece), False

    def _end_token(self, place: int) -> None:
        text, self._start = self._slice(self._start, place), -1
        inside = self._open[-1]
        if self._awaited not in ("key", "first key"):
            self._add(text)
            return
        self._awaited = "colon"
        try:
            inside.take_key(text)
        except ValueError:
            self._stop()

    def _add(self, text: str) -> None:
        """Add a complete value to the innermost object or list that is open."""
        inside, self._awaited = self._open[-1], "comma"
        if len(self._open) == self._outer:
            if inside.field is not None:
                self._stop()  # the value is neither an object nor a list
        elif inside.add(text):
            self.changes += 1
        elif not isinstance(inside.shape, Named):
            self._stop()

    def _end(self, kind: PartialType, text: str) -> None:
        self._value = kind.parse(text)
        self.changes += self.is_complete
        self._stop()


_Awaited = Literal["value", "first value", "key", "first key", "colon", "comma", "fence", "end"]


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()
