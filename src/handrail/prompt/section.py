"""`Section` and `MarkdownSection`: a piece of a prompt's text with the tools and policies that go with it."""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar, cast

from typing_extensions import TypeVar as TypeVarWithDefault

from handrail.prompt.section_checking import check_params_type, check_section
from handrail.protocols import SessionView, ToolPolicy
from handrail.schema.wording import describe
from handrail.tools import Tool

ParamsT = TypeVarWithDefault("ParamsT", default=Any)
Params_contra = TypeVar("Params_contra", contravariant=True)
Answer_co = TypeVar("Answer_co", covariant=True)

Visibility = Literal["full", "summary"]


class _AsksBoth(Protocol[Params_contra, Answer_co]):
    def __call__(self, *, params: Params_contra, session: SessionView) -> Answer_co: ...


class _AsksParams(Protocol[Params_contra, Answer_co]):
    def __call__(self, *, params: Params_contra) -> Answer_co: ...


class _AsksSession(Protocol[Answer_co]):
    def __call__(self, *, session: SessionView) -> Answer_co: ...


@dataclasses.dataclass(frozen=True)
class Section(Generic[ParamsT], abc.ABC):
    """One node of a prompt: text, tools, policies, and the sections below it.

    `Section[Params]` is a class that knows the type of its params; without it a section takes those of the
    prompt it stands in. `enabled` and `visibility` may be functions of `params`, of `session`, of both or of
    neither, called by these names whenever the prompt is rendered. A disabled section takes its subtree, tools
    and policies with it. One shown as a summary keeps body, children and tools back until it is opened.
    """

    params_type: ClassVar[Any] = None
    """The `Params` of `MarkdownSection[Params]`; None where it takes the prompt's."""

    needs_files: ClassVar[bool] = False
    """Are its tools of no use without files? Then a run without any is refused before it begins."""

    title: str
    key: str
    template: str
    tools: Sequence[Tool[Any, Any]] = ()
    policies: Sequence[ToolPolicy] = ()
    children: Sequence[Section[Any]] = ()
    enabled: (
        bool | _AsksParams[ParamsT, bool] | _AsksSession[bool] | _AsksBoth[ParamsT, bool] | Callable[[], bool]
    ) = True
    summary: str | None = None
    visibility: (
        Visibility
        | _AsksParams[ParamsT, Visibility]
        | _AsksSession[Visibility]
        | _AsksBoth[ParamsT, Visibility]
        | Callable[[], Visibility]
    ) = "full"
    accepts_overrides: bool = True

    def __post_init__(self) -> None:
        check_section(self, Section)

    def __class_getitem__(cls, params: Any) -> Any:
        generic: Any = getattr(super(), "__class_getitem__")  # noqa: B009  # Generic's, unknown to the type stubs
        if _is_open(params):
            return generic(params)
        if params in (Any, None, type(None)):
            return cls
        check_params_type(cls.__name__, params)
        made = _KNOWING.get((cls, params))
        if made is None:
            generic(params)  # refuses a second subscript, in typing's own words
            name = f"{cls.__name__}[{describe(params)}]"
            names = {"params_type": params, "__module__": cls.__module__, "__doc__": cls.__doc__}
            made = _KNOWING[cls, params] = type(name, (cls,), names)
        return made

    @abc.abstractmethod
    def heading(self, depth: int) -> str:
        """What stands above the section's text, `depth` sections deep (0 at the top); "" for nothing."""


_KNOWING: dict[tuple[type, Any], type] = {}
"""The classes made for `MarkdownSection[Params]`, so that the same words are the same class."""


def _is_open(params: Any) -> bool:
    """Is this a type variable, or a type with one in it, as in `class Mine(MarkdownSection[T])`?"""
    if isinstance(params, TypeVar):
        return True
    return not isinstance(params, type) and bool(getattr(params, "__parameters__", ()))


@dataclasses.dataclass(frozen=True)
class MarkdownSection(Section[ParamsT], Generic[ParamsT]):
    """A section shown as Markdown: `## Title`, one `#` more for each level below.

    The template is Markdown in which `$name` or `${name}` stands for a field of the params and `$$` for a
    dollar sign. Values are put in as they are.
    """

    def heading(self, depth: int) -> str:
        return f"{'#' * min(depth + 2, 6)} {self.title}"


@dataclasses.dataclass(frozen=True)
class PlainSection(MarkdownSection[Any]):
    """The one section of a prompt that was given as a text: it has no heading."""

    def heading(self, depth: int) -> str:
        return ""


def as_sections(given: Any) -> Any:
    """What a prompt was given, with a section in the place of each text; empty ones are left to be refused."""
    if isinstance(given, str):
        return (plain_section(given, 1),) if given.strip() else given
    if not isinstance(given, list | tuple):
        return given
    numbers = itertools.count(1)
    members = cast("Sequence[Any]", given)
    return tuple(
        plain_section(each, next(numbers)) if isinstance(each, str) and each.strip() else each
        for each in members
    )


def plain_section(text: str, number: int) -> Section[Any]:
    """The section that a text is in a prompt; `number` tells it from others."""
    key = "instructions" if number == 1 else f"instructions-{number}"
    return cast("Section[Any]", PlainSection("Instructions", key, text))


def walk(sections: Sequence[Section[Any]], above: str = "") -> list[tuple[str, Section[Any]]]:
    """Every section with its path, in the order in which they are written."""
    found: list[tuple[str, Section[Any]]] = []
    for section in sections:
        path = f"{above}{section.key}"
        found += [(path, section), *walk(section.children, f"{path}.")]
    return found
