"""Legs: a run that several processes execute is one trace, in which each leg names the one before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from handrail.ids import span_of, trace_of
from handrail.telemetry import names
from support.traced import in_process, lines_in

STARTED = f"00-{'1f' * 16}-{'2e' * 8}-01"


def named(spans: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [span for span in spans if span["name"] == name]


def id_of(span: dict[str, Any]) -> str:
    return span["context"]["span_id"].removeprefix("0x")


def links_of(span: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (link["context"]["span_id"].removeprefix("0x"), link["attributes"][names.LEG_END])
        for link in span["links"]
    ]


def test_a_run_that_was_parked_goes_on_in_another_process_in_the_same_trace(tmp_path: Path):
    """A nested run is parked for an approval, answered by a second process and resumed by a third.

    The spans that were open end as the run is parked. Their successors, which are linked to them, have the same parents or those
    parents' successors. What the run was started from is the parent of both legs.
    """
    in_process(tmp_path, "begin", STARTED)
    parked = lines_in(tmp_path)
    in_process(tmp_path, "answer")
    assert lines_in(tmp_path) == parked
    in_process(tmp_path, "resume")
    resumed = lines_in(tmp_path)[len(parked) :]
    assert {span["context"]["trace_id"] for span in (*parked, *resumed)} == {f"0x{'1f' * 16}"}
    for name in ("invoke_agent boss", "execute_tool delegate", "invoke_agent clerk", "execute_tool pay"):
        [before], [after] = named(parked, name), named(resumed, name)
        assert links_of(after) == [(id_of(before), "parked")]
    [boss], [resumed_boss] = named(parked, "invoke_agent boss"), named(resumed, "invoke_agent boss")
    assert boss["parent_id"] == resumed_boss["parent_id"] == f"0x{'2e' * 8}"
    assert (boss["attributes"][names.RUN_LEG], resumed_boss["attributes"][names.RUN_LEG]) == (1, 2)
    assert boss["attributes"][names.RUN_OUTCOME] == "parked"
    assert resumed_boss["attributes"][names.RUN_OUTCOME] == "done"
    for spans in (parked, resumed):
        [pay], [clerk] = named(spans, "execute_tool pay"), named(spans, "invoke_agent clerk")
        [delegate] = named(spans, "execute_tool delegate")
        assert pay["parent_id"] == f"0x{id_of(clerk)}"
        assert clerk["parent_id"] == f"0x{id_of(delegate)}"
        [approval] = named(spans, "handrail.approval")
        assert approval["parent_id"] == f"0x{id_of(pay)}"
    assert approval["attributes"][names.APPROVAL_OUTCOME] == "approved"
    assert len(named(parked, "chat script")) == 2  # the answers that are recorded are not asked for again
    assert len(named(resumed, "chat script")) == 2


def test_the_leg_after_a_crash_names_the_one_that_was_lost(tmp_path: Path):
    """A leg that is killed exports no span of the run or the call. The next leg's spans name theirs, and say that they are lost."""
    killed = in_process(tmp_path, "die", check=False)
    assert killed.returncode < 0
    assert [span["name"] for span in lines_in(tmp_path)] == ["chat script"]
    in_process(tmp_path, "revive")
    [leg] = named(lines_in(tmp_path), "invoke_agent mortal")
    assert leg["context"]["trace_id"] == f"0x{trace_of('r1')}"
    assert links_of(leg) == [(span_of("r1", 1), "lost")]
    [call] = named(lines_in(tmp_path), "execute_tool die")
    assert [end for _, end in links_of(call)] == ["lost"]
