"""`ShellTools`: a section with a tool that runs commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import PurePath
from typing import Annotated, Any, ClassVar

from pydantic import Field

from handrail.context import ToolContext
from handrail.errors import DefinitionError
from handrail.events import CommandRun
from handrail.prompt import MarkdownSection
from handrail.protocols import ToolPolicy
from handrail.resources.shell import Shell
from handrail.resources.shell.shell_errors import ShellError
from handrail.run.call import announce
from handrail.schema.problems import describe_kind
from handrail.text.spelling import checked_arguments
from handrail.tools import Tool, ToolResult, tool

_TEMPLATE = """\
Commands run in the files' folder and are passed as a list of arguments. No shell interprets them, so `|`, `>`, `*` and
`&&` are plain text. What a command writes in the folder is kept only if it exits with code 0. Otherwise the folder stays
as it was. Outside the folder a command can write only to `/tmp`, which is deleted when the command ends. A command
can't rename a folder that existed before. Move the files in it instead."""


def run_command_tool(shell: Shell) -> Tool[Any, Any]:
    """Create the tool `run_command`, which runs commands in this shell.

    A command's changes to the folder belong to the call and are undone with it. If the shell lets commands reach
    something else, such as the network or an exposed folder, they can have other effects too. The tool's effect is then
    `irreversible`, so a `CapabilityPolicy` asks before each command, unless it is configured otherwise.
    """

    @tool(
        effect="irreversible" if shell.reach else "staged",
        capabilities={"proc.exec", "fs.write"},
        description="Run a command. Its changes are kept only if it exits with code 0.",
    )
    async def run_command(
        command: Annotated[
            list[str], Field(min_length=1, description='Program and arguments: ["ls", "-l"].')
        ],
        folder: Annotated[
            str, Field(description="The folder to run it in, relative to the files' folder.")
        ] = ".",
        stdin: Annotated[str | None, Field(description="The command's standard input.")] = None,
        *,
        context: ToolContext,
    ) -> ToolResult[str]:
        try:
            finished = await shell.run_on(context.filesystem, command, cwd=folder, stdin=stdin)
        except ShellError as error:
            return ToolResult.error(str(error))
        announce(context, CommandRun, PurePath(command[0]).name, finished.exit_code)
        said = finished.render()
        return ToolResult.ok(said) if finished.ok else ToolResult.error(said)

    object.__setattr__(run_command, "reach", shell.reach)
    return run_command


@checked_arguments
@dataclasses.dataclass(frozen=True, init=False)
class ShellTools(MarkdownSection[Any]):
    """A section with the tool `run_command`, for the commands that the shell's rules allow.

    Commands work on the run's filesystem: `evaluate(..., filesystem=DirectoryFilesystem(folder))`.
    """

    needs_files: ClassVar[bool] = True

    def __init__(
        self,
        shell: Shell,
        *,
        policies: Iterable[ToolPolicy] = (),
        title: str = "Commands",
        key: str = "commands",
    ) -> None:
        if not isinstance(shell, Shell):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
            raise DefinitionError(
                f"ShellTools takes a Shell, not {describe_kind(shell)}. Write ShellTools(Shell([Allow('make', ...)]))."
            )
        allowed = "".join(f"\n- `{rule}`" for rule in shell.rules.worded) or "\n- nothing"
        template = f"{_TEMPLATE} These may be run:\n{allowed}"
        super().__init__(
            title=title,
            key=key,
            template=template.replace("$", "$$"),
            tools=(run_command_tool(shell),),
            policies=tuple(policies),
        )
