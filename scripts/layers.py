"""Check the imports between Handrail's modules, and that time, randomness and ids are injected.

    python scripts/layers.py [PACKAGE]      (PACKAGE is src/handrail by default)

Prints a line per finding, `file:line: problem; fix`. The exit status is 1 if there is any.
"""

import ast
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

# Modules and packages, by layer. A lower layer never imports a higher one, except under TYPE_CHECKING. A module that has no line
# of its own is in the layer of its package.
LAYERS = {
    name: layer
    for layer, names in {
        5: "cli fleet serve mcp __main__",
        4: "agent environment handoff workers skills durable runs",
        3: """models sections code
            run.entry run.redemption run.adapter run.response run.loop run.orders run.request
            run.answer run.search run.compaction run.conversation run.evaluation run.window
            run.record.begin run.record.recorded_session run.record.lineage run.record.notices""",
        2: "run guard",
        1: "session prompt resources journal",
        0: """tools content context schema concurrency text errors clock ids protocols redaction events question messages imports notify
            run.place run.limits journal.protocol journal.records journal.accounts""",
    }.items()
    for name in names.split()
}
# These modules are outside the layers. They may import any module below layer DOORS, and no other module imports them, except that
# the doors start telemetry: nothing else in the process does.
BESIDE = {"testing", "telemetry", "evals"}
DOORS = 5
OPEN_TO_DOORS = {"telemetry"}

# Only these modules may read the system's clock or generate random numbers and ids.
SOURCES = {"clock", "ids", "testing"}
READS_TIME = {
    *(f"time.{name}" for name in ("time", "monotonic", "perf_counter")),
    *(f"time.{name}_ns" for name in ("time", "monotonic", "perf_counter")),
    *(f"datetime.datetime.{name}" for name in ("now", "utcnow", "today")),
    "datetime.date.today",
}
MAKES_CHANCE = {"random", "uuid"}


class Import(NamedTuple):
    """One name imported from a module of handrail. `path` is the part after `handrail.`."""

    line: int
    path: tuple[str, ...]
    for_types: bool


class Finding(NamedTuple):
    """A broken rule, and how to fix it."""

    file: Path
    line: int
    what: str
    hint: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}; {self.hint}"


def is_private(name: str) -> bool:
    """Return whether a name is private: `_name`, but not `name` or `__name__`."""
    return name.startswith("_") and not name.endswith("__")


@lru_cache(maxsize=1)
def nodes_of(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes of a file. The result is cached, because several checks use it."""
    return list(ast.walk(tree))


@lru_cache(maxsize=1)
def nodes_for_types(tree: ast.Module) -> set[ast.AST]:
    """Return every node in the body of an `if TYPE_CHECKING:`."""
    return {
        inner
        for node in nodes_of(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }


def own_imports(tree: ast.Module, package: tuple[str, ...]) -> Iterator[Import]:
    """Yield the imports of Handrail's own modules, anywhere in the file.

    `package` is the package that the file's relative imports start from.
    """
    for_types = nodes_for_types(tree)
    for node in nodes_of(tree):
        paths: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            paths = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start: tuple[str, ...] = ()
            if node.level:
                start = ("handrail", *package[: len(package) - node.level + 1])
            module = tuple(node.module.split(".")) if node.module else ()
            paths = [(*start, *module, alias.name) for alias in node.names]
        for path in paths:
            if path[0] == "handrail":
                yield Import(getattr(node, "lineno", 1), path[1:], node in for_types)


def part_of(path: tuple[str, ...]) -> str:
    """Return the part of the package that a module belongs to: the longest name in LAYERS, or else its top-level name."""
    names = (".".join(path[:length]) for length in range(len(path), 0, -1))
    return next((name for name in names if name in LAYERS), path[0] if path else "")


def check_imports(file: Path, module: tuple[str, ...], imports: Iterator[Import]) -> Iterator[Finding]:
    """Yield the findings about the imports of one file, which is this module."""
    owner = part_of(module)
    for line, path, for_types in imports:
        target = part_of(path)
        if target == owner:
            continue
        known = target in LAYERS or target in BESIDE
        foreign = path[:1] != module[:1]
        if foreign and any(is_private(part) for part in path) and (known or len(path) > 1):
            yield Finding(
                file,
                line,
                f"{owner} imports handrail.{'.'.join(path)}, which is private to {target}",
                f"import a public name of {target}, or make this one public",
            )
        if for_types or path == ("__version__",):
            continue
        if not known and len(path) > 1:
            yield Finding(
                file, line, f"handrail.{target} has no layer", "add it to LAYERS in scripts/layers.py"
            )
        elif not known:
            what = f"{owner} imports {target or 'handrail'} through the package itself"
            hint = "import it from the module that defines it (a new module: add it to LAYERS in scripts/layers.py)"
            yield Finding(file, line, what, hint)
        elif target in OPEN_TO_DOORS and LAYERS.get(owner) == DOORS:
            continue
        elif target in BESIDE:
            hint = (
                f"reverse the import: {target} may import {owner}"
                if owner not in BESIDE
                else "use a lower module"
            )
            yield Finding(file, line, f"{owner} imports {target}, which no other module may import", hint)
        elif owner in BESIDE and LAYERS[target] >= DOORS:
            what = f"{owner} imports {target} (layer {DOORS})"
            yield Finding(file, line, what, f"{owner} stays below layer {DOORS}; use a lower module")
        elif owner in LAYERS and LAYERS[target] > LAYERS[owner]:
            what = f"{owner} (layer {LAYERS[owner]}) imports {target} (layer {LAYERS[target]})"
            hint = "declare what both need in layer 0, or import under TYPE_CHECKING if it is only a type"
            yield Finding(file, line, what, hint)


def origin(node: ast.expr, names: dict[str, str]) -> str:
    """Return the full name of an expression (`datetime.datetime.now` for `dt.now`), or "" if unknown."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute) and (start := origin(node.value, names)):
        return f"{start}.{node.attr}"
    return ""


def check_sources(file: Path, tree: ast.Module) -> Iterator[Finding]:
    """Yield a finding for each direct use of the system's clock or of randomness."""
    time_hint = "take a Clock as a parameter and use it (handrail.clock)"
    chance_hint = "take it as a parameter, or from handrail.ids"
    for_types = nodes_for_types(tree)
    names: dict[str, str] = {}
    for node in nodes_of(tree):
        if node in for_types:
            continue
        found: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            found = [(alias.asname or alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found = [(alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
        for name, source in found:
            names[name] = source
            module = source.partition(".")[0]
            if module in MAKES_CHANCE:
                yield Finding(file, getattr(node, "lineno", 1), f"imports {module}", chance_hint)
            elif source in READS_TIME:
                yield Finding(file, getattr(node, "lineno", 1), f"imports {source}", time_hint)
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and (source := origin(node, names)) in READS_TIME:
            yield Finding(file, node.lineno, f"uses {source}", time_hint)


def check_package(root: Path) -> Iterator[Finding]:
    """Yield every finding in the package at `root`."""
    unknown: set[str] = set()
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        module = parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts
        owner = part_of(module)
        try:
            tree = ast.parse(file.read_bytes(), str(file))
        except SyntaxError as error:
            yield Finding(file, error.lineno or 1, f"does not parse: {error.msg}", "fix the syntax")
            continue
        if owner not in SOURCES:
            yield from check_sources(file, tree)
        if owner == "__init__":
            continue  # the package's own `__init__` may import from everywhere
        if owner not in LAYERS and owner not in BESIDE and owner not in unknown:
            unknown.add(owner)
            yield Finding(file, 1, f"handrail.{owner} has no layer", "add it to LAYERS in scripts/layers.py")
        yield from check_imports(file, module, own_imports(tree, parts[:-1]))


def main(root: Path) -> int:
    """Print the findings for the package at `root`, and return the exit status."""
    if not root.is_dir():
        print(f"{root}: no such folder")
        return 2
    # Without duplicates: an import of two names can yield the same finding twice.
    findings = dict.fromkeys(check_package(root))
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "src/handrail")))
