"""`Parked` and `Act`: what a handoff sets aside while somebody else decides, and each of its functions."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, Union, get_args, get_origin

from handrail.context import ToolContext
from handrail.errors import DefinitionError, ToolDefinitionError
from handrail.schema import Schema
from handrail.schema.problems import describe
from handrail.tools import ToolResult
from handrail.tools.signature import MISSING, Signature, caller_namespace, context_parameter, positional, read

PrivateT = TypeVar("PrivateT")
PublicT = TypeVar("PublicT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Parked(Generic[PrivateT, PublicT]):
    """What `before` returns to hand over.

    `private` goes to `after` and nowhere else; `public` is all that the other side sees. Both are
    plain data (dataclasses, pydantic models, JSON values), since a handoff may wait for days.
    """

    private: PrivateT = field(repr=False)
    public: PublicT


@dataclass(frozen=True)
class Begun(Generic[PrivateT, PublicT, ResultT]):
    """The recorded outcome of `before`: either `parked`, or finished early with `value`."""

    parked: Parked[PrivateT, PublicT] | None = field(default=None, repr=False)
    value: ResultT | None = None


@dataclass(frozen=True, slots=True)
class Act:
    """One act of a handoff: its function and its annotations."""

    function: Callable[..., Any]
    is_async: bool
    context_type: type[ToolContext]
    takes: tuple[Any, ...]
    """The annotations of its positional arguments."""
    returns: Any
    wants_params: bool


def read_act(handoff: str, function: Callable[..., Any], act: str, form: str, params: Any) -> Act:
    """Read the function of an act. Raises `ToolDefinitionError` where it can't be one."""
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
    """The private type, the public type and the early result type that `before` is annotated with."""
    hint = "Annotate it `-> Parked[Private, Public]`, or `-> Parked[Private, Public] | ToolResult[Result]`."
    members = _members(act.returns)
    parked = [each for each in members if get_origin(each) is Parked]
    results = [each for each in members if each is ToolResult or get_origin(each) is ToolResult]
    if act.returns is MISSING or Parked in members:
        raise ToolDefinitionError(handoff, "its `before` does not say what it parks", hint)
    if len(parked) + len(results) != len(members):
        raise ToolDefinitionError(handoff, f"its `before` returns {describe(act.returns)}", hint)
    if len(parked) != 1:
        problem = "never hands over" if not parked else "parks different things"
        raise ToolDefinitionError(handoff, f"its `before` {problem}", hint)
    private, public = get_args(parked[0])
    early = [get_args(each)[0] if get_args(each) else Any for each in results]
    return private, public, early[0] if len(early) == 1 else Any


def always_parks(act: Act) -> bool:
    """Whether this `before` never returns a result of its own."""
    return len(_members(act.returns)) == 1


def schema_for(handoff: str, what: str, annotation: Any, namespace: Mapping[str, Any]) -> Schema[Any]:
    """The schema that one part of a handoff is recorded with."""
    try:
        return Schema[Any](annotation, namespace)
    except DefinitionError as error:
        problem, hint = error.parts
        more = "Keep in `resources` what lives only in this process." if what == "private" else ""
        raise ToolDefinitionError(
            handoff, f"its {what} part can't be recorded: {problem}", f"{hint} {more}".strip()
        ) from None


def check_fit(handoff: str, what: str, given: Any, whose: str, wanted: Any) -> None:
    """Refuse one class where an unrelated class is wanted. Anything finer is left to a type checker."""
    given, wanted = (type(None) if each is None else each for each in (given, wanted))
    if any(each in (Any, MISSING) or not isinstance(each, type) for each in (given, wanted)):
        return
    if getattr(wanted, "_is_protocol", False) or (given is int and wanted is float):
        return
    try:
        fits = issubclass(given, wanted)
    except TypeError:  # a TypedDict or a generic alias, which `issubclass` rejects
        return
    if not fits:
        raise ToolDefinitionError(
            handoff,
            f"{what} is {describe(given)} and {whose} is annotated {describe(wanted)}",
            "Make them the same type.",
        )


def either(one: Any, other: Any) -> Any:
    """The union of two types."""
    return Any if Any in (one, other) else Union[one, other]  # noqa: UP007  # `|` is not there for None


def _members(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the annotation itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
