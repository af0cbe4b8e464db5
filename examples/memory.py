"""An assistant that remembers. Its notes are files, and it writes none that you have not seen.

    python examples/memory.py                                    # three conversations with a scripted model, and a rule that answers
    python examples/memory.py --model anthropic:claude-sonnet-5 "I am a vegetarian. What do you know about me?"

The notes are files of a workspace, which is recorded in the journal, so any later run finds them, on any machine. A note is written
through the gate: a person sees it as a diff before it is kept, and it says in which run it was made, so that its origin can be looked up.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

from pydantic import Field

from handrail import (
    Adapter,
    Agent,
    CapabilityPolicy,
    Environment,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    TerminalEnvironment,
    ToolCall,
    ToolContext,
    Workspace,
    tool,
)
from handrail.messages import ModelRequest, ToolMessage
from handrail.models.scripted import Reply
from handrail.question import Question
from handrail.runs import get_files, said
from handrail.testing import Person

Topic = Annotated[str, Field(pattern="^[a-z]{1,20}$", description="One lower-case word, such as food.")]


@tool(effect="staged", capabilities={"memory"})
async def remember(topic: Topic, note: str, context: ToolContext) -> str:
    """Remember something about the person for later conversations."""
    files, path = context.filesystem, f"{topic}.md"
    before = files.read(path) if files.exists(path) else ""
    origin = f"(run {context.run_context.run_id}, {context.session.principal})"
    files.write(path, f"{before}- {' '.join(note.split())} {origin}\n")
    return f"remembered under {topic}"


@tool(effect="staged", capabilities={"memory"})
async def forget(topic: Topic, note: str, context: ToolContext) -> str:
    """Forget the notes of a topic that contain this text."""
    files, path = context.filesystem, f"{topic}.md"
    lines = files.read(path).splitlines(keepends=True)
    files.write(path, "".join(line for line in lines if note.casefold() not in line.casefold()))
    return f"forgotten under {topic}"


@tool(effect="pure")
async def recall(words: list[str], context: ToolContext) -> str:
    """Look for what is remembered. One word is enough for a note to be found; none finds everything."""
    files = context.filesystem
    notes = [
        f"{path.removesuffix('.md')}: {line.removeprefix('- ')}"
        for path in files.glob("*.md")
        for line in files.read(path).splitlines()
    ]
    wanted = [word.casefold() for word in words]
    found = [note for note in notes if not wanted or any(word in note.casefold() for word in wanted)]
    return "\n".join(found) or "Nothing is remembered about that."


ASSISTANT = Prompt(
    "assistant",
    "You remember what people tell you about themselves. Recall what you know before you answer, and say where it is from.",
    tools=[remember, forget, recall],
    policies=[CapabilityPolicy({"memory": "ask"})],
)


def scripted(request: ModelRequest) -> Reply:
    """Answer as a model would in the three conversations."""
    last, message = request.messages[-1], request.messages[0].text
    if message.startswith("I am"):
        if isinstance(last, ToolMessage):
            return Reply("; ".join(each.text for each in last.results))
        return Reply(
            calls=[
                ToolCall("remember", {"topic": "food", "note": "eats no meat"}, "food-1"),
                ToolCall("remember", {"topic": "papers", "note": "passport C01X00T47"}, "papers-1"),
            ]
        )
    if message.startswith("Forget"):
        if isinstance(last, ToolMessage):
            return Reply(last.results[0].text)
        return Reply(calls=[ToolCall("forget", {"topic": "food", "note": "eats"})])
    if isinstance(last, ToolMessage):
        return Reply(f"I know this: {last.results[0].text}")
    return Reply(calls=[ToolCall("recall", {"words": ["food"]})])


def look(question: Question) -> bool | str:
    """Approve what may be remembered, and deny everything with a number in it."""
    note = question.payload["arguments"]["note"]
    answer = "no numbers, please" if any(each.isdigit() for each in note) else True
    print(
        f"\n? {question.message}\n{question.payload['diff']}> {'yes' if answer is True else f'no: {answer}'}"
    )
    return answer


async def tell(folder: Path) -> None:
    """Have three conversations, each in a session of its own, with what happens to the notes in between."""
    journal, person = SqliteJournal(folder / "runs.db"), Person(approve=look)
    agent = Agent(Adapter(ScriptedModel(scripted), journal=journal, environment=person), ASSISTANT)

    async def say(message: str, run_id: str) -> None:
        print(f"\n== {run_id}: {message}")
        files = Workspace("ada", cache=folder / "cache")
        print((await agent.run(message, run_id=run_id, filesystem=files)).text)

    await say("I am a vegetarian, and my passport is C01X00T47.", "monday")
    print(f"\nThe notes: {', '.join(await get_files(journal, 'ada', folder / 'notes'))}")
    await say("Where shall we eat?", "friday")
    first = (await said(journal, "monday"))[0]
    print(f"\nThe origin of that note is the run monday, in which you said: {first.text}")
    await say("Forget what I eat.", "sunday")
    journal.close()


async def answer(model: str, message: str, folder: Path, environment: Environment) -> None:
    journal = SqliteJournal(folder / "memory.db")
    agent = Agent(Adapter(model, journal=journal, environment=environment), ASSISTANT)
    print((await agent.run(message, filesystem=Workspace("me", cache=folder / "cache"))).text)
    journal.close()


def main() -> None:
    options = argparse.ArgumentParser(
        description="Talk to an assistant that remembers what you let it remember."
    )
    options.add_argument("message", nargs="?", default="What do you know about me?")
    options.add_argument(
        "--model", help="provider:name; without it, a scripted model has three conversations"
    )
    options.add_argument("--folder", type=Path, default=Path(".handrail"), help="where the notes are kept")
    given = options.parse_args()
    if given.model:
        given.folder.mkdir(exist_ok=True)
        asyncio.run(answer(given.model, given.message, given.folder, TerminalEnvironment()))
        return
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(tell(Path(folder)))


if __name__ == "__main__":
    main()
