"""Calls that were given a secret: the record has a mask in its place, so they are not run again from it."""

from __future__ import annotations

from asyncio import CancelledError
from typing import TYPE_CHECKING, Any

import pydantic_core

from handrail.errors import RunBusy
from handrail.schema import Schema
from handrail.schema import secrets as schema_secrets
from handrail.schema.secrets import MASK
from handrail.tools import EFFECTS, Tool

if TYPE_CHECKING:
    from handrail.dispatch.attempt import Attempt

GIVEN = "given a secret"
"""Marks a call that was given a secret in an answer. Other calls that may not run twice are marked with their names."""


def had_secret(tool: Tool[Any, Any], arguments: Any) -> bool:
    """Whether these arguments have a secret, or a mask where one was."""
    return MASK in tool.mask(arguments)


def is_masked(arguments: Any) -> bool:
    """Whether these arguments come from a record and have a mask where a secret was."""
    if not isinstance(arguments, str | bytes):
        return False
    try:
        return schema_secrets.is_masked(pydantic_core.from_json(arguments))
    except ValueError:
        return False


def has_secret(schema: Schema[Any] | None, value: object) -> bool:
    """Whether this value has a secret in it."""
    return schema is not None and schema.secret and schema_secrets.is_masked(schema.hide(value))


def was_given_one(attempt: Attempt) -> bool:
    """Whether it was given a secret, as an argument or later."""
    return attempt.has_secret or (attempt.tool.secret and had_secret(attempt.tool, attempt.arguments))


def enters_again(attempt: Attempt) -> bool:
    """Whether an interrupted handler may be run again from the start.

    Not where it was given a secret: that is kept nowhere, so nobody could give it again. Only an act can
    have been given one before it begins that is no argument: an answer, and if all of the act can be undone,
    that is asked for again.
    """
    tool = attempt.tool
    if attempt.has_secret and not EFFECTS[tool.effect].transactional:
        return False
    return tool.enters_again and not (tool.secret and had_secret(tool, attempt.arguments))


async def mark(attempt: Attempt, what: str) -> None:
    """Record that a call which may not run twice has begun, before it continues."""
    log = attempt.frame.log
    if log.is_kept:
        if log.closed:  # nothing can be marked any more, so nothing that has to be may go on
            raise (
                CancelledError if attempt.frame.cancellation.cancelled else RunBusy(log.run_id, "another one")
            )
        await log.note("call begun", attempt.place, what)


async def mark_given(attempt: Attempt) -> None:
    """Mark a handler that is about to get a secret in an answer: it is not run again from here on."""
    attempt.has_secret = True
    if not attempt.kind.only_asks:
        await mark(attempt, GIVEN)
