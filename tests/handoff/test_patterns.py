"""The seven handoff patterns in every environment: each gives its result, or names the participant that is missing.

PATTERNS lists the examples, each with its expected outcome in those ENVIRONMENTS that its type allows. A `Refused`
outcome means that the pattern requires a participant who is missing, and that the call must say so. In `person`, a
person answers at once. In `terminal`, a person at a pseudo-terminal reads the questions and types the answers.
`python tests/handoff/test_patterns.py` runs everything and prints the table.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from handrail import (
    Adapter,
    AgentEnvironment,
    Handoff,
    HeadlessEnvironment,
    Operation,
    Prompt,
    ScriptedModel,
    Session,
    ToolCall,
    open_gate,
    run_as_agent,
)
from handrail.events import Emitted, ToolInvoked
from handrail.testing import (
    Person,
    RecordingSubscriber,
    agent_context,
    headless_context,
    recorded,
    user_context,
)
from support.handoff_patterns import (
    FOLDER,
    NEEDS_A_MODEL,
    NEEDS_A_PERSON,
    PATTERNS,
    Pattern,
    Refused,
    T,
    at_terminal,
    example,
    replying,
)

ENVIRONMENTS = ("person", "terminal", "model", "nobody", "mock user", "mock model", "mock nobody")


CELLS = [(name, where) for name, pattern in PATTERNS.items() for where in pattern.expected]
IN_A_RUN = [(name, where) for name, where in CELLS if "mock" not in where]
WITH_A_MOCK = [(name, where) for name, where in CELLS if "mock" in where]


def environment(pattern: Pattern, where: str) -> Any:
    if where == "person":
        return Person(answers=pattern.answers)
    return AgentEnvironment(replying(pattern)) if where == "model" else HeadlessEnvironment()


def done(pattern: Pattern, where: str, begin: Callable[[Any], Operation[T]]) -> T:
    """Begin an operation in an environment, and return its outcome. At a terminal, a person types the answers."""
    if where != "terminal":
        return begin(environment(pattern, where)).wait()
    return asyncio.run(at_terminal(pattern, begin))


def plain(value: Any) -> Any:
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(value)


def run_cell(name: str, where: str) -> Any:
    """Return a pattern's outcome in an environment: its value, or the participant that is missing."""
    pattern, module = PATTERNS[name], example(name)
    tools = [getattr(module, each) for each in (pattern.handoff, *pattern.tools)]
    session = Session()
    with RecordingSubscriber(session) as seen:
        result = done(
            pattern,
            where,
            lambda there: open_gate(tools, environment=there, session=session).invoke(
                pattern.handoff, pattern.arguments
            ),
        )
    seen.assert_paired()
    if result.success:
        return plain(result.value)
    needed = [each for each in (NEEDS_A_PERSON, NEEDS_A_MODEL) if f"needs {str(each)!r}" in result.message]
    assert len(needed) == 1, result.message
    assert [each.tool for each in seen.of(ToolInvoked)] == [pattern.handoff]  # no act has begun
    return needed[0]


async def run_mocked(name: str, where: str) -> tuple[Any, Any]:
    """Run only the `client` act, with prepared answers, and return its answer and what the context recorded."""
    pattern, module = PATTERNS[name], example(name)
    makers: dict[str, Callable[..., Any]] = {
        "mock user": lambda **given: user_context(pattern.answers, **given),
        "mock model": lambda **given: agent_context(pattern.replies, **given),
        "mock nobody": headless_context,
    }
    handoff: Handoff[Any, Any] = getattr(module, pattern.handoff)
    client: Callable[..., Any] = getattr(module, pattern.client)
    context = makers[where](results=pattern.results)
    answer = client(handoff.acts.public.parse_value(pattern.public), context=context)
    return plain(await answer if inspect.isawaitable(answer) else answer), recorded(context)


@pytest.mark.parametrize(("name", "where"), IN_A_RUN)
def test_pattern_in_its_environments(name: str, where: str) -> None:
    """In each environment, a pattern gives its result, or names the missing participant before any act runs."""
    assert run_cell(name, where) == PATTERNS[name].expected[where]


@pytest.mark.parametrize(("name", "where"), WITH_A_MOCK)
async def test_pattern_with_a_mock_context(name: str, where: str) -> None:
    """A pattern's `client` act gives the expected answer when it runs alone with a mock context, as in a unit test."""
    pattern = PATTERNS[name]
    answer, did = await run_mocked(name, where)
    assert answer == pattern.expected[where]
    if where == "mock user" and pattern.answers and not pattern.tools:
        assert [kind for kind, _ in did.questions] == list(pattern.answers)
    if where == "mock model" and pattern.replies and not pattern.tools:
        assert len(did.prompts) == (2 if name in ("sequential", "parallel", "streaming") else 1)


@pytest.mark.parametrize("name", [name for name, where in CELLS if where == "mock model"])
def test_pattern_with_a_model_playing_the_middle_act(name: str) -> None:
    """`run_as_agent` runs only the `client` act, with a model, and returns its answer."""
    pattern, module = PATTERNS[name], example(name)
    session, heard = Session(), list[object]()
    answer = run_as_agent(
        getattr(module, pattern.handoff),
        pattern.public,
        model=replying(pattern),
        tools=[getattr(module, each) for each in pattern.tools],
        on_emit=heard.append,
        session=session,
    ).wait()
    if name != "nested":
        assert plain(answer) == pattern.expected["mock model"]
    else:
        assert answer == pattern.expected["model"]
    outermost = [each.tool for each in session[ToolInvoked].all() if len(each.path) == 1]
    assert outermost == [f"{pattern.handoff}.client"]
    assert plain(heard) == ([{"step": 1, "total": 2}, {"step": 2, "total": 2}] if name == "streaming" else [])


@pytest.mark.parametrize(("name", "where"), IN_A_RUN)
def test_a_model_is_told_of_a_pattern_only_where_it_can_run(name: str, where: str) -> None:
    """A model is offered a handoff only where its participants are available."""
    pattern, module = PATTERNS[name], example(name)
    tools = [getattr(module, each) for each in (pattern.handoff, *pattern.tools)]
    possible = not isinstance(pattern.expected[where], Refused)
    model = ScriptedModel([ToolCall(pattern.handoff, pattern.arguments), "Done."] if possible else ["No."])
    prompt = Prompt("p", "Go.", tools=tools)
    done(pattern, where, lambda there: Adapter(model, environment=there).evaluate(prompt, "hi"))
    offered = [each.tool.name for each in model.requests[0].tools]
    assert (pattern.handoff in offered) is possible


def test_events_of_a_nested_act_reach_the_parent_as_they_happen() -> None:
    """An act's events are published while the act runs."""
    module = example("streaming")
    session = Session()
    with RecordingSubscriber(session) as seen:
        gate = open_gate([module.work_through], session=session)
        gate.invoke("work_through", {"steps": 3}).wait()
    emitted = [index for index, event in enumerate(seen.events) if isinstance(event, Emitted)]
    over = [index for index, event in enumerate(seen.events) if isinstance(event, ToolInvoked)]
    assert len(emitted) == 3
    assert over[0] < emitted[0] < emitted[-1] < over[1]  # after `before` has ended, and before `client` has


def test_every_example_is_in_the_table() -> None:
    """The table covers all seven examples."""
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == sorted(PATTERNS)
    assert len(PATTERNS) == 7


def print_table() -> None:
    """Run every cell, and print the table of outcomes."""
    print(f"| pattern | {' | '.join(ENVIRONMENTS)} |")
    print("| --- " * (len(ENVIRONMENTS) + 1) + "|")
    for name, pattern in PATTERNS.items():
        cells: list[str] = []
        for where in ENVIRONMENTS:
            if where not in pattern.expected:
                cells.append("n/a: its type requires a different context")
                continue
            got = asyncio.run(run_mocked(name, where))[0] if "mock" in where else run_cell(name, where)
            right = "" if got == pattern.expected[where] else "WRONG: "
            cells.append(right + (f"refused: needs `{got}`" if isinstance(got, Refused) else f"`{got}`"))
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    print_table()
