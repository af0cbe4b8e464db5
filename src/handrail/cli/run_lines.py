"""`RunLines`: what a recorded run has done, as lines for somebody who watches it, each given once."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from handrail.cli.activity import format_spending
from handrail.cli.outcome import runs_command
from handrail.cli.runs_view import call_text, question_text, turn_text
from handrail.journal.records import OVER
from handrail.runs import CallNode, RunTree
from handrail.text.rendering import escape


class RunLines:
    """The lines of one run. Each `new` returns those that its tree has and earlier trees did not have."""

    def __init__(self, journal: str) -> None:
        self._journal = journal
        self._given: set[str] = set()

    def new(self, tree: RunTree) -> list[Text]:
        """Return a line for each answer, each beginning and each end of a call, each question and each change of standing."""
        return [text for key, text in self._lines(tree) if not (key in self._given or self._given.add(key))]

    def _lines(self, tree: RunTree) -> Iterator[tuple[str, Text]]:
        run_id, standing = tree.row.record.id, tree.standing
        resume, answer = (runs_command(verb, run_id, self._journal) for verb in ("resume", "answer"))
        if tree.begin.message:
            yield "message", Text(f"» {escape(tree.begin.message)}")
        calls: set[str] = set()
        for turn in tree.turns:
            yield f"turn {turn.number}", turn_text(turn)
            for call in turn.calls:
                yield from _call_lines(call, calls)
        for call in tree.calls:  # those of nested runs that belong to no answer
            yield from _call_lines(call, calls)
        for message in tree.messages:
            yield (
                f"sent {message.id} {message.state}",
                Text(f"» {escape(message.text)}  {message.state}", "dim"),
            )
        for asked in tree.questions:
            question = asked.question
            if asked.answer is None and standing not in OVER:
                how = f"Answer at a terminal with: {resume if question.secret else answer} {question.id}"
                yield f"asked {question.id}", question_text(question) + Text(f"\n  {how}", "default")
            elif asked.answer is not None and f"asked {question.id}" in self._given:
                yield (
                    f"answered {question.id}",
                    Text(f"? {escape(question.name)}: {asked.answer.outcome}", "dim"),
                )
        steps = f" {len(tree.turns)}"  # a run can be parked again and again
        if standing == "interrupted":
            yield standing + steps, Text(f"No process executes the run. Continue with: {resume}", "yellow")
        elif standing == "parked" and not any(each.answer is None for each in tree.questions):
            how = "A worker continues it." if tree.row.queue else f"Continue with: {resume}"
            yield standing + steps, Text(f"The run is parked, and has no open question. {how}", "yellow")
        elif standing == "queued":
            yield standing, Text("The run waits for a worker.", "dim")
        elif standing in OVER:
            error = f": {escape(tree.outcome.error)}" if tree.outcome.error else ""
            yield standing, Text(f"{standing}{error}\n{format_spending(tree.usage, tree.cost)}", "dim")


def _call_lines(call: CallNode, given: set[str]) -> Iterator[tuple[str, Text]]:
    """Yield the lines of a call, of the calls inside it, and of the answers of the runs inside it. Each call is given once."""
    key = str(call.place)
    if key in given:
        return
    given.add(key)
    if call.status == "open":
        yield f"call {key}", _below(call)
    for nested in call.runs:
        for turn in nested.turns:
            for inner in turn.calls:
                yield from _call_lines(inner, given)
    for inner in call.calls:
        yield from _call_lines(inner, given)
    if call.status != "open":
        yield f"end {key} {call.status} {call.seconds}", _below(call)


def _below(call: CallNode) -> Text:
    """Return the text of a call, indented by the calls that it is in."""
    indent = "  " * str(call.place).count(".")
    return Text("\n").join(Text(indent) + line for line in call_text(call).split("\n"))
