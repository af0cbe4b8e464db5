"""Create the peers' venvs from requirements/NAME.txt, under .venv-peers, which git ignores."""

from __future__ import annotations

import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VENVS = ROOT / ".venv-peers"


def python_of(venv: str | None) -> Path:
    """Return the path of a venv's Python. None stands for the project's own venv."""
    return (VENVS / venv if venv else ROOT / ".venv") / "bin" / "python"


def ready(venv: str | None) -> Path:
    """Return the path of a venv's Python, after creating or updating the venv if necessary."""
    python = python_of(venv)
    if venv is None:
        subprocess.run([ROOT / "scripts" / "venv", ".venv", "requirements/dev.txt"], cwd=ROOT, check=True)
        return python
    requirements = HERE / "requirements" / f"{venv}.txt"
    stamp = VENVS / venv / "stamp"
    wanted = f"{python}\n{requirements.read_text()}"
    if not stamp.exists() or stamp.read_text() != wanted:
        # Use the same interpreter as for the project's venv, so that all peers run on the same Python.
        found = subprocess.run([ROOT / "scripts" / "find-python"], capture_output=True, text=True, check=True)
        print(f"== making {(VENVS / venv).relative_to(ROOT)}", flush=True)
        subprocess.run([found.stdout.strip(), "-m", "venv", "--clear", VENVS / venv], check=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "-qq"]
        subprocess.run([*pip, "install", "-r", requirements], check=True)
        stamp.write_text(wanted)
    return python
