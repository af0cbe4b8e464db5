"""A form made from a JSON Schema, filled in line by line by whoever is there."""

from __future__ import annotations

from typing import Any, Protocol, cast

from handrail.environment.fields import (
    JsonSchema,
    alternatives,
    chosen,
    hint,
    labels,
    options,
    parsed,
    resolved,
)
from handrail.environment.ink import Style
from handrail.environment.visible import compact, laid_out, on_one_line, visible
from handrail.errors import Declined
from handrail.schema.problems import asks_for_secrets
from handrail.schema.secrets import masked


class Desk(Protocol):
    """Where a form is filled in."""

    def say(self, text: str = "", *styles: Style) -> None: ...
    async def line(self, prompt: str) -> str:
        """A typed line. Who ends it with Ctrl-D raises `Declined`."""
        ...

    async def hidden(self, prompt: str) -> str:
        """The same, and what is typed is not shown."""
        ...


class _Nothing:
    """No value: not even null."""


NOTHING = _Nothing()

_MOST_DEEP = 20
"""How many objects lie in each other before a form asks for JSON instead."""


class Form:
    """Asks for a value that fits a schema. Each field is checked at once, in words.

    Whoever asked checks the whole value again: what is not known here is let through.
    """

    def __init__(self, schema: JsonSchema, desk: Desk) -> None:
        self._root = schema
        self._desk = desk

    async def fill(self, before: Any = NOTHING) -> Any:
        """One value, asked for field by field; with `before`, Enter keeps what was there."""
        return await self._value(self._root, "", before, depth=0)

    async def _value(self, schema: JsonSchema, name: str, before: Any, *, depth: int) -> Any:
        schema = resolved(schema, self._root)
        kinds, may_be_null = alternatives(schema, self._root)
        default: Any = schema.get("default", NOTHING)
        if may_be_null and default is NOTHING:
            default = None
        if len(kinds) > 1:
            kind = await self._kind(kinds, name, depth)
        else:
            kind = kinds[0] if kinds else {"type": "null"}
        asked = {**kind, "default": default} if default is not NOTHING else kind
        listed = options(kind)
        if listed is not None and "const" in kind and not may_be_null:
            return kind["const"]
        if listed is None and depth < _MOST_DEEP:
            if kind.get("type") == "object" or "properties" in kind:
                return await self._object(asked, name, before, depth)
            if kind.get("type") == "array":
                return await self._array(asked, name, before, depth)
        return await self._scalar(asked, name, before, depth)

    # One line.

    async def _scalar(
        self, schema: JsonSchema, name: str, before: Any, depth: int, *, ends: bool = False
    ) -> Any:
        """One typed line; with `ends`, an empty one gives NOTHING."""
        listed = options(schema)
        indent = "  " * (depth + 1)
        kept = before if before is not NOTHING else schema.get("default", NOTHING)
        self._describe(schema, indent)
        if listed is not None:
            self._desk.say(f"{indent}{on_one_line(name) or 'one of'}:")
            for mark, value in zip(labels(listed), listed, strict=True):
                self._desk.say(f"{indent}  {mark}) {on_one_line(str(value))}")
        secret = asks_for_secrets(schema, self._root)
        enter = _on_enter(masked(kept, schema, self._root) if secret else kept, ends)
        wanted = "choose one" if listed is not None else hint(schema)
        prompt = f"{indent}{on_one_line(name) or 'answer'} ({wanted}{enter}): "
        while True:
            typed = await (self._desk.hidden(prompt) if secret else self._desk.line(prompt))
            if not typed.strip():
                if ends:
                    return NOTHING
                if kept is not NOTHING:
                    return kept
                self._desk.say(f"{indent}  it needs a value{_or_empty(schema)}. Ctrl-D declines.", "yellow")
                continue
            try:
                return parsed(schema, typed)
            except ValueError as error:
                self._desk.say(f"{indent}  not that: {error}.", "yellow")

    def _describe(self, schema: JsonSchema, indent: str) -> None:
        said = schema.get("description")
        if isinstance(said, str) and said.strip():
            self._desk.say(f"{indent}{on_one_line(' '.join(said.split()))}", "dim")

    # What holds other values.

    async def _object(self, schema: JsonSchema, name: str, before: Any, depth: int) -> Any:
        if not await self._wanted(schema, name, before, depth):
            return schema["default"]
        if name:
            self._desk.say(f"{'  ' * (depth + 1)}{on_one_line(name)}:", "bold")
            self._describe(schema, "  " * (depth + 1))
        there: dict[str, Any] = cast(dict[str, Any], before) if isinstance(before, dict) else {}
        filled: dict[str, Any] = {}
        required = set(cast(list[str], schema.get("required") or ()))
        fields = cast(dict[str, JsonSchema], schema.get("properties") or {})
        below = depth + 1 if name else depth
        for field, inner in fields.items():
            may_miss = field not in required and "default" not in resolved(inner, self._root)
            if may_miss and not await self._also(field, there, below):
                continue
            filled[field] = await self._value(inner, field, there.get(field, NOTHING), depth=below)
        more = schema.get("additionalProperties")
        if isinstance(more, dict):
            filled.update(await self._entries(cast(JsonSchema, more), there, set(fields), below))
        return filled

    async def _wanted(self, schema: JsonSchema, name: str, before: Any, depth: int) -> bool:
        """Is a whole object to be filled in that may be left as it is by default?"""
        if "default" not in schema or isinstance(before, dict):
            return True
        return await self._yes(f"fill in {on_one_line(name) or 'it'}?", depth)

    async def _also(self, field: str, there: dict[str, Any], depth: int) -> bool:
        return field in there or await self._yes(f"give {on_one_line(field)}? it may be left out", depth)

    async def _yes(self, question: str, depth: int) -> bool:
        while True:
            typed = (await self._desk.line(f"{'  ' * (depth + 1)}{question} (y or n, Enter for n): ")).strip()
            if not typed or typed.casefold() in ("n", "no"):
                return False
            if typed.casefold() in ("y", "yes"):
                return True

    async def _entries(
        self, schema: JsonSchema, there: dict[str, Any], taken: set[str], depth: int
    ) -> dict[str, Any]:
        """The entries of a mapping: a name and a value each, until a name is empty."""
        indent = "  " * (depth + 1)
        entries = {name: value for name, value in there.items() if name not in taken}
        if entries:
            self._desk.say(f"{indent}entries so far: {', '.join(map(on_one_line, entries))}", "dim")
        while name := (await self._desk.line(f"{indent}name of an entry (Enter ends): ")).strip():
            entries[name] = await self._value(schema, name, entries.get(name, NOTHING), depth=depth + 1)
        return entries

    async def _array(self, schema: JsonSchema, name: str, before: Any, depth: int) -> Any:
        indent = "  " * (depth + 1)
        inner = resolved(cast(JsonSchema, schema.get("items") or {}), self._root)
        least = schema.get("minItems", 0)
        most = schema.get("maxItems")
        kept = before if before is not NOTHING else schema.get("default", NOTHING)
        self._desk.say(f"{indent}{on_one_line(name) or 'list'}: one after the other, Enter ends", "bold")
        self._describe(schema, indent)
        if kept is not NOTHING:
            shown = on_one_line(compact(masked(kept, schema, self._root)), 60)
            if not await self._yes(f"change {shown}?", depth):
                return kept
        items: list[Any] = []
        while most is None or len(items) < most:
            item = await self._item(inner, len(items) + 1, depth + 1)
            if item is not NOTHING:
                items.append(item)
            elif len(items) >= least:
                break
            else:
                self._desk.say(f"{indent}  at least {least}, these are {len(items)}.", "yellow")
        return items

    async def _item(self, schema: JsonSchema, number: int, depth: int) -> Any:
        kinds, _ = alternatives(schema, self._root)
        nested = any(kind.get("type") in ("object", "array") for kind in kinds)
        if len(kinds) == 1 and not nested:
            return await self._scalar(kinds[0], str(number), NOTHING, depth, ends=True)
        if not await self._yes(f"add {'another' if number > 1 else 'one'}?", depth):
            return NOTHING
        return await self._value(schema, str(number), NOTHING, depth=depth)

    async def _kind(self, kinds: list[JsonSchema], name: str, depth: int) -> JsonSchema:
        """Which of several kinds of value it is to be."""
        indent = "  " * (depth + 1)
        names: list[str] = []
        for each in map(_kind_name, kinds):
            names.append(each if each not in names else f"{each} ({len(names) + 1})")
        self._desk.say(f"{indent}{on_one_line(name) or 'it'} can be:", "bold")
        for mark, each in zip(labels(names), names, strict=True):
            self._desk.say(f"{indent}  {mark}) {each}")
        while True:
            try:
                found = chosen(names, await self._desk.line(f"{indent}which (choose one): "))
                return kinds[names.index(found)]
            except ValueError as error:
                self._desk.say(f"{indent}  not that: {error}.", "yellow")


def _kind_name(kind: JsonSchema) -> str:
    title = kind.get("title")
    listed = options(kind)
    if listed is not None:
        return on_one_line(" or ".join(str(value) for value in listed), 60)
    return on_one_line(str(title)) if isinstance(title, str) and "properties" in kind else hint(kind)


def _on_enter(kept: Any, ends: bool) -> str:
    if ends:
        return ", Enter ends"
    if kept is NOTHING:
        return ""
    if kept is None:
        return ", Enter for none"
    return f", Enter for {on_one_line(compact(kept), 40)}"


def _or_empty(schema: JsonSchema) -> str:
    return ', "" for empty text' if schema.get("type") == "string" and not schema.get("minLength") else ""


async def filled_in(schema: JsonSchema, desk: Desk, before: Any = NOTHING) -> Any:
    """Fill a form in, show what will be sent, and let it be sent, edited or declined (`Declined`)."""
    form = Form(schema, desk)
    while True:
        value = await form.fill(before)
        desk.say("  This will be sent:", "bold")
        for line in laid_out(masked(value, schema), "    "):
            desk.say(line)
        while True:
            typed = (await desk.line("  s send (Enter), e edit, d decline: ")).strip().casefold()
            if typed in ("", "s", "send", "y"):
                return value
            if typed in ("e", "edit"):
                break
            if typed in ("d", "decline", "n"):
                raise Declined("", (await desk.line("  why (Enter for no reason): ")).strip())
            desk.say(f"  not that: s, e or d, not {visible(typed)!r}.", "yellow")
        before = value
