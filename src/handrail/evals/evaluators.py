"""Evaluators of what pydantic-evals can't see: which calls were undone, denied or asked about, and what files, state and cost became.

They judge the `Conduct` of an `AgentTask`. Which tools were called, how often and with which arguments is left to its own
evaluators, which read spans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic_evals.evaluators import EvaluationReason, Evaluator, EvaluatorContext

from handrail.errors import DefinitionError
from handrail.evals.conduct import CallConduct, Conduct

CONDUCT = "handrail"
"""The attribute of a run under which its conduct is kept."""


@dataclass(repr=False)
class _ConductEvaluator(Evaluator[object, object, object]):
    def evaluate(self, ctx: EvaluatorContext[object, object, object]) -> EvaluationReason:
        if CONDUCT not in ctx.attributes:
            raise DefinitionError(
                f"{self.get_serialization_name()} judges what an agent did, and the case was not run by an AgentTask with its "
                "lifecycle. Pass both: evaluate(task, lifecycle=task.lifecycle)."
            )
        problems = self.problems(msgspec.convert(ctx.attributes[CONDUCT], Conduct))
        return EvaluationReason(not problems, "; ".join(problems) or None)

    def problems(self, conduct: Conduct) -> list[str]:
        """Return how a run differs from what is expected."""
        raise NotImplementedError


@dataclass(repr=False)
class _CallsEvaluator(_ConductEvaluator):
    expected_tools: list[str]
    """The tools of exactly the calls that are expected, in any order. A tool that is listed twice is expected twice."""
    policy: str | None = None
    """The policy whose decisions count. None counts all."""
    allow_extra: bool = False
    """Whether there may be more such calls than those expected."""

    def problems(self, conduct: Conduct) -> list[str]:
        found = Counter(call.tool for call in conduct.calls for _ in range(self.count(call)))
        expected = Counter(self.expected_tools)
        extra = Counter[str]() if self.allow_extra else found - expected
        return [
            f"{word} {tool!r} (x{count})"
            for word, tools in (("missing", expected - found), ("unexpected", extra))
            for tool, count in sorted(tools.items())
        ]

    def count(self, call: CallConduct) -> int:
        """Return how often a call counts."""
        raise NotImplementedError


@dataclass(repr=False)
class DeniedCalls(_CallsEvaluator):
    """Asserts which calls were denied, by a policy or by whoever was asked. Without tools, that none was."""

    def count(self, call: CallConduct) -> int:
        return call.status == "denied" and self.policy in (None, call.policy)


@dataclass(repr=False)
class AskedCalls(_CallsEvaluator):
    """Asserts which calls needed approval. Without tools, that nobody had to approve anything."""

    approved: bool | None = None
    """Counts only the requests that were approved, or those that were not. None counts both."""

    def count(self, call: CallConduct) -> int:
        asks = [each for each in call.asks if self.policy in (None, each.policy)]
        return sum(self.approved in (None, each.approved) for each in asks)


@dataclass(repr=False)
class UndoneCalls(_CallsEvaluator):
    """Asserts which calls were rolled back once their handlers had begun. Each attempt counts. Without tools, that none was."""

    def count(self, call: CallConduct) -> int:
        return len(call.undone) if self.policy in (None, call.policy) else 0


@dataclass(repr=False)
class FinalFiles(_ConductEvaluator):
    """Asserts which files the agent changed, and their text after the run."""

    expected_files: dict[str, str | None]
    """The text of each changed file by path; None if the file is to be deleted."""
    allow_extra: bool = False
    """Whether other files may have been changed too."""

    def problems(self, conduct: Conduct) -> list[str]:
        wrong = [_difference(path, text, conduct.files) for path, text in self.expected_files.items()]
        extra = () if self.allow_extra else sorted(conduct.files.keys() - self.expected_files.keys())
        return [each for each in (*wrong, *(f"{path} was changed" for path in extra)) if each]


@dataclass(repr=False)
class FinalState(_ConductEvaluator):
    """Asserts the items of slices of the session's state after the run, as plain JSON. Other slices are not judged."""

    expected_state: dict[str, list[Any]]
    """The items of a slice, oldest first, by the name of their type."""

    def problems(self, conduct: Conduct) -> list[str]:
        state = {kind: conduct.state.get(kind, []) for kind in self.expected_state}
        return [
            each for kind, items in self.expected_state.items() if (each := _difference(kind, items, state))
        ]


@dataclass(repr=False)
class MaxCost(_ConductEvaluator):
    """Asserts that all model requests of the run together cost at most this many US dollars. An unknown cost fails."""

    dollars: float

    def problems(self, conduct: Conduct) -> list[str]:
        if conduct.cost is None:
            return [
                "the cost is unknown, because a model has no price. Install handrail[prices], or give the model one"
            ]
        return [f"it cost ${conduct.cost}, more than ${self.dollars}"] if conduct.cost > self.dollars else []


def _difference(name: str, expected: object, found: Mapping[str, Any]) -> str:
    if name not in found:
        return f"{name} was not changed"
    return "" if found[name] == expected else f"{name} became {found[name]!r}, not {expected!r}"


EVALUATORS = (AskedCalls, DeniedCalls, FinalFiles, MaxCost, FinalState, UndoneCalls)
"""All of them, for `Dataset.from_file(..., custom_evaluator_types=EVALUATORS)`."""
