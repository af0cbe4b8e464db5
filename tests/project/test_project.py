"""Tests for the project's own rules: layers, lengths, interpreters and dependencies."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from support import ROOT

SUPPORTED = ("3.11", "3.12", "3.13")
# The Python from which the tests' venv was created.
BASE: str = getattr(sys, "_base_executable")  # noqa: B009 (typeshed does not know the attribute)


def script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run one of the Python scripts in `scripts`. Its working directory is the project's root."""
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def layers(folder: Path, files: dict[str, str]) -> list[str]:
    """Write a package, and return the findings of layers.py without the folder's path."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    result = script("layers.py", folder)
    assert result.stderr == ""
    findings = result.stdout.replace(f"{folder}/", "").splitlines()
    assert result.returncode == (1 if findings else 0)
    return findings


def test_the_package_keeps_to_its_layers():
    """The real package has no layer violations."""
    result = script("layers.py")
    assert (result.stdout, result.returncode) == ("", 0)


def test_layers_allow_what_is_downward_or_level(tmp_path: Path):
    """layers.py allows imports from lower layers, from the same layer, and of a module's own private parts.

    `testing`, `clock` and `ids` may use the system's clock and randomness.
    """
    files = {
        "__init__.py": "from handrail.cli import main\nfrom handrail.session._store import _Store\n",
        "cli.py": "from handrail import __version__\nfrom handrail.session import Session\n",
        "session/__init__.py": "from ._store import _Store\nfrom ..errors import Failure\nfrom .. import journal\n",
        "session/_store.py": "from handrail.session import Session\nimport handrail.tools\n",
        "journal.py": "from .session import Session\n",
        "testing.py": "from handrail.run.adapter import Adapter\nimport time, random, uuid\nprint(time.time())\n",
        "telemetry.py": "from handrail.durable import Durable\n",
        "clock.py": "import time\nnow = time.monotonic\n",
        "ids.py": "from uuid import uuid4\n",
    }
    assert layers(tmp_path, files) == []


@pytest.mark.parametrize(
    "line",
    [
        "from handrail.session import Session",
        "import handrail.session",
        "import handrail.session.store as store",
        "from handrail import session",
        "from .session import Session",
        "from . import session",
        "def late():\n    from handrail.session import Session",
    ],
)
def test_layers_find_an_upward_import(tmp_path: Path, line: str):
    """layers.py reports an upward import with its line, however and wherever it is written."""
    number = line.count("\n") + 1
    [finding] = layers(tmp_path, {"tools.py": line})
    assert finding.startswith(f"tools.py:{number}: tools (layer 0) imports session (layer 1); ")


def test_layers_find_an_upward_import_from_a_nested_package(tmp_path: Path):
    """layers.py resolves a relative import against the package of the importing file."""
    [finding] = layers(tmp_path, {"session/store/rows.py": "from ...run import gate\n"})
    assert finding.startswith("session/store/rows.py:1: session (layer 1) imports run (layer 2); ")


@pytest.mark.parametrize("test", ["TYPE_CHECKING", "typing.TYPE_CHECKING"])
def test_layers_exempt_imports_for_types_only(tmp_path: Path, test: str):
    """layers.py allows an upward import under TYPE_CHECKING, but not in its else branch."""
    branch = "    from handrail.session import Session\n"
    assert layers(tmp_path, {"tools.py": f"if {test}:\n{branch}"}) == []
    [finding] = layers(tmp_path, {"tools.py": f"if {test}:\n    pass\nelse:\n{branch}"})
    assert finding.startswith("tools.py:4: ")


@pytest.mark.parametrize(
    "line",
    [
        "from handrail.errors import _format",
        "from handrail.errors._format import write",
        "import handrail.errors._format",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .errors import _format",
    ],
)
def test_layers_find_private_imports(tmp_path: Path, line: str):
    """layers.py reports imports of another module's private names, even if they are only for types."""
    [finding] = layers(tmp_path, {"tools.py": line})
    assert "which is private to errors; import a public name of errors" in finding


@pytest.mark.parametrize("target", ["testing", "telemetry"])
@pytest.mark.parametrize("owner", ["tools", "cli", "testing", "telemetry"])
def test_layers_let_nothing_import_what_stands_beside(tmp_path: Path, owner: str, target: str):
    """layers.py reports imports of testing or telemetry by any layer, and by each other. Only the doors start telemetry."""
    findings = layers(tmp_path, {f"{owner}.py": f"from handrail.{target} import thing\n"})
    if owner == target or (owner, target) == ("cli", "telemetry"):
        assert findings == []
    else:
        [finding] = findings
        assert finding.startswith(
            f"{owner}.py:1: {owner} imports {target}, which no other module may import; "
        )


@pytest.mark.parametrize("owner", ["testing", "telemetry"])
def test_layers_keep_what_stands_beside_below_the_doors(tmp_path: Path, owner: str):
    """layers.py reports imports of layer 5 by testing and telemetry."""
    [finding] = layers(tmp_path, {f"{owner}.py": "from handrail.serve import page\n"})
    assert finding.startswith(f"{owner}.py:1: {owner} imports serve (layer 5); ")


def test_layers_ask_for_a_place_for_a_new_module(tmp_path: Path):
    """layers.py reports once that a module has no layer, and again for each import of it."""
    files = {
        "novel/__init__.py": "",
        "novel/part.py": "",
        "tools.py": "from handrail.novel.part import x, y\n",
    }
    assert layers(tmp_path, files) == [
        "novel/__init__.py:1: handrail.novel has no layer; add it to LAYERS in scripts/layers.py",
        "tools.py:1: handrail.novel has no layer; add it to LAYERS in scripts/layers.py",
    ]


@pytest.mark.parametrize("line", ["import handrail", "from handrail import Tool", "from . import Tool"])
def test_layers_find_imports_through_the_front(tmp_path: Path, line: str):
    """layers.py reports a module that imports the package itself, or names from the package's `__init__`."""
    [finding] = layers(tmp_path, {"session.py": line})
    assert "through the package itself; import it from the module that defines it" in finding


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import time\ntime.time()\n", "2: uses time.time"),
        ("import time as t\ndelay = t.monotonic\n", "2: uses time.monotonic"),
        ("from time import monotonic_ns\n", "1: imports time.monotonic_ns"),
        ("import datetime\ndatetime.datetime.now()\n", "2: uses datetime.datetime.now"),
        ("from datetime import datetime as dt\ndt.utcnow()\n", "2: uses datetime.datetime.utcnow"),
        ("from datetime import date\ndate.today()\n", "2: uses datetime.date.today"),
        ("import random\n", "1: imports random"),
        ("from random import choice\n", "1: imports random"),
        ("import uuid\n", "1: imports uuid"),
        ("from uuid import uuid4\n", "1: imports uuid"),
    ],
)
@pytest.mark.parametrize("file", ["tools.py", "__init__.py", "session/clock.py"])
def test_layers_find_direct_time_and_chance(tmp_path: Path, file: str, text: str, found: str):
    """layers.py reports direct uses of the clock and of randomness under any alias, and says what to use instead."""
    [finding] = layers(tmp_path, {file: text})
    assert finding.startswith(f"{file}:{found}; ")
    assert "handrail.clock" in finding or "handrail.ids" in finding


def test_layers_leave_other_uses_of_time_alone(tmp_path: Path):
    """layers.py does not report types, conversions, or names that only look like time or randomness."""
    text = "import time\nfrom datetime import datetime\n\ndef f(now: datetime) -> str:\n    return time.strftime('%Y', now.timetuple())\n"
    look_alikes = "def g(datetime, time):\n    return datetime.now(), time.time()\n"
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from uuid import UUID\n"
    files = {"tools.py": text, "session.py": look_alikes, "events.py": for_types}
    assert layers(tmp_path, files) == []


def test_layers_report_a_file_that_does_not_parse(tmp_path: Path):
    """layers.py reports a syntax error as a finding with its line."""
    [finding] = layers(tmp_path, {"tools.py": "x = 1\ndef\n"})
    assert finding.startswith("tools.py:2: does not parse: ")


def test_layers_refuse_a_missing_folder(tmp_path: Path):
    """layers.py fails if the folder does not exist."""
    assert script("layers.py", tmp_path / "none").returncode == 2


def lengths(folder: Path, text: str) -> tuple[str, int]:
    (folder / "module.py").write_text(text)
    result = script("lengths.py", folder)
    return result.stdout.replace(f"{folder}/", ""), result.returncode


def function(lines: int) -> str:
    return "async def act():\n" + "    pass\n" * (lines - 1)


def test_lengths_accept_a_file_and_function_at_the_note_marks(tmp_path: Path):
    """lengths.py accepts a file of 700 lines and a function of 80 without a note."""
    assert lengths(tmp_path, function(80) + "\n" * 620) == ("", 0)


def test_lengths_note_what_is_long(tmp_path: Path):
    """lengths.py prints a note, and does not fail, for a longer file and a longer function."""
    output, status = lengths(tmp_path, function(81) + "\n" * 620)
    assert output.splitlines() == [
        "module.py:1: the file has 701 lines (note: over 700)",
        "module.py:1: act has 81 lines (note: over 80)",
    ]
    assert status == 0


def test_lengths_refuse_a_missing_folder(tmp_path: Path):
    """lengths.py fails if the folder does not exist."""
    assert script("lengths.py", tmp_path / "none").returncode == 2


# A version manager's shim for a version that is not activated.
BROKEN = "#!/bin/sh\necho 'command not found' >&2\nexit 127\n"
GOOD = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
# A Python that runs but lacks ensurepip, as on Debian without its venv package. It drops the first argument,
# -I, so that the planted ensurepip is imported.
NO_VENV = f'#!/bin/sh\nshift\nPYTHONPATH="$HOME/lacking" exec "{sys.executable}" "$@"\n'
OLD = "#!/bin/sh\nexit 1\n"


def find_python(
    home: Path, programs: dict[str, str], *arguments: str, modes: dict[str, int] | None = None
) -> subprocess.CompletedProcess[str]:
    """Write `programs`, named folder/program, below `home`, and run find-python with only their folders on its PATH.

    The folders are in the order of the programs.
    """
    folders: list[str] = []
    for name, text in programs.items():
        file = home / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod((modes or {}).get(name, 0o755))
        if str(file.parent) not in folders:
            folders.append(str(file.parent))
    environment = {"PATH": ":".join(folders), "HOME": str(home)}
    command = ["/bin/sh", str(ROOT / "scripts" / "find-python"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_find_python_passes_over_a_shim_that_fails(tmp_path: Path):
    """find-python skips Pythons that fail, and prints the real path of the first one that works."""
    programs = {"a/python3.11": BROKEN, "b/python3.11": OLD, "c/python3.11": GOOD}
    assert find_python(tmp_path, programs).stdout == f"{BASE}\n"


def test_find_python_passes_over_what_cannot_be_run(tmp_path: Path):
    """find-python skips a file that is not executable, and a folder with the name of a Python."""
    (tmp_path / "b" / "python3.11").mkdir(parents=True)
    programs = {"a/python3.11": GOOD, "b/python3.12": BROKEN, "c/python": GOOD}
    result = find_python(tmp_path, programs, modes={"a/python3.11": 0o644})
    assert result.stdout == f"{BASE}\n"


def test_find_python_handles_spaces_in_a_path(tmp_path: Path):
    """find-python also searches folders with spaces in their path."""
    home = tmp_path / "with space"
    home.mkdir()
    assert find_python(home, {"a b/python3": GOOD}).stdout == f"{BASE}\n"


def test_find_python_finds_versions_pyenv_keeps(tmp_path: Path):
    """find-python finds a version that pyenv has installed but not enabled, even if pyenv's shim on the path fails."""
    kept = tmp_path / ".pyenv" / "versions" / "some" / "bin" / "python3"
    kept.parent.mkdir(parents=True)
    kept.write_text(GOOD)
    kept.chmod(0o755)
    assert find_python(tmp_path, {"a/python3.11": BROKEN}).stdout == f"{BASE}\n"


def test_find_python_prints_the_fix_when_venv_is_missing(tmp_path: Path):
    """find-python refuses a Python that can't create a venv, and prints the command that fixes this."""
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "ensurepip.py").write_text("raise ImportError")
    result = find_python(tmp_path, {"a/python3.11": NO_VENV})
    assert (result.returncode, result.stdout) == (1, "")
    assert "apt-get install python{}.{}-venv".format(*sys.version_info) in result.stderr


def test_find_python_fails_without_a_usable_python(tmp_path: Path):
    """find-python fails with an error if no Python is usable."""
    result = find_python(tmp_path, {"a/python3": BROKEN})
    assert (result.returncode, result.stdout) == (1, "")
    assert "No Python >= 3.11 was found" in result.stderr


def test_find_python_lists_all_and_names_the_missing(tmp_path: Path):
    """`find-python --all` prints a line for each supported version, found or not."""
    here = "{}.{}".format(*sys.version_info)
    result = find_python(tmp_path, {"a/python3.12": BROKEN, "b/python3": GOOD}, "--all")
    expected = [f"{v} {BASE if v == here else 'missing'}" for v in SUPPORTED]
    assert result.stdout.splitlines() == expected
    assert result.returncode == 0


@pytest.mark.parametrize("link", [".venv", ".venv/", ".venv/bin"])
def test_venv_refuses_a_folder_of_links(tmp_path: Path, link: str):
    """`scripts/venv` doesn't empty the venv that a link points to. It says which link to remove."""
    copy, other = tmp_path / "copy", tmp_path / "other"
    (copy / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "venv", copy / "scripts")
    (other / "bin").mkdir(parents=True)
    (other / "bin" / "kept").touch()
    at = copy / link.rstrip("/")
    at.parent.mkdir(exist_ok=True)
    at.symlink_to(other / at.relative_to(copy / ".venv"))
    folder = ".venv/" if link.endswith("/") else ".venv"
    command = [copy / "scripts" / "venv", folder, "none.txt", sys.executable]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert f"{link.rstrip('/')} is a symbolic link" in result.stderr
    assert result.stderr.endswith(f"run: rm {link.rstrip('/')}\n")
    assert (other / "bin" / "kept").exists()


def test_no_test_measures_time():
    """No test uses a stopwatch, since the verdict would depend on how busy the machine is. `make bench` measures time."""
    stopwatch = re.compile(
        r"\b(perf_counter(_ns)?|process_time(_ns)?|thread_time|getrusage|timeit|performance\.now)\b"
    )
    tests = [file for file in (ROOT / "tests").rglob("test_*.py") if file.name != "test_project.py"]
    assert len(tests) > 100
    assert [file.name for file in tests if stopwatch.search(file.read_text())] == []


def test_the_core_has_exactly_five_dependencies():
    """The core has exactly the four dependencies that are listed here, so a new one has to be added on purpose."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = sorted(re.split(r"[^\w-]", line)[0] for line in project["dependencies"])
    assert names == ["anyio", "griffelib", "msgspec", "pydantic"]


@pytest.mark.once
def test_the_package_brings_the_page_with_its_libraries_and_their_licences(tmp_path: Path):
    """The wheel and the sdist contain the page's libraries, which Git ignores. The wheel also has their licences and all files of the page."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    [wheel] = tmp_path.glob("*.whl")
    [archive] = tmp_path.glob("*.tar.gz")
    inside = zipfile.ZipFile(wheel).namelist()
    with tarfile.open(archive) as opened:
        packed = {name.partition("/src/")[2] for name in opened.getnames()}
    page = "handrail/serve/page"
    for name in ("standalone.js", "marked.js", "dompurify.js"):
        assert f"{page}/vendor/{name}" in inside
        assert f"{page}/vendor/{name}" in packed
    for name in json.loads((ROOT / "package.json").read_text())["dependencies"]:
        assert f"{page}/vendor/LICENSE.{name}" in inside
    for file in (ROOT / "src" / page).rglob("*"):
        if file.is_file():
            assert file.relative_to(ROOT / "src").as_posix() in inside


def test_each_change_has_a_kind():
    """towncrier leaves out a file of changes/ whose name has no kind."""
    names = [path.name for path in (ROOT / "changes").iterdir() if path.name != "README.md"]
    assert [
        name for name in names if not re.fullmatch(r"[a-z0-9-]+\.(added|changed|fixed|security)\.md", name)
    ] == []


def test_what_contributors_are_sent_to_exists():
    """Every file, folder and command that CONTRIBUTING.md names exists."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(
        r"`((?:src/handrail|[a-z]+)/[\w./]*)`|\]\((?!http)([^)#]+)|(?:^\$ | )((?:scripts|tests)/\S+)",
        text,
        re.MULTILINE,
    )
    named = {next(filter(None, each)) for each in paths}
    assert len(named) > 15
    roots = (ROOT, ROOT / "src/handrail")
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in re.findall(r"make ([a-z-]+)", text))
