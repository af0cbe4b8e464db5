"""Turns: the calls of one model answer. They run concurrently, except those of tools that must run alone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from handrail.concurrency.operation import cancel_and_await
from handrail.messages import CallAsked
from handrail.run.call import new_call, refuse_call
from handrail.run.gate import Gate, Passage
from handrail.tools import ToolResult


class ToolCall(msgspec.Struct, frozen=True):
    """One call that a model asked for."""

    name: str
    arguments: Any = "{}"
    id: str | None = None


class Turn(msgspec.Struct, frozen=True):
    """The outcome of a turn: a result for every call, and the error that ends the run, if any."""

    results: tuple[ToolResult[Any], ...]
    ending: BaseException | None


class OpenTurn:
    """The calls of one turn. Each gets exactly one result, no matter how `run()` ends."""

    __slots__ = ("_calls", "_gate")

    def __init__(
        self,
        gate: Gate,
        calls: Sequence[ToolCall | CallAsked],
        message_id: str | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        """Open a turn. `refused` maps the ids of calls that may not run to the reasons that the model is told."""
        self._gate = gate
        self._calls: list[Passage] = []
        for asked in calls:
            call = new_call(gate, asked.name, asked.arguments, asked.id, None, message_id)
            if refused and call.id in refused:
                call = refuse_call(call, refused[call.id])
            self._calls.append(gate.open(call))

    def run(self) -> Coroutine[Any, Any, BaseException | None]:
        """Run the calls, until one of them ends the run. Returns the error that ends the run, or None if no call ended it.

        Raises `CancelledError` if this is cancelled, or if a call that runs by itself is. If calls that run together are
        cancelled, this returns a `CancelledError`, or the error of one of them that failed.
        """
        if len(self._calls) == 1:
            return _run_one(self._gate, self._calls[0])
        return self._run_groups()

    async def _run_groups(self) -> BaseException | None:
        for group in _groups(self._gate, self._calls):
            ending = await _run_group(self._gate, group)
            if ending is not None:
                return ending
        return None

    def is_recorded(self) -> bool:
        """Return whether the record of a resumed run has the results of all calls."""
        log = self._gate.run.log
        return all(log.is_over(each.call.place) for each in self._calls)

    def results(self) -> tuple[ToolResult[Any], ...]:
        """Return a result for every call, in the order in which they were asked for."""
        return tuple([_result_of(each) for each in self._calls])


async def run_turn(gate: Gate, calls: Sequence[ToolCall], message_id: str | None = None) -> Turn:
    """Run the calls of one turn, and return a result for each of them.

    A call that ends the run stops the other calls of the turn, which still get results. Raises `CancelledError` if this is
    cancelled, or if a call that runs by itself is.
    """
    turn = OpenTurn(gate, calls, message_id)
    ending = await turn.run()
    return Turn(turn.results(), ending)


def _groups(gate: Gate, calls: list[Passage]) -> Iterator[list[Passage]]:
    """Yield groups of consecutive calls that run together. A call that must run alone forms its own group."""
    group: list[Passage] = []
    for each in calls:
        tool = gate.run.tools.get(each.call.name)
        if tool is not None and tool.alone:
            if group:
                yield group
                group = []
            yield [each]
        else:
            group.append(each)
    if group:
        yield group


async def _run_one(gate: Gate, passage: Passage) -> BaseException | None:
    try:
        await gate.pass_through(passage.call, passage)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return error
    return None


async def _run_group(gate: Gate, group: list[Passage]) -> BaseException | None:
    if len(group) == 1:
        return await _run_one(gate, group[0])
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(gate.pass_through(each.call, each)) for each in group]
    waiting = set(tasks)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            failed = [task for task in done if task.cancelled() or task.exception() is not None]
            if failed:
                await cancel_and_await(tuple(waiting))
                return next(
                    (task.exception() for task in failed if not task.cancelled()), asyncio.CancelledError()
                )
    except asyncio.CancelledError:
        await cancel_and_await(tuple(waiting))
        raise
    return None


def _result_of(each: Passage) -> ToolResult[Any]:
    if each.result is None:
        return ToolResult.error(f"{each.call.name} did not run: the turn was stopped first.")
    return each.result
