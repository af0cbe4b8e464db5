"""A shell that runs nothing and returns scripted results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from handrail.resources.mount import Layers
from handrail.resources.shell import Allow, CommandResult, Shell
from handrail.resources.shell.shell_errors import CommandMissing

Scripted = str | int | CommandResult | Callable[[tuple[str, ...], Layers], "str | int | CommandResult"]
"""A scripted result: the output of a successful command, an exit code, a complete result, or a function that returns one."""


class FakeShell(Shell):
    """A shell that returns scripted results: `FakeShell({"git status": "clean", "make": 2})`.

    Each key is compared word by word with the start of the command, and the longest key that matches is used. If no
    key matches, `run` raises `CommandMissing`. Unlike a real shell, a `FakeShell` allows every command by default. Pass
    `rules` to restrict it.
    """

    def __init__(self, answers: Mapping[str, Scripted], rules: Iterable[Allow] = (Allow(...),)) -> None:
        super().__init__(rules)
        self._answers = {tuple(words.split()): answer for words, answer in answers.items()}
        self.ran: list[tuple[str, ...]] = []
        """Every command that the rules allowed, in order."""

    async def run(
        self,
        argv: Sequence[str],
        layers: Layers,
        *,
        cwd: str = ".",
        stdin: str | bytes | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        self.rules.check(argv)
        command = tuple(argv)
        self.ran.append(command)
        fitting = [words for words in self._answers if command[: len(words)] == words]
        if not fitting:
            raise CommandMissing(
                " ".join(argv), argv[0], "nothing is scripted for this command. Add it to the script"
            )
        answer = self._answers[max(fitting, key=len)]
        if callable(answer):
            answer = answer(command, layers)
        if isinstance(answer, CommandResult):
            return replace(answer, argv=command)
        if isinstance(answer, int):
            return CommandResult(argv=command, exit_code=answer)
        return CommandResult(argv=command, output=answer)
