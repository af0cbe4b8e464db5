"""Pattern 7: the client act emits events, and listeners receive them as they happen.

python examples/handoff/streaming.py
"""

from dataclasses import dataclass

from handrail import Handoff, Parked, ScriptedModel, Session, ToolContext, ToolResult, open_gate, run_as_agent
from handrail.events import Emitted


@dataclass(frozen=True)
class Plan:
    steps: int


@dataclass(frozen=True)
class Step:
    step: int
    total: int


@dataclass(frozen=True)
class Said:
    text: str


@dataclass(frozen=True)
class Completed:
    completed: int


work_through = Handoff("work_through", "Work through a plan.", params=Plan, answer=Completed, effect="read")


@work_through.before
async def begin(params: Plan, *, context: ToolContext) -> Parked[None, Plan]:
    return Parked(None, params)


@work_through.client
async def work(plan: Plan, *, context: ToolContext) -> Completed:
    for step in range(1, plan.steps + 1):
        context.emit(Step(step, plan.steps))
        if context.prompt_model:
            await context.prompt_model(f"Do step {step}", Said)
    return Completed(plan.steps)


@work_through.after
async def end(nothing: None, done: Completed, *, context: ToolContext) -> ToolResult[int]:
    return ToolResult.ok(done.completed)


def model() -> ScriptedModel:
    """Return a model that answers "done" at each step."""
    return ScriptedModel(lambda request: '{"text": "done"}')


def main() -> None:
    """Run the client act alone, then all three acts with a listener on the session."""
    answer = run_as_agent(work_through, Plan(2), model=model(), on_emit=lambda event: print("heard", event))
    print(answer.wait())
    session = Session()
    session.dispatcher.subscribe(Emitted, lambda fact: print(f"{fact.tool} says {fact.event}"))
    print(open_gate([work_through], session=session).invoke("work_through", {"steps": 1}).wait().value)


if __name__ == "__main__":
    main()
