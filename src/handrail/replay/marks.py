"""Marks: a call that must not run twice is marked before it begins, and again before every later attempt.

A call that was given a secret must not run twice either, since the record has a mask in place of the secret.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic_core

from handrail.dispatch.call_log import logged_by
from handrail.errors import RunBusy
from handrail.schema import Schema
from handrail.schema import secrets as schema_secrets
from handrail.schema.secrets import MASK
from handrail.tools import EFFECTS, Tool

if TYPE_CHECKING:
    from handrail.dispatch.attempt import Attempt

GIVEN_SECRET = "given a secret"
"""The mark of a call that was given a secret in an answer. Other calls are marked with their names."""

NOT_KEPT = "It was given a secret. Secrets are not recorded, so it is not run again. "
"""Tells the model why a call that was given a secret does not run again."""


class Tried(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of an attempt after the first, written when the attempt begins."""

    number: int
    retries: int
    left: tuple[str, ...]
    charged: bool = False
    """Whether the budget was charged for the call."""
    logged: Sequence[bytes] = ()
    """What the earlier attempts have logged."""


class Begun(msgspec.Struct, frozen=True, omit_defaults=True):
    """The mark of a call that has begun."""

    what: str
    """The name of the call, or `GIVEN_SECRET`."""
    charged: bool = False
    """Whether the budget was charged for the call."""
    logged: Sequence[bytes] = ()
    """What the call and its policies have logged. It counts if the call is cut off and not entered again."""


async def note_attempt(attempt: Attempt, left: tuple[str, ...]) -> None:
    """Record that another attempt begins, so that the records of earlier attempts no longer count."""
    tried = Tried(attempt.number, attempt.retries, left, attempt.charged, logged_by(attempt))
    await attempt.frame.log.note("call tried", attempt.call.place, tried)


async def mark_begun(attempt: Attempt) -> None:
    """Record that the handler of a call is about to begin, if a resumed run has to know that.

    A call that must not run twice is marked. An inner call of such a call is marked if it was charged or has logged
    something, such as a count of a rate limit: after a crash, the outer call does not make the inner call again, so
    both would otherwise be forgotten. A compensation is marked
    although it may run twice, so that a resumed run does not replay the call that was being undone.
    """
    if attempt.call.place.kind == "compensation" or not can_reenter(attempt) or _is_not_repeated(attempt):
        await _mark(attempt, attempt.name)


def _is_not_repeated(attempt: Attempt) -> bool:
    """Return whether the call was charged, or has logged something, inside a call that must not run twice."""
    counts = attempt.charged or attempt.logged is not None
    return counts and any(not can_reenter(each) for each in attempt.with_outer())


async def mark_given(attempt: Attempt) -> None:
    """Mark a handler that is about to receive a secret in an answer, so that a resumed run does not run it again.

    An act that only asks is not marked, because its question is asked again.
    """
    attempt.has_secret = True
    if not attempt.kind.only_asks:
        await _mark(attempt, GIVEN_SECRET)


async def _mark(attempt: Attempt, what: str) -> None:
    """Record the mark durably. Does nothing without a journal.

    If the log is closed, raises `CancelledError` in a cancelled run, and `RunBusy` otherwise.
    """
    log = attempt.frame.log
    if log.is_kept:
        if log.closed:  # nothing can be marked any more, so a call that must be marked must not continue
            raise (
                CancelledError if attempt.frame.cancellation.cancelled else RunBusy(log.run_id, "another one")
            )
        await log.note("call begun", attempt.place, Begun(what, attempt.charged, logged_by(attempt)))


def can_reenter(attempt: Attempt) -> bool:
    """Return whether an interrupted handler may be run again from the start.

    It may not if its tool does not allow that, or if it was given a secret, which is not recorded and so can't be given
    again. Before it begins, a handler gets secrets only as arguments; the exception is an act of a handoff, which may get one
    in an answer. That answer is requested again if the act can be undone completely.
    """
    tool = attempt.tool
    if attempt.has_secret and not EFFECTS[tool.effect].transactional:
        return False
    return tool.enters_again and not (tool.secret and had_secret(tool, attempt.arguments))


# --- secrets ------------------------------------------------------------------------------------------


def had_secret(tool: Tool[Any, Any], arguments: Any) -> bool:
    """Return whether these arguments contain a secret, or a mask in place of one."""
    return MASK in tool.mask(arguments)


def is_masked(arguments: Any) -> bool:
    """Return whether these arguments are JSON text with a mask in place of a secret, as a record has it."""
    if not isinstance(arguments, str | bytes):
        return False
    try:
        return schema_secrets.is_masked(pydantic_core.from_json(arguments))
    except ValueError:
        return False


def has_secret(schema: Schema[Any] | None, value: object) -> bool:
    """Return whether this value contains a secret."""
    return schema is not None and schema.secret and schema_secrets.is_masked(schema.hide(value))


def was_given_secret(attempt: Attempt) -> bool:
    """Return whether the attempt was given a secret, as an argument or later."""
    return attempt.has_secret or (attempt.tool.secret and had_secret(attempt.tool, attempt.arguments))
