"""Errors for commands and for the rules that allow them.

StateError
└── ShellError (RuntimeError)                .command
    ├── CommandRefused (PermissionError)       .problem, .allowed: it is malformed or not allowed
    ├── CommandMissing (FileNotFoundError)     .program: there is no such program, or it can't be executed
    └── ShellUnavailable                       .problem, .hint: commands can't run here
DefinitionError
└── RuleError                                .rule
"""

from __future__ import annotations

from collections.abc import Sequence

from handrail.errors import DefinitionError, StateError


class RuleError(DefinitionError):
    """Raised if a rule that allows commands is invalid."""

    def __init__(self, rule: str, problem: str, hint: str) -> None:
        super().__init__(f"rule {rule}: {problem}. {hint}")
        self.rule = rule


class ShellError(StateError, RuntimeError):
    """Raised if a command can't be run, or if it is unknown how it ended."""

    def __init__(self, command: str, problem: str) -> None:
        super().__init__(f"`{command}`: {problem}" if command else problem)
        self.command = command


class CommandRefused(ShellError, PermissionError):
    """Raised if a command is malformed, if no rule allows it, or if no command may run on the folder, such as `/`.

    `allowed` lists the allowed commands if no rule allows this one, and is empty otherwise.
    """

    def __init__(self, command: str, problem: str, allowed: Sequence[str] = ()) -> None:
        super().__init__(command, problem)
        self.problem = problem
        self.allowed = tuple(allowed)


class CommandMissing(ShellError, FileNotFoundError):
    """Raised if a command's program does not exist or can't be executed."""

    def __init__(self, command: str, program: str, problem: str) -> None:
        super().__init__(command, problem)
        self.program = program


class ShellUnavailable(ShellError):
    """Raised if commands can't run, for example because the machine lacks a feature that the sandbox needs.

    The command has not run.
    """

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__("", f"{problem}. {hint}")
        self.problem = problem
        self.hint = hint
