"""`Section` and `MarkdownSection`: a part of a prompt's text, with the tools and policies that belong to it.

A section's conditions, `enabled` and `visibility`, are plain values or functions that are called at every rendering.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar, cast, get_args, get_origin

import msgspec
from pydantic import BaseModel
from typing_extensions import TypeVar as TypeVarWithDefault

from handrail.content import AttachmentSource, attachments_of
from handrail.errors import DefinitionError, PromptDefinitionError, PromptRenderError, ToolValidationError
from handrail.protocols import SessionView, ToolPolicy
from handrail.schema import Schema
from handrail.schema.problems import describe, describe_kind
from handrail.text.spelling import checked_arguments
from handrail.tools import Tool
from handrail.tools.definition import is_record
from handrail.tools.signature import body_of

_DOLLAR = re.compile(r"\$(?:(?P<dollar>\$)|(?P<bare>[^\W\d]\w*)|\{(?P<braced>[^\W\d]\w*)\}|(?P<wrong>))")


class Template(msgspec.Struct, frozen=True):
    """A text with placeholders. Values are inserted unchanged, so a `$` in a value is literal."""

    parts: tuple[str, ...]
    """Pieces of text alternating with placeholder names. The first and last items are text."""
    names: frozenset[str]

    def fill(self, values: Mapping[str, Any]) -> str:
        """Return the text with every placeholder replaced by the `str()` of its value."""
        if not self.names:
            return self.parts[0]
        filled = [str(values[part]) if odd % 2 else part for odd, part in enumerate(self.parts)]
        return "".join(filled)


@lru_cache(maxsize=1024)
def template_of(text: str) -> Template:
    """Parse a template. Raises `PromptDefinitionError` for a `$` that is neither a placeholder nor `$$`.

    Common indentation, empty lines at the beginning and whitespace at the end are dropped, so that a template can be
    indented like the code in which it is written.
    """
    whole = textwrap.dedent(text).rstrip()
    text = whole.lstrip("\n")
    parts: list[str] = []
    piece = ""
    at = 0
    for match in _DOLLAR.finditer(text):
        piece += text[at : match.start()]
        at = match.end()
        if match["wrong"] is not None:
            raise _wrong(text, match.start(), len(whole) - len(text) + 1)
        if match["dollar"]:
            piece += "$"
        else:
            parts += (piece, match["bare"] or match["braced"])
            piece = ""
    parts.append(piece + text[at:])
    return Template(tuple(parts), frozenset(parts[1::2]))


def _wrong(text: str, at: int, first: int) -> PromptDefinitionError:
    line = text.count("\n", 0, at) + first
    shown = text[at : at + 12].split("\n", 1)[0]
    return PromptDefinitionError(
        "template",
        f"{shown!r} in line {line} is not a placeholder",
        "Write `$name` or `${name}` for a field, and `$$` for a dollar sign.",
    )


# --- params --------------------------------------------------------------------------------------


def fields_of(kind: Any) -> frozenset[str]:
    """Return the names that a template may use: the fields of the params type. Empty if there is no params type."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    origin = get_origin(kind) or kind
    if origin is None:
        return frozenset()
    if issubclass(origin, BaseModel):
        return frozenset(origin.model_fields)
    return frozenset(field.name for field in dataclasses.fields(origin))


class ParamsReader:
    """Checks the params with which a prompt is rendered."""

    __slots__ = ("_kind", "_namespace", "_prompt", "_schema")

    def __init__(self, prompt: str, kind: Any, namespace: Mapping[str, Any]) -> None:
        self._prompt = prompt
        self._kind = kind
        self._namespace = namespace
        self._schema: Schema[Any] | None = None

    def read(self, given: object) -> Any:
        """Return the params as an instance of the prompt's params type, or None if the prompt has no params.

        Raises `PromptRenderError` if params are invalid, missing, or given to a prompt that has none.
        """
        kind = self._kind
        if kind is None:
            if given is not None:
                problem = f"params were passed ({describe_kind(given)}), but its sections use none"
                raise self._error(problem, "Leave them out, or write MarkdownSection[Params](...).")
            return None
        name = describe(kind)
        hint = f"Pass `{name}(...)`, or a mapping with its fields."
        if given is None:
            raise self._error("no params were passed", hint)
        if isinstance(given, get_origin(kind) or kind):
            return given
        if not isinstance(given, Mapping):
            raise self._error(f"its params are {describe_kind(given)}", hint)
        try:
            if self._schema is None:
                self._schema = Schema(kind, self._namespace)
            return self._schema.parse_value(cast("Mapping[str, Any]", given))
        except ToolValidationError as error:
            raise self._error(f"its params do not fit {name}: {error}", "Correct the mapping.") from None
        except DefinitionError as error:
            raise self._error(f"a mapping can't be checked: {error}", f"Pass `{name}(...)` itself.") from None

    def _error(self, problem: str, hint: str) -> PromptRenderError:
        return PromptRenderError(self._prompt, problem.rstrip("."), hint)


_GIVEN = ("params", "session")
"""The parameters that a condition's function may have."""


class Condition:
    """A section's `enabled` or `visibility`: a plain value or a function.

    A function may take `params`, `session`, both or neither; `**given` takes both. Raises `PromptDefinitionError` for a
    value that is not allowed, for a coroutine or generator function, and for a function with any other required parameter.
    """

    __slots__ = ("_allowed", "_function", "_takes", "_takes_all", "_value", "_what")

    def __init__(self, given: object, what: str, allowed: tuple[object, ...]) -> None:
        self._value = given
        self._what = what
        self._allowed = allowed
        self._function = cast("Callable[..., Any]", given) if callable(given) else None
        self._takes: set[str] = set()
        self._takes_all = False
        if self._function is not None:
            self._read(self._function)
        elif type(given) is not type(allowed[0]) or given not in allowed:
            words = ", ".join(map(repr, allowed))
            raise PromptDefinitionError(
                what, f"is {given!r}", f"Pass {words}, or a function that returns one of them."
            )

    def _read(self, function: Callable[..., Any]) -> None:
        form = "Write it as a function of `params`, of `session`, or of both, by these names."
        body = body_of(function)
        kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if any(is_kind(body) for is_kind in kinds):
            raise PromptDefinitionError(
                self._what,
                "is async or a generator, but rendering does not wait",
                "Make it a plain function.",
            )
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return  # a C function without a signature is called without arguments
        for parameter in parameters:
            if parameter.kind is parameter.VAR_KEYWORD:
                self._takes_all = True
            elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and (
                parameter.name in _GIVEN
            ):
                self._takes.add(parameter.name)
            elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
                raise PromptDefinitionError(self._what, f"is a function that takes {str(parameter)!r}", form)

    @property
    def is_fixed(self) -> bool:
        """Whether the condition has the same value at every rendering."""
        return self._function is None

    @property
    def takes_params(self) -> bool:
        """Whether the condition's function has a parameter `params`."""
        return "params" in self._takes

    @property
    def may_read_params(self) -> bool:
        """Whether the condition's function gets the params, and so may read any of their fields."""
        return self._takes_all or self.takes_params

    def may_be(self, value: object) -> bool:
        """Return whether the condition can have this value."""
        return self._function is not None or self._value == value

    def evaluate(self, prompt: str, path: str, given: Mapping[str, Any]) -> Any:
        """Return the condition's value. A function is called with whichever of the params and the session it takes.

        Raises `PromptRenderError` if the function raises an exception or returns a value that is not allowed, or if it has a
        parameter `session` and there is no session.
        """
        function = self._function
        if function is None:
            return self._value
        where = f"`{self._what}` of section {path!r}"
        if "session" in self._takes and given["session"] is None:
            raise PromptRenderError(
                prompt, f"{where} asks for the session, and there is none", "Pass `session=`."
            )
        try:
            found = function(**(given if self._takes_all else {name: given[name] for name in self._takes}))
        except Exception as error:
            problem = f"{where} raised {type(error).__name__}: {error}".rstrip(".")
            raise PromptRenderError(prompt, problem, "Correct the function.") from error
        if type(found) is not type(self._allowed[0]) or found not in self._allowed:
            words = " or ".join(map(repr, self._allowed))
            raise PromptRenderError(prompt, f"{where} returned {found!r}", f"It must return {words}.")
        return found


ParamsT = TypeVarWithDefault("ParamsT", default=Any)
Params_contra = TypeVar("Params_contra", contravariant=True)
Answer_co = TypeVar("Answer_co", covariant=True)

Visibility = Literal["full", "summary"]

_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")


class _OfBoth(Protocol[Params_contra, Answer_co]):
    def __call__(self, *, params: Params_contra, session: SessionView) -> Answer_co: ...


class _OfParams(Protocol[Params_contra, Answer_co]):
    def __call__(self, *, params: Params_contra) -> Answer_co: ...


class _OfSession(Protocol[Answer_co]):
    def __call__(self, *, session: SessionView) -> Answer_co: ...


@checked_arguments
@dataclasses.dataclass(frozen=True)
class Section(Generic[ParamsT], abc.ABC):
    """One node of a prompt: text, tools, policies and child sections.

    `Section[Params]` declares the type of the section's params. A plain `Section` takes its prompt's params. `enabled`
    and `visibility` may be functions with a parameter `params`, `session`, both or neither. They are called at every
    rendering. If a section is disabled, so are its subtree, tools and policies. A section shown as a summary hides its
    body, attachments, children and tools until it is opened.

    `attachments` are pictures, sounds and files, each an `Attachment`, a path or a URL. Unless the conversation already has
    them, they are sent with the first message of a run, or with the result of the call that opens the section.

    The constructor raises `DefinitionError` if the section, or a tool in it, is invalid.
    """

    params_type: ClassVar[Any] = None
    """The `Params` of `MarkdownSection[Params]`, or None if the section takes its prompt's params."""

    needs_files: ClassVar[bool] = False
    """Whether the section's tools need a filesystem. If so, a run without one is refused before it begins."""

    search: ClassVar[bool | None] = None
    """Whether the model finds the section's tools by searching; None if its prompt says so. A section may set it on itself."""
    skill: ClassVar[str] = ""
    """The name of the skill that the section is; "" if it is none. A section may set it on itself."""

    title: str
    key: str
    template: str
    tools: Sequence[Tool[Any, Any]] = ()
    policies: Sequence[ToolPolicy] = ()
    children: Sequence[Section[Any]] = ()
    enabled: (
        bool | _OfParams[ParamsT, bool] | _OfSession[bool] | _OfBoth[ParamsT, bool] | Callable[[], bool]
    ) = True
    summary: str | None = None
    visibility: (
        Visibility
        | _OfParams[ParamsT, Visibility]
        | _OfSession[Visibility]
        | _OfBoth[ParamsT, Visibility]
        | Callable[[], Visibility]
    ) = "full"
    accepts_overrides: bool = True
    attachments: Sequence[AttachmentSource] = ()

    def __post_init__(self) -> None:
        _check(self)

    def __class_getitem__(cls, params: Any) -> Any:
        generic: Any = getattr(super(), "__class_getitem__")  # noqa: B009  # Generic's, unknown to the type stubs
        if _is_open(params):
            return generic(params)
        if params in (Any, None, type(None)):
            return cls
        if not is_record(params):
            raise PromptDefinitionError(
                f"{cls.__name__}[{describe(params)}]",
                f"{describe(params)} has no named fields for placeholders",
                "Pass a class: a dataclass or a pydantic model.",
            )
        made = _TYPED.get((cls, params))
        if made is None:
            generic(params)  # typing itself raises the error for a second subscript
            name = f"{cls.__name__}[{describe(params)}]"
            names = {"params_type": params, "__module__": cls.__module__, "__doc__": cls.__doc__}
            made = _TYPED[cls, params] = type(name, (cls,), names)
        return made

    @abc.abstractmethod
    def heading(self, depth: int) -> str:
        """Return the line above the section's text, or "" for none. `depth` is the section's level, 0 at the top."""

    def note_tools(self, names: Collection[str]) -> None:
        """Take note of the names of all tools of a prompt that has this section. Called when such a prompt is created, unless its
        tools can change."""
        return None


_TYPED: dict[tuple[type, Any], type] = {}
"""The classes created for `MarkdownSection[Params]`. The same subscript always returns the same class."""


def _is_open(params: Any) -> bool:
    """Return whether this is a type variable or contains one, as in `class Mine(MarkdownSection[T])`."""
    if isinstance(params, TypeVar):
        return True
    return not isinstance(params, type) and bool(getattr(params, "__parameters__", ()))


class MarkdownSection(Section[ParamsT], Generic[ParamsT]):
    """A section that is rendered as Markdown under a heading.

    The heading is `## Title` at the top, with one more `#` at each level below, up to six.

    The template is Markdown in which `$name` or `${name}` stands for a field of the params and `$$` for a
    dollar sign. Values are inserted unchanged.
    """

    def heading(self, depth: int) -> str:
        return f"{'#' * min(depth + 2, 6)} {self.title}"


class LiveSection(MarkdownSection[Any]):
    """A section whose tools come from elsewhere, such as an MCP server, and can change during a run.

    A run calls `connect` before it renders its prompt, and `current_tools` before each request to the model. Both get the
    run's principal, because the tools may depend on who has logged in.
    """

    @abc.abstractmethod
    async def connect(self, principal: str) -> None:
        """Make the tools available. Raises a `HandrailError` if that fails and the run can't begin without them."""

    @abc.abstractmethod
    def current_tools(self, principal: str) -> tuple[Tool[Any, Any], ...]:
        """Return the current tools of a principal: the same tuple each time, until they change."""


class PlainSection(MarkdownSection[Any]):
    """A section created from a plain string. It has no heading."""

    def heading(self, depth: int) -> str:
        return ""


def as_sections(given: Any) -> Any:
    """Return a prompt's sections, with each string converted to a section.

    A single blank string gives an empty tuple. Anything else that is invalid is returned unchanged.
    """
    if isinstance(given, str):
        given = [given] if given.strip() else ()
    if not isinstance(given, list | tuple):
        return given
    numbers = itertools.count(1)
    members = cast("Sequence[Any]", given)
    return tuple(
        plain_section(each, next(numbers)) if isinstance(each, str) and each.strip() else each
        for each in members
    )


def plain_section(text: str, number: int) -> Section[Any]:
    """Create the section for a plain string in a prompt. `number` makes its key unique."""
    key = "instructions" if number == 1 else f"instructions-{number}"
    return cast("Section[Any]", PlainSection("Instructions", key, text))


def walk(sections: Sequence[Section[Any]], above: str = "") -> list[tuple[str, Section[Any]]]:
    """Return every section with its path, in declaration order."""
    found: list[tuple[str, Section[Any]]] = []
    for section in sections:
        path = f"{above}{section.key}"
        found += [(path, section), *walk(section.children, f"{path}.")]
    return found


# --- checks of a new section -----------------------------------------------------------------------


def _check(section: Section[Any]) -> None:
    """Check a new section, and convert its lists to tuples. Raises `DefinitionError` if it, or a tool in it, is invalid."""
    key: Any = section.key
    title: Any = section.title
    if not isinstance(key, str) or not _KEY.match(key):
        raise PromptDefinitionError(
            f"section {title!r}",
            f"the key {key!r} is not allowed",
            "Use letters, digits, '_' and '-'.",
        )
    place = f"section {key!r}"
    if not isinstance(title, str) or not title.strip() or not title.isprintable():
        raise PromptDefinitionError(place, f"the title is {title!r}", "Pass one line of text.")
    fields = None if section.params_type is None else fields_of(section.params_type)
    texts: dict[str, Any] = {"template": section.template, "summary": section.summary}
    for what, text in texts.items():
        if what == "template" or text is not None:
            if not isinstance(text, str):
                raise PromptDefinitionError(place, f"the {what} is {shown(text)}", "Pass a string.")
            check_placeholders(place, what, read_template(place, what, text), fields, section.params_type)
    for what in ("enabled", "visibility"):
        try:
            condition_of(section, what)
        except PromptDefinitionError as error:
            raise PromptDefinitionError(place, f"{what} {error.problem}", error.hint) from None
    if section.visibility != "full" and section.summary is None:
        raise PromptDefinitionError(
            place, "it may be shown as a summary, but has none", "Pass `summary=`, one or two sentences."
        )
    try:
        attachments = attachments_of(section.attachments)
    except DefinitionError as error:
        raise PromptDefinitionError(place, *error.parts) from None
    parts = {
        "attachments": attachments,
        "tools": check_tools(place, section.tools),
        "policies": prompt_policies(place, section.policies),
        "children": check_sections(place, "children", section.children),
    }
    for field, value in parts.items():
        object.__setattr__(section, field, value)


def condition_of(section: Section[Any], what: str) -> Condition:
    """Create the condition for a section's `enabled` or `visibility`. Raises `PromptDefinitionError` if it is invalid."""
    return Condition(
        getattr(section, what), what, (True, False) if what == "enabled" else ("full", "summary")
    )


def read_template(place: str, what: str, text: str) -> Template:
    """Parse a section's template or summary. If it is invalid, raises a `PromptDefinitionError` that names `place`."""
    if what == "summary" and not text.strip():
        raise PromptDefinitionError(
            place, "the summary is empty", "Say in a sentence what the section contains."
        )
    try:
        text.encode()
        return template_of(text)
    except PromptDefinitionError as error:
        raise PromptDefinitionError(place, f"{error.problem} of its {what}", error.hint) from None
    except UnicodeEncodeError:
        problem = f"its {what} contains half a character (a lone surrogate), which can't be sent"
        raise PromptDefinitionError(place, problem, "Correct how the text was decoded.") from None


def check_placeholders(
    place: str, what: str, template: Template, fields: frozenset[str] | None, params: Any
) -> None:
    """Raise `PromptDefinitionError` for a placeholder without a field. If `fields` is None, nothing is checked."""
    for name in sorted(template.names - (template.names if fields is None else fields)):
        if params is None:
            problem = f"its {what} uses ${name}, and no section declares the type of the params"
            hint = "Write MarkdownSection[Params](...), where Params is a dataclass with that field. A dollar sign is `$$`."
        else:
            problem = f"its {what} uses ${name}, and {describe(params)} has no field {name!r}"
            known = ", ".join(f"${field}" for field in sorted(fields or ())) or "none"
            hint = f"Its fields are {known}. A dollar sign is `$$`."
        raise PromptDefinitionError(place, problem, hint)


def check_tools(place: str, given: Iterable[Any]) -> tuple[Tool[Any, Any], ...]:
    """Return the items as a tuple. Raises a `DefinitionError` unless `given` is iterable and all are complete tools."""
    if isinstance(given, Tool):
        raise PromptDefinitionError(place, "tools is a single tool", f"Pass a list of tools: [{given.name}].")
    found: tuple[Any, ...] = _listed(place, "tools", given)
    for index, one in enumerate(found):
        if isinstance(one, Tool):
            cast("Tool[Any, Any]", one).check_complete()
            continue
        hint = "Pass tools created with @tool or Tool(...)."
        if isinstance(one, Section):
            hint = "It is a section: put it among the sections, Prompt(name, [...])."
        elif hasattr(one, "as_tool"):
            hint = "Pass it as a tool: agent.as_tool()."
        elif callable(one) and not isinstance(one, type):
            hint = f"Put @tool on {_name_of(one)}."
            if _name_of(one) == _LAMBDA:
                hint = "Write it as a function with a name and a docstring, and put @tool on that."
        raise PromptDefinitionError(place, f"tools[{index}] is {shown(cast(object, one))}", hint)
    return found


def prompt_policies(place: str, given: Iterable[Any]) -> tuple[Any, ...]:
    """Return the items as a tuple. Raises `PromptDefinitionError` unless `given` is iterable and all are policies."""
    found = _listed(place, "policies", given)
    for index, one in enumerate(found):
        if isinstance(one, type) or not all(hasattr(one, part) for part in ("name", "check", "on_result")):
            hint = "A policy has a `name`, `check` and `on_result`; see ToolPolicy."
            hint = f"Create one: {one.__name__}(...)." if isinstance(one, type) else hint
            raise PromptDefinitionError(place, f"policies[{index}] is {shown(one)}", hint)
    return found


def check_sections(place: str, what: str, given: Iterable[Any]) -> tuple[Section[Any], ...]:
    """Return the items as a tuple. Raises `PromptDefinitionError` unless all are sections with unique keys."""
    found = tuple(given)
    places: dict[str, int] = {}
    for index, one in enumerate(found):
        if not isinstance(one, Section):
            kind: Any = one
            hint = "Pass MarkdownSection(title, key, template)."
            if isinstance(kind, type) and issubclass(kind, Section):
                hint = f"Create one: {kind.__name__}(...)."
            raise PromptDefinitionError(place, f"{what}[{index}] is {shown(one)}", hint)
        if one.key in places:
            raise PromptDefinitionError(
                place,
                f"{what}[{places[one.key]}] and {what}[{index}] both have the key {one.key!r}",
                "Keys are unique among siblings: rename one.",
            )
        places[one.key] = index
    return found


def _listed(place: str, what: str, given: Any) -> tuple[Any, ...]:
    if not isinstance(given, Iterable):
        raise PromptDefinitionError(place, f"{what} is {shown(given)}", f"Pass a list of {what}.")
    return tuple(cast("Iterable[Any]", given))


def shown(given: object) -> str:
    """Describe an invalid argument for an error message."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if callable(given):
        return f"the function {_name_of(given)}"
    return "None" if given is None else describe_kind(given)


_LAMBDA = (lambda: None).__name__


def _name_of(given: object) -> str:
    return str(getattr(given, "__name__", type(given).__name__))
