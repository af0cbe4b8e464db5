"""Waiting for operations: Ctrl-C, the end of the program, a closed event loop, and forks."""

import asyncio
import signal
import subprocess
import textwrap
import threading
from typing import Any

import pytest

from handrail import Operation
from handrail.concurrency import threads
from handrail.concurrency.operation import Home
from handrail.concurrency.threads import background_loop
from handrail.errors import (
    LoopGone,
)
from support import PATIENCE
from support.operations import finished, script, value_of

INTERRUPTED = """
    import signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the process that runs the tests may ignore it

    async def work():
        print("ready", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            {cleanup}
            print("cleaned up", flush=True)

    try:
        Operation(work, "work").wait()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        {after}
"""


def interrupted(tmp_path: Any, times: int = 1, **parts: str) -> tuple[list[str], str, int]:
    """Run a script, send SIGINT the first `times` times that it prints `ready`, and return its other output, errors and exit code."""
    text = textwrap.dedent(INTERRUPTED)
    for name in ("cleanup", "after"):
        text = text.replace("{" + name + "}", parts.get(name, "pass"))
    process = subprocess.Popen(
        script(tmp_path, text), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines: list[str] = []
    for _ in range(times):
        while (line := process.stdout.readline().strip()) != "ready":
            assert line, "the script ended too early"
            lines.append(line)
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    return lines + out.split("\n")[:-1], err, process.returncode


def test_ctrl_c_cancels_and_waits_for_the_cleanup(tmp_path: Any):
    """SIGINT cancels the work, and `KeyboardInterrupt` is raised after the work has cleaned up."""
    lines, err, code = interrupted(tmp_path, cleanup="await asyncio.sleep(0.01)", after="sys.exit(7)")
    assert (lines, err, code) == (["cleaned up", "interrupted"], "", 7)


def test_ctrl_c_that_nobody_catches_ends_the_program_as_usual(tmp_path: Any):
    """An uncaught `KeyboardInterrupt` ends the program as SIGINT would, after the work has cleaned up."""
    lines, err, code = interrupted(tmp_path, after="raise")
    assert (lines, code) == (["cleaned up", "interrupted"], -signal.SIGINT)
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_the_program_continues_after_a_caught_ctrl_c(tmp_path: Any):
    """The background loop stays usable after a caught `KeyboardInterrupt`."""
    after = "print(Operation(lambda: asyncio.sleep(0, 'still here'), 'next').wait())"
    lines, err, code = interrupted(tmp_path, after=after)
    assert (lines, err, code) == (["cleaned up", "interrupted", "still here"], "", 0)


def test_a_second_ctrl_c_does_not_wait(tmp_path: Any):
    """A second SIGINT during a slow cleanup ends the wait at once."""
    cleanup = 'print("ready", flush=True); await asyncio.Event().wait()'
    lines, err, code = interrupted(tmp_path, times=2, cleanup=cleanup, after="import os; os._exit(9)")
    assert (lines, err, code) == (["interrupted"], "", 9)


def test_the_wait_for_a_cleanup_is_looked_at_again_and_again(monkeypatch: pytest.MonkeyPatch):
    """After a Ctrl-C, each wait for the cleanup has a timeout, because a signal just before a wait would not end the wait."""
    real, looks = threads._Outcome[None].wait, list[Any]()
    began, waited_again = threading.Event(), threading.Event()

    def wait(self: Any) -> bool:
        looks.append(self)
        if len(looks) == 1:
            began.wait(PATIENCE)
            raise KeyboardInterrupt
        if len(looks) == 3:
            waited_again.set()
        return real(self)

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(waited_again.wait)

    monkeypatch.setattr(threads, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(threads._Outcome, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        Operation(work, "work").wait()
    assert len(looks) > 2


def test_an_interrupt_before_the_hand_over_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    """An interrupt before the loop has taken over the work ends the wait, and leaves no coroutine unawaited."""
    loop = background_loop()
    real = loop.call_soon_threadsafe
    struck: list[int] = []

    def strike(*arguments: Any, **options: Any) -> Any:
        if not struck:
            struck.append(1)
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", strike)
    with pytest.raises(KeyboardInterrupt):
        value_of(1).wait()
    assert value_of(2).wait() == 2


def test_an_abandoned_thread_does_not_hold_the_program_open(tmp_path: Any):
    """A program ends even if a handler's thread never returns, because that thread is a daemon."""
    text = """
        import threading
        from handrail.concurrency.threads import run_in_thread

        async def main():
            began = asyncio.Event()
            loop = asyncio.get_running_loop()

            def handler():
                loop.call_soon_threadsafe(began.set)
                threading.Event().wait()

            task = asyncio.create_task(run_in_thread(handler))
            await began.wait()
            task.cancel()
            await asyncio.wait([task])
            print("over", task.cancelled())

        asyncio.run(main())
    """
    result = finished(script(tmp_path, text))
    assert (result.stdout, result.stderr, result.returncode) == ("over True\n", "", 0)


def test_a_thread_stuck_in_a_wait_does_not_hold_the_program_open(tmp_path: Any):
    """A program ends even if a handler's thread is still waiting for an operation."""
    text = """
        from handrail.concurrency.threads import run_in_thread

        async def never():
            print("waiting", flush=True)
            await asyncio.Event().wait()

        async def start():
            task = asyncio.create_task(run_in_thread(lambda: Operation(begin, "never").wait()))
            await began.wait()

        async def begin():
            began.set()
            await never()

        began = asyncio.Event()
        Operation(start, "start").wait()
    """
    result = finished(script(tmp_path, text))
    assert (result.stdout, result.returncode) == ("waiting\n", 0)


def test_a_loop_that_is_gone_is_an_error():
    """Waiting for an operation whose event loop is closed raises `LoopGone`, and leaves no coroutine unawaited."""

    async def main() -> Home:
        return Home(asyncio.get_running_loop(), "call")

    home = asyncio.run(main())
    with pytest.raises(LoopGone, match="the event loop it belongs to is closed") as caught:
        value_of(1, home).wait()
    assert caught.value.operation == "value"


def test_a_loop_that_goes_while_somebody_waits_is_an_error(monkeypatch: pytest.MonkeyPatch):
    """If the event loop is closed while a thread waits for an operation on it, the wait raises `LoopGone` instead of hanging."""
    monkeypatch.setattr(threads, "_LOOK_SECONDS", 0.01)
    loop = asyncio.new_event_loop()
    raised: list[BaseException] = []

    async def work() -> None:
        loop.stop()
        await asyncio.Event().wait()

    operation = Operation(work, "stopped", Home(loop, "call"))

    def body() -> None:
        try:
            operation.wait()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    loop.run_forever()  # runs until the work stops it
    tasks = asyncio.all_tasks(loop)
    loop.close()
    thread.join(timeout=300)
    assert [type(error) for error in raised] == [LoopGone]
    assert "closed while it ran" in str(raised[0])
    for task in tasks:
        task.get_coro().close()  # pyright: ignore[reportOptionalMemberAccess]
        task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]  # it is destroyed on purpose


def test_a_forked_child_can_wait_too(tmp_path: Any):
    """After `os.fork`, parent and child can both wait, because the child starts its own background thread."""
    text = """
        import os, sys, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of a fork in a process with threads
        from handrail.concurrency.threads import run_in_thread

        def twice():
            async def work():
                return await run_in_thread(lambda: "thread")
            return Operation(lambda: asyncio.sleep(0, "loop"), "a").wait(), Operation(work, "b").wait()

        print(*twice(), flush=True)
        child = os.fork()
        if child == 0:
            print(*twice(), flush=True)
            sys.exit(5)
        _, status = os.waitpid(child, 0)
        print(*twice(), os.waitstatus_to_exitcode(status))
    """
    result = finished(script(tmp_path, text))
    expected = "loop thread\nloop thread\nloop thread 5\n"
    assert (result.stdout, result.stderr, result.returncode) == (expected, "", 0)
