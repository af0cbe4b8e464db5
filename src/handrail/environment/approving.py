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
    for line in visible(question.message or str(payload.get("reason") or "")).split("\n"):
        lines.append(ink(f"  {line}", "dim"))
    arguments = payload.get("arguments")
    if arguments not in (None, {}):
        laid = list(laid_out(arguments, "    "))
        lines += ["", *laid[:ARGUMENT_LINES]]
        if len(laid) > ARGUMENT_LINES:
            lines.append(ink(f"    … {len(laid) - ARGUMENT_LINES} more lines, v to view all", "dim"))
    return lines


def asker(question: Question) -> str:
    """The path of who asks, outermost first."""
    return " › ".join(on_one_line(name, 60) for name in question.asked_by) or on_one_line(question.name)


def shown_diff(question: Question, ink: Ink, most: int | None = DIFF_LINES) -> list[str]:
    """The diff in colour, at most so many lines of it."""
    diff = _payload(question).get("diff")
    if not isinstance(diff, str) or not diff:
        return []
    lines = [visible(line) for line in diff.rstrip("\n").split("\n")]
    shown = coloured_diff(lines if most is None else lines[:most], ink)
    if most is not None and len(lines) > most:
        shown.append(ink(f"… {len(lines) - most} more lines, v to view all", "dim"))
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
    payload = _payload(question)
    lines: Sequence[str] = [*laid_out(payload.get("arguments"), "  "), *shown_diff(question, ink, None)]
    for start in range(0, len(lines), page):
        for line in lines[start : start + page]:
            desk.say(line)
        left = len(lines) - start - page
        if left > 0 and (await desk.line(ink(f"  Enter for {left} more lines, q to stop: ", "dim"))).strip():
            return
