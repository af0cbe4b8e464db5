"""Agents and tools in a real `inspect eval` of `shop.py`, on Inspect's mock model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from handrail import Agent, MemoryJournal, ScriptedModel, ToolCall, tool
from handrail.runs import make_case
from project.documents import DOCS, extract

Log = dict[str, Any]


def clerk_eval() -> str:
    """Return the program on the page about evals: the agent, and the task of Inspect."""
    page = (DOCS / "evals.md").read_text()
    *_, task = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return f"{extract(DOCS / 'evals.md')[0].code}\n{task}\n{MOCK}"


MOCK = """
from inspect_ai.model import ModelOutput, ModelUsage, get_model

def mocked(messages, tools, choice, config):
    done = messages[-1].role == "tool"
    call = ModelOutput.for_tool_call("mock", "refund", {"order": "a1", "cents": 500})
    output = ModelOutput.from_content("mock", "Done.") if done else call
    output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    return output

_task = clerk_eval

@task
def clerk_eval():
    made = _task()
    made.model = get_model("mockllm/clerk", custom_outputs=mocked)
    return made
"""


async def export_case(folder: Path) -> None:
    """Record a run of the clerk with a ledger of its own, and export it for the task `recorded`."""

    @tool(effect="pure")
    async def refund(order: str) -> str:
        """Refund an order, without a ledger."""
        return f"{order} is refunded"

    model = ScriptedModel([ToolCall("refund", {"order": "a1"}), "refunded"])
    agent = Agent(model, "Serve.", tools=[refund])
    journal = MemoryJournal()
    response = await agent.run("Refund 500", journal=journal)
    stock = folder / "stock"
    stock.mkdir()
    (stock / "ledger.txt").write_text("before\n")
    (await make_case(journal, response.run_id, files=stock)).save(folder / "clerk.case.json")
    journal.close()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Log]:
    """The logs of all tasks in `shop.py`, by task. One process runs them, because importing Inspect takes seconds."""
    folder = tmp_path_factory.mktemp("logs")
    python = [sys.executable, "-W", "error:::handrail"]
    inspect = [*python, "-m", "inspect_ai", "eval", "shop.py", "clerk_eval.py"]
    options = ["--display", "none", "--no-fail-on-error", "--log-format", "json", "--log-dir", "logs"]
    (folder / "clerk_eval.py").write_text(clerk_eval())
    asyncio.run(export_case(folder))
    shutil.copy(Path(__file__).with_name("shop.py"), folder)
    paths = [str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    run = subprocess.run([*inspect, *options], cwd=folder, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    read = [json.loads(path.read_text()) for path in folder.glob("logs/*.json")]
    return {log["eval"]["task"]: log for log in read}


def samples(log: Log) -> dict[str, Log]:
    return {sample["id"]: sample for sample in log["samples"]}


@pytest.mark.parametrize("task", ["as_agent", "as_tools"])
def test_every_call_passes_the_gate(logs: dict[str, Log], task: str):
    """An agent, and tools in Inspect's own agent, are asked about, denied and undone in fresh files, and scorers see that."""
    assert logs[task]["status"] == "success"
    found = samples(logs[task])
    assert {name: sample["scores"]["includes"]["value"] for name, sample in found.items()} == {
        "approved": "C",
        "denied": "C",
        "undone": "C",
    }
    told = {name: sample["scores"]["ledger"] for name, sample in found.items()}
    assert all(score["value"] for score in told.values())
    assert told["approved"]["explanation"] == "ok by till, asked [True], undone 0"
    assert told["denied"]["explanation"] == "denied by till, asked [False], undone 1"
    assert told["undone"]["explanation"] == "error by till, asked [], undone 1"


def test_the_log_has_the_conversation_and_the_usage(logs: dict[str, Log]):
    """The log has the run's messages, with failed calls marked, its tool definitions, and the tokens of Inspect's model."""
    log = logs["as_agent"]
    messages = samples(log)["undone"]["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"][0]["arguments"] == {"order": "a1", "cents": 50000, "note": {"text": ""}}
    assert messages[2]["error"]["type"] == "unknown"
    assert log["stats"]["model_usage"]["mockllm/model"]["total_tokens"] == 90
    events = samples(log)["approved"]["events"]
    requested = next(each for each in events if each["event"] == "model")
    assert samples(log)["approved"]["events_data"]["messages"][0]["content"] == "Serve."
    [offered] = requested["tools"]
    assert offered["parameters"]["properties"]["note"]["properties"]["text"]["type"] == "string"
    assert requested["config"]["temperature"] == 0.5


def test_a_limit_of_inspect_ends_the_run_and_is_scored(logs: dict[str, Log]):
    """A limit on a sample passes through the run unchanged. What was said and done until then is in the log."""
    assert logs["limited"]["status"] == "success"
    [sample] = logs["limited"]["samples"]
    assert sample["limit"]["type"] == "token"
    assert [each["role"] for each in sample["messages"]] == ["user", "assistant", "tool"]
    assert sample["scores"]["ledger"]["value"]


def test_a_sample_that_an_agent_cant_be_given_is_named(logs: dict[str, Log]):
    """A system message in a sample is an error of the sample that says what to use."""
    [sample] = logs["wrong"]["samples"]
    assert "a sample has a system message" in sample["error"]["message"]


def test_earlier_messages_are_the_history(logs: dict[str, Log]):
    """Messages before the last are sent to the model, and the log has each once."""
    [sample] = logs["continued"]["samples"]
    assert [each["role"] for each in sample["messages"]][:3] == ["user", "assistant", "user"]
    assert len(sample["messages"]) == 6
    assert sample["scores"]["includes"]["value"] == "C"


def test_the_task_of_the_page_runs(logs: dict[str, Log]):
    """The program on the page about evals passes, with the approval that its scorer requires."""
    [sample] = logs["clerk_eval"]["samples"]
    assert sample["scores"]["approved_refund"]["value"] is True
    [call] = sample["store"]["handrail"]["calls"]
    assert [ask["approved"] for ask in call["asks"]] == [True]


def test_a_recorded_run_is_a_sample(logs: dict[str, Log]):
    """The sample has the run's message, answer and files."""
    [sample] = logs["recorded"]["samples"]
    assert (sample["input"], sample["target"]) == ("Refund 500", "refunded")
    assert sample["scores"]["includes"]["value"] == "C"
    assert sample["store"]["handrail"]["files"] == {"ledger.txt": "before\na1 500\n"}
