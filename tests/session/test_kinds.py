"""A recorded type name leads only to types that are declared, or that belong to Handrail, to an app or to a plugin."""

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Iterator
from importlib.util import LazyLoader, find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

import pytest
from pydantic_core import to_json

from handrail import Adapter, MemoryJournal, Prompt, Session, ToolContext, kept, tool
from handrail.errors import EventRefused, SessionError
from handrail.models.scripted import ScriptedModel
from handrail.session import SliceRules, check_serialisable
from handrail.session.serialization import decode_item, encode_item, load_imported, save
from handrail.session.slices import kind_named
from support.recorded import call

_SOURCE = """
import dataclasses
from pydantic import BaseModel, ImportString

@dataclasses.dataclass(frozen=True)
class Event:
    what: ImportString

class Other(BaseModel, frozen=True):
    what: str

made = []

def __getattr__(name):
    made.append(name)
    return Event
"""


@dataclasses.dataclass(frozen=True)
class Note:
    """An event of an app, in a module of its own."""

    text: str


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    """A folder of installed packages, on `sys.path`."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def package(folder: Path, name: str, source: str = _SOURCE) -> ModuleType:
    (folder / f"{name}.py").write_text(source)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def item(name: str, value: object) -> bytes:
    return json.dumps({"type": name, "item": value}).encode()


@pytest.mark.parametrize(
    "name",
    [
        "pydantic.ImportString",
        "pydantic.types.ImportString",
        "pydantic.types.FilePath",
        "pydantic.types.Json",
        "pathlib.Path",
        "subprocess.Popen",
        "subprocess.CompletedProcess",
        "logging.FileHandler",
        "builtins.type",
        "builtins.memoryview",
        "handrail.resources.directory.DirectoryFilesystem",
        "handrail.journal.sqlite.SqliteJournal",
        "handrail.fleet.submission.Submission",
        "msgspec.Struct",
        "",
        ".",
        "..Note",
    ],
)
def test_no_type_is_found_by_name_that_is_not_an_items_type(name: str):
    """Types of libraries, and Handrail's own classes that are no facts or records, are not found, even if they are imported."""
    assert kind_named(name) is None
    with pytest.raises(SessionError, match="unknown type"):
        decode_item(item(name, "antigravity"), "s")


def test_an_item_typed_as_an_import_imports_nothing():
    """An item whose recorded type is pydantic's `ImportString` is refused, and the module that it names is not imported."""
    sys.modules.pop("this", None)
    for name in ("pydantic.ImportString", "pydantic.types.ImportString", f"{__name__}.ImportString"):
        with pytest.raises(SessionError, match="unknown type"):
            decode_item(item(name, "this"), "s")
    saved = json.loads(save(Session(id="s")))
    saved["slices"]["pydantic.types.ImportString"] = {"kind": "state", "keyed": False, "items": ["this"]}
    with pytest.raises(SessionError, match="unknown types"):
        load_imported(to_json(saved))
    assert "this" not in sys.modules


def test_the_events_of_an_app_are_found(installed: Path, tmp_path: Path):
    """A data class needs no declaration in a module that is not installed, or in an installed package that imports Handrail."""
    assert decode_item(encode_item(Note("a"), "s"), "s") == Note("a")
    plugin = package(installed, "a_plugin", "from handrail import tool\n" + _SOURCE)
    other = plugin.Other(what="x")
    assert decode_item(encode_item(other, "s"), "s") == other


def test_the_types_of_another_installed_package_must_be_declared(installed: Path):
    """A type of an installed package is refused when it is dispatched in a recorded run, and by name, until code declares it."""
    library = package(installed, "a_library")
    event = library.Other(what="x")
    with pytest.raises(EventRefused, match="installed package"):
        check_serialisable(event)
    with pytest.raises(SessionError, match="installed package"):
        encode_item(event, "s")
    assert kind_named("a_library.Other") is None
    kept()(library.Other)
    check_serialisable(event)
    assert decode_item(encode_item(event, "s"), "s") == event
    assert kind_named("a_library.Event") is None
    Session(slices={library.Event: SliceRules()})
    assert kind_named("a_library.Event") is library.Event


@pytest.mark.parametrize("marker", ["a_vendored-1.0.dist-info", ""])
def test_a_folder_with_installed_packages_may_have_any_name(tmp_path: Path, installed: Path, marker: str):
    """Packages that were installed into a folder of another name are installed packages too."""
    folder = tmp_path / "vendored"
    folder.mkdir()
    if marker:
        (folder / marker).mkdir()
    sys.path.insert(0, str(folder))
    try:
        vendored = package(folder, "a_vendored")
    finally:
        sys.path.remove(str(folder))
    assert (kind_named("a_vendored.Other") is None) == bool(marker)
    assert vendored.made == []


def test_a_name_calls_nothing_and_loads_nothing(tmp_path: Path):
    """A name is looked up without a module's `__getattr__`, and without loading a module that is still to be loaded."""
    app = tmp_path / "an_app.py"
    app.write_text(_SOURCE)
    sys.path.insert(0, str(tmp_path))
    try:
        module = importlib.import_module("an_app")
        (tmp_path / "a_lazy.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
        importlib.invalidate_caches()
        spec = find_spec("a_lazy")
        assert spec is not None
        assert spec.loader is not None
        spec.loader = LazyLoader(spec.loader)
        sys.modules["a_lazy"] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules["a_lazy"])
        for name in (
            "an_app.Missing",
            "an_app.ImportString",
            "an_app.BaseModel",
            "a_lazy.Thing",
            "a_lazy.os.stat",
        ):
            assert kind_named(name) is None
        assert module.made == []
        assert not os.path.exists(tmp_path / "ran")
    finally:
        sys.path.remove(str(tmp_path))
        for name in ("an_app", "a_lazy"):
            sys.modules.pop(name, None)


async def test_an_event_of_a_library_is_refused_in_a_recorded_run(installed: Path):
    """The refusal comes with the dispatch, not when the run is resumed."""
    library = package(installed, "a_library")

    @tool(effect="pure")
    def mark(context: ToolContext) -> str:
        """Mark."""
        context.session.dispatch(library.Other(what="x"))
        return "marked"

    model = ScriptedModel([call("mark"), "end"])
    response = await Adapter(model, journal=MemoryJournal()).evaluate(Prompt("p", "Do.", tools=[mark]), "go")
    assert response.text == "end"
    assert library.Other not in response.session.state
