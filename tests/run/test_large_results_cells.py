"""Large results in a handoff's worker, in a run that waits for an answer, and in worker processes on PostgreSQL."""

import asyncio
import contextlib
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from handrail import PostgresJournal, WorkerRegistry, runs
from handrail.fleet import FleetApp, Submission, submit
from handrail.journal.protocol import Journal
from handrail.journal.records import OVER
from handrail.question import Question
from handrail.run.record.begin import decode_outcome
from support import PATIENCE, postgres, warm_python
from support.parked_runs import answer_to
from support.worker_folders import sound

MAIN = """
    ---
    model: large_models:main
    tools: [report, ask_clerk]
    workers: [clerk]
    result_limit: 400
    ---
    Report.
    """
CLERK = """
    ---
    model: large_models:clerk
    tools: [archive]
    description: Reads the archive.
    ---
    Read.
    """
TOOLS = """
    from dataclasses import dataclass
    from handrail import Handoff, Parked, ToolContext, ToolResult, tool

    def rows(name):
        return "".join(f"{name} {number}\\n" for number in range(300))

    @tool(effect="pure")
    async def report() -> str:
        "Return a long report."
        return rows("report")

    @tool(effect="pure")
    async def archive() -> str:
        "Return a long archive."
        return rows("archive")

    @dataclass
    class Asked:
        call_id: str

    @dataclass
    class Note:
        text: str

    ask_clerk = Handoff("ask_clerk", "Let the clerk read, and a person look.", params=Asked, answer=Note, effect="idempotent")

    @ask_clerk.before
    async def read(asked: Asked, *, context: ToolContext) -> Parked[Note, Asked]:
        return Parked(Note(await context.call_worker("clerk", asked.call_id)), asked)

    @ask_clerk.after
    async def look(before: Note, said: Note, *, context: ToolContext) -> ToolResult[str]:
        after = await context.call_worker("clerk", before.text.splitlines()[0])
        return ToolResult.ok(f"{before.text}{said.text}\\n{after}")
    """
MODELS = """
    import re
    from handrail import ScriptedModel, ToolCall
    from handrail.messages import ToolMessage

    def shortened(text):
        return re.search(r'call_id="([^"]+)"', text)[1]

    def read(call_id, **how):
        return ToolCall("read_result", {"call_id": call_id, **how})

    def texts(request):
        assert [each.tool.name for each in request.tools][-1] == "read_result"
        return [each.text for message in request.messages if isinstance(message, ToolMessage) for each in message.results]

    def main(request):
        said = texts(request)
        if not said:
            return ToolCall("report")
        report = shortened(said[0])
        steps = [
            lambda: read(report, search="REPORT 150"),
            lambda: ToolCall("ask_clerk", {"call_id": report}),
            lambda: read(shortened(said[2]), search="said"),
            lambda: read(shortened(said[2]), first_line=302, last_line=306),
            lambda: "|".join([said[1], said[3], said[4]]),
        ]
        return steps[len(said) - 1]()

    def clerk(request):
        said = texts(request)
        if not said:
            return ToolCall("archive")
        own, other = shortened(said[0]), request.messages[0].text
        steps = [
            lambda: read(own, first_line=300),
            lambda: read(other, first_line=300),
            lambda: "".join([f"{own}\\n", said[1], said[2], *(f"line {number}\\n" for number in range(295))]),
        ]
        return steps[len(said) - 1]()

    main, clerk = ScriptedModel(main), ScriptedModel(clerk)
    """
SAID = (
    r'\[1 place with "REPORT 150"\.\]\nline 151, character 1540: report 150\|'
    r'\[1 place with "said"\.\]\nline 301, character 2706: said well\|'
    r"\[Characters 2716 to \d+ of 5423, lines 302 to 306 of \d+\.\]\n"
    r"call-\S+\n\[Characters [^]]*\]\narchive 299\n\[Characters [^]]*\]\narchive 299\n"
)
"""What the model said at the end: what it found in the report and in the clerk's answers, the second of which quotes the archives."""


def folder(at: Path) -> WorkerRegistry:
    (at / "large_models.py").write_text(textwrap.dedent(MODELS).lstrip())
    return sound(at, TOOLS, main=MAIN, clerk=CLERK)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    url = postgres.borrow_url()
    yield url
    postgres.give_back(url)


async def rest(journal: Journal, run_id: str) -> Sequence[Question]:
    """Wait until a run is over, or parked with a question, and return its open questions."""
    async with asyncio.timeout(PATIENCE):
        while (row := await journal.runs.get(run_id)).status not in OVER:
            if row.status == "parked" and row.questions:
                break
            await asyncio.sleep(0.01)
    return await journal.questions.open(run_id)


async def test_a_worker_in_a_handoff_reads_on_before_and_after_it_waits_in_worker_processes(
    tmp_path: Path, url: str
):
    """Each worker process is a new one. The clerk reads its own result and that of the run around the handoff, before the
    handoff waits for an answer and after that; its long answer is shortened in the run around it, which reads on, too."""
    folder(tmp_path)
    journal = PostgresJournal(url)
    app = FleetApp.load(str(tmp_path / "main.md"))

    environment = {**os.environ, "HANDRAIL_JOURNAL": url, "PYTHONPATH": str(tmp_path)}
    run_id = (await submit(journal, app, Submission("go", session_id="s"))).record.id
    for answer in ({"approved": True}, {"text": "said well"}, None):
        worker = ["-m", "handrail", "worker", str(tmp_path / "main.md")]
        with contextlib.closing(warm_python.start(worker, env=environment)):
            asked = await rest(journal, run_id)
        for question in asked:
            journal.questions.answer(answer_to(question, answer))
    row = await journal.runs.get(run_id)
    assert re.fullmatch(SAID, decode_outcome(row).text)
    assert not (await journal.runs.verify()).altered
    assert "are left out here" in str(await runs.show(journal, run_id))
    journal.close()
