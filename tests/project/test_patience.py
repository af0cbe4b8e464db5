"""Tests that look for time limits which a busy machine may exceed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from support import PATIENCE, TESTS

pytestmark = pytest.mark.once

GIVEN = {
    "httpx.AsyncClient": "timeout",
    "httpx.Client": "timeout",
    "httpx2.AsyncClient": "timeout",
    "httpx2.Client": "timeout",
    "uvicorn.Config": "timeout_keep_alive",
}
"""Names of classes with a default limit of five seconds, and the argument that replaces it."""
WAITS = {"asyncio.timeout": 0, "asyncio.wait_for": 1}
"""Functions that limit a wait, and the position of the limit among their arguments."""
MARK = "pytest.mark.timeout"
LEAST = 600
"""Minimum seconds for a test's own time limit: the limit that `pyproject.toml` sets for every test."""


def seconds(node: ast.expr | None) -> float | None:
    """Return the value of a number literal, or None for any other expression."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int | float) else None


def dotted(node: ast.expr) -> str:
    """Return a plain or dotted name, such as `asyncio.timeout`, or "" for any other expression."""
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def impatient(call: ast.Call, in_test: bool) -> str:
    """Return what is wrong with a call, or ""."""
    name = dotted(call.func)
    if name in GIVEN and GIVEN[name] not in {each.arg for each in call.keywords}:
        return f"{name} has a time limit of five seconds. Pass `{GIVEN[name]}`."
    if name == MARK and (seconds(call.args[0]) or LEAST) < LEAST:
        return f"a test gets {LEAST} seconds, and this one gets less. Remove the mark."
    if in_test and name in WAITS:
        limit = seconds(call.args[WAITS[name]]) if len(call.args) > WAITS[name] else None
        if limit is not None and limit < PATIENCE:
            return f"a busy machine may need longer than {limit} seconds. Wait for `support.PATIENCE`."
    return ""


def is_virtual(marks: list[ast.expr]) -> bool:
    return any(dotted(mark) == "pytest.mark.virtual_time" for mark in marks)


def problems(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line of a file with a time limit that a busy machine may exceed, and what is wrong with it.

    Waits are checked in coroutine tests without the mark `virtual_time` only: any other test may run its coroutines in virtual time.
    """
    if not any(f"{name}(" in text for name in (*GIVEN, *WAITS, MARK)):
        return
    tree = ast.parse(text)
    real = [
        each
        for each in tree.body
        if isinstance(each, ast.AsyncFunctionDef)
        and each.name.startswith("test")
        and not is_virtual(each.decorator_list)
        and not any(isinstance(other, ast.Assign) and is_virtual([other.value]) for other in tree.body)
    ]
    inside = {id(node) for test in real for node in ast.walk(test)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (found := impatient(node, id(node) in inside)):
            yield node.lineno, found


def test_tests_are_patient():
    found = [
        f"{path.relative_to(TESTS)}:{line}: {problem}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, problem in problems(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("httpx2.AsyncClient()", "Pass `timeout`"),
        ("httpx2.AsyncClient(timeout=None)", ""),
        ("uvicorn.Config(app)", "Pass `timeout_keep_alive`"),
        ("@pytest.mark.timeout(120)\ndef test(): ...", "Remove the mark"),
        ("@pytest.mark.timeout(900)\ndef test(): ...", ""),
        ("async def test_it():\n    await asyncio.wait_for(call, 20)", "longer than 20 seconds"),
        ("async def test_it():\n    async with asyncio.timeout(PATIENCE): ...", ""),
        ("def test_it():\n    async def main():\n        await asyncio.wait_for(call, 20)", ""),
    ],
)
def test_an_impatient_test_is_found(code: str, words: str):
    found = [problem for _, problem in problems(code)]
    assert [words in each for each in found] == [True] * bool(words), found
