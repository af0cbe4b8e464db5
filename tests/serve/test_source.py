"""Tests for files that the server loads as modules. Such a file never replaces another module."""

from __future__ import annotations

import calendar
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handrail.errors import DefinitionError
from handrail.serve.sources import load

APP = '''"""A desk."""
from __future__ import annotations
from dataclasses import dataclass
from handrail import Adapter, Prompt, ScriptedModel, tool
from beside import WORD

@dataclass
class Order:
    seats: int

@tool
async def book(order: Order) -> str:
    """Book."""
    return WORD

prompt = Prompt("desk", "Help.", tools=[book])
adapter = Adapter(ScriptedModel(lambda request: "hello"))
'''


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Fixture: a folder with a module for the app to import. Modules that the test imports are removed afterwards."""
    modules, places = dict(sys.modules), list(sys.path)
    (tmp_path / "beside.py").write_text('WORD = "booked"\n')
    yield tmp_path
    sys.path[:] = places
    for name in sys.modules.keys() - modules.keys():
        del sys.modules[name]
    sys.modules.update(modules)


def app_of(path: Path) -> Any:
    return load(str(path)).source


@pytest.mark.parametrize("name", ["json", "calendar", "this", "handrail", "pydantic", "__main__", "sys"])
def test_a_file_called_like_another_module_leaves_it_alone(folder: Path, name: str):
    """A served file does not replace a module of the same name, even one that is not imported yet, such as `this`."""
    path = folder / f"{name}.py"
    path.write_text(APP)
    before = sys.modules.get(name)
    first, again = app_of(path), app_of(path)
    assert sys.modules.get(name) is before
    assert first.name == "desk"
    assert first.app == again.app, "the file has another name after it is loaded again"
    assert first.app.startswith(f"handrail_app_{name}_")
    assert (importlib.import_module("json"), importlib.import_module("calendar")) == (json, calendar)
    found = importlib.util.find_spec(name) if name != "__main__" else None
    assert found is None or found.origin != str(path)


def test_two_files_of_such_a_name_are_two_apps(folder: Path):
    apps: list[str] = []
    for place in ("one", "two"):
        (folder / place).mkdir()
        (folder / place / "json.py").write_text(APP.replace("from beside import WORD", "WORD = ''"))
        apps.append(app_of(folder / place / "json.py").app)
    assert len(set(apps)) == 2


def test_any_other_file_is_called_as_it_is_imported(folder: Path):
    """A file that shares its name with no other module keeps that name, so that resumed runs find the same types."""
    (folder / "front_desk.py").write_text(APP)
    assert app_of(folder / "front_desk.py").app == "front_desk:prompt"
    assert app_of(folder / "front_desk.py").app == "front_desk:prompt", (
        "the file has another name after it is loaded again"
    )
    assert importlib.import_module("front_desk").Order.__module__ == "front_desk"


@pytest.mark.parametrize("name", ["front_desk", "json"])
def test_a_file_that_can_not_be_loaded_leaves_nothing(folder: Path, name: str):
    path = folder / f"{name}.py"
    path.write_text("from handrail import Prompt\nraise RuntimeError('not today')\n")
    modules, places = dict(sys.modules), list(sys.path)
    with pytest.raises(DefinitionError, match="not today"):
        app_of(path)
    assert (dict(sys.modules), sys.path) == (modules, places)
    with pytest.raises(DefinitionError, match="there is no file"):
        app_of(folder / f"no_{name}.py")
