"""Calls that were given a secret: what the record has of them, and that they are not run again from it."""

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
"""The mark of a call that was given one in an answer; that of another which may not run twice is its name."""


def had_secret(tool: Tool[Any, Any], arguments: Any) -> bool:
    """Is there a secret, or a mask in the place of one, among these arguments?"""
    return MASK in tool.mask(arguments)


def is_masked(arguments: Any) -> bool:
    """Do these arguments come from a record, with a mask where a secret was?"""
    if not isinstance(arguments, str | bytes):
        return False
    try:
        return schema_secrets.is_masked(pydantic_core.from_json(arguments))
    except ValueError:
        return False


def has_secret(schema: Schema[Any] | None, value: object) -> bool:
    """Is there a secret in this value?"""
    return schema is not None and schema.secret and schema_secrets.is_masked(schema.hide(value))


def was_given_one(attempt: Attempt) -> bool:
    """Was it given a secret, as an argument or since?"""
    return attempt.has_secret or (attempt.tool.secret and had_secret(attempt.tool, attempt.arguments))


def enters_again(attempt: Attempt) -> bool:
    """May this call's handler, once it was cut, be entered again from the top?

    Not where it was given a secret: that is kept nowhere, so nobody could give it again. Only an act can
    have been given one before it begins that is no argument: an answer, and if all of the act can be undone,
    that is asked for again.
    """
    tool = attempt.tool
    if attempt.has_secret and not EFFECTS[tool.effect].transactional:
        return False
    return tool.enters_again and not (tool.secret and had_secret(tool, attempt.arguments))


async def mark(attempt: Attempt, what: str) -> None:
    """Record that a call has begun which may not be run twice, before it goes on."""
    log = attempt.frame.log
    if log is not None:
        if log.closed:  # nothing can be marked any more, so nothing that has to be may go on
            raise (
                CancelledError if attempt.frame.cancellation.cancelled else RunBusy(log.run_id, "another one")
            )
        await log.note("call begun", attempt.place, what)


async def mark_given(attempt: Attempt) -> None:
    """Before a handler hears an answer with a secret in it: from here on it is not run again."""
    attempt.has_secret = True
    if not attempt.kind.only_asks:
        await mark(attempt, GIVEN)
