"""Agents as tasks of pydantic-evals: the real library, real runs, and scripted models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic_evals import Case, Dataset
from pydantic_evals.evaluators import Equals, Evaluator, EvaluatorContext
from pydantic_evals.reporting import EvaluationReport

from handrail import Agent, Budget, CapabilityPolicy, ScriptedModel, ToolCall, ToolContext, tool
from handrail.errors import DefinitionError
from handrail.evals import (
    EVALUATORS,
    AgentTask,
    AskedCalls,
    DeniedCalls,
    EvalsFailed,
    FinalFiles,
    FinalState,
    MaxCost,
    UndoneCalls,
    check_report,
)
from handrail.evals.task import AgentLifecycle
from handrail.messages import ModelRequest, Price, Traits, Usage
from handrail.models.scripted import Reply, Scripted
from handrail.testing import Person


@dataclass(frozen=True)
class Refund:
    order: str
    cents: int


@tool(effect="staged", capabilities={"money"})
async def refund(order: str, cents: int, context: ToolContext) -> str:
    """Refund an order."""
    context.session.dispatch(Refund(order, cents))
    context.filesystem.append("ledger.txt", f"{order} {cents}\n")
    if cents > 10_000:
        raise ValueError("that is more than the order cost")
    return "refunded"


@tool(effect="staged", capabilities={"fs.delete"})
async def forget(order: str, context: ToolContext) -> str:
    """Delete an order."""
    context.filesystem.delete(f"{order}.txt")
    return "deleted"


POLICY = CapabilityPolicy({"money": "ask", "fs.delete": "deny"}, name="till")
FILES = {"ledger.txt": "", "a1.txt": "a lamp"}


def clerk(*answers: Scripted, traits: Traits | None = None) -> Agent[Any]:
    """Return an agent that gives these answers in each of its runs."""

    def answer(request: ModelRequest) -> Scripted:
        return answers[sum(type(each).__name__ == "AssistantMessage" for each in request.messages)]

    model = ScriptedModel(answer, traits=traits)
    return Agent(model, "Serve.", name="clerk", tools=[refund, forget], policies=[POLICY])


def evaluate(
    agent: Agent[Any], *evaluators: Evaluator[Any, Any, Any], repeat: int = 1, **arguments: Any
) -> EvaluationReport[Any, Any, Any]:
    arguments = {"files": FILES, "person": lambda _: Person(approve=True), **arguments}
    task = AgentTask(agent, **arguments)
    dataset = Dataset(name="shop", cases=[Case(name="lamp", inputs="Refund a1.")], evaluators=evaluators)
    return asyncio.run(dataset.evaluate(task, lifecycle=task.lifecycle, repeat=repeat, progress=False))


REFUNDS = (ToolCall("refund", {"order": "a1", "cents": 500}), "Done.")
DELETES = (ToolCall("forget", {"order": "a1"}), "I may not.")
BREAKS = (ToolCall("refund", {"order": "a1", "cents": 50_000}), "That failed.")


# --- what the agent did -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "evaluator", "reason"),
    [
        (REFUNDS, DeniedCalls([]), None),
        (REFUNDS, DeniedCalls(["refund"]), "missing 'refund' (x1)"),
        (DELETES, DeniedCalls(["forget"]), None),
        (DELETES, DeniedCalls(["forget"], policy="till"), None),
        (DELETES, DeniedCalls(["forget"], policy="other"), "missing 'forget' (x1)"),
        (DELETES, DeniedCalls([]), "unexpected 'forget' (x1)"),
        (DELETES, DeniedCalls([], allow_extra=True), None),
        (DELETES, DeniedCalls([], policy="other"), None),
        (REFUNDS, AskedCalls(["refund"], policy="till", approved=True), None),
        (REFUNDS, AskedCalls(["refund"], approved=False), "missing 'refund' (x1)"),
        (REFUNDS, AskedCalls(["refund"], policy="other"), "missing 'refund' (x1)"),
        (REFUNDS, AskedCalls([]), "unexpected 'refund' (x1)"),
        (DELETES, AskedCalls([]), None),
        (BREAKS, UndoneCalls(["refund"]), None),
        (BREAKS, UndoneCalls([]), "unexpected 'refund' (x1)"),
        (REFUNDS, UndoneCalls([]), None),
        (DELETES, UndoneCalls([]), None),
        (REFUNDS, FinalFiles({"ledger.txt": "a1 500\n"}), None),
        (REFUNDS, FinalFiles({"ledger.txt": ""}), "ledger.txt became 'a1 500\\n', not ''"),
        (REFUNDS, FinalFiles({}), "ledger.txt was changed"),
        (REFUNDS, FinalFiles({}, allow_extra=True), None),
        (BREAKS, FinalFiles({}), None),
        (BREAKS, FinalFiles({"a1.txt": None}), "a1.txt was not changed"),
        (REFUNDS, FinalState({"Refund": [{"order": "a1", "cents": 500}]}), None),
        (REFUNDS, FinalState({"Refund": []}), "Refund became [{'order': 'a1', 'cents': 500}], not []"),
        (BREAKS, FinalState({"Refund": []}), None),
    ],
)
def test_evaluators_judge_what_the_agent_did(
    answers: Iterable[Any], evaluator: Evaluator[Any, Any, Any], reason: str | None
):
    """Each evaluator passes exactly if calls, files and state are as expected, and says what differs."""
    [case] = evaluate(clerk(*answers), evaluator).cases
    [result] = case.assertions.values()
    assert (result.value, result.reason) == (reason is None, reason)
    assert case.output == answers[1]  # pyright: ignore[reportIndexIssue]


def test_a_person_who_denies_is_not_a_policy_that_does():
    """A call that a person did not approve was denied, names the policy that asked, and changed nothing."""
    report = evaluate(
        clerk(*REFUNDS),
        DeniedCalls(["refund"], policy="till"),
        AskedCalls(["refund"], approved=False),
        FinalFiles({}),
        person=lambda _: Person(approve="too much"),
    )
    check_report(report)
    [call] = report.cases[0].attributes["handrail"]["calls"]
    assert [(each["by"], each["reason"]) for each in call["asks"]] == [("local", "too much")]


def test_the_files_of_a_deleted_file_and_of_bytes_are_told():
    """A deleted file is None, and bytes that are no text are readable."""

    @tool(effect="staged")
    async def tidy(context: ToolContext) -> str:
        """Tidy up."""
        context.filesystem.delete("a1.txt")
        context.filesystem.write("logo.bin", b"\xff\n")
        return "tidy"

    agent = Agent(ScriptedModel([ToolCall("tidy"), "Done."]), "Tidy.", tools=[tidy])
    check_report(evaluate(agent, FinalFiles({"a1.txt": None, "logo.bin": "\\xff\n"})))


def test_the_cost_is_a_metric_and_has_a_limit():
    """The cost and the usage of all requests are metrics; a cost above the limit fails, and so does an unknown one."""
    reply = Reply("Hi.", usage=Usage(1000, 100, 200, requests=1))
    priced = Traits(Price(Decimal(2), Decimal(10)))
    report = evaluate(clerk(reply, traits=priced), MaxCost(0.01), MaxCost(0.001))
    [case] = report.cases
    tokens = {"input_tokens": 1000, "output_tokens": 100, "cache_read.input_tokens": 200}
    assert case.metrics == {**tokens, "requests": 1, "cost": 0.003}
    assert [each.value for each in case.assertions.values()] == [True, False]
    unpriced = evaluate(clerk(reply), MaxCost(1.0)).cases[0]
    assert "cost" not in unpriced.metrics
    assert not unpriced.assertions["MaxCost"].value


def test_the_evaluators_are_loaded_from_a_file():
    """A dataset in YAML can name all evaluators."""
    dataset: Any = Dataset[str, str, Any].from_text(
        """
        name: shop
        cases:
          - inputs: Delete a1.
            expected_output: I may not.
            evaluators:
              - DeniedCalls: [forget]
              - FinalFiles: {expected_files: {}}
              - EqualsExpected
        evaluators:
          - AskedCalls: {expected_tools: []}
          - UndoneCalls: {expected_tools: []}
        """,
        custom_evaluator_types=EVALUATORS,
    )
    task = AgentTask(clerk(*DELETES), files=FILES)
    report = asyncio.run(dataset.evaluate(task, lifecycle=task.lifecycle, progress=False))
    assert len(report.cases[0].assertions) == 5
    check_report(report)


# --- fresh for each run ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mapping", "folder", "function"])
def test_each_run_has_its_own_files_session_and_person(tmp_path: Path, kind: str):
    """Repeats start from the same files and an empty session, at the same time, and the source is not changed."""
    for path, text in FILES.items():
        (tmp_path / path).write_text(text)
    people: list[Person] = []

    def person(case: Case[Any, Any, Any]) -> Person:
        people.append(Person(approve=case.name == "lamp"))
        return people[-1]

    from handrail import MemoryFilesystem

    files: dict[str, Any] = {
        "mapping": FILES, "folder": tmp_path, "function": lambda _: MemoryFilesystem(FILES),
    }  # fmt: skip
    expected = FinalFiles({"ledger.txt": "a1 500\n"}), FinalState({"Refund": [{"order": "a1", "cents": 500}]})
    report = evaluate(clerk(*REFUNDS), *expected, repeat=3, files=files[kind], person=person)
    check_report(report)
    assert [len(each.questions) for each in people] == [1, 1, 1]
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == FILES


def test_the_files_are_there_for_the_evaluators_and_then_removed(tmp_path: Path):
    """An evaluator of one's own finds the folder through the trial; afterwards nothing of it is left."""
    roots: list[Path] = []

    @tool(effect="staged")
    async def look(context: ToolContext) -> str:
        """Look."""
        context.filesystem.write("seen.txt", "yes")
        return "seen"

    class Watched(AgentTask):
        def lifecycle(self, case: Case[Any, Any, Any]) -> AgentLifecycle:
            self.made = super().lifecycle(case)
            return self.made

    task = Watched(Agent(ScriptedModel([ToolCall("look"), "Done."]), "Look.", tools=[look]), files=tmp_path)

    @dataclass(repr=False)
    class OnDisk(Evaluator[Any, Any, Any]):
        def evaluate(self, ctx: EvaluatorContext[Any, Any, Any]) -> bool:
            files: Any = task.made.trial and task.made.trial.files
            roots.append(Path(files.root))
            return (roots[0] / "seen.txt").read_text() == "yes"

    dataset = Dataset(name="d", cases=[Case(name="c", inputs="Go.")], evaluators=[OnDisk()])
    check_report(asyncio.run(dataset.evaluate(task, lifecycle=task.lifecycle, progress=False)))
    assert not roots[0].parent.exists()


def test_a_retried_task_starts_afresh():
    """If pydantic-evals retries the task, the second try has neither the files nor the conversation of the first."""
    tries: list[int] = []

    def answer(request: ModelRequest) -> Scripted:
        tries.append(len(request.messages))
        if len(request.messages) == 1:
            return REFUNDS[0]
        return RuntimeError("the first try ends here") if len(tries) == 2 else "Done."

    agent = Agent(ScriptedModel(answer), "Serve.", tools=[refund])
    task = AgentTask(agent, files=FILES)
    dataset = Dataset(
        name="d",
        cases=[Case(name="c", inputs="Go.")],
        evaluators=[FinalFiles({"ledger.txt": "a1 500\n"})],
    )
    pytest.importorskip("tenacity")
    from tenacity import stop_after_attempt

    report = asyncio.run(
        dataset.evaluate(
            task, lifecycle=task.lifecycle, progress=False, retry_task={"stop": stop_after_attempt(2)}
        )
    )
    check_report(report)
    assert tries == [1, 3, 1, 3]


def test_inputs_may_be_params_and_the_output_may_be_typed():
    """Inputs other than a string are the params of the prompt, and the output is the typed answer."""
    from handrail import MarkdownSection, Prompt

    @dataclass(frozen=True)
    class Order:
        item: str

    section = MarkdownSection[Order](title="Order", key="order", template="Price $item.")
    agent = Agent(ScriptedModel(['{"value": 7}']), Prompt("price", [section], output=int))
    task = AgentTask(agent)
    dataset = Dataset(name="d", cases=[Case(name="c", inputs=Order("lamp"))], evaluators=[Equals(7)])
    check_report(asyncio.run(dataset.evaluate(task, lifecycle=task.lifecycle, progress=False)))


# --- what goes wrong ---------------------------------------------------------------------------------


@dataclass(repr=False)
class Broken(Evaluator[Any, Any, Any]):
    def evaluate(self, ctx: EvaluatorContext[Any, Any, Any]) -> bool:
        raise LookupError("the oracle is away")


def test_an_evaluator_that_raises_is_named_and_loses_nothing():
    """The other results stay in the report, and the check names the evaluator and its error."""
    report = evaluate(clerk(*REFUNDS), Broken(), AskedCalls(["refund"]))
    assert report.cases[0].assertions["AskedCalls"].value
    with pytest.raises(EvalsFailed) as failed:
        check_report(report)
    assert "lamp: the evaluator 'Broken' raised LookupError: the oracle is away" in str(failed.value)


def test_a_run_that_fails_fails_its_case():
    """A task whose run can't continue is a failure with the run's own error, in the report and in the check."""
    report = evaluate(clerk(*REFUNDS), DeniedCalls([]), budget=Budget(requests=1))
    assert [each.name for each in report.failures] == ["lamp"]
    with pytest.raises(EvalsFailed, match="the task raised PromptEvaluationError"):
        check_report(report)


def test_a_task_without_its_lifecycle_is_refused():
    """Without the lifecycle there would be no fresh files, so the task and the evaluators say what to pass."""
    task = AgentTask(clerk(*REFUNDS))
    dataset = Dataset(name="d", cases=[Case(name="c", inputs="Go.")])
    report = asyncio.run(dataset.evaluate(task, progress=False))
    assert "lifecycle=task.lifecycle" in report.failures[0].error_message

    async def plain(inputs: str) -> str:
        return inputs

    dataset = Dataset(name="d", cases=[Case(name="c", inputs="Go.")], evaluators=[DeniedCalls([])])
    [failure] = asyncio.run(dataset.evaluate(plain, progress=False)).cases[0].evaluator_failures
    assert failure.name == "DeniedCalls"
    assert "AgentTask" in failure.error_message


@pytest.mark.parametrize("name", ["session", "filesystem", "environment"])
def test_what_each_run_has_of_its_own_cant_be_passed(name: str):
    """An argument that would be shared by all runs is refused by name."""
    arguments: dict[str, Any] = {name: None}
    [failure] = evaluate(clerk(*REFUNDS), **arguments).failures
    assert name in failure.error_message


# --- enough of the repeats ---------------------------------------------------------------------------


def flaky(*passes: bool) -> EvaluationReport[Any, Any, Any]:
    """Return the report of a case whose repeats pass or fail like this."""
    outcomes = iter(passes)

    async def task(inputs: str) -> bool:
        return next(outcomes)

    dataset = Dataset(name="d", cases=[Case(name="c", inputs="Go.")], evaluators=[Equals(True)])
    return asyncio.run(dataset.evaluate(task, repeat=len(passes), max_concurrency=1, progress=False))


@pytest.mark.parametrize(
    ("passes", "at_least", "is_enough"),
    [
        ((True, True, True, True, False), 4 / 5, True),
        ((True, True, True, False, False), 4 / 5, False),
        ((True, False, False), 1 / 3, True),
        ((False, False, False), 1 / 3, False),
        ((True, True), 1.0, True),
        ((True, False), 1.0, False),
    ],
)
def test_enough_repeats_must_pass(passes: tuple[bool, ...], at_least: float, is_enough: bool):
    """The check raises exactly if fewer than the share of a case's repeats passed, for all cases or for one."""
    report = flaky(*passes)
    shares: list[dict[str, Any]] = [{"at_least": at_least}, {"cases": {"c": at_least}}]
    for share in shares:
        if is_enough:
            check_report(report, **share)
        else:
            with pytest.raises(EvalsFailed, match=f"c: {sum(passes)} of {len(passes)} runs passed"):
                check_report(report, **share)


def test_scores_have_a_minimum():
    """A score below its minimum fails its run, and so does a score that is missing."""

    @dataclass(repr=False)
    class Half(Evaluator[Any, Any, Any]):
        def evaluate(self, ctx: EvaluatorContext[Any, Any, Any]) -> float:
            return 0.5

    report = evaluate(clerk(*REFUNDS), Half())
    check_report(report, scores={"Half": 0.5})
    with pytest.raises(EvalsFailed, match=r"Half is 0\.5, and must be at least 0\.6"):
        check_report(report, scores={"Half": 0.6})
    with pytest.raises(EvalsFailed, match="Whole is missing"):
        check_report(report, scores={"Whole": 0.1})


def test_a_check_of_nothing_fails():
    """A case without an assertion, and a report without cases, do not pass."""
    with pytest.raises(EvalsFailed, match="nothing was asserted"):
        check_report(evaluate(clerk(*REFUNDS)))
    empty: Dataset[Any, Any, Any] = Dataset(name="d", cases=[])
    with pytest.raises(EvalsFailed, match="no case was run"):
        check_report(asyncio.run(empty.evaluate(AgentTask(clerk("Hi.")), progress=False)))


@pytest.mark.parametrize(
    "wrong", [{"at_least": 4}, {"at_least": 0}, {"cases": {"c": 2}}, {"cases": {"typo": 1}}]
)
def test_a_share_that_is_none_is_refused(wrong: dict[str, Any]):
    """A number of runs in place of a share, and a case that was not run, are mistakes of the check."""
    with pytest.raises(DefinitionError):
        check_report(flaky(True), **wrong)
