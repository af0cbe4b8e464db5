"""Previews: a staged call first runs in its fork, and a person then decides on its diff."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from handrail import (
    CapabilityPolicy,
    DirectoryFilesystem,
    MemoryFilesystem,
    Session,
    SqliteJournal,
    ToolContext,
    open_gate,
    tool,
)
from handrail.events import ApprovalDecided, ApprovalRequested, ToolInvoked
from handrail.question import Question
from handrail.testing import Agent, Person, RecordingSubscriber
from handrail.tools import EFFECTS, Effect

ASK = CapabilityPolicy({"fs.write": "ask", "*": "ask"})


@dataclass(frozen=True)
class Noted:
    text: str


@tool(effect="staged", capabilities={"fs.write"})
async def rewrite(path: str, context: ToolContext) -> str:
    """Convert a file to capitals, and make a note."""
    text = context.filesystem.read(path).upper()
    context.filesystem.write(path, text)
    context.session.dispatch(Noted(path))
    return text


class Looker:
    """A person who records what they are shown, optionally changes something meanwhile, and answers."""

    def __init__(self, *answers: bool, meanwhile: Any = None) -> None:
        self.shown: list[dict[str, Any]] = []
        self.questions: list[Question] = []
        self._answers = list(answers)
        self._meanwhile = meanwhile

    def person(self) -> Person:
        return Person(approve=self._approve)

    def _approve(self, question: Question) -> bool:
        self.shown.append(question.payload)
        self.questions.append(question)
        if self._meanwhile is not None:
            self._meanwhile(len(self.shown))
        return self._answers.pop(0)


DIFF = """\
diff --git a/a.txt b/a.txt
--- a/a.txt
+++ b/a.txt
@@ -1 +1 @@
-one
+ONE
state: Noted {"text":"a.txt"}
"""


@pytest.fixture(params=["memory", "directory", "directory with a journal"])
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Fixture: a filesystem with one file, and a journal or None."""
    if request.param == "memory":
        files: Any = MemoryFilesystem()
        files.write("a.txt", "one\n")
        return files, None
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "a.txt").write_text("one\n")
    journal = SqliteJournal(tmp_path / "journal.db") if "journal" in request.param else None
    return DirectoryFilesystem(tmp_path / "work"), journal


def invoke(ground: Any, looker: Looker, session: Session | None = None) -> Any:
    files, journal = ground
    gate = open_gate(
        [rewrite],
        session=session,
        filesystem=files,
        policies=[ASK],
        environment=looker.person(),
        journal=journal,
    )
    return gate.invoke("rewrite", {"path": "a.txt"}).wait()


def test_approved_it_is_committed_as_it_was_shown(ground: Any) -> None:
    """The person sees the diff of files and state before anything changes.

    After an approval, exactly what was shown is committed.
    """
    files, _ = ground
    session = Session()
    seen: list[str] = []
    looker = Looker(True, meanwhile=lambda count: seen.append(files.read("a.txt")))
    result = invoke(ground, looker, session)
    assert (result.success, result.value) == (True, "ONE\n")
    assert looker.shown[0]["diff"] == DIFF
    assert seen == ["one\n"]
    assert files.read("a.txt") == "ONE\n"
    assert session[Noted].all() == (Noted("a.txt"),)


def test_denied_nothing_happened(ground: Any) -> None:
    """If the person denies the diff, files and state stay unchanged, and the model is told so."""
    files, _ = ground
    session = Session()
    result = invoke(ground, Looker(False), session)
    assert not result.success
    assert "Its changes were not applied." in result.message
    assert files.read("a.txt") == "one\n"
    assert session[Noted].all() == ()


def test_the_base_moved_meanwhile(ground: Any) -> None:
    """If the file changes during the review, the call reruns, and its new diff is reviewed."""
    files, _ = ground

    def meanwhile(count: int) -> None:
        if count == 1:
            files.write("a.txt", "two\n")

    looker = Looker(True, True, meanwhile=meanwhile)
    result = invoke(ground, looker)
    assert result.value == "TWO\n"
    assert files.read("a.txt") == "TWO\n"
    assert ["-one" in shown["diff"] for shown in looker.shown] == [True, False]
    assert "-two" in looker.shown[1]["diff"]
    assert len({question.digest for question in looker.questions}) == 2


def test_a_base_that_keeps_moving_is_a_conflict(ground: Any) -> None:
    """If the file changes during each of three reviews, the call fails with a conflict and leaves the file alone."""
    files, _ = ground
    looker = Looker(True, True, True, True, meanwhile=lambda count: files.write("a.txt", f"theirs {count}\n"))
    result = invoke(ground, looker)
    assert not result.success
    assert "a.txt" in result.message
    assert files.read("a.txt").startswith("theirs")
    assert len(looker.shown) == 3


def test_a_new_base_may_be_denied(ground: Any) -> None:
    """Approving the first diff does not approve the diff of a rerun."""
    files, _ = ground

    def meanwhile(count: int) -> None:
        if count == 1:
            files.write("a.txt", "two\n")

    result = invoke(ground, Looker(True, False, meanwhile=meanwhile))
    assert not result.success
    assert files.read("a.txt") == "two\n"


@pytest.mark.parametrize("effect", get_args(Effect))
def test_which_effects_are_previewed(effect: Effect) -> None:
    """A call whose effect is previewed runs before a person is asked. Any other call does not."""
    ran: list[str] = []

    async def undo(params: Any, value: Any, *, context: ToolContext) -> None:
        """Undo."""

    more: dict[str, Any] = {"compensate": undo} if effect == "compensable" else {}

    @tool(effect=effect, capabilities={"thing"}, **more)
    async def act() -> str:
        """Act."""
        ran.append("ran")
        return "done"

    before: list[int] = []

    def approve(question: Question) -> bool:
        before.append(len(ran))
        assert ("diff" in question.payload) == EFFECTS[effect].previewed
        return False

    gate = open_gate(
        [act], policies=[CapabilityPolicy({"thing": "ask"})], environment=Person(approve=approve)
    )
    assert not gate.invoke("act").wait().success
    assert before == [1 if EFFECTS[effect].previewed else 0]
    assert len(ran) == before[0]


@pytest.mark.parametrize(
    ("environment", "approvals", "runs"),
    [(None, None, 0), (Agent(), None, 0), (Person(approve=True), "strict", 0), (None, "approve_all", 1)],
    ids=["nobody", "a model", "strict", "approve_all"],
)
def test_where_nobody_looks_nothing_runs_first(environment: Any, approvals: Any, runs: int) -> None:
    """A staged call that needs approval does not run under `strict`, or if nobody can review it.

    Under `approve_all` it runs, even if nobody can review it.
    """
    ran: list[str] = []

    @tool(effect="staged", capabilities={"thing"})
    async def act() -> str:
        """Act."""
        ran.append("ran")
        return "done"

    gate = open_gate(
        [act], policies=[CapabilityPolicy({"thing": "ask"})], environment=environment, approvals=approvals
    )
    assert gate.invoke("act").wait().success == bool(runs)
    assert len(ran) == runs


def test_a_call_that_fails_is_not_asked_about(ground: Any) -> None:
    """Nobody is asked about a call that fails in its preview."""
    files, journal = ground
    looker = Looker()
    gate = open_gate(
        [rewrite], filesystem=files, policies=[ASK], environment=looker.person(), journal=journal
    )
    assert not gate.invoke("rewrite", {"path": "missing.txt"}).wait().success
    assert looker.shown == []


def test_a_preview_is_audited() -> None:
    """A previewed call publishes one approval request, then one decision, then one `ToolInvoked`."""
    files = MemoryFilesystem()
    files.write("a.txt", "one\n")
    session = Session()
    with RecordingSubscriber(session) as seen:
        invoke((files, None), Looker(True), session)
        seen.assert_paired()
    kinds = [
        type(event)
        for event in seen.events
        if isinstance(event, ApprovalRequested | ApprovalDecided | ToolInvoked)
    ]
    assert kinds == [ApprovalRequested, ApprovalDecided, ToolInvoked]


async def test_parallel_previews_each_get_their_own_answer() -> None:
    """Each of two calls that are previewed at once gets the answer to its own diff."""
    files = MemoryFilesystem()
    for name in ("a.txt", "b.txt"):
        files.write(name, "one\n")
    person = Person(approve=lambda question: "a/a.txt" in question.payload["diff"])

    gate = open_gate([rewrite], filesystem=files, policies=[ASK], environment=person)
    calls = [gate.invoke("rewrite", {"path": name}) for name in ("a.txt", "b.txt")]
    assert [result.success for result in await asyncio.gather(*calls)] == [True, False]
    assert (files.read("a.txt"), files.read("b.txt")) == ("ONE\n", "one\n")
