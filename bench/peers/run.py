"""Compare Handrail with other frameworks that do the same work on a scripted model, all in one run.

    python bench/peers/run.py                         every peer (their venvs are made first)
    python bench/peers/run.py --only floor,handrail   two of them
    python bench/peers/run.py --quick                 tiny counts, to check that everything runs

Each combination of a peer and a scenario runs in its own process. Peers take turns, in a different order each round,
so that a busy minute affects all of them. Only loopback is used. The benchmark ends by itself: no process runs longer
than --timeout, and no process is started after --minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import report
import venvs

# Only scenarios that the tables show are run.
SCENARIOS = tuple(dict.fromkeys((row.variant, row.scenario) for row in report.ROWS))
QUICK = {
    "tool_loop": ["--calls", "5", "--repeat", "3"],
    "growth": ["--calls", "65"],
    "concurrency": ["--runs", "20"],
}
# Peers must not send data to other machines.
QUIET = {
    "AGNO_TELEMETRY": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1",
    "OPENAI_API_KEY": "x",
    "OTEL_SDK_DISABLED": "true",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}


class Job(NamedTuple):
    """One process, which measures a peer in one scenario."""

    round: int
    variant: str
    scenario: str
    peer: str


def environment() -> dict[str, str]:
    """Return this process's environment without proxy variables and with telemetry disabled."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")} | QUIET


def jobs(peers: list[str], rounds: int) -> Iterator[Job]:
    """Yield all jobs. In each round, every scenario starts with the next peer."""
    for number in range(rounds):
        turned = peers[number % len(peers) :] + peers[: number % len(peers)]
        for variant, scenario in SCENARIOS:
            for peer in turned:
                yield Job(number, variant, scenario, peer)


@contextmanager
def serving() -> Generator[str]:
    """Run the model's server in its own process, and yield its address.

    Exits if the server does not start.
    """
    command = [venvs.python_of(None), venvs.HERE / "server.py"]
    pipe = subprocess.PIPE
    # Closing the server's standard input ends it.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment()) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        if not address:
            raise SystemExit("bench/peers/server.py did not start")
        yield address


def done(job: Job, peer: dict[str, Any], address: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one process, and return its result or the reason for its failure."""
    venv = peer.get("venv_http", peer.get("venv")) if job.variant == "http" else peer.get("venv")
    command: list[str | Path] = [
        venvs.python_of(venv),
        "-W",
        "ignore",
        venvs.HERE / peer["script"],
        job.scenario,
    ]
    command += ["--variant", job.variant, "--base-url", address]
    if options.quick:
        command += QUICK[job.scenario]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, env=environment(), timeout=options.timeout
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {options.timeout} s"}
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if ended.returncode or not lines:
        return {"error": (ended.stderr or ended.stdout).strip()[-1500:] or f"exit code {ended.returncode}"}
    return json.loads(lines[-1])


def arguments(table: dict[str, Any]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"peers, separated by commas: {', '.join(table)}")
    parser.add_argument("--rounds", type=int, help="number of rounds (3, or 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="use tiny counts, whose figures mean nothing")
    parser.add_argument(
        "--timeout", type=int, default=180, help="maximum number of seconds for one process (180)"
    )
    parser.add_argument(
        "--minutes", type=float, default=60, help="minutes after which no process is started (60)"
    )
    parser.add_argument(
        "--out", type=Path, help="the file of results, which is overwritten (bench/results/peers.jsonl)"
    )
    options = parser.parse_args()
    options.only = options.only.split(",") if options.only else list(table)
    if unknown := [name for name in options.only if name not in table]:
        parser.error(f"unknown peers: {', '.join(unknown)}. The peers are {', '.join(table)}.")
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.out = options.out or venvs.ROOT / "bench" / "results" / "peers.jsonl"
    return options


def main() -> int:
    """Run all jobs, store the results and print the tables.

    Returns 1 if a job of the floor or of Handrail failed.
    """
    table = tomllib.loads((venvs.HERE / "peers.toml").read_text())
    options = arguments(table)
    for name in options.only:
        for key in ("venv", "venv_http"):
            if key == "venv" or key in table[name]:
                venvs.ready(table[name].get(key))
    todo = list(jobs(options.only, options.rounds))
    results: list[dict[str, Any]] = []
    began = time.monotonic()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with serving() as address, options.out.open("w") as out:
        for number, job in enumerate(todo, 1):
            if time.monotonic() - began > options.minutes * 60:
                print(f"stopped after {options.minutes:g} minutes, {number - 1} of {len(todo)} done")
                break
            result = job._asdict() | {"quick": options.quick} | done(job, table[job.peer], address, options)
            results.append(result)
            out.write(json.dumps(result) + "\n")
            out.flush()
            said = result["error"].splitlines()[-1] if "error" in result else "ok"
            where = f"{job.variant:6} {job.scenario:11} {job.peer}"
            print(
                f"[{number}/{len(todo)} {time.monotonic() - began:4.0f} s] {where}: {said}", file=sys.stderr
            )
    print(report.tables(results))
    return int(any("error" in result for result in results if result["peer"] in ("floor", "handrail")))


if __name__ == "__main__":
    sys.exit(main())
