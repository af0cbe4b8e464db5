"""Compaction: a conversation that outgrows its model's window goes on, and nothing of it is lost."""

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail import (
    Agent,
    Budget,
    Compact,
    LaterEnvironment,
    Session,
    SqliteJournal,
    ToolCall,
    tool,
)
from handrail.errors import DefinitionError, PromptEvaluationError, RunParked
from handrail.events import MessageAdded
from handrail.guard import CapabilityPolicy
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    CallAsked,
    Message,
    ModelRequest,
    Sent,
    ToolMessage,
    UserMessage,
)
from handrail.models import ModelRequestRefused, ModelRequestTooLong
from handrail.run.compaction import message_of, trimmed, weight_of
from handrail.run.conversation import check_well_formed
from handrail.runs import fork
from handrail.session.serialization import load, save
from support.examples import at_most
from support.parked_runs import answer_to
from support.windows import WINDOW, Provider, compactions, in_turn, look, texts, tokens_of


@tool(effect="pure", pinned=True)
async def plan(step: int) -> str:
    """Return the plan."""
    return f"plan {step} " * 20


@pytest.mark.parametrize("by", ["trim", "summary"])
async def test_a_long_conversation_goes_on_below_its_window(by: Any):
    """Two thousand answers in three hundred turns: every request is well-formed and below the limit, and most repeat the one before it."""
    chance = random.Random(1)
    turns = 300 if by == "trim" else 60
    sizes: list[int] = []

    def answer(request: ModelRequest) -> Any:
        sizes.append(tokens_of(request))
        number = len(sizes)
        last = request.messages[-1]
        if isinstance(last, UserMessage) and last.by_run:
            return "A summary."
        if number % 7 == 6:
            return "done " * 20
        return (
            ToolCall("plan", {"step": number})
            if number % 7 == 0
            else ToolCall("look", {"words": chance.randint(1, 700)})
        )

    provider = Provider(answer)
    session = Session()
    agent = Agent(provider.model, "Be brief.", tools=[look, plan], compact=Compact(by=by))
    for turn in range(turns):
        await agent.run(f"Question {turn} " + "x " * chance.randint(0, 60), session=session)
    assert len(provider.sent) > turns * 6
    assert max(sizes) <= 0.8 * WINDOW or by == "summary"  # a summary is asked for with all that it is about
    assert max(sizes) <= WINDOW
    assert not provider.refused
    made = compactions(session)
    repeats = sum(
        after[: len(before)] == before
        for before, after in zip(provider.sent, provider.sent[1:], strict=False)
    )
    assert repeats >= len(provider.sent) - 1 - 2 * len(made)
    assert 0 < len(made) < len(provider.sent) / 8
    assert {each.by for each in made} == {by}
    said = [fact.message for fact in session[MessageAdded].all()]
    assert next(m.text for m in said if isinstance(m, UserMessage)).startswith(
        "Question 0"
    )  # nothing is lost
    newest = [m for m in provider.sent[-1] if isinstance(m, UserMessage) and not m.by_run]
    assert newest[-1].text.startswith(f"Question {turns - 1} ")
    assert any(r.name == "plan" for m in provider.sent[-1] if isinstance(m, ToolMessage) for r in m.results)


async def test_below_the_limit_nothing_is_changed():
    provider = Provider(in_turn(ToolCall("look", {"words": 100}), "done", "again"))
    session = Session()
    agent = Agent(provider.model, "Be brief.", tools=[look])
    await agent.run("one", session=session)
    await agent.run("two", session=session)
    assert not compactions(session)
    assert provider.sent[1][: len(provider.sent[0])] == provider.sent[0]
    assert provider.sent[2][: len(provider.sent[1])] == provider.sent[1]


async def test_a_window_that_nobody_knows_is_met_once():
    """A request that is refused as too long is sent once more with less, and the run goes on."""
    calls = [ToolCall("look", {"words": 1_500}) for _ in range(6)]
    provider = Provider(in_turn(*calls, "done"), known=False)
    session = Session()
    response = await Agent(provider.model, "Be brief.", tools=[look]).run("go", session=session)
    assert response.text == "done"
    assert provider.refused
    assert {each.why for each in compactions(session)} == {"refused"}


async def test_a_request_that_nothing_makes_shorter_is_refused():
    provider = Provider(in_turn("never"), window=400, known=False)
    with pytest.raises(PromptEvaluationError) as failed:
        await Agent(provider.model, "Be brief. " * 200).run("go")
    assert isinstance(failed.value.__cause__, ModelRequestTooLong)
    assert provider.refused == 1


async def test_a_summary_takes_the_place_of_what_is_left_out():
    def answer(request: ModelRequest) -> Any:
        last = request.messages[-1]
        if isinstance(last, UserMessage) and last.by_run:
            return "The owner's name is Ada."
        return "done" if len(provider.sent) > 8 else ToolCall("look", {"words": 1_200})

    provider = Provider(answer)
    session = Session()
    response = await Agent(provider.model, "Be brief.", tools=[look], compact=Compact(by="summary")).run(
        "I am Ada. Go.", session=session
    )
    asked = [sent for sent in provider.sent if isinstance(sent[-1], UserMessage) and sent[-1].by_run]
    assert asked
    at = provider.sent.index(asked[0])
    assert asked[0][:-1][: len(provider.sent[at - 1])] == provider.sent[at - 1]  # its beginning is cached
    assert "The owner's name is Ada." in provider.sent[at + 1][0].text
    assert "I am Ada." in texts(provider.sent[at + 1])
    assert response.usage.requests == len(provider.sent)
    assert compactions(session)[0].by == "summary"


@pytest.mark.parametrize("answer", [ToolCall("look", {"words": 1}), "  ", ModelRequestRefused("m", "no")])
async def test_without_a_summary_it_is_trimmed(answer: Any):
    def respond(request: ModelRequest) -> Any:
        last = request.messages[-1]
        if isinstance(last, UserMessage) and last.by_run:
            if isinstance(answer, Exception):
                raise answer
            return answer
        return "done" if len(provider.sent) > 8 else ToolCall("look", {"words": 1_200})

    provider = Provider(respond)
    session = Session()
    await Agent(provider.model, "Be brief.", tools=[look], compact=Compact(by="summary")).run(
        "Go.", session=session
    )
    assert {each.by for each in compactions(session)} == {"trim"}


async def test_a_function_decides_what_is_sent():
    def newest(messages: Sequence[Message]) -> list[Message]:
        return [UserMessage("What came before is in the archive."), *messages[-2:]]

    provider = Provider(in_turn(*[ToolCall("look", {"words": 1_200})] * 8, "done"))
    session = Session()
    await Agent(provider.model, "Be brief.", tools=[look], compact=Compact(by=newest)).run(
        "Go.", session=session
    )
    assert {each.by for each in compactions(session)} == {"newest"}
    assert provider.sent[-1][0].text == "What came before is in the archive."


@pytest.mark.parametrize(
    ("returns", "why"),
    [
        (lambda messages: messages[:-1], "no results"),
        (lambda messages: [*messages[:-2], AssistantMessage("I never said this.")], "changed"),
        (lambda messages: None, "list of messages"),
        (lambda messages: 1 / 0, "division by zero"),
    ],
)
async def test_a_function_that_returns_what_cant_be_sent_is_named(returns: Any, why: str):
    returns.__name__ = "shorten"
    provider = Provider(in_turn(*[ToolCall("look", {"words": 1_200})] * 8, "done"))
    session = Session()
    with pytest.raises(PromptEvaluationError, match=f"compact=shorten.*{why}") as failed:
        await Agent(provider.model, "Be brief.", tools=[look], compact=Compact(by=returns)).run(
            "Go.", session=session
        )
    assert failed.value.phase == "compaction"
    assert not compactions(session)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"by": "guess"}, "by is 'guess'"),
        ({"at": 0}, "at is 0"),
        ({"at": 1.5}, "at is 1.5"),
        ({"keep": 1}, "keep is 1"),
        ({"tokens": 0}, "tokens is 0"),
    ],
)
def test_what_cant_be_meant_is_refused(arguments: Any, names: str):
    with pytest.raises(DefinitionError, match=names):
        Compact(**arguments)


async def test_the_lower_of_both_limits_counts():
    assert Compact(at=0.5, tokens=3_000).limit(8_000) == 3_000
    assert Compact(at=0.5, tokens=5_000).limit(8_000) == 4_000
    assert Compact(at=0.5).limit(None) is None
    assert Compact(tokens=10).limit(None) == 10


# --- what is recorded ---------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["trim", "summary"])
async def test_a_resumed_run_sends_what_it_would_have_sent(by: Any):
    """The messages of every request are those of a run that was never parked, and each answer is asked for once."""

    async def requests(journal: Any, policies: Any) -> tuple[list[list[Message]], Any, Any]:
        calls: list[Any] = [ToolCall("look", {"words": 1_200})] * 12
        calls[9] = ToolCall("book", {"seat": 1})
        rest = iter([*calls, "done"])

        def answer(request: ModelRequest) -> Any:
            last = request.messages[-1]
            return "Summed up." if isinstance(last, UserMessage) and last.by_run else next(rest)

        @tool(effect="pure", capabilities=["book"])
        async def book(seat: int) -> str:
            """Book a seat."""
            return "booked"

        provider, there = Provider(answer), LaterEnvironment()
        session = Session(id="s")
        agent = Agent(
            provider.model, "Be brief.", tools=[look, book], policies=policies, compact=Compact(by=by)
        )
        options: Any = {"journal": journal, "environment": there, "run_id": "run", "session": session}
        try:
            response = await agent.run("Go.", **options, budget=Budget(tokens=10**9))
        except RunParked as parked:
            (question,) = await journal.questions.open("run")
            journal.questions.answer(answer_to(question, {"approved": True}))
            response = await agent.resume(parked.run_id, journal=journal, environment=there)
        return provider.sent, response, journal

    plain, response, _ = await requests(MemoryJournal(), [])
    parked, again, journal = await requests(MemoryJournal(), [CapabilityPolicy({"book": "ask"})])
    assert [texts(each) for each in parked] == [texts(each) for each in plain]
    assert (again.usage, again.cost) == (response.usage, response.cost)
    kinds = [entry.kind for entry in await journal.calls.entries("run")]
    assert kinds.count("compaction") >= 2


async def test_a_later_run_and_a_session_from_the_journal_go_on_with_less(tmp_path: Any):
    async def answers(path: Any, session: Any, journal: Any) -> list[Message]:
        provider = Provider(in_turn("done"))
        await Agent(provider.model, "Be brief.", tools=[look], compact=Compact()).run(
            "More?", session=session, journal=journal
        )
        return provider.sent[-1]

    journal = SqliteJournal(tmp_path / "journal.db")
    provider = Provider(in_turn(*[ToolCall("look", {"words": 1_200})] * 12, "done"))
    session = Session(id="s")
    await Agent(provider.model, "Be brief.", tools=[look]).run(
        "Go.", session=session, journal=journal, run_id="first"
    )
    assert compactions(session)
    copied = load(save(session))
    here = await answers(tmp_path, copied, None)
    restored = await answers(tmp_path, "s", journal)
    assert texts(here) == texts(restored)
    assert texts(here).count("more characters are left out") > 3


async def test_a_fork_from_before_it_has_the_whole_conversation(tmp_path: Any):
    journal = SqliteJournal(tmp_path / "journal.db")
    provider = Provider(in_turn(*[ToolCall("look", {"words": 1_200})] * 12, "done"))
    agent = Agent(provider.model, "Be brief.", tools=[look])
    session = Session(id="s")
    await agent.run("Go.", session=session, journal=journal, run_id="first")
    first = next(number for number, sent in enumerate(provider.sent) if "left out" in texts(sent))
    for step, whole in ((first - 1, True), (first + 1, False)):
        row = await fork(journal, "first", step)
        other = Provider(in_turn("done"))
        await Agent(other.model, "Be brief.", tools=[look]).resume(row.record.id, journal=journal)
        assert ("left out" not in texts(other.sent[-1])) is whole
        sent, again = texts(provider.sent[step]), texts(other.sent[-1])
        assert re.sub(r"call-\w+-", "", again) == re.sub(
            r"call-\w+-", "", sent
        )  # its calls have ids of their own


async def test_what_a_person_asks_for_happens_before_the_next_request():
    provider = Provider(in_turn(ToolCall("look", {"words": 1_200}), "done", "fine"))
    session = Session()
    agent = Agent(provider.model, "Be brief.", tools=[look])
    await agent.run("Go.", session=session)
    session.compact()
    await agent.run("And?", session=session)
    assert [each.why for each in compactions(session)] == ["asked"]
    assert len(texts(provider.sent[-1])) < len(texts(provider.sent[-2])) / 2


# --- the plan -----------------------------------------------------------------------------------------

UNITS = st.lists(
    st.one_of(
        st.builds(lambda n: ("person", n), st.integers(0, 3_000)),
        st.builds(lambda n: ("run", n), st.integers(0, 500)),
        st.builds(lambda n, m: ("call", n, m), st.integers(0, 4_000), st.sampled_from(["look", "plan"])),
    ),
    min_size=1,
    max_size=30,
)


def messages_of(units: list[Any]) -> list[Message]:
    messages: list[Message] = []
    for number, (kind, size, *name) in enumerate(units):
        text = f"{number} " + "x" * size
        if kind == "call":
            messages.append(AssistantMessage("", (CallAsked(f"c{number}", name[0], "{}"),)))
            messages.append(ToolMessage((CallAnswered(f"c{number}", name[0], text),)))
        else:
            messages.append(UserMessage(text, kind == "run"))
    return messages


@settings(max_examples=at_most(200))
@given(UNITS, st.integers(500, 20_000))
def test_what_is_sent_is_well_formed_in_order_and_fits(units: list[Any], limit: int):
    """The newest unit and the newest pinned result stay if they fit, the order stays, and what fits whole is whole."""
    said = messages_of(units)
    messages: Sent[Message] = Sent(said)
    pieces = trimmed(range(len(said)), messages, room=limit, limit=limit, pinned={"plan"})
    sent = [message_of(piece, messages) for piece in pieces]
    check_well_formed(sent)
    indices = [piece if piece >= 0 else ~piece for piece in pieces if isinstance(piece, int)]
    assert indices == sorted(set(indices))
    assert len(said) - 1 in indices
    weight = sum(
        weight_of(message) for piece, message in zip(pieces, sent, strict=True) if isinstance(piece, int)
    )
    newest = sum(map(weight_of, said[-2 if units[-1][0] == "call" else -1 :]))
    assert weight <= max(limit, newest)
    if sum(map(weight_of, said)) <= limit and all(kind != "person" for kind, *_ in units):
        assert sent == said
    again = trimmed(pieces, messages, room=limit, limit=limit, pinned={"plan"})
    check_well_formed([message_of(piece, messages) for piece in again])
