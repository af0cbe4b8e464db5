"""`AgentTask`: an agent as the task that pydantic-evals evaluates, and `recorded_case`: a recorded run as a case."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from contextvars import ContextVar
from os import PathLike
from typing import Any, Unpack

import msgspec
from pydantic_evals import Case
from pydantic_evals.evaluators import EvaluatorContext, TrajectoryMatch
from pydantic_evals.lifecycle import CaseLifecycle

from handrail.agent import Agent
from handrail.errors import DefinitionError
from handrail.evals import recordings
from handrail.evals.evaluators import CONDUCT
from handrail.evals.trial import Files, Trial, Trials
from handrail.protocols import Environment
from handrail.run.options import RunArguments


class AgentTask:
    """An agent as a task: `dataset.evaluate_sync(task, lifecycle=task.lifecycle)`.

    Each run of a case has fresh files and a fresh session, also if it is repeated or retried, and the files are there until its
    evaluators are done. The case's inputs are the user's message, or the params of the agent's prompt; the output is the agent's.

    - `files`: texts by path, a folder that is copied for each run, or a function of the case. A recorded case has its own.
    - `person`: a function of the case that returns who is asked, such as `Person(approve=True)`. By default nobody is.

    Other arguments are those of `Agent.run`, such as `budget`.
    """

    def __init__(
        self,
        agent: Agent[Any],
        *,
        files: Files | None = None,
        person: Callable[[Case[Any, Any, Any]], Environment] | None = None,
        **arguments: Unpack[RunArguments],
    ) -> None:
        self.trials = Trials(agent, files, person, arguments)
        self.__name__ = agent.name  # the name of the task in reports

    async def __call__(self, inputs: Any) -> Any:
        """Run the agent on the inputs of the current case. Raises what `Agent.run` raises."""
        current = _current.get()
        if current is None:
            raise DefinitionError(
                f"the task {self.__name__!r} has no case. Pass its lifecycle too: evaluate(task, lifecycle=task.lifecycle)."
            )
        trial = await current.begin()
        response = await trial.run(inputs)
        return response.text if self.trials.agent.prompt.output is None else response.output

    def lifecycle(self, case: Case[Any, Any, Any]) -> AgentLifecycle:
        """Return the lifecycle of a case, which opens its files and closes them. To add to it, subclass `AgentLifecycle`."""
        return AgentLifecycle(case, self.trials)


class AgentLifecycle(CaseLifecycle[Any, Any, Any]):
    """Opens the files of each run of a case, tells the evaluators what the agent did, and closes the files after them."""

    def __init__(self, case: Case[Any, Any, Any], trials: Trials) -> None:
        super().__init__(case)
        self._trials = trials
        self._open = AsyncExitStack()
        self.trial: Trial | None = None
        """The current run; None until the task has begun."""

    async def setup(self) -> None:
        _current.set(self)

    async def begin(self) -> Trial:
        """Begin a run of the case. If the task is retried, this closes the files of the run before."""
        await self._open.aclose()
        self.trial = await self._open.enter_async_context(self._trials.open(self.case, self.case.metadata))
        return self.trial

    async def prepare_context(self, ctx: EvaluatorContext[Any, Any, Any]) -> EvaluatorContext[Any, Any, Any]:
        """Add what the agent did to the attributes of the run, and its usage and cost to the metrics."""
        if self.trial is None:
            return ctx
        conduct = self.trial.observer.conduct
        ctx.attributes[CONDUCT] = msgspec.to_builtins(conduct)
        usage = conduct.usage
        # Those that pydantic-evals adds up from spans count each token twice: in the request, and in the agent around it.
        metrics = {
            "requests": usage.requests,
            "tool_calls": len(conduct.calls),
            "input_tokens": usage.input,
            "output_tokens": usage.output,
            "cache_read.input_tokens": usage.cached,
            "cache_write.input_tokens": usage.cache_writes,
            "cost": float(conduct.cost or 0),
        }
        ctx.metrics |= {name: value for name, value in metrics.items() if value}
        return ctx

    async def teardown(self, result: Any) -> None:
        await self._open.aclose()


_current: ContextVar[AgentLifecycle | None] = ContextVar("the lifecycle of the current case", default=None)


def recorded_case(path: str | PathLike[str]) -> Case[str, str, dict[str, Any]]:
    """Return a run that `handrail runs export RUN PATH --case` has exported, as a case.

    The inputs are the recorded message, the expected output is the recorded answer, and a `TrajectoryMatch` expects the tools of the
    recorded calls. Each run of the case has the recorded files, if it has any.

    Raises `RunError` if the file is not a case, and `DefinitionError` if more than a message has begun the run.
    """
    found = recordings.read(path)
    return Case(
        name=found.name,
        inputs=found.message,
        expected_output=found.text,
        metadata=found.metadata,
        evaluators=[TrajectoryMatch(expected_trajectory=found.tools)],
    )
