"""`Functions`: the functions and tools in the `tools.py` beside the workers.

Each worker gets the ones that its file lists.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import msgspec

from handrail.errors import DefinitionError
from handrail.imports import load_file
from handrail.tools import Tool, tool
from handrail.tools.definition import is_name
from handrail.workers.front_matter import Finder, line_in

_loaded = itertools.count(1)


class Definition(msgspec.Struct, frozen=True):
    """A function or tool of `tools.py`, and the line on which it is defined."""

    value: Any
    line: int
    earlier: tuple[int, ...] = ()
    """The lines of the other definitions of the same name."""
    certain: bool = True
    """Whether this is certainly a function or tool. The source alone does not say that of what a call returns."""


class Functions:
    """The functions and tools in a folder's `tools.py`.

    The file is loaded once, on first use, as a module with a unique name. Without the file, there are no functions.
    """

    note = ""
    """A sentence for the report of a name that is not defined."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tools.py"
        self._found: Mapping[str, Definition] | None = None
        self._tools: dict[str, Tool[Any, Any]] = {}
        self._load_problem = Finder(self.path)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the functions and tools that a worker's file can list."""
        return tuple(name for name, found in self._definitions().items() if found.certain)

    def defines(self, name: str) -> bool:
        """Return whether a worker's file can list this name."""
        return name in self._definitions()

    def problems(self) -> Finder:
        """Load `tools.py`, unless it has been loaded already, and return the problems with loading it."""
        self._definitions()
        return self._load_problem

    def line_of(self, name: str) -> int:
        found = self._definitions().get(name)
        return 1 if found is None else found.line

    def lines_of(self, name: str) -> tuple[int, ...]:
        """Return the lines on which a name is defined. If there are several, the name is ambiguous."""
        found = self._definitions()[name]
        return tuple(sorted((*found.earlier, found.line)))

    def tool(self, name: str, find: Finder) -> Tool[Any, Any] | None:
        """Return the function or tool with this name, as a tool.

        If it can't be a tool, reports why to `find` and returns None.
        """
        if name not in self._tools:
            defined = self._definitions()[name].value
            try:
                made: Tool[Any, Any] = cast("Any", defined if isinstance(defined, Tool) else tool(defined))
                made.check_complete()
                self._tools[name] = made
            except DefinitionError as error:
                at = Finder(self.path)
                at.add(self.line_of(name), *error.parts)
                find.problems += at.problems
                return None
        return self._tools[name]

    def _definitions(self) -> Mapping[str, Definition]:
        if self._found is None:
            self._found = {} if not self.path.is_file() else self._load()
        return self._found

    def _load(self) -> Mapping[str, Definition]:
        digest = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:12]
        name = f"handrail_worker_tools_{digest}_{next(_loaded)}"
        try:
            return _defined_in(load_file(self.path, name), self.path)
        except SyntaxError as error:
            self._load_problem.add(error.lineno or 1, f"it is not Python: {error.msg}", "Correct it.")
        except (Exception, SystemExit) as error:
            said = f"it can't be loaded: {type(error).__name__}: {error}"
            self._load_problem.add(line_in(self.path, error), said, "Correct it.")
        return {}


class ParsedFunctions(Functions):
    """The functions and tools in a folder's `tools.py`, as its source names them.

    Nothing in the file runs. So the tools have no handlers, and problems that only show when it runs are not found.
    """

    note = " What tools.py creates in other ways than `def` and `name = ...(...)` is found only if it runs."

    def _load(self) -> Mapping[str, Definition]:
        try:
            return _named_in(ast.parse(self.path.read_bytes()))
        except (SyntaxError, ValueError, RecursionError) as error:
            line = error.lineno if isinstance(error, SyntaxError) else None
            said = error.msg if isinstance(error, SyntaxError) else error
            self._load_problem.add(line or 1, f"it is not Python: {said}", "Correct it.")
        return {}

    def tool(self, name: str, find: Finder) -> Tool[Any, Any] | None:
        if name not in self._tools:
            self._tools[name] = Tool(name, f"The tool {name}.", params={"type": "object"}, result=Any)
        return self._tools[name]


def _named_in(tree: ast.Module) -> Mapping[str, Definition]:
    """Return the functions and tools that a module's source defines, by name, without their values."""
    found: dict[str, Definition] = {}
    names, ahead = _Names(tree), list[ast.AST](reversed(tree.body))
    while ahead:
        node = ahead.pop()
        if isinstance(node, _FUNCTION):
            given = [_name_given(each) for each in node.decorator_list]
            name = next(filter(None, given), node.name)
            if node.decorator_list or name[0] != "_":
                line = _first_line(node)
                found[name] = Definition(None, line, names.defined_before(node.name, line))
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            called = {each.id for each in targets if isinstance(each, ast.Name)}
            for name in filter(is_name, (*called, _name_given(node.value))):
                found.setdefault(name, Definition(None, node.lineno, certain=False))
        elif not isinstance(node, ast.ClassDef | ast.expr):
            ahead += reversed([*ast.iter_child_nodes(node)])
    return found


def _name_given(node: ast.expr) -> str:
    """Return the name that a call is given, as in `tool(name="x")` or `Tool("x", ...)`; "" if it is given none."""
    if not isinstance(node, ast.Call):
        return ""
    named = [each.value for each in node.keywords if each.arg == "name"] or node.args[:1]
    return next((str(each.value) for each in named if isinstance(each, ast.Constant)), "")


def _defined_in(module: ModuleType, path: Path) -> Mapping[str, Definition]:
    """Return a module's own tools and public functions, by name. Imported ones are left out.

    A tool that the module creates is its own, even if the tool's handler is defined elsewhere, as with a `Handoff`.
    """
    found: dict[str, Definition] = {}
    names = _Names(ast.parse(path.read_bytes()))
    for name, value in vars(module).items():
        if isinstance(value, Tool):
            made = cast("Tool[Any, Any]", value)
            function: Any = getattr(made, "function", None) or made.handler
            is_here = function is not None and _home(function) == module.__name__
            if is_here or not names.imports(name, made):
                line = names.lines.get(name) or (_line_of(function) if is_here else 1)
                _add(found, made.name, Definition(made, line, names.defined_before(name, line)))
        elif inspect.isfunction(value) and value.__name__ == name and _is_own(value, module):
            line = _line_of(value)
            _add(found, name, Definition(value, line, names.defined_before(name, line)))
    return found


def _add(found: dict[str, Definition], name: str, made: Definition) -> None:
    before = found.get(name)
    if before is None:
        found[name] = made
    elif before.value is not made.value:
        found[name] = msgspec.structs.replace(made, earlier=(*made.earlier, *before.earlier, before.line))


class _Names(ast.NodeVisitor):
    """The names that a module's statements bind at the top level, outside its functions and classes."""

    def __init__(self, tree: ast.Module) -> None:
        self.lines: dict[str, int] = {}
        """The line on which each assigned name is last assigned."""
        self._imported: set[str] = set()
        self._starred: set[str] = set()
        self._functions = [
            each for each in tree.body if isinstance(each, _FUNCTION) and not _is_overload(each)
        ]
        self.visit(tree)

    def imports(self, name: str, value: object) -> bool:
        """Return whether an import binds this name to this value."""
        return (name in self._imported and name not in self.lines) or any(
            vars(sys.modules[module]).get(name) is value for module in self._starred if module in sys.modules
        )

    def defined_before(self, name: str, line: int) -> tuple[int, ...]:
        """Return the lines of the earlier functions with this name that the one on `line` replaces.

        Only unconditional definitions at the top level count.
        """
        lines = [_first_line(each) for each in self._functions if each.name == name]
        return tuple(each for each in lines if each < line) if line in lines else ()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._imported |= {each.asname or each.name for each in node.names}
        if any(each.name == "*" for each in node.names):
            self._starred.add(node.module or "")

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.lines[node.id] = node.lineno

    def visit_FunctionDef(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
    ) -> None:
        """Skip the node, because names inside it are not the module's."""

    visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = visit_FunctionDef


_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the line of a function's first decorator, or of its `def`, like `co_firstlineno`."""
    return min(each.lineno for each in (node, *node.decorator_list))


def _is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a definition has the decorator `overload`."""
    return any(ast.unparse(each).rpartition(".")[2] == "overload" for each in node.decorator_list)


def _line_of(function: Any) -> int:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return 1 if code is None else int(code.co_firstlineno)


def _is_own(function: Any, module: ModuleType) -> bool:
    name = function.__name__
    return is_name(name) and name[0] != "_" and function.__module__ == module.__name__ == _home(function)


def _home(function: Any) -> str:
    """Return the name of the module that contains a function's code, regardless of wrappers around it."""
    body = inspect.unwrap(function)
    namespace: Mapping[str, Any] = getattr(body, "__globals__", {})
    return str(namespace.get("__name__", getattr(body, "__module__", "")))
