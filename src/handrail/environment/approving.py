"""Asking a person to approve a call: who asks, what it is, what it would change; then a key and Enter.

Enter alone decides nothing, so nothing is approved by accident.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from handrail.environment.form import Desk
from handrail.environment.ink import Ink, coloured_diff
from handrail.environment.visible import laid_out, on_one_line, visible
from handrail.errors import Declined
from handrail.question import Question

DIFF_LINES = 30
"""How many lines of a diff are shown before they are offered for viewing."""
ARGUMENT_LINES = 20
MESSAGE_LINES = 20
LINE_LETTERS = 1000
"""How much of one line is shown before it is offered for viewing: more would push the question off the screen."""


class Choice(NamedTuple):
    """One thing a person may say, by which key, and the answer it makes."""

    key: str
    words: str
    answer: dict[str, Any]
    wants_reason: bool = False


def choices(question: Question) -> list[Choice]:
    """What may be said to a question: each scope that is offered has its own number."""
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
            words = f"yes, for the session: {on_one_line(scope, 80)}"
            found.append(Choice(str(number), words, {"approved": True, "remember": "scope", "scope": scope}))
    found.append(Choice("n", "no", {"approved": False}))
    found.append(Choice("r", "no, and say why", {"approved": False}, wants_reason=True))
    if remembers:
        found.append(
            Choice("x", "no, this exact call never in the session", {"approved": False, "remember": "exact"})
        )
    return found


def _payload(question: Question) -> dict[str, Any]:
    payload: Any = question.payload
    return cast(dict[str, Any], payload) if isinstance(payload, dict) else {}


def _scopes(payload: dict[str, Any]) -> list[str]:
    offered = payload.get("scopes")
    return (
        [each for each in cast(list[Any], offered) if isinstance(each, str)]
        if isinstance(offered, list)
        else []
    )


def described(question: Question, ink: Ink) -> list[str]:
    """What is asked for, without the diff: who asks, why, and with which arguments."""
    payload = _payload(question)
    tool = on_one_line(str(payload.get("tool", question.name)), 80)
    lines = [f"{ink('?', 'yellow', 'bold')} {ink(f'Allow {tool}?', 'bold')}"]
    if len(question.asked_by) > 1:
        lines.append(f"  asked by {ink(asker(question), 'cyan')}")
    said = _message(question)
    lines += [ink(line, "dim") for line in _shortened(said, MESSAGE_LINES, "  ")]
    arguments = payload.get("arguments")
    if arguments not in (None, {}):
        laid = list(laid_out(arguments, "    "))
        lines += ["", *_shortened(laid, ARGUMENT_LINES, "    ")]
    return lines


def _message(question: Question) -> list[str]:
    """Why it is asked. Several lines stand behind a bar: none of them can pass for a line of ours."""
    said = visible(question.message or str(_payload(question).get("reason") or "")).split("\n")
    return [f"  {said[0]}"] if len(said) == 1 else [f"  │ {line}" for line in said]


def _shortened(lines: Sequence[str], most: int | None, indent: str) -> list[str]:
    """The first lines, and of each as much as can be read at a glance; all of it where `most` is None."""
    if most is None:
        return list(lines)
    shown = [
        line
        if len(line) <= LINE_LETTERS
        else f"{line[:LINE_LETTERS]} … {len(line) - LINE_LETTERS} more letters, v to view all"
        for line in lines[:most]
    ]
    if len(lines) > most:
        shown.append(f"{indent}… {len(lines) - most} more lines, v to view all")
    return shown


def asker(question: Question) -> str:
    """The path of who asks, outermost first."""
    return " › ".join(on_one_line(name, 60) for name in question.asked_by) or on_one_line(question.name)


def shown_diff(question: Question, ink: Ink, most: int | None = DIFF_LINES) -> list[str]:
    """The diff in colour, at most so many lines of it."""
    diff = _payload(question).get("diff")
    if not isinstance(diff, str) or not diff:
        return []
    lines = [visible(line) for line in diff.rstrip("\n").split("\n")]
    shown = coloured_diff(_shortened(lines, most, ""), ink)
    return ["", *(f"  {line}" for line in shown)]


async def approve(question: Question, desk: Desk, ink: Ink, page: int) -> dict[str, Any]:
    """Show what is asked for and take one of the choices. Ctrl-D is `Declined`."""
    for line in (*described(question, ink), *shown_diff(question, ink)):
        desk.say(line)
    offered = choices(question)
    desk.say()
    for each in offered:
        desk.say(f"  {ink(each.key, 'bold')}  {each.words}")
    desk.say(f"  {ink('v', 'bold')}  view all of it")
    keys = ", ".join(each.key for each in offered)
    while True:
        typed = (await desk.line("  your choice, then Enter: ")).strip()
        if typed.casefold() in ("v", "view"):
            await _view(question, desk, ink, page)
            continue
        found = next((each for each in offered if each.key == _key(typed)), None)
        if found is None:
            what = "Nothing was decided" if not typed else f"{on_one_line(typed, 20)!r} is none of these"
            desk.say(f"  {what}: type {keys} or v, then Enter.", "yellow")
            continue
        if not found.wants_reason:
            return found.answer
        try:
            reason = (await desk.line("  why not: ")).strip()
        except Declined:
            reason = ""
        return {**found.answer, **({"reason": reason} if reason else {})}


def _key(typed: str) -> str:
    """The key that is meant: the word for it counts too."""
    return {"yes": "y", "no": "n"}.get(typed.casefold(), typed.casefold())


async def _view(question: Question, desk: Desk, ink: Ink, page: int) -> None:
    """All of it, a screen at a time."""
    arguments = laid_out(_payload(question).get("arguments"), "  ")
    lines: Sequence[str] = [*_message(question), *arguments, *shown_diff(question, ink, None)]
    for start in range(0, len(lines), page):
        for line in lines[start : start + page]:
            desk.say(line)
        left = len(lines) - start - page
        if left > 0 and (await desk.line(ink(f"  Enter for {left} more lines, q to stop: ", "dim"))).strip():
            return
