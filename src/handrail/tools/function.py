"""`@tool`, which turns a plain function into a tool.

The function's parameters become the params, and the first paragraph of its docstring becomes the description.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import reprlib
import sys
import warnings
from collections.abc import Callable, Coroutine, Mapping
from typing import (
    Annotated,
    Any,
    Generic,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    cast,
    get_args,
    get_origin,
    overload,
)

from pydantic import Field
from pydantic.fields import FieldInfo
from pydantic.warnings import UnsupportedFieldAttributeWarning

from handrail.context import ToolContext
from handrail.errors import DefinitionError, ToolDefinitionError, ToolValidationError
from handrail.schema import Schema
from handrail.schema.problems import describe, to_plain
from handrail.text.spelling import check_arguments
from handrail.tools.definition import Tool, ToolOptions
from handrail.tools.result import ToolResult, plain_result
from handrail.tools.signature import (
    MISSING,
    Signature,
    body_of,
    caller_namespace,
    context_type_of,
    parameter_descriptions,
    positional,
    read,
    summary,
    value_type,
)

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__handrail_context__"


@dataclasses.dataclass(frozen=True)  # no slots: a subscripted call, FunctionTool[...](...), sets an attribute
class FunctionTool(Tool[Any, R], Generic[P, R]):
    """A tool made from a plain function, which is available as `function`."""

    function: Callable[P, Any] = dataclasses.field(default=MISSING, repr=False)

    def __call__(self, *arguments: object, **named: object) -> NoReturn:
        """Raise `ToolDefinitionError`, because a tool runs only through a gate.

        Call `function` to run the plain function.
        """
        raise ToolDefinitionError(
            self.name,
            "a tool can't be called like a function",
            f"Call it through a gate: `await gate.invoke({self.name!r}, {{...}})`. In a test of the plain function, "
            f"call `{self.name}.function(...)`.",
        )


class ToolDecorator(Protocol):
    """The decorator that `@tool(...)` returns when it is called with options."""

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, ToolResult[R]]], /
    ) -> FunctionTool[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, ToolResult[R]], /) -> FunctionTool[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> FunctionTool[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> FunctionTool[P, R]: ...


@overload
def tool(function: Callable[P, Coroutine[Any, Any, ToolResult[R]]], /) -> FunctionTool[P, R]: ...
@overload
def tool(function: Callable[P, ToolResult[R]], /) -> FunctionTool[P, R]: ...
@overload
def tool(function: Callable[P, Coroutine[Any, Any, R]], /) -> FunctionTool[P, R]: ...
@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None, **options: Unpack[ToolOptions]
) -> ToolDecorator: ...
def tool(function: Any = None, /, **options: Any) -> Any:
    """Create a tool from a plain function, sync or async.

    By default, the tool has the function's name, and the first paragraph of the docstring is its description. The
    parameter annotated `ToolContext`, or a subclass of it, is injected and never shown to the model. A plain return value
    becomes `ToolResult.ok(value)`. Raises `ToolDefinitionError` if the definition is invalid.
    """
    check_arguments("@tool", ("name", "description", *ToolOptions.__annotations__), options, ["function"])
    if function is None:
        return functools.partial(_tool, **options)
    return _tool(function, **options)


def _tool(
    function: Any, /, *, name: str | None = None, description: str | None = None, **options: Any
) -> Any:
    if isinstance(function, Tool):
        raise ToolDefinitionError(function.name, "it is already a tool", "Use `@tool` once, on the function.")
    if isinstance(function, str):
        raise ToolDefinitionError(
            function, f"`@tool({function!r})` is not above a function", f"Write `@tool(name={function!r})`."
        )
    called = name or _name_of(function)
    namespace = caller_namespace()
    signature = read(called, function, namespace, "function")
    context_name = _context_name(called, function, signature)
    params = _params_type(called, function, signature, context_name, namespace)
    try:
        made = FunctionTool[Any, Any](
            name=called,
            description=_description(called, function) if description is None else description,
            handler=_handler(function, signature, context_name),
            params=params,
            result=value_type(signature.returns),
            function=function,
            **options,
        )
    except Exception:
        # If the default or the type of one parameter is invalid, the error names the parameter. A default may be so wrong that
        # creating the schema fails in other ways.
        for field in dataclasses.fields(params):
            _check_default(called, field.name, field.type, field.default, namespace)
        for field in dataclasses.fields(params):
            _schema(called, field.name, field.type, namespace)
        raise
    for field in dataclasses.fields(params):
        if field.default is not dataclasses.MISSING and not made.accepts_field(field.name, field.default):
            _check_default(called, field.name, field.type, field.default, namespace)
    return made


def _name_of(function: Any) -> str:
    body: Any = body_of(cast(Any, function)) if isinstance(function, functools.partial) else function
    return str(getattr(body, "__name__", type(body).__name__))


def _docstring(function: Any) -> str:
    """Return the docstring of the function that runs or, for a callable object without one, that of its class; "" if there is none."""
    own = inspect.getdoc(body_of(function))
    return own or ("" if isinstance(function, functools.partial) else inspect.getdoc(function) or "")


def _description(name: str, function: Callable[..., Any]) -> str:
    first = summary(_docstring(function))
    if not first and sys.flags.optimize >= 2:
        raise ToolDefinitionError(
            name,
            "`python -OO` removes the docstring that describes it",
            "Use `python -O`, or pass `@tool(description=...)`.",
        )
    if not first:
        raise ToolDefinitionError(
            name,
            "it has no docstring",
            "Describe what it does in a docstring, or pass `@tool(description=...)`.",
        )
    return first


def _context_name(name: str, function: Any, signature: Signature) -> str | None:
    """Return the name of the context parameter, found by its annotation or by `@tool_context`; None if there is none.

    Raises `ToolDefinitionError` if there is more than one, or if the marked one is annotated with a type that is not a context.
    """
    marked = cast("str | None", getattr(inspect.unwrap(function), _MARK, None))
    found = [each for each in signature.parameters if context_type_of(signature.annotation(each))]
    annotation = MISSING if marked is None else signature.annotation(marked)
    if annotation not in (MISSING, Any) and context_type_of(annotation) is None:
        raise ToolDefinitionError(
            name,
            f"`@tool_context` marks {marked!r}, which is annotated {describe(annotation)}",
            "Annotate it `ToolContext`, or mark another parameter.",
        )
    if marked is not None and marked not in found:
        found.append(marked)
    if len(found) > 1:
        raise ToolDefinitionError(
            name, f"{' and '.join(map(repr, found))} are both declared as the context", "Keep one of them."
        )
    return found[0] if found else None


def _params_type(
    name: str,
    function: Any,
    signature: Signature,
    context_name: str | None,
    namespace: Mapping[str, Any],
) -> Any:
    """Create a dataclass with one field for each parameter except the context.

    Raises `ToolDefinitionError` if a parameter can't be a field, if its mutable default does not match its annotation, or if
    the docstring describes a parameter that does not exist. Other defaults are not checked.
    """
    described = parameter_descriptions(_docstring(function))
    fields: list[tuple[str, Any, Any]] = []
    for each, parameter in signature.parameters.items():
        if each == context_name:
            continue
        _check_parameter(name, parameter, signature)
        annotation = _described(signature.annotation(each), described.pop(each, None))
        fields.append(_field(name, each, annotation, parameter.default, namespace))
    if described:
        taken = inspect.signature(body_of(function)).parameters  # including parameters filled by a partial
        for each in described:
            if each not in taken:
                raise ToolDefinitionError(
                    name,
                    f"its docstring describes {each!r}, which it does not take",
                    "Correct the docstring.",
                )
    docstring = f"{name}(...)"  # pydantic takes no description from a docstring that begins like this one
    try:
        return dataclasses.make_dataclass(
            str(name),
            fields,
            bases=(_Params,),
            namespace={"__doc__": docstring},
            kw_only=True,
            init=False,
            repr=False,
            eq=False,
        )
    except TypeError as error:
        raise ToolDefinitionError(name, f"its parameters can't be fields: {error}", "Rename them.") from None


class _Params:
    """Params of a tool, with the methods that `dataclass` would compile anew for each tool.

    The gate parses params without calling `__init__`.
    """

    def __init__(self, /, **values: Any) -> None:
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]  # every subclass is a dataclass
            if field.name in values:
                value = values.pop(field.name)
            elif field.default_factory is not dataclasses.MISSING:
                value = field.default_factory()
            elif (value := field.default) is dataclasses.MISSING:
                raise TypeError(f"{type(self).__name__}() lacks the argument {field.name!r}")
            setattr(self, field.name, value)
        if values:
            raise TypeError(f"{type(self).__name__}() takes no argument {next(iter(values))!r}")

    def __eq__(self, other: object) -> bool:
        return _values_of(self) == _values_of(other) if type(other) is type(self) else NotImplemented

    @reprlib.recursive_repr()
    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in _values_of(self).items())
        return f"{type(self).__qualname__}({values})"


def _values_of(params: Any) -> dict[str, Any]:
    return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}


def _check_parameter(name: str, parameter: inspect.Parameter, signature: Signature) -> None:
    each = parameter.name
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise ToolDefinitionError(
            name,
            f"it takes {str(parameter).split(':')[0]!r}, which a schema can't describe",
            "Name each parameter.",
        )
    if signature.annotation(each) is not MISSING:
        if isinstance(parameter.default, FieldInfo):
            raise ToolDefinitionError(
                name,
                f"the default of {each!r} is a pydantic Field",
                "Put it into the annotation: `Annotated[..., Field(...)] = default`.",
            )
        return
    if each in ("self", "cls"):
        hint = "Make a tool of the bound method: `tool(thing.method)`."
    elif each in ("context", "ctx"):
        hint = f"Annotate it `{each}: ToolContext`, or put `@tool_context(param={each!r})` below `@tool`."
    else:
        hint = f"Annotate it, for example `{each}: str`."
    raise ToolDefinitionError(name, f"{each!r} has no annotation", hint)


def _described(annotation: Any, description: str | None) -> Any:
    has_own = get_origin(annotation) is Annotated and any(
        isinstance(extra, FieldInfo) and extra.description for extra in get_args(annotation)[1:]
    )
    return (
        annotation
        if description is None or has_own
        else Annotated[annotation, Field(description=description)]
    )


def _schema(name: str, parameter: str, annotation: Any, namespace: Mapping[str, Any]) -> Schema[Any]:
    with warnings.catch_warnings():
        # pydantic warns that an alias has no effect on an annotation that is parsed by itself. That does not matter here.
        warnings.simplefilter("ignore", UnsupportedFieldAttributeWarning)
        try:
            return Schema[Any](annotation, namespace)
        except DefinitionError as error:
            problem, hint = error.parts
            raise ToolDefinitionError(name, f"{parameter!r}: {problem}", hint) from None


def _check_default(
    tool: str, parameter: str, annotation: Any, default: Any, namespace: Mapping[str, Any]
) -> None:
    """Raise `ToolDefinitionError` if a default does not match the annotation of its parameter."""
    if default is dataclasses.MISSING:
        return
    schema = _schema(tool, parameter, annotation, namespace)
    try:
        if not schema.accepts(default):  # a default need not be JSON, because a model never has to send it
            schema.parse_value(default)
    except ToolValidationError as error:
        raise ToolDefinitionError(
            tool,
            f"the default {default!r} of {parameter!r} does not match its annotation: {error}",
            "Change one of them" + ("; `... | None` allows None." if default is None else "."),
        ) from None


def _field(
    tool: str, name: str, annotation: Any, default: Any, namespace: Mapping[str, Any]
) -> tuple[str, Any, Any]:
    """Create a field of the params type. A mutable default is checked now, and copied for each call."""
    if default is MISSING:
        return name, annotation, dataclasses.field()
    if type(default).__hash__ is not None:
        return name, annotation, dataclasses.field(default=default)
    _check_default(tool, name, annotation, default, namespace)
    shown = Field(json_schema_extra={"default": to_plain(default)})
    copied = dataclasses.field(default_factory=lambda: copy.deepcopy(default))
    return name, Annotated[annotation, shown], copied


def _handler(function: Any, signature: Signature, context_name: str | None) -> Any:
    """Wrap the function as a handler. The handler's context has the type that the function declares."""
    function = _by_name(function, signature)

    def plain_handler(params: Any, *, context: Any) -> ToolResult[Any]:
        arguments = params.__dict__
        value = function(**(arguments if context_name is None else {**arguments, context_name: context}))
        return cast(ToolResult[Any], value) if isinstance(value, ToolResult) else plain_result(value)

    async def async_handler(params: Any, *, context: Any) -> ToolResult[Any]:
        arguments = params.__dict__
        value = await function(
            **(arguments if context_name is None else {**arguments, context_name: context})
        )
        return cast(ToolResult[Any], value) if isinstance(value, ToolResult) else plain_result(value)

    handler: Any = async_handler if signature.is_async else plain_handler
    wanted = MISSING if context_name is None else signature.annotation(context_name)
    handler.__annotations__ = {"context": context_type_of(wanted) or ToolContext}
    return handler


def _by_name(function: Any, signature: Signature) -> Any:
    """Wrap the function, if it has positional-only parameters, so that it takes all of its arguments by name."""
    parameters = signature.parameters.items()
    names = [name for name, parameter in parameters if parameter.kind is parameter.POSITIONAL_ONLY]
    if not names:
        return function

    def call(**given: Any) -> Any:
        return function(*[given.pop(name) for name in names], **given)

    return call


def legacy_handler(function: Callable[[Any], Any]) -> Any:
    """Wrap a handler that does not take `context`, for use during a migration.

    It is called as `function(params)`. A `DeprecationWarning` is issued once, when it is wrapped.
    Raises `ToolDefinitionError` if the function already takes `context`, or does not take one argument.
    """
    name = str(getattr(function, "__name__", function))
    signature = read(name, function, caller_namespace(), "handler")
    if "context" in signature.parameters:
        raise ToolDefinitionError(name, "it already takes `context`", "Use it without `legacy_handler`.")
    (params,) = positional(
        name, signature, 1, "handler", "(params, *, context: ToolContext) -> ToolResult[...]"
    )
    warnings.warn(
        f"handler {name!r} does not take `context`: add `*, context: ToolContext` and drop `legacy_handler`",
        DeprecationWarning,
        stacklevel=2,
    )

    async def async_wrapper(params: Any, *, context: Any) -> Any:
        return await function(params)

    def plain_wrapper(params: Any, *, context: Any) -> Any:
        return function(params)

    wrapper: Any = async_wrapper if signature.is_async else plain_wrapper
    wrapper.__name__ = name
    annotations = {"params": signature.annotation(params), "return": signature.returns}
    wrapper.__annotations__ = {key: hint for key, hint in annotations.items() if hint is not MISSING}
    return wrapper


@overload
def tool_context(function: F, /) -> F: ...
@overload
def tool_context(*, param: str = "ctx") -> Callable[[F], F]: ...
def tool_context(function: Any = None, /, *, param: str = "ctx") -> Any:
    """Mark the parameter that receives the context, for a function that does not annotate it.

    Without arguments, the parameter is `ctx`. The model never sees it. Raises `ToolDefinitionError` if the function has
    no such parameter, or is a tool already.
    """
    if function is None:
        return functools.partial(_mark, param=param)
    return _mark(function, param)


def _mark(function: Any, param: str) -> Any:
    name = str(getattr(function, "__name__", function))
    if not callable(function):
        raise ToolDefinitionError(
            name,
            f"`@tool_context({function!r})` is not above a function",
            f"To mark the parameter {name!r}, write `@tool_context(param={name!r})`.",
        )
    if isinstance(function, Tool):
        raise ToolDefinitionError(
            cast("Tool[Any, Any]", function).name,
            "`@tool_context` is above `@tool`",
            "Put `@tool` above it, because `@tool` reads the mark.",
        )
    if param not in inspect.signature(function).parameters:
        raise ToolDefinitionError(
            name,
            f"`@tool_context` marks {param!r}, but the function has no such parameter",
            f"Add the parameter {param!r}, or mark another one: `@tool_context(param=...)`.",
        )
    setattr(function, _MARK, param)
    return function
