"""Reading a handler's signature: what it takes, what it gives, and which context it wants."""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args, get_origin

from handrail.context import ToolContext
from handrail.errors import ToolDefinitionError
from handrail.schema.wording import describe
from handrail.tools.result import ToolResult

MISSING: Any = inspect.Parameter.empty
"""Stands for an annotation that is not there."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a callable's annotations say, resolved."""

    parameters: Mapping[str, inspect.Parameter]
    hints: Mapping[str, Any]
    is_async: bool

    def annotation(self, name: str) -> Any:
        return self.hints.get(name, MISSING)

    @property
    def returns(self) -> Any:
        return self.hints.get("return", MISSING)


def caller_namespace() -> dict[str, Any]:
    """The local names of whoever is defining a tool, for annotations that name local classes."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # inspect.currentframe is the same
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        generated = frame.f_code.co_filename == "<string>"
        ours = module.partition(".")[0] in ("handrail", "typing")  # typing: `Tool[P, R](...)` goes through it
        if not generated and not ours:
            return {} if frame.f_locals is frame.f_globals else dict(frame.f_locals)
        frame = frame.f_back
    return {}


def read(tool: str, function: Callable[..., Any], namespace: Mapping[str, Any], what: str) -> Signature:
    """The signature of `function`, every annotation resolved, or an error that says what can't be."""
    if not callable(function):
        raise ToolDefinitionError(
            tool, f"its {what} is {function!r}, not a function", "Give a function or another callable."
        )
    body = body_of(function)
    if inspect.isasyncgenfunction(body) or inspect.isgeneratorfunction(body):
        raise ToolDefinitionError(
            tool,
            f"its {what} yields, and a call has one result",
            "Return the result, and send what comes before it with `context.emit(...)`.",
        )
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ToolDefinitionError(
            tool, f"the signature of its {what} can't be read", "Wrap it in a function of your own."
        ) from None
    annotated = body if hasattr(body, "__annotations__") else type(body).__call__
    try:
        hints = typing.get_type_hints(annotated, localns=dict(namespace), include_extras=True)
    except NameError as error:
        raise ToolDefinitionError(
            tool,
            f"the name {error.name!r} in the annotations of its {what} can't be found",
            "Import it at the top of the module, outside `if TYPE_CHECKING:`.",
        ) from None
    except (TypeError, SyntaxError) as error:
        raise ToolDefinitionError(
            tool, f"the annotations of its {what} can't be read: {error}", "Write them as types."
        ) from None
    return Signature(parameters, hints, inspect.iscoroutinefunction(body))


def body_of(function: Callable[..., Any]) -> Any:
    """The function that really runs, behind partials, wrappers and callable objects."""
    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    if inspect.isroutine(inner):
        return inner
    call: Any = getattr(cast(Any, type(inner)), "__call__", None)  # noqa: B004  # the method itself is wanted
    return inspect.unwrap(call) if inspect.isfunction(call) else inner


def is_context_type(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, ToolContext)


def context_parameter(tool: str, signature: Signature, what: str) -> type[ToolContext]:
    """Check the `*, context: ToolContext` of a handler and return the type it asks for."""
    parameter = signature.parameters.get("context")
    if parameter is None:
        raise ToolDefinitionError(
            tool,
            f"its {what} takes no `context`",
            "Add `*, context: ToolContext` to its parameters"
            + ("; to migrate an old one, wrap it in `legacy_handler`." if what == "handler" else "."),
        )
    if parameter.kind is not parameter.KEYWORD_ONLY:
        raise ToolDefinitionError(
            tool,
            f"`context` of its {what} is not keyword-only",
            "Put `*,` before it: `(params, *, context: ToolContext)`.",
        )
    annotation = signature.annotation("context")
    if annotation is MISSING:
        return ToolContext
    if not is_context_type(annotation):
        raise ToolDefinitionError(
            tool,
            f"`context` of its {what} is annotated {describe(annotation)}",
            "Annotate it `ToolContext`, or `UserContext` or `AgentContext` to require a person or a model.",
        )
    return annotation


def positional(tool: str, signature: Signature, count: int, what: str, form: str) -> list[str]:
    """Check that a handler takes exactly so many positional arguments beside its context."""
    names: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            if len(names) < count or parameter.default is MISSING:
                names.append(name)
        elif name != "context" and parameter.default is MISSING:
            raise ToolDefinitionError(
                tool, f"its {what} has a parameter {name!r} that nothing fills", f"Write it as `{form}`."
            )
    if len(names) != count:
        raise ToolDefinitionError(
            tool,
            f"its {what} takes {len(names)} arguments beside `context`, and is called with {count}",
            "Give the bound method: `thing.method`." if names[:1] == ["self"] else f"Write it as `{form}`.",
        )
    return names


def result_of(tool: str, signature: Signature) -> Any:
    """The `R` of a handler that says `-> ToolResult[R]`; `Any` where it does not say."""
    returns = signature.returns
    if returns is MISSING or returns is ToolResult or returns is Any:
        return Any
    if get_origin(returns) is ToolResult:
        return get_args(returns)[0]
    raise ToolDefinitionError(
        tool,
        f"its handler returns {describe(returns)}",
        "Return a `ToolResult`, and annotate `-> ToolResult[...]`; a plain function goes with `@tool`.",
    )
