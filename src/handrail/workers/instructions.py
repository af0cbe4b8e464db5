"""`Instructions`: a worker's Jinja template, rendered in a sandbox that limits its work.

A model may write a template, so little is allowed: text, values, `if`, short `for` loops, some filters and some tests.
Only `range` can be called, and only for a loop to iterate over. Values can be compared and negated, but there is no
other arithmetic. Nothing can be assigned, defined, included or imported. Lists contain only constants, so that they
can't multiply the work. Loops, `in`, and filters that process text are metered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, cast

from handrail.errors import WorkerError
from handrail.workers.front_matter import Finder, WorkerProblem, line_in, needed, refuse

NAMES = ("input", "attachments", "worker")
"""The variables that a template may use."""
MOST_OUTPUT = 200_000
MOST_ROUNDS = 10_000
"""Maximum number of loop iterations in one rendering."""
MOST_WORK = 20_000_000
"""Maximum work of loops, `in` and text filters in one rendering, counted in characters."""
MOST_WORDS = 10_000
"""Maximum number of tokens in a template, such as names, operators and braces. Text outside braces is not counted."""
_DEEPEST_LOOPS = 3
_METER = "a meter"
"""The meter's name in the template's context. Templates can't use it, because it is not a valid identifier."""
_A_STEP = 10
"""The work of one loop iteration, in characters, for each node inside the loop."""

ALLOWED = frozenset(
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
FILTERS = frozenset(
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
TESTS = frozenset(
    ["defined", "none", "string", "number", "sequence", "odd", "even", "equalto", "eq", "ne", "in"]
)


class Instructions:
    """A worker's template, which can be checked and rendered."""

    def __init__(self, source: str, file: str, first_line: int) -> None:
        self._file = file
        self._first = first_line
        self._text = source
        # Empty lines are added in front, so that Jinja's line numbers match the file's.
        self._source = "\n" * (first_line - 1) + source
        self._template: Any = None

    def check(self, find: Finder) -> None:
        """Report the problems in the template, each with its line.

        If the template can't be parsed or is too large, only that is reported.
        """
        jinja = needed("jinja2")
        try:
            if _is_large(self._source):
                find.add(
                    self._first,
                    f"the template has more than {MOST_WORDS} words in braces",
                    "Write text instead.",
                )
                return
            tree = _environment().parse(self._source)
            found = list(_problems(tree, frozenset(NAMES), 0))
            for line, problem, hint in found:
                find.add(max(line, self._first), problem, hint)
            if not found:
                self._compiled(tree)
        except jinja.TemplateSyntaxError as error:
            find.add(error.lineno or self._first, f"the template can't be read: {error.message}", _BRACES)
        except (RecursionError, MemoryError, SyntaxError):
            find.add(self._first, "the template is nested too deeply", "Make it flatter.")
        except ValueError as error:
            find.add(self._first, f"the template can't be read: {error}", "Write a shorter number.")

    def render(self, values: Mapping[str, Any]) -> str:
        """Render the template. If that fails, raises a `WorkerError` with the file and the line."""
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._compiled().generate({**values, "range": range, _METER: _Meter()}):
                size += len(piece)
                if size > MOST_OUTPUT:
                    raise ValueError(f"its output has more than {MOST_OUTPUT} characters")
                pieces.append(piece)
        except Exception as error:
            hint = "Correct the template."
            raise refuse(
                [
                    WorkerProblem(
                        self._file,
                        line_in(self._file, error, self._first),
                        f"the template fails: {error}",
                        hint,
                    )
                ]
            ) from error
        return "".join(pieces).lstrip("\n")

    def _compiled(self, tree: Any = None) -> Any:
        if self._template is None:
            environment = _environment()
            metered = _metered(environment.parse(self._source) if tree is None else tree)
            code = environment.compile(metered, filename=self._file)
            self._template = needed("jinja2").Template.from_code(environment, code, environment.globals)
        return self._template


def _is_large(source: str) -> bool:
    """Return whether a template has more than `MOST_WORDS` tokens, reading no further than necessary."""
    words = (1 for _, kind, _ in _environment().lex(source) if kind not in ("data", "whitespace"))
    return sum(islice(words, MOST_WORDS + 1)) > MOST_WORDS


_BRACES = "Write values in {{ }} and blocks in {% %}. For literal braces, write {{ '{{' }}."


class _Meter:
    """The work that one rendering may still do."""

    def __init__(self) -> None:
        self._rounds = MOST_ROUNDS
        self._work = MOST_WORK

    def each(self, values: Iterable[Any], steps: int) -> Iterator[Any]:
        """Yield a loop's values, and count each iteration and its work. Raises `ValueError` beyond the limits."""
        for value in values:
            self._rounds -= 1
            if self._rounds < 0:
                raise ValueError(f"its loops take more than {MOST_ROUNDS} iterations")
            self.take(steps * _A_STEP)
            yield value

    def take(self, work: int) -> None:
        self._work -= work
        if self._work < 0:
            raise ValueError(f"it processes more than {MOST_WORK} characters")


def _metered(tree: Any) -> Any:
    """Insert metering filters into the loops and `in` comparisons of a parsed template, and return it."""
    nodes = needed("jinja2.nodes")
    for loop in tree.find_all(nodes.For):
        parts = loop.body if loop.test is None else [*loop.body, loop.test]
        inside = sum(1 for part in parts for _ in part.find_all(nodes.Node))
        loop.iter = nodes.Filter(loop.iter, _EACH, [nodes.Const(inside)], [], None, None, lineno=loop.lineno)
    for operand in tree.find_all(nodes.Operand):
        if operand.op in ("in", "notin"):
            operand.expr = nodes.Filter(operand.expr, _WITHIN, [], [], None, None, lineno=operand.lineno)
    return tree


def _problems(node: Any, names: frozenset[str], loops: int) -> Iterator[tuple[int, str, str]]:
    """Yield the parts of a template that are not allowed: the line, the problem and a hint.

    `names` are the variables that are defined there, and `loops` is the number of loops around it.
    """
    kind = type(node).__name__
    line = int(getattr(node, "lineno", 1) or 1)
    if kind not in ALLOWED:
        hint = "Write it with text, if and for."
        yield line, f"the template uses {kind!r}, which is not allowed here", hint
    elif kind == "Call":
        yield line, "the template calls a function", "Only `range(...)` can be called, in a `for`."
    elif kind == "For":
        yield from _problems_of_loop(node, line, names, loops)
    elif kind in ("List", "Tuple"):
        if not all(map(_is_constant, node.items)):
            hint = "Use only text and numbers in it."
            yield line, "a list contains something other than constants", hint
    else:
        if kind == "Name" and node.name not in names:
            hint = f"Use one of {', '.join(map(repr, NAMES))}."
            yield line, f"the template uses {node.name!r}, which is not defined", hint
        known = {"Filter": FILTERS, "Test": TESTS}.get(kind)
        if known is not None and node.name not in known:
            hint = f"Use one of {', '.join(sorted(known))}."
            yield line, f"the {kind.lower()} {node.name!r} is not allowed here", hint
        for child in node.iter_child_nodes():
            yield from _problems(child, names, loops)


def _problems_of_loop(
    node: Any, line: int, names: frozenset[str], loops: int
) -> Iterator[tuple[int, str, str]]:
    over = type(node.iter).__name__
    plain = over in ("Call", "List", "Tuple") or (over == "Name" and node.iter.name == "attachments")
    if not plain:
        hint = "Loop over `attachments`, `range(...)` or a list."
        yield line, "a loop iterates over something that may be large", hint
    if loops >= _DEEPEST_LOOPS or node.recursive:
        yield line, f"loops are recursive or nested more than {_DEEPEST_LOOPS} deep", "Make it flatter."
    # A range creates its items only while it is iterated over. Only a loop counts them, so a range may be used only
    # in a loop.
    for part in node.iter.args if _is_range(node.iter) else [node.iter]:
        yield from _problems(part, names, loops)
    targets = [node.target] if type(node.target).__name__ == "Name" else list(node.target.items)
    named = {target.name for target in targets if type(target).__name__ == "Name"}
    taken = sorted(named & {*NAMES, "range", "loop"})
    if taken:
        problem = f"a loop variable is named {taken[0]!r}, which already has a meaning"
        yield line, problem, "Use another name."
    inside = names | named | {"loop"}
    for part in [*node.body, *node.else_, *([node.test] if node.test is not None else [])]:
        yield from _problems(part, inside, loops + 1)


def _is_range(node: Any) -> bool:
    """Return whether a node is `range(...)` with plain positional arguments."""
    if (
        type(node).__name__ != "Call"
        or node.kwargs
        or node.dyn_args is not None
        or node.dyn_kwargs is not None
    ):
        return False
    return type(node.node).__name__ == "Name" and node.node.name == "range"


def _is_constant(node: Any) -> bool:
    kind = type(node).__name__
    if kind in ("List", "Tuple"):
        return all(_is_constant(each) for each in node.items)
    return kind == "Const" or (kind == "Neg" and type(node.node).__name__ == "Const")


_EACH, _WITHIN = "handrail_each", "handrail_within"
"""Names of the filters that `_metered` inserts. Templates themselves can't use them."""


def _each(context: Any, values: Iterable[Any], steps: int) -> Iterator[Any]:
    return context[_METER].each(values, steps)


def _within(context: Any, value: Any) -> Any:
    """Count the work of an `in` test, and return the value.

    Raises `ValueError` if the value is neither text nor a list, or if there is too much work.
    """
    if not isinstance(value, str | list | tuple):
        raise ValueError("`in` needs text or a list")
    context[_METER].take(len(cast("str | list[Any]", value)))
    return cast("Any", value)


def _is_in(context: Any, value: Any, values: Any) -> bool:
    return value in _within(context, values)


def _text(context: Any, value: Any) -> str:
    """Convert a value to text, and count its length as work. Raises `ValueError` beyond the limit."""
    text = str(value)
    context[_METER].take(len(text))
    return text


def _join(context: Any, values: Any, separator: Any = "") -> str:
    if not isinstance(values, list | tuple):
        raise ValueError("`join` takes a list, such as `attachments`")
    texts = [_text(context, value) for value in values]  # pyright: ignore[reportUnknownVariableType]  # of anything
    between = str(separator)
    context[_METER].take(len(between) * len(texts))
    return between.join(texts)


def _truncate(context: Any, value: Any, length: int = 255) -> str:
    text = _text(context, value)
    return text if len(text) <= length else f"{text[:length]}…"


def _tojson(context: Any, value: Any) -> str:
    return _text(context, json.dumps(value, ensure_ascii=False))


def _is_odd(value: Any) -> bool:
    """Return whether an integer is odd. Raises `ValueError` for any other value.

    Jinja's own test also computes `text % 2`, which formats the text to any width that the text specifies.
    """
    if not isinstance(value, int):
        raise ValueError("`odd` and `even` need a whole number")
    return value % 2 == 1


def _is_even(value: Any) -> bool:
    return not _is_odd(value)


def _changed(change: Callable[[str], str]) -> Callable[[Any, Any], str]:
    """Wrap one of Jinja's text filters so that its work is metered."""
    return lambda context, value: change(_text(context, value))


_OF_TEXT = ("upper", "lower", "title", "capitalize", "trim")
_OWN: Mapping[str, Callable[..., Any]] = {
    "join": _join,
    "truncate": _truncate,
    "tojson": _tojson,
    _EACH: _each,
    _WITHIN: _within,
}


@lru_cache(maxsize=1)
def _environment() -> Any:
    jinja = needed("jinja2")
    sandbox = needed("jinja2.sandbox")
    made = sandbox.ImmutableSandboxedEnvironment(
        undefined=jinja.StrictUndefined, autoescape=False, keep_trailing_newline=False, trim_blocks=True
    )
    made.globals.clear()
    own = {**_OWN, **{name: _changed(made.filters[name]) for name in _OF_TEXT}}
    made.filters = {name: made.filters[name] for name in FILTERS if name not in own}
    made.filters |= {name: jinja.pass_context(filter) for name, filter in own.items()}
    made.tests = {name: made.tests[name] for name in TESTS if name in made.tests}
    made.tests |= {"in": jinja.pass_context(_is_in), "odd": _is_odd, "even": _is_even}
    return made


def rendered(instructions: Instructions, name: str, input: str, attachments: Iterable[str]) -> str:
    """Render a worker's instructions for one run. Raises `WorkerError` if that fails or the result is empty."""
    text = instructions.render({"input": input, "attachments": tuple(attachments), "worker": name})
    if not text.strip():
        raise WorkerError(
            f"the instructions of the worker {name!r} are empty for this input. Write some that do not depend on it."
        )
    return text
