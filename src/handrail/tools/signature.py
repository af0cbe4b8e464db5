"""Signatures and docstrings, from which a tool gets its parameters, result, context and descriptions."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Annotated, Any, Literal, Never, NoReturn, Union, cast, get_args, get_origin

import msgspec

from handrail.context import AgentContext, ToolContext, UserContext, WorkerContext
from handrail.errors import ToolDefinitionError
from handrail.schema.problems import describe
from handrail.tools.result import ToolResult

Need = Literal["user", "model", "worker"]
"""What a handler can require through the type of its context: a person, a model, or a worker in which it runs."""

MISSING: Any = inspect.Parameter.empty
"""Stands for what is missing, such as an annotation or a default."""

# --- signatures ----------------------------------------------------------------------------------


class Signature(msgspec.Struct, frozen=True):
    """The parameters of a callable, with every annotation resolved."""

    parameters: Mapping[str, inspect.Parameter]
    hints: Mapping[str, Any]
    is_async: bool

    def annotation(self, name: str) -> Any:
        return self.hints.get(name, MISSING)

    @property
    def returns(self) -> Any:
        """The type of a call's value, after awaiting it if the function is async; `MISSING` if it is not annotated."""
        returns = self.hints.get("return", MISSING)
        return get_args(returns)[-1] if _is_awaitable(returns) else returns


def caller_namespace() -> dict[str, Any]:
    """Return the local names of the code that defines a tool, for annotations that name local classes."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # inspect.currentframe is the same
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        generated = frame.f_code.co_filename == "<string>"
        ours = module.partition(".")[0] in ("handrail", "typing")  # `Tool[P, R](...)` goes through typing
        if not generated and not ours:
            return {} if frame.f_locals is frame.f_globals else dict(frame.f_locals)
        frame = frame.f_back
    return {}


def read(tool: str, function: Callable[..., Any], namespace: Mapping[str, Any], what: str) -> Signature:
    """Read the signature of `function`. Raises `ToolDefinitionError` if it can't be read, or if the function is a generator."""
    if not callable(function):
        raise ToolDefinitionError(
            tool, f"its {what} is {function!r}, not a function", "Pass a function or another callable."
        )
    body = body_of(function)
    if inspect.isasyncgenfunction(body) or inspect.isgeneratorfunction(body):
        raise ToolDefinitionError(
            tool,
            f"its {what} yields, but a call has one result",
            "Return the result, and publish anything before it with `context.emit(...)`.",
        )
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ToolDefinitionError(
            tool, f"the signature of its {what} can't be read", "Wrap it in a Python function."
        ) from None
    annotated = body if hasattr(body, "__annotations__") else type(body).__call__
    try:
        hints = typing.get_type_hints(annotated, localns=dict(namespace), include_extras=True)
    except NameError as error:
        raise ToolDefinitionError(
            tool,
            f"the name {error.name!r} in the annotations of its {what} can't be found",
            "Import it at the top of the module, outside `if TYPE_CHECKING:`, or define it above the tool.",
        ) from None
    except (TypeError, SyntaxError) as error:
        raise ToolDefinitionError(
            tool, f"the annotations of its {what} can't be read: {error}", "Write them as types."
        ) from None
    is_async = inspect.iscoroutinefunction(body) or _is_awaitable(hints.get("return"))
    return Signature(parameters, hints, is_async)


def _is_awaitable(returns: Any) -> bool:
    return get_origin(returns) in (Awaitable, Coroutine)


def body_of(function: Callable[..., Any]) -> Any:
    """Return the function that actually runs, behind partials, wrappers and callable objects."""
    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    if inspect.isroutine(inner):
        return inner
    call: Any = getattr(cast(Any, type(inner)), "__call__", None)  # noqa: B004  # the method itself is wanted
    return inspect.unwrap(call) if inspect.isfunction(call) else inner


def context_type_of(annotation: Any) -> type[ToolContext] | None:
    """Return the context type in an annotation, such as `ToolContext | None`, or None if it has none."""
    if get_origin(annotation) is Annotated:
        return context_type_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [one for one in get_args(annotation) if one is not type(None)]
        return context_type_of(kinds[0]) if len(kinds) == 1 else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, ToolContext) else None


def needs_of(context_type: type[ToolContext]) -> frozenset[Need]:
    """Return what a run must provide for a handler that takes this type of context."""
    kinds: dict[Need, type] = {"user": UserContext, "model": AgentContext, "worker": WorkerContext}
    return frozenset(need for need, kind in kinds.items() if issubclass(context_type, kind))


def context_parameter(tool: str, signature: Signature, what: str) -> type[ToolContext]:
    """Return the type of a handler's keyword-only parameter `context`; `ToolContext` if it is not annotated.

    A handler that takes `**` arguments needs no such parameter. Raises `ToolDefinitionError` if the parameter is missing or
    invalid.
    """
    parameter = signature.parameters.get("context")
    if parameter is None:
        if any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
            return ToolContext
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
    if annotation in (MISSING, Any, object):
        return ToolContext
    found = context_type_of(annotation)
    if found is None:
        raise ToolDefinitionError(
            tool,
            f"`context` of its {what} is annotated {describe(annotation)}",
            "Annotate it `ToolContext`, or `UserContext` or `AgentContext` to require a person or a model.",
        )
    return found


def positional(tool: str, signature: Signature, count: int, what: str, form: str) -> list[str]:
    """Return the names of the positional parameters that a handler is called with, besides its context.

    Raises `ToolDefinitionError` unless the handler can be called with exactly `count` of them.
    """
    names: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            if len(names) < count or parameter.default is MISSING:
                names.append(name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            names += [name] * (count - len(names))
        elif parameter.kind is parameter.KEYWORD_ONLY and name != "context" and parameter.default is MISSING:
            raise ToolDefinitionError(
                tool, f"its {what} has a parameter {name!r} that is never passed", f"Write it as `{form}`."
            )
    if len(names) != count:
        raise ToolDefinitionError(
            tool,
            f"its {what} takes {len(names)} arguments besides `context`, but is called with {count}",
            "Pass the bound method: `thing.method`." if names[:1] == ["self"] else f"Write it as `{form}`.",
        )
    return names


def value_type(returns: Any) -> Any:
    """Return the type of the value that a function returns; `Any` if it is not annotated.

    For `ToolResult[R]`, alone or in a union, it is `R`.
    """
    if returns in (MISSING, NoReturn, Never) or _is_result(returns):
        return get_args(returns)[0] if get_origin(returns) is ToolResult else Any
    if get_origin(returns) in (Union, types.UnionType):
        values = [value_type(one) for one in get_args(returns)]
        return Any if Any in values else Union[tuple(values)]  # noqa: UP007  # made of a list
    return returns


def result_of(tool: str, signature: Signature) -> Any:
    """Return the type of the values in a handler's results: the `R` of `-> ToolResult[R]`; `Any` if it is not annotated.

    Raises `ToolDefinitionError` if the annotation allows anything other than a `ToolResult`.
    """
    returns = signature.returns
    is_union = get_origin(returns) in (Union, types.UnionType)
    kinds = get_args(returns) if is_union else (returns,)
    if all(one in (MISSING, Any, NoReturn, Never) or _is_result(one) for one in kinds):
        return value_type(returns)
    raise ToolDefinitionError(
        tool,
        f"its handler returns {describe(returns)}",
        "Return a `ToolResult`, and annotate `-> ToolResult[...]`; for a plain function, use `@tool`.",
    )


def _is_result(annotation: Any) -> bool:
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, ToolResult)


# --- docstrings ----------------------------------------------------------------------------------

_PARAMETERS = re.compile(
    r"^\s*(Args|Arguments|Parameters|Params)\s*:\s*$"  # Google
    r"|^\s*Parameters\s*\n\s*-{3,}\s*$"  # NumPy
    r"|^\s*:param\s+[^:]+:",  # Sphinx
    re.MULTILINE,
)


def summary(docstring: str) -> str:
    """Return the first paragraph of a docstring, on one line, without its list of parameters."""
    found = _PARAMETERS.search(docstring)
    prose = docstring[: found.start()] if found else docstring
    return " ".join(re.split(r"\n\s*\n", prose.strip(), maxsplit=1)[0].split())


def parameter_descriptions(docstring: str) -> dict[str, str]:
    """Return a docstring's description of each parameter, in the Google, NumPy or Sphinx style."""
    found = _PARAMETERS.search(docstring)
    if found is None:
        return {}  # most docstrings describe no parameters, so the parser is rarely imported
    import logging

    from griffe import Docstring, DocstringSectionParameters, Parser

    heading = found.group()
    style = "sphinx" if ":param" in heading else "numpy" if "---" in heading else "google"
    head, section = docstring[: found.start()], docstring[found.start() :].lstrip("\n")
    logging.getLogger("griffe").setLevel(
        logging.ERROR
    )  # griffe warns that the types are not in the docstring
    return {
        parameter.name: " ".join(parameter.description.split())
        for part in Docstring(f"{head.rstrip()}\n\n{section}").parse(Parser(style))
        if isinstance(part, DocstringSectionParameters)
        for parameter in part.value
    }
