"""An app's folder is not on `sys.path`: only the app and the modules beside it can import from it."""

import importlib
import importlib.util
import json
import marshal
import struct
import sys
import textwrap
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from handrail.errors import DefinitionError
from handrail.imports import find_app, import_app, load_file, search
from handrail.serve.sources import load, load_module
from handrail.workers import WorkerRegistry
from support.programs import handrail

LIBRARY = """
try:
    import optional_speedup
except ImportError:
    optional_speedup = None

def try_again():
    import optional_speedup
"""
STOLEN = "raise SystemExit('what a model wrote has run')\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Fixture: an app's folder that a model has written to, and a library installed elsewhere."""
    modules, meta = dict(sys.modules), list(sys.meta_path)
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "some_library.py").write_text(LIBRARY)
    paths = [
        path for path in sys.path if path
    ]  # "" stands for the current folder, and may be on this process's path
    monkeypatch.setattr(sys, "path", [*paths, str(installed)])
    work = tmp_path / "work"
    work.mkdir()
    for name in ("optional_speedup", "json", "brotli", "typing_extensions", "pydantic"):
        (work / f"{name}.py").write_text(STOLEN)
    (work / "beside.py").write_text("from beside_that import WORD\ndef later():\n    import beside_later\n")
    (work / "beside_that.py").write_text("WORD = 'booked'\n")
    (work / "beside_later.py").write_text("")
    (work / "pack").mkdir()
    (work / "pack" / "__init__.py").write_text("from pack.inner import VALUE\n")
    (work / "pack" / "inner.py").write_text("import beside_that\nVALUE = beside_that.WORD\n")
    yield work
    sys.meta_path[:] = meta
    for name in sys.modules.keys() - modules.keys():
        del sys.modules[name]
    sys.modules.update(modules)


APP = """
import importlib, json
import some_library
from beside import WORD, later
from pack import VALUE
from handrail import Adapter, Prompt, ScriptedModel

later()
importlib.import_module("beside_later")
is_pythons_own = hasattr(json, "loads")
prompt = Prompt("desk", f"Help. {WORD} {VALUE}")
adapter = Adapter(ScriptedModel(lambda request: "hello"))
"""


def assert_out_of_reach(folder: Path) -> None:
    library = importlib.import_module("some_library")
    assert library.optional_speedup is None
    with pytest.raises(ModuleNotFoundError):
        library.try_again()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("optional_speedup")
    assert importlib.import_module("json") is json
    assert not any(Path(each or ".").resolve() == folder for each in sys.path)


def test_an_app_imports_its_neighbours_and_libraries_do_not(folder: Path):
    """The app and the modules beside it can import from its folder. A library can't."""
    (folder / "front_desk.py").write_text(APP)
    module = load_module(str(folder / "front_desk.py"))
    assert (module.WORD, module.VALUE, module.is_pythons_own) == ("booked", "booked", True)
    assert_out_of_reach(folder)


def test_an_app_by_its_name_is_found_in_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """An app in the current folder is found by its name, and so is a module in a package there. An unknown name is refused."""
    (folder / "desk_by_name.py").write_text(APP)
    monkeypatch.chdir(folder)
    assert load("desk_by_name").source.name == "desk"
    search(folder)
    assert find_app("pack.inner") is not None
    assert import_app("desk_by_name").WORD == "booked"
    assert_out_of_reach(folder)
    with pytest.raises(DefinitionError, match="there is no module 'nowhere_at_all'"):
        load_module("nowhere_at_all")


def test_a_library_in_the_same_folder_is_no_neighbour(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A library in a virtual environment inside the app's folder can't import the app's modules."""
    packages = folder / ".venv" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "another_library.py").write_text(LIBRARY)
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    (folder / "front_desk.py").write_text("import another_library\n")
    assert load_module(str(folder / "front_desk.py")).another_library.optional_speedup is None


def test_a_neighbour_hides_nothing_that_is_installed(folder: Path):
    """A module in the app's folder never replaces a standard or installed one with the same name, even for the app."""
    (folder / "front_desk.py").write_text("import json, pydantic, typing_extensions, some_library\n")
    (folder / "some_library.py").write_text(STOLEN)
    module = load_module(str(folder / "front_desk.py"))
    assert module.json is json
    assert module.pydantic is sys.modules["pydantic"]


def test_the_tools_of_workers_import_their_neighbours(folder: Path):
    """A worker's `tools.py` can import the modules beside it. A library can't."""
    (folder / "main.md").write_text("---\ntools: [book]\n---\nBook.\n")
    (folder / "tools.py").write_text(
        "import some_library\nfrom beside import WORD\n\ndef book() -> str:\n    '''Book.'''\n    return WORD\n"
    )
    registry = WorkerRegistry(folder)
    assert not list(registry.check())
    assert_out_of_reach(folder)


def test_two_folders_with_a_neighbour_of_one_name_do_not_share_it(tmp_path: Path, folder: Path):
    """`check` reports tools that would import another folder's module in place of their own, and names that folder."""
    for name in ("first", "second", "third"):
        made = tmp_path / name
        made.mkdir()
        (made / "tools.py").write_text("def book() -> str:\n    'Book.'\n    import shared_desk\n")
        (made / "main.md").write_text("---\ntools: [book]\n---\nBook.\n")
        if name != "third":
            (made / "shared_desk.py").write_text(f"NAME = {name!r}\n")
    first = load_file(tmp_path / "first" / "tools.py", "first_tools")
    assert not WorkerRegistry(tmp_path / "second").check()  # nothing is loaded under that name yet
    first.book()
    (problem,) = WorkerRegistry(tmp_path / "second").check()
    assert problem.file == str(tmp_path / "second" / "tools.py")
    assert f"line 3 imports 'shared_desk', but the 'shared_desk' in {tmp_path / 'first'}" in problem.problem
    assert not WorkerRegistry(tmp_path / "first").check()
    assert not WorkerRegistry(tmp_path / "third").check()  # it has no such module, so nothing is mixed up


def poison(file: Path) -> None:
    """Write bytecode that Python would take for the file's own, as a tool could."""
    facts = file.stat()
    head = importlib.util.MAGIC_NUMBER + struct.pack("<III", 0, int(facts.st_mtime), facts.st_size)
    stolen = marshal.dumps(compile(STOLEN, str(file), "exec"))
    cached = Path(importlib.util.cache_from_source(str(file)))
    cached.parent.mkdir(exist_ok=True)
    cached.write_bytes(head + stolen)


def test_bytecode_in_the_folder_is_not_run(folder: Path):
    """Bytecode that a model wrote to `__pycache__` does not run in place of a module, even one in a package."""
    (folder / "front_desk.py").write_text(APP + "import spaces.inner\n")
    (folder / "tools.py").write_text("def book() -> str:\n    '''Book.'''\n    return 'booked'\n")
    (folder / "main.md").write_text("---\ntools: [book]\n---\nBook.\n")
    (folder / "spaces").mkdir()
    (folder / "spaces" / "inner.py").write_text("")
    for file in (
        "front_desk",
        "tools",
        "beside",
        "beside_that",
        "pack/__init__",
        "pack/inner",
        "spaces/inner",
    ):
        poison(folder / f"{file}.py")
    module = load_module(str(folder / "front_desk.py"))
    assert (module.WORD, module.VALUE) == ("booked", "booked")
    assert not list(WorkerRegistry(folder).check())
    assert not list(folder.rglob("beside_later*.pyc"))  # no bytecode is written either


def test_a_neighbour_without_its_source_is_not_found(folder: Path):
    """Bytecode and compiled modules are not imported, even where Python would prefer them to a source file."""
    (folder / "front_desk.py").write_text("import beside_that\nimport compiled_desk\n")
    (folder / f"beside_that{EXTENSION_SUFFIXES[0]}").write_bytes(b"not even a library")
    (folder / "compiled_desk.pyc").write_bytes(b"")
    with pytest.raises(ModuleNotFoundError, match="compiled_desk"):
        load_file(folder / "front_desk.py", "front_desk")


def test_a_file_that_fails_leaves_no_trace(folder: Path):
    """An app that fails to load leaves no entry in `sys.modules`. A file that is not Python is refused."""
    (folder / "failing_desk.py").write_text("raise RuntimeError('not today')\n")
    with pytest.raises(RuntimeError, match="not today"):
        load_file(folder / "failing_desk.py", "failing_desk")
    assert "failing_desk" not in sys.modules
    with pytest.raises(ImportError, match="is not a Python file"):
        load_file(folder / "notes.txt", "notes")


@pytest.mark.parametrize("command", ["run", "runs", "serve"])
def test_commands_do_not_import_what_lies_in_the_current_folder(tmp_path: Path, command: str):
    """`run`, `runs` and `serve` import no file in the current folder that has the name of an optional module."""
    for name in (
        "brotli",
        "zstandard",
        "orjson",
        "h2",
        "socksio",
        "chardet",
        "uvloop",
        "sniffio",
        "colorama",
        "rich",
    ):
        (tmp_path / f"{name}.py").write_text(STOLEN)
    (tmp_path / "the_models.py").write_text(
        textwrap.dedent("""
        import os, sys
        from handrail import ScriptedModel
        assert os.getcwd() not in sys.path
        model = ScriptedModel(lambda request: "Hello.")
        """)
    )
    (tmp_path / "main.md").write_text("---\n---\nHelp.\n")
    words = {
        "run": ("run", "main.md", "Hello?", "--model", "the_models:model", "-q"),
        "runs": ("runs", "list"),
        "serve": ("serve", "nowhere_at_all.py", "--model", "the_models:model"),
    }
    done = handrail(*words[command], cwd=tmp_path)
    assert "what a model wrote has run" not in done.stderr
    assert done.returncode == {"run": 0, "runs": 2, "serve": 2}[command], done.stderr
