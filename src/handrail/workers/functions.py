"""`Functions`: the functions and tools in the `tools.py` beside the workers.

Each worker gets the ones that its file lists.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from handrail.errors import DefinitionError
from handrail.neighbours import load_file
from handrail.tools import Tool, tool
from handrail.tools.checks import is_name
from handrail.workers.front_matter import Finder

_loaded = itertools.count(1)


class Functions:
    """The functions and tools in a folder's `tools.py`, which is loaded once, as a module with a unique name."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tools.py"
        self._found: Mapping[str, Any] | None = None
        self._tools: dict[str, Tool[Any, Any]] = {}
        self._load_problem = Finder(self.path)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a worker's file can list."""
        return tuple(self._definitions())

    def problems(self) -> Finder:
        """Return the problems that prevent `tools.py` from being loaded."""
        self._definitions()
        return self._load_problem

    def line_of(self, name: str) -> int:
        function: Any = self._definitions().get(name)
        if isinstance(function, Tool):
            made: Any = cast("Any", function)
            function = getattr(made, "function", None) or made.handler
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        return 1 if code is None else int(code.co_firstlineno)

    def tool(self, name: str, find: Finder) -> Tool[Any, Any] | None:
        """Return the function or tool with this name, as a tool.

        If it can't be a tool, reports why to `find` and returns None.
        """
        if name not in self._tools:
            defined = self._definitions()[name]
            try:
                self._tools[name] = cast("Any", defined if isinstance(defined, Tool) else tool(defined))
            except DefinitionError as error:
                at = Finder(self.path)
                at.add(self.line_of(name), *error.parts)
                find.problems += at.problems
                return None
        return self._tools[name]

    def _definitions(self) -> Mapping[str, Any]:
        if self._found is None:
            self._found = {} if not self.path.is_file() else self._load()
        return self._found

    def _load(self) -> Mapping[str, Any]:
        digest = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:12]
        name = f"handrail_worker_tools_{digest}_{next(_loaded)}"
        try:
            return _defined_in(load_file(self.path, name))
        except SyntaxError as error:
            self._load_problem.add(error.lineno or 1, f"it is not Python: {error.msg}", "Correct it.")
        except (Exception, SystemExit) as error:
            said = f"it can't be loaded: {type(error).__name__}: {error}"
            self._load_problem.add(_line_in(self.path, error), said, "Correct it.")
        return {}


def _defined_in(module: ModuleType) -> Mapping[str, Any]:
    """Return a module's own tools and public functions, by name. Imported ones are left out."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, Tool):
            made = cast("Tool[Any, Any]", value)
            function: Any = getattr(made, "function", None) or made.handler
            if function is not None and _home(function) == module.__name__:
                found[made.name] = made
        elif inspect.isfunction(value) and value.__name__ == name and _is_own(value, module):
            found[name] = value
    return found


def _is_own(function: Any, module: ModuleType) -> bool:
    name = function.__name__
    return is_name(name) and name[0] != "_" and function.__module__ == module.__name__ == _home(function)


def _home(function: Any) -> str:
    """Return the name of the module that contains a function's code, whatever a wrapper claims."""
    body = inspect.unwrap(function)
    namespace: Mapping[str, Any] = getattr(body, "__globals__", {})
    return str(namespace.get("__name__", getattr(body, "__module__", "")))


def _line_in(path: Path, error: BaseException) -> int:
    line, traceback = 1, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == str(path):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
