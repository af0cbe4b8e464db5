"""Tests for examples/inbox: the run that `make run` starts, its tools, and its rule for approvals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import DirectoryFilesystem, MemoryFilesystem, Session, SqliteJournal, open_gate
from handrail.events import ToolInvoked
from handrail.guard import CapabilityPolicy
from handrail.runs import show
from handrail.testing import Person
from support import ROOT, warm_python

INBOX = ROOT / "examples" / "inbox"
SLOW = re.compile(r"the subscriber .* took .* s for the event .*\n")
"""Matches the warning about a slow subscriber, which a program may print on a busy machine."""

SCRIPTED = """\
import handrail

said = [handrail.ToolCall("sort_inbox", {}), "There is nothing to sort."]
handrail.LocalModel = lambda **given: handrail.ScriptedModel(said)
"""
"""Code that makes a new Python process use a scripted model in place of the embedded one, which is slow to load."""


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fixture: returns a function that imports one of the example's modules by its bare name."""
    monkeypatch.syspath_prepend(str(INBOX))
    for name in ("app", "rule", "report", "threads"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return import_module


# --- the job -------------------------------------------------------------------------------------


@pytest.mark.once
@pytest.mark.timeout(600)  # takes about 45 seconds with a real model, and longer on a busy machine
async def test_the_job_is_killed_resumed_and_ends_with_a_summary(tmp_path: Path) -> None:
    """The program kills its run after the first message and resumes it. The summary matches the folder and the journal.

    No message is sorted twice. An approved bill is booked as its diff showed, and a bill that can't be booked leaves no
    change.
    """
    command = [sys.executable, INBOX, "--messages=3", "--kill-after=1"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=580)
    assert (run.returncode, SLOW.sub("", run.stderr)) == (0, "")
    said, work = run.stdout, tmp_path / ".handrail" / "inbox"
    assert max(map(len, said.splitlines())) <= 100
    assert "\x1b" not in said  # colours are only for a terminal

    # Each message was sorted once, by one process or the other.
    first, _, second = said.partition("kill -9")
    done = [re.findall(r" s  sorted  (\S+) is filed", part) for part in (first, second)]
    assert len(done[0]) == 1
    assert sorted(done[0] + done[1]) == ["01-web-address", "02-flight", "03-cleaning"]
    tree = await show(SqliteJournal(work / "runs.db"), "sort-the-inbox")
    assert tree.standing == "done"
    calls = [call for call in tree.calls if call.tool == "sort_message"]
    assert [call.status for call in calls] == ["ok"] * 3
    recorded = re.search(r"(\d+) answers of the model and 1 sorted messages were not done again", said)
    asked = re.search(r"After the kill (\d+) answers were asked for; there are (\d+) in all", said)
    assert recorded
    assert asked
    assert int(recorded[1]) + int(asked[1]) == int(asked[2]) == tree.usage.requests

    # The failed change left nothing; the approved one matches its diff.
    files = {path.name: path.read_text() for path in (work / "files").rglob("*") if path.is_file()}
    assert sorted(files) == ["01-web-address.txt", "02-flight.txt", "03-cleaning.txt", "bills.csv"]
    assert files["bills.csv"] == "Clara Rossi,89 euros\n"
    assert files["03-cleaning.txt"].startswith("Booked: 89 euros to Clara Rossi\n")
    assert "Booked" not in files["01-web-address.txt"]
    assert "+Clara Rossi,89 euros\n" in said
    assert "approved by the example's rule: a bill of at most 500 euros" in said
    assert re.search(r"rolled back +book_bill failed: ValueError: '210 dollars' can't be booked", said)

    # The tree shows times and token counts. Most input tokens are from the model's cache.
    assert re.search(r"├── ✓ sort_message +[\d.]+ s +\d+ in, [34]\d\d cached, \d+ out +0[123]-", said)
    assert re.search(r"✗ book_bill .*book_bill failed", said)
    assert re.search(r"\d of 3 as a person would", said)
    assert said.splitlines()[0].startswith("Sorting a family's inbox")
    assert said.splitlines()[-1] == (
        "3 messages are sorted, 1 before the kill and 2 after it, none of them twice; 1 of 2 bills booked."
    )
    assert re.search(r"before +inbox/ +01-web-address, 02-flight, 03-cleaning\n +after +bills.csv", said)


@pytest.mark.once
def test_a_job_that_can_not_be_killed_says_so(tmp_path: Path) -> None:
    """A run without messages ends before it can be killed. The program reports that, and prints no summary."""
    (tmp_path / "sitecustomize.py").write_text(SCRIPTED)
    run = warm_python.run(
        [INBOX, "--messages=0"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}
    )
    assert run.returncode == 1
    ended, reported = run.stderr.decode().splitlines()
    assert ended == "the run ended before it could be killed"
    assert "should have been killed, but exited with 1" in reported
    assert b"not done again" not in run.stdout


async def test_the_page_opens_on_threads_that_scripts_made(
    inbox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its first start, one thread has a call that was undone, one a denied call, and one a call that was rolled back.

    The folder is as new mail has left it. A later start makes no more threads.
    """
    monkeypatch.chdir(tmp_path)
    app, threads = inbox("app"), inbox("threads")
    folder = tmp_path / "files"
    app.new_mail(folder)
    before = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    journal = SqliteJournal(tmp_path / "runs.db")
    await threads.make(journal, folder, "served:prompt")
    calls = {
        run_id: (await show(journal, run_id)).calls[0]
        for run_id in ("book-the-cleaning", "book-the-invoice", "book-the-web-address")
    }
    assert [call.status for call in calls.values()] == ["ok", "denied", "error"]
    assert [call.undone for call in calls.values()] == [True, False, False]
    assert "I paid it yesterday" in calls["book-the-invoice"].message
    rows = [(await show(journal, run_id)).row.record for run_id in calls]
    assert [(row.app, row.principal, row.session_id) for row in rows] == [
        ("served:prompt", "local", f"local/{run_id}") for run_id in calls
    ]
    assert {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    journal.close()


@pytest.mark.once
def test_the_served_inbox_makes_its_threads_once(tmp_path: Path) -> None:
    """The first start of the app records three runs in the journal that `make serve` names, and the second start no more."""
    read = (
        "from handrail.serve import load; from handrail import SqliteJournal, runs; import asyncio; "
        f"print(load({str(INBOX / 'served.py')!r}).source.app, "
        "len(asyncio.run(runs.list_runs(SqliteJournal('.handrail/inbox-on-a-page.db')))))"
    )
    for _ in range(2):
        run = warm_python.run(["-c", read], cwd=tmp_path)
        assert (run.returncode, run.stdout) == (0, b"served:prompt 3\n"), run.stderr
    assert "served.py --journal .handrail/inbox-on-a-page.db" in (ROOT / "Makefile").read_text()


# --- the example's tools without a model -----------------------------------------------------------


async def test_a_person_plays_the_act_that_the_model_plays(inbox: Any) -> None:
    """A person who takes the model's place sees only the message, and decides where to file it."""
    files = MemoryFilesystem()
    files.write("inbox/1.txt", "See you in\n\nRome.")
    person = Person(answers={"slip": {"about": "Rome", "folder": "travel", "sender": "Anna"}})
    gate = open_gate([inbox("app").sort_message], filesystem=files, environment=person)
    result = await gate.invoke("sort_message", {"path": "inbox/1.txt"})
    assert result.message == "1 is filed under travel"
    assert [question.payload for question in person.questions] == [{"text": "See you in Rome."}]
    assert list(files.glob("**")) == ["filed/travel/1.txt"]
    assert files.read("filed/travel/1.txt") == "From: Anna\nAbout: Rome\n\nSee you in\n\nRome."


@pytest.mark.parametrize("sum", ["210 dollars", "7 euros"])
async def test_a_bill_that_fails_half_way_leaves_the_folder_as_it_was(
    inbox: Any, tmp_path: Path, sum: str
) -> None:
    """If booking a bill fails after both files were written, neither change remains."""
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "bill.txt").write_text("Please pay 210 dollars.\n")
    (folder / "bills.csv").write_text("Anna,5 euros\n")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    session = Session()
    ended: list[ToolInvoked] = []
    session.dispatcher.subscribe(ToolInvoked, ended.append)
    gate = open_gate([inbox("app").book_bill], filesystem=DirectoryFilesystem(folder), session=session)
    await gate.invoke("book_bill", {"path": "bill.txt", "payee": "Ben", "sum": sum})
    assert [event.status for event in ended] == ["error"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# --- the rule that approves bills ----------------------------------------------------------------


@given(st.integers(0, 10_000), st.sampled_from(["euros", "dollars"]))
def test_the_rule_approves_small_bills_in_euros_and_nothing_else(amount: int, currency: str) -> None:
    """A bill is booked if and only if it is in euros and at most 500, and the rule is asked only about bills in euros."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(INBOX))
        app, rule = import_module("app"), import_module("rule")
    told: list[tuple[Any, Any]] = []
    files = MemoryFilesystem()
    files.write("bill.txt", f"Please pay {amount} {currency}.")
    gate = open_gate(
        [app.book_bill],
        filesystem=files,
        policies=[CapabilityPolicy({"bills": "ask"})],
        approvals=rule.SmallBills(lambda *both: told.append(both)),
    )
    bill = {"path": "bill.txt", "payee": "Anna", "sum": f"{amount} {currency}"}
    result = gate.invoke("book_bill", bill).wait()
    assert result.success == files.exists("bills.csv") == (amount <= 500 and currency == "euros")
    for request, approval in told:
        assert f"+Anna,{amount} euros" in request.diff
        assert approval.approved == (amount <= 500)
        assert approval.by == "the example's rule"
    assert len(told) == (currency == "euros")
