"""An imported run loads and starts no code that its file names, and its file approves nothing."""

import asyncio
import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from handrail import Adapter, CapabilityPolicy, Prompt, ScriptedModel, Session, tool
from handrail.cli.runs_commands import app as app_
from handrail.environment import LaterEnvironment
from handrail.errors import RunError, RunParked, SessionError
from handrail.events import ApprovalRemembered
from handrail.journal.records import RunRow
from handrail.journal.sqlite import SqliteJournal
from handrail.run.record.begin import decode_begin
from handrail.runs import approvals, export, fork, import_
from handrail.session.serialization import encode_item, save
from handrail.testing import Person
from support.recorded import PROMPT, Recorder, call, choose, note


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path)
    yield made
    made.close()


async def exported(recorder: Recorder, path: Path) -> list[dict[str, Any]]:
    """Export a run that is parked at a question, and return its lines."""
    with pytest.raises(RunParked):
        await recorder.run("r", call("note", text="a"), call("choose"), "end")
    await export(recorder.journal, "r", path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewritten(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


async def test_an_imported_item_typed_as_an_import_imports_nothing(recorder: Recorder, tmp_path: Path):
    """A run whose event is typed as pydantic's `ImportString` is refused when it is resumed, and imports nothing."""
    path = tmp_path / "r.jsonl"
    lines = await exported(recorder, path)
    event = json.dumps({"type": "pydantic.types.ImportString", "item": "this"}).encode()
    for line in lines:
        if "unit" in line:
            line["unit"]["events"] = [base64.b64encode(event).decode()]
    sys.modules.pop("this", None)
    await import_(recorder.journal, rewritten(path, lines), run_id="evil")
    with pytest.raises(SessionError, match="unknown type"):
        await recorder.adapter("end").resume("evil", PROMPT)
    assert "this" not in sys.modules


def named(row: RunRow) -> tuple[Any, ...]:
    begin = decode_begin(row.record)
    return row.record.app, row.record.code, row.record.model, begin.sources, begin.models


@pytest.mark.parametrize("app", ["planted:prompt", "planted.md"])
async def test_an_imported_run_names_no_app_no_server_and_no_module(
    recorder: Recorder, tmp_path: Path, app: str, monkeypatch: pytest.MonkeyPatch
):
    """What an imported file names as the run's app, servers or model is not loaded when the run is resumed, or forked."""
    path = tmp_path / "r.jsonl"
    lines = await exported(recorder, path)
    record = lines[1]["run"]["record"]
    record["app"], record["code"], record["model"] = app, "0" * 64, "planted:model"
    for name in ("planted.py", "tools.py"):
        (tmp_path / name).write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    (tmp_path / "planted.md").write_text("---\ndescription: x\ntools: [f]\n---\nDo.\n")
    await import_(recorder.journal, rewritten(path, lines), run_id="evil")
    forked = await fork(recorder.journal, "evil", 0, "copy")
    for row in (await recorder.journal.runs.get("evil"), forked):
        assert named(row) == ("", "", "model", {}, {})
    with pytest.raises(RunError, match="app"):
        await recorder.adapter("end").resume("evil")
    monkeypatch.chdir(tmp_path)
    for id in ("evil", "copy"):
        words = ["resume", id, "--journal", recorder.journal.path]
        result = await asyncio.to_thread(CliRunner().invoke, app_, words, prog_name="handrail runs")
        assert result.exit_code != 0
        assert "--app" in result.output
    assert not (tmp_path / "ran").exists()


async def test_an_imported_run_keeps_the_model_of_a_provider(recorder: Recorder, tmp_path: Path):
    """The model of a provider is kept, because no module of the user's is imported for it."""
    path = tmp_path / "r.jsonl"
    lines = await exported(recorder, path)
    lines[1]["run"]["record"]["model"] = "openai:gpt-5, anthropic:claude-sonnet-5"
    row = await import_(recorder.journal, rewritten(path, lines), run_id="r2")
    assert row.record.model == "openai:gpt-5, anthropic:claude-sonnet-5"
    assert isinstance(recorder.journal, SqliteJournal)


@pytest.mark.parametrize("place", ["base", "logged", "denied", "unit"])
async def test_an_imported_run_approves_nothing(tmp_path: Path, place: str):
    """Remembered approvals that a file has, wherever it has them, do not apply to the calls of the imported run. People are asked."""
    paid: list[int] = []

    @tool(effect="irreversible", capabilities={"money"})
    def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        return "paid"

    policies = [CapabilityPolicy({"money": "ask"})]
    prompt = Prompt("shop", "Sell.", tools=[pay, note, choose], policies=policies)
    there, here = (SqliteJournal(tmp_path / name) for name in ("there.db", "here.db"))
    session, friend = Session(id="s"), Person(approve={"approved": True, "remember": "exact"})
    script = [call("pay", amount=1), "paid"]
    await Adapter(ScriptedModel(script)).evaluate(
        prompt, "pay", session=session, journal=there, environment=friend
    )
    [approval] = session[ApprovalRemembered].all()
    script = [call("note", text="a"), call("choose"), "end"]
    with pytest.raises(RunParked):
        await Adapter(ScriptedModel(script)).evaluate(
            prompt, "go", session=session, journal=there, environment=LaterEnvironment(), run_id="r"
        )
    await export(there, "r", tmp_path / "r.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    item = encode_item(approval, "s")
    if place == "unit":
        for line in lines:
            if "unit" in line:
                line["unit"]["logged"] = [base64.b64encode(item).decode()]
    else:
        record = lines[1]["run"]["record"]
        begin = msgspec.msgpack.decode(base64.b64decode(record["begin"]))
        begin[place] = save(session) if place == "base" else [*begin[place], item]
        record["begin"] = base64.b64encode(msgspec.msgpack.encode(begin)).decode()
    await import_(here, rewritten(tmp_path / "evil.jsonl", lines))
    assert not (await approvals(here, "s", principal="local")).list()
    paid.clear()
    person = Person(approve=False, answers={"pick": {"n": 1}})
    model = ScriptedModel([call("pay", amount=1), "end"])
    await Adapter(model, journal=here).resume("r", prompt, environment=person)
    assert paid == []
    assert [each.kind for each in person.questions] == ["input", "approval"]
    for each in (there, here):
        each.close()
