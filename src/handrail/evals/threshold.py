"""`check_report`: whether enough runs of each case have passed, so that a CI job fails if not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pydantic_evals.reporting import EvaluationReport, ReportCase, ReportCaseFailure

from handrail.errors import DefinitionError, HandrailError

_NO_CASES: Mapping[str, float] = {}


class EvalsFailed(HandrailError, AssertionError):
    """Raised when too few runs of a case have passed. `problems` has a line for each case and each of its failed runs."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def check_report(
    report: EvaluationReport[Any, Any, Any],
    at_least: float = 1.0,
    *,
    cases: Mapping[str, float] = _NO_CASES,
    scores: Mapping[str, float] = _NO_CASES,
) -> None:
    """Raise `EvalsFailed` unless at least this share of the runs of each case has passed: 4/5 for four of five repeats.

    `cases` has the share of single cases by name. A run passes if the task and all of its evaluators have returned, all of its assertions
    are true, and each score in `scores` is at least as high as its minimum there. A case in which nothing was asserted fails, and so does a report
    without cases. Raises `DefinitionError` for a share that is not above 0 and at most 1, and for a case that the report does not have.
    """
    runs: dict[str, list[ReportCase[Any, Any, Any] | ReportCaseFailure[Any, Any, Any]]] = defaultdict(list)
    for run in (*report.cases, *report.failures):
        runs[run.source_case_name or run.name].append(run)
    for name, share in (("at_least", at_least), *cases.items()):
        if not 0 < share <= 1:
            raise DefinitionError(
                f"{name!r} is {share!r}, which is no share of the runs. For four of five, pass 4/5."
            )
    if unknown := sorted(cases.keys() - runs.keys()):
        raise DefinitionError(f"the report has no case {unknown[0]!r}. It has: {', '.join(runs) or 'none'}.")
    problems = [] if runs else ["no case was run"]
    problems += [
        f"the report evaluator {each.name!r} raised {each.error_message}"
        for each in report.report_evaluator_failures
    ]
    for name, own in runs.items():
        failed = {run.name: wrong for run in own if (wrong := _problems(run, scores))}
        passed, wanted = len(own) - len(failed), cases.get(name, at_least) * len(own)
        if passed < wanted - 1e-9:  # 1/3 of 3 runs is 1
            problems.append(
                f"{name}: {passed} of {len(own)} runs passed, fewer than {cases.get(name, at_least):.0%}"
            )
            problems += [f"  {run}: {'; '.join(wrong)}" for run, wrong in failed.items()]
    if problems:
        raise EvalsFailed(problems)


def _problems(
    run: ReportCase[Any, Any, Any] | ReportCaseFailure[Any, Any, Any], scores: Mapping[str, float]
) -> list[str]:
    if isinstance(run, ReportCaseFailure):
        return [f"the task raised {run.error_message}"]
    found = {name: result.value for name, result in run.scores.items()}
    wrong = [f"the evaluator {each.name!r} raised {each.error_message}" for each in run.evaluator_failures]
    wrong += [
        f"{name} failed{f': {result.reason}' if result.reason else ''}"
        for name, result in run.assertions.items()
        if not result.value
    ]
    wrong += [
        f"{name} is {found.get(name, 'missing')}, and must be at least {least}"
        for name, least in scores.items()
        if found.get(name, float("-inf")) < least
    ]
    return wrong if wrong or run.assertions or scores else ["nothing was asserted. Add an evaluator"]
