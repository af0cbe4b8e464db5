"""Type inference for operations, which tests/project/test_types.py checks without running this file."""

import asyncio
from collections.abc import Coroutine
from typing import Any, assert_type

import anyio

from handrail import Operation, ToolContext, gather
from handrail.concurrency.operation import DONE


async def work() -> int:
    return 1


async def colours(number: Operation[int], text: Operation[str]) -> None:
    assert_type(await number, int)
    assert_type(text.wait(), str)
    assert_type(Operation(work, "work"), Operation[int])
    assert_type(await asyncio.create_task(number), int)
    assert_type(await asyncio.wait_for(number, 3), int)
    assert_type(await asyncio.to_thread(text.wait), str)
    assert_type(await asyncio.gather(number, text), tuple[int, str])
    as_coroutine: Coroutine[Any, Any, int] = number
    assert_type(await as_coroutine, int)
    async with asyncio.TaskGroup() as group:
        assert_type(group.create_task(number), asyncio.Task[int])
    async with anyio.create_task_group() as any_group:
        any_group.start_soon(number)
        any_group.start_soon(number, 1)  # expect-error: reportArgumentType
    await DONE
    DONE.wait()


async def together(number: Operation[int], text: Operation[str], many: list[Operation[bool]]) -> None:
    assert_type(gather(number, text), Operation[tuple[int, str]])
    assert_type(await gather(number), tuple[int])
    assert_type(await gather(number, text), tuple[int, str])
    assert_type(gather(number, text, number).wait(), tuple[int, str, int])
    assert_type(await gather(text, number, text, number), tuple[str, int, str, int])
    assert_type(await gather(number, number, number, number, number), tuple[int, ...])
    assert_type(await gather(*many), tuple[bool, ...])
    assert_type(await gather(work(), text), tuple[int, str])
    assert_type(await gather(gather(number), text), tuple[tuple[int], str])
    await gather(number, 3)  # expect-error: reportArgumentType, reportCallIssue
    await gather([number])  # expect-error: reportArgumentType, reportCallIssue


async def misused(number: Operation[int], context: ToolContext) -> None:
    total = 1 + number  # expect-error: reportOperatorIssue, reportUnknownVariableType
    print(total)  # expect-error: reportUnknownArgumentType
    if number:  # expect-error: reportGeneralTypeIssues
        return
    if number == 3:  # expect-error: reportUnnecessaryComparison
        return
    bool(number)
    number.vait()  # expect-error: reportAttributeAccessIssue, reportUnknownMemberType
    # pyright reports a dropped result only for native coroutines. This operation warns at run time.
    context.request_approval("sure?")
    work()  # expect-error: reportUnusedCoroutine
    wrong: int = number  # expect-error: reportAssignmentType
    print(wrong)
