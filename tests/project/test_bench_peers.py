"""Tests for the benchmark against other frameworks. It rejects peers that do different work."""

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support import ROOT

PEERS = ROOT / "bench" / "peers"


@pytest.fixture(scope="module")
def parts() -> Iterator[dict[str, ModuleType]]:
    """Fixture: imports the benchmark's modules under the bare names by which they import each other."""
    found: dict[str, ModuleType] = {}
    for name in ("work", "peer", "report"):
        spec = importlib.util.spec_from_file_location(name, PEERS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        found[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    yield found
    for name in found:
        del sys.modules[name]


@pytest.mark.once
@pytest.mark.timeout(900)  # starts ten processes, one after another
def test_floor_and_handrail_run(tmp_path: Path):
    """A quick run of the benchmark has a result for every scenario of both peers, and prints the table."""
    kept = tmp_path / "kept.jsonl"
    command = [sys.executable, PEERS / "run.py", "--only", "floor,handrail", "--quick", "--out", kept]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = [json.loads(line) for line in kept.read_text().splitlines()]
    assert len(results) == 10
    assert all(result["figures"] for result in results)
    assert re.search(
        r"\| in process: tool loop, µs per call \| [\d,]+ \| [\d,]+ \| [\d.]+× \| ≤ 3×, ", ended.stdout
    )
    assert "These counts are tiny." in ended.stdout


def test_an_unknown_peer_is_named():
    """An unknown peer is refused with the list of known ones."""
    command = [sys.executable, PEERS / "run.py", "--only", "floor,flor"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 2
    assert "unknown peers: flor. The peers are floor, handrail, " in ended.stderr


def test_every_peer_has_its_script_and_pins():
    """Every peer has its script, and every requirements file belongs to a peer and pins exact versions."""
    table = tomllib.loads((PEERS / "peers.toml").read_text())
    assert all((PEERS / peer["script"]).is_file() for peer in table.values())
    used = {peer[key] for peer in table.values() for key in ("venv", "venv_http") if key in peer}
    assert {file.stem for file in (PEERS / "requirements").iterdir()} == used
    for file in (PEERS / "requirements").iterdir():
        for line in file.read_text().splitlines():
            assert re.fullmatch(r"[\w.-]+==[\w.]+", line), f"{file.name}: {line}"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("skips", "calls and the sum of their indices"),
        ("repeats", "calls and the sum of their indices"),
        ("lies", "the answer is"),
        ("asks again", "the model was asked"),
    ],
)
def test_other_work_has_no_figure(parts: dict[str, ModuleType], wrong: str, said: str):
    """A peer that skips or repeats a call, invents an answer or makes an extra request is rejected."""
    work, peer = parts["work"], parts["peer"]

    class Wrong(peer.Peer):
        name = "wrong"
        dists = ()

        def build(self, script: Any) -> Any:
            return script

        async def run(self, agent: Any, context: Any) -> str:
            turn = await agent.aturn("")
            while turn.calls:
                arguments = turn.calls[0].args
                result = context.work(**arguments)
                if wrong == "repeats" and arguments["index"] == 1:
                    context.work(**arguments)
                if wrong == "skips" and arguments["index"] == 1:
                    result = {"tag": "@r2"}
                if wrong == "asks again" and arguments["index"] == 1:
                    await agent.aturn(result)
                turn = await agent.aturn(result)
            return "done" if wrong == "lies" else turn.text

    options = {
        "variant": "inproc",
        "base_url": "",
        "scenario": "tool_loop",
        "runs": 1,
        "calls": 5,
        "repeat": 1,
    }
    namespace = peer.argparse.Namespace(**options)
    with pytest.raises(peer.WrongWork, match=said):
        asyncio.run(peer.tool_loop(Wrong(namespace), namespace))
    assert work.Script(5).answer == "@r4 done"


def test_a_script_survives_its_name(parts: dict[str, ModuleType]):
    """A script can be restored from its model name, which is all that the server sees of it."""
    kind = parts["work"].Script
    for script in (kind(50), kind(5, 50), kind(3, 0, "final_answer")):
        assert kind.named(b'{"model": "' + script.model_name.encode() + b'"}') == script


def result(peer: str, value: float, **more: Any) -> dict[str, Any]:
    figures = {"figures": {"us_per_call": value}}
    return {"peer": peer, "variant": "inproc", "scenario": "tool_loop", "round": 0} | figures | more


def test_the_table_has_ratios_to_the_floor_and_to_the_best_peer(parts: dict[str, ModuleType]):
    """The table has medians over rounds, ratios to the floor and to the best peer, and says which limits were met."""
    results = [result("floor", 25), result("handrail", 60), result("handrail", 90), result("handrail", 70)]
    results += [result("slow", 900), result("quick", 770)]
    lines = parts["report"].tables(results).splitlines()
    assert lines[2] == (
        "| in process: tool loop, µs per call | 25 | 70 | 2.80× | ≤ 3×, met | 770 (quick) | 11.00× | ≥ 10×, met |"
    )
    results = [result("floor", 10), result("handrail", 60), result("quick", 590)]
    missed = parts["report"].tables(results).splitlines()[2]
    assert "6.00× | ≤ 3×, MISSED | 590 (quick) | 9.83× | ≥ 10×, MISSED |" in missed
    alone = parts["report"].tables(results[:2]).splitlines()[2]
    assert alone.endswith("MISSED | – | – | ≥ 10× |")


def test_the_machines_load_is_told(parts: dict[str, ModuleType]):
    """The report says how busy the machine was while the figures were taken."""
    ran = {"versions": {}, "python": "3.12.1", "calibration_ms": 9.0}
    results = [result("floor", 10, load=0.5, **ran), result("handrail", 20, load=7.25, **ran)]
    assert "load was 0.5 to 7.2" in parts["report"].tables(results)


def test_what_failed_is_told(parts: dict[str, ModuleType]):
    """A line below the table says why a peer failed."""
    failed = {"peer": "slow", "variant": "http", "scenario": "growth", "round": 1, "error": "trace\nboom"}
    shown = parts["report"].tables([result("floor", 10), failed])
    assert "- slow, http, growth, round 2: boom" in shown
