"""One recorded session, several processes: each commit is made on what the others have committed."""

import signal
import textwrap
from pathlib import Path

from handrail import SqliteJournal, runs
from handrail.journal.sql.leases import is_dead
from support import PATIENCE, warm_python

APP = textwrap.dedent(
    """
    import asyncio, os, signal, sys
    from dataclasses import dataclass
    from handrail import Adapter, Prompt, ScriptedModel, Session, SqliteJournal, ToolCall, ToolContext, runs, tool
    from handrail.errors import SessionBusy, SessionOutdated, ToolError

    @dataclass(frozen=True)
    class Booked:
        who: str

    @tool(effect="staged")
    async def book(who: str, *, context: ToolContext) -> str:
        '''Book the only seat.'''
        if who == "killed" and len(sys.argv) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if context.session[Booked].all():
            raise ToolError("the seat is taken")
        context.session.dispatch(Booked(who))
        return "booked"

    prompt = Prompt("desk", "Help.", tools=[book])

    def adapter(journal, who):
        return Adapter(ScriptedModel([ToolCall("book", {"who": who}), "End."]), journal=journal)

    async def main(path, who, *how):
        journal = SqliteJournal(path)
        if who == "first":
            return await Adapter(ScriptedModel(["Hi."]), journal=journal).evaluate(
                prompt, "Hi.", session=Session(id="s"), run_id="first")
        if how == ("resume",):
            session = (await adapter(journal, who).resume(f"run of {who}", prompt)).session
        else:
            session = await runs.session(journal, "s", principal="local")
            if how == ("wait",):
                print("loaded", flush=True)
                sys.stdin.readline()
            while True:
                try:
                    await adapter(journal, who).evaluate(
                        prompt, "Book.", session=session, run_id=f"run of {who}")
                    break
                except (SessionBusy, SessionOutdated) as refused:
                    print(type(refused).__name__, flush=True)
                    await asyncio.sleep(0.01)  # the other process is at work
                    session = await runs.session(journal, "s", principal="local")
        print([each.who for each in session[Booked].all()])
        journal.close()

    asyncio.run(main(*sys.argv[1:]))
    """
)


def book(folder: Path, who: str, *how: str) -> tuple[int, list[str]]:
    done = warm_python.run([folder / "desk.py", str(folder / "runs.db"), who, *how], cwd=folder)
    return done.returncode, done.stdout.decode().split("\n")


def test_two_processes_do_not_both_book_the_only_seat(tmp_path: Path):
    """Both load the session before either books. One books, the other is refused at first, and then sees the booking."""
    (tmp_path / "desk.py").write_text(APP)
    assert book(tmp_path, "first")[0] == 0
    people = ("ada", "bob")
    programs = [
        warm_python.start([tmp_path / "desk.py", str(tmp_path / "runs.db"), who, "wait"], cwd=tmp_path)
        for who in people
    ]
    for each in programs:
        assert each.stdout is not None
        assert each.stdout.readline() == "loaded\n"
    for each in programs:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    said = [each.communicate(PATIENCE) for each in programs]
    assert [each.returncode for each in programs] == [0, 0], said
    ends = {out.split("\n")[-2] for out, _ in said}
    assert ends in ({"['ada']"}, {"['bob']"}), said
    assert sum("Session" in out for out, _ in said) == 1, "a process booked without the other's turn"


async def test_the_session_of_a_killed_process_is_taken_over(tmp_path: Path):
    """Another process books at once, and the killed run does not book the seat again when it is resumed."""
    (tmp_path / "desk.py").write_text(APP)
    assert book(tmp_path, "first")[0] == 0
    assert book(tmp_path, "killed")[0] == -signal.SIGKILL
    journal = SqliteJournal(tmp_path / "runs.db")
    row = await journal.runs.get("run of killed")
    assert (row.status, is_dead(row.owner)) == ("running", True)
    assert book(tmp_path, "ada", "now") == (0, ["['ada']", ""])
    row = await journal.runs.get("run of killed")
    assert (row.status, row.owner, row.deaths) == ("running", "", 1)
    assert book(tmp_path, "killed", "resume") == (0, ["['ada']", ""])
    assert not (await journal.runs.verify()).altered
    journal.close()


async def test_a_killed_run_is_cancelled_although_it_had_the_turn(tmp_path: Path):
    (tmp_path / "desk.py").write_text(APP)
    book(tmp_path, "first")
    book(tmp_path, "killed")
    journal = SqliteJournal(tmp_path / "runs.db")
    assert (await runs.cancel(journal, "run of killed")).status == "cancelled"
    assert book(tmp_path, "ada", "now") == (0, ["['ada']", ""])
    journal.close()
