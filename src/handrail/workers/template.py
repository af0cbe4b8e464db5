"""A worker's instructions: Jinja in a sandbox, of which only what needs little is taken.

Texts, values, `if`, `for` over a few things, and some filters. Nothing can be called but `range`, nothing
assigned, defined, included or imported, so what a template costs can be seen from its text; a model may
write one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from handrail.errors import WorkerError
from handrail.workers.extra import needed
from handrail.workers.problem import Finder, WorkerProblem, refuse

NAMES = ("input", "attachments", "worker")
"""What a template may speak of: the input, the names of the attachments, and the worker's name."""
MOST_OUTPUT = 200_000
MOST_ROUNDS = 10_000
"""Rounds of all loops of one rendering together."""
_DEEPEST_LOOPS = 3

_ALLOWED = frozenset(
    [
        "Template",
        "Output",
        "TemplateData",
        "Name",
        "Const",
        "Getattr",
        "Getitem",
        "If",
        "For",
        "CondExpr",
        "Compare",
        "Operand",
        "And",
        "Or",
        "Not",
        "Neg",
        "Filter",
        "Test",
        "List",
        "Tuple",
        "Call",
        "Keyword",
    ]
)
_FILTERS = frozenset(
    [
        "upper",
        "lower",
        "title",
        "capitalize",
        "trim",
        "length",
        "count",
        "first",
        "last",
        "default",
        "tojson",
        "truncate",
        "join",
    ]
)
_TESTS = frozenset(
    ["defined", "none", "string", "number", "sequence", "odd", "even", "equalto", "eq", "ne", "in"]
)


class Instructions:
    """A template that was read and may be rendered."""

    def __init__(self, source: str, file: str, first_line: int) -> None:
        self._file = file
        self._first = first_line
        self._text = source
        # Lines before it are empty ones here, so that Jinja's own count is the file's.
        self._source = "\n" * (first_line - 1) + source
        self._template: Any = None

    def check(self, find: Finder) -> None:
        """Say everything that is wrong with it, each with its line."""
        jinja = needed("jinja2")
        try:
            tree = _environment().parse(self._source)
            found = list(_Check(tree).problems())
            for line, problem, mend in found:
                find.add(max(line, self._first), problem, mend)
            if not found:
                self._compiled()
        except jinja.TemplateSyntaxError as error:
            find.add(error.lineno or self._first, f"the template can't be read: {error.message}", _BRACES)
        except (RecursionError, MemoryError, SyntaxError):
            find.add(self._first, "the template is nested too deeply", "Make it flatter.")

    def render(self, values: Mapping[str, Any]) -> str:
        """The text, or `WorkerError` with the file and the line at which it went wrong."""
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._compiled().generate({**values, "range": _Rounds()}):
                size += len(piece)
                if size > MOST_OUTPUT:
                    raise ValueError(f"it comes to more than {MOST_OUTPUT} characters")
                pieces.append(piece)
        except Exception as error:
            mend = "Correct the template."
            raise refuse(
                [WorkerProblem(self._file, self._line_of(error), f"the template fails: {error}", mend)]
            ) from error
        return "".join(pieces).lstrip("\n")

    def _compiled(self) -> Any:
        if self._template is None:
            environment = _environment()
            code = environment.compile(self._source, filename=self._file)
            self._template = needed("jinja2").Template.from_code(environment, code, environment.globals)
        return self._template

    def _line_of(self, error: BaseException) -> int:
        line, traceback = self._first, error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == self._file:
                line = traceback.tb_lineno
            traceback = traceback.tb_next
        return line


_BRACES = "Values stand in {{ }}, blocks in {% %}; write {{ '{{' }} for the braces themselves."


class _Rounds:
    """`range`, with an end to all of them together."""

    def __init__(self) -> None:
        self._left = MOST_ROUNDS

    def __call__(self, *bounds: int) -> Iterator[int]:
        for number in range(*bounds):
            self._left -= 1
            if self._left < 0:
                raise ValueError(f"its loops take more than {MOST_ROUNDS} rounds")
            yield number


class _Check:
    """Finds what a template may not have."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def problems(self) -> Iterator[tuple[int, str, str]]:
        yield from self._walk(self._tree, frozenset(NAMES), 0)

    def _walk(self, node: Any, names: frozenset[str], loops: int) -> Iterator[tuple[int, str, str]]:
        kind = type(node).__name__
        line = int(getattr(node, "lineno", 1) or 1)
        if kind not in _ALLOWED:
            yield (
                line,
                f"the template uses {kind!r}, which is not taken here",
                "Write it with text, if and for.",
            )
            return
        if kind == "Name" and node.name not in names:
            mend = f"There are {', '.join(map(repr, NAMES))}."
            yield line, f"the template speaks of {node.name!r}, which is not there", mend
        elif kind == "Filter" and node.name not in _FILTERS:
            yield (
                line,
                f"the filter {node.name!r} is not taken here",
                f"There are {', '.join(sorted(_FILTERS))}.",
            )
        elif kind == "Test" and node.name not in _TESTS:
            yield line, f"the test {node.name!r} is not taken here", f"There are {', '.join(sorted(_TESTS))}."
        elif kind == "Call":
            if type(node.node).__name__ != "Name" or node.node.name != "range" or node.kwargs:
                yield line, "the template calls something", "Only `range(...)` can be called, in a `for`."
                return
            yield from self._each(node.args, names, loops)
        elif kind == "For":
            yield from self._for(node, line, names, loops)
        else:
            yield from self._each(node.iter_child_nodes(), names, loops)
            return
        if kind in ("Filter", "Test"):
            yield from self._each(node.iter_child_nodes(), names, loops)

    def _for(self, node: Any, line: int, names: frozenset[str], loops: int) -> Iterator[tuple[int, str, str]]:
        over = type(node.iter).__name__
        plain = over in ("Call", "List", "Tuple") or (over == "Name" and node.iter.name == "attachments")
        if not plain:
            yield line, "a loop goes over something large", "Loop over `attachments`, `range(...)` or a list."
        if loops >= _DEEPEST_LOOPS or node.recursive:
            yield line, f"loops are nested more than {_DEEPEST_LOOPS} deep", "Make it flatter."
        yield from self._walk(node.iter, names, loops)
        targets = [node.target] if type(node.target).__name__ == "Name" else list(node.target.items)
        inside = names | {target.name for target in targets if type(target).__name__ == "Name"} | {"loop"}
        parts = [*node.body, *node.else_, *([node.test] if node.test is not None else [])]
        yield from self._each(parts, frozenset(inside), loops + 1)

    def _each(
        self, nodes: Iterable[Any], names: frozenset[str], loops: int
    ) -> Iterator[tuple[int, str, str]]:
        for node in nodes:
            yield from self._walk(node, names, loops)


def _join(values: Any, separator: str = "") -> str:
    if isinstance(values, str) or not isinstance(values, list | tuple):
        raise ValueError("`join` takes a list, such as `attachments`")
    return str(separator).join(map(str, values))  # pyright: ignore[reportUnknownArgumentType]  # of anything


def _truncate(value: Any, length: int = 255) -> str:
    text = str(value)
    return text if len(text) <= length else f"{text[:length]}…"


def _tojson(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@lru_cache(maxsize=1)
def _environment() -> Any:
    jinja = needed("jinja2")
    sandbox = needed("jinja2.sandbox")
    made = sandbox.ImmutableSandboxedEnvironment(
        undefined=jinja.StrictUndefined, autoescape=False, keep_trailing_newline=False, trim_blocks=True
    )
    made.globals.clear()
    own = {"join": _join, "truncate": _truncate, "tojson": _tojson}
    made.filters = {name: own.get(name, made.filters[name]) for name in _FILTERS}
    made.tests = {name: made.tests[name] for name in _TESTS if name in made.tests}
    return made


def rendered(instructions: Instructions, name: str, input: str, attachments: Iterable[str]) -> str:
    """A worker's instructions for one run."""
    text = instructions.render({"input": input, "attachments": tuple(attachments), "worker": name})
    if not text.strip():
        raise WorkerError(
            f"the instructions of the worker {name!r} come to nothing. Write some below its front matter."
        )
    return text
