"""Research a question with several agents at once, under one budget, and merge the answers into one report.

    python examples/research.py                                              # three notes, a scripted model
    python examples/research.py --model anthropic:claude-sonnet-5              # the same notes, a real model
    python examples/research.py --model openai:gpt-5 --folder notes/ "Why did sales fall in May?"

An editor splits the question. Each part goes to its own researcher with a share of the budget. A researcher that
has used up its share stops, and the others continue. Every answer names the files it was found in.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from handrail import (
    Agent,
    Budget,
    Deadline,
    DirectoryFilesystem,
    Operation,
    Prompt,
    PromptEvaluationError,
    PromptResponse,
    ScriptedModel,
    ToolCall,
    ToolContext,
    gather,
    tool,
)
from handrail.events import PromptExecuted, ToolInvoked
from handrail.messages import ModelRequest


@dataclass(frozen=True)
class Finding:
    answer: str
    files: list[str]


@dataclass(frozen=True)
class Report:
    title: str
    findings: list[Finding]
    left_open: list[str]


@tool(effect="read", capabilities={"fs.read"})
async def search(words: str, context: ToolContext) -> list[str]:
    """Find the lines that contain these words, each with its file."""
    return [f"{match.path}: {match.text}" for match in context.filesystem.grep(f"(?i){re.escape(words)}")][
        :20
    ]


RESEARCHER = Prompt(
    "researcher",
    "Answer the question from the notes, in one sentence. Search first; name the files you used.",
    tools=[search],
    output=Finding,
)


@tool(effect="read")
async def research(questions: list[str], context: ToolContext) -> dict[str, Finding | str]:
    """Research several questions at once. For a question without an answer, return the reason."""
    share = Budget(requests=4)
    runs = [context.adapter.evaluate(RESEARCHER, question, budget=share) for question in questions]
    found = await gather(*[settled(run) for run in runs])
    return dict(zip(questions, found, strict=True))


async def settled(run: Operation[PromptResponse[Finding]]) -> Finding | str:
    """Return a researcher's findings, or the reason it failed, so that one failure does not end the others."""
    try:
        return (await run).output
    except PromptEvaluationError as error:
        return f"no answer: {error}"


EDITOR = Prompt(
    "editor",
    "Split the question into independent parts, have them researched at once, and write the report. "
    "Say which parts nobody could answer, and add nothing of your own.",
    tools=[research],
    output=Report,
)

NOTES = {
    "may.md": "May: sales fell by a fifth. The shop in Bergen was closed for repairs.\n",
    "staff.md": "Two people left in April; their places were filled in June.\n",
    "prices.md": "Prices were raised by four percent on the first of May.\n",
}
QUESTION = "Why did sales fall in May?"


def script(request: ModelRequest) -> str | ToolCall:
    """Answer as the model of the editor or of a researcher might."""
    if request.system.startswith("Split"):
        if len(request.messages) == 1:
            parts = ["Which shops were closed?", "Were prices changed?", "What did rivals do?"]
            return ToolCall("research", {"questions": parts})
        closed = {"answer": "Bergen was closed for repairs.", "files": ["may.md"]}
        raised = {"answer": "Prices rose by four percent.", "files": ["prices.md"]}
        title = "Why sales fell in May"
        return json.dumps(
            {"title": title, "findings": [closed, raised], "left_open": ["What did rivals do?"]}
        )
    asked = request.messages[0].text
    word = "closed" if "closed" in asked else "prices" if "prices" in asked else "rivals"
    if len(request.messages) == 1 or word == "rivals":  # the third researcher never stops searching
        return ToolCall("search", {"words": word})
    if word == "closed":
        return '{"answer": "Bergen was closed for repairs.", "files": ["may.md"]}'
    return '{"answer": "Prices rose by four percent.", "files": ["prices.md"]}'


def main() -> None:
    options = argparse.ArgumentParser(description="Research by several agents at once.")
    options.add_argument("question", nargs="?", default=QUESTION)
    options.add_argument("--model", help="provider:name; without it, a scripted model uses the sample notes")
    options.add_argument("--folder", type=Path, help="your own folder of notes")
    given = options.parse_args()
    if given.folder and not given.model:
        options.error("the script only knows the sample notes. Name a model: --model provider:name.")
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = given.folder or Path(temporary, "notes")
        if not given.folder:
            folder.mkdir()
            for name, text in NOTES.items():
                Path(folder, name).write_text(text)
        stream = Agent(given.model or ScriptedModel(script), EDITOR).stream(
            given.question,
            filesystem=DirectoryFilesystem(folder),
            budget=Budget(requests=30),
            deadline=Deadline.after(300),
        )
        for event in stream:
            if isinstance(event, PromptExecuted) and event.prompt == "researcher":
                print(f"- a researcher ended: {event.stop_reason}")
            elif isinstance(event, ToolInvoked) and event.tool == "research":
                print(f"- the editor is told:\n{json.dumps(json.loads(event.result.render()), indent=2)}")
        response = stream.response.wait()
        print(f"\n# {response.output.title}\n")
        for finding in response.output.findings:
            print(f"{finding.answer} ({', '.join(finding.files)})")
        print(f"\nLeft open: {'; '.join(response.output.left_open) or 'nothing'}")
        print(f"{response.usage.requests} requests of 30")


if __name__ == "__main__":
    main()
