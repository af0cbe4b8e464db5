"""Imports: of a package's own names on first use, and from an app's folder, without putting the folder on `sys.path`.

Every library can import what is on `sys.path`, and many try to import an optional module, such as `brotli`. Tools may
be allowed to write to an app's folder. If the folder were on `sys.path`, a file in it with such a name would run in the
next process. To prevent that, the modules beside an app are found only by imports in the app itself or in one of these
modules. They never shadow an installed module or one from the standard library.

Such a module has its plain name in `sys.modules`, because records refer to its types by that name. So two apps in one
process can't have different modules with the same name. The second app's import is refused.

The modules beside an app are loaded from source only. Python would prefer the bytecode in `__pycache__`, or a
compiled module of the same name, and a diff does not show what those do.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextvars import ContextVar
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any


def names_on_first_use(
    package: str,
    homes: Mapping[str, str],
    explain: Callable[[str, str], Exception | None] = lambda missing, home: None,
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose names are imported when they are first used.

    `homes` has the names in each of the package's modules, separated by spaces. `explain` takes the name of a package that is not
    installed and the module that needs it, and returns the error to raise instead; None for the original error.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"{package}.{home}"), name)
        except ModuleNotFoundError as error:
            explained = explain((error.name or "").partition(".")[0], home)
            if explained is None:
                raise
            raise explained from None

    return load


_wanted: ContextVar[str] = ContextVar("the app that is being imported by name", default="")
_importing: ContextVar[bool] = ContextVar("whether an app is being imported", default=False)


class _SourceLoader(SourceFileLoader):
    """Loads a module from its source, and neither reads nor writes its bytecode."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        # Under `python -OO` too, because docstrings describe tools to models.
        code = compile(source, path, "exec", dont_inherit=True, optimize=min(sys.flags.optimize, 1))
        _finder.check_imports(fullname, path, source)
        return code


def _sources_in(folder: str) -> FileFinder:
    return FileFinder(folder, (_SourceLoader, SOURCE_SUFFIXES))


class _Neighbours:
    """Finds apps by name, and lets the modules in an app's folder import each other.

    It is the last finder in `sys.meta_path`.
    """

    def __init__(self) -> None:
        self.searched: dict[str, None] = {}
        """The folders that are searched for an app by name."""
        self.homes: dict[str, str] = {}
        """The app folder in which each top-level module was found."""
        self.packages: dict[str, None] = {}
        """The folders of packages that were found in an app folder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None:
            return None  # modules inside a package are found through `find_in_package`
        home = self.homes.get(_importer())
        folders = [*self.searched] if fullname == _wanted.get() else [] if home is None else [home]
        for folder in folders:
            spec = _sources_in(folder).find_spec(fullname, target)
            if spec is not None:
                self.homes[fullname] = folder
                for package in spec.submodule_search_locations or ():
                    self.packages[package] = None
                    sys.path_importer_cache.pop(package, None)
                return spec
        return None

    def check_imports(self, importer: str, path: str, source: bytes) -> None:
        """Raise `ImportError` if a module imports a neighbour whose name belongs to a loaded module from another app folder."""
        home = self.homes.get(importer.partition(".")[0])
        if home is None:
            return
        for name, line in _imported_names(source):
            other = self.homes.get(name)
            if other in (None, home) or name not in sys.modules:
                continue
            own = _sources_in(home).find_spec(name)
            if own is not None and getattr(sys.modules[name], "__file__", None) != own.origin:
                raise ImportError(
                    f"line {line} imports {name!r}, but the {name!r} in {other} is already loaded. "
                    "Rename one of the two modules, or load the folders in different processes",
                    name=name,
                    path=path,
                )

    def find_in_package(self, folder: str) -> FileFinder:
        """Return a finder for a folder of a package that was loaded from an app folder. This is one of `sys.path_hooks`.

        Raises `ImportError` for any other folder, as a path hook must.
        """
        if any(folder == package or folder.startswith(package + os.sep) for package in self.packages):
            return _sources_in(folder)
        raise ImportError(f"{folder} is not a neighbour", path=folder)


_finder = _Neighbours()


def _imported_names(source: bytes) -> Iterator[tuple[str, int]]:
    """Yield the top-level name and the line of each absolute import in a module, including imports inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield each.name.partition(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0], node.lineno


def _importer() -> str:
    """Return the top-level name of the module that contains the current import; "" if there is none."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # nothing else shows which module imports
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name != "importlib" and frame.f_globals is not globals():
            return name
        frame = frame.f_back
    return ""


def _install() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)
    if _finder.find_in_package not in sys.path_hooks:
        sys.path_hooks.insert(0, _finder.find_in_package)


def search(folder: Path) -> None:
    """Add a folder that is searched for apps by name."""
    _install()
    _finder.searched[os.path.realpath(folder)] = None


@contextlib.contextmanager
def _wanting(name: str) -> Generator[None]:
    token = _wanted.set(name.partition(".")[0])
    try:
        yield
    finally:
        _wanted.reset(token)


def import_app(name: str) -> ModuleType:
    """Import a user's module by name, from the installed packages or from the folders added by `search`."""
    with _wanting(name), _app_importing():
        return importlib.import_module(name)


def find_app(name: str) -> ModuleSpec | None:
    """Return the spec of a user's module by name; None if there is no such module. Nothing is imported."""
    with _wanting(name):
        return find_module(name)


def find_module(name: str) -> ModuleSpec | None:
    """Return the spec of a module that an `import` statement would find; None if there is none. Nothing is imported."""
    top, *parts = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # the module was created without a spec
        return None
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec


def is_importing() -> bool:
    """Return whether an app, or the `tools.py` of workers, is being imported, so that its own code is running."""
    return _importing.get()


@contextlib.contextmanager
def _app_importing() -> Generator[None]:
    token = _importing.set(True)
    try:
        yield
    finally:
        _importing.reset(token)


def is_neighbour(name: str) -> bool:
    """Return whether a top-level module was found in an app's folder."""
    return name in _finder.homes


def load_file(path: Path, name: str) -> ModuleType:
    """Import a file as a module with this name, and return it. The module can import others from the file's folder.

    Raises `ImportError` if it is not a Python file. If the import fails, the previous module of this name, if any, is
    restored.
    """
    loader = _SourceLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or path.suffix not in SOURCE_SUFFIXES:
        raise ImportError(f"{path} is not a Python file", name=name, path=str(path))
    _install()
    module = importlib.util.module_from_spec(spec)
    before, home = sys.modules.get(name), _finder.homes.get(name)
    sys.modules[name] = module  # annotations are resolved through `sys.modules`
    _finder.homes[name] = os.path.realpath(path.parent)
    try:
        with _app_importing():
            loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name)
        _finder.homes.pop(name)
        if before is not None:
            sys.modules[name] = before
        if home is not None:
            _finder.homes[name] = home
        raise
    return module
