"""Whether the acts of a handoff fit together, as far as their annotations say."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union, cast, get_args, get_origin

from handrail.context import ToolContext
from handrail.errors import DefinitionError, ToolDefinitionError
from handrail.handoff.parked import Parked
from handrail.schema import Schema
from handrail.schema.problems import describe
from handrail.tools import ToolResult
from handrail.tools.signature import MISSING, Signature, caller_namespace, context_parameter, positional, read


@dataclass(frozen=True, slots=True)
class Act:
    """One act as it was defined: its function and what its annotations say."""

    function: Callable[..., Any]
    is_async: bool
    context_type: type[ToolContext]
    takes: tuple[Any, ...]
    """The annotations of its positional arguments."""
    returns: Any
    wants_params: bool


def read_act(handoff: str, function: Callable[..., Any], act: str, form: str, params: Any) -> Act:
    """Read the function of an act, or say what is wrong with it."""
    what = f"`{act}`"
    signature = read(handoff, function, caller_namespace(), what)
    context_type = context_parameter(handoff, signature, what)
    wants_params = act != "before" and "params" in signature.parameters
    if wants_params:
        check_fit(handoff, "params", params, f"`params` of its {act}", signature.annotation("params"))
        rest = {name: each for name, each in signature.parameters.items() if name != "params"}
        signature = Signature(rest, signature.hints, signature.is_async)
    names = positional(handoff, signature, 2 if act == "after" else 1, what, form)
    takes = tuple(signature.annotation(name) for name in names)
    return Act(function, signature.is_async, context_type, takes, signature.returns, wants_params)


def parked_types(handoff: str, act: Act) -> tuple[Any, Any, Any]:
    """The private, the public and the result type of what a `before` says it returns."""
    mend = "Annotate it `-> Parked[Private, Public]`, or `-> Parked[Private, Public] | ToolResult[Result]`."
    members = members_of(act.returns)
    parked = [each for each in members if get_origin(each) is Parked]
    results = [each for each in members if each is ToolResult or get_origin(each) is ToolResult]
    if act.returns is MISSING or any(each is Parked for each in members):
        raise ToolDefinitionError(handoff, "its `before` does not say what it parks", mend)
    if len(parked) + len(results) != len(members):
        raise ToolDefinitionError(handoff, f"its `before` returns {describe(act.returns)}", mend)
    if len(parked) != 1:
        problem = "never hands over" if not parked else "parks different things"
        raise ToolDefinitionError(handoff, f"its `before` {problem}", mend)
    private, public = get_args(parked[0])
    given = [get_args(each)[0] if get_args(each) else Any for each in results]
    return private, public, given[0] if len(given) == 1 else Any


def parked_only(act: Act) -> bool:
    """Does this `before` always hand over?"""
    return len(members_of(act.returns)) == 1


def schema_for(handoff: str, what: str, annotation: Any, namespace: Mapping[str, Any]) -> Schema[Any]:
    """The schema by which one part of a handoff is written down and read again."""
    try:
        return Schema[Any](annotation, namespace)
    except DefinitionError as error:
        problem, mend = error.parts
        more = "What lives only in this process belongs into `resources`." if what == "private" else ""
        raise ToolDefinitionError(
            handoff, f"its {what} part can't be written down: {problem}", f"{mend} {more}".strip()
        ) from None


def check_fit(handoff: str, what: str, given: Any, whose: str, wanted: Any) -> None:
    """Refuse a value of one type where certainly another is wanted."""
    if not fits(given, wanted):
        raise ToolDefinitionError(
            handoff,
            f"{what} is {describe(given)} and {whose} is annotated {describe(wanted)}",
            "Make them the same type.",
        )


def fits(given: Any, wanted: Any) -> bool:
    """May a value of the one type be one of the other? True wherever it can't be told."""
    given, wanted = _plain(given), _plain(wanted)
    if given == wanted or Any in (given, wanted) or MISSING in (given, wanted):
        return True
    if len(members_of(given)) > 1:
        return all(fits(each, wanted) for each in members_of(given))
    if len(members_of(wanted)) > 1:
        return any(fits(given, each) for each in members_of(wanted))
    origins = [get_origin(each) or each for each in (given, wanted)]
    if not all(isinstance(each, type) for each in origins):
        return True
    have, want = cast("list[type]", origins)
    if getattr(want, "_is_protocol", False) or (have is int and want is float):
        return True
    try:
        if not issubclass(have, want):
            return False
    except TypeError:  # a TypedDict, which can't be asked
        return True
    inside, wanted_inside = get_args(given), get_args(wanted)
    if have is not want or len(inside) != len(wanted_inside):
        return True
    return all(fits(one, other) for one, other in zip(inside, wanted_inside, strict=True))


def members_of(annotation: Any) -> tuple[Any, ...]:
    """The types a union is made of; of anything else, itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def either(one: Any, other: Any) -> Any:
    """The type of what is of the one or of the other."""
    return Any if Any in (one, other) else Union[one, other]  # noqa: UP007  # `|` is not there for None


def _plain(annotation: Any) -> Any:
    if annotation is None:
        return type(None)
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
