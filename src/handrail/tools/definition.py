"""`Tool`: a typed function that a model may call, as a frozen value checked when it is created."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, Protocol, Self, TypedDict, TypeVar, cast

import pydantic_core

from handrail.context import ToolContext
from handrail.errors import ToolValidationError
from handrail.protocols import RunMode
from handrail.schema import JsonSchema, Schema, Validate, clear_json, refuse_masks
from handrail.schema.secrets import WITHHELD
from handrail.schema.size import LONG, check_size
from handrail.text.spelling import checked_arguments
from handrail.tools.checks import Copy, check, check_words
from handrail.tools.effect import EFFECTS, Effect
from handrail.tools.path_arguments import Access, NamedPath, PathFinder
from handrail.tools.result import ToolExample, ToolResult
from handrail.tools.signature import MISSING, Need

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

    delegates: ClassVar[bool] = False
    """Whether the tool, like a worker, only makes inner calls. The policies decide on each of these calls."""

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


def _decoded(data: str | bytes) -> Any:
    try:
        return pydantic_core.from_json(data)
    except (ValueError, TypeError):
        return None  # the text is not JSON, so it is not the empty object
