"""The laws that a resource of your own must keep to take part in calls' transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from handrail.concurrency.operation import gather
from handrail.context import ToolContext
from handrail.errors import Conflict, ContextExpired
from handrail.journal.records import CallKey
from handrail.protocols import Forkable
from handrail.resources.bindings import given
from handrail.run import open_gate
from handrail.session import Session
from handrail.tools import tool

R = TypeVar("R", bound=Forkable)

_CALLS = 8


def check_resource(
    make: Callable[[], R], look: Callable[[Any], int], change: Callable[[Any, int], None]
) -> None:
    """Check a resource against the laws of transactions. Raises an `AssertionError` that names the first law it breaks.

    `make` creates a new resource. `look` reads a number from the resource or from a fork of it, and `change` replaces that number in a fork.
    The laws say what a fork shows, when its changes become visible, what makes it stale, when it refuses to work, and that
    concurrent calls of several sessions lose no update.
    """
    for law in (
        _forks_are_isolated,
        _dropped_forks_leave_nothing,
        _stale_reads_are_named,
        _inner_forks,
        _ended_forks_refuse,
    ):
        law(make(), look, change)
    _calls_lose_nothing(make(), look, change)


def _law(holds: bool, law: str) -> None:
    if not holds:
        raise AssertionError(f"the resource breaks a law: {law}")


def _commit(fork: Any) -> None:
    fork.prepare()
    if fork.is_durable:
        fork.stage(CallKey("laws"))
    fork.apply()
    if fork.is_durable:
        fork.applied()


def _forks_are_isolated(resource: Any, look: Any, change: Any) -> None:
    before = look(resource)
    one, other = resource.fork("one"), resource.fork("other")
    change(one, before + 1)
    _law(look(one) == before + 1, "a fork sees its own changes")
    _law(
        look(resource) == before,
        "a fork's changes are not visible in the resource before the fork is applied",
    )
    _law(look(other) == before, "a fork's changes are not visible in another fork")
    _law(not one.stale() and not other.stale(), "a fork is not stale if nobody has changed what it read")
    _commit(one)
    _law(
        look(resource) == before + 1, "a fork's changes are visible in the resource once the fork is applied"
    )
    other.drop()


def _dropped_forks_leave_nothing(resource: Any, look: Any, change: Any) -> None:
    before = look(resource)
    fork = resource.fork("dropped")
    change(fork, before + 1)
    fork.drop()
    fork.drop()
    _law(look(resource) == before, "a dropped fork changes nothing")
    prepared = resource.fork("prepared")
    change(prepared, before + 1)
    prepared.prepare()
    prepared.drop()
    _law(look(resource) == before, "a fork that is dropped after `prepare` changes nothing")
    change(again := resource.fork("again"), before + 2)
    _commit(again)
    _law(look(resource) == before + 2, "a dropped fork is not in the way of others")


def _stale_reads_are_named(resource: Any, look: Any, change: Any) -> None:
    reader, blind = resource.fork("reader"), resource.fork("blind")
    before = look(reader)
    change(writer := resource.fork("writer"), before + 1)
    _commit(writer)
    _law(bool(reader.stale()), "`stale` names what others have changed since the fork read it")
    _law(not blind.stale(), "a fork that has read nothing is not stale")
    reader.drop()
    blind.drop()


def _inner_forks(resource: Any, look: Any, change: Any) -> None:
    before = look(resource)
    outer = resource.fork("outer")
    change(inner := outer.fork("inner"), before + 1)
    _commit(inner)
    _law(look(outer) == before + 1, "an inner fork is applied to its outer fork")
    _law(look(resource) == before, "an inner fork is not applied to the resource")
    outer.drop()
    _law(look(resource) == before, "dropping an outer fork also drops what was applied to it")


def _ended_forks_refuse(resource: Any, look: Any, change: Any) -> None:
    for end in (_drop, _commit):
        fork = resource.fork("ended")
        number = look(fork)
        end(fork)
        for use in (partial(look, fork), partial(change, fork, number)):
            try:
                use()
            except ContextExpired:
                continue
            _law(
                False, "a fork that was applied or dropped raises `ContextExpired` when it is read or changed"
            )


def _drop(fork: Any) -> None:
    fork.drop()


def _calls_lose_nothing(resource: Any, look: Any, change: Any) -> None:
    kind: type[Any] = resource.__class__

    @tool(effect="staged", description="Add one to the number.")
    async def add_one(context: ToolContext) -> None:
        fork = context.resources.get(kind)
        number = look(fork)
        await asyncio.sleep(0)  # the other calls have read it, too
        change(fork, number + 1)

    before = look(resource)
    gates = [
        open_gate([add_one], resources=[given(kind, resource)], session=Session()) for _ in range(_CALLS // 2)
    ]
    try:
        results = gather(*(gate.invoke("add_one") for gate in (*gates, *gates))).wait()
    except Conflict as error:
        raise AssertionError(
            f"the resource breaks a law: a conflict was raised by `apply`: {error}"
        ) from error
    failed = [result.message for result in results if not result.success]
    _law(not failed, f"concurrent calls commit one after another, but one failed: {failed[:1]}")
    _law(look(resource) == before + len(results), "concurrent calls lose no update")
