"""Parses the parts of a request: the JSON body, and the ids and options in the URL."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

import msgspec
import pydantic_core
from starlette.requests import Request

from handrail.journal.records import Mark
from handrail.serve.bodies import parse_body
from handrail.serve.middleware import PRINCIPAL
from handrail.serve.principals import ID, ID_RULE
from handrail.serve.refusals import RequestRefused

T = TypeVar("T")
_MAX_DEPTH = 64
_MAX_PAGE = 200
_MAX_SEARCH = 200
_ERROR_PATH = re.compile(r" - at `\$(.*)`$")


# --- bodies -------------------------------------------------------------------------------------------


class FileBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file in a request. Its bytes are sent in base64."""

    name: str
    data: bytes


class MessageBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that sends a message."""

    text: str
    attachments: list[FileBody] = []


class AnswerBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that answers a question."""

    question_id: str
    digest: str
    outcome: Literal["answered", "declined", "cancelled"] = "answered"
    value: Any = None
    reason: str = ""


class VoteBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that votes on another person's question."""

    question_id: str
    digest: str
    approved: bool
    reason: str = ""


class LoginBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a sign-in request: the code of a link, a token, or a name and a password.

    With the link from a sign-in provider comes the secret that the page got when it began the sign-in.
    """

    token: str = ""
    link: str = ""
    secret: str = ""
    name: str = ""
    password: str = ""


class EmptyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that takes no data. It is empty or an empty object."""


async def read(request: Request, kind: type[T]) -> T:
    """Parse a request's body as a value of `kind`. Raises `RequestRefused` as `parse` does."""
    return await parse_body(request, lambda data: parse(data, kind))


def parse(data: bytes, kind: type[T]) -> T:
    """Parse a body as a value of `kind`.

    Raises `RequestRefused` if `parse_json` does, or if the body does not fit `kind`. In the second case the refusal
    points to one of the problems.
    """
    value: Any = parse_json(data) if data or kind is not EmptyBody else {}
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        found = _ERROR_PATH.search(str(error))
        where = found[1] if found else ""
        what = str(error)[: found.start()] if found else str(error)
        pointer = re.sub(r"\[(\d+)\]|\.", lambda part: "/" + (part[1] or ""), where)
        raise RequestRefused(
            422, "BodyUnfit", f"the body is invalid: {what}", fields=[(pointer, what)]
        ) from None


def parse_json(data: bytes) -> Any:
    """Parse a JSON body strictly. Raises `RequestRefused` if the body is not valid JSON.

    Duplicate names in an object, infinite numbers, NaN, integers of more than 64 bits, lone surrogates and more than
    64 levels of nesting are refused too.
    """
    try:
        pydantic_core.from_json(data, allow_inf_nan=False)  # checks UTF-8, surrogates and extreme depth
        value: Any = json.loads(
            data,
            object_pairs_hook=_parse_object,
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
            parse_int=_parse_int,
        )
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise RequestRefused(400, "BadJson", f"the body is not valid JSON: {why}") from None
    if _is_deeper(value, _MAX_DEPTH):
        raise RequestRefused(
            400, "BadJson", f"the body has more than {_MAX_DEPTH} levels of nesting. Send a flatter body."
        )
    return value


def _parse_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("an object contains the same name twice")
    return made


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not allowed: send null or a finite number")


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large for a 64-bit float")
    return value


def _parse_int(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (value := int(text)) < 2**64:
        raise ValueError("an integer needs more than 64 bits")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether a value has more than this many levels of nesting. Works without recursion."""
    here: list[Any] = [value]
    for _ in range(levels + 1):
        inner: list[Any] = []
        for each in here:
            if isinstance(each, dict):
                inner.extend(each.values())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]  # plain JSON
            elif isinstance(each, list):
                inner.extend(each)  # pyright: ignore[reportUnknownArgumentType]  # plain JSON
        if not inner:
            return False
        here = inner
    return True


# --- URLs ---------------------------------------------------------------------------------------------


def check_id(value: object) -> str:
    """Return the value if it is a valid id. Raises `RequestRefused` otherwise."""
    if not isinstance(value, str) or not ID.fullmatch(value):
        raise RequestRefused(422, "BadId", f"the id is invalid. An id consists of {ID_RULE}")
    return value


def limit_of(request: Request) -> int:
    """Return the value of `?limit=`, or 50 if it is absent. A value above 200 becomes 200.

    Raises `RequestRefused` if it is not a positive whole number of at most six digits.
    """
    text = request.query_params.get("limit", "50")
    if not (text.isascii() and text.isdecimal()) or len(text) > 6 or not int(text):
        raise RequestRefused(422, "BadLimit", f"`limit` must be a number from 1 to {_MAX_PAGE}")
    return min(int(text), _MAX_PAGE)


def before_of(request: Request) -> Mark | None:
    """Return the value of `?before=` as a mark, or None if it is absent.

    The value is the `next` of an earlier page, or a time in ISO 8601, in UTC by default. Raises `RequestRefused` for any
    other value.
    """
    text = request.query_params.get("before")
    if text is None:
        return None
    at, slash, id = text.partition("/")
    try:
        if slash:
            number = float(at)
            if not math.isfinite(number):
                raise ValueError
            return number, id[1:] if id.startswith("/") else f"{request.scope[PRINCIPAL]}/{id}"
        time = datetime.fromisoformat(text.replace(" ", "+"))
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp(), ""
    except (ValueError, OverflowError):
        raise RequestRefused(
            422, "BadTime", "`before` must be the `next` of a page, or a time such as 2026-05-31T12:00:00Z"
        ) from None


def format_mark(request: Request, mark: Mark) -> str:
    """Format the mark at which a page ended, as a value for `?before=`.

    The value contains a thread id too, because several threads may have changed at the same time. If the page ended at a
    session that is not one of the principal's threads, the value contains the whole session id.
    """
    at, session_id = mark
    mine = f"{request.scope[PRINCIPAL]}/"
    return f"{at!r}/{session_id.removeprefix(mine) if session_id.startswith(mine) else f'/{session_id}'}"


def search_of(request: Request) -> str:
    """Return the value of `?find=`, the text to search for, or "" if it is absent. Raises `RequestRefused` if it is too long."""
    text = request.query_params.get("find", "")
    if len(text) > _MAX_SEARCH:
        raise RequestRefused(422, "BadSearch", f"`find` can have at most {_MAX_SEARCH} characters")
    return text
