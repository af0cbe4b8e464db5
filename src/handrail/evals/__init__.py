"""Evaluate agents with pydantic-evals or Inspect. Neither library is replaced: this connects agents, cases and tools to them.

    task = AgentTask(agent, files="fixtures/shop", person=lambda case: Person(approve=True))
    report = Dataset(name="shop", cases=[...], evaluators=[DeniedCalls([])]).evaluate_sync(task, lifecycle=task.lifecycle)
    check_report(report)

pydantic-evals needs `pip install 'handrail[evals]'`, and Inspect needs `pip install 'handrail[inspect]'`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from handrail.errors import DefinitionError
from handrail.imports import names_on_first_use

if TYPE_CHECKING:
    from handrail.evals.conduct import Ask, CallConduct, Conduct
    from handrail.evals.evaluators import (
        EVALUATORS,
        AskedCalls,
        DeniedCalls,
        FinalFiles,
        FinalState,
        MaxCost,
        UndoneCalls,
    )
    from handrail.evals.inspection import (
        InspectModel,
        conduct_of,
        inspect_agent,
        inspect_tools,
        recorded_sample,
    )
    from handrail.evals.task import AgentLifecycle, AgentTask, recorded_case
    from handrail.evals.threshold import EvalsFailed, check_report

__all__ = [
    "EVALUATORS",
    "AgentLifecycle",
    "AgentTask",
    "Ask",
    "AskedCalls",
    "CallConduct",
    "Conduct",
    "DeniedCalls",
    "EvalsFailed",
    "FinalFiles",
    "FinalState",
    "InspectModel",
    "MaxCost",
    "UndoneCalls",
    "check_report",
    "conduct_of",
    "inspect_agent",
    "inspect_tools",
    "recorded_case",
    "recorded_sample",
]

_EXTRAS = {"pydantic_evals": "evals", "inspect_ai": "inspect"}


def _missing(name: str, home: str) -> DefinitionError | None:
    if name not in _EXTRAS:
        return None
    return DefinitionError(
        f"handrail.evals.{home} needs {name}, which is not installed. Install it with: pip install 'handrail[{_EXTRAS[name]}]'"
    )


if not TYPE_CHECKING:  # a type checker would take every name for one of the package's
    __getattr__ = names_on_first_use(
        __name__,
        {
            "conduct": "Ask CallConduct Conduct",
            "evaluators": "EVALUATORS AskedCalls DeniedCalls FinalFiles MaxCost FinalState UndoneCalls",
            "inspection": "InspectModel conduct_of inspect_agent inspect_tools recorded_sample",
            "task": "AgentLifecycle AgentTask recorded_case",
            "threshold": "EvalsFailed check_report",
        },
        _missing,
    )
