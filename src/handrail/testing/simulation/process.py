"""One process of a simulation. It begins or resumes a run, and works on it until the run or the process ends.

Every journal write and every step of its event loop is a point at which it can be crashed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from handrail.concurrency.threads import threads_at_work
from handrail.environment import LaterEnvironment
from handrail.errors import AnswerRefused, DefinitionError, RunParked, RunUnknown
from handrail.events import Fact, ToolInvoked
from handrail.journal.any_journal import AnyJournal
from handrail.journal.sql.connection import Connection
from handrail.protocols import Asker, Environment
from handrail.question import Answer, Question
from handrail.resources.directory import DirectoryFilesystem
from handrail.run.conversation import Conversation
from handrail.run.gate import Gate
from handrail.run.limits import Budget, BudgetTracker
from handrail.run.record.begin import decode_outcome
from handrail.run.record.format import had_secret
from handrail.run.record.parking import Parking
from handrail.run.run import Run
from handrail.session import Session
from handrail.session.serialization import encode_item
from handrail.testing.simulation.scenario import RUN, Play, Scenario, Stage, World
from handrail.testing.simulation.storage import Storage
from handrail.testing.virtual_time import VirtualClock, VirtualTimeLoop

# --- points -------------------------------------------------------------------------------------------

PointKind = Literal[
    "before write", "after write", "step", "overtaken before write", "overtaken at step", "parked at step"
]
"""The kind of a point, which determines what happens there.

The process dies just before a write, just after a write that nothing has reacted to yet, or before a step of
its event loop. If overtaken, it pauses there until another process has taken its run, and then continues. If
parked, it is told to stop there, parks its run by force, and ends.
"""

CRASHED = 137
"""The exit status of a process that ended at its point, as after `kill -9`."""


class Point(NamedTuple):
    """One point in a run, at which its process dies, is overtaken, or is parked.

    Pass its text, such as `before write 12`, to `simulate(..., at=...)` to repeat it.
    """

    kind: PointKind
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"

    @property
    def is_overtaken(self) -> bool:
        return self.kind.startswith("overtaken")

    @property
    def is_parked(self) -> bool:
        return self.kind.startswith("parked")

    @property
    def moment(self) -> str:
        """The moment of the point, without what happens there: `before write`, `after write` or `step`."""
        return self.kind.removeprefix("overtaken ").removeprefix("parked ").removeprefix("at ")

    @classmethod
    def parse(cls, text: str) -> Point:
        kind, _, number = text.rpartition(" ")
        if kind not in get_args(PointKind) or not number.isdecimal():
            raise DefinitionError(
                f"{text!r} is not a crash point. Pass one from a report, such as 'before write 12' or 'step 40'."
            )
        return cls(kind, int(number))  # pyright: ignore[reportArgumentType]  # it is one of the kinds


class Points:
    """Counts the writes and steps of one process, and calls `reached` at the point `at`, if there is one."""

    def __init__(self, at: Point | None, reached: Callable[[], None]) -> None:
        self._at = None if at is None else (at.moment, at.number)
        self.reached = reached
        self._armed = False
        self._changes = 0
        self.transactions = 0
        self.steps = 0
        self.writes: list[int] = []
        """The numbers of the transactions that changed the journal."""
        self.on_write: Callable[[Connection], None] | None = None

    def arm(self) -> None:
        """Start counting. Writes and steps before this belong to the harness."""
        self._armed = True

    def disarm(self) -> None:
        self._armed = False

    def transaction(self, moment: Literal["before", "after"], connection: Connection) -> None:
        """Count a journal transaction before it begins. Once it is durable, note its number if it has changed the journal."""
        if not self._armed:
            return
        if moment == "before":
            self.transactions += 1
            self._changes = connection.total_changes
            self._reach("before write", self.transactions)
        else:
            self._reach("after write", self.transactions)
            if connection.total_changes > self._changes:
                self.writes.append(self.transactions)
                if self.on_write is not None:
                    self.on_write(connection)

    def step(self) -> None:
        """Count a callback that the event loop is about to run."""
        if self._armed:
            self.steps += 1
            self._reach("step", self.steps)

    def _reach(self, moment: str, number: int) -> None:
        if self._at == (moment, number):
            self._at = None
            self.reached()


def crash() -> None:
    """End this process as `kill -9` would, without cleanup or flushing."""
    os._exit(CRASHED)


_PATIENCE = 2.0
"""Maximum real seconds to wait for a thread before the event loop continues without it."""
_IMPATIENCE = 0.002
"""Maximum real seconds to wait for threads after one has taken too long, because that one may itself wait for the loop."""


class SimulatedLoop(VirtualTimeLoop):
    """An event loop in virtual time that counts its callbacks, and waits for threads before it continues.

    A run therefore takes the same steps each time. Only the order of concurrent threads depends on the
    machine.
    """

    def __init__(self, points: Points, start: float) -> None:
        self._points = points
        self._arrived: deque[tuple[Callable[..., object], tuple[Any, ...], Context | None]] = deque()
        self._arrival = threading.Event()
        self._home = threading.get_ident()
        self._patience = _PATIENCE
        super().__init__()
        self.advance(start)

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self._step, callback, args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._step, callback, args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() == self._home:
            return super().call_soon_threadsafe(self._step, callback, args, context=context)
        self._arrived.append((callback, args, context))
        self._arrival.set()
        return super().call_soon_threadsafe(_wake)

    def meet_threads(self) -> bool:
        at_work = threads_at_work(self)
        while len(self._arrived) < at_work:
            self._arrival.clear()
            if len(self._arrived) < at_work and not self._arrival.wait(self._patience):
                self._patience = _IMPATIENCE
                break
        if not at_work:
            self._patience = _PATIENCE
        met = bool(self._arrived)
        while self._arrived:
            callback, args, context = self._arrived.popleft()
            super().call_soon(self._step, callback, args, context=context)
        return met

    def _step(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._points.step()
        callback(*args)


def _wake() -> None:
    """Do nothing. Scheduling this callback wakes the event loop."""


FILES, WORLD, REST = "files", "world", "rest"

# --- the process --------------------------------------------------------------------------------------

_PARKS = 40
"""A process gives up on its run once it has been parked this many times."""
_AMPLE = Budget(tool_calls=1_000_000)
"""A budget that no run exceeds. Calls are charged only if the run has a budget."""


def live(
    scenario: Scenario,
    storage: Storage,
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

    The outcome is recorded in the world, and with `measuring` also the files after each commit. With `connected`
    the person is present and answers at once, so that the run is never parked. With `stops`, the process parks its
    run by force at its point, and then ends.
    """
    world = World(folder / WORLD, process)
    stopping = _Stopping() if stops else None
    if stopping is not None:
        points.reached = stopping.stop
    if measuring:
        points.on_write = _noting_commits(world, folder / FILES)
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(points, start)) as runner:
        runner.run(_live(scenario, storage, folder, world, points, connected, stopping))


async def _live(
    scenario: Scenario,
    storage: Storage,
    folder: Path,
    world: World,
    points: Points,
    connected: bool,
    stopping: _Stopping | None,
) -> None:
    clock = VirtualClock()
    journal = storage.open(folder, clock, points.transaction)
    attempts = Attempts(world)
    charged = _watch_charges()
    _watch_questions(world, journal)
    _watch_steps(world, journal)
    files = DirectoryFilesystem(folder / FILES)
    (folder / REST).mkdir(exist_ok=True)
    stage = Stage(world, files, folder / REST, journal, clock, world.process)
    play = scenario.play(stage)
    _watch_handlers(world)
    _watch_conversations(attempts)
    await files.recover(journal)
    world.happened("began", files=snapshot(folder / FILES), **recorded(storage, folder))
    points.arm()
    try:
        _contradict(world, journal, recorded_answers(storage, folder))
        response = await _until_over(attempts, journal, play, play.person if connected else stopping)
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
            charged=int(charged[-1].spent().get("tool_calls", 0)) if charged else None,
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
        **recorded(storage, folder),
    )
    verification = await journal.runs.verify()
    world.happened("verified", altered=[str(each) for each in verification.altered])
    journal.close()
    files.close()


async def _until_over(attempts: Attempts, journal: AnyJournal, play: Play, person: Environment | None) -> Any:
    """Begin or continue the run, and answer the questions it waits for, until it is over. Returns its response.

    Raises the run's error if it fails, `RunParked` if there is nobody to answer, and `AssertionError` if it is parked
    too often.
    """
    adapter, prompt = play.adapter, play.prompt
    for attempt in range(_PARKS):
        attempts.number = attempt
        try:
            row = await journal.runs.get(RUN)
        except RunUnknown:
            session = _session(play) or Session(id="session")
            going = adapter.evaluate(
                prompt, play.params, session=session, run_id=RUN, environment=person, budget=_AMPLE
            )
        else:
            if row.status == "parked":
                questions = await journal.questions.open(RUN)
                await _answer(attempts.world, journal, play, RunParked(RUN, questions, row.due_at))
            going = adapter.resume(RUN, prompt, session=_session(play), environment=person)
        try:
            return await going
        except RunParked as parked:
            if isinstance(person, _Stopping) and person.stopped:
                crash()
            if play.person is None:
                raise
            await _answer(attempts.world, journal, play, parked)
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


def _noting_commits(world: World, files: Path) -> Callable[[Connection], None]:
    """Return a hook that records the files after each commit. Recovery must restore one of these states, or the initial one."""
    before = (0, 0)

    def note(connection: Connection) -> None:
        nonlocal before
        count = "SELECT count(*) FILTER (WHERE state = 'applied'), count(*) FILTER (WHERE state = 'committed') FROM records"
        applied, committed = connection.execute(count).fetchone()
        if (applied, committed) != before and not committed:
            world.happened("committed", files=snapshot(files))
        before = applied, committed

    return note


def _watch_conversations(attempts: Attempts) -> None:
    """Record every message when it is added, including messages that a replay adds again."""
    name = "add"
    add = getattr(Conversation, name)

    def watched(conversation: Any, *said: Any, **options: Any) -> None:
        add(conversation, *said, **options)
        message = msgspec.to_builtins(conversation.shown_since(len(conversation.messages) - 1)[0])
        attempts.world.happened(
            "said", attempt=attempts.number, conversation=conversation.key, message=message
        )

    setattr(Conversation, name, watched)


def _session(play: Play) -> Session | None:
    return None if play.session is None else play.session()


async def _answer(world: World, journal: AnyJournal, play: Play, parked: RunParked) -> None:
    """Answer the questions, or only the first if the play says so. Each answer is then repeated and contradicted.

    A repeated answer must have no effect, and a contradiction must be refused. If nobody answers any of them, waits until the
    first one expires. Without a person, does nothing.
    """
    if play.person is None:
        return
    questions = [each for each in parked.questions if each.name not in play.unanswered]
    if parked.questions and not questions and parked.due_at is not None:
        await asyncio.sleep(max(parked.due_at - journal.clock.now().timestamp(), 0.0))
    for question in questions[:1] if play.one_at_a_time else questions:
        answer = await play.person.ask(question)
        assert answer is not None, "the person of a play answers"
        journal.questions.answer(answer)
        journal.questions.answer(answer)
        _say_the_contrary(world, journal, answer)


def _contradict(world: World, journal: AnyJournal, answers: Mapping[str, Answer]) -> None:
    """Contradict every answer that was recorded before this process started."""
    for answer in answers.values():
        _say_the_contrary(world, journal, answer)


def _say_the_contrary(world: World, journal: AnyJournal, answer: Answer) -> None:
    outcome = "answered" if answer.outcome == "declined" else "declined"
    try:
        journal.questions.answer(
            msgspec.structs.replace(answer, outcome=outcome, value=None, reason="I changed my mind")
        )
    except AnswerRefused:
        return
    world.happened("answered twice", question=answer.question_id)


class Attempts:
    """This process's current attempt to finish the run, and the world that records it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.number = 0
        """0-based index of the attempt: how often this process has begun or resumed the run before."""


def _watch_charges() -> list[BudgetTracker]:
    """Return a list to which the run's budget tracker is added each time the run begins or is resumed."""
    name, trackers = "_begin", list[BudgetTracker]()
    begin = getattr(Run, name)

    def watched(run: Any, *given: Any) -> None:
        begin(run, *given)
        if run.outer is None:
            trackers.append(run.costs.tracker)

    setattr(Run, name, watched)
    return trackers


def _watch_questions(world: World, journal: AnyJournal) -> None:
    """Record every question that is shown to a person."""
    ask = journal.questions.ask

    async def told(question: Question, asker: Asker | None = None, *rest: Any) -> Answer:
        if asker is not None:
            world.happened("shown", question=msgspec.to_builtins(question, builtin_types=()))
        return await ask(question, asker, *rest)

    setattr(journal.questions, "ask", told)  # noqa: B010  # pyright refuses to assign to a method


def _watch_steps(world: World, journal: AnyJournal) -> None:
    """Record when the function of each step begins and ends."""
    run: Callable[..., Awaitable[Any]] = journal.steps.run

    async def told(key: str, function: Callable[[], Awaitable[Any]], /, **options: Any) -> Any:
        async def done() -> Any:
            world.happened("step begun", key=key)
            value = await function()
            world.happened("step done", key=key)
            return value

        return await run(key, done, **options)

    setattr(journal.steps, "run", told)  # noqa: B010


def _watch_handlers(world: World) -> None:
    """Record each handler that the gate enters in this process, except those of compensations and probes."""
    name = "_start"
    start_handler = getattr(Gate, name)

    async def watched(gate: Any, call: Any, *rest: Any) -> Any:
        if call.kind.undoes:
            world.happened("undoing", id=call.id)
        if call.kind.is_auxiliary:
            # Compensations and probes may run twice, so they are not recorded as entered.
            return await start_handler(gate, call, *rest)
        tool, outer, ids = call.tool, call, list[str]()
        while outer is not None:
            ids.append(outer.id)
            outer = outer.parent
        world.happened(
            "entered",
            tool=tool.name,
            effect=tool.effect,
            probed=tool.probe is not None,
            counts=not (call.kind.is_part or call.kind.undoes),
            reenters=tool.reenters or tool.delegates,
            secret=tool.secret and had_secret(tool, call.arguments),
            place=str(call.call.place),
            attempt=str(call.place),
            ids=ids,
            run=call.run_context.run_id,
            key=call.invocation.idempotency_key,
        )
        return await start_handler(gate, call, *rest)

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


def recorded(storage: Storage, folder: Path) -> dict[str, Any]:
    """Return what the journal has recorded about the run, read directly from the database."""
    query = "SELECT body FROM records WHERE kind = 'unit' AND state != 'void'"
    units = [msgspec.msgpack.decode(row[0]) for row in storage.read(folder, query)]
    entries = storage.read(folder, "SELECT kind, key, body FROM records ORDER BY number")
    steps = [(key, body.hex().upper()) for kind, key, body in entries if kind == "step settled"]
    status = storage.read(folder, "SELECT status FROM runs WHERE id = ?", RUN)
    return {
        "status": status[0][0] if status else "",
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
        "answered": {
            key: msgspec.to_builtins(answer) for key, answer in recorded_answers(storage, folder).items()
        },
    }


def _left_something(finished: dict[str, Any]) -> bool:
    return bool(finished.get("events") or finished.get("files"))  # empty fields are left out


def recorded_answers(storage: Storage, folder: Path) -> dict[str, Answer]:
    """Return the recorded answers, by question id."""
    rows = storage.read(folder, "SELECT id, answer FROM questions WHERE answer IS NOT NULL")
    return {row[0]: msgspec.msgpack.decode(row[1], type=Answer) for row in rows}


def _seen_in(session: Session) -> dict[str, Any]:
    """Return a session's calls, state and logs at the end of its run. Handrail's own facts are left out of the logs."""
    calls = [[call.call_id, call.run_context.run_id] for call in session[ToolInvoked].all()]
    state = {
        kind.__name__: [encode_item(item, session.id).decode() for item in contents.all()]
        for kind, contents in session.state.items()
    }
    logs = {
        kind.__name__: [encode_item(item, session.id).decode() for item in contents.all()]
        for kind, contents in session.logs().items()
        if not issubclass(kind, Fact)
    }
    return {"calls": calls, "state": state, "logs": logs}
