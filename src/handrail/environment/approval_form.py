"""The form for approving a call: what it is, what it would change, and the choices.

A choice is a key and Enter. Enter alone decides nothing, so nothing is approved by accident.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from handrail.environment.form import Dialog
from handrail.environment.text import Styler, escape, escape_line, format_value
from handrail.errors import Declined
from handrail.question import Question

DIFF_LINES = 30
"""Lines of a diff shown before the rest is left to `v`."""
ARGUMENT_LINES = 20
MESSAGE_LINES = 20
LINE_CHARACTERS = 1000
"""Characters of a line shown before the rest is left to `v`: more would push the question off the screen."""


class Choice(NamedTuple):
    """A choice, its key, and the answer it stands for."""

    key: str
    words: str
    answer: dict[str, Any]
    wants_reason: bool = False


def list_choices(question: Question) -> list[Choice]:
    """List the possible answers to an approval. Each scope on offer has its own number."""
    payload = _payload(question)
    found = [Choice("y", "yes, once", {"approved": True})]
    remembers = "scopes" in payload or "remember" in cast(
        dict[str, Any], question.schema.get("properties") or {}
    )
    if remembers:
        found.append(
            Choice("e", "yes, this exact call, for the session", {"approved": True, "remember": "exact"})
        )
        for number, scope in enumerate(_scopes(payload), 1):
            words = f"yes, for the session: {escape_line(scope, 80)}"
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
    """The path of calls that led to a question, outermost first."""
    return " › ".join(escape_line(name, 60) for name in question.asked_by) or escape_line(question.name)


def _describe(question: Question, style: Styler) -> list[str]:
    """Who asks, why, and with which arguments; the diff is separate."""
    payload = _payload(question)
    tool = escape_line(str(payload.get("tool", question.name)), 80)
    lines = [f"{style('?', 'yellow', 'bold')} {style(f'Allow {tool}?', 'bold')}"]
    if len(question.asked_by) > 1:
        lines.append(f"  asked by {style(asker(question), 'cyan')}")
    lines += [style(line, "dim") for line in _shorten(_message(question), MESSAGE_LINES, "  ")]
    arguments = payload.get("arguments")
    if arguments not in (None, {}):
        lines += ["", *_shorten(list(format_value(arguments, "    ")), ARGUMENT_LINES, "    ")]
    return lines


def _message(question: Question) -> list[str]:
    """The reason for asking. A message of several lines has a bar in front, so it can't imitate this form."""
    lines = escape(question.message or str(_payload(question).get("reason") or "")).split("\n")
    return [f"  {lines[0]}"] if len(lines) == 1 else [f"  │ {line}" for line in lines]


def _diff(question: Question, style: Styler, limit: int | None = DIFF_LINES) -> list[str]:
    """The diff in colour, at most `limit` lines of it."""
    diff = _payload(question).get("diff")
    if not isinstance(diff, str) or not diff:
        return []
    lines = [escape(line) for line in diff.rstrip("\n").split("\n")]
    return ["", *(f"  {line}" for line in style.diff(_shorten(lines, limit, "")))]


def _shorten(lines: Sequence[str], limit: int | None, indent: str) -> list[str]:
    """Cut to `limit` lines of readable length; None cuts nothing."""
    if limit is None:
        return list(lines)
    shown = [
        line
        if len(line) <= LINE_CHARACTERS
        else f"{line[:LINE_CHARACTERS]} … {len(line) - LINE_CHARACTERS} more characters, v to view all"
        for line in lines[:limit]
    ]
    if len(lines) > limit:
        shown.append(f"{indent}… {len(lines) - limit} more lines, v to view all")
    return shown


async def fill_in_approval(question: Question, dialog: Dialog, style: Styler, page: int) -> dict[str, Any]:
    """Show what needs approval and return the answer that was chosen. Ctrl-D raises `Declined`."""
    for line in (*_describe(question, style), *_diff(question, style)):
        dialog.say(line)
    choices = list_choices(question)
    dialog.say()
    for each in choices:
        dialog.say(f"  {style(each.key, 'bold')}  {each.words}")
    dialog.say(f"  {style('v', 'bold')}  view everything")
    keys = ", ".join(each.key for each in choices)
    while True:
        typed = (await dialog.line("  your choice, then Enter: ")).strip()
        key = typed.casefold()
        if key in ("v", "view"):
            await _view(question, dialog, style, page)
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


async def _view(question: Question, dialog: Dialog, style: Styler, page: int) -> None:
    """Show everything, a screen at a time."""
    arguments = format_value(_payload(question).get("arguments"), "  ")
    lines: Sequence[str] = [*_message(question), *arguments, *_diff(question, style, None)]
    for start in range(0, len(lines), page):
        for line in lines[start : start + page]:
            dialog.say(line)
        left = len(lines) - start - page
        if (
            left > 0
            and (await dialog.line(style(f"  Enter for {left} more lines, q to stop: ", "dim"))).strip()
        ):
            return
