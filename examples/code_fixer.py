"""Fix code. An agent that stops before the tests pass is told so, up to five times. A command that fails changes nothing.

    python examples/code_fixer.py                                   # a small broken project, a scripted model
    python examples/code_fixer.py --model anthropic:claude-sonnet-5   # the same project, a real model
    python examples/code_fixer.py --folder ~/project --test "make test" --model openai:gpt-5

In your own folder, you see the diff of each change and are asked before a file is changed. If the tests did not
pass, or could not run, the program says so and exits with 1.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from handrail import (
    Agent,
    Budget,
    CapabilityPolicy,
    DirectoryFilesystem,
    FileTools,
    Prompt,
    ScriptedModel,
    Session,
    Shell,
    ShellTools,
    TerminalEnvironment,
    ToolCall,
)
from handrail.errors import PromptEvaluationError
from handrail.events import Advised, ToolInvoked, ToolRolledBack
from handrail.guard import CommandPassing
from handrail.resources.shell import Allow

TEST = [sys.executable, "-m", "unittest", "-q"]
PROJECT = {
    "price.py": "def total(prices):\n    together = sum(prices)\n    return together * 0.9 if together > 100 else together\n",
    "test_price.py": (
        "import unittest\nfrom price import total\n\n\nclass Total(unittest.TestCase):\n"
        "    def test_ten_percent_off_from_100_on(self):\n        self.assertEqual(total([60, 40]), 90)\n"
    ),
    "Makefile": "tidy:\n\tsed -i s/together/sum_of_all/ price.py\n\trm test_price.py\n\tfalse\n",
}
SCRIPT = ScriptedModel(
    [
        "It is fixed.",  # this is not true, so the completion check keeps the run going
        ToolCall("run_command", {"command": ["make", "tidy"]}),
        ToolCall("read_file", {"path": "price.py"}),
        ToolCall("edit_file", {"path": "price.py", "old": "> 100", "new": ">= 100"}),
        "The discount started above 100. Now it starts at 100, and the tests pass.",
    ]
)


def fixer(test: list[str], ask: bool) -> Prompt[None]:
    """Create the agent's prompt, with file tools, the test command, `make`, and the condition for stopping."""
    shell = Shell([Allow(*test), Allow("make", ...)])
    return Prompt(
        "fixer",
        [
            "Make the tests pass. Read the code before you change it, and change as little as you can.",
            FileTools(),
            ShellTools(shell),
        ],
        policies=[CapabilityPolicy({"fs.write": "ask" if ask else "allow", "proc.exec": "allow"})],
        completion=[CommandPassing(shell, *test, cap=5)],
    )


def watch(session: Session) -> None:
    """Print events as they happen."""
    events = session.dispatcher
    events.subscribe(
        ToolInvoked, lambda event: print(f"- {event.tool}: {event.result.render().splitlines()[0]}")
    )
    events.subscribe(
        ToolRolledBack, lambda event: print(f"  {event.tool} was undone: the folder is unchanged")
    )
    events.subscribe(Advised, lambda event: print(f"- not yet: {event.text.splitlines()[0]}"))


def main() -> None:
    options = argparse.ArgumentParser(description="Make the tests of a folder pass.")
    options.add_argument(
        "--model", help="provider:name; without it, a scripted model fixes the sample project"
    )
    options.add_argument("--folder", type=Path, help="your own project")
    options.add_argument("--test", default=shlex.join(TEST), help="the command that must pass")
    given = options.parse_args()
    if given.folder and not given.model:
        options.error("the script only fixes the sample project. Name a model: --model provider:name.")
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = given.folder or Path(temporary, "project")
        if not given.folder:
            folder.mkdir()
            for name, text in PROJECT.items():
                Path(folder, name).write_text(text)
        session = Session()
        watch(session)
        agent = Agent(given.model or SCRIPT, fixer(shlex.split(given.test), ask=bool(given.folder)))
        try:
            response = agent.run(
                "The tests fail. Fix the code.",
                session=session,
                environment=TerminalEnvironment(),
                filesystem=DirectoryFilesystem(folder),
                budget=Budget(requests=40),
            ).wait()
        except PromptEvaluationError as error:
            sys.exit(f"\nNot fixed: {error}")
        print(f"\n{response.text} ({response.stop_reason}, {response.usage.requests} requests)")
        if response.stop_reason != "done":
            sys.exit("Not fixed: the tests did not pass, or could not run.")
        if not given.folder:
            print(f"In the folder: {', '.join(sorted(path.name for path in folder.glob('*.py')))}")
            print(Path(folder, "price.py").read_text())


if __name__ == "__main__":
    main()
