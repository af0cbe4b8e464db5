"""Ids that a session or a run can't have are refused wherever they are given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from handrail import Adapter, Agent, MemoryJournal, Prompt, ScriptedModel, Session, open_gate
from handrail.errors import DefinitionError, RunError
from handrail.fleet import Submission
from handrail.ids import MOST_ID
from handrail.runs import export, fork, import_

JOURNAL = MemoryJournal()
UNFIT = {
    "blank": ["", " ", "\t"],
    "can't be printed": ["a\nb", "a\0", "\x1b[31m", "\ud800", "\u202e"],
    f"{MOST_ID + 1} characters": ["x" * (MOST_ID + 1)],
}
FIT = ["a", "a b", "ada/thread-1", "Zürich 🚋", "x" * MOST_ID]


def agent() -> Agent[Any]:
    return Agent(Adapter(ScriptedModel(["ok"]), journal=JOURNAL), "Answer.")


PLACES: dict[str, Callable[[Any], Any]] = {
    "Session(id)": lambda id: Session(id=id),
    "Session(principal)": lambda id: Session(principal=id),
    "Session(new_id)": lambda id: Session(new_id=lambda: id),
    "run(session)": lambda id: agent().run("Hi.", session=id),
    "stream(session)": lambda id: agent().stream("Hi.", session=id),
    "run(run_id)": lambda id: agent().run("Hi.", run_id=id),
    "open_gate(run_id)": lambda id: open_gate([], run_id=id),
    "Submission(principal)": lambda id: Submission("Hi.", principal=id),
}


@pytest.mark.parametrize(("problem", "id"), [(problem, id) for problem, ids in UNFIT.items() for id in ids])
@pytest.mark.parametrize("place", PLACES)
def test_an_unfit_id_is_refused_everywhere(place: str, problem: str, id: str):
    """The error says what is wrong with the id, and what to pass."""
    with pytest.raises(DefinitionError, match=r"characters, such as") as refused:
        PLACES[place](id)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    "place", [place for place in PLACES if place not in ("run(session)", "stream(session)")]
)
def test_an_id_that_is_not_a_string_is_refused(place: str):
    """This includes bytes, and the kind of number that is a key elsewhere."""
    for id in (7, b"a"):
        with pytest.raises(DefinitionError, match="string"):
            PLACES[place](id)


@pytest.mark.parametrize("id", FIT)
async def test_other_ids_are_taken_as_they_are(id: str):
    """Spaces, slashes and other scripts are allowed."""
    journal = MemoryJournal()
    model = Adapter(ScriptedModel(["ok"]), journal=journal)
    await model.evaluate(Prompt("p", "Answer."), "Hi.", session=id, run_id=id)
    row = await journal.runs.get(id)
    assert (row.record.id, row.record.session_id) == (id, id)


async def test_a_copy_needs_a_fit_id_too(tmp_path: Path):
    """A fork and an imported run get ids by the same rule."""
    await agent().run("Hi.", run_id="first")
    await export(JOURNAL, "first", tmp_path / "first.jsonl")
    for id in ("", "a\n"):
        with pytest.raises(DefinitionError):
            await fork(JOURNAL, "first", 0, id)
        for named in ({"run_id": id}, {"run_id": "second", "session_id": id}):
            with pytest.raises(RunError, match="other ids"):
                await import_(JOURNAL, tmp_path / "first.jsonl", **named)


def test_a_submission_without_ids_gets_new_ones():
    """The empty id is the default of a submission, and stands for a new one. Any other unfit id is refused."""
    Submission("Hi.")
    for named in ({"session_id": " "}, {"run_id": "a\n"}, {"session_id": 7}):
        with pytest.raises(DefinitionError):
            Submission("Hi.", **named)  # pyright: ignore[reportArgumentType]  # callers might not be type-checked
