"""`ToolResult`: the outcome of a call, as the model sees it. `ToolExample`: a call shown to the model in advance."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar, cast, overload, runtime_checkable

import msgspec

from handrail.content import Attachment, AttachmentSource, attachments_of
from handrail.errors import CallFailed
from handrail.schema import to_json
from handrail.text.spelling import checked_arguments

_BYTES = re.compile("(?<![\ud800-\udbff])[\udc80-\udcff]")
"""Characters that Python uses in a file name for bytes that are not valid UTF-8."""

P = TypeVar("P")
R = TypeVar("R")
V = TypeVar("V")


@runtime_checkable
class Renders(Protocol):
    """A value that can render itself for a model."""

    def render(self) -> str: ...


class ToolResult(msgspec.Struct, Generic[R], frozen=True, dict=True):
    """The outcome of one call. With `success=False`, the call's changes to files and state are undone, as after an exception.

    The model sees the message and the rendered value. With `exclude_value_from_context` it sees only the
    message, which keeps a large value out of the conversation. That flag is not a security boundary.
    """

    message: str
    value: R
    success: bool = True
    exclude_value_from_context: bool = False
    attachments: tuple[Attachment, ...] = ()
    """Pictures, documents and other files that the model sees with the text."""

    @overload
    @staticmethod
    def ok(*, message: str = "", attachments: Iterable[AttachmentSource] = ()) -> ToolResult[None]: ...
    @overload
    @staticmethod
    def ok(
        value: V,
        message: str = "",
        *,
        exclude_value_from_context: bool = False,
        attachments: Iterable[AttachmentSource] = (),
    ) -> ToolResult[V]: ...
    @staticmethod
    def ok(
        value: Any = None,
        message: str = "",
        *,
        exclude_value_from_context: bool = False,
        attachments: Iterable[AttachmentSource] = (),
    ) -> ToolResult[Any]:
        """Create the result of a call that succeeded. A value that is None or excluded is not part of its text.

        Each of the `attachments` is an `Attachment`, the path of a file on disk, or an http address.
        """
        if not attachments:
            return ToolResult(message, value, True, exclude_value_from_context)
        return ToolResult(message, value, True, exclude_value_from_context, attachments_of(attachments))

    @staticmethod
    def error(
        message: str, value: Any = None, *, attachments: Iterable[AttachmentSource] = ()
    ) -> ToolResult[Any]:
        """Create the result of a call that failed. The call's changes to files and state are undone.

        Write the message so that the model can act on it.
        """
        return ToolResult(message, value, False, False, attachments_of(attachments))

    def unwrap(self) -> R:
        """Return the value of a call that succeeded. Raises `CallFailed` if the call failed."""
        if not self.success:
            raise CallFailed("the call", self)
        return self.value

    def render(self) -> str:
        """Return the text that is shown to the model.

        It is never empty, since providers refuse empty results.
        """
        shown = "" if self.exclude_value_from_context else _render_value(self.value)
        if self.message and shown:
            return f"{self.message}\n{shown}"
        return self.message or shown or ("done" if self.success else "failed")


def plain_result(value: Any) -> ToolResult[Any]:
    """Return the result of a function that returned a plain value. Unlike in a result of its own, None is a value here."""
    result = ToolResult("", value)
    if value is None:
        cast(Any, result).__dict__["plain"] = True  # a Struct with dict=True has a plain dict
    return result


def lacks_value(result: ToolResult[Any]) -> bool:
    """Return whether a result has no value, whatever type was declared: the handler created it with None."""
    return result.value is None and "plain" not in result.__dict__


_NUMBERS = frozenset([int, float, bool])

# The gate renders a result before the call is committed, and keeps the rendering in the result's `__dict__`. So a value
# that can be rendered only once, or changes later, is shown and recorded as it was. For an inner call, and for a value
# that is a string, a number, a boolean or None, the rendering is kept only if the gate had to correct it.


def keep_rendering(result: ToolResult[Any], text: str, json: str | None) -> None:
    """Keep the text that a result was rendered as, and the JSON of its value, or None if the value was not encoded."""
    kept: Any = result.__dict__  # a Struct with dict=True has a plain dict
    kept["text"], kept["json"] = text, json


def shown_text(result: ToolResult[Any]) -> str:
    """Return the text that is shown to the model: the gate's rendering if it was kept, otherwise a new one."""
    text: str | None = result.__dict__.get("text")
    return result.render() if text is None else text


def json_of(result: ToolResult[Any]) -> bytes:
    """Return the value of a result as JSON: the gate's if it was kept, otherwise encoded now."""
    json: str | None = result.__dict__.get("json")
    return to_json(result.value) if json is None else json.encode()


def rendering_of(result: ToolResult[Any]) -> tuple[str, bytes]:
    """Return what `shown_text` and `json_of` return, but encode a number or a boolean only once."""
    json, has_more = json_of(result), result.message or result.exclude_value_from_context
    is_number = type(result) is ToolResult and type(result.value) in _NUMBERS
    if is_number and not has_more and "text" not in result.__dict__:
        return json.decode(), json
    return shown_text(result), json


ResultT = TypeVar("ResultT", bound=ToolResult[Any])


class Whole(msgspec.Struct, frozen=True, omit_defaults=True):
    """The whole text of a result of which the model was shown an excerpt."""

    size: int
    """The number of characters."""
    digest: str = ""
    """The digest of the text, which is a blob of the journal; "" in a run without a journal."""
    text: str = ""
    """The text itself, in a run without a journal."""


def with_excerpt(result: ResultT, excerpt: str, whole: Whole) -> ResultT:
    """Return a copy of a result whose text is an excerpt. The value stays as it is."""
    made = msgspec.structs.replace(result)
    kept: Any = made.__dict__  # a Struct with dict=True has a plain dict
    kept.update(result.__dict__, text=excerpt, whole=whole)
    return made


def whole_of(result: ToolResult[Any]) -> Whole | None:
    """Return the whole text of a result; None if its own text is whole."""
    return result.__dict__.get("whole")


def clean_text(text: str) -> str:
    """Return text without lone surrogates, since no provider or journal accepts them.

    Those that stand for bytes of a file name are escaped as `\\xff`, as in the paths of files. Others are replaced.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        text = _BYTES.sub(lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", text)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def renders(value: object) -> bool:
    """Return whether a value renders itself. This is much faster than checking the protocol `Renders`."""
    return callable(getattr(value, "render", None))


def _render_value(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if renders(value):
        return cast(Renders, value).render()
    return to_json(value).decode()


@checked_arguments
@dataclasses.dataclass(frozen=True)  # no slots: a subscripted call, ToolExample[...](...), sets an attribute
class ToolExample(Generic[P, R]):
    """One call and its result, shown to the model. It is checked against the tool's types."""

    description: str
    """What the example shows, in at most 200 characters."""
    input: P
    output: R
