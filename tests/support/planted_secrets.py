"""Secrets planted in a run, and functions that collect all text into which they could leak."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import io
import json
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import pytest
from hypothesis import strategies as st
from pydantic import BaseModel, Field, SecretBytes, SecretStr, create_model

from handrail import (
    Adapter,
    Prompt,
    ScriptedModel,
    Tool,
    ToolContext,
    ToolResult,
)
from handrail.errors import RunParked
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import (
    ToolMessage,
)
from support.parked_runs import Resting


def everything(value: Any, seen: set[int] | None = None) -> str:
    """Return all text in a value, and in the collections, structs, dataclasses and exceptions that it refers to."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, type | int | float | bool | None):
        return ""
    seen.add(id(value))
    if isinstance(value, str):
        return value + "\n"
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode(errors="replace") + "\n"
    if isinstance(value, dict):
        return "".join(everything(each, seen) for pair in value.items() for each in pair)  # pyright: ignore
    if isinstance(value, list | tuple | set | frozenset):
        return "".join(everything(each, seen) for each in value)  # pyright: ignore
    text = repr(value) + "\n"
    if isinstance(value, msgspec.Struct):
        text += "".join(everything(getattr(value, name), seen) for name in value.__struct_fields__)
    elif dataclasses.is_dataclass(value):
        text += "".join(
            everything(getattr(value, field.name, None), seen) for field in dataclasses.fields(value)
        )
    elif isinstance(value, BaseException):
        text += "".join(traceback.format_exception(value)) + everything(value.args, seen)
        text += everything(getattr(value, "__dict__", {}), seen)
    return text


class Recording(MemoryJournal):
    """A journal that also keeps its commit units in a list, for tests to inspect."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []
        calls: Any = self.calls
        commit, commit_now = calls.commit, calls.commit_now

        async def kept(unit: Any, /) -> None:
            self.rows.append(unit)
            await commit(unit)

        def kept_now(unit: Any, /) -> bool:
            self.rows.append(unit)
            return commit_now(unit)

        calls.commit, calls.commit_now = kept, kept_now


MARK = "K3YQZ"
"""A part of every secret in these tests, made of characters that JSON does not escape."""


ODD = st.text(st.sampled_from('aé"\\\n*{}:, 0'), max_size=4)


SECRETS = st.builds(lambda before, after: f"{before}{MARK}-hunter2{after}", ODD, ODD)


class Drawn(NamedTuple):
    """A type, and a strategy that generates its values as plain JSON."""

    kind: Any
    values: st.SearchStrategy[Any]


def _model(fields: list[Drawn]) -> Drawn:
    named = {f"f{at}": one for at, one in enumerate(fields)}
    kinds: dict[str, Any] = {name: (one.kind, ...) for name, one in named.items()}
    made = create_model("Part", **kinds)
    return Drawn(made, st.fixed_dictionaries({name: one.values for name, one in named.items()}))


LEAVES = [
    Drawn(SecretStr, SECRETS),
    Drawn(Annotated[SecretStr, Field(min_length=11)], SECRETS),
    Drawn(SecretBytes, SECRETS),
    Drawn(SecretStr | int, st.one_of(SECRETS, st.integers(0, 9))),
    Drawn(SecretStr | None, st.one_of(SECRETS, st.none())),
    Drawn(str, st.sampled_from(["", "ann", "**"])),
    Drawn(int, st.integers(0, 9)),
]


SAID_SO = Drawn(Annotated[str, Field(json_schema_extra={"writeOnly": True})], SECRETS)
"""A type that is ordinary text in Python but is marked as secret in its schema."""


def _around(inner: st.SearchStrategy[Drawn]) -> st.SearchStrategy[Drawn]:
    return st.one_of(
        inner.map(lambda one: Drawn(list[one.kind], st.lists(one.values, max_size=2))),
        inner.map(lambda one: Drawn(dict[str, one.kind], st.dictionaries(st.just("k"), one.values))),
        inner.map(lambda one: Drawn(one.kind | None, st.one_of(one.values, st.none()))),
        inner.map(lambda one: Drawn(tuple[int, one.kind], st.tuples(st.just(1), one.values))),
        st.lists(inner, min_size=1, max_size=3).map(_model),
    )


WIDER = st.recursive(st.sampled_from([*LEAVES, SAID_SO]), _around, max_leaves=4)


class Login(NamedTuple):
    """A tool, with the arguments that the model sends and the values that its handler received."""

    tool: Tool[Any, Any]
    arguments: dict[str, Any]
    got: list[Any]

    @property
    def secret(self) -> bool:
        return MARK in json.dumps(self.arguments)


def revealed(value: Any) -> Any:
    """Return a handler's value as the plain JSON from which it was parsed."""
    if hasattr(value, "get_secret_value"):
        value = value.get_secret_value()
    if isinstance(value, bytes):
        return value.decode()
    if hasattr(value, "model_fields_set"):
        return {name: revealed(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {key: revealed(one) for key, one in value.items()}  # pyright: ignore
    if isinstance(value, list | tuple):
        return [revealed(one) for one in value]  # pyright: ignore
    return value


class Key(BaseModel):
    """An object that contains a secret."""

    key: SecretStr


@contextlib.contextmanager
def logged():
    """Capture everything that Handrail logs at any level, and yield it as a text buffer."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    root = logging.getLogger("handrail")
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield said
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def recorded_in(folder: Path) -> bytes:
    """Return all bytes of a journal, including those in SQLite's files beside it."""
    return b"".join(path.read_bytes() for path in sorted(folder.glob("runs.db*")))


def written(path: Path) -> bytes:
    """Return the bytes of an exported run, followed by the decoded bodies of its entries."""
    text = path.read_bytes()
    lines = [json.loads(line) for line in text.splitlines()]
    bodies = [base64.b64decode(line["entry"]["body"]) for line in lines if "entry" in line]
    return b"".join([text, *bodies])


def login_with(effect: Any, cut: Callable[[], Any] | None = None, **options: Any) -> Login:
    got: list[Any] = []

    async def handler(params: Any, *, context: ToolContext) -> ToolResult[str]:
        got.append(params.key.get_secret_value())
        if cut is not None:
            await cut()
        return ToolResult.ok("in")

    made = Tool("login", "Log in.", handler, params=Key, result=str, effect=effect, **options)
    return Login(made, {"key": MARK}, got)


class Cut:
    """A run that is parked by force in the middle of a call, as a crash would leave it, and then resumed."""

    def __init__(self, tools: list[Any], *script: Any, **options: Any) -> None:
        self.there = Resting()
        self.journal = MemoryJournal()
        self.model = ScriptedModel([*script, "done"])
        self.adapter = Adapter(self.model, journal=self.journal, environment=self.there)
        self.prompt = Prompt("p", "Do.", tools=tools, **options)

    async def cut_when(self, reached: asyncio.Event | None = None) -> None:
        run = asyncio.ensure_future(self.adapter.evaluate(self.prompt, "go", run_id="run"))
        if reached is None:
            await self.there.until_rest()
        else:
            await reached.wait()
        assert self.there.parking is not None
        assert self.there.parking.park(by_force=True)
        with pytest.raises(RunParked):
            await run

    async def told(self) -> str:
        """Resume the run, check that the model is sent no secret, and return the result of the interrupted call."""
        await self.adapter.resume("run", self.prompt)
        last = self.model.requests[-1].messages[-1]
        assert isinstance(last, ToolMessage)
        assert MARK not in everything(list(self.model.requests[-1].messages))
        return last.results[0].text
