"""The output of `make run`: progress lines, and a summary of the results at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from handrail.context import Approval
from handrail.events import ToolInvoked
from handrail.messages import Usage
from handrail.protocols import ApprovalRequest
from handrail.runs import CallNode, RunTree, Turn

A_PERSON = {
    "01-web-address": "money", "02-flight": "travel", "03-cleaning": "money", "04-blood-test": "health",
    "05-exam": "school", "06-ferry": "travel", "07-invoice": "money", "08-eye-test": "health",
    "09-books": "school", "10-rental-car": "travel", "11-dentist": "health", "12-concert": "school",
}  # fmt: skip
"""The folder in which a person would have filed each message."""

_out = Console(highlight=False, width=100)
_began = time.monotonic()


def _say(*pieces: str | tuple[str, str], style: str = "") -> None:
    """Print one line, cut if it is too long."""
    _out.print(Text.assemble(*pieces, style=style), no_wrap=True, overflow="ellipsis")


def _head(text: str) -> None:
    _say(f"\n{text}", style="bold")


# --- while it runs -------------------------------------------------------------------------------


def title(messages: int) -> None:
    """Print the title of the output and a note about the time that the messages take."""
    _head("A 135M model on this machine sorts a family's inbox, without a key or a network")
    _say(
        f"  {messages} messages, three at once. The first takes longest, because the model reads its examples,"
    )
    _say("  which it then has in its cache for the others.\n")


def call_ended(event: ToolInvoked) -> None:
    """Print a line if the call was to sort a message or to book a bill, whether it succeeded or not."""
    done = {"sort_message": "sorted", "book_bill": "booked"}.get(event.tool)
    if done is None:
        return
    word = {"ok": done, "denied": "denied"}.get(event.status, "undone")
    said = event.result.message or event.result.render()
    colour = "green" if event.status == "ok" else "yellow"
    _say((f"  {time.monotonic() - _began:4.0f} s  ", "dim"), (f"{word}  ", colour), said)


def decided(request: ApprovalRequest, approval: Approval) -> None:
    """Print the question that a person would have been shown, and the rule's decision."""
    _say(f"\n  {request.tool} has run in a fork of the folder, and asks for approval of this change:")
    for line in request.diff.splitlines():
        colour = "green" if line.startswith("+") else "red" if line.startswith("-") else "dim"
        _say(f"    {line}", style=colour)
    _say(f"  {approval.outcome} by {approval.by}: {approval.reason}", style="bold")


def killed(run: RunTree) -> None:
    """Print how much the killed process recorded."""
    _say(("\n  kill -9  ", "bold red"), f"{_recorded(run)} are in the journal.")
    _say("           Another process continues from there, and reads the examples again.\n")


# --- at the end ----------------------------------------------------------------------------------

Listing = dict[str, list[str]]


def listing(folder: Path) -> Listing:
    """Return a folder's contents: the names of the files, by subfolder."""
    found: Listing = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            found.setdefault(f"{file.parent.relative_to(folder)}/", []).append(file.name)
    return found


def summary(killed: RunTree, run: RunTree, asked: int, before: Listing, folder: Path) -> None:
    """Print the results: the calls, the filed messages, the folder before and after, and what was not repeated."""
    _head("The calls of the run (the times include waiting, because there is only one model)")
    _out.print(_tree(run))
    _head("The messages and where the model filed them")
    _messages(folder)
    _head("The folder")
    _folders(before=before, after=listing(folder))
    _head("What Handrail did")
    left = _left_behind(folder, _calls(run, "book_bill"))
    for call in _calls(run, "book_bill"):
        word = {"ok": "approved", "denied": "denied"}.get(call.status, "rolled back")
        _say((f"  {word:13}", "bold"), call.message.partition(". ")[0])
        if word == "rolled back":
            _say(" " * 15, f"It wrote bills.csv and the message before it failed: {left}.")
        else:
            _say(" " * 15, f"A rule in this example {word} the diff above. No person was asked.")
    _say(("  resumed      ", "bold"), f"{_recorded(killed)} were not done again.")
    _say(" " * 15, f"After the kill {asked} answers were asked for; there are {len(_turns(run))} in all.")
    _head(_sentence(killed, run))


def _sentence(killed: RunTree, run: RunTree) -> str:
    """Say what happened, by what both processes have recorded."""
    before, after = (_calls(each, "sort_message") for each in (killed, run))
    bills = [call.status for call in _calls(run, "book_bill")]
    again = len(after) - len({call.message for call in after})
    twice = "none of them twice" if not again else f"{again} of them twice, which is a bug"
    booked = f"{bills.count('ok')} of {len(bills)} bills booked"
    return f"{len(after)} messages are sorted, {len(before)} before the kill and {len(after) - len(before)} after it, {twice}; {booked}."


def _left_behind(folder: Path, bills: list[CallNode]) -> str:
    """Say whether the bills in the folder are exactly those that were booked, so that a failed call left nothing behind."""
    booked = sorted(call.message for call in bills if call.status == "ok")
    files = [file.read_text() for file in folder.glob("filed/*/*.txt")]
    marked = sorted(
        text.partition("\n")[0].removeprefix("Booked: ") for text in files if text.startswith("Booked: ")
    )
    listed = (folder / "bills.csv").read_text().splitlines() if (folder / "bills.csv").exists() else []
    same = marked == booked and len(listed) == len(booked)
    return "both are as they were" if same else "some of it is still there, which is a bug"


def _recorded(run: RunTree) -> str:
    return f"{len(_turns(run))} answers of the model and {len(_calls(run, 'sort_message'))} sorted messages"


def _tree(run: RunTree) -> Tree:
    row = run.row
    took = f"  {_seconds(row.changed_at - row.record.began_at)} · {_tokens(run.usage)}"
    tree = Tree(Text.assemble((f"{row.record.prompt} on {row.record.model}", "bold"), (took, "dim")))
    tree.guide_style = "dim"
    for turn in run.turns:
        node = tree.add(_line(f"step {turn.number}", turn.seconds, turn.usage, turn.text))
        for call in turn.calls:
            inside = node.add(_line(call.tool, call.seconds, None, call.message, call.status))
            for each in sorted(call.calls, key=_number):
                inside.add(_line(each.tool, each.seconds, _usage(each), each.message, each.status))
    return tree


def _line(name: str, seconds: float | None, usage: Usage | None, said: str, status: str = "ok") -> Text:
    mark = ("✓ ", "green") if status == "ok" else ("✗ ", "yellow")
    tokens = "" if usage is None else _tokens(usage)
    text = Text.assemble(
        mark, (f"{name:13}", "bold"), (f"{_seconds(seconds):>7}  {tokens:28}", "dim"), said.partition("\n")[0]
    )
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _messages(folder: Path) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, width in (("  message", 16), ("filed", 8), ("a person", 8), ("sender", 14), ("about", 42)):
        table.add_column(name, width=width, no_wrap=True, overflow="ellipsis")
    files, right = sorted(folder.glob("filed/*/*.txt"), key=lambda file: file.name), 0
    for file in files:
        facts = dict(line.split(": ", 1) for line in file.read_text().split("\n\n")[0].splitlines())
        chosen, wanted = file.parent.name, A_PERSON[file.stem]
        right += chosen == wanted
        differs = "" if chosen == wanted else wanted
        cells = (f"  {file.stem}", chosen, differs, facts["From"], facts["About"])
        table.add_row(*map(Text, cells), style="yellow" if differs else "")
    _out.print(table)
    _say(f"  {right} of {len(files)} as a person would.")


def _folders(**listings: Listing) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=8)
    table.add_column(width=13)
    table.add_column()
    for when, found in listings.items():
        for number, (place, names) in enumerate(found.items()):
            shown = ", ".join(name.removesuffix(".txt") for name in names)
            table.add_row(
                Text("" if number else f"  {when}", "bold"), Text(place.removeprefix("./")), Text(shown)
            )
    _out.print(table)


# --- reading a run -------------------------------------------------------------------------------


def _calls(run: RunTree, tool: str) -> list[CallNode]:
    """Return the finished calls of a tool, in order."""
    return sorted((call for call in run.calls if call.tool == tool and call.status != "open"), key=_number)


def _number(call: CallNode) -> int:
    return call.place.number


def _turns(run: RunTree) -> list[Turn]:
    """Return every model answer, including those in nested runs."""
    return [*run.turns, *(turn for call in run.calls for nested in call.runs for turn in nested.turns)]


def _usage(call: CallNode) -> Usage | None:
    """Return the total usage of the model answers inside a call, or None if there are none."""

    def inside(call: CallNode) -> Iterator[Usage]:
        yield from (turn.usage for nested in call.runs for turn in nested.turns if turn.usage is not None)
        for inner in call.calls:
            yield from inside(inner)

    found = list(inside(call))
    return sum(found[1:], found[0]) if found else None


def _tokens(usage: Usage) -> str:
    return f"{usage.input:,} in, {usage.cached:,} cached, {usage.output:,} out"


def _seconds(spent: float | None) -> str:
    return "" if spent is None else f"{spent * 1000:.0f} ms" if spent < 1 else f"{spent:.1f} s"
