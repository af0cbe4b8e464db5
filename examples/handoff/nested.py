"""Pattern 6: handoffs are nested. An outer handoff runs inner ones, with all their acts, in parallel.

python examples/handoff/nested.py
"""

from dataclasses import dataclass

from handrail import (
    AgentEnvironment,
    Handoff,
    HeadlessEnvironment,
    Parked,
    ScriptedModel,
    Session,
    ToolContext,
    ToolResult,
    gather,
    open_gate,
)
from handrail.events import ToolInvoked
from handrail.testing import Person


@dataclass(frozen=True)
class Task:
    task: str


@dataclass(frozen=True)
class Tasks:
    tasks: list[str]


@dataclass(frozen=True)
class Done:
    output: str


do_task = Handoff("do_task", "Do one task.", params=Task, answer=Done, effect="read")


@do_task.before
async def prepare(params: Task, *, context: ToolContext) -> Parked[Task, Task]:
    return Parked(params, params)


@do_task.client
async def do(task: Task, *, context: ToolContext) -> Done:
    if context.prompt_model:
        return await context.prompt_model(f"Do this: {task.task}", Done)
    if context.wait_for:
        return await context.wait_for("do", task, Done, message="Please do this task.")
    return Done("left undone")


@do_task.after
async def note(task: Task, done: Done, *, context: ToolContext) -> ToolResult[str]:
    return ToolResult.ok(f"{task.task}: {done.output}")


do_all = Handoff("do_all", "Do several tasks at once.", params=Tasks, effect="read")


@do_all.before
async def split(params: Tasks, *, context: ToolContext) -> Parked[None, Tasks]:
    return Parked(None, params)


@do_all.client
async def hand_out(tasks: Tasks, *, context: ToolContext) -> list[str]:
    results = await gather(*[context.call("do_task", task=task) for task in tasks.tasks])
    return [result.unwrap() for result in results]


@do_all.after
async def collect(nothing: None, results: list[str], *, context: ToolContext) -> ToolResult[list[str]]:
    return ToolResult.ok(results)


def by_hand(task: dict[str, str]) -> dict[str, str]:
    """Return a person's answer to a task."""
    return {"output": f"{task['task']} by hand"}


def main() -> None:
    """Run the nested handoffs with models, with a person and with nobody, then print the longest path of calls."""
    session = Session()
    for environment in (
        AgentEnvironment(ScriptedModel(lambda request: '{"output": "done by a model"}')),
        Person(answers={"do": by_hand}),
        HeadlessEnvironment(),
    ):
        gate = open_gate([do_all, do_task], environment=environment, session=session)
        print(gate.invoke("do_all", {"tasks": ["wash", "dry"]}).wait().value)
    print(" > ".join(max((each.path for each in session[ToolInvoked].all()), key=len)))


if __name__ == "__main__":
    main()
