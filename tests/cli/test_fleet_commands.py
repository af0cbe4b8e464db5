"""`handrail submit` and `handrail workspaces`, and what `handrail runs` says about submitted runs."""

import asyncio
import contextlib
import json
import shlex
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from handrail.cli.commands import app
from handrail.cli.recorded_run import continuation
from handrail.journal.records import RunRecord, RunRow, WorkerRow
from handrail.journal.sqlite import SqliteJournal
from handrail.run.record.begin import code_of
from support import fleet_app


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "runs.db"
    monkeypatch.setenv("HANDRAIL_JOURNAL", str(path))
    return path


def handrail(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words), prog_name="handrail")
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def submitted(*words: str) -> dict[str, Any]:
    return json.loads(handrail("submit", str(Path(fleet_app.__file__)), *words, "--json"))


def waits_for() -> list[str]:
    return [each["waits_for"] for each in json.loads(handrail("runs", "list", "--json"))["runs"]]


def announce(journal: Path, *queues: str, host: str = "here") -> None:
    opened = SqliteJournal(journal)
    row = WorkerRow(owner="", host=host, queues=queues)
    asyncio.run(opened.queue.announce(row, seconds=3600))
    opened.close()


def test_a_key_submits_once_and_a_time_is_kept(journal: Path):
    first = submitted("pay rent", "--key", "rent", "--at", "2030-01-01T00:00+00:00")
    assert first["due_at"] == 1893456000.0
    assert submitted("pay rent", "--key", "rent")["run_id"] == first["run_id"]
    assert "its time, 2030-01-01 00:00:00 UTC" in waits_for()[0]


def test_files_are_submitted_with_the_message(journal: Path, tmp_path: Path):
    (tmp_path / "note.txt").write_text("buy tea")
    run = submitted("look", "--attach", str(tmp_path / "note.txt"))
    (tmp_path / "note.txt").unlink()  # the journal has a copy
    opened = SqliteJournal(journal)
    [digest] = asyncio.run(opened.blobs.list(run["run_id"]))
    assert asyncio.run(opened.blobs.get(digest)) == b"buy tea"
    opened.close()
    said = handrail("submit", str(Path(fleet_app.__file__)), "look", "--attach", "missing", code=2)
    assert "--attach missing: no such file" in said


@pytest.mark.parametrize("id", ["", " ", "a\nb", "x" * 600], ids=["empty", "blank", "line", "long"])
def test_a_session_id_that_can_not_be_used_is_refused(journal: Path, id: str):
    said = handrail("submit", str(Path(fleet_app.__file__)), "hello", "--session", id, code=2)
    assert "session id" in said


@pytest.mark.parametrize(
    "words", [("--at", "soon"), ("--every", "0s"), ("--every", "often")], ids=["at", "zero", "every"]
)
def test_times_that_can_not_be_read_are_refused(journal: Path, words: tuple[str, str]):
    said = handrail("submit", str(Path(fleet_app.__file__)), "hello", *words, code=2)
    assert f"{words[0]} {words[1]!r} is not a" in said


def test_the_list_says_which_run_has_a_workspace_and_which_waits_for_it(journal: Path):
    opened = SqliteJournal(journal)
    record = RunRecord(id="tidy", session_id="s", principal="ada", prompt="p", model="m", began_at=1e10)
    asyncio.run(opened.runs.begin(record))
    asyncio.run(opened.workspaces.acquire("shelf", "tidy"))
    run = submitted("keep x", "--files", "workspace:shelf")
    announce(journal, run["queue"])
    assert waits_for() == ["", "the workspace shelf, which tidy has"]
    [columns, first, second] = [line.split("\t") for line in handrail("runs", "list").splitlines()]
    at = columns.index("WORKSPACE")
    assert (first[at], second[at]) == ("shelf", "")
    assert [each["workspaces"] for each in json.loads(handrail("runs", "list", "--json"))["runs"]] == [
        ["shelf"],
        [],
    ]
    asyncio.run(opened.runs.leave("tidy", "done"))
    opened.close()
    assert waits_for() == ["", ""]


def test_files_go_into_a_workspace_and_out_of_it(
    journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("hello")
    assert "Copied 1 path to workspace:shop. To undo it: handrail runs undo" in handrail(
        "workspaces", "put", "shop", str(tmp_path / "in")
    )
    assert handrail("workspaces", "list") == "shop  1 file, 5 bytes\n"
    handrail("workspaces", "get", "shop", str(tmp_path / "out"))
    assert (tmp_path / "out" / "a.txt").read_text() == "hello"
    assert "shows those that it has" in handrail("workspaces", "get", "x", str(tmp_path / "new"), code=1)
    put = json.loads(handrail("workspaces", "put", "shop", str(tmp_path / "in" / "a.txt"), "--json"))
    assert put["paths"] == ["a.txt"]
    other = str(tmp_path / "other.db")
    said = handrail("workspaces", "put", "shop", str(tmp_path / "in"), "--journal", other)
    assert "Undid copy_files" in handrail(*shlex.split(said.partition("To undo it: handrail ")[2]))
    assert handrail("workspaces", "list", "--journal", other) == "shop  0 files, 0 bytes\n"


def test_an_altered_workspace_is_listed_with_the_others(
    journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("hello")
    for name in ("before", "middle", "next"):
        handrail("workspaces", "put", name, str(tmp_path / "a.txt"))
    with contextlib.closing(sqlite3.connect(journal)) as connection, connection:
        connection.execute("UPDATE workspaces SET name = 'mid\x1b[2Jdle' WHERE name = 'middle'")
        connection.execute("UPDATE workspace_files SET mode = 511 WHERE workspace = 'next'")
    assert handrail("workspaces", "list", code=1).splitlines() == [
        "before  1 file, 5 bytes",
        r"mid\x1b[2Jdle  altered: its row was changed",
        "middle  altered: it was removed",
        "next  altered: the row of 'a.txt' was changed",
        "`handrail runs verify` lists every altered record.",
    ]
    listed = json.loads(handrail("workspaces", "list", "--json", code=1))["workspaces"]
    assert [bool(each["altered"]) for each in listed] == [False, True, True, True]


def test_a_run_without_a_worker_for_its_version_says_so_until_it_is_adopted(
    journal: Path, monkeypatch: pytest.MonkeyPatch
):
    run = submitted("pay rent")
    name, _, code = run["queue"].rpartition("@")
    assert waits_for() == [f"no worker for {name}"]
    announce(journal, f"{name}@{'5' * 64}")
    assert waits_for() == [f"no worker for version {code[:12]}"]
    monkeypatch.setattr(
        "handrail.run.record.begin.code_of", lambda app: "5" * 64
    )  # as if the file had been edited
    moved = json.loads(handrail("runs", "adopt", run["run_id"], "--json"))
    assert moved["queue"] == f"{name}@{'5' * 64}"
    assert waits_for() == [""]


def test_a_run_whose_app_is_elsewhere_is_not_adopted(
    journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`adopt` needs the code of the app. Where it is missing, the error names the app and says what to do."""
    run = submitted("pay rent")
    monkeypatch.setattr("handrail.run.record.begin.sys", SimpleNamespace(modules={}))
    monkeypatch.setattr("handrail.run.record.begin.find_app", lambda module: None)  # as in another folder
    said = handrail("runs", "adopt", run["run_id"], code=2)
    assert all(
        part in said for part in (run["queue"].partition("@")[0], "No module named", "--app module:name")
    )
    opened = SqliteJournal(journal)
    assert asyncio.run(opened.runs.get(run["run_id"])).queue == run["queue"]
    opened.close()


def test_a_worker_that_is_gone_has_no_version(tmp_path: Path):
    """The code of a worker whose file is missing is not the code of the files beside it."""
    (tmp_path / "other.md").write_text("Go.")
    with pytest.raises(ImportError, match="there is no file"):
        code_of(str(tmp_path / "gone.md"))


def test_a_run_in_a_folder_says_which_host_it_is_pinned_to(journal: Path, tmp_path: Path):
    folder = tmp_path / "work"
    folder.mkdir()
    run = submitted("pay rent", "--files", str(folder))
    announce(journal, run["queue"], host="elsewhere")
    assert waits_for() == [f"no worker on {run['host']}, where its folder is"]


@pytest.mark.parametrize(
    ("queue", "said"),
    [
        ("", "Continue with: handrail runs resume x"),
        ("app@1", "A `handrail worker` of its app continues it."),
    ],
)
def test_an_answered_run_is_continued_by_a_worker_if_it_was_submitted(queue: str, said: str):
    """`runs answer` suggests `runs resume` only for runs that no worker takes."""
    row = RunRow(record=cast("RunRecord", None), status="parked", queue=queue)
    assert continuation(row, "handrail runs resume x") == said
