"""Snapshots of threads and runs as plain JSON data, for the page."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from handrail import runs
from handrail.errors import JournalAltered
from handrail.ids import trace_of
from handrail.journal.protocol import Journal
from handrail.journal.records import OVER, RunRow
from handrail.messages import AssistantMessage, Usage
from handrail.question import Question
from handrail.run.answer import FailedRequest, Unanswered, total
from handrail.run.place import RUN, Place, inner_call_id, is_in_run
from handrail.run.record.begin import decode_begin, decode_outcome
from handrail.runs import CallNode, RunTree, Turn, show
from handrail.runs.tree import Nested as NestedRun
from handrail.serve.agui.background_runs import begun_in, spawned_json, with_begun
from handrail.serve.agui.interrupts import closed_json, holder, question_json
from handrail.serve.agui.queued_messages import QUEUED, queued_json
from handrail.serve.agui.translator import MODEL_FAILED, Translator, messages_snapshot
from handrail.serve.agui.wire_events import custom, format_time
from handrail.serve.attachments import facts_of
from handrail.serve.feed import Event, FellBehind, Item
from handrail.serve.live_run import LiveRun, paths_in
from handrail.serve.refusals import ThreadUnknown
from handrail.serve.thread import Thread
from handrail.serve.thread_messages import (
    RunMessage,
    merge_nested,
    messages_in,
    nested_messages_in,
    read_nested,
    render_joined,
    render_open,
    render_thread,
    said_before_answers,
    without_compactions,
)

_MOST_CACHED = 4096
"""Maximum number of cached summaries of finished runs."""
_MOST_THREADS_CACHED = 64
_TRIES = 5


def usage_json(usage: Usage) -> dict[str, int]:
    cached = {"cached": usage.cached, "cache_writes": usage.cache_writes}
    shown = {"input": usage.input, "output": usage.output, "requests": usage.requests}
    return shown | {name: tokens for name, tokens in cached.items() if tokens}


def total_cost(costs: Iterable[Decimal | None]) -> Decimal | None:
    """Return the sum of the costs of runs, or None if one of them is unknown."""
    known = list(costs)
    return None if None in known else sum((cost or Decimal(0) for cost in known), Decimal(0))


def format_cost(cost: Decimal | None) -> str | None:
    return None if cost is None else str(cost)


# --- a thread -----------------------------------------------------------------------------------------


class _State(NamedTuple):
    """The state of a thread at one moment."""

    rows: Sequence[RunRow]
    runs: Sequence[_RunSummary]
    undone: Container[str]
    unapplied: Container[tuple[str, str]]
    said: Sequence[RunMessage]
    nested: Sequence[RunMessage]
    state: Any
    questions: Sequence[Question]
    emitted: Mapping[str, Sequence[Any]]
    """The events that calls emitted, by the call's id."""
    run_id: str
    """The id of the active run; "" if there is none."""
    leg: str
    """The id of the active run's open leg; "" if there is none."""
    queued: Sequence[dict[str, Any]]
    """The messages that were sent to the newest run, and that its model was not told yet."""
    messages: Sequence[dict[str, Any]]
    """The finished messages, rendered for AG-UI."""
    open: Sequence[Event]
    """The events that bring a newly joined client up to date with the active run."""
    since: Sequence[Item]
    """The events that arrived while the journal was being read."""
    last: int


async def thread_snapshot(journal: Journal, seen: Thread) -> dict[str, Any]:
    """Return a snapshot of a thread. It includes everything up to the event `last_event_id`.

    Raises `ThreadUnknown` if the thread has no runs.
    """
    found = await _read_state(journal, seen)
    calls: dict[str, Any] = {}
    usage = sum((run.usage for run in found.runs), Usage())
    cost = total_cost(run.cost for run in found.runs)
    for run in found.runs:
        calls |= run.calls
    for id, facts in calls.items():
        is_unapplied = (facts["run_id"], id) in found.unapplied
        calls[id] = {**facts, "undone": id in found.undone, "unapplied": is_unapplied}
    since = [msgspec.json.decode(item.data) for item in found.since]
    for told in (*since, *(event.data for event in found.open)):
        if told.get("name") == "handrail.call":
            facts = told["value"]
            calls[facts["call_id"]] = {**calls.get(facts["call_id"], {}), **facts}
    return {
        "id": seen.id,
        "title": title_of(found.rows),
        "status": status_of(found.rows, seen),
        "problem": seen.problem or None,
        "messages": [*found.messages, *render_open(found.open)],
        "state": found.state,
        "calls": calls,
        "emitted": found.emitted,
        "subagents": _agents(found, since),
        "questions": [await _question_json(journal, each) for each in found.questions],
        "closed": [each for run in found.runs for each in run.closed],
        "queued": _waiting(found.queued, since),
        "failing": {
            told.data.get("subagentRunId", ""): told.data["value"]
            for told in found.open
            if told.data.get("name") == MODEL_FAILED
        },
        "runs": [run.line for run in found.runs],
        "usage": usage_json(usage),
        "cost": format_cost(cost),
        "last_event_id": seen.feed.id_of(found.last),
    }


def _waiting(queued: Iterable[dict[str, Any]], since: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages to a run that still wait after these events."""
    found = {each["id"]: each for each in queued}
    found |= {told["value"]["id"]: told["value"] for told in since if told.get("name") == QUEUED}
    return [each for each in found.values() if each["state"] == "waiting"]


async def _question_json(journal: Journal, question: Question) -> dict[str, Any]:
    """Return a question in the JSON form that the page reads.

    If people vote on it, the names of those who have voted are included.
    """
    shown = question_json(question)
    if question.quorums:
        votes = await journal.votes.on(question.run_id, question.id, question.digest)
        shown["votes"] = list(dict.fromkeys(vote.by for vote in votes))
    return shown


def _agents(found: _State, since: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the thread's nested runs, each with its current status and the nearest call around it that clients know."""
    asked: dict[str, list[str]] = {}
    for run_id, message in (*found.said, *found.nested):
        if isinstance(message, AssistantMessage):
            asked.setdefault(run_id, []).extend(call.id for call in message.calls)

    def call_at(run_id: str, place: Place) -> str | None:
        calls = asked.get("" if place.parent is None else place.parent.id(run_id), [])
        return calls[place.number - 1] if 0 < place.number <= len(calls) else None

    agents: list[dict[str, Any]] = []
    for run in found.runs:
        run_id = run.line["id"]
        for agent in run.subagents:
            held = holder(Place.from_id(agent["id"], run_id), run_id, partial(call_at, run_id))
            agents.append({**agent, "parent_call_id": held.call_id if held else agent["parent_call_id"]})
    ends = {"SUBAGENT_FINISHED": "ok", "SUBAGENT_ERROR": "error", "SUBAGENT_STARTED": "running"}
    stands: dict[str, str] = {}
    for told in since:
        if told["type"] in ends and told.get("outcome", {}).get("type") != "suspended":
            stands[told["subagentRunId"]] = ends[told["type"]]
    return [{**agent, "status": stands.get(agent["id"], agent["status"])} for agent in agents]


async def joining_events(journal: Journal, seen: Thread) -> tuple[list[Event], int, str]:
    """Return events that show a thread as it is now, the feed's position at that moment, and the open leg's id.

    The id is "" if no leg is open. The feed's events after that position continue the returned ones. Raises
    `ThreadUnknown` if the thread has no runs.
    """
    found = await _read_state(journal, seen)
    newest = found.rows[-1] if found.rows else None
    run_id = found.run_id or (newest.record.id if newest is not None else "")
    leg = found.leg
    shown = Translator(seen.id, run_id)
    shown.recall(run_id, without_compactions(each for each in found.said if each.run_id == run_id))
    for inner in dict.fromkeys(each.run_id for each in found.nested if is_in_run(each.run_id, run_id)):
        shown.recall(inner, without_compactions(each for each in found.nested if each.run_id == inner))
    told = [
        *shown.begin_leg(leg or f"{run_id}-seen"),
        messages_snapshot(found.messages),
    ]
    if found.state is not None:
        told.append(Event({"type": "STATE_SNAPSHOT", "snapshot": found.state}))
    told += [custom(QUEUED, each) for each in found.queued]
    if leg:
        return [*told, *found.open], found.last, leg
    if found.questions:
        return [*told, *shown.interrupt(found.questions)], found.last, ""
    return [*told, *shown.finish()], found.last, ""


async def _read_state(journal: Journal, seen: Thread) -> _State:
    """Read a consistent state of a thread from the journal and from memory.

    The run continues while the journal is being read, and the events from that time are taken from the feed. If that is
    not possible, for example because the run ended in that time, everything is read again. The fifth result is returned
    even if it is not consistent. Raises `ThreadUnknown` if the thread has no runs.
    """
    for tries in range(_TRIES):
        # read before `opening`, so that no event of a new leg is skipped
        last, live = seen.feed.last, seen.live
        joined = await seen.opening()
        rows = await seen.rows()
        if not rows and live is None:
            raise ThreadUnknown(seen.id)
        said, state, questions = (
            await seen.run_messages(rows),
            await seen.read_state(),
            await seen.questions(rows),
        )
        at_work = "" if live is None else live.run_id
        shown = [await _summarize(journal, row, said, row.record.id == at_work) for row in rows]
        emitted = {id: each for run in shown for id, each in run.emitted.items()}
        begun = [each for run in shown for each in run.begun]
        nested = await _nested_messages(journal, rows) if any(run.subagents for run in shown) else ()
        marks = await journal.calls.marks(seen.session_id)
        undone = {entry.key for _, entry in marks if entry.kind == "undone"}
        unapplied = await unapplied_calls(journal, live)
        queued = await _queued(journal, rows)
        if live is not seen.live and tries < _TRIES - 1:
            continue
        open: Sequence[Event] = ()
        since: Sequence[Item] = ()
        if live is not None and live is seen.live and live.has_started:  # nothing is awaited from here on
            try:
                since = seen.feed.since(last)
            except FellBehind:  # while the journal was read, more events arrived than the feed keeps
                if tries < _TRIES - 1:
                    continue
            said, state, questions = messages_in(live.session), seen.state(), list(live.questions.values())
            nested = merge_nested(nested, nested_messages_in(live.session))
            open, last = live.open(), seen.feed.last
            emitted |= live.emissions.by_call()
            begun += begun_in(msgspec.json.decode(item.data) for item in since)
        elif joined is not None:
            # The journal may be newer than the opening. If so, the events after the opening repeat what the journal has.
            open, last, state = joined.opening.open, joined.last, joined.opening.state
            emitted |= joined.opening.emitted
        elif seen.feed.last != last and tries < _TRIES - 1:
            continue
        active, messages = ("", ""), render_thread(said, nested, seen.named)
        if live is not None:
            active = live.run_id, live.leg
        elif joined is not None:
            active = joined.opening.run_id, joined.opening.leg
            messages = render_joined(joined.opening, said, nested, seen.named)
        read = (rows, shown, undone, unapplied, said, nested, state, questions, emitted)
        return _State(*read, *active, queued, with_begun(messages, begun), open, since, last)
    raise AssertionError("the last attempt always returns")


async def _queued(journal: Journal, rows: Sequence[RunRow]) -> Sequence[dict[str, Any]]:
    if not rows or rows[-1].status in OVER or not rows[-1].has_messages:
        return ()
    run_id = rows[-1].record.id
    found = await journal.messages.list(run_id)
    return [queued_json(run_id, each) for each in found if each.state == "waiting" and not each.child]


def title_of(rows: Sequence[RunRow]) -> str:
    said = next((decode_begin(row.record).message for row in rows if row.record.begin), None) or ""
    return " ".join(said.split())[:80]


def status_of(rows: Sequence[RunRow], seen: Thread | None) -> str:
    """Return a thread's status, which is determined by its newest run. `seen` is the thread if it is in memory."""
    if seen is not None and seen.live is not None:
        return "running" if seen.live.leg else "waiting"
    if not rows:
        return "idle"
    newest = rows[-1]
    if newest.status in ("failed", "cancelled"):
        return newest.status
    if newest.status in OVER:
        return "idle"
    if newest.questions:
        return "waiting"
    # A run without an owner waits for a worker if it has a queue. Otherwise it could not be resumed.
    return "running" if newest.owner or newest.queue else "failed"


# --- a run --------------------------------------------------------------------------------------------


class _RunSummary(NamedTuple):
    """One run's part of a thread's snapshot."""

    line: dict[str, Any]
    calls: Mapping[str, dict[str, Any]]
    subagents: Sequence[dict[str, Any]]
    usage: Usage
    cost: Decimal | None
    closed: Sequence[dict[str, Any]]
    """The closed questions, with their outcomes and answers."""
    emitted: Mapping[str, Sequence[Any]]
    begun: Sequence[dict[str, Any]]
    """The activities for the background runs that the run's calls have begun."""


_caches: WeakKeyDictionary[Journal, OrderedDict[tuple[str, float], _RunSummary]] = WeakKeyDictionary()
"""Summaries of finished runs, by journal. Undone calls are read each time, because a call can be undone after its run."""


_nested_caches: WeakKeyDictionary[Journal, OrderedDict[object, Sequence[RunMessage]]] = WeakKeyDictionary()
"""The messages of nested runs in threads whose newest run is over, by journal.

They are cached because reading them means reading every run of the thread.
"""


async def _nested_messages(journal: Journal, rows: Sequence[RunRow]) -> Sequence[RunMessage]:
    if rows[-1].status not in OVER:
        return await read_nested(journal, rows)
    cache = _nested_caches.setdefault(journal, OrderedDict())
    key = tuple((row.record.id, row.changed_at) for row in rows)
    if key not in cache:
        cache[key] = await read_nested(journal, rows)
        if len(cache) > _MOST_THREADS_CACHED:
            cache.popitem(last=False)
    return cache[key]


async def _summarize(journal: Journal, row: RunRow, said: Sequence[RunMessage], at_work: bool) -> _RunSummary:
    """Return a run's summary. It is cached once the run is over, unless `at_work`: the live run may still add to its record."""
    cache = _caches.setdefault(journal, OrderedDict())
    key = (row.record.id, row.changed_at)
    found = cache.get(key)
    if found is None:
        tree = await show(journal, row.record.id)
        ids = _ids_by_place(row.record.id, () if row.status in OVER else said)
        for each in tree.calls:
            each.id = each.id or ids.get(each.place, "")  # an unfinished call has no recorded id
            for inner in each.calls if each.id else ():  # outer calls come first, so `each.id` is set
                attempt = inner.place.attempt_at(each.place) or 1
                inner.id = inner.id or inner_call_id(each.id, attempt, inner.place.number)
        calls = {each.id: call_facts(each, row.record.id) for each in tree.calls if each.id}
        for each in tree.calls:
            for inner in each.calls if each.id else ():
                calls[inner.id]["parent_call_id"] = each.id
        subagents = list(_subagents(tree.calls, row.record.id))
        closed = [closed_json(asked) for each in tree.calls for asked in each.questions if asked.answer]
        begun = spawned_json([each.spawned for each in tree.calls], row.record.id)
        line = run_line(row, tree)
        found = _RunSummary(line, calls, subagents, tree.usage, tree.cost, closed, tree.emitted, begun)
        if row.status in OVER and not at_work:
            cache[key] = found
            if len(cache) > _MOST_CACHED:
                cache.popitem(last=False)
    else:
        cache.move_to_end(key)
    return found


def _ids_by_place(run_id: str, said: Iterable[RunMessage]) -> Mapping[Place, str]:
    """Return the ids of the calls that a run's model made, by place."""
    calls = [
        call
        for run, message in said
        if run == run_id and isinstance(message, AssistantMessage)
        for call in message.calls
    ]
    return {RUN.child(number): call.id for number, call in enumerate(calls, 1)}


def run_line(row: RunRow, found: RunTree | JournalAltered) -> dict[str, Any]:
    """Return one line of the list of runs. If a run's records were altered, the problem is listed as its error."""
    altered = isinstance(found, JournalAltered)
    usage, cost = (Usage(), None) if altered else (found.usage, found.cost)
    over, outcome = row.status in OVER, decode_outcome(row)
    return {
        "id": row.record.id,
        "status": "altered" if altered else row.status,
        "prompt": row.record.prompt,
        "model": row.record.model,
        "began_at": format_time(row.record.began_at),
        "seconds": row.changed_at - row.record.began_at if over else None,
        "questions": row.questions,
        "usage": usage_json(usage),
        "cost": format_cost(cost),
        "stop_reason": outcome.stop_reason if over and not altered else None,
        "error": str(found) if altered else outcome.error or None,
    }


def call_facts(call: CallNode, run_id: str) -> dict[str, Any]:
    waits = any(asked.answer is None for asked in call.questions)
    facts: dict[str, Any] = {
        "call_id": call.id,
        "tool": call.tool,
        "status": ("waiting" if waits else "running") if call.status == "open" else call.status,
        "seconds": call.seconds,
        "began_at": None if call.at is None else format_time(call.at),
        "diff": call.diff or None,
        "paths": paths_in(call.writes),
        "undone": call.undone,
        "run_id": run_id,
    }
    if call.attachments:
        facts["attachments"] = facts_of(call.attachments)
    if call.status not in ("ok", "open") and call.message:
        facts["reason"] = call.message
    return facts | _spent_json(_runs_inside(call))


def _spent_json(nested: Iterable[NestedRun]) -> dict[str, Any]:
    """Return the usage and cost of nested runs; nothing if they have no answers."""
    turns = [turn for run in nested for turn in run.turns]
    if not turns:
        return {}
    usage, cost = total(turns, (request for turn in turns for request in turn.summaries))
    return {"usage": usage_json(usage), "cost": format_cost(cost)}


def _runs_inside(call: CallNode) -> Iterable[NestedRun]:
    """Yield the nested runs inside a call, at any depth."""
    for run in call.runs:
        yield run
        for inner in (*(each for turn in run.turns for each in turn.calls), *run.calls):
            yield from _runs_inside(inner)
    for inner in call.calls:
        yield from _runs_inside(inner)


def _subagents(
    calls: Iterable[CallNode], run_id: str, call_id: str = "", around: str | None = None
) -> Iterable[dict[str, Any]]:
    """Yield the nested runs inside these calls. A run comes before the runs nested in it."""
    for call in calls:
        if not call_id and call.place.outer is not None:
            continue  # the runs in this call are listed with the call that contains it
        known = call.id or call_id
        for run in call.runs:
            id = run.place.id(run_id)
            yield {
                "id": id,
                "name": run.name,
                "parent_call_id": known,
                "parent_subagent_id": around,
                "status": _nested_status(run, call),
            }
            inner = [*(each for turn in run.turns for each in turn.calls), *run.calls]
            yield from _subagents(inner, run_id, known or "?", id)
        yield from _subagents(call.calls, run_id, known or "?", around)


def _nested_status(run: NestedRun, call: CallNode) -> str:
    """Return the status of a nested run inside a call.

    An answer without calls ends the nested run, even if the call continues.
    """
    if run.turns and not run.turns[-1].calls:
        return "ok"
    return "running" if call.status == "open" else "ok" if call.status == "ok" else "error"


def run_tree(found: RunTree, messages: Sequence[RunMessage] = ()) -> dict[str, Any]:
    """Return a run as a JSON tree, for the timeline. Each turn has what people said before it, as far as `messages` has it."""
    line = run_line(found.row, found)
    turns = [_turn_json(each) for each in found.turns]
    if found.outcome.unanswered is not None:
        turns.append(_unanswered_json(found.steps + 1, found.outcome.unanswered))
    run_id = found.row.record.id
    for turn, said in zip(turns, said_before_answers(messages, run_id), strict=False):
        turn["said"] = said
    return {**line, "trace_id": trace_of(run_id, found.begin.traceparent), "turns": turns}


def _unanswered_json(number: int, unanswered: Unanswered) -> dict[str, Any]:
    """Return the turn that a run ended in, because no model answered."""
    return {
        "number": number,
        "at": unanswered.at,
        "seconds": unanswered.seconds,
        "answered": False,
        "failed": _failed_json(unanswered.failed),
        "calls": [],
    }


def _failed_json(failed: Iterable[FailedRequest]) -> list[dict[str, Any]]:
    return [{"model": each.model, "error": each.error} for each in failed]


def _turn_json(each: Turn) -> dict[str, Any]:
    return {
        "number": each.number,
        "at": each.at,
        "seconds": each.seconds,
        "text": each.text,
        "model": each.model,
        "usage": None if each.usage is None else usage_json(each.usage),
        "cost": format_cost(each.cost),
        "failed": _failed_json(each.failed),
        "calls": [_call_json(call) for call in each.calls],
        **({} if each.compaction is None else {"left_out": each.compaction.left_out}),
    }


def _call_json(call: CallNode) -> dict[str, Any]:
    return {
        "id": call.id,
        "place": str(call.place),
        "tool": call.tool,
        "arguments": call.arguments,
        "status": call.status,
        "at": call.at,
        "seconds": call.seconds,
        "message": call.message,
        "diff": call.diff,
        "undone": call.undone,
        "compensated": call.compensated,
        "rolled_back": call.rolled_back,
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
                "answered_at": None if asked.answered_at is None else format_time(asked.answered_at),
                "outcome": None if asked.answer is None else asked.answer.outcome,
            }
            for asked in call.questions
        ],
        **_spent_json(_runs_inside(call)),
        "calls": [_call_json(inner) for inner in call.calls],
        "runs": [
            {
                "name": run.name,
                **_spent_json([run]),
                "turns": [_turn_json(inner) for inner in run.turns],
                "calls": [_call_json(inner) for inner in run.calls],
            }
            for run in call.runs
        ],
    }


# --- file changes -------------------------------------------------------------------------------------


async def unapplied_calls(journal: Journal, live: LiveRun | None) -> Container[tuple[str, str]]:
    """Return pairs of a run id and a call id, for the calls whose file changes are recorded but not applied.

    Calls of the active run are left out, because it is about to apply their changes. The reasons why changes are not
    applied are left out too, because they contain paths of this machine. `handrail runs show` prints them.
    """
    active = "" if live is None else live.run_id
    return {(each.run_id, each.call_id) for each in await runs.unapplied(journal) if each.run_id != active}


async def file_changes(journal: Journal, seen: Thread) -> list[dict[str, Any]]:
    """Return the file changes of a thread's successful calls, oldest first, including undone and unapplied ones.

    Each says whether it can be undone, and if not, why. Raises `ThreadUnknown` if the thread has no runs.
    """
    await seen.check_known()
    marks = await journal.calls.marks(seen.session_id)
    undone = {entry.key for _, entry in marks if entry.kind == "undone"}
    unapplied = await unapplied_calls(journal, seen.live)
    problems = await runs.undo_problems(journal, seen.session_id, seen.files, principal=seen.principal)
    found: list[dict[str, Any]] = []
    for unit in await journal.calls.load_session(seen.session_id):
        paths = paths_in(unit.writes)
        if paths and unit.status == "ok":
            problem = problems.get((unit.run_id, unit.call_id), "")
            if unit.root and unit.root in problem:  # clients need not know paths of this machine
                problem = "its folder is not here"
            if seen.live is not None:
                problem = "a run of this conversation is in progress"
            found.append(
                {
                    "run_id": unit.run_id,
                    "call_id": unit.call_id,
                    "tool": unit.tool,
                    "at": format_time(unit.at),
                    "paths": paths,
                    "diff": unit.diff,
                    "undone": unit.call_id in undone,
                    "unapplied": (unit.run_id, unit.call_id) in unapplied,
                    "undoable": not problem,
                    "problem": problem or None,
                }
            )
    return found
