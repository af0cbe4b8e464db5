"""`PathArg`: a call's declared paths are found at any depth, and no other values are.

The annotations in this file are strings (PEP 563), which is the harder case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Generic, Literal, NamedTuple, NotRequired, TypeVar

import pytest
from pydantic import BaseModel, Field, RootModel
from typing_extensions import TypeAliasType, TypedDict

from handrail import PathArg, Tool, ToolContext, ToolResult, tool
from handrail.errors import ToolDefinitionError
from handrail.tools import NamedPath
from handrail.tools.path_arguments import PathFinder

T = TypeVar("T")
Read = Annotated[str, PathArg("read")]
Write = Annotated[str, PathArg("write")]


@dataclass
class Copy:
    source: Read
    target: Write
    note: str = ""


class Model(BaseModel):
    path: Read
    name: str = "plain"


@dataclass
class Box(Generic[T]):
    item: T
    more: list[T] = field(default_factory=list[Any])


class Crate(BaseModel, Generic[T]):
    item: T


class Options(TypedDict):
    path: Read
    backup: NotRequired[Write]


class Place(NamedTuple):
    path: Read
    line: int = 0


class Paths(RootModel[list[Read]]):
    pass


@dataclass
class Tree:
    path: Read
    children: list[Tree] = field(default_factory=list["Tree"])


class Folder(BaseModel):
    path: Write
    inner: dict[str, Folder] = {}


@dataclass
class Aliased:
    path: Annotated[str, Field(alias="from"), PathArg("read")]


@dataclass
class Notes(Box[Read]):
    title: str = ""


U = TypeVar("U")


@dataclass
class Labelled(Box[U]):
    label: str = ""


@dataclass
class LabelledNotes(Labelled[Write]):
    pass


# Aliases like those that the `type` statement of Python 3.12 creates.
Named = TypeAliasType("Named", Read)
Several = TypeAliasType("Several", list[T], type_params=(T,))


@dataclass
class Plain:
    path: str
    file: Path


def read(*paths: str) -> list[NamedPath]:
    return [NamedPath(path, "read") for path in paths]


def write(*paths: str) -> list[NamedPath]:
    return [NamedPath(path, "write") for path in paths]


@pytest.mark.parametrize(
    ("annotation", "sent", "found"),
    [
        (Read, "a", read("a")),
        (Annotated[Path, PathArg("read")], "a/b", read("a/b")),
        (Annotated[PurePosixPath, PathArg("write")], "a/b", write("a/b")),
        (Annotated[str | Path, PathArg("read")], "a", read("a")),
        (Annotated[str, Field(min_length=1), PathArg("read")], "a", read("a")),
        (Read | None, "a", read("a")),
        (Read | None, None, []),
        (Annotated[str | None, PathArg("write")], "a", write("a")),
        (Annotated[str | None, PathArg("write")], None, []),
        (list[Read], ["a", "b"], read("a", "b")),
        (Annotated[list[Read], Field(max_length=2)], ["a"], read("a")),
        (list[list[Read]], [["a"], [], ["b"]], read("a", "b")),
        (Sequence[Read], ["a"], read("a")),
        (set[Read], ["a"], read("a")),
        (frozenset[Write], ["a"], write("a")),
        (tuple[Read, int, Write], ["a", 1, "b"], [*read("a"), *write("b")]),
        (tuple[Read, ...], ["a", "b", "c"], read("a", "b", "c")),
        (dict[str, Read], {"k": "a"}, read("a")),
        (dict[Read, Write], {"a": "b"}, [*read("a"), *write("b")]),
        (Mapping[str, list[Read]], {"k": ["a", "b"]}, read("a", "b")),
        (Copy, {"source": "a", "target": "b", "note": "c"}, [*read("a"), *write("b")]),
        (list[Copy], [{"source": "a", "target": "b"}], [*read("a"), *write("b")]),
        (Model, {"path": "a"}, read("a")),
        (Options, {"path": "a"}, read("a")),
        (Options, {"path": "a", "backup": "b"}, [*read("a"), *write("b")]),
        (Place, ["a", 3], read("a")),
        (Paths, ["a", "b"], read("a", "b")),
        (Aliased, {"from": "a"}, read("a")),
        (Box[Read], {"item": "a", "more": ["b"]}, read("a", "b")),
        (Box[Box[Write]], {"item": {"item": "a"}}, write("a")),
        (Box[Copy | None], {"item": {"source": "a", "target": "b"}}, [*read("a"), *write("b")]),
        (Crate[Read], {"item": "a"}, read("a")),
        (Crate[list[Model]], {"item": [{"path": "a"}]}, read("a")),
        (Tree, {"path": "a", "children": [{"path": "b", "children": [{"path": "c"}]}]}, read("a", "b", "c")),
        (Folder, {"path": "a", "inner": {"k": {"path": "b"}}}, write("a", "b")),
        (Notes, {"item": "a", "more": ["b"]}, read("a", "b")),
        (LabelledNotes, {"item": "a", "more": ["b"]}, write("a", "b")),
        (Named, "a", read("a")),
        (dict[str, Named | int], {"k": "a", "l": 1}, read("a")),
        (Several[Named], ["a", "b"], read("a", "b")),
        (Copy | Model, {"path": "a"}, read("a")),
        (Copy | Model | int, 3, []),
        (Options | Tree, {"path": "a"}, read("a")),
        (Read | int, "a", read("a")),
        (Read | int, 4, []),
        (Literal["x"] | Model, "x", []),
    ],
    ids=lambda value: str(value)[:60],
)
def test_declared_paths_are_found(annotation: Any, sent: Any, found: list[NamedPath]):
    """Each marked value is found once, at any depth, in the order of the type's fields."""
    box: Any = Box[annotation]
    made = Tool("look", "Look.", params=box)
    assert list(made.paths(made.parse({"item": sent}))) == found


def test_what_is_not_declared_is_no_path():
    """A value without a marker is not a path, whatever the name or type of its field."""
    made = Tool("look", "Look.", params=Plain)
    assert made.paths(made.parse('{"path": "a", "file": "b"}')) == ()
    assert PathFinder(Plain).declared == frozenset()


def test_a_tool_without_params_has_no_paths():
    made = Tool[None, Any]("look", "Look.")
    assert made.paths(None) == ()


def test_declared_says_what_occurs_anywhere():
    """`declared` contains each kind of access, read or write, that occurs anywhere in the type."""
    assert PathFinder(Copy).declared == {"read", "write"}
    assert PathFinder(Tree).declared == {"read"}
    assert PathFinder(Box[dict[str, Folder | None]]).declared == {"write"}
    assert PathFinder(Options).declared == {"read", "write"}


def test_paths_of_a_plain_function():
    """A tool made with `@tool` keeps the path markers of its parameters."""

    @tool
    def move(source: Read, targets: list[Write], dry: bool = False) -> None:
        """Move a file."""

    assert move.paths(move.parse({"source": "a", "targets": ["b", "c"]})) == (
        *read("a"),
        *write("b", "c"),
    )


def test_local_classes_under_pep_563():
    """Annotations that name classes local to a function are resolved, even if the classes are recursive."""

    @dataclass
    class Inner:
        path: Read

    @dataclass
    class Outer:
        inner: Inner
        more: list[Outer] = field(default_factory=list["Outer"])

    def handler(params: Outer, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.ok(None)

    @tool
    def look(outer: Outer) -> None:
        """Look somewhere."""

    sent = {"inner": {"path": "a"}, "more": [{"inner": {"path": "b"}}]}
    made = Tool("look", "Look.", handler)
    subscripted = Tool[Outer, None]("look", "Look.", handler)
    assert list(made.paths(made.parse(sent))) == read("a", "b")
    assert list(subscripted.paths(subscripted.parse(sent))) == read("a", "b")
    assert list(look.paths(look.parse({"outer": sent}))) == read("a", "b")


def test_the_schema_is_that_of_the_text():
    """A path marker does not change the JSON Schema."""
    made = Tool("look", "Look.", params=Copy)
    assert made.json_schema["properties"]["source"] == {"type": "string"}


@pytest.mark.parametrize("effect", ["pure", "read"])
def test_a_path_to_write_needs_an_effect_that_writes(effect: Any):
    """A tool with the effect `pure` or `read` is refused if it declares a path to write, at any depth."""
    Tool("look", "Look.", params=Tree, effect=effect)
    with pytest.raises(ToolDefinitionError, match=r"PathArg\('write'\)\. Set effect='staged'"):
        Tool("look", "Look.", params=Box[list[Folder]], effect=effect)


@pytest.mark.parametrize("effect", ["staged", "idempotent", "irreversible"])
def test_a_path_to_write_goes_with_effects_that_write(effect: Any):
    """A tool with any effect that writes may declare a path to write."""
    assert Tool("look", "Look.", params=Folder, effect=effect).effect == effect


def test_path_args_are_values():
    """Path markers are immutable and compared by value."""
    assert PathArg("read") == PathArg("read") != PathArg("write")
    marker: Any = PathArg("read")
    with pytest.raises(AttributeError):
        marker.access = "write"
