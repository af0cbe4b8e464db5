"""`handrail usage` prints what a journal's runs used, for people and for programs."""

import asyncio
import csv
import io
import json
from pathlib import Path

import pytest

from handrail import Adapter, Agent, Budget, ScriptedModel, Session, Spend, SqliteJournal
from handrail.messages import Usage
from handrail.models.scripted import Reply
from support import warm_python


@pytest.fixture
def journal(tmp_path: Path) -> str:
    path = tmp_path / "runs.db"
    opened = SqliteJournal(path)
    model = ScriptedModel([Reply("x", usage=Usage(100, 20, requests=1))] * 3, name="a:" + "long" * 40)
    agent = Agent(Adapter(model, journal=opened, spend=Spend(Budget(tokens=10**6))), "Help.")

    async def fill() -> None:
        for person in ("ann", "bea", "ann"):
            await agent.run("go", session=Session(principal=person))

    asyncio.run(fill())
    opened.close()
    return str(path)


def printed(journal: str, *arguments: str, code: int = 0) -> str:
    """Run the command, and return what it printed: its output or, if it fails, its error."""
    done = warm_python.run(
        ["-m", "handrail", "usage", "--journal", journal, *arguments], cwd=Path(journal).parent
    )
    assert done.returncode == code, done.stderr
    return (done.stderr if code else done.stdout).decode()


def test_people_get_a_table_and_programs_csv_and_json(journal: str) -> None:
    table = printed(journal, "--by", "person")
    assert [line.split()[:4] for line in table.splitlines()[:3]] == [
        ["PERSON", "REQUESTS", "IN", "OUT"],
        ["ann", "2", "200", "40"],
        ["bea", "1", "100", "20"],
    ]
    assert "ann has spent 2 requests, 240 tokens of the cap" in table
    text = printed(journal, "--csv", "--by", "model", "--who", "ann")
    [row] = csv.DictReader(io.StringIO(text))
    assert (row["model"], row["requests"], row["unpriced"]) == ("a:" + "long" * 40, "2", "2")
    found = json.loads(printed(journal, "--json", "--who", "bea"))
    assert [line["output"] for line in found["lines"]] == [20]
    assert [each["counted"]["tokens"] for each in found["today"]] == [120]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--by", "team"], "--by 'team'"),
        (["--since", "soon"], "--since 'soon'"),
        (["--zone", "Mars"], "'Mars'"),
    ],
)
def test_what_is_wrong_is_named(journal: str, arguments: list[str], words: str) -> None:
    assert words in printed(journal, *arguments, code=2)
