"""Large results: the model is shown their beginning and end, reads on by the call's id, and the program has them whole."""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from handrail import (
    Agent,
    Compact,
    LaterEnvironment,
    PolicyDecision,
    Prompt,
    ScriptedModel,
    Session,
    SqliteJournal,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    open_gate,
    tool,
)
from handrail.errors import DefinitionError, RunParked, ToolDefinitionError
from handrail.events import ResultShortened, ToolInvoked
from handrail.guard import CapabilityPolicy
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import CallAnswered, ModelRequest, ToolMessage
from handrail.run.large_results import excerpt, matches, page
from handrail.runs import export, forget, fork, import_, replay
from handrail.session.serialization import load, save
from handrail.tools.result import shown_text
from support.examples import at_most
from support.parked_runs import answer_to
from support.worker_folders import PLAIN, folder

LIMIT = 400
REPORT = "".join(f"row {number}: {'ja' if number % 50 else 'Needle'}\r\n" for number in range(300))


@tool(effect="pure")
async def report() -> str:
    """Return a long report."""
    return REPORT


@tool(effect="pure")
async def short() -> str:
    """Return something short."""
    return "short"


def read(call_id: str = "big", **arguments: Any) -> ToolCall:
    return ToolCall("read_result", {"call_id": call_id, **arguments})


def results(request: ModelRequest) -> list[CallAnswered]:
    return [
        each for message in request.messages if isinstance(message, ToolMessage) for each in message.results
    ]


def texts(model: ScriptedModel) -> list[str]:
    """Return the texts of the results in a model's last request."""
    return [each.text for each in results(model.requests[-1])]


def part(text: str) -> str:
    """Return the part of a result in what the reader returned."""
    return text.partition("\n")[2]


def offered(request: ModelRequest) -> list[str]:
    return [each.tool.name for each in request.tools]


def model_of(*answers: Any) -> ScriptedModel:
    return ScriptedModel([*answers, "done"])


BIG = ToolCall("report", {}, "big")


# --- the texts ----------------------------------------------------------------------------------------

some_text = st.text(
    st.sampled_from("aAbß\n\rΣςσİI\u2028\x85é\U0001f600e\u0301 "), min_size=1, max_size=3000
) | st.text(min_size=1, max_size=300)


@given(some_text, st.integers(200, 500), st.integers(1, 60))
@settings(max_examples=at_most(300))
def test_an_excerpt_and_every_range_are_the_whole_text(text: str, limit: int, small: int):
    if len(text) > limit:
        shown = excerpt(text, limit, "id")
        found = re.search(
            r"\n\[… [^\n]* are left out here: (\d+) to (\d+), in the lines (\d+) to (\d+) of \d+\. [^\n]*\]\n",
            shown,
        )
        assert found
        start, end, first, last = map(int, found.groups())
        assert shown[: found.start()] == text[:start]
        assert shown[found.end() :] == text[end:]
        assert start + len(text) - end <= limit
        lines = re.findall(r"[^\n]*\n|[^\n]+", text)
        assert text[start:end] in "".join(lines[first - 1 : last])
    read_on, start = "", 0
    while start < len(text):
        said = page(text, start, len(text), small)
        assert 0 < len(part(said)) <= small
        read_on += part(said)
        start = len(read_on)
        assert (f"Read on with start={start}." in said.partition("\n")[0]) == (start < len(text))
    assert read_on == text


@given(some_text, st.text(st.sampled_from("aAbß\nςΣİI é"), min_size=1, max_size=4), st.integers(200, 500))
@settings(max_examples=at_most(300))
@example("aΣ", "Σ", 200)
def test_a_search_shows_every_place(text: str, sought: str, limit: int):
    """Searching on from where the last search ended shows each place or what stands around it, by its line and character."""
    start = 0
    covered: list[tuple[int, int]] = []
    while True:
        said = matches(text, sought, start, len(text), limit)
        header, *entries = re.split(r"\n(?=line \d+, character \d+: )", said)
        assert len("\n".join(entries)) <= limit
        for entry in entries:
            line, at = map(int, re.match(r"line (\d+), character (\d+)", entry).groups())  # pyright: ignore[reportOptionalMemberAccess]
            assert line == text.count("\n", 0, at) + 1
            covered.append((at, at + len(sought) + 100))
        more = re.search(r"Search on with start=(\d+)\.", header)
        if not more:
            break
        start = int(more[1])
    same = re.compile(re.escape(sought).replace("ς", "[ςσ]"), re.IGNORECASE)
    for place in same.finditer(text):
        assert any(begin <= place.start() < end for begin, end in covered)


# --- what the model is shown -----------------------------------------------------------------------------


@pytest.mark.parametrize("journal", [None, MemoryJournal])
async def test_a_model_reads_on_and_the_program_has_the_value(journal: Callable[[], Any] | None):
    model = model_of(
        BIG,
        read(start=5, end=30),
        read(first_line=3, last_line=4),
        read(search="needle"),
        read(search="nowhere"),
        read(first_line=250),
    )
    session = Session()
    agent = Agent(model, "Read.", tools=[report, short], result_limit=LIMIT)
    await agent.run("go", session=session, journal=None if journal is None else journal())
    shown, by_range, by_line, found, none, rest = texts(model)
    assert shown.startswith("row 0: Needle\r\nrow 1: ja\r\n")
    assert shown.endswith("row 299: ja\r\n")
    assert 'call_id="big"' in shown
    assert f"of {len(REPORT):,} characters" in shown
    assert len(shown) < LIMIT + 250
    assert part(by_range) == REPORT[5:30]
    assert part(by_line) == "row 2: ja\r\nrow 3: ja\r\n"
    assert re.findall(r"line (\d+), character \d+: row \d+: Needle", found) == [
        "1",
        "51",
        "101",
        "151",
        "201",
        "251",
    ]
    assert none.startswith('[0 places with "nowhere"')
    assert part(rest).startswith("row 249: ja")
    assert len(part(rest)) <= LIMIT
    assert "Read on with start=" in rest
    end = next(each for each in session[ToolInvoked].all() if each.call_id == "big")
    assert end.result.value == REPORT
    fact = session[ResultShortened].latest()
    assert fact is not None
    assert (fact.call_id, fact.tool, fact.whole.size) == ("big", "report", len(REPORT))
    assert (fact.whole.text == "") == (journal is not None)


async def test_without_a_limit_nothing_is_changed():
    model = model_of(BIG)
    session = Session()
    await Agent(model, "Read.", tools=[report]).run("go", session=session)
    assert texts(model) == [REPORT]
    assert offered(model.requests[0]) == ["report"]
    assert not session[ResultShortened].all()


@pytest.mark.parametrize(("size", "is_whole"), [(LIMIT, True), (LIMIT + 1, False)])
async def test_the_limit_is_the_largest_size_that_is_shown_whole(size: int, is_whole: bool):
    @tool(effect="pure")
    async def exact() -> str:
        """Return a text of some size."""
        return "é" * size

    model = model_of(ToolCall("exact"))
    await Agent(model, "Read.", tools=[exact], result_limit=LIMIT).run("go")
    assert (texts(model) == ["é" * size]) is is_whole


async def test_a_run_without_tools_is_offered_no_reader():
    model = model_of()
    await Agent(model, "Talk.", result_limit=LIMIT).run("go")
    assert offered(model.requests[0]) == []


async def test_a_tools_limit_takes_precedence_and_the_reader_is_offered_from_the_first_request():
    @tool(effect="pure", result_limit=10_000)
    async def long() -> str:
        """Return something long."""
        return REPORT[:5000]

    @tool(effect="pure", result_limit=250)
    async def tight() -> str:
        """Return something that may not be long."""
        return REPORT[:300]

    model = model_of(ToolCall("long"), ToolCall("tight"), BIG)
    await Agent(model, "Read.", tools=[long, tight, report], result_limit=LIMIT).run("go")
    whole, tightened, shown = texts(model)
    assert whole == REPORT[:5000]
    assert "are left out here" in tightened
    assert "are left out here" in shown
    assert all(offered(request) == ["long", "tight", "report", "read_result"] for request in model.requests)

    model = model_of(BIG, ToolCall("tight", {}, "t"), read("t"))
    await Agent(model, "Read.", tools=[report, tight]).run("go")
    whole, tightened, rest = texts(model)
    assert whole == REPORT
    assert len(part(rest)) <= 250
    assert offered(model.requests[0])[-1] == "read_result"


@pytest.mark.parametrize("limited", ["agent", "prompt", "run"])
async def test_who_sets_the_limit(limited: str):
    model = model_of(BIG)
    limit: Any = {"result_limit": LIMIT}
    of_run: Any = limit if limited == "run" else {}
    if limited == "prompt":
        agent = Agent(model, Prompt("p", "Read.", tools=[report], **limit))
    else:
        agent = Agent(model, "Read.", tools=[report], **(limit if limited == "agent" else {}))
    await agent.run("go", **of_run)
    assert "are left out here" in texts(model)[0]


async def test_failures_are_shortened_too():
    @tool(effect="pure")
    async def refuse() -> ToolResult[str]:
        """Return a long failure."""
        return ToolResult.error(REPORT)

    model = model_of(ToolCall("refuse", {}, "r"), read("r", first_line=300))
    journal = MemoryJournal()
    await Agent(model, "Read.", tools=[refuse], result_limit=LIMIT).run("go", journal=journal)
    refused, rest = texts(model)
    assert "are left out here" in refused
    assert part(rest) == "row 299: ja\r\n"


async def test_a_result_that_several_calls_return_is_not_changed():
    """The excerpts name their own calls, and the tool's own object has no excerpt in it."""
    same = ToolResult.ok(REPORT)

    @tool(effect="pure")
    async def constant() -> ToolResult[str]:
        """Return the same object each time."""
        return same

    model = model_of(ToolCall("constant", {}, "one"), ToolCall("constant", {}, "two"))
    await Agent(model, "Read.", tools=[constant], result_limit=LIMIT).run("go")
    one, two = texts(model)
    assert 'call_id="one"' in one
    assert one.replace('"one"', '"two"') == two
    assert same.render() == REPORT


async def test_an_inner_call_has_the_whole_result():
    """Only what a model is shown is shortened, not what a handler gets from its own calls."""
    sizes: list[int] = []

    @tool(effect="pure")
    async def count(*, context: ToolContext) -> int:
        """Count the report's characters."""
        result = await context.call("report")
        sizes.append(len(result.render()))
        return sizes[-1]

    model, session = model_of(ToolCall("count")), Session()
    await Agent(model, "Read.", tools=[count, report], result_limit=LIMIT).run("go", session=session)
    assert sizes == [len(REPORT)]
    assert not session[ResultShortened].all()
    assert texts(model) == [str(len(REPORT))]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"call_id": "nobody"}, 'no result of a call "nobody"'),
        ({"first_line": 301}, "300 lines"),
        ({"start": 10**6}, f"only {len(REPORT)} characters"),
        ({"start": 5, "end": 4}, "ends before it begins"),
        ({"first_line": 5, "last_line": 2}, "ends before it begins"),
        ({"start": 5, "first_line": 2}, "either `start`"),
        ({"first_line": 0}, "first_line"),
        ({"search": ""}, "search"),
    ],
)
async def test_what_cant_be_read_is_said(arguments: Any, says: str):
    model = model_of(BIG, read(**arguments))
    await Agent(model, "Read.", tools=[report], result_limit=LIMIT).run("go")
    answered = results(model.requests[-1])[-1]
    assert answered.failed
    assert says in answered.text


async def test_a_result_that_was_not_shortened_is_read_too():
    """It may have become a stub since. Nobody else's results are found like this."""
    model = model_of(ToolCall("short", {}, "s"), read("s"))
    await Agent(model, "Read.", tools=[short], result_limit=LIMIT).run("go")
    assert part(texts(model)[1]) == "short"


async def test_another_sessions_results_are_not_read():
    journal = MemoryJournal()
    agent = Agent(model_of(BIG), "Read.", tools=[report], result_limit=LIMIT)
    await agent.run("go", journal=journal, session=Session(id="one"))
    model = model_of(read())
    await Agent(model, "Read.", tools=[report], result_limit=LIMIT).run(
        "go", journal=journal, session=Session(id="two")
    )
    assert 'no result of a call "big"' in texts(model)[0]


class NoReading:
    name = "no reading"

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        return PolicyDecision.deny("no") if tool.name == "read_result" else PolicyDecision.allow()

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        return None


async def test_a_policy_decides_on_reading():
    model = model_of(BIG, read())
    await Agent(model, "Read.", tools=[report], result_limit=LIMIT, policies=[NoReading()]).run("go")
    assert results(model.requests[-1])[-1].failed


async def test_the_name_of_the_reader_is_taken():
    @tool(effect="pure")
    async def read_result() -> None:
        """Read."""

    with pytest.raises(DefinitionError, match="read_result"):
        await Agent(model_of(), "Read.", tools=[read_result], result_limit=LIMIT).run("go")
    with pytest.raises(DefinitionError, match="read_result"):
        await Agent(model_of(), "Read.").run("go", tools=[read_result])
    await Agent(model_of(), "Read.", tools=[read_result]).run("go")  # nothing is in its way


@pytest.mark.parametrize("limit", [0, 199, -1, True, "many", 1000.5])
def test_what_is_no_limit_is_refused(limit: Any):
    with pytest.raises(DefinitionError, match="result_limit is"):
        Agent(model_of(), "Read.", result_limit=limit)
    with pytest.raises(DefinitionError, match="result_limit is"):
        Agent(model_of(), "Read.").run("go", result_limit=limit)
    with pytest.raises(ToolDefinitionError, match="result_limit is"):
        Tool("t", "Do.", params=None, effect="pure", result_limit=limit)


# --- what is recorded -----------------------------------------------------------------------------------


async def test_a_later_run_of_the_session_reads_on(tmp_path: Path):
    """In another process, with a session from the journal; and in one that was saved without a journal."""
    with contextlib.closing(SqliteJournal(tmp_path / "runs.db")) as journal:
        agent = Agent(model_of(BIG), "Read.", tools=[report], result_limit=LIMIT)
        await agent.run("go", journal=journal, session=Session(id="s"))
    with contextlib.closing(SqliteJournal(tmp_path / "runs.db")) as journal:
        model = model_of(read(first_line=300))
        await Agent(model, "Read.", tools=[report], result_limit=LIMIT).run(
            "on", journal=journal, session="s"
        )
        assert part(texts(model)[-1]) == "row 299: ja\r\n"
    session = Session(id="plain")
    await Agent(model_of(BIG), "Read.", tools=[report], result_limit=LIMIT).run("go", session=session)
    for journal in (None, MemoryJournal()):
        model = model_of(read(first_line=300))
        agent = Agent(model, "Read.", tools=[report], result_limit=LIMIT)
        await agent.run("on", session=load(save(session)), journal=journal)
        assert part(texts(model)[-1]) == "row 299: ja\r\n"


async def test_a_resumed_run_shows_and_reads_what_it_would_have(tmp_path: Path):
    """A run that was parked for an approval sends the same, with its limit, and reads what was shortened before."""

    @tool(effect="pure", capabilities=["book"])
    async def book() -> str:
        """Book a seat."""
        return REPORT.upper()

    async def last_request(name: str, policies: Any) -> list[str]:
        answers = [BIG, ToolCall("book", {}, "booked"), read(first_line=300), read("booked", first_line=300)]
        model = model_of(*answers)
        agent = Agent(model, "Read.", tools=[report, book], policies=policies)
        there = LaterEnvironment()
        with contextlib.closing(SqliteJournal(tmp_path / name)) as journal:
            try:
                await agent.run("go", journal=journal, run_id="run", environment=there, result_limit=LIMIT)
                return texts(model)
            except RunParked:
                (question,) = await journal.questions.open("run")
                journal.questions.answer(answer_to(question, {"approved": True}))
        with contextlib.closing(SqliteJournal(tmp_path / name)) as journal:
            model = model_of(*answers[2:])
            agent = Agent(model, "Read.", tools=[report, book], policies=policies)
            await agent.resume("run", journal=journal, environment=there)
            assert offered(model.requests[0])[-1] == "read_result"
            return texts(model)

    plain = await last_request("plain.db", [])
    assert part(plain[-1]) == "ROW 299: JA\r\n"
    assert await last_request("parked.db", [CapabilityPolicy({"book": "ask"})]) == plain


async def test_copies_have_the_whole_results(tmp_path: Path):
    """A fork and an import read on, also what an earlier run of the session was shown; forgetting the runs removes the texts."""
    journal = MemoryJournal()

    @tool(effect="pure")
    async def other() -> str:
        """Return something else that is long."""
        return REPORT.upper()

    tools = [report, other]
    await Agent(model_of(BIG), "Read.", tools=tools, result_limit=LIMIT).run(
        "go", journal=journal, run_id="one", session=Session(id="s")
    )
    await Agent(model_of(ToolCall("other", {}, "second")), "Read.", tools=tools, result_limit=LIMIT).run(
        "on", journal=journal, run_id="two", session="s"
    )

    async def reads(there: Any, run_id: str) -> None:
        model = model_of(read(first_line=300), read("second", first_line=300))
        agent = Agent(model, "Read.", tools=tools, result_limit=LIMIT)
        await agent.resume(run_id, journal=there)
        assert [part(each) for each in texts(model)[-2:]] == ["row 299: ja\r\n", "ROW 299: JA\r\n"]
        assert not (await there.runs.verify()).altered

    await fork(journal, "two", 1, "forked")
    await fork(journal, "two", 1, "to export")
    await export(journal, "to export", tmp_path / "run.jsonl")
    digests = [*await journal.blobs.list("one"), *await journal.blobs.list("two")]
    assert len(digests) == 2
    await journal.runs.forget(["one", "two"])
    await reads(journal, "forked")
    await journal.runs.forget(["forked", "to export"])
    assert not any([await journal.blobs.has(each) for each in digests])
    elsewhere = MemoryJournal()
    await import_(elsewhere, tmp_path / "run.jsonl")
    await reads(elsewhere, "to export")


async def test_a_text_that_was_forgotten_is_named():
    journal, session = MemoryJournal(), Session(id="s")
    await Agent(model_of(BIG), "Read.", tools=[report], result_limit=LIMIT).run(
        "go", journal=journal, run_id="one", session=session
    )
    await forget(journal, keep=0)
    model = model_of(read())
    await Agent(model, "Read.", tools=[report], result_limit=LIMIT).run("on", session=session)
    answered = results(model.requests[-1])[-1]
    assert answered.failed
    assert "not stored any more" in answered.text


async def test_a_recorded_run_is_checked_against_its_whole_results():
    journal, prompt = MemoryJournal(), Prompt("p", "Read.", tools=[report], result_limit=LIMIT)
    await Agent(model_of(BIG, read()), prompt).run("go", journal=journal, run_id="run")
    assert await replay(journal, "run", prompt) is None

    @tool(effect="pure", name="report")
    async def shorter() -> str:
        """Return a long report."""
        return REPORT[:-5]

    changed = await replay(journal, "run", Prompt("p", "Read.", tools=[shorter], result_limit=LIMIT))
    assert changed is not None
    assert "result" in str(changed)


async def test_a_result_is_read_after_it_became_a_stub(tmp_path: Path):
    """The stub names the call, whose whole result is read, also in a fork, whose calls have ids of their own."""
    journal = SqliteJournal(tmp_path / "runs.db")

    def answer(request: ModelRequest) -> Any:
        said = results(request)
        assert len(said) < 20, "no stub names a call"
        stubs = [re.search(r"more characters are left out from (\S+)\]", each.text) for each in said]
        stub = next((found[1] for found in stubs if found), None)
        if said and said[-1].name == "read_result":
            return part(said[-1].text)
        return ToolCall("report") if stub is None else read(stub, search="row 299")

    def agent() -> Agent[Any]:
        model, compact = ScriptedModel(answer), Compact(tokens=3_000)
        return Agent(model, "Read.", tools=[report], result_limit=1_500, compact=compact)

    first = await agent().run("go", journal=journal, run_id="run")
    assert first.text.startswith("line 300, character ")
    steps = first.usage.requests
    row = await fork(journal, "run", steps - 2)
    forked = await agent().resume(row.record.id, journal=journal)
    assert forked.text.startswith("line 300, character ")
    journal.close()


async def test_a_result_that_cant_be_stored_fails_its_call():
    """A call is never recorded with a reference to a text that is not there. A failure is shown whole instead."""

    @tool(effect="pure")
    async def refuse() -> ToolResult[str]:
        """Return a long failure."""
        return ToolResult.error(REPORT)

    journal = MemoryJournal()

    async def put(data: bytes, /, *, run_id: str) -> str:
        raise OSError("the disk is full")

    journal.blobs.put = put  # pyright: ignore[reportAttributeAccessIssue]  # a journal with a full disk
    model, session = model_of(BIG, ToolCall("refuse")), Session()
    agent = Agent(model, "Read.", tools=[report, refuse], result_limit=LIMIT)
    await agent.run("go", journal=journal, session=session, run_id="run")
    failed, refused = results(model.requests[-1])
    assert failed.failed
    assert "the disk is full" in failed.text
    assert refused.text == REPORT
    assert not session[ResultShortened].all()
    assert all(b"digest" not in unit.result for unit in await journal.calls.load("run"))


async def test_what_is_masked_stays_masked():
    @dataclass
    class Account:
        password: SecretStr
        notes: str

    @tool(effect="pure")
    async def account() -> Account:
        """Return an account."""
        return Account(SecretStr("planted"), REPORT)

    journal, model = MemoryJournal(), model_of(ToolCall("account", {}, "a"), read("a", search="password"))
    await Agent(model, "Read.", tools=[account], result_limit=LIMIT).run("go", journal=journal, run_id="run")
    (digest,) = await journal.blobs.list("run")
    assert b"planted" not in await journal.blobs.get(digest)
    assert b"row 299" in await journal.blobs.get(digest)
    assert '"password":"***' in texts(model)[1]


async def test_a_program_that_calls_a_tool_gets_its_result_whole():
    @tool(effect="pure", result_limit=LIMIT)
    async def limited() -> str:
        """Return a long report."""
        return REPORT

    gate = open_gate(tools=[limited])
    assert shown_text(await gate.invoke("limited")) == REPORT
    await gate.close()


def test_a_worker_may_not_have_the_readers_name(tmp_path: Path):
    registry = folder(tmp_path, main="---\nworkers: [read_result]\n---\nGo.", read_result=PLAIN)
    assert any("read_result" in str(problem) for problem in registry.check())
