"""The checker of histories: it finds every kind of anomaly, and none in a history that a serial run made."""

import random
from itertools import permutations

import pytest

from support.histories import NOBODY, Attempt, History


def attempt(token: str, reads: str = "", writes: str = "", call: str = "", **more: object) -> Attempt:
    """Return an attempt from texts: `x=a y` means that it read x from a, and y from nobody."""
    pairs = [each.partition("=")[::2] for each in reads.split()]
    return Attempt(call=call or token, token=token, reads=tuple(pairs), writes=tuple(writes.split()), **more)  # type: ignore[arg-type]


def problem(
    *committed: Attempt, unknown: tuple[Attempt, ...] = (), final: dict[str, str] | None = None, **more: str
) -> str:
    return History(committed=committed, possible=unknown, final={**(final or {}), **more}).problem()


def test_calls_in_a_row_have_no_problem():
    """A chain of updates and the readers between them are explained, in whatever order they are listed."""
    calls = [
        attempt("a", "x", "x"),
        attempt("r", "x=a y"),
        attempt("b", "x=a y", "x y"),
        attempt("s", "x=b y=b"),
    ]
    for order in permutations(calls):
        assert problem(*order, x="b", y="b") == ""


ANOMALIES = {
    "write skew": ([attempt("a", "x y", "x"), attempt("b", "x y", "y")], {"x": "a", "y": "b"}),
    "write skew without reading what is written": ([attempt("a", "x", "y"), attempt("b", "y", "x")], {"x": "b", "y": "a"}),
    "write skew over three keys": (
        [attempt("a", "x", "y"), attempt("b", "y", "z"), attempt("c", "z", "x")],
        {"x": "c", "y": "a", "z": "b"},
    ),
    "lost update": ([attempt("a", "x", "x"), attempt("b", "x", "x")], {"x": "b"}),
    "lost write": ([attempt("a", "x", "x")], {}),
    "overwritten by an earlier call": ([attempt("a", "x", "x"), attempt("b", "x=a", "x")], {"x": "a"}),
    "torn read": ([attempt("a", "x y", "x y"), attempt("r", "x=a y")], {"x": "a", "y": "a"}),
    "torn write": ([attempt("a", "", "x y"), attempt("b", "", "x y")], {"x": "a", "y": "b"}),
    "unrepeatable read": ([attempt("a", "x", "x"), attempt("r", "x x=a")], {"x": "a"}),
    "dirty read": ([attempt("r", "x=failed")], {}),
    "dirty final state": ([], {"x": "failed"}),
    "a read of a key that its writer did not write": ([attempt("a", "", "x"), attempt("r", "y=a")], {"x": "a"}),
    "double commit of two attempts": (
        [attempt("a.1", "x", "x", call="a"), attempt("a.2", "x=a.1", "x", call="a")],
        {"x": "a.2"},
    ),
    "two attempts with one token": ([attempt("a", "x", "x"), attempt("a", "x=a", "x")], {"x": "a"}),
    "two readers that saw two writes in different orders": (
        [attempt("a", "", "x"), attempt("b", "", "y"), attempt("r", "x=a y"), attempt("s", "x y=b")],
        {"x": "a", "y": "b"},
    ),
    "phantom": (
        [attempt("a", "", "d/a", lists=(("d", ()),)), attempt("b", "", "d/b", lists=(("d", ()),))],
        {"d/a": "a", "d/b": "b"},
    ),
    "a file that was listed and never written": ([attempt("a", lists=(("d", ("failed",)),))], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", ANOMALIES)
def test_an_anomaly_is_a_problem(name: str):
    """Each anomaly is found in every order in which its calls may be listed."""
    calls, final = ANOMALIES[name]
    for order in permutations(calls):
        assert problem(*order, final=final) != ""


def test_what_is_said_names_the_calls_of_the_circle():
    """The message names the calls that have no order, and nobody else."""
    said = problem(
        attempt("a", "x", "y"), attempt("b", "y", "x"), attempt("c", "z", "z"), x="b", y="a", z="c"
    )
    assert "a read [x from nobody]" in said
    assert "b read [y from nobody]" in said
    assert "c read" not in said


def test_a_call_of_unknown_outcome_may_have_committed_or_not():
    """It is explained whether it was seen or not. Once seen, it must fit, and only one of its attempts may be seen."""
    unknown = attempt("u.1", "x", "x", call="u"), attempt("u.2", "x", "x", call="u")
    assert problem(unknown=unknown) == ""
    assert problem(attempt("a", "x", "x"), unknown=unknown, x="a") == ""
    assert problem(attempt("a", "x=u.1", "x"), unknown=unknown, x="a") == ""
    assert problem(unknown=unknown, x="u.2") == ""
    assert problem(attempt("a", "x", "x"), unknown=unknown, x="u.1") != ""
    assert problem(attempt("a", "x=u.1", "y"), unknown=unknown, x="u.2", y="a") != ""


def drawn(draw: random.Random, calls: int, keys: str) -> tuple[list[Attempt], dict[str, str]]:
    """Run random calls one after another on a dict, and return them with the final versions."""
    state: dict[str, str] = {}
    made: list[Attempt] = []
    for number in range(calls):
        reads = draw.sample(keys, draw.randint(0, len(keys)))
        writes = draw.sample(keys, draw.randint(0, 2))
        made.append(
            Attempt(
                call=f"c{number}",
                token=f"c{number}",
                reads=tuple((key, state.get(key, NOBODY)) for key in reads),
                writes=tuple(writes),
            )
        )
        state.update(dict.fromkeys(writes, f"c{number}"))
    draw.shuffle(made)
    return made, state


def explained_by_trying(calls: list[Attempt], final: dict[str, str]) -> bool:
    """Return whether one of all orders explains a history."""
    for order in permutations(calls):
        state: dict[str, str] = {}
        for call in order:
            if any(state.get(key, NOBODY) != version for key, version in call.reads):
                break
            state.update(dict.fromkeys(call.writes, call.token))
        else:
            if state == final:
                return True
    return False


@pytest.mark.parametrize("seed", range(60))
def test_the_verdict_is_that_of_trying_every_order(seed: int):
    """On small histories, serial or damaged in a random place, the checker agrees with a search of all orders."""
    draw = random.Random(seed)
    for _ in range(10):
        calls, final = drawn(draw, draw.randint(1, 5), "xyz")
        assert problem(*calls, final=final) == ""
        at = draw.randrange(len(calls))
        if calls[at].reads and draw.random() < 0.7:
            key, _ = draw.choice(calls[at].reads)
            versions = [
                NOBODY,
                *(call.token for call in calls if key in call.writes and call is not calls[at]),
            ]
            reads = tuple((k, draw.choice(versions) if k == key else v) for k, v in calls[at].reads)
            calls[at] = Attempt(
                call=calls[at].call, token=calls[at].token, reads=reads, writes=calls[at].writes
            )
        elif final:
            key = draw.choice(sorted(final))
            final[key] = draw.choice([call.token for call in calls if key in call.writes])
        assert (problem(*calls, final=final) == "") == explained_by_trying(calls, final)


def test_a_long_history_is_checked_quickly():
    """Five thousand updates that each read several keys take no search, and one skew among them is found."""
    draw = random.Random(0)
    state: dict[str, str] = {}
    calls: list[Attempt] = []
    for number in range(5_000):
        reads = draw.sample("abcdefgh", 4)
        token = f"c{number}"
        calls.append(
            Attempt(
                call=token,
                token=token,
                reads=tuple((key, state.get(key, NOBODY)) for key in reads),
                writes=tuple(reads[:2]),
            )
        )
        state.update(dict.fromkeys(reads[:2], token))
    draw.shuffle(calls)
    assert problem(*calls, final=state) == ""
    last = next(call for call in calls if call.token == "c4999")
    key = last.reads[3][0]
    skewed = Attempt(
        call="skewed", token="skewed", reads=((last.reads[0]), (key, state.get(key, NOBODY))), writes=(key,)
    )
    assert "skewed" in problem(*calls, skewed, final={**state, key: "skewed"})
