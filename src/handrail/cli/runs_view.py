"""Recorded runs as output: tables, trees and lines for people, and JSON for programs."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic_core
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from handrail.cli.screens import make_console
from handrail.journal.records import QuestionRecord, QueuedMessage, RunRecord, RunRow, Verification, WorkerRow
from handrail.run.compaction import stand_in
from handrail.text.rendering import counted, escape, exact

if TYPE_CHECKING:
    from handrail.events import ApprovalRemembered
    from handrail.mcp.served_tools import CallMessage
    from handrail.messages import Compaction, Usage
    from handrail.question import Question
    from handrail.run.answer import FailedRequest, Unanswered
    from handrail.runs import CallNode, Divergence, Erasure, RunComparison, RunLine, RunTree, Turn, Undoing
    from handrail.runs.tree import Nested
from handrail.text.terminal import Styler, format_rows, is_terminal

_COLOURS = {
    "queued": "blue", "running": "cyan", "parked": "yellow", "interrupted": "magenta", "done": "green", "failed": "red",
    "cancelled": "yellow", "ok": "green", "open": "yellow", "denied": "yellow",
}  # fmt: skip
_MARKS = {"ok": "✓", "open": "…", "denied": "⊘", "cancelled": "■"}
_MAX_LINE, _MAX_PROBLEM, _MAX_DIFF = 100, 400, 12


def print_item(item: Any) -> None:
    """Print an item to standard output. It is wrapped only on a terminal, and coloured only if `wants_colour` allows it."""
    attended = is_terminal(sys.stdout)
    if isinstance(item, str) and not attended:
        sys.stdout.write(f"{item}\n")  # keeps the text's tabs
        return
    console = make_console(sys.stdout, width=None if attended else 240)
    console.print(item, soft_wrap=not attended)


def _line(text: str, limit: int = _MAX_LINE) -> str:
    text = " ".join(escape(text).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _ago(at: float, now: float) -> str:
    spent = max(now - at, 0)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if spent >= size:
            return f"{int(spent // size)} {unit} ago"
    return f"{int(spent)} s ago"


def _seconds(spent: float | None) -> str:
    if spent is None:
        return ""
    return f"{spent * 1000:.0f} ms" if spent < 1 else f"{spent:.1f} s"


# --- a table ---


def run_table(lines: Sequence[RunLine], now: float, workers: Sequence[WorkerRow] = ()) -> Any:
    """Build a table of runs, one per row, or a sentence if there are none.

    If standard output is not a terminal, the table is tab-separated text.
    """
    if not lines:
        return "There are no runs."
    rows = [_cells(line, workers, now) for line in lines]
    if not is_terminal(sys.stdout):
        return "\n".join("\t".join(row) for row in (_HEADS, *rows))
    ids = short_ids([line.id for line in lines])
    rows = [{**dict(zip(_HEADS, row, strict=True)), "RUN": ids[row[0]]} for row in rows]
    heads = [head for head in _SHOWN if head in _SHOWN[:4] or any(row[head] for row in rows)]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in heads:
        table.add_column(head, no_wrap=head in _SHOWN[:3], overflow="fold")
    for row in rows:
        cells = {**row, "MESSAGE": _line(row["MESSAGE"], _MAX_WORDS)}
        table.add_row(
            *(
                Text(cells[head], _COLOURS.get(cells[head], "") if head == "STANDING" else "")
                for head in heads
            )
        )
    return table


_HEADS = ("RUN", "STANDING", "PROMPT", "MODEL", "STARTED", "WAITS FOR", "WORKSPACE", "FORKED FROM", "BEGUN BY", "MESSAGE")  # fmt: skip
_SHOWN = ("RUN", "STANDING", "STARTED", "MESSAGE", "WAITS FOR", "WORKSPACE", "FORKED FROM", "BEGUN BY")
"""The columns on a terminal. The first four are always there, and the others if a run has something in them."""
_GENERATED = re.compile(r"[0-9a-f]{32}")
_SHORT, _MAX_WORDS = 8, 40


def _cells(line: RunLine, workers: Sequence[WorkerRow], now: float) -> tuple[str, ...]:
    record = line.row.record
    parent = record.parent.run_id if record.parent else ""
    return (
        escape(line.id), line.standing, _line(_source(record), 40), _line(record.model, 40), _ago(record.began_at, now),
        waits_for(line, workers, now), ", ".join(line.workspaces), _line(record.forked_from, 40), escape(parent), _line(message_of(record)),
    )  # fmt: skip


def short_ids(ids: Sequence[str]) -> dict[str, str]:
    """Return the beginning of each id that `handrail runs` generated: as much as tells these ids apart. Other ids are whole."""
    found = {each: escape(each) for each in ids}
    ordered = sorted(found)
    for before, each, after in zip(("", *ordered), ordered, (*ordered[1:], ""), strict=False):
        if _GENERATED.fullmatch(each):
            short = (each[:size] for size in range(_SHORT, 32))
            found[each] = next(
                (some for some in short if not before.startswith(some) and not after.startswith(some)), each
            )
    return found


class _Message(msgspec.Struct):
    """The part of a run's beginning, or of a submitted run's request, that its list shows."""

    message: str | None = None


def message_of(record: RunRecord) -> str:
    """Return the message that a run began with, or was submitted with; "" if it has none. The rest of the record is not decoded."""
    recorded = record.begin or record.request
    return (msgspec.msgpack.decode(recorded, type=_Message).message or "") if recorded else ""


def _source(record: RunRecord) -> str:
    """Return the name of a run's prompt, followed by the tool's name if the run is a call from an MCP client."""
    call = _call_of(record)
    return record.prompt if call is None else f"{record.prompt}: {call.tool}"


def _call_of(record: RunRecord) -> CallMessage | None:
    """Return the call of an MCP client that a run makes; None if it makes none."""
    from handrail.mcp.served_tools import CallMessage

    return CallMessage.of_run(record)


def waits_for(line: RunLine, workers: Sequence[WorkerRow], now: float) -> str:
    """Return what a run waits for, such as answers, folders, its due time, a workspace or a worker; "" for nothing."""
    row = line.row
    counts = {"answer": row.questions, "folder": line.unapplied}
    found = [f"{count} {what}{'' if count == 1 else 's'}" for what, count in counts.items() if count]
    if row.queue and line.standing in ("queued", "interrupted", "parked"):
        if row.due_at is not None and row.due_at > now:
            at = datetime.fromtimestamp(row.due_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            found.append(f"its time, {at}")
        if line.missing is not None:
            name, holder = line.missing
            found.append(f"the workspace {escape(name)}, which {escape(holder)} has")
        found += _worker_needed(row, workers)
    return ", ".join(found)


def _worker_needed(row: RunRow, workers: Sequence[WorkerRow]) -> list[str]:
    """Return which worker a run needs, if it is pinned to a host or no live worker may take it; otherwise []."""
    app, _, code = row.queue.rpartition("@")
    pinned = f" on {escape(row.host)}" if row.host else ""
    own = [each for each in workers if row.queue in each.queues]
    if any(row.host in ("", each.host) for each in own):
        return [f"a worker{pinned}"] if pinned else []
    if own:
        return [f"no worker{pinned}, where its folder is"]
    others = [each for each in workers if any(queue.rpartition("@")[0] == app for queue in each.queues)]
    return [
        f"no worker for version {code[:12]}{pinned}" if others else f"no worker for {_line(app, 60)}{pinned}"
    ]


# --- a tree ---


def run_tree(tree: RunTree, full: bool) -> Any:
    """Build a tree that shows a run's turns, calls and questions."""
    from handrail.cli.activity import format_spending

    row, record = tree.row, tree.row.record
    head = Text(escape(record.id), "bold")
    head.append(f"  {tree.standing}", _COLOURS[tree.standing])
    spent = format_spending(tree.usage, tree.cost)
    began = datetime.fromtimestamp(record.began_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    lasted = (
        f" · {_seconds(row.changed_at - record.began_at)}"
        if tree.standing in ("done", "failed", "cancelled")
        else ""
    )
    head.append(f"\n{_line(record.prompt)} on {_line(record.model)} · {began}{lasted}\n{spent}", "dim")
    if record.forked_from:
        head.append(f"\nforked from {escape(record.forked_from)}", "dim")
    if record.parent is not None:
        by = f"{record.parent.run_id}, call {record.parent.call_id}"
        head.append(f"\nbegun in the background by {escape(by)}", "dim")
    shown = Tree(head, guide_style="dim")
    if tree.begin.message is not None:
        shown.add(Text(f"» {_text(tree.begin.message, full)}"))
    for turn in tree.turns:
        _add_turn(shown, turn, full, record.model)
    if tree.outcome.unanswered is not None:
        _add_unanswered(shown, tree.steps + 1, tree.outcome.unanswered, full)
    if tree.outcome.error:
        error = escape(tree.outcome.error) if full else _line(tree.outcome.error, _MAX_PROBLEM)
        shown.add(Text(f"✗ {error}", "red"))
    for asked in tree.questions:
        if asked.answer is None:
            shown.add(question_text(asked.question, full))
    for child in tree.children:
        text = Text(f"⇉ {_line(child.row.record.prompt)}  ", "default")
        text.append(child.standing, _COLOURS[child.standing])
        text.append(f"  {escape(child.row.record.id)}", "dim")
        node = shown.add(text)
        for question in child.questions:
            node.add(question_text(question, full))
    for message in tree.messages:
        shown.add(message_text(message, full))
    for each in tree.unapplied:
        shown.add(Text(f"! {escape(str(each))}", "red"))
    return shown


def _text(text: str, full: bool) -> str:
    return escape(text) if full else _line(text)


def _add_turn(above: Tree, turn: Turn, full: bool, usual: str = "") -> None:
    node = above.add(turn_text(turn, full, usual))
    for call in turn.calls:
        _add_call(node, call, full)


def turn_text(turn: Turn, full: bool = False, usual: str = "") -> Text:
    """Format a model's answer: its number, its time and cost, and what it says. Its model is shown unless it is the `usual` one."""
    from handrail.cli.activity import format_money

    text = Text(f"step {turn.number}", "bold cyan")
    if turn.failed or (usual and turn.model != usual and "," in usual):
        text.append(f"  {_line(turn.model, 60)}", "not bold default")
    tokens = "" if turn.usage is None else f" · {turn.usage.input:,} in, {turn.usage.output:,} out"
    cost = "" if turn.cost is None else f" · {format_money(turn.cost)}"
    text.append(f"  {_seconds(turn.seconds)}{tokens}{cost}", "not bold dim")
    if turn.compaction is not None:
        _add_compaction(text, turn.compaction, turn.usage, full)
    _add_failed(text, turn.failed, full)
    if turn.text:
        text.append(f"\n{_text(turn.text, full)}", "not bold default")
    for attachment in turn.attachments:
        text.append(f"\n{_line(attachment.render())}", "not bold cyan")
    return text


def _add_compaction(text: Text, compaction: Compaction, after: Usage | None, full: bool) -> None:
    from handrail.cli.activity import compaction_lines

    for line in compaction_lines(compaction, after):
        text.append(f"\n{line}", "not bold magenta")
    summary = stand_in(compaction)
    if summary:
        text.append(f"\n» {_text(summary, full)}", "not bold default")


def _add_unanswered(above: Tree, number: int, unanswered: Unanswered, full: bool) -> None:
    text = Text(f"step {number}", "bold cyan")
    text.append(f"  {_seconds(unanswered.seconds)} · no answer", "not bold dim")
    _add_failed(text, unanswered.failed, full)
    above.add(text)


def _add_failed(text: Text, failed: Sequence[FailedRequest], full: bool) -> None:
    for each in failed:
        text.append(f"\n✗ {_line(each.model, 60)}: {_text(each.error, full)}", "not bold yellow")


def call_text(call: CallNode, full: bool = False) -> Text:
    """Format a call: its status, its arguments, its time and id, and its result."""
    colour = _COLOURS.get(call.status, "red")
    text = Text(f"{_MARKS.get(call.status, '✗')} ", colour)
    text.append(_line(call.tool, 60), "bold")
    arguments = call.arguments if call.arguments not in ("", "{}", "null") else ""
    text.append(f" {_text(arguments, full)}" if arguments else "")
    notes = [_seconds(call.seconds), escape(call.id), *([] if call.status == "ok" else [call.status])]
    text.append(f"  {' · '.join(note for note in notes if note)}", "dim")
    marks = {"undone": call.undone, "compensated": call.compensated, "rolled back": call.rolled_back}
    for mark in (mark for mark, holds in marks.items() if holds):
        text.append(f"  {mark}", "bold magenta")
    if call.message:
        text.append(f"\n→ {_text(call.message, full)}", "default" if call.status == "ok" else colour)
    for effect in call.effects:
        text.append(f"\ncan't be undone: {_line(effect)}", "dim")
    return text


def _add_call(above: Tree, call: CallNode, full: bool) -> None:
    node = above.add(call_text(call, full))
    if call.diff:
        node.add(_diff(call.diff, full))
    for asked in call.questions:
        node.add(_answered(asked))
    for inner in call.calls:
        _add_call(node, inner, full)
    for nested in call.runs:
        _add_run(node, nested, full)


def _add_run(above: Tree, nested: Nested, full: bool) -> None:
    node = above.add(Text(f"▸ {_line(nested.name or 'nested run', 60)}", "cyan"))
    for turn in nested.turns:
        _add_turn(node, turn, full)
    for call in nested.calls:
        _add_call(node, call, full)


def _diff(diff: str, full: bool) -> Text:
    lines = escape(diff).splitlines()
    shown = lines if full else lines[:_MAX_DIFF]
    text = _style_diff(shown)
    if len(lines) > len(shown):
        text.append(f"\n… {len(lines) - len(shown)} more lines: --full", "dim")
    return text


def _style_diff(diff: Sequence[str]) -> Text:
    """Colour a diff: added lines green, removed lines red."""
    text = Text()
    for number, line in enumerate(diff):
        colour = "green" if line.startswith("+") else "red" if line.startswith("-") else "dim"
        text.append(f"{chr(10) if number else ''}{line}", colour)
    return text


def _answered(asked: QuestionRecord) -> Text:
    answer = asked.answer
    if answer is None:
        return Text(f"? {_line(asked.question.name)}: waits", "yellow")
    said = (
        json.dumps(answer.value, ensure_ascii=False, default=str)
        if answer.outcome == "answered"
        else answer.outcome
    )
    text = Text(f"? {_line(asked.question.name)}: {_line(said)}", "dim")
    if answer.has_remark:
        text.append(
            f"\n» {_line(answer.remark)}{''.join(f' [{_line(each.name)}]' for each in answer.attachments)}",
            "dim",
        )
    return text


def question_text(question: Question, full: bool = False) -> Text:
    """Format an open question with its id and the first 16 digits of its digest.

    A long message is cut. Without `full`, long rows and a long diff are cut too.
    """
    from handrail.environment.form import DIFF_LINES, diff_lines

    text = Text(f"? {_line(exact(question.message))}", "yellow")
    text.append(f"  {escape(question.id)}", "dim")
    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else 240
    for line in format_rows(question.rows, width - 4, whole=full, more="--full shows all"):
        text.append(f"\n{line}", "default")
    for line in diff_lines(
        question, Styler(False), width, None if full else DIFF_LINES, more="--full shows all"
    ):
        text.append(f"\n{line}", "default")
    text.append(f"\n  digest {question.digest[:16]}", "dim")
    return text


def message_text(message: QueuedMessage, full: bool = False) -> Text:
    """Format a message that was sent to a run while it worked, with its state and its id."""
    from handrail.run.record.notices import text_of

    words = [f"[{message.order}]" if message.order else "", _text(text_of(message), full)]
    text = Text(f"» {' '.join(filter(None, words))}")
    when = f", {message.when}" if message.state == "waiting" else ""
    text.append(f"  {message.state}{when}", "yellow" if when else "dim")
    text.append(f"  {escape(message.id)}", "dim")
    return text


def approval_line(number: int | None, kept: ApprovalRemembered) -> Text:
    """Format a decision that is remembered for a session, with its number, if any, and its id. `--revoke` takes either."""
    text = Text("" if number is None else f"{number}  ")
    text.append("approved" if kept.approved else "denied", "green" if kept.approved else "yellow")
    text.append(f"  {_line(kept.tool)}: {_line(kept.scope)}")
    if kept.reason:
        text.append(f"  ({_line(kept.reason)})")
    text.append(f"  {escape(kept.id)}", "dim")
    return text


# --- results of commands ---


def verification_data(found: Verification) -> dict[str, Any]:
    """Return the outcome of a verification as plain data for JSON."""
    altered = [
        {
            "chain": each.chain,
            "id": each.id,
            "record": each.record,
            "what": each.what,
            "problem": each.problem,
        }
        for each in found.altered
    ]
    return {"records": found.records, "altered": altered, "imported": list(found.imported)}


def verification_lines(found: Verification) -> list[Text]:
    """Format the outcome of a verification: each altered record, the number of records, and the imported runs."""
    lines = [Text(_line(each.place_and_problem, _MAX_PROBLEM), "red") for each in found.altered]
    checked = f"{found.records} records checked"
    lines.append(
        Text(
            f"{checked}: nothing was altered."
            if not lines
            else f"{checked}. The records above are damaged or were altered. Other runs can still be read."
        )
    )
    if found.imported:
        ids = escape(", ".join(found.imported))
        lines.append(
            Text(
                f"These runs were imported, and their content before the import is not verified: {ids}.",
                "yellow",
            )
        )
    return lines


def undo_lines(done: Undoing) -> list[Any]:
    """Format what was undone, and what could not be undone."""
    places = ", ".join([*map(escape, done.paths), *done.slices]) or "it had changed nothing"
    lines: list[Any] = [f"Undid {done.tool}: {places}. The model is told about it in its next turn."]
    if done.stands:
        lines.append(Text(f"This can't be undone: {', '.join(map(escape, done.stands))}", "yellow"))
    return lines


def divergence_text(found: Divergence) -> Text:
    """Format the first difference that a replay found."""
    head = Text(f"The replay differs {escape(str(found))}\n", "bold")
    return head + _style_diff(escape(found.diff()).splitlines()) + Text("\n")


def comparison_items(found: RunComparison) -> list[Any]:
    """Format a comparison of two runs: where they first differ, and a table of what each has done, changed and cost."""
    from handrail.cli.activity import format_spending

    ids = short_ids([found.first.run_id, found.second.run_id])
    names = [ids[found.first.run_id], ids[found.second.run_id]]
    rows: list[tuple[str, ...]] = [("", names[0], names[1])]
    both = (found.first, found.second)
    for head, cells in (
        ("standing", [each.standing for each in both]),
        ("model", [_line(each.model, 60) for each in both]),
        ("steps", [str(each.steps) for each in both]),
        ("time", [_seconds(each.seconds) for each in both]),
        ("cost", [format_spending(each.usage, each.cost) for each in both]),
    ):
        rows.append((head, cells[0], cells[1]))
    for tool in sorted({*found.first.calls, *found.second.calls}):
        rows.append((f"calls of {_line(tool, 60)}", *(str(each.calls.get(tool, 0)) for each in both)))
    for path in sorted({*found.first.files, *found.second.files}):
        diffs = [each.files.get(path) for each in both]
        same = "changed alike" if diffs[0] == diffs[1] else "changed"
        rows.append((_line(path, 60), *("" if each is None else same for each in diffs)))
    differs = Text("The runs did the same.", "bold")
    if found.difference is not None:
        head = f"They first differ {escape(str(found.difference))}\n"
        differs = Text.assemble(
            (head, "bold"), _style_diff(escape(found.difference.diff(*names)).splitlines())
        )
    if not is_terminal(sys.stdout):
        return [differs, "\n".join("\t".join(row) for row in rows)]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in rows[0]:
        table.add_column(head, overflow="fold")
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return [differs, "", table]


# --- JSON ---


def run_data(line: RunLine) -> dict[str, Any]:
    record = line.row.record
    call = _call_of(record)
    return {
        "run_id": line.id, "standing": line.standing, "session_id": record.session_id, "prompt": record.prompt,
        "model": record.model, "app": record.app, "began_at": record.began_at, "changed_at": line.row.changed_at,
        "questions": line.row.questions, "forked_from": record.forked_from, "stopping": line.row.stopping,
        "parent": None if record.parent is None else record.parent.run_id, "unapplied": line.unapplied, "workspaces": line.workspaces, "tool": None if call is None else call.tool,
    }  # fmt: skip


def tree_data(tree: RunTree) -> dict[str, Any]:
    from handrail.runs import RunLine

    said: Any = {
        **run_data(RunLine(tree.row, tree.standing)), "message": tree.begin.message, "turns": tree.turns,
        "unanswered": tree.outcome.unanswered, "text": tree.outcome.text, "error": tree.outcome.error, "usage": tree.usage,
        "cost": None if tree.cost is None else str(tree.cost),
        "waiting": [question_data(asked.question) for asked in tree.questions if asked.answer is None],
        "unapplied": tree.unapplied, "messages": [msgspec.structs.asdict(each) for each in tree.messages],
        "children": [{"run_id": each.row.record.id, "standing": each.standing} for each in tree.children],
    }  # fmt: skip
    return msgspec.json.decode(msgspec.json.encode(said, enc_hook=pydantic_core.to_jsonable_python))


def question_data(question: Question) -> dict[str, Any]:
    return {
        "id": question.id, "kind": question.kind, "name": question.name, "title": question.title, "message": question.message,
        "payload": question.payload, "schema": question.schema, "digest": question.digest,
        "rows": msgspec.to_builtins(question.rows),
    }  # fmt: skip


def comparison_data(found: RunComparison) -> dict[str, Any]:
    said: Any = {
        "first": found.first,
        "second": found.second,
        "difference": None if found.difference is None else divergence_data(found.difference),
    }
    return msgspec.json.decode(msgspec.json.encode(said, enc_hook=pydantic_core.to_jsonable_python))


def divergence_data(found: Divergence) -> dict[str, Any]:
    return {**msgspec.structs.asdict(found), "message": str(found)}


BEYOND = (
    "Not reached: what others wrote about them, backups and exports, the logs of servers and of a database, and its files until VACUUM FULL, "
    "files outside workspaces, copies on other hosts, and what model providers and tools were sent."
)


def erasure_lines(done: Erasure, dry: bool) -> Iterator[str]:
    """Yield the lines that say what was erased of a person, what stays, and what was not reached."""
    held, name = done.holdings, escape(done.holdings.principal)
    if dry and held.unfinished:
        yield from (f"{run_id} is {status}. --cancel cancels it first." for run_id, status in held.unfinished)
    account = ", and the account" if done.has_account else ""
    what = ", ".join(
        counted(number, noun)
        for number, noun in (
            (len(held.runs), "run"),
            (len(held.sessions), "session"),
            (len(held.workspaces), "workspace"),
        )
    )
    verb = "Would delete" if dry else "Deleted"
    yield f"{verb} {what} of {name}, {done.entries} of the audit log's entries{account}."
    yield from (f"Stays: their {what} in {escape(place)}." for what, place in held.votes)
    yield from (f"Stays: workspace:{each}, which others may have used too." for each in held.shared)
    yield from (
        f"Stays: the files in {escape(each)}, which their calls have changed, and the ids of the last calls beside it."
        for each in done.folders
    )
    yield from (
        f"Not reached: what is kept for undo in {escape(each)}, which can't be opened."
        for each in done.unreachable
    )
    yield from (
        f"Stays: {escape(each)}, a copy of the journal. Delete it if you don't need it."
        for each in done.copies
    )
    yield BEYOND
    if not dry and not done.is_compact:
        yield "The file still has deleted bytes in its log, because another process was reading. Run the command again."
