"""What is said of a run, a line each: pure functions from events to text."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pydantic_core
from rich.text import Text

from handrail.environment.text import escape_line, format_arguments
from handrail.errors import ToolValidationError
from handrail.events import (
    Advised,
    ApprovalDecided,
    CallStatus,
    ModelFailed,
    ToolInvoked,
    ToolRolledBack,
)
from handrail.messages import Usage
from handrail.schema import to_json

if TYPE_CHECKING:
    from handrail.adapter import PromptResponse

_MARKS: dict[CallStatus, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "error": ("✗", "red"),
    "denied": ("⊘", "yellow"),
    "cancelled": ("■", "yellow"),
    "timed out": ("✗", "red"),
    "invalid": ("✗", "red"),
    "conflict": ("✗", "red"),
}
_ARGUMENTS = 60
_WHY = 200


def indent(path: tuple[str, ...]) -> str:
    """Two spaces for the call, and for each call it is nested in."""
    return "  " * max(len(path), 1)


def seconds(spent: float) -> str:
    """A length of time, as short as it can be read."""
    if spent < 9.95:
        return f"{spent:.1f} s"
    if spent < 60:
        return f"{spent:.0f} s"
    return f"{int(spent) // 60} m {int(spent) % 60:02} s"


def money(cost: Decimal | None) -> str:
    """US dollars; small amounts keep two digits that say something."""
    if cost is None:
        return "cost unknown"
    if not cost:
        return "no cost"
    if cost >= Decimal("0.01"):
        return f"${cost:.2f}"
    return f"${cost:.{max(2, -cost.adjusted() + 1)}f}"


def arguments_of(params: Any) -> Any:
    """Parsed arguments as plain JSON, secrets masked; None where they can't be shown."""
    if params is None:
        return None
    try:
        return pydantic_core.from_json(to_json(params))
    except (ToolValidationError, ValueError):
        return None


def call_over(event: ToolInvoked, cost: Decimal | None = None) -> Text:
    """One line for a call that has ended."""
    mark, colour = _MARKS[event.status]
    text = Text(indent(event.path))
    text.append(f"{mark} ", colour)
    text.append(escape_line(event.tool, 80), "bold")
    arguments = format_arguments(arguments_of(event.params), _ARGUMENTS)
    if arguments:
        text.append(f" {arguments}")
    spent = [seconds(event.seconds)]
    if cost:
        spent.append(money(cost))
    if event.attempts > 1:
        spent.append(f"{event.attempts} attempts")
    text.append(f"  {' · '.join(spent)}", "dim")
    if event.status != "ok":
        text.append(f"\n{indent(event.path)}  {_why(event)}", colour)
    return text


def _why(event: ToolInvoked) -> str:
    said = escape_line(" ".join(event.result.message.split()), _WHY)
    return said or event.status


def call_opens(tool: str, path: tuple[str, ...]) -> Text:
    """The line above what happens inside a call."""
    text = Text(indent(path))
    text.append("▸ ", "cyan")
    text.append(escape_line(tool, 80), "bold")
    return text


def decided(event: ApprovalDecided) -> Text:
    """What came of asking for approval."""
    approval = event.approval
    tool = escape_line(event.tool, 80)
    why = f": {escape_line(approval.reason, _WHY)}" if approval.reason else ""
    if approval.approved:
        mode = " by --approve all" if approval.by == "approve_all" else ""
        return Text(f"· {tool}: approved{mode}{why}", "dim")
    return Text(f"· {tool}: not approved ({approval.outcome}){why}", "yellow")


def rolled_back(event: ToolRolledBack) -> Text | None:
    """What could not be undone; nothing where all was, as it should be."""
    if not event.not_undone:
        return None
    left = ", ".join(escape_line(each, 80) for each in event.not_undone)
    return Text(f"! {escape_line(event.tool, 80)} failed, and this was not undone: {left}", "red")


def model_failed(event: ModelFailed) -> Text:
    """A request that came to nothing, and when it is tried again."""
    then = "" if event.retry_in is None else f"; trying again in {seconds(event.retry_in)}"
    text = Text("✗ ", "yellow")
    text.append(f"{escape_line(event.model, 60)}: {escape_line(event.error, _WHY)}{then}", "yellow")
    return text


def advised(event: Advised) -> Text:
    """Advice that was given to the model."""
    verb = "raised" if event.failed else "said"
    return Text(f"· {escape_line(event.by, 60)} {verb}: {escape_line(event.text, _WHY)}", "dim")


def spending(usage: Usage, cost: Decimal | None) -> str:
    """What answers took, but for their time."""
    asked = f"{usage.requests} request{'' if usage.requests == 1 else 's'}"
    return f"{asked} · {usage.input:,} tokens in, {usage.output:,} out · {money(cost)}"


def summary(usage: Usage, cost: Decimal | None, spent: float) -> Text:
    """What a run took, at its end."""
    return Text(f"{spending(usage, cost)} · {seconds(spent)}", "dim")


def answer_of(response: PromptResponse[Any]) -> str:
    """What a run came to, as text: what the model said, or else its output as JSON."""
    if response.text or response.output is None:
        return response.text
    return json.dumps(pydantic_core.from_json(to_json(response.output)), indent=2, ensure_ascii=False)
