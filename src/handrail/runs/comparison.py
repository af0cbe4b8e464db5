"""`compare`: where two recorded runs first differ, and what each has done, changed and cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal

import msgspec

from handrail.journal.protocol import Journal
from handrail.messages import Usage
from handrail.runs.catalog import Standing
from handrail.runs.check import Divergence, What, laid_out
from handrail.runs.tree import CallNode, RunTree, Turn, show


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has done, for a comparison."""

    run_id: str
    standing: Standing
    model: str
    steps: int
    calls: Mapping[str, int]
    """The number of calls of each tool, by its name and, unless the call succeeded, its status."""
    files: Mapping[str, str]
    """The diffs of the files that the run has changed and that were not undone, by path. A diff covers all files of its call."""
    usage: Usage
    cost: Decimal | None
    seconds: float

    @classmethod
    def of(cls, tree: RunTree) -> RunSummary:
        done = [call for call in tree.calls if not (call.undone or call.rolled_back)]
        names = [call.tool if call.status == "ok" else f"{call.tool}, {call.status}" for call in tree.calls]
        files: dict[str, str] = {}
        for call in done:
            for place in call.writes:
                kind, _, path = place.partition(" ")
                if kind == "file":
                    files[path] = files.get(path, "") + call.diff
        row = tree.row
        return cls(
            run_id=row.record.id, standing=tree.standing, model=row.record.model, steps=tree.steps, calls=Counter(names),
            files=files, usage=tree.usage, cost=tree.cost, seconds=row.changed_at - row.record.began_at,
        )  # fmt: skip


class RunComparison(msgspec.Struct, frozen=True):
    """Two runs side by side."""

    first: RunSummary
    second: RunSummary
    difference: Divergence | None
    """Where the runs first differ; None if they did the same. `recorded` is the first run's, and `now` the second's."""


async def compare(journal: Journal, run_id: str, other_id: str) -> RunComparison:
    """Compare two recorded runs: their messages, prompts and tools, and then one step after another. Nothing is run again.

    Times, ids and costs are no differences. Raises `RunUnknown` if there is no such run.
    """
    first, second = await show(journal, run_id), await show(journal, other_id)
    return RunComparison(RunSummary.of(first), RunSummary.of(second), _difference(first, second))


def _difference(first: RunTree, second: RunTree) -> Divergence | None:
    was, now, name = first.begin, second.begin, first.row.record.prompt
    texts: Sequence[tuple[What, str, str]] = (
        ("message", was.message or "", now.message or ""),
        ("prompt", was.system, now.system),
        ("tools", "\n".join(was.tools), "\n".join(now.tools)),
        ("schema", laid_out(was.output or ""), laid_out(now.output or "")),
    )
    for what, recorded, other in texts:
        if recorded != other:
            return Divergence(step=0, what=what, where=name, recorded=recorded, now=other)
    for number in range(1, max(first.steps, second.steps) + 1):
        found = _in_step(number, _turn(first, number), _turn(second, number))
        if found is not None:
            return found
    ends = [f"{tree.standing}: {tree.outcome.error}".removesuffix(": ") for tree in (first, second)]
    if ends[0] != ends[1]:
        return Divergence(step=first.steps, what="end", where=name, recorded=ends[0], now=ends[1])
    return None


def _turn(tree: RunTree, number: int) -> Turn | None:
    return tree.turns[number - 1] if number <= tree.steps else None


def _in_step(step: int, first: Turn | None, second: Turn | None) -> Divergence | None:
    if first is None or second is None:
        texts = ["there is no such step" if each is None else _answer(each) for each in (first, second)]
        return Divergence(step=step, what="answer", where="", recorded=texts[0], now=texts[1])
    if _answer(first) != _answer(second):
        return Divergence(step=step, what="answer", where="", recorded=_answer(first), now=_answer(second))
    for was, now in zip(first.calls, second.calls, strict=True):
        results: Sequence[tuple[What, str, str]] = (
            ("result", _result(was), _result(now)),
            ("files", was.diff, now.diff),
        )
        for what, recorded, other in results:
            if recorded != other:
                return Divergence(
                    step=step, what=what, where=was.tool, recorded=recorded, now=other, call_id=was.id
                )
    return None


def _answer(turn: Turn) -> str:
    """Return what a model answered: its text, and a line for each call with its arguments, whatever order they were written in."""
    return "\n".join(
        [*([turn.text] if turn.text else []), *(f"{each.tool} {_arguments(each)}" for each in turn.calls)]
    )


def _arguments(call: CallNode) -> str:
    try:
        return msgspec.json.encode(msgspec.json.decode(call.arguments or "{}"), order="sorted").decode()
    except msgspec.DecodeError:
        return call.arguments


def _result(call: CallNode) -> str:
    return "\n".join([call.status, call.message, *(each.render() for each in call.attachments)])
