"""`--log json`: what real processes write to standard error is one JSON object a line, with the ids of the call it came from."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from handrail.ids import call_span_of
from support.programs import handrail
from support.workers import Worker

pytestmark = pytest.mark.once

APP = '''
import logging, subprocess, sys
from handrail import Agent, ScriptedModel, ToolCall, ToolContext, tool
from handrail.text.secrets import Secrets

log = logging.getLogger("shop")
KEY = "SECRET\\\\KEY\\"7f3a'é"
held = Secrets([KEY])

class Broken:
    def __str__(self):
        raise OSError

@tool(effect="pure")
def greet(name: str, context: ToolContext) -> str:
    """Greet."""
    more = {"more": {"keys": [KEY]}, "broken": Broken(), "large": 10**5000, "most": 2**63 - 1}
    log.info("greeting %s with %s", name, KEY, extra={"guest": name, "key": KEY, "ratio": 0.5, **more})
    log.info("%s", context.run_context.trace_id)
    print("printed \\x1b[31min red")
    sys.stderr.write("half")
    sys.stderr.write(" a line\\n")
    try:
        raise KeyError(KEY)
    except KeyError:
        log.exception("caught")
    log.warning("%d", "wrongly formatted")
    return "Hi."

agent = Agent(ScriptedModel([ToolCall("greet", {"name": "ann\\x1b[2J"}), "Done."]), "Greet.", tools=[greet])
'''


def logged(text: str) -> list[dict[str, Any]]:
    """Return the objects in the lines of a log, each of which must be one."""
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert {"time", "level", "logger", "message"} <= line.keys(), line
        assert datetime.fromisoformat(line["time"]).utcoffset() is not None
    return lines


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(APP)
    return tmp_path


def test_a_tool_s_records_and_output_have_the_ids_of_its_call(shop: Path):
    done = handrail("run", "shop.py", "hello", "--log", "json", "--journal", "runs.db", cwd=shop)
    assert (done.returncode, done.stdout) == (0, "Done.\n"), done.stderr
    lines = logged(done.stderr)
    [run] = json.loads(handrail("runs", "list", "--json", "--journal", "runs.db", cwd=shop).stdout)["runs"]
    greeting = next(line for line in lines if line["logger"] == "shop")
    assert greeting["level"] == "INFO"
    assert greeting["run_id"] == run["run_id"]
    assert greeting["session_id"] == run["session_id"]
    trace_id = next(line["message"] for line in lines if re.fullmatch("[0-9a-f]{32}", line["message"]))
    assert greeting["trace_id"] == trace_id
    assert greeting["span_id"] == call_span_of(run["run_id"], greeting["call_id"], 1)
    assert (greeting["guest"], greeting["ratio"], greeting["most"]) == ("ann\x1b[2J", 0.5, 2**63 - 1)
    assert greeting["broken"] == "[Broken can't be shown: OSError]"
    assert greeting["large"] == "[int can't be shown: ValueError]"
    printed = [line for line in lines if line["logger"] == "stderr" and "call_id" in line]
    assert [line["message"] for line in printed[:2]] == ["printed in red", "half a line"]
    assert {line["call_id"] for line in printed} == {greeting["call_id"]}
    assert "\x1b" not in done.stderr


def test_secrets_are_hidden_in_every_field(shop: Path):
    done = handrail("run", "shop.py", "hello", "--log", "json", "--no-journal", cwd=shop)
    assert "7f3a" not in done.stderr
    lines = logged(done.stderr)
    greeting = next(line for line in lines if line["logger"] == "shop")
    assert greeting["message"].endswith("with [secret]")
    assert greeting["key"] == "[secret]"
    assert re.fullmatch(r"""\{'keys': \[['"]\[secret\]['"]\]\}""", greeting["more"])
    [caught] = [line for line in lines if line["message"] == "caught"]
    assert re.search(r"""KeyError: ['"]\[secret\]['"]$""", caught["exception"])


def test_an_error_of_the_command_is_a_record_too(tmp_path: Path):
    done = handrail("run", "missing.py", "hello", "--log", "json", cwd=tmp_path)
    assert done.returncode == 2
    [line] = logged(done.stderr)
    assert (line["level"], line["logger"]) == ("ERROR", "handrail")
    assert "there is no file 'missing.py'" in line["message"]


def test_another_format_is_refused(tmp_path: Path):
    done = handrail("worker", "app.py", "--log", "xml", cwd=tmp_path)
    assert done.returncode == 2
    assert "'--log'" in done.stderr
    assert "'json'" in done.stderr


def test_a_worker_logs_the_run_of_each_leg(tmp_path: Path):
    with Worker(tmp_path, "--log", "json") as worker:
        run_id = worker.submit("pay rent")
        worker.until(lambda: f"{run_id}: done" in worker.said())
        worker.stop()
    lines = logged(worker.said())
    legs = [line["message"] for line in lines if line.get("run_id") == run_id]
    assert legs == [f"{run_id}: leg 1 begins", f"{run_id}: done"]
    assert lines[-1]["message"] == "Stopped."
