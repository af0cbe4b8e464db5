"""What the page is shown of threads and runs, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec

from handrail.adapter.durable import decode_begin, decode_outcome
from handrail.messages import AssistantMessage, Message, ToolMessage, Usage, UserMessage
from handrail.question import Question
from handrail.records import OVER, Journal, RunRow
from handrail.runs import CallNode, RunTree, Turn, show
from handrail.serve.thread import Thread


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def usage_of(usage: Usage) -> dict[str, int]:
    return {"input": usage.input, "output": usage.output, "requests": usage.requests}


def money(cost: Decimal | None) -> str | None:
    return None if cost is None else str(cost)


def question(asked: Question) -> dict[str, Any]:
    return msgspec.to_builtins(asked)


def messages(said: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation as AG-UI messages."""
    out: list[dict[str, Any]] = []
    for number, message in enumerate(said):
        if isinstance(message, UserMessage):
            if not message.by_run:
                out.append({"id": f"m{number}", "role": "user", "content": message.text})
        elif isinstance(message, AssistantMessage):
            told: dict[str, Any] = {"id": f"m{number}", "role": "assistant", "content": message.text}
            if message.calls:
                told["toolCalls"] = [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in message.calls
                ]
            out.append(told)
        elif isinstance(message, ToolMessage):  # pyright: ignore[reportUnnecessaryIsInstance]  # said plainly
            out += [
                {"id": f"{result.id}-result", "role": "tool", "toolCallId": result.id, "content": result.text}
                for result in message.results
            ]
    return out


async def thread(journal: Journal, seen: Thread) -> dict[str, Any]:
    """The snapshot of a thread."""
    await seen.check_known()
    last = seen.feed.last
    rows = await journal.runs(session_id=seen.session_id)
    calls: dict[str, Any] = {}
    runs: list[dict[str, Any]] = []
    usage, cost = Usage(), Decimal(0)
    for row in rows:
        tree = await show(journal, row.record.id)
        runs.append(run_line(row, tree))
        usage += tree.usage
        cost += tree.cost or 0
        calls |= {each.id: call_facts(each, row.record.id) for each in tree.calls if each.id}
    waits = [question(each) for each in await seen.questions()]
    return {
        "id": seen.id,
        "title": title(rows),
        "status": status(rows, seen),
        "messages": messages(await seen.messages()),
        "state": seen.state(),
        "calls": calls,
        "subagents": [],
        "questions": waits,
        "runs": runs,
        "usage": usage_of(usage),
        "cost": money(cost),
        "last_event_id": seen.feed.id_of(last),
    }


def title(rows: Sequence[RunRow]) -> str:
    said = next((decode_begin(row.record).message for row in rows if row.record.begin), None) or ""
    return " ".join(said.split())[:80]


def status(rows: Sequence[RunRow], seen: Thread) -> str:
    if seen.live is not None:
        return "running" if seen.live.leg else "waiting"
    if not rows:
        return "idle"
    newest = rows[-1]
    if newest.status in ("failed", "cancelled"):
        return newest.status
    return "idle" if newest.status in OVER else "waiting"


def run_line(row: RunRow, tree: RunTree) -> dict[str, Any]:
    outcome = decode_outcome(row)
    over = row.status in OVER
    return {
        "id": row.record.id,
        "status": row.status,
        "prompt": row.record.prompt,
        "model": row.record.model,
        "began_at": iso(row.record.began_at),
        "seconds": row.changed_at - row.record.began_at if over else None,
        "questions": row.questions,
        "usage": usage_of(tree.usage),
        "cost": money(tree.cost),
        "error": outcome.error or None,
    }


def call_facts(call: CallNode, run_id: str) -> dict[str, Any]:
    waits = any(asked.answer is None for asked in call.questions)
    return {
        "status": ("waiting" if waits else "running") if call.status == "open" else call.status,
        "seconds": call.seconds,
        "began_at": None if call.at is None else iso(call.at),
        "diff": call.diff or None,
        "paths": [place[5:] for place in call.writes if place.startswith("file ")],
        "undone": call.undone,
        "run_id": run_id,
    }


def tree(found: RunTree) -> dict[str, Any]:
    """A run as a tree, for its timeline."""
    line = run_line(found.row, found)
    return {**line, "turns": [turn(each) for each in found.turns]}


def turn(each: Turn) -> dict[str, Any]:
    return {
        "number": each.number,
        "at": each.at,
        "seconds": each.seconds,
        "text": each.text,
        "model": each.model,
        "usage": None if each.usage is None else usage_of(each.usage),
        "cost": money(each.cost),
        "calls": [call_node(call) for call in each.calls],
    }


def call_node(call: CallNode) -> dict[str, Any]:
    return {
        "id": call.id,
        "place": call.place,
        "tool": call.tool,
        "arguments": call.arguments,
        "status": call.status,
        "at": call.at,
        "seconds": call.seconds,
        "message": call.message,
        "diff": call.diff,
        "undone": call.undone,
        "reads": list(call.reads),
        "writes": list(call.writes),
        "effects": list(call.effects),
        "decision": call.decision,
        "questions": [
            {
                "name": asked.question.name,
                "kind": asked.question.kind,
                "asked_at": asked.question.asked_at.isoformat(),
                "answered": asked.answer is not None,
                "outcome": None if asked.answer is None else asked.answer.outcome,
            }
            for asked in call.questions
        ],
        "calls": [call_node(inner) for inner in call.calls],
        "runs": [
            {
                "name": run.name,
                "turns": [turn(inner) for inner in run.turns],
                "calls": [call_node(inner) for inner in run.calls],
            }
            for run in call.runs
        ],
    }
