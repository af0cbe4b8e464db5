"""The call whose handler is running.

A run that the handler starts by hand, for example with `open_gate` instead of its context, is nested in that call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import ref

from handrail.errors import ContextExpired, DefinitionError
from handrail.run.options import NestedArguments, RunOptions

if TYPE_CHECKING:
    from handrail.run.call import Attempt

entered: ContextVar[ref[Attempt] | None] = ContextVar("the call whose handler is running", default=None)
"""The attempt whose handler was started most recently in this context; None outside of calls.

Tasks that the handler starts inherit the value, and so do threads that get a copy of the context, as with
`asyncio.to_thread`. The reference is weak, because the event loop keeps the contexts of timers that a handler has
cancelled.
"""

MAY_BE_GIVEN = frozenset([*NestedArguments.__annotations__, "tools", "workers", "params"])
"""Arguments that a run started by hand inside a call may be given. Others are refused, unless they are None or the call's own."""
_SURROUNDINGS = ("filesystem", "journal", "environment", "approvals", "lease")
"""Options that an adapter may have, but that a run started by hand inside a call takes from the call."""


def call_around() -> Attempt | None:
    """Return the attempt whose handler runs this code; None outside of calls.

    Between the end of the handler and the end of its call, this returns the attempt around that call, if there is one.
    Policies are not inside the call that they judge. Raises `ContextExpired` in code that a handler left running after its
    call.
    """
    found = entered.get()
    if found is None:
        return None
    attempt = found()
    if attempt is None:
        raise ContextExpired("")
    while attempt is not None and attempt.ended and attempt in attempt.run.live:
        attempt = attempt.parent  # the handler has returned, and its call is being settled
    if attempt is not None:
        attempt.home.check()
    return attempt


def refuse_inside_call(verb: str) -> None:
    """Raise `DefinitionError` inside a handler, because the run that this verb starts or resumes can't be part of a call."""
    attempt = call_around()
    if attempt is not None:
        raise DefinitionError(
            f"{verb} was called inside the call {attempt.name}, but neither the limits nor the denials of that call would "
            f"apply to its run. Call {verb} outside of the call, or start a run inside it with "
            "`await context.adapter.evaluate(...)`."
        )


def check_given(attempt: Attempt, verb: str, own: RunOptions, arguments: Mapping[str, Any]) -> None:
    """Raise `DefinitionError` if a run that a handler starts by hand was given an option that it must take from the call.

    `arguments` are those that were passed, and `own` are the options of the run's adapter.
    """
    around = attempt.run.options
    passed = [f"{name}=..." for name in arguments if _differs(name, arguments[name], around)]
    if passed:
        raise _always_the_calls(attempt, f"{verb} with", passed, "Leave it out")
    held = [name for name in _SURROUNDINGS if _differs(name, getattr(own, name), around)]
    if held:
        raise _always_the_calls(
            attempt, f"{verb} with an adapter that has its own", held, "Use `context.adapter`"
        )


def _differs(name: str, value: Any, around: RunOptions) -> bool:
    return name not in MAY_BE_GIVEN and value is not None and value is not getattr(around, name, None)


def _always_the_calls(attempt: Attempt, what: str, names: Iterable[str], hint: str) -> DefinitionError:
    return DefinitionError(
        f"{what} {', '.join(names)} was called inside the call {attempt.name}, but a run inside a call always uses "
        f"what the call has. {hint}, or start the run outside of the call."
    )
