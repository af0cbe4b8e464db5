"""A folder of workers at work: nested calls, an output schema, an approval that nobody gives, and a broken file.

The models are scripted, so this shows the same everywhere. With a real one, leave `models` out and write
`model: provider:name` into the files, or give `model="provider:name"`.
"""

import tempfile
from pathlib import Path

from handrail import ScriptedModel, Session, ToolCall, WorkerRegistry
from handrail.events import ToolInvoked

NEWSROOM = Path(__file__).with_name("newsroom")


def models() -> dict[str, ScriptedModel]:
    """What each worker's model says."""
    return {
        "main": ScriptedModel(
            [
                ToolCall("editor", {"input": "It rained in Oslo today, as it so often does in autumn."}),
                ToolCall("review", {"text": "Rain in Oslo."}),
                ToolCall("publish", {"text": "Rain in Oslo."}),
                "That is all.",
            ]
        ),
        "editor": ScriptedModel([ToolCall("count_words", {"text": "Rain in Oslo."}), "Rain in Oslo."]),
        "critic": ScriptedModel(['{"good": true, "remarks": ["short", "clear"]}']),
    }


def run(registry: WorkerRegistry, approvals: str | None) -> None:
    """Run the newsroom, and show every call as it ends."""
    session = Session()
    session.dispatcher.subscribe(ToolInvoked, show)
    mode = "approve_all" if approvals == "approve_all" else None
    response = registry.run("main", "News!", models=models(), session=session, approvals=mode).wait()
    print(f"   main said: {response.text}   requests: {response.usage.requests}\n")


def show(event: ToolInvoked) -> None:
    """One line for a call, with the way that led to it."""
    why = f": {event.result.message}" if event.status != "ok" else ""
    print(f"   {' > '.join(('main', *event.path))}  {event.status}{why}")


registry = WorkerRegistry(NEWSROOM)
assert registry.check() == []
print(f"1. A folder is a registry; nothing is wrong with {list(registry.names)}.\n")

print("2. Everything is approved:")
run(registry, "approve_all")

print("3. Nobody is there to approve, so what does not say that it is harmless does not run:")
run(registry, None)

print("4. What is wrong with a file is said with its line:")
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "broken.md").write_text("---\ntool: [x]\n---\nGo.\n")
    for problem in WorkerRegistry(folder).check():
        print(f"   {Path(problem.file).name}:{problem.line}: {problem.problem}")
