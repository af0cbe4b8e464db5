"""Forms in a terminal: built from a JSON Schema, and filled in line by line, field by field.

The form for approving a call shows the call, its changes and the choices. A choice is made with a key and Enter. Enter
alone decides nothing, so nothing is approved by accident.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from typing import Any, NamedTuple, Protocol, cast

from handrail.errors import Declined
from handrail.question import Question
from handrail.schema.problems import as_count, asks_for_secrets
from handrail.schema.references import target_of
from handrail.schema.secrets import masked
from handrail.text.patterns import compile_pattern
from handrail.text.rendering import counted, escape, escape_line, exact_line
from handrail.text.terminal import (
    Style,
    Styler,
    barred,
    clip,
    compact,
    diff_style,
    format_rows,
    format_value,
    wrap,
)

JsonSchema = dict[str, Any]


class Dialog(Protocol):
    """Prints lines for a person and reads what they type."""

    def say(self, text: str = "", *styles: Style) -> None: ...
    async def line(self, prompt: str) -> str:
        """Read a typed line. Raises `Declined` on Ctrl-D."""
        ...

    async def hidden_line(self, prompt: str) -> str:
        """Read a line without showing what is typed. Raises `Declined` on Ctrl-D."""
        ...


class _Nothing:
    """The type of `NOTHING`, which stands for no value. `None` can't stand for that, because null is a value."""


NOTHING = _Nothing()

_MAX_DEPTH = 20
"""Maximum nesting of objects and lists. Deeper objects and lists are typed as JSON."""


class Form:
    """Asks for a value that matches a schema, checking each field as it is typed.

    Keywords that the form does not know are not checked here. The tool validates the whole value again.
    """

    def __init__(self, schema: JsonSchema, dialog: Dialog) -> None:
        self._root = schema
        self._dialog = dialog

    async def fill(self, before: Any = NOTHING) -> Any:
        """Ask for a value, field by field. Raises `Declined` on Ctrl-D.

        With `before`, Enter keeps the earlier value of a field. The alternative of a union must be chosen again.
        """
        return await self._value(self._root, "", before, depth=0)

    async def _value(self, schema: JsonSchema, name: str, before: Any, *, depth: int) -> Any:
        schema = resolve(schema, self._root)
        kinds, may_be_null = alternatives(schema, self._root)
        default: Any = schema.get("default", NOTHING)
        if may_be_null and default is NOTHING:
            default = None
        if len(kinds) > 1:
            kind = await self._kind(kinds, name, depth)
        else:
            kind = kinds[0] if kinds else {"type": "null"}
        asked = {**kind, "default": default} if default is not NOTHING else kind
        listed = list_options(kind)
        if listed is not None and "const" in kind and not may_be_null:
            return kind["const"]
        if listed is None and depth < _MAX_DEPTH:
            if kind.get("type") == "object" or "properties" in kind:
                return await self._object(asked, name, before, depth)
            if kind.get("type") == "array":
                return await self._array(asked, name, before, depth)
        return await self._scalar(asked, name, before, depth)

    # Single lines.

    async def _scalar(
        self, schema: JsonSchema, name: str, before: Any, depth: int, *, ends: bool = False
    ) -> Any:
        """Ask for a value on one line until it is valid.

        With `ends`, an empty line returns `NOTHING`. Otherwise it returns `before` or the default, if there is one.
        """
        listed = list_options(schema)
        indent = "  " * (depth + 1)
        kept = before if before is not NOTHING else schema.get("default", NOTHING)
        self._describe(schema)
        if listed is not None:
            self._dialog.say(f"{indent}{escape_line(name) or 'one of'}:")
            for mark, value in zip(labels(listed), listed, strict=True):
                self._dialog.say(f"{indent}  {mark}) {escape_line(str(value))}")
        secret = asks_for_secrets(schema, self._root)
        enter = _on_enter(masked(kept, schema, self._root) if secret else kept, ends)
        wanted = "choose one" if listed is not None else hint(schema)
        prompt = f"{indent}{escape_line(name) or 'answer'} ({wanted}{enter}): "
        while True:
            typed = await (self._dialog.hidden_line(prompt) if secret else self._dialog.line(prompt))
            if not typed.strip():
                if ends:
                    return NOTHING
                if kept is not NOTHING:
                    return kept
                self._dialog.say(
                    f"{indent}  a value is required{_or_empty(schema)}. Ctrl-D declines.", "yellow"
                )
                continue
            try:
                return parse(schema, typed)
            except ValueError as error:
                self._dialog.say(f"{indent}  expected: {error}.", "yellow")

    def _describe(self, schema: JsonSchema) -> None:
        said = schema.get("description")
        if isinstance(said, str) and said.strip():
            self._dialog.say(f"  │ {escape_line(' '.join(said.split()))}", "dim")

    # Objects and lists.

    async def _object(self, schema: JsonSchema, name: str, before: Any, depth: int) -> Any:
        if not await self._wants_object(schema, name, before, depth):
            return schema["default"]
        if name:
            self._dialog.say(f"{'  ' * (depth + 1)}{escape_line(name)}:", "bold")
            self._describe(schema)
        there: dict[str, Any] = cast(dict[str, Any], before) if isinstance(before, dict) else {}
        filled: dict[str, Any] = {}
        required = set(cast(list[str], schema.get("required") or ()))
        fields = cast(dict[str, JsonSchema], schema.get("properties") or {})
        below = depth + 1 if name else depth
        for field, inner in fields.items():
            is_optional = field not in required and "default" not in resolve(inner, self._root)
            wanted = f"fill in {escape_line(field)}? it is optional"
            if is_optional and field not in there and not await self._yes(wanted, below):
                continue
            filled[field] = await self._value(inner, field, there.get(field, NOTHING), depth=below)
        more = schema.get("additionalProperties")
        if isinstance(more, dict):
            filled.update(await self._entries(cast(JsonSchema, more), there, set(fields), below))
        return filled

    async def _wants_object(self, schema: JsonSchema, name: str, before: Any, depth: int) -> bool:
        """Return whether to fill in an object. The person is asked only if there is a default and `before` is not an object."""
        if "default" not in schema or isinstance(before, dict):
            return True
        return await self._yes(f"fill in {escape_line(name) or 'it'}?", depth)

    async def _yes(self, question: str, depth: int) -> bool:
        while True:
            typed = (
                await self._dialog.line(f"{'  ' * (depth + 1)}{question} (y or n, Enter for n): ")
            ).strip()
            if not typed or typed.casefold() in ("n", "no"):
                return False
            if typed.casefold() in ("y", "yes"):
                return True

    async def _entries(
        self, schema: JsonSchema, there: dict[str, Any], taken: set[str], depth: int
    ) -> dict[str, Any]:
        """Ask for the entries of a mapping, each a name and a value, until the name is empty. Earlier entries are kept."""
        indent = "  " * (depth + 1)
        entries = {name: value for name, value in there.items() if name not in taken}
        if entries:
            self._dialog.say(f"{indent}entries so far: {', '.join(map(escape_line, entries))}", "dim")
        while name := (await self._dialog.line(f"{indent}name of an entry (Enter to finish): ")).strip():
            entries[name] = await self._value(schema, name, entries.get(name, NOTHING), depth=depth + 1)
        return entries

    async def _array(self, schema: JsonSchema, name: str, before: Any, depth: int) -> Any:
        indent = "  " * (depth + 1)
        inner = resolve(cast(JsonSchema, schema.get("items") or {}), self._root)
        least = as_count(schema.get("minItems")) or 0
        most = as_count(schema.get("maxItems"))
        kept = before if before is not NOTHING else schema.get("default", NOTHING)
        self._dialog.say(f"{indent}{escape_line(name) or 'list'}: one per line, Enter to finish", "bold")
        self._describe(schema)
        if kept is not NOTHING:
            shown = escape_line(compact(masked(kept, schema, self._root)), 60)
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
                self._dialog.say(f"{indent}  expected: at least {least}, not {len(items)}.", "yellow")
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
        """Ask which of a union's alternatives to fill in."""
        indent = "  " * (depth + 1)
        names: list[str] = []
        for each in map(_kind_name, kinds):
            names.append(each if each not in names else f"{each} ({len(names) + 1})")
        self._dialog.say(f"{indent}{escape_line(name) or 'it'} can be:", "bold")
        for mark, each in zip(labels(names), names, strict=True):
            self._dialog.say(f"{indent}  {mark}) {each}")
        while True:
            try:
                found = choose(names, await self._dialog.line(f"{indent}which (choose one): "))
                return kinds[names.index(found)]
            except ValueError as error:
                self._dialog.say(f"{indent}  expected: {error}.", "yellow")


def _kind_name(kind: JsonSchema) -> str:
    title = kind.get("title")
    listed = list_options(kind)
    if listed is not None:
        return escape_line(" or ".join(str(value) for value in listed), 60)
    return escape_line(str(title)) if isinstance(title, str) and "properties" in kind else hint(kind)


def _on_enter(kept: Any, ends: bool) -> str:
    if ends:
        return ", Enter to finish"
    if kept is NOTHING:
        return ""
    if kept is None:
        return ", Enter for none"
    return f", Enter for {escape_line(compact(kept), 40)}"


def _or_empty(schema: JsonSchema) -> str:
    return ', "" for empty text' if schema.get("type") == "string" and not schema.get("minLength") else ""


async def fill_in(schema: JsonSchema, dialog: Dialog, before: Any = NOTHING) -> Any:
    """Ask for a value, show it, and let the person send, edit or decline it.

    Raises `Declined` if the person declines.
    """
    form = Form(schema, dialog)
    while True:
        value = await form.fill(before)
        dialog.say("  This will be sent:", "bold")
        for line in format_value(masked(value, schema), "    "):
            dialog.say(line)
        while True:
            typed = (await dialog.line("  s send (Enter), e edit, d decline: ")).strip().casefold()
            if typed in ("", "s", "send", "y"):
                return value
            if typed in ("e", "edit"):
                break
            if typed in ("d", "decline", "n"):
                raise Declined("", (await dialog.line("  why (Enter for no reason): ")).strip())
            dialog.say(f"  expected: s, e or d, not {escape(typed)!r}.", "yellow")
        before = value


# --- approvals ----------------------------------------------------------------------------------------

DIFF_LINES = 30
"""Maximum number of diff lines shown at first. The key `v` shows all of them."""
ARGUMENT_LINES = 30
MESSAGE_LINES = 20


class Choice(NamedTuple):
    """A choice in an approval form: the key to press, and the answer that it gives."""

    key: str
    words: str
    answer: dict[str, Any]
    wants_reason: bool = False


def list_choices(question: Question) -> list[Choice]:
    """Return the choices for an approval request. Each offered scope has its own number."""
    payload = _payload(question)
    found = [Choice("y", "yes, once", {"approved": True})]
    remembers = "scopes" in payload or "remember" in cast(
        dict[str, Any], question.schema.get("properties") or {}
    )
    if remembers:
        if payload.get("exact", True):
            found.append(
                Choice("e", "yes, this exact call, for the session", {"approved": True, "remember": "exact"})
            )
        for number, scope in enumerate(_scopes(payload), 1):
            words = f"yes, for the session: {exact_line(scope)}"
            found.append(Choice(str(number), words, {"approved": True, "remember": "scope", "scope": scope}))
    found.append(Choice("n", "no", {"approved": False}))
    found.append(Choice("r", "no, and say why", {"approved": False}, wants_reason=True))
    if remembers:
        found.append(
            Choice("x", "no, never this exact call in this session", {"approved": False, "remember": "exact"})
        )
    return found


def _payload(question: Question) -> dict[str, Any]:
    payload: Any = question.payload
    return cast(dict[str, Any], payload) if isinstance(payload, dict) else {}


def _scopes(payload: dict[str, Any]) -> list[str]:
    offered: Any = payload.get("scopes")
    return [each for each in offered if isinstance(each, str)] if isinstance(offered, list) else []  # pyright: ignore[reportUnknownVariableType]


def asker(question: Question) -> str:
    """Return the path of calls that led to a question, outermost first, or else the question's name."""
    return " › ".join(escape_line(name, 60) for name in question.askers) or escape_line(question.name)


def _subject(question: Question) -> str:
    """Return the tool that needs approval, or the title of any other question; the question's name if there is neither."""
    if question.kind != "approval":
        return exact_line(question.title or question.name)
    return exact_line(str(_payload(question).get("tool", question.name)))


def describe(question: Question, title: str, width: int, *, whole: bool = False) -> list[str]:
    """Return the lines that describe a question: its title, its message or reason, and its rows, but not its diff.

    If the question comes from a call inside other calls, the path of calls is included. Every line except the title and
    blank lines is behind a bar. Without `whole`, a long message and long arguments are cut.
    """
    name = _subject(question)
    lines = [clip(title.format(name=name), width - 1)]
    if lines[0] != title.format(name=name):
        lines += barred(name, width)
    if len(question.askers) > 1:
        lines += barred(f"asked by {asker(question)}", width)
    limit = None if whole else MESSAGE_LINES
    lines += _shorten(_message(question, width), limit, width)
    rows = format_rows(question.rows, width, whole=whole)
    return [*lines, "", *_shorten(rows, None if whole else ARGUMENT_LINES, width)] if rows else lines


def _message(question: Question, width: int) -> list[str]:
    """Return the question's message, or else its reason, behind a bar, so that it can't imitate this form.

    Returns no lines if the question has neither.
    """
    message = question.message or str(_payload(question).get("reason") or "")
    return barred(escape(message), width) if message else []


def diff_lines(
    question: Question,
    style: Styler,
    width: int,
    limit: int | None = DIFF_LINES,
    more: str = "v to view all",
) -> list[str]:
    """Return the lines of the question's diff, styled and behind a bar, or no lines if it has none.

    The diff is cut to at most `limit` lines, and `more` says how to see the rest. If `limit` is None, it is not cut.
    """
    diff = _payload(question).get("diff")
    if not isinstance(diff, str) or not diff:
        return []
    lines = [
        f"  │ {style(piece, *diff_style(line))}"
        for line in escape(diff).rstrip("\n").split("\n")
        for piece in wrap(line, width - 5)
    ]
    return ["", *_shorten(lines, limit, width, more)]


def _shorten(lines: Sequence[str], limit: int | None, width: int, more: str = "v to view all") -> list[str]:
    """Cut the lines to `limit`, and add a line that says how many were cut. None means no limit."""
    if limit is None or len(lines) <= limit:
        return list(lines)
    return [*lines[:limit], f"  └ {clip(f'{len(lines) - limit:,} more lines, {more}', width - 5)}"]


async def fill_in_approval(
    question: Question, dialog: Dialog, style: Styler, size: os.terminal_size
) -> dict[str, Any]:
    """Show what needs approval, and return the chosen answer. Raises `Declined` on Ctrl-D, except while a reason is typed.

    Except for the tool's name and the offered scopes, text from models, tools and files is wrapped behind a bar, so that
    it can't imitate the form.
    """
    width = size.columns
    first, *lines = describe(question, "? Allow {name}?", width)
    dialog.say(f"{style('?', 'yellow', 'bold')}{style(first[1:], 'bold')}")
    for line in (*lines, *diff_lines(question, style, width)):
        dialog.say(line)
    dialog.say(f"  digest {question.digest[:16]}", "dim")
    choices = list_choices(question)
    dialog.say()
    for each in choices:
        first, *more = wrap(each.words, width - 6)
        dialog.say(f"  {style(each.key, 'bold')}  {first}")
        for line in more:
            dialog.say(f"  │  {line}")
    dialog.say(f"  {style('v', 'bold')}  view everything")
    keys = ", ".join(each.key for each in choices)
    prompt = f"  {_subject(question)}: your choice, then Enter: "
    while True:
        typed = (await dialog.line(prompt)).strip()
        key = typed.casefold()
        if key in ("v", "view"):
            await _view(question, dialog, style, size.lines - 2, width)
            continue
        key = {"yes": "y", "no": "n"}.get(key, key)
        found = next((each for each in choices if each.key == key), None)
        if found is None:
            what = f"{escape_line(typed, 20)!r} is not a choice" if typed else "Nothing was decided"
            dialog.say(f"  {what}. Type {keys} or v, then Enter.", "yellow")
            continue
        if not found.wants_reason:
            return found.answer
        try:
            reason = (await dialog.line("  why not: ")).strip()
        except Declined:
            reason = ""
        return {**found.answer, **({"reason": reason} if reason else {})}


async def _view(question: Question, dialog: Dialog, style: Styler, page: int, width: int) -> None:
    """Show the whole question, one screen at a time, until its end or until the person stops."""
    lines = describe(question, "? Allow {name}?", width, whole=True)[1:]
    lines += diff_lines(question, style, width, None)
    for start in range(0, len(lines), page):
        for line in lines[start : start + page]:
            dialog.say(line)
        left = len(lines) - start - page
        if (
            left > 0
            and (await dialog.line(style(f"  Enter for {left} more lines, q to stop: ", "dim"))).strip()
        ):
            return


# --- fields -------------------------------------------------------------------------------------------

_MAX_REFERENCES = 100
"""A chain of this many references counts as a cycle."""


def resolve(schema: JsonSchema, root: JsonSchema) -> JsonSchema:
    """Return a schema with its `$ref`, or an `allOf` that has one item, resolved.

    Keywords beside a reference take precedence over those of the schema that it refers to. Nested schemas are not
    resolved. A cycle of references gives an empty schema.
    """
    for _ in range(_MAX_REFERENCES):
        parts = schema.get("allOf")
        if "$ref" in schema:
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            target = target_of(str(schema["$ref"]), root)
            schema = {**(target if isinstance(target, dict) else {}), **rest}
        elif isinstance(parts, list) and len(cast(list[Any], parts)) == 1:
            rest = {key: value for key, value in schema.items() if key != "allOf"}
            schema = {**cast(JsonSchema, parts[0]), **rest}
        else:
            return schema
    return {}


def alternatives(schema: JsonSchema, root: JsonSchema) -> tuple[list[JsonSchema], bool]:
    """Return the alternatives of a union, except null, and whether null is one of them.

    A schema that is not a union is its own only alternative, and null has none.
    """
    of = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(of, list):
        rest = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf", "discriminator")}
        each = [resolve(kind, root) for kind in cast(list[JsonSchema], of)]
        kinds = [{**rest, **kind} for kind in each if kind.get("type") != "null"]
        return kinds, len(kinds) < len(each)
    names = schema.get("type")
    if isinstance(names, list):
        several = cast(list[str], names)
        kinds = [{**schema, "type": name} for name in several if name != "null"]
        return kinds, "null" in several
    return ([], True) if names == "null" else ([schema], False)


def list_options(schema: JsonSchema) -> list[Any] | None:
    """Return the options of an `enum` or `const`, or None for a schema that has neither."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return list(cast(list[Any], listed)) if isinstance(listed, list) else None


def labels(values: list[Any]) -> list[str]:
    """Return a label for each option: `1`, `2` and so on, or `a` to `z`, then `z1`, `z2` and so on.

    Letters are used if an option is a number or a boolean, or is text that is an integer.
    """
    if any(isinstance(value, int | float) or re.fullmatch(r"\s*-?\d+\s*", str(value)) for value in values):
        return [chr(ord("a") + at) if at < 26 else f"z{at - 25}" for at in range(len(values))]
    return [str(at + 1) for at in range(len(values))]


def choose(values: list[Any], typed: str) -> Any:
    """Return the option with this label or text. If there is none, the text is compared without regard to case.

    Raises `ValueError` if no option matches, or if several options match when case is ignored.
    """
    marks = labels(values)
    words = typed.strip()
    if words in marks:
        return values[marks.index(words)]
    for value in values:
        if words in (str(value), compact(value)):
            return value
    alike = [value for value in values if str(value).casefold() == words.casefold()]
    if len(alike) == 1:
        return alike[0]
    if not marks:
        raise ValueError("nothing, since there are no options; Ctrl-D declines")
    raise ValueError(f"one of {marks[0]} to {marks[-1]}" if len(marks) > 1 else marks[0])


def parse(schema: JsonSchema, typed: str) -> Any:
    """Parse a typed line into a value. If the line is invalid, raises a `ValueError` that says what is expected.

    Keywords that forms do not know, such as `uniqueItems`, are not checked.
    """
    listed = list_options(schema)
    if listed is not None:
        return choose(listed, typed)
    return _PARSERS.get(str(schema.get("type", "")), _parse_any)(schema, typed)


def _parse_string(schema: JsonSchema, typed: str) -> str:
    text = "" if typed == '""' else typed
    least, most = as_count(schema.get("minLength")), as_count(schema.get("maxLength"))
    if least is not None and len(text) < least:
        raise ValueError(f"at least {counted(least, 'character')}, not {len(text)}")
    if most is not None and len(text) > most:
        raise ValueError(f"at most {counted(most, 'character')}, not {len(text)}")
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and not _matches(pattern, text):
        raise ValueError(f"text that matches {escape_line(pattern)}")
    check = _FORMATS.get(str(schema.get("format", "")))
    if check is not None:
        check(text)
    return text


def _matches(pattern: str, text: str) -> bool:
    """Return whether a text matches a pattern. Any text matches an unsupported pattern, because the tool checks it again."""
    try:
        return compile_pattern(pattern).found_in(text)
    except ValueError:
        return True


def _parse_integer(schema: JsonSchema, typed: str) -> int:
    try:
        number = int(typed.strip())
    except ValueError:
        raise ValueError("a whole number, such as 3") from None
    _check_bounds(schema, number)
    return number


def _parse_number(schema: JsonSchema, typed: str) -> float | int:
    words = typed.strip()
    try:
        number = int(words) if re.fullmatch(r"[+-]?\d+", words) else float(words)
    except ValueError:
        raise ValueError("a number, such as 2.5") from None
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError("a number, such as 2.5")
    _check_bounds(schema, number)
    return number


def _check_bounds(schema: JsonSchema, number: float | int) -> None:
    bounds: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
        ("minimum", "at least", lambda bound: number >= bound),
        ("maximum", "at most", lambda bound: number <= bound),
        ("exclusiveMinimum", "more than", lambda bound: number > bound),
        ("exclusiveMaximum", "less than", lambda bound: number < bound),
    )
    for key, words, fits in bounds:
        bound = schema.get(key)
        if isinstance(bound, int | float) and not fits(bound):
            raise ValueError(f"{words} {bound}")
    step = schema.get("multipleOf")
    if isinstance(step, int) and step and isinstance(number, int) and number % step:
        raise ValueError(f"a multiple of {step}")


_YES, _NO = ("y", "yes", "true", "on", "1"), ("n", "no", "false", "off", "0")


def _parse_boolean(schema: JsonSchema, typed: str) -> bool:
    words = typed.strip().casefold()
    if words in _YES or words in _NO:
        return words in _YES
    raise ValueError("y or n")


def _parse_null(schema: JsonSchema, typed: str) -> None:
    raise ValueError("nothing; press Enter")


def _parse_any(schema: JsonSchema, typed: str) -> Any:
    """Parse a line as JSON, or return it as text if it is not JSON."""
    try:
        return json.loads(typed, parse_constant=_refuse_constant)
    except ValueError:
        return typed


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


_PARSERS: dict[str, Callable[[JsonSchema, str], Any]] = {
    "string": _parse_string,
    "integer": _parse_integer,
    "number": _parse_number,
    "boolean": _parse_boolean,
    "null": _parse_null,
}


def _format(read: Callable[[str], object], words: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        try:
            read(text)
        except ValueError:
            raise ValueError(words) from None

    return check


def _pattern(pattern: str, words: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        if not re.fullmatch(pattern, text):
            raise ValueError(words)

    return check


_FORMATS: dict[str, Callable[[str], None]] = {
    "date": _format(date.fromisoformat, "a date, such as 2026-05-31"),
    "time": _format(time.fromisoformat, "a time, such as 14:30"),
    "date-time": _format(datetime.fromisoformat, "a date and time, such as 2026-05-31T14:30:00"),
    "email": _pattern(r"[^@\s]+@[^@\s]+\.[^@\s]+", "an e-mail address, such as ada@example.org"),
    "uri": _pattern(r"[A-Za-z][A-Za-z0-9+.-]*:\S+", "an address, such as https://example.org"),
    "uuid": _pattern(
        r"[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}",
        "a UUID, such as 123e4567-e89b-12d3-a456-426614174000",
    ),
}


def hint(schema: JsonSchema) -> str:
    """Describe what a field expects, in a few words."""
    kind = str(schema.get("type", ""))
    words = {
        "string": escape_line(str(schema.get("format", "")), 40).replace("date-time", "date and time")
        or "text",
        "integer": "whole number",
        "number": "number",
        "boolean": "y or n",
        "array": "list",
        "object": "several fields",
        "null": "nothing",
    }
    bounds = [escape_line(str(schema[key]), 40) for key in ("minimum", "maximum") if key in schema]
    between = f", {bounds[0]} to {bounds[1]}" if len(bounds) == 2 else ""
    return words.get(kind, "text or JSON") + between
