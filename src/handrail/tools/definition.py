"""`Tool`: a typed function that a model may call, as a frozen value checked when it is made."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, cast

import pydantic_core

from handrail.context import ToolContext
from handrail.errors import ToolValidationError
from handrail.protocols import RunMode
from handrail.schema import JsonSchema, Schema, Validate, clear_json, refuse_masks
from handrail.schema.secrets import WITHHELD
from handrail.tools.checks import check, check_words
from handrail.tools.effect import EFFECTS, Effect
from handrail.tools.params import Copy
from handrail.tools.paths import Access, NamedPath, PathFinder
from handrail.tools.result import ToolExample, ToolResult
from handrail.tools.signature import MISSING, Need

ParamsT = TypeVar("ParamsT")
ResultT = TypeVar("ResultT")
Params_contra = TypeVar("Params_contra", contravariant=True)

_NOTHING: dict[type, tuple[Any, ...]] = {str: ("", "null"), bytes: (b"", b"null")}


class Handler(Protocol[Params_contra, ResultT]):
    """What runs when a tool is called, as a plain or an async function.

    `context` is always passed, by keyword. Its type may be narrower than `ToolContext`, which makes
    the tool require what that type promises.
    """

    def __call__(
        self, params: Params_contra, /, *, context: Any
    ) -> ToolResult[ResultT] | Awaitable[ToolResult[ResultT]]: ...


@dataclasses.dataclass(frozen=True)  # no slots: a subscripted call, Tool[...](...), sets an attribute
class Tool(Generic[ParamsT, ResultT]):
    """A typed function a model may call.

    The types of parameters and result come from the handler's annotations, `(params: P, *, context:
    ToolContext) -> ToolResult[R]`; `params` and `result` name them where there is no handler or it
    has no annotations. Whatever is wrong with a definition is a `ToolDefinitionError` here, not later.
    """

    name: str
    description: str
    handler: Handler[ParamsT, ResultT] | None = None
    params: Any = MISSING
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

    delegates: ClassVar[bool] = False
    """Is all it does done by calls inside it, each decided on and answered for by itself? So with a worker."""

    reenters: bool = dataclasses.field(init=False, repr=False, compare=False, default=False)
    """Does the handler do nothing but make inner calls and ask? Then it can be begun again from the top,
    whatever the effect, and is never simply run once more: it may have asked somebody."""
    shown: Callable[[ToolResult[Any]], ToolResult[Any]] | None = dataclasses.field(
        init=False, repr=False, compare=False, default=None
    )
    """What of a result may be seen outside, where that is not all of it."""
    is_async: bool = dataclasses.field(init=False, repr=False, compare=False)
    context_type: type[ToolContext] = dataclasses.field(init=False, repr=False, compare=False)
    needs: frozenset[Need] = dataclasses.field(init=False, repr=False, compare=False)
    secret: bool = dataclasses.field(init=False, repr=False, compare=False, default=False)
    """Can there be a secret among its arguments? Then what a model writes is masked before it is shown."""
    json_schema: JsonSchema = dataclasses.field(init=False, repr=False, compare=False)
    _schema: Schema[ParamsT] | None = dataclasses.field(init=False, repr=False, compare=False)
    _result_schema: Schema[ResultT] | None = dataclasses.field(init=False, repr=False, compare=False)
    result_class: type | tuple[type, ...] | None = dataclasses.field(init=False, repr=False, compare=False)
    """The class every result is of, where the declared type is one; None where it is more than that."""
    _quick: Validate | None = dataclasses.field(init=False, repr=False, compare=False)
    _copy: Copy | None = dataclasses.field(init=False, repr=False, compare=False)
    _paths: PathFinder = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check(self)

    def check_complete(self) -> None:
        """Raise `ToolDefinitionError` if a part is still missing. Called where a tool is put to use."""

    def with_words(
        self, *, description: str | None = None, examples: tuple[ToolExample[Any, Any], ...] | None = None
    ) -> Self:
        """A copy that reads differently to a model, or `ToolDefinitionError` if the new words do not fit.

        The handler is not read again: the names in its annotations may be local to where it was defined.
        """
        made = copy.copy(self)
        for field, value in (("description", description), ("examples", examples)):
            if value is not None:
                object.__setattr__(made, field, value)
        check_words(made)
        return made

    def parse(self, arguments: str | bytes | Mapping[str, Any]) -> ParamsT:
        """The params that these arguments stand for, or `ToolValidationError` with every problem."""
        quick = self._quick
        if quick is not None and (type(arguments) is str or type(arguments) is bytes):
            try:
                return quick(arguments, strict=True, extra="forbid")
            except Exception:
                pass  # looked at again with care, for the words
        return self._parse_with_care(arguments)

    def parse_again(self, params: ParamsT, arguments: str | bytes | Mapping[str, Any]) -> ParamsT:
        """The same params once more, sharing nothing with the others that could be changed."""
        return self.parse(arguments) if self._copy is None else self._copy(params)

    def _parse_with_care(self, arguments: str | bytes | Mapping[str, Any]) -> ParamsT:
        data = arguments if isinstance(arguments, str | bytes) else None
        if data is not None and data.strip() in _NOTHING[type(data)]:
            data = "{}"  # what models send where nothing is asked for
        if self._schema is None:
            if (arguments if data is None else _decoded(data)) != {}:
                raise ToolValidationError(f"{self.name} takes no arguments. Call it with {{}}.")
            return cast(ParamsT, None)
        if self.secret:
            data = clear_json(arguments) if data is None else data
            refuse_masks(data)
        return self._schema.parse_value(arguments) if data is None else self._schema.parse(data)

    def mask(self, arguments: str | bytes | Mapping[str, Any]) -> str:
        """These arguments as they can be shown and recorded, also where they do not fit: then all is masked."""
        data = arguments if isinstance(arguments, str | bytes) else clear_json(arguments)
        return WITHHELD if self._schema is None else self._schema.mask(data)

    def dump(self, params: ParamsT) -> bytes:
        """These params as the JSON a model would have sent; secrets masked."""
        return b"{}" if self._schema is None else self._schema.dump(params)

    def clear(self, params: ParamsT) -> bytes:
        """The same with the secrets in it: to be parsed again at once, and never shown or kept."""
        return b"{}" if self._schema is None else self._schema.clear(params)

    @property
    def enters_again(self) -> bool:
        """May a handler that was cut be entered again from the top?"""
        again = EFFECTS[self.effect].after_crash in ("run again", "run again with the same key")
        return again or self.reenters or self.delegates

    @property
    def result_schema(self) -> Schema[ResultT] | None:
        """What a result's value fits; None where nothing was declared."""
        return self._result_schema

    @property
    def path_accesses(self) -> frozenset[Access]:
        """What its arguments can name paths for; empty where none of them is declared as one."""
        return self._paths.declared

    def paths(self, params: ParamsT) -> tuple[NamedPath, ...]:
        """The paths these params name, where the type declares them with `PathArg`."""
        return self._paths.find(params)


def _decoded(data: str | bytes) -> Any:
    try:
        return pydantic_core.from_json(data)
    except (ValueError, TypeError):
        return None  # not JSON, so not the empty object
