"""`Tool`: a typed function that a model may call, as a frozen value checked when it is created."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import types
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Protocol,
    Self,
    TypedDict,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import pydantic_core
from pydantic import BaseModel
from typing_extensions import is_typeddict

from handrail.content import REFERENCE, Attachment
from handrail.context import ToolContext
from handrail.errors import DefinitionError, ToolDefinitionError, ToolValidationError
from handrail.protocols import RunMode
from handrail.schema import JsonSchema, Schema, Validate, clear_json, refuse_masks, schema_of
from handrail.schema.immutability import ReadOnlyDict, is_immutable, read_only
from handrail.schema.problems import describe
from handrail.schema.secrets import WITHHELD
from handrail.schema.size import LONG, check_size
from handrail.text.spelling import checked_arguments
from handrail.tools.effect import EFFECTS, Effect
from handrail.tools.path_arguments import Access, NamedPath, PathFinder
from handrail.tools.result import ToolExample, ToolResult
from handrail.tools.signature import (
    MISSING,
    Need,
    caller_namespace,
    context_parameter,
    needs_of,
    positional,
    read,
    result_of,
)

CAPABILITY = r"[a-z][a-z0-9_-]*(\.[a-z0-9_-]+)*"
"""The pattern of a capability: lower-case words joined by dots, as in `fs.read` or `s3.write`."""

_LONGEST_EXAMPLE = 200
_NAME = re.compile(r"[a-z0-9_-]{1,64}\Z")
_CAPABILITY = re.compile(rf"{CAPABILITY}\Z")
_NO_ARGUMENTS: JsonSchema = read_only({"type": "object", "properties": {}, "additionalProperties": False})
_COMMON: tuple[Any, ...] = (str, int, bool, None, type(None), dict, list)
_PROVIDED: dict[RunMode, set[Need]] = {
    "user": {"user", "worker"},
    "agent": {"model", "worker"},
    "headless": {"worker"},
}

ParamsT = TypeVar("ParamsT")
ResultT = TypeVar("ResultT")
Params_contra = TypeVar("Params_contra", contravariant=True)

_NOTHING: dict[type, tuple[Any, ...]] = {str: ("", "null"), bytes: (b"", b"null")}


class Handler(Protocol[Params_contra, ResultT]):
    """The plain or async function that runs when a tool is called.

    `context` is always passed by keyword. Its type may be narrower than `ToolContext`; if so, the tool requires
    what that type promises.
    """

    def __call__(
        self, params: Params_contra, /, *, context: Any
    ) -> ToolResult[ResultT] | Awaitable[ToolResult[ResultT]]: ...


class ToolOptions(TypedDict, total=False):
    """Options that `@tool` and `Handoff` share, apart from the name and the description.

    They are fields of `Tool`, with the same defaults.
    """

    accepts_overrides: bool
    examples: Iterable[ToolExample[Any, Any]]
    capabilities: Iterable[str]
    timeout: float | None
    effect: Effect
    alone: bool
    compensate: Callable[..., Any] | None
    probe: Callable[..., Any] | None
    run_mode: RunMode | None
    heartbeat: float | None
    pinned: bool
    result_limit: int | None


@checked_arguments
@dataclasses.dataclass(frozen=True)  # no slots: a subscripted call, Tool[...](...), sets an attribute
class Tool(Generic[ParamsT, ResultT]):
    """A typed function that a model may call.

    The types of params and result come from the handler's annotations, `(params: P, *, context: ToolContext) ->
    ToolResult[R]`; `params` and `result` specify them if there is no handler or it has no annotations. `params` may
    also be a JSON Schema 2020-12, as a dict. It is then shown to the model as it is, and the handler gets the validated
    arguments as a dict. An invalid definition raises `ToolDefinitionError` immediately.
    """

    name: str
    description: str
    handler: Handler[ParamsT, ResultT] | None = None
    params: Any = dataclasses.field(default=MISSING, hash=False)
    result: Any = MISSING
    accepts_overrides: bool = True
    examples: tuple[ToolExample[Any, Any], ...] = dataclasses.field(default=(), hash=False)
    capabilities: frozenset[str] = frozenset()
    timeout: float | None = None
    effect: Effect = "irreversible"
    alone: bool = False
    compensate: Callable[..., Any] | None = None
    probe: Callable[..., Any] | None = None
    run_mode: RunMode | None = None
    heartbeat: float | None = None
    """Seconds within which the handler promises to call `context.beat()` again; None for no promise.

    If the handler does not call it in time, its call is stopped.
    """
    pinned: bool = False
    """Whether the tool's newest result is still sent to the model when a long conversation is compacted."""
    result_limit: int | None = None
    """Largest number of characters of a result that a model is shown whole; None to use the limit of the run, if it has one.

    Of a longer result, the model is shown the beginning and the end, and reads the rest with the tool `read_result`.
    """

    delegates: ClassVar[bool] = False
    """Whether the tool, like a worker, only makes inner calls. The policies decide on each of these calls."""

    spans: ClassVar[bool] = False
    """Whether the tool, like a script, calls the other tools of its run. Its effect is then the strongest of theirs."""

    reenters: bool = dataclasses.field(init=False, repr=False, compare=False, default=False)
    """Whether the handler only makes inner calls and asks questions.

    If so, a resumed run can re-enter it from the top, whatever its effect. If a call would have to run again because
    its reads are out of date, it ends in a conflict instead, since the handler may have asked somebody.
    """
    shown: Callable[[ToolResult[Any]], ToolResult[Any]] | None = dataclasses.field(
        init=False, repr=False, compare=False, default=None
    )
    """A function that returns the part of a result that may be seen outside the call; None if all of it may be seen."""
    reach: str | None = dataclasses.field(init=False, repr=False, compare=False, default=None)
    """What the tool's commands can reach besides their folder and the system, as text for an approval; "" if nothing else.

    None if that is unknown, or if the tool runs no commands.
    """
    origin: str = dataclasses.field(init=False, repr=False, compare=False, default="")
    """Where results come from if they come from outside of this program, such as `server files`; otherwise "".

    It is recorded with each call.
    """
    is_late: bool = dataclasses.field(init=False, repr=False, compare=False, default=False)
    """Whether a server has added the tool to a list of tools that was in use. It then gives way to other tools of its name."""
    is_timed: bool = dataclasses.field(init=False, repr=False, compare=False)
    """Whether the tool has a timeout or a heartbeat."""
    writes: bool = dataclasses.field(init=False, repr=False, compare=False)
    """Whether the tool's effect lets it change files and state."""
    is_async: bool = dataclasses.field(init=False, repr=False, compare=False)
    context_type: type[ToolContext] = dataclasses.field(init=False, repr=False, compare=False)
    needs: frozenset[Need] = dataclasses.field(init=False, repr=False, compare=False)
    secret: bool = dataclasses.field(init=False, repr=False, compare=False, default=False)
    """Whether the tool's arguments can contain a secret. If so, the secret is masked when they are shown or recorded."""
    json_schema: JsonSchema = dataclasses.field(init=False, repr=False, compare=False)
    _schema: Schema[ParamsT] | None = dataclasses.field(init=False, repr=False, compare=False)
    _result_schema: Schema[ResultT] | None = dataclasses.field(init=False, repr=False, compare=False)
    result_class: type | tuple[type, ...] | None = dataclasses.field(init=False, repr=False, compare=False)
    """The class or classes by which `isinstance` can check a result's value; None if it can't."""
    _quick: Validate | None = dataclasses.field(init=False, repr=False, compare=False)
    copy_params: Copy = dataclasses.field(init=False, repr=False, compare=False)
    """A function that takes params and the arguments they were parsed from, and returns params that share nothing mutable with them."""
    _paths: PathFinder = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check(self)

    def check_complete(self) -> None:
        """Raise `ToolDefinitionError` if a part is still missing. Called before a tool is used.

        A plain tool is complete once it exists. Subclasses can override this.
        """

    def with_words(
        self, *, description: str | None = None, examples: tuple[ToolExample[Any, Any], ...] | None = None
    ) -> Self:
        """Return a copy with different texts for the model. Raises `ToolDefinitionError` if they are invalid.

        The handler's signature is not read again: its annotations may use names that are local to where it
        was defined.
        """
        made = copy.copy(self)
        for field, value in (("description", description), ("examples", examples)):
            if value is not None:
                object.__setattr__(made, field, value)
        check_words(made)
        return made

    def spanning(self, others: Iterable[Tool[Any, Any]]) -> Self:
        """Return a copy whose effect is the strongest of the other tools'."""
        made, effect = copy.copy(self), cast(Effect, "pure")
        for other in others:
            if not other.spans and EFFECTS[other.effect].strength > EFFECTS[effect].strength:
                effect = other.effect
        object.__setattr__(made, "effect", effect)
        object.__setattr__(made, "writes", EFFECTS[effect].writes)
        return made

    def parse(self, arguments: str | bytes | Mapping[str, Any]) -> ParamsT:
        """Parse a call's arguments. If they are invalid, raises a `ToolValidationError` that lists the problems."""
        quick = self._quick
        if type(arguments) is str or type(arguments) is bytes:
            if len(arguments) > LONG:
                check_size(arguments)
            if quick is None:
                return self._parse_slowly(arguments)
            try:
                return quick(arguments, strict=True, extra="forbid")
            except Exception:
                pass  # parsed again below, because "" and null can mean no arguments, and for the error message
        return self._parse_slowly(arguments)

    def _parse_slowly(self, arguments: str | bytes | Mapping[str, Any]) -> ParamsT:
        data = arguments if isinstance(arguments, str | bytes) else None
        if data is not None and data.strip() in _NOTHING[type(data)]:
            data = "{}"  # models send these when there are no arguments
        if self._schema is None:
            if (arguments if data is None else _decoded(data)) != {}:
                raise ToolValidationError(f"{self.name} takes no arguments. Call it with {{}}.")
            return cast(ParamsT, None)
        if self.secret:
            data = clear_json(arguments) if data is None else data
            refuse_masks(data)
        return self._schema.parse_value(arguments) if data is None else self._schema.parse(data)

    def mask(self, arguments: str | bytes | Mapping[str, Any]) -> str:
        """Return the arguments with their secrets masked, to be shown and recorded.

        Invalid arguments, and those of a tool without params, are withheld entirely. Arguments that are invalid only because
        they already contain masks are not.
        """
        data = arguments if isinstance(arguments, str | bytes) else clear_json(arguments)
        return WITHHELD if self._schema is None else self._schema.mask(data)

    def accepts_field(self, name: str, value: object) -> bool:
        """Return whether a Python value is certainly valid for a field of the params as it is. False if that is not certain."""
        return self._schema is not None and self._schema.accepts_field(name, value)

    def dump(self, params: ParamsT) -> bytes:
        """Return the params as the JSON that a model would send, with secrets masked."""
        return b"{}" if self._schema is None else self._schema.dump(params)

    def clear(self, params: ParamsT) -> bytes:
        """Return the params as JSON with their secrets unmasked. Parse the JSON immediately; never show or store it."""
        return b"{}" if self._schema is None else self._schema.clear(params)

    @property
    def enters_again(self) -> bool:
        """Whether an interrupted handler may be entered again from the top, unless its call was given a secret."""
        again = EFFECTS[self.effect].after_crash in ("run again", "run again with the same key")
        return again or self.reenters or self.delegates

    @property
    def result_schema(self) -> Schema[ResultT] | None:
        """The schema of a result's value; None if the value may have any type."""
        return self._result_schema

    @property
    def path_accesses(self) -> frozenset[Access]:
        """The kinds of access for which the tool's arguments can name paths; empty if it declares no paths."""
        return self._paths.declared

    def paths(self, params: ParamsT) -> tuple[NamedPath, ...]:
        """Return the paths in these params, as declared with `PathArg`."""
        return self._paths.find(params)


LEAST_LIMIT = 200
"""The smallest limit on results. What is shown of a longer result says how to read on, which takes about as many characters."""


def problem_with_limit(limit: Any) -> tuple[str, str] | None:
    """Return why this is not a limit on results, with a hint; None if it is one, or None itself."""
    if limit is None or (type(limit) is int and limit >= LEAST_LIMIT):
        return None
    hint = f"Pass a whole number of characters of at least {LEAST_LIMIT}, or None for no limit."
    return f"result_limit is {limit!r}", hint


def _decoded(data: str | bytes) -> Any:
    try:
        return pydantic_core.from_json(data)
    except (ValueError, TypeError):
        return None  # the text is not JSON, so it is not the empty object


# --- checks of a new tool --------------------------------------------------------------------------


def is_name(name: object) -> bool:
    """Return whether a tool may have this name. Names are restricted because models have to write them."""
    return isinstance(name, str) and _NAME.match(name) is not None


def name_hint(name: object, otherwise: str = "my_tool") -> str:
    """Return a hint that says which names are allowed and, if `name` is a non-empty string, suggests another."""
    allowed = "Use 1 to 64 of the characters a-z, 0-9, '_' and '-'"
    if not isinstance(name, str) or not name:
        return f"{allowed}."
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    suggestion = re.sub(r"[^a-z0-9_-]+", "_", words).strip("_")[:64] or otherwise
    return f"{allowed}, for example {suggestion!r}."


def check(tool: Tool[Any, Any]) -> None:
    """Check a new tool, and fill in its derived fields. Raises `ToolDefinitionError` if the definition is invalid."""
    _Check(tool).all()


def check_words(tool: Tool[Any, Any]) -> None:
    """Check the description and examples again, after they or the type of the result were changed.

    Raises `ToolDefinitionError` if they are invalid.
    """
    check = _Check(tool)
    check.description()
    check.examples()


class _Check:
    """Checks one tool, and fills in its derived fields. `all` checks every rule."""

    def __init__(self, tool: Tool[Any, Any]) -> None:
        self.tool = tool
        self.namespace = caller_namespace()

    def all(self) -> None:
        self.name()
        self.description()
        self.choices()
        self.capabilities()
        self.handler()
        self.schemas()
        self.effect()
        self.examples()

    def error(self, problem: str, hint: str) -> ToolDefinitionError:
        return ToolDefinitionError(str(self.tool.name), problem, hint)

    def fill(self, field: str, value: Any) -> None:
        object.__setattr__(self.tool, field, value)

    def name(self) -> None:
        if not is_name(self.tool.name):
            raise self.error(f"the name {self.tool.name!r} is not allowed", name_hint(self.tool.name))

    def description(self) -> None:
        text: Any = self.tool.description
        if not isinstance(text, str) or not text.strip():
            raise self.error(
                "it has no description", "Describe in one sentence what it does. The model reads this."
            )

    def choices(self) -> None:
        tool = self.tool
        for field, choices in (("effect", EFFECTS), ("run_mode", (*get_args(RunMode), None))):
            if getattr(tool, field) not in choices:
                words = ", ".join(map(repr, choices))
                raise self.error(f"{field} is {getattr(tool, field)!r}", f"Use one of {words}.")
        for field, without in (("timeout", "no timeout"), ("heartbeat", "no heartbeat")):
            seconds: Any = getattr(tool, field)
            is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if seconds is not None and not (is_number and 0 < seconds < math.inf):
                hint = f"Pass a positive number of seconds, or None for {without}."
                raise self.error(f"{field} is {seconds!r}", hint)
        problem = problem_with_limit(tool.result_limit)
        if problem:
            raise self.error(*problem)
        self.fill("is_timed", tool.timeout is not None or tool.heartbeat is not None)
        self.fill("writes", EFFECTS[tool.effect].writes)
        self.fill("shown", tool.shown)  # a default is read faster from the instance than from the class

    def capabilities(self) -> None:
        given: Any = self.tool.capabilities
        if isinstance(given, str):
            raise self.error(f"capabilities is {given!r}", f"Pass a set of words, for example {{{given!r}}}.")
        for word in given:
            if not isinstance(word, str) or not _CAPABILITY.match(word):
                raise self.error(
                    f"the capability {word!r} is not valid",
                    "Use lower-case words joined by dots, as in 'fs.read'.",
                )
            if word in EFFECTS:
                raise self.error(
                    f"{word!r} is an effect, not a capability",
                    f"Pass effect={word!r}, and remove it from the capabilities.",
                )
        self.fill("capabilities", frozenset(given))

    def handler(self) -> None:
        tool = self.tool
        if tool.handler is None:
            self.fill("is_async", False)
            self.fill("context_type", ToolContext)
            self.fill("needs", frozenset[Need]())
            self.fill("params", None if tool.params is MISSING else tool.params)
            self.fill("result", Any if tool.result is MISSING else tool.result)
            return
        signature = read(tool.name, tool.handler, self.namespace, "handler")
        context_type = context_parameter(tool.name, signature, "handler")
        form = "(params, *, context: ToolContext) -> ToolResult[...]"
        (name,) = positional(tool.name, signature, 1, "handler", form)
        self.fill("is_async", signature.is_async)
        self.fill("context_type", context_type)
        self.fill("needs", needs_of(context_type))
        annotation = signature.annotation(name)
        if tool.params is not MISSING:
            self.agree("its handler", name, annotation)
        elif annotation is MISSING:
            raise self.error(
                f"its handler's parameter {name!r} has no annotation",
                "Annotate it with a dataclass or a pydantic model, or pass `params=`.",
            )
        else:
            self.fill("params", None if annotation is type(None) else annotation)
        result = result_of(tool.name, signature)
        if tool.result is MISSING:
            self.fill("result", result)
        elif _disagree(result, tool.result):
            raise self.error(
                f"`result` is {describe(tool.result)} but its handler returns {describe(result)}",
                "Remove `result=`, or make them the same type.",
            )
        if tool.run_mode is not None and not tool.needs <= _PROVIDED[tool.run_mode]:
            raise self.error(
                f"its handler requires {context_type.__name__}, which run_mode {tool.run_mode!r} never has",
                "Change one of them.",
            )

    def agree(self, whose: str, parameter: str, annotation: Any) -> None:
        """Raise `ToolDefinitionError` if a function's annotation is certainly not the type of the tool's params."""
        params = self.tool.params
        if isinstance(params, Mapping):
            params = dict
            annotation = Any if is_typeddict(annotation) else get_origin(annotation) or annotation
        if _disagree(params, annotation):
            raise self.error(
                f"`params` is {describe(params)}, but {parameter!r} of {whose} is annotated {describe(annotation)}",
                "Make them the same type.",
            )

    def schemas(self) -> None:
        tool = self.tool
        raw = isinstance(tool.params, Mapping)
        if tool.params is not None and not raw and not is_record(tool.params):
            raise self.error(
                f"its params are {describe(tool.params)}, but arguments are always an object with named fields",
                "Use a dataclass, a pydantic model, a JSON Schema, or None. Mappings and TypedDicts can be fields of these.",
            )
        try:
            schema = None if tool.params is None else self.params_schema()
            result = None if tool.result is Any else self.result_schema()
            paths = PathFinder(None if raw else tool.params, self.namespace)
        except DefinitionError as error:
            raise self.error(*error.parts) from error.__cause__
        if schema is not None and f'"{REFERENCE}"' in str(msgspec.json.encode(schema.json_schema)):
            raise self.error(
                "its params contain an Attachment, which a model can't write",
                "Take a path or a name instead, and return attachments in the result.",
            )
        if result is not None and result.has_bytes:
            raise self.error(
                f"it returns {describe(tool.result)}, and bytes can't be written as JSON",
                "Return text, or an Attachment for a picture, a sound or a document.",
            )
        self.fill("_schema", schema)
        self.fill("result_class", _class_of(tool.result))
        self.fill("copy_params", quick_copy(tool.params, self.namespace) or partial(_parse_again, tool))
        self.fill("secret", schema is not None and schema.secret)
        self.fill("_quick", None if schema is None or schema.secret else schema.quick)
        self.fill("_result_schema", result)
        self.fill("_paths", paths)
        self.fill("json_schema", ReadOnlyDict(_NO_ARGUMENTS) if schema is None else schema.json_schema)

    def params_schema(self) -> Schema[Any]:
        """Create the schema of the params. Raises `DefinitionError` if they can't be described or checked."""
        params = self.tool.params
        if not isinstance(params, Mapping):
            return Schema[Any](params, self.namespace)
        from handrail.schema.raw import RawSchema, check_schema

        given = cast("Mapping[str, Any]", params)
        check_schema(given, "its params")
        made = RawSchema(given, definite=False)
        self.fill("params", made.json_schema)
        return made

    def result_schema(self) -> Schema[Any]:
        """Return the schema of the result. Tools share those of the commonest types. Raises `DefinitionError` if there is none."""
        result = self.tool.result
        return schema_of(result) if result in _COMMON else Schema[Any](result, self.namespace)

    def effect(self) -> None:
        tool = self.tool
        if (tool.effect == "compensable") != (tool.compensate is not None):
            raise self.error(
                "effect='compensable' and a `compensate` handler belong together, and only one of them was passed",
                "Pass both, or neither.",
            )
        if tool.compensate is not None:
            form = "(params, value, *, context: ToolContext) -> None"
            self.companion(tool.compensate, "compensate", 2, form)
        if tool.probe is not None:
            if tool.effect not in ("compensable", "irreversible"):
                raise self.error(
                    f"it has a `probe`, but its effect is {tool.effect!r}, which is never probed",
                    "Remove the probe, or set effect='compensable' or 'irreversible'.",
                )
            self.companion(tool.probe, "probe", 1, "(params, *, context: ToolContext) -> bool | None")
        writes = sorted(word for word in tool.capabilities if word.endswith(".write"))
        if not EFFECTS[tool.effect].writes and (writes or "write" in tool.path_accesses):
            what = f"the capability {writes[0]!r}" if writes else "a PathArg('write')"
            raise self.error(
                f"effect is {tool.effect!r} but it has {what}", "Set effect='staged', or remove the write."
            )

    def companion(self, function: Callable[..., Any], what: str, count: int, form: str) -> None:
        """Raise `ToolDefinitionError` if a `compensate` or `probe` function has the wrong signature."""
        signature = read(self.tool.name, function, self.namespace, what)
        context_parameter(self.tool.name, signature, what)
        name = positional(self.tool.name, signature, count, what, form)[0]
        self.agree(f"its {what}", name, signature.annotation(name))

    def examples(self) -> None:
        self.fill("examples", tuple(self.tool.examples))
        for index, example in enumerate(self.tool.examples):
            self.example(f"examples[{index}]", example)

    def example(self, place: str, example: ToolExample[Any, Any]) -> None:
        if not isinstance(cast(object, example), ToolExample):
            raise self.error(
                f"{place} is {example!r}", "Pass ToolExample(description=..., input=..., output=...)."
            )
        if not 0 < len(example.description) <= _LONGEST_EXAMPLE:
            raise self.error(
                f"{place} has a description of {len(example.description)} characters",
                f"Describe in 1 to {_LONGEST_EXAMPLE} characters what it shows.",
            )
        tool = self.tool
        params_type = get_origin(tool.params) or tool.params
        if isinstance(params_type, type) and not isinstance(example.input, params_type | Mapping):
            raise self.error(
                f"the input of {place} is {example.input!r}",
                f"Pass an instance of {describe(tool.params)}, or a mapping with its fields.",
            )
        for part, schema in (("input", tool._schema), ("output", tool._result_schema)):  # pyright: ignore[reportPrivateUsage]  # our own tool
            value: Any = getattr(example, part)
            try:
                if schema is not None:
                    schema.parse_value(value)
                elif part == "input" and value is not None and value != {}:
                    raise ToolValidationError("the tool takes no arguments")
            except ToolValidationError as error:
                raise self.error(
                    f"the {part} of {place} is invalid: {error}", f"Make it match the {part}'s type."
                ) from None


def _disagree(given: Any, wanted: Any) -> bool:
    """Return whether a value of type `given` is certainly not a `wanted`. Only classes are compared."""
    if not isinstance(given, type) or not isinstance(wanted, type) or {given, wanted} & {Any, MISSING}:
        return False
    return not getattr(wanted, "_is_protocol", False) and not issubclass(given, wanted)


def _class_of(result: Any) -> type | tuple[type, ...] | None:
    """Return the class or classes by which `isinstance` can check a result, or None if it can't.

    For a generic type such as `list[int]`, this is the class without arguments; for a union, its members' classes.
    """
    origin: Any = get_origin(result) or result
    if origin is Annotated:
        return _class_of(get_args(result)[0])
    if origin in (Union, types.UnionType):
        return _classes_of(get_args(result))
    if origin is None:
        return type(None)
    if origin is float:
        return (float, int)
    if _is_sequence(origin) and any(map(_may_attach, get_args(result) or (Any,))):
        return (origin,)  # in a tuple, so that the gate skips its fast path, which misses attachments
    is_open = origin is object or is_typeddict(origin) or getattr(origin, "_is_protocol", False)
    return origin if isinstance(origin, type) and origin is not Any and not is_open else None


def _is_sequence(origin: Any) -> bool:
    return origin is list or origin is tuple


def _may_attach(item: Any) -> bool:
    """Return whether items of this type can be attachments."""
    if item in (Any, object, Attachment):
        return True
    return get_origin(item) in (Union, types.UnionType, Annotated) and any(map(_may_attach, get_args(item)))


def _classes_of(results: Iterable[Any]) -> tuple[type, ...] | None:
    found: list[type] = []
    for each in map(_class_of, results):
        if each is None:
            return None
        found += each if isinstance(each, tuple) else (each,)
    return tuple(found)


Arguments = str | bytes | Mapping[str, Any]
Copy = Callable[[Any, Arguments], Any]

_new: Callable[[Any], Any] = object.__new__


def is_record(kind: Any) -> bool:
    """Return whether a type is a dataclass or a pydantic model with named fields."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    origin = get_origin(kind) or kind
    if isinstance(origin, type) and issubclass(origin, BaseModel):
        return not getattr(origin, "__pydantic_root_model__", False)
    return isinstance(origin, type) and dataclasses.is_dataclass(cast("type[Any]", origin))


def quick_copy(params: Any, namespace: Mapping[str, Any]) -> Copy | None:
    """Return a function that copies params of this type without parsing; None if they have to be parsed again instead.

    Fields that are all immutable can be shared, and a frozen dataclass of them need not be copied at all.
    """
    if params is None:
        return _share
    if isinstance(params, Mapping):
        return deep_copy
    if not isinstance(params, type) or not dataclasses.is_dataclass(params) or hasattr(params, "__slots__"):
        return None
    try:
        hints = get_type_hints(params, localns=dict(namespace), include_extras=True)
    except (NameError, TypeError):
        return None
    if not all(is_immutable(hints[field.name]) for field in dataclasses.fields(params)):
        return None
    frozen: bool = getattr(params, "__dataclass_params__").frozen  # noqa: B009  # not in the type stubs
    return _share if frozen else _shallow_copy


def _parse_again(tool: Tool[Any, Any], params: Any, arguments: Arguments) -> Any:
    return tool.parse(arguments)


def _share(params: Any, arguments: Arguments) -> Any:
    return params


def deep_copy(params: Any, arguments: Arguments) -> Any:
    return copy.deepcopy(params)


def _shallow_copy(params: Any, arguments: Arguments) -> Any:
    copied = _new(type(params))
    copied.__dict__ = params.__dict__.copy()
    return copied
