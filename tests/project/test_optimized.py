"""Tests for `python -O`, which removes assertions, and `python -OO`, which also removes docstrings."""

import subprocess
import sys
from pathlib import Path

IMPORTS = """
import importlib, pkgutil
import handrail
for module in pkgutil.walk_packages(handrail.__path__, "handrail."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
OFFERED = """
from handrail import FileTools, MemoryFilesystem, ScriptedModel, Shell, ShellTools, WorkerRegistry
model = ScriptedModel(["done"])
WorkerRegistry("team").run("main", "go", model=model, filesystem=MemoryFilesystem()).wait()
offered = [offer.tool for offer in model.requests[0].tools]
for tool in (*offered, *FileTools().tools, *ShellTools(Shell([])).tools):
    print(tool.name, tool.description, tool.json_schema)
"""
WORKER = "---\ntools: [files, greet]\ncreate: true\nattachments: {count: 1}\n---\nGo."
TOOLS = '''
def greet(name: str) -> str:
    """Greet somebody.

    Args:
        name: Whom to greet.
    """
    return name
'''
UNPAIRED = """
from handrail import MemoryFilesystem, Session, open_gate, tool
from handrail.events import ToolStarted
from handrail.testing import RecordingSubscriber
@tool(description="Tell the fare.", effect="pure")
def fare() -> int:
    return 1
session = Session()
seen = RecordingSubscriber(session)
open_gate([fare], session=session).invoke("fare", {}).wait()
seen.events[:] = [event for event in seen.events if not isinstance(event, ToolStarted)]
seen.assert_paired()
"""
BROKEN = """
from handrail.testing.simulation import Broken, Report
Report("s", 1, 1, {}, 1, 0.0, [Broken("a law", "no crash", "it broke")]).assert_kept()
"""


def run(code: str, *flags: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300
    )


def test_built_in_tools_and_workers_are_described_without_docstrings(tmp_path: Path):
    """Under -OO, everything can be imported, and models see the same tools as without it."""
    (tmp_path / "team").mkdir()
    (tmp_path / "team" / "main.md").write_text(WORKER)
    (tmp_path / "team" / "tools.py").write_text(TOOLS)
    usual, bare = run(OFFERED, folder=tmp_path), run(IMPORTS + OFFERED, "-OO", folder=tmp_path)
    assert (bare.returncode, bare.stderr) == (0, "")
    assert bare.stdout == usual.stdout
    for name in ("create_worker", "call_worker", "read_attachment", "greet", "edit_file", "run_command"):
        assert f"\n{name} " in f"\n{usual.stdout}"
    assert "Whom to greet." in usual.stdout


def test_a_tool_whose_docstring_is_gone_says_how_to_keep_it(tmp_path: Path):
    """A function without a docstring is refused under -OO with an error that names -OO. A description replaces it."""
    code = (
        "from handrail import tool\n@tool{}\ndef fare(city: str) -> str:\n    'Tell it.'\n    return city\n"
    )
    refused = run(code.format(""), "-OO", folder=tmp_path)
    assert refused.returncode == 1
    assert "tool 'fare': `python -OO` removes the docstring" in refused.stderr
    assert "Use `python -O`, or pass `@tool(description=...)`" in refused.stderr
    for flag, options in (("-O", ""), ("-OO", "(description='Tell it.')")):
        assert run(code.format(options), flag, folder=tmp_path).returncode == 0


def test_public_checks_do_not_depend_on_assertions(tmp_path: Path):
    """`assert_paired` and `assert_kept` raise under -O too."""
    for check, said in ((UNPAIRED, "ended before it started"), (BROKEN, "a law: it broke")):
        stderr = run(check, "-O", folder=tmp_path).stderr
        assert "AssertionError: " in stderr
        assert said in stderr
