"""Fuzz the code that reads input from outside, guided by coverage.

    python scripts/fuzz.py [TARGET ...]      (the targets are in tests/project/fuzz_targets.py; all of them by default)

Each target has its own process and a fixed number of executions, so that a run does about the same work on every
machine. A finding is written to build/fuzz. Once it is fixed, move it to tests/fuzz/TARGET, where the ordinary tests run
it. HANDRAIL_FUZZ multiplies the number of executions.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXECUTIONS = {
    "agui_body": 40_000,
    "answer": 10_000,
    "arguments": 10_000,
    "diff": 40_000,
    "journal_file": 500,
    "worker_file": 10_000,
}
_HANGS = 30
"""Seconds after which one execution counts as a hang."""


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in EXECUTIONS]
    if unknown:
        sys.exit(f"There is no target {unknown[0]!r}. There are: {', '.join(EXECUTIONS)}.")
    failed = [name for name in names or EXECUTIONS if not run(name)]
    for name in failed:
        print(f"{name}: a finding. Its input is in build/fuzz.")
    return 1 if failed else 0


def run(name: str) -> bool:
    """Fuzz one target in its own process. Returns False if that finds something or fails."""
    found, corpus = ROOT / "build/fuzz", ROOT / "build/fuzz/corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    runs = max(1, int(EXECUTIONS[name] * float(os.environ.get("HANDRAIL_FUZZ", "1"))))
    limits = (f"-runs={runs}", f"-timeout={_HANGS}", "-max_len=4096", "-rss_limit_mb=4096", "-seed=1")
    command = [
        sys.executable,
        __file__,
        "--child",
        name,
        *limits,
        f"-artifact_prefix={found}/{name}-",
        "-verbosity=0",
    ]
    ended = subprocess.run([*command, str(corpus)], cwd=ROOT, check=False)
    print(
        f"{name}: {runs} executions, {'nothing found' if ended.returncode == 0 else 'a finding'}", flush=True
    )
    return ended.returncode == 0


def fuzz(name: str, options: list[str]) -> None:
    """Fuzz one target in this process. This never returns."""
    atheris: Any = importlib.import_module("atheris")
    sys.path.insert(0, str(ROOT / "tests"))
    with atheris.instrument_imports(include=["handrail", "yaml"]):
        support: Any = importlib.import_module("project.fuzz_targets")
    target, seeds = support.TARGETS[name]
    folder = Path(options[-1])
    for number, data in enumerate((*seeds, *support.corpus(name))):
        (folder / f"seed-{number}").write_bytes(data)
    atheris.Setup([sys.argv[0], *options], target)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        fuzz(sys.argv[2], sys.argv[3:])
    sys.exit(main(sys.argv[1:]))
