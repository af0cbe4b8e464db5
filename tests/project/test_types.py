"""Tests for types as part of the API: they pin what pyright infers and reports in strict mode.

Each file in tests/project/types declares its expectations: inferences with `assert_type`, and errors with a
comment on their line, `# expect-error: rule, rule`. Pyright must report exactly those. It must report nothing for the
Python examples in the README. (`scripts/check` checks `examples/`.)
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from project.documents import chains
from support import ROOT

pytestmark = pytest.mark.once  # pyright is slow, and checking for one Python version is enough
FOLDER = Path(__file__).with_name("types")
FILES = sorted(file.name for file in FOLDER.glob("*.py"))
README = {f"readme_{group[0].line}.py": group for group in chains(ROOT / "README.md")}
"""The groups of examples in the README that share a namespace, by the name of the file that pyright checks."""
EXPECTED = re.compile(r"#\s*expect-error:\s*(.+?)\s*$")

WRONG = """
from typing_extensions import assert_type
assert_type(1 + 1, str)
x: int = "text"
y: int = 3  # expect-error: reportAssignmentType
"""

Found = set[tuple[int, str]]
"""The line and rule of each error."""


def checker() -> str:
    """Return a Python that has pyright: this one, or else the one in .venv."""
    return sys.executable if importlib.util.find_spec("pyright") else str(ROOT / ".venv/bin/python")


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """Fixture: runs pyright once for this Python's version, and returns the errors that it reports for every file."""
    folder = tmp_path_factory.mktemp("types")
    for name in FILES:
        shutil.copy(FOLDER / name, folder / name)
    for name, group in README.items():
        text = ""
        for block in group:  # empty lines give each error the line number that it has in the README
            text += "\n" * (block.line - 1 - text.count("\n")) + block.code
        (folder / name).write_text(text)
    (folder / "wrong.py").write_text(WRONG)
    config = {
        "include": ["."],
        "typeCheckingMode": "strict",
        "pythonVersion": ".".join(map(str, sys.version_info[:2])),
        "extraPaths": [str(ROOT / "src")],
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [
        checker(),
        "-m",
        "pyright",
        "--project",
        folder,
        "--pythonpath",
        sys.executable,
        "--outputjson",
    ]
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    output = json.loads(result.stdout)
    assert output["summary"]["filesAnalyzed"] == len(FILES) + len(README) + 1, result.stdout
    found: dict[str, Found] = {name: set() for name in [*FILES, *README, "wrong.py"]}
    for each in output["generalDiagnostics"]:
        line = each["range"]["start"]["line"] + 1
        found[Path(each["file"]).name].add((line, each.get("rule", each["message"])))
    return found


def expected(text: str) -> Found:
    """Return the errors that a file declares."""
    return {
        (number, rule)
        for number, line in enumerate(text.splitlines(), 1)
        if (match := EXPECTED.search(line))
        for rule in re.split(r",\s*", match[1])
    }


@pytest.mark.parametrize("name", FILES)
def test_pyright_says_exactly_what_the_file_expects(name: str, reported: dict[str, Found]):
    """Pyright confirms every inference, and reports exactly the expected errors with their rules."""
    wanted, got = expected((FOLDER / name).read_text()), reported[name]
    differences = [f"{name}:{line}: {rule} is not expected" for line, rule in sorted(got - wanted)]
    differences += [f"{name}:{line}: {rule} is not reported" for line, rule in sorted(wanted - got)]
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize("name", README)
def test_the_readme_passes_strict_mode(name: str, reported: dict[str, Found]):
    """Pyright reports nothing for the examples in the README."""
    assert not [f"README.md:{line}: {rule}" for line, rule in sorted(reported[name])]


def test_a_wrong_expectation_is_noticed(reported: dict[str, Found]):
    """A false `assert_type`, an unexpected error and a missing error are each detected."""
    wanted, got = expected(WRONG), reported["wrong.py"]
    assert got - wanted == {(3, "reportAssertTypeFailure"), (4, "reportAssignmentType")}
    assert wanted - got == {(5, "reportAssignmentType")}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_expectations_has_both_kinds(name: str):
    """Every file has at least ten expected inferences and five expected errors."""
    text = (FOLDER / name).read_text()
    assert text.count("assert_type(") >= 10
    assert len(expected(text)) >= 5
