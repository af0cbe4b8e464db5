"""Commands can use the Python that runs Handrail, wherever it is installed."""

import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

import handrail
from handrail.resources.shell import probe

RUN = """
import asyncio, json, os, sys
from pathlib import Path
from handrail.resources.shell import Allow, Layers, Shell

place = Path(sys.argv[2])
layers = Layers((place / "root",), place / "upper", place / "work")
shell = Shell([Allow(...)], backend=sys.argv[1])

def run(*argv):
    finished = asyncio.run(shell.run(argv, layers))
    return finished.exit_code, finished.output

script = "import json, sys; print(json.dumps([sys.prefix, open('data.txt').read()]))"
beside = os.path.dirname(os.path.dirname(sys.prefix))
print(json.dumps([
    run(sys.executable, "-c", script),
    run("touch", f"{sys.prefix}/written"),
    run("cat", f"{beside}/private.txt"),
]))
"""


@pytest.fixture(params=["overlay", "copy"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    support = probe(tmp_path)
    assert support.contained, support.missing
    assert support.overlay or request.param == "copy", support.missing
    return request.param


@pytest.fixture(params=["/tmp", "/var/tmp"])
def hidden(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Provide a folder with a space in its path, inside a folder of the host that commands do not see."""
    with tempfile.TemporaryDirectory(prefix="hand rail-", dir=request.param) as folder:
        yield Path(folder).resolve()


@pytest.mark.once
def test_the_interpreter_is_there_below_a_folder_that_is_hidden(hidden: Path, backend: str):
    """A command can run, but not change, an interpreter in a hidden folder, and sees no other file there."""
    venv.create(hidden / "clone" / ".venv", symlinks=False)
    (hidden / "private.txt").write_text("private")
    for name in ("root", "upper", "work"):
        (hidden / name).mkdir()
    (hidden / "root/data.txt").write_text("data")
    python = hidden / "clone" / ".venv" / "bin" / "python"
    packages = [
        str(Path(handrail.__file__).parents[1]),
        *(path for path in sys.path if "site-packages" in path),
    ]
    done = subprocess.run(
        [python, "-c", RUN, backend, str(hidden)],
        env={"PYTHONPATH": os.pathsep.join(packages), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    ran, wrote, looked = json.loads(done.stdout)
    assert ran == [0, json.dumps([str(python.parents[1]), "data"]) + "\n"]
    assert wrote[0] != 0
    assert "Read-only file system" in wrote[1]
    assert looked[0] != 0
    assert "No such file or directory" in looked[1]
