"""Nested runs: runs inside a call. `open_nested` opens each of them, and `RunOptions.nested` says what they inherit."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from handrail.dispatch.frame import Frame
from handrail.dispatch.options import RunOptions
from handrail.errors import DepthExceededError
from handrail.guard.outer_policy import outer_policies
from handrail.protocols import PromptView

if TYPE_CHECKING:
    from handrail.dispatch.attempt import Attempt


def open_nested(
    attempt: Attempt,
    number: int,
    given: RunOptions,
    prompt: PromptView | None = None,
    levels: int | None = None,
) -> Frame:
    """Open a run inside a call, as the call's verb `number`. `levels` limits how deep calls may nest in the run.

    Raises `DepthExceededError` if the run would be nested too deeply, even if it makes no calls. Raises `DefinitionError` if
    the budget in `given` is a `BudgetTracker`, or if `given` binds a `Filesystem` although the run around it has one.
    """
    outer, depth = attempt.frame, attempt.depth + 1
    limit = outer.options.depth_limit
    if depth > limit:
        raise DepthExceededError(attempt.path, limit, depth)
    policies = outer_policies(outer.policies, attempt.tool if attempt.open_transaction.commits_each else None)
    options = outer.options.nested(given, outer.costs.tracker, depth, levels, policies)
    return Frame.nested(attempt, number, options, prompt)


@asynccontextmanager
async def nested_run(
    attempt: Attempt,
    number: int,
    verb: str,
    given: RunOptions,
    prompt: PromptView | None = None,
    levels: int | None = None,
) -> AsyncGenerator[Frame]:
    """Open a run inside a call, record which verb opened it, and close it at the end of the block."""
    frame = open_nested(attempt, number, given, prompt, levels)
    await frame.log.note_verb(attempt.place.child(number), verb)
    try:
        yield frame
    except BaseException as error:
        await close_nested(frame, error)
        raise
    await close_nested(frame)


async def close_nested(frame: Frame, error: BaseException | None = None) -> None:
    """End a nested run, and close the resources that it bound itself. If one of them is forkable, the run around it does so.

    Errors from closing are logged, and added as notes to `error`, the error that ended the run.
    """
    frame.cancellation.close()
    around = frame.outer
    if around is not None and frame.world is not around.frame.world:
        await frame.world.resources.close_logged(error)
