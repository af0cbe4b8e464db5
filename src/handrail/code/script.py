"""`Script`: a script's run inside a call, whose inner calls pass the gate, and which goes on in any process after it was suspended.

A script is deterministic: its clock stands still, its random numbers follow from its call, and one outcome at a time is given to it. So
only the order of these outcomes is recorded, where it could be another one. A resumed run gives the recorded outcomes in this order: to
the script as it was when it began to wait for a person, or else from its start.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import pydantic_core
from msgspec.structs import replace

from handrail.code.host import Called, Ended, Limits, Step, Waiting
from handrail.code.interpreter import Interpreter, NotLoadable, Outcome, ScriptError
from handrail.code.stubs import stubs_of
from handrail.concurrency.operation import cancel_and_await
from handrail.errors import BlobNotFoundError, Diverged, JournalAltered, OutcomeUnknown
from handrail.run.call import Attempt, new_call
from handrail.tools import Tool, ToolResult
from handrail.tools.result import json_of, lacks_value, shown_text

log = logging.getLogger("handrail.code")

_WORD = re.compile(r"\w+")

_ERRORS = {"denied": "PermissionError", "invalid": "ValueError", "timed out": "TimeoutError"}
"""The exceptions that failed calls raise in a script, by status. Any other is a `RuntimeError`."""


class Noted(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of a script that is under way."""

    at: float
    """The time that its clock shows."""
    told: tuple[int, ...] = ()
    """The calls whose outcomes the script was given while it waited for several, in order."""
    dropped: tuple[int, ...] = ()
    """The calls that were cancelled because the script had gone on without them."""
    digest: str = ""
    """The digest of the suspended script, which is a blob of the journal; "" if it was not suspended."""


class Settled(msgspec.Struct, frozen=True):
    """A call that is over."""

    id: int
    name: str
    arguments: str
    outcome: str
    """A digest of its outcome."""


class Suspended(msgspec.Struct, frozen=True):
    """A suspended script."""

    dump: bytes
    printed: str
    calls: Mapping[int, tuple[str, str]]
    """The name and the arguments of each call whose outcome the script was not given."""
    settled: Sequence[Settled]
    """The calls that are over, in the order in which they ended."""
    made: int
    """How many calls the script had made."""
    told: int
    """How many outcomes of `Noted.told` the script had been given."""
    suspensions: int


class Script:
    """One attempt at a script."""

    def __init__(
        self, attempt: Attempt, code: str, functions: Mapping[str, Tool[Any, Any]], limits: Limits
    ) -> None:
        self._attempt = attempt
        self._log = attempt.run.log
        self._code = code
        self._functions = functions
        self._limits = limits
        self._interpreter: Interpreter | None = None
        noted = self._log.find("script", attempt.place, Noted) if self._log.resumed else None
        self._noted = noted or Noted(attempt.run.clock.now().timestamp())
        self._is_new = noted is None
        self._recorded = self._noted.told
        self._told = 0
        """How many outcomes of `Noted.told` the script was given."""
        self._made = self._passed = 0
        self._calls: dict[int, tuple[str, str]] = {}
        """The calls whose outcomes the script was not given."""
        self._awaited: set[int] = set()
        """Those of them that the script has waited for."""
        self._under_way: dict[int, asyncio.Task[Outcome]] = {}
        """Those of them that have begun in this process."""
        self._ended: list[int] = []
        """The calls that have ended in this process, in order."""
        self._settled: list[Settled] = []
        self._replayed: dict[int, tuple[Settled, Outcome]] = {}
        """The calls that were over when the script was suspended, with their outcomes now."""
        self._turn = asyncio.Lock()
        """Held except while the script waits, so that it is suspended only then."""
        self._is_kept = False
        """Whether the script is suspended as it is now."""

    async def run(self) -> Any:
        """Run the script, and return its value. Raises `ScriptError` if it is refused or fails."""
        try:
            if self._is_new:
                await self._note(self._noted)
            async with self._turn:
                step = await self._until_it_waits(await self._enter())
                self._attempt.suspend = self._suspend
            while isinstance(step, Waiting):
                step = await self._go_on(step.ids)
            self._check_awaited()
            return pydantic_core.from_json(step.value)
        finally:
            self._attempt.suspend = None
            try:
                await cancel_and_await(tuple(self._under_way.values()))
            finally:
                if self._interpreter is not None:
                    await self._interpreter.close()

    @property
    def printed(self) -> str:
        """What the script has printed."""
        return "" if self._interpreter is None else self._interpreter.printed

    # Beginning.

    async def _open(self) -> Interpreter:
        words = dict.fromkeys(_WORD.findall(self._code))  # a script can't call what it does not name
        self._interpreter = Interpreter(
            self._limits,
            stubs=stubs_of({name: self._functions[name] for name in words if name in self._functions}),
            now=datetime.fromtimestamp(self._noted.at, UTC),
            seed=self._attempt.call.key,
            functions=frozenset(self._functions),
        )
        await self._interpreter.open()
        return self._interpreter

    async def _enter(self) -> Step:
        """Begin the script, or continue it as it was suspended. If that can't be loaded, the script runs from its start again."""
        interpreter, suspended = await self._open(), await self._suspended()
        if suspended is None:
            return await interpreter.start(self._code)
        problem = await self._replay(suspended)
        if not problem:
            try:
                step = await interpreter.load(suspended.dump, suspended.printed, suspended.suspensions)
            except NotLoadable as error:
                problem = str(error)
                await interpreter.close()
                interpreter = await self._open()
            else:
                self._calls, self._told = dict(suspended.calls), suspended.told
                self._settled, self._made, self._is_kept = [*suspended.settled], suspended.made, True
                self._passed = sum(len(each.arguments) for each in suspended.settled)
                self._passed += sum(len(arguments) for _, arguments in suspended.calls.values())
                return step
        log.warning("a suspended script can't be loaded, so it runs from its start: %s", problem)
        return await interpreter.start(self._code)

    async def _replay(self, suspended: Suspended) -> str:
        """Apply what the calls that are over have changed. Returns why the suspended script does not fit them any more, or ""."""
        changed: list[str] = []
        for each in suspended.settled:
            outcome = await self._pass(each.id, each.name, each.arguments)
            self._replayed[each.id] = each, outcome
            if outcome.digest != each.outcome:
                changed.append(each.name)
        return f"what it was given by {', '.join(changed)} has changed" if changed else ""

    async def _suspended(self) -> Suspended | None:
        if not self._noted.digest:
            return None
        try:
            body = await self._log.journal.blobs.get(self._noted.digest)
            return msgspec.msgpack.decode(body, type=Suspended)
        except (BlobNotFoundError, JournalAltered, msgspec.DecodeError) as error:
            log.warning("a suspended script can't be used, so it runs from its start: %s", error)
            return None

    # Going on.

    async def _go_on(self, ids: list[int]) -> Waiting | Ended:
        """Let a script that waits for these calls go on with the outcome of one of them."""
        assert self._interpreter is not None
        self._awaited.update(ids)
        id = await self._next_of(ids)
        async with self._turn:
            self._is_kept = False
            if len(ids) > 1:
                await self._note_told(id)
            outcome = self._under_way.pop(id).result()
            self._settle(id, outcome)
            step = await self._until_it_waits(await self._interpreter.settle(id, outcome))
            for each in sorted(self._awaited.difference(step.ids if isinstance(step, Waiting) else ())):
                await self._drop(each)
            return step

    async def _until_it_waits(self, step: Step) -> Waiting | Ended:
        """Promise the script the outcomes of its calls until it waits for them, or ends."""
        interpreter = self._interpreter
        assert interpreter is not None
        while isinstance(step, Called):
            self._made += 1
            self._passed += len(step.arguments)
            if self._made > self._limits.calls:
                raise ScriptError(f"it made more than {self._limits.calls} calls.")
            if self._passed > self._limits.memory:  # the script may pass one text to many calls
                raise ScriptError(f"it passed more than {self._limits.memory:,} bytes to its calls.")
            if step.has_positional or not step.arguments:
                wrong = (
                    "takes keyword arguments only"
                    if step.has_positional
                    else "takes only plain data that is not too large"
                )
                refused = Outcome(error="TypeError", message=f"{step.name}() {wrong}")
                step = await interpreter.refuse(refused)
            else:
                self._calls[step.id] = step.name, step.arguments
                step = await interpreter.promise()
        return step

    async def _next_of(self, ids: list[int]) -> int:
        """Return one of these calls, once it is over. Where it could be any of several, it is the one in the record, if there is one."""
        if len(ids) > 1 and self._told < len(self._recorded):
            id = self._recorded[self._told]
            if id not in ids:
                now = f"calls {ids}"
                raise Diverged(self._log.run_id, str(self._attempt.place), f"call {id} of its script", now)
            ids = [id]
        for id in ids:
            if id not in self._under_way:
                self._under_way[id] = asyncio.get_running_loop().create_task(self._call(id))
        waiting = [self._under_way[id] for id in ids]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            if task.done():
                task.result()  # raises the error that ends the run
        return next(id for id in self._ended if id in ids)

    def _settle(self, id: int, outcome: Outcome) -> None:
        self._awaited.remove(id)
        self._settled.append(Settled(id, *self._calls.pop(id), outcome.digest))

    async def _call(self, id: int) -> Outcome:
        name, arguments = self._calls[id]
        replayed = self._replayed.get(id)
        if replayed is None:
            try:
                return await self._pass(id, name, arguments)
            finally:
                self._ended.append(id)
        self._ended.append(id)
        was, outcome = replayed
        if (was.name, was.arguments) != (name, arguments):
            place = str(self._attempt.place.child(id + 1))
            raise Diverged(self._log.run_id, place, f"{was.name} {was.arguments}", f"{name} {arguments}")
        return outcome

    async def _pass(self, id: int, name: str, arguments: str) -> Outcome:
        """Take one call through the gate. Its number is that of the call in the script."""
        gate, tool = self._attempt.gate, self._functions.get(name)
        of = name if tool is None else tool.name  # a resumed run may lack the tool of a call that is over
        call = new_call(gate, of, arguments, parent=self._attempt, number=id + 1)
        inner = gate.open(call)
        result = await gate.pass_through(call, inner)
        if result.success:
            return Outcome(_value(result))
        error = _ERRORS.get(inner.passage.status, "RuntimeError")
        return Outcome(error=error, message=shown_text(result))

    async def _drop(self, id: int) -> None:
        """Cancel a call that the script does not wait for any more, because one beside it has raised an exception.

        Raises `OutcomeUnknown` if it was under way when the process ended and must not be made twice.
        """
        task, place = self._under_way.pop(id, None), self._attempt.place.child(id + 1)
        if task is not None:
            await cancel_and_await((task,))
            if not task.cancelled():
                return self._settle(id, task.result())  # or raises the error that ends the run
            if id not in self._noted.dropped:
                await self._note(replace(self._noted, dropped=(*self._noted.dropped, id)))
        elif self._log.is_over(place):
            return self._settle(id, await self._call(id))  # its changes are part of the script's
        elif id not in self._noted.dropped and place in self._log.begun_inside(self._attempt.call.place):
            raise OutcomeUnknown(self._calls[id][0])
        self._awaited.remove(id)
        del self._calls[id]

    def _check_awaited(self) -> None:
        names = sorted({name for name, _ in self._calls.values()})
        if names:
            raise ScriptError(f"it called {', '.join(names)} without await.")

    # The record.

    async def _note(self, noted: Noted) -> None:
        self._noted = noted
        await self._log.note("script", self._attempt.place, noted)

    async def _note_told(self, id: int) -> None:
        if self._told == len(self._noted.told):
            await self._note(replace(self._noted, told=(*self._noted.told, id)))
        self._told += 1

    async def _suspend(self) -> None:
        """Keep the script as it waits now, so that it goes on from here in whichever process gets the answer."""
        if self._log.closed or not self._log.is_kept:
            return
        async with self._turn:
            interpreter = self._interpreter
            if self._is_kept or interpreter is None:
                return
            state = Suspended(
                await interpreter.dump(),
                interpreter.printed,
                self._calls,
                self._settled,
                self._made,
                self._told,
                interpreter.suspensions,
            )
            body = msgspec.msgpack.encode(state)
            digest = await self._log.journal.blobs.put(body, run_id=self._log.run_id)
            await self._note(replace(self._noted, digest=digest))
            self._is_kept = True


def _value(result: ToolResult[Any]) -> Any:
    """Return a result's value as plain data; its message if it has no value."""
    if lacks_value(result):
        return result.message or None
    return pydantic_core.from_json(json_of(result))
