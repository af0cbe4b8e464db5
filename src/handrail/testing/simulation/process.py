"""One process of a simulation, which begins or continues a run until the run or the process ends."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from handrail.adapter.conversation import Conversation
from handrail.adapter.run_record import decode_outcome
from handrail.dispatch.gate import Gate
from handrail.environment import LaterEnvironment
from handrail.errors import AnswerRefused, RunParked, RunUnknown
from handrail.events import ToolInvoked
from handrail.journal.sqlite import SqliteJournal
from handrail.protocols import Asker, Environment
from handrail.question import Answer, Question
from handrail.replay.marks import had_secret
from handrail.replay.parked_run import Parking
from handrail.resources.directory import DirectoryFilesystem
from handrail.session import Session
from handrail.session.serialization import encode_item
from handrail.testing.simulation.points import Points, SimulatedLoop, crash
from handrail.testing.simulation.scenario import RUN, Play, Scenario, Stage, World
from handrail.testing.virtual_time import VirtualClock

FILES, JOURNAL, WORLD, REST = "files", "journal.db", "world", "rest"

_PARKS = 40
"""Maximum number of times that a run may be parked in one process before the process gives up."""


def live(
    scenario: Scenario,
    folder: Path,
    process: int,
    points: Points,
    start: float,
    *,
    measuring: bool = False,
    connected: bool = False,
    stops: bool = False,
) -> None:
    """Play the scenario in this process, from the current state of its journal.

    The outcome is recorded in the world. With `connected` the person is present and answers at once, so that
    the run is never parked. With `stops`, the process parks its run by force at its point, and then ends.
    """
    world = World(folder / WORLD, process)
    stopping = _Stopping() if stops else None
    if stopping is not None:
        points.reached = stopping.stop
    if measuring:
        points.on_write = _noting_commits(world, folder / FILES)
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(points, start)) as runner:
        runner.run(_live(scenario, folder, world, points, connected, stopping))


async def _live(
    scenario: Scenario,
    folder: Path,
    world: World,
    points: Points,
    connected: bool,
    stopping: _Stopping | None,
) -> None:
    clock = VirtualClock()
    journal = SimulatedJournal(world, folder / JOURNAL, clock, points)
    files = DirectoryFilesystem(folder / FILES)
    (folder / REST).mkdir(exist_ok=True)
    stage = Stage(world, files, folder / REST, journal, clock, world.process)
    play = scenario.play(stage)
    _watch_handlers(world)
    _watch_conversations(journal)
    await files.recover(journal)
    world.happened("began", files=snapshot(folder / FILES), **recorded(folder / JOURNAL))
    points.arm()
    try:
        await _contradict(journal, folder)
        response = await _until_over(journal, play, play.person if connected else stopping)
    except Exception as error:
        points.disarm()
        world.happened("failed", error=type(error).__name__, message=str(error))
    else:
        points.disarm()
        row = await journal.runs.get(RUN)
        world.happened(
            "ended",
            text=response.text,
            output=repr(response.output),
            stop_reason=response.stop_reason,
            usage=msgspec.to_builtins(response.usage),
            cost=str(response.cost),
            status=row.status,
            messages=msgspec.to_builtins(decode_outcome(row).messages),
            **_seen_in(response.session),
        )
    world.happened(
        "over",
        files=snapshot(folder / FILES),
        transactions=points.transactions,
        writes=points.writes,
        steps=points.steps,
        modules=sorted(sys.modules) if points.on_write else (),
        **recorded(folder / JOURNAL),
    )
    verification = await journal.runs.verify()
    world.happened("verified", altered=[str(each) for each in verification.altered])
    journal.close()
    files.close()


async def _until_over(journal: SimulatedJournal, play: Play, person: Environment | None) -> Any:
    """Begin or continue the run, and answer the questions it waits for, until it is over. Returns its response."""
    adapter, prompt = play.adapter, play.prompt
    for attempt in range(_PARKS):
        journal.attempt = attempt
        try:
            row = await journal.runs.get(RUN)
        except RunUnknown:
            session = _session(play) or Session(id="session")
            going = adapter.evaluate(prompt, play.params, session=session, run_id=RUN, environment=person)
        else:
            if row.status == "parked":
                await _answer(journal, play, await journal.questions.open(RUN))
            going = adapter.resume(RUN, prompt, session=_session(play), environment=person)
        try:
            return await going
        except RunParked as parked:
            if isinstance(person, _Stopping) and person.stopped:
                crash()
            if play.person is None:
                raise
            await _answer(journal, play, parked.questions)
    raise AssertionError(f"the run was parked {_PARKS} times and is not over")


class _Stopping(LaterEnvironment):
    """An environment that stops like a server: it parks the active run by force, and then the process ends."""

    def __init__(self) -> None:
        self._parking: Parking | None = None
        self.stopped = False

    def run_started(self, parking: Parking) -> None:
        self._parking = parking

    def stop(self) -> None:
        self.stopped = True
        if self._parking is None or self._parking.parked:
            crash()  # no run is active
        else:
            self._parking.park(by_force=True)


def _noting_commits(world: World, files: Path) -> Callable[[sqlite3.Connection], None]:
    """Return a hook that records the files after each commit. A crash may leave only these states."""
    before = (0, 0)

    def note(connection: sqlite3.Connection) -> None:
        nonlocal before
        count = "SELECT count(*) FILTER (WHERE state = 'applied'), count(*) FILTER (WHERE state = 'committed') FROM records"
        applied, committed = connection.execute(count).fetchone()
        if (applied, committed) != before and not committed:
            world.happened("committed", files=snapshot(files))
        before = applied, committed

    return note


def _watch_conversations(journal: SimulatedJournal) -> None:
    """Record every message when it is added, including repeated ones and those that a crash cuts off."""
    name = "add"
    add = getattr(Conversation, name)

    def watched(conversation: Any, *said: Any, **options: Any) -> None:
        add(conversation, *said, **options)
        message = msgspec.to_builtins(conversation.shown_since(len(conversation.messages) - 1)[0])
        journal.world.happened(
            "said", attempt=journal.attempt, conversation=conversation.key, message=message
        )

    setattr(Conversation, name, watched)


def _session(play: Play) -> Session | None:
    return None if play.session is None else play.session()


async def _answer(journal: SimulatedJournal, play: Play, questions: Sequence[Question]) -> None:
    """Answer each question, repeat the answer, which is harmless, and contradict it, which is refused."""
    if play.person is None:
        return
    for question in questions[:1] if play.one_at_a_time else questions:
        answer = await play.person.ask(question)
        assert answer is not None, "the person of a play answers"
        journal.questions.answer(answer)
        journal.questions.answer(answer)
        _say_the_contrary(journal, answer)


async def _contradict(journal: SimulatedJournal, folder: Path) -> None:
    """Contradict every answer that was recorded before this process started."""
    for answer in _answers(folder / JOURNAL).values():
        _say_the_contrary(journal, answer)


def _say_the_contrary(journal: SimulatedJournal, answer: Answer) -> None:
    outcome = "declined" if answer.outcome == "answered" else "answered"
    try:
        journal.questions.answer(
            msgspec.structs.replace(answer, outcome=outcome, value=None, reason="I changed my mind")
        )
    except AnswerRefused:
        return
    journal.world.happened("answered twice", question=answer.question_id)


class SimulatedJournal(SqliteJournal):
    """A journal that writes inline, with a crash point before and after each write, and reports to the world."""

    def __init__(self, world: World, path: Path, clock: VirtualClock, points: Points) -> None:
        self.world = world
        self.attempt = 0
        """Number of times that this process has already begun or resumed the run."""
        super().__init__(
            path, clock=clock, new_id=lambda: "journal", watch=None, inline=True, moments=points.transaction
        )
        self.questions.ask = self._tell_questions(self.questions.ask)
        self.steps.run = self._tell_steps(self.steps.run)

    def _tell_questions(self, ask: Callable[..., Awaitable[Answer]]) -> Any:
        async def told(question: Question, asker: Asker | None = None, *rest: Any) -> Answer:
            if asker is not None:
                self.world.happened("shown", question=msgspec.to_builtins(question, builtin_types=()))
            return await ask(question, asker, *rest)

        return told

    def _tell_steps(self, run: Callable[..., Awaitable[Any]]) -> Any:
        async def told(key: str, function: Callable[[], Awaitable[Any]], /, **options: Any) -> Any:
            async def done() -> Any:
                self.world.happened("step begun", key=key)
                value = await function()
                self.world.happened("step done", key=key)
                return value

            return await run(key, done, **options)

        return told


def _watch_handlers(world: World) -> None:
    """Record each handler that is entered, by wrapping the gate in this process."""
    name = "_run_handler"
    run_handler = getattr(Gate, name)

    async def watched(gate: Any, call: Any, *rest: Any) -> Any:
        if call.kind.undoes:
            world.happened("undoing", id=call.id)
        if call.kind.is_auxiliary:
            return await run_handler(gate, call, *rest)  # compensations and probes may run twice
        tool, outer, ids = call.tool, call, list[str]()
        while outer is not None:
            ids.append(outer.id)
            outer = outer.parent
        world.happened(
            "entered",
            tool=tool.name,
            effect=tool.effect,
            probed=tool.probe is not None,
            reenters=tool.reenters,
            secret=tool.secret and had_secret(tool, call.arguments),
            place=str(call.call.place),
            attempt=str(call.place),
            ids=ids,
            run=call.run_context.run_id,
            key=call.invocation.idempotency_key,
        )
        return await run_handler(gate, call, *rest)

    setattr(Gate, name, watched)


# --- observations -------------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, str]:
    """Return every path below a folder with a description: a file's mode and content, a link's target, or `folder`."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        else:
            found[name] = "folder" if path.is_dir() else f"{path.stat().st_mode & 0o777:o} {path.read_text()}"
    return found


def recorded(journal: Path) -> dict[str, Any]:
    """Return what a journal's file contains about the run, read directly from the database."""
    with sqlite3.connect(journal) as connection:
        query = "SELECT body FROM records WHERE kind = 'unit' AND state != 'void'"
        units = [msgspec.msgpack.decode(row[0]) for row in connection.execute(query)]
        entries = connection.execute("SELECT kind, key, body FROM records ORDER BY number").fetchall()
        steps = [(key, body.hex().upper()) for kind, key, body in entries if kind == "step settled"]
        status = connection.execute("SELECT status FROM runs WHERE id = ?", (RUN,)).fetchone()
    connection.close()
    return {
        "status": "" if status is None else status[0],
        "finished": {
            **{unit["place"]: _left_something(unit) for unit in units},
            **{
                key: _left_something(inner)
                for kind, key, body in entries
                if kind == "inner call" and not (inner := msgspec.msgpack.decode(body)).get("lost")
            },
        },
        "begun": [key for kind, key, _ in entries if kind == "call begun"],
        "model": {key: body.hex() for kind, key, body in entries if kind == "model answer"},
        "settled": dict(steps),
        "answered": {key: msgspec.to_builtins(answer) for key, answer in _answers(journal).items()},
    }


def _left_something(finished: dict[str, Any]) -> bool:
    return bool(finished["events"] or finished["files"])


def _answers(journal: Path) -> dict[str, Answer]:
    with sqlite3.connect(journal) as connection:
        rows = connection.execute("SELECT id, answer FROM questions WHERE answer NOT NULL").fetchall()
    connection.close()
    return {row[0]: msgspec.msgpack.decode(row[1], type=Answer) for row in rows}


def _seen_in(session: Session) -> dict[str, Any]:
    """Return a session's calls and state at the end of its run."""
    calls = [[call.call_id, call.run_context.run_id] for call in session[ToolInvoked].all()]
    state = {
        kind.__name__: [encode_item(item, session.id).decode() for item in contents.all()]
        for kind, contents in session.state.items()
    }
    return {"calls": calls, "state": state}
