"""The rules of what one section may be, found when it is made. What sections share is the prompt's to check."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from handrail.errors import PromptDefinitionError
from handrail.prompt.condition import asked_for
from handrail.prompt.params import fields_of, is_record
from handrail.prompt.template import Template, template_of
from handrail.schema.wording import describe
from handrail.tools import Tool

if TYPE_CHECKING:
    from handrail.prompt.section import Section

_KEY = re.compile(r"[a-z0-9_-]+\Z")


def check_params_type(name: str, params: Any) -> None:
    """Refuse `MarkdownSection[int]`: placeholders are named fields."""
    if not is_record(params):
        shown = describe(params)
        raise PromptDefinitionError(
            f"{name}[{shown}]",
            f"{shown} has no named fields for placeholders to name",
            "Give a dataclass or a pydantic model, the class itself.",
        )


def check_section(section: Section[Any], kind: type[Section[Any]]) -> None:
    """Make a new section's parts tuples, and refuse it with the mend if it is wrong."""
    key: Any = section.key
    title: Any = section.title
    if not isinstance(key, str) or not _KEY.match(key):
        raise PromptDefinitionError(
            f"section {title!r}",
            f"the key {key!r} is not allowed",
            "Use the characters a-z, 0-9, '_' and '-'.",
        )
    place = f"section {key!r}"
    if not isinstance(title, str) or not title.strip() or not title.isprintable():
        raise PromptDefinitionError(place, f"the title is {title!r}", "Give one line of text.")
    fields = None if section.params_type is None else fields_of(section.params_type)
    for what, text in (("template", section.template), ("summary", section.summary)):
        if what == "template" or text is not None:
            check_placeholders(place, what, read_template(place, what, text), fields, section.params_type)
    if not isinstance(cast(object, section.accepts_overrides), bool):
        given = section.accepts_overrides
        raise PromptDefinitionError(place, f"accepts_overrides is {given!r}", "It is True or False.")
    _check_conditions(place, section)
    _fill(section, "tools", tools_of(place, section.tools))
    _fill(section, "policies", policies_of(place, section.policies))
    _fill(section, "children", sections_of(place, "children", section.children, kind))


def _fill(section: Section[Any], field: str, value: Any) -> None:
    object.__setattr__(section, field, value)


def read_template(place: str, what: str, text: Any) -> Template:
    """The template that a text is, or the error that says what is wrong with it."""
    if not isinstance(text, str):
        raise PromptDefinitionError(place, f"the {what} is {shown(text)}", "Give a text.")
    if what == "summary" and not text.strip():
        raise PromptDefinitionError(
            place, "the summary is empty", "Say in a sentence what the section holds."
        )
    try:
        text.encode()
        return template_of(text)
    except PromptDefinitionError as error:
        raise PromptDefinitionError(place, f"{error.problem} of its {what}", error.mend) from None
    except UnicodeEncodeError:
        problem = f"its {what} holds half a character (a lone surrogate), which can't be sent"
        raise PromptDefinitionError(place, problem, "Correct how the text was decoded.") from None


def check_placeholders(
    place: str, what: str, template: Template, fields: frozenset[str] | None, params: Any
) -> None:
    """Refuse a placeholder without a field; nothing is known where `fields` is None."""
    for name in sorted(template.names - (template.names if fields is None else fields)):
        if params is None:
            problem = f"its {what} uses ${name}, and no section says what the params are"
            mend = "Write MarkdownSection[Params](...), Params being a dataclass with that field; a dollar is `$$`."
        else:
            problem = f"its {what} uses ${name}, and {describe(params)} has no field {name!r}"
            known = ", ".join(f"${field}" for field in sorted(fields or ())) or "none"
            mend = f"Its fields are {known}; a dollar sign is `$$`."
        raise PromptDefinitionError(place, problem, mend)


def _check_conditions(place: str, section: Section[Any]) -> None:
    enabled: Any = section.enabled
    visibility: Any = section.visibility
    if not isinstance(enabled, bool):
        _check_function(place, "enabled", enabled, "Give True, False, or a function that says so.")
    if visibility not in ("full", "summary"):
        _check_function(
            place, "visibility", visibility, "Give 'full', 'summary', or a function that says which."
        )
    if visibility != "full" and section.summary is None:
        raise PromptDefinitionError(
            place, "it may be shown as a summary and has none", "Give `summary=`, one or two sentences."
        )


def _check_function(place: str, what: str, given: Any, mend: str) -> None:
    if not callable(given) or isinstance(given, type):
        raise PromptDefinitionError(place, f"{what} is {given!r}", mend)
    try:
        asked_for(cast("Callable[..., Any]", given))
    except PromptDefinitionError as error:
        raise PromptDefinitionError(place, f"the function of {what} {error.problem}", error.mend) from None


def several(place: str, what: str, given: Any, wanted: str) -> tuple[Any, ...]:
    """A tuple of what was given as a list, or the error for what is no list."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise PromptDefinitionError(
            place, f"{what} is {shown(cast(object, given))}", f"Give a list of {wanted}."
        )
    return tuple(cast("Iterable[Any]", given))


def tools_of(place: str, given: Any) -> tuple[Tool[Any, Any], ...]:
    found = several(place, "tools", given, "tools")
    for index, one in enumerate(found):
        if not isinstance(one, Tool):
            is_function = callable(one) and not isinstance(one, type)
            mend = (
                f"Put @tool on {_name_of(one)}." if is_function else "Give tools, made by @tool or Tool(...)."
            )
            if hasattr(one, "template"):
                mend = "It is a section: put it among the sections, Prompt(name, [...])."
            raise PromptDefinitionError(place, f"tools[{index}] is {shown(one)}", mend)
        cast("Tool[Any, Any]", one).check_whole()
    return found


def policies_of(place: str, given: Any) -> tuple[Any, ...]:
    found = several(place, "policies", given, "policies")
    for index, one in enumerate(found):
        if isinstance(one, type):
            raise PromptDefinitionError(
                place, f"policies[{index}] is the class {one.__name__}", f"Make one: {one.__name__}(...)."
            )
        if not all(hasattr(one, member) for member in ("name", "check", "on_result")):
            mend = "A policy has a `name`, `check` and `on_result`; see ToolPolicy."
            raise PromptDefinitionError(place, f"policies[{index}] is {shown(one)}", mend)
    return found


def sections_of(place: str, what: str, given: Any, kind: type[Section[Any]]) -> tuple[Section[Any], ...]:
    """Check that these are sections with different keys. `kind` is `Section`, whose module needs this one."""
    found = several(place, what, given, "sections")
    places: dict[str, int] = {}
    for index, one in enumerate(found):
        if not isinstance(one, kind):
            mend = "Give MarkdownSection(title, key, template)."
            wrong: Any = one
            if isinstance(wrong, type) and issubclass(wrong, kind):
                mend = f"Make one: {wrong.__name__}(...)."
            raise PromptDefinitionError(place, f"{what}[{index}] is {shown(one)}", mend)
        if one.key in places:
            raise PromptDefinitionError(
                place,
                f"{what}[{places[one.key]}] and {what}[{index}] both have the key {one.key!r}",
                "Keys are unique among siblings: rename one.",
            )
        places[one.key] = index
    return found


def shown(given: object) -> str:
    """What somebody gave, in the words of an error."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if callable(given):
        return f"the function {_name_of(given)}"
    return "None" if given is None else f"a {type(given).__name__}"


def _name_of(given: object) -> str:
    return str(getattr(given, "__name__", type(given).__name__))
