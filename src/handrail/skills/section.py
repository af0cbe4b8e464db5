"""`Skills`: a section with skills, each of which is shown as its description until the model opens it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

from pydantic import Field

from handrail.concurrency.threads import run_in_thread
from handrail.context import ToolContext
from handrail.errors import DefinitionError, FileError
from handrail.events import CommandRun, SkillUsed
from handrail.prompt import MarkdownSection
from handrail.protocols import ToolPolicy
from handrail.resources.paths import on_disk, parse_file_path
from handrail.resources.shell import Shell
from handrail.resources.shell.shell_errors import ShellError
from handrail.run.call import announce
from handrail.sections.files import PAGE_LINES, page_of
from handrail.skills.skill import SKILL_FILE, Skill, load_skills
from handrail.text.spelling import checked_arguments
from handrail.tools import Tool, ToolResult, tool
from handrail.workers.front_matter import WorkerProblem

log = logging.getLogger("handrail.skills")

_MOST_LISTED = 50
_PLACE = "{skill}"
_TEMPLATE = """\
Skills are instructions for particular tasks. Before you do such a task, open its skill. The paths in a skill are relative to its own
folder, which is not the folder of your files: read_skill_file shows its files."""
_TEMPLATE_SCRIPTS = f"""{_TEMPLATE}
run_skill_script runs its scripts in the folder of your files. What a script changes there is kept only if it exits with code 0."""

SkillName = Annotated[str, Field(description="The name of the skill.")]
Lines = Annotated[int, Field(ge=1, le=PAGE_LINES, description="How many lines to show.")]
FirstLine = Annotated[int, Field(ge=1, description="The first line to show.")]

_PROGRAMS = {
    ".py": "python3",
    ".sh": "sh",
    ".bash": "bash",
    ".js": "node",
    ".mjs": "node",
    ".rb": "ruby",
    ".pl": "perl",
}
"""The program that runs a script, by its suffix."""


class NoSuchFile(Exception):
    """Raised with a message for the model if it names a skill or a file that does not exist."""


def file_of(skills: Mapping[str, Skill], name: str, path: str) -> tuple[Skill, str]:
    """Return a skill and the normalized path of one of its files. Raises `NoSuchFile` if there is none."""
    skill = skills.get(name)
    if skill is None:
        raise NoSuchFile(f"There is no skill {name!r}. The skills are: {', '.join(skills) or 'none'}.")
    try:
        parsed = parse_file_path(path).path
    except FileError as error:
        raise NoSuchFile(str(error)) from None
    if parsed not in skill.files:
        raise NoSuchFile(f"The skill {name!r} has no file {path!r}. Its files are: {listed(skill.files)}.")
    return skill, parsed


def listed(files: Collection[str]) -> str:
    """Return the paths of files as text, with at most `_MOST_LISTED` of them."""
    more = len(files) - _MOST_LISTED
    return ", ".join([*list(files)[:_MOST_LISTED], *([f"and {more} more"] if more > 0 else [])])


def shown_file(path: str, content: bytes, from_line: int, lines: int) -> ToolResult[str]:
    """Return a page of a skill's file as a result."""
    try:
        return ToolResult.ok(page_of(path, content.decode(), from_line, lines))
    except UnicodeDecodeError:
        return ToolResult.error(f"{path} is not text: it has {len(content)} bytes that are not UTF-8.")


async def run_script(
    shell: Shell,
    skill: Skill,
    path: str,
    arguments: list[str],
    folder: str,
    stdin: str | None,
    context: ToolContext,
) -> ToolResult[str]:
    """Run a script of a skill on a call's files, with the skill's folder mounted read-only."""
    try:
        await run_in_thread(skill.check)
    except DefinitionError as error:
        return ToolResult.error(f"The script was not run. {error}")
    place = str(skill.folder)
    program = _PROGRAMS.get(Path(path).suffix)
    if program is None:
        known = ", ".join(_PROGRAMS)
        return ToolResult.error(f"{path} can't be run. The names of scripts end in {known}.")
    announce(context, SkillUsed, skill.name, skill.description, path)
    command = [program, f"{place}/{on_disk(path)}", *(each.replace(_PLACE, place) for each in arguments)]
    try:
        finished = await shell.mounting(skill.folder).run_on(
            context.filesystem, command, cwd=folder, stdin=stdin
        )
    except ShellError as error:
        return ToolResult.error(str(error))
    announce(context, CommandRun, program, finished.exit_code)
    said = finished.render()
    return ToolResult.ok(said) if finished.ok else ToolResult.error(said)


Script = Annotated[
    str, Field(description="The script's path in the skill's folder, such as `scripts/fill.py`.")
]
Arguments = Annotated[
    list[str],
    Field(description=f"The script's arguments. In them, `{_PLACE}` is the path of the skill's folder."),
]
Folder = Annotated[str, Field(description="The folder to run it in, relative to the files' folder.")]
Stdin = Annotated[str | None, Field(description="The script's standard input.")]


def _reading_tool(skills: Mapping[str, Skill]) -> Tool[Any, Any]:
    @tool(effect="read", capabilities={"skills.read"}, description="Show a text file of a skill, in pages.")
    async def read_skill_file(
        skill: SkillName,
        path: Annotated[
            str, Field(description="A path in the skill's folder, such as `references/forms.md`.")
        ],
        from_line: FirstLine = 1,
        lines: Lines = PAGE_LINES,
        *,
        context: ToolContext,
    ) -> ToolResult[str]:
        try:
            owner, parsed = file_of(skills, skill, path)
            announce(context, SkillUsed, owner.name, owner.description, parsed)
            content = await run_in_thread(lambda: owner.read(parsed))
        except NoSuchFile as error:
            return ToolResult.error(str(error))
        except OSError as error:
            return ToolResult.error(f"{path} can't be read: {error.strerror or error}.")
        return shown_file(path, content, from_line, lines)

    return read_skill_file


def _running_tool(skills: Mapping[str, Skill], shell: Shell) -> Tool[Any, Any]:
    @tool(
        effect="irreversible" if shell.reach else "staged",
        capabilities={"proc.exec", "fs.write"},
        description="Run a script of a skill. Its changes are kept only if it exits with code 0.",
    )
    async def run_skill_script(
        skill: SkillName,
        script: Script,
        arguments: Arguments = [],  # noqa: B006 (it is never changed)
        folder: Folder = ".",
        stdin: Stdin = None,
        *,
        context: ToolContext,
    ) -> ToolResult[str]:
        try:
            owner, path = file_of(skills, skill, script)
        except NoSuchFile as error:
            return ToolResult.error(str(error))
        return await run_script(shell, owner, path, arguments, folder, stdin, context)

    object.__setattr__(run_skill_script, "reach", shell.reach)
    return run_skill_script


@checked_arguments
@dataclasses.dataclass(frozen=True, init=False, eq=False)
class Skills(MarkdownSection[Any]):
    """A section with skills: `Skills("skills/")`. Each is a section that is shown as its description until the model opens it.

    Every folder is a skill, or has skills below it: folders with a `SKILL.md` in the public Agent Skills format. They are read when
    the section is created. A skill that is invalid is left out, and a warning in the log names its file and the line; `problems` has
    them all.

    The model reads a skill's files with `read_skill_file`. If a skill has scripts, it runs them with `run_skill_script`, in the
    run's folder and always in a sandbox, which shows the skill's folder read-only. The sandbox has the settings of `shell`, whose
    rules don't count. Unless it reaches more than its folder, a script's changes are undone with its call. A skill's
    `allowed-tools` grants nothing. If it names a tool that the prompt does not have, a warning says so. The two tools are always
    listed, also if the model finds the prompt's tools by searching.

    Raises `DefinitionError` if a folder does not exist, or if `shell` may run commands without a sandbox.
    """

    def __init__(
        self,
        *folders: str | Path,
        shell: Shell | None = None,
        policies: Iterable[ToolPolicy] = (),
        title: str = "Skills",
        key: str = "skills",
    ) -> None:
        if not folders:
            raise DefinitionError("Skills has no folder. Write Skills('skills/').")
        if shell is not None and not shell.contained:
            raise DefinitionError(
                "scripts of skills run only in a sandbox. Leave out the shell's contained=False."
            )
        skills, problems = load_skills(folders)
        for problem in problems:
            log.warning("%s The skill is left out.", problem)
        by_name = {skill.name: skill for skill in skills}
        has_scripts = any(Path(path).suffix in _PROGRAMS for skill in skills for path in skill.files)
        tools = [_reading_tool(by_name)]
        if has_scripts:
            tools.append(_running_tool(by_name, shell or Shell()))
        super().__init__(
            title=title,
            key=key,
            template=(_TEMPLATE_SCRIPTS if has_scripts else _TEMPLATE).replace("$", "$$"),
            tools=tools,
            policies=tuple(policies),
            children=tuple(map(_section_of, skills)),
        )
        object.__setattr__(self, "_skills", by_name)
        object.__setattr__(self, "problems", tuple(problems))

    search: ClassVar[bool | None] = False
    problems: tuple[WorkerProblem, ...] = dataclasses.field(init=False, repr=False)
    """What is wrong with the skills that were left out."""

    @property
    def skills(self) -> Mapping[str, Skill]:
        """The skills by name."""
        return cast("Mapping[str, Skill]", self.__dict__["_skills"])

    def note_tools(self, names: Collection[str]) -> None:
        for skill in self.skills.values():
            missing = [name for name in skill.allowed_tools if name not in names]
            if missing:
                line = skill.sheet.line_of("allowed-tools")
                log.warning(
                    "%s:%d: `allowed-tools` names %s, which the prompt does not have. It grants nothing in any case.",
                    skill.folder / SKILL_FILE,
                    line,
                    ", ".join(missing),
                )


def _section_of(skill: Skill) -> MarkdownSection[Any]:
    others = [path for path in skill.files if path != SKILL_FILE]
    files = f"\n\nFiles of the skill {skill.name}: {listed(others)}." if others else ""
    section = MarkdownSection[Any](
        title=skill.name,
        key=skill.name,
        template=(skill.body + files).replace("$", "$$"),
        summary=skill.description.replace("$", "$$"),
        visibility="summary",
    )
    object.__setattr__(section, "skill", skill.name)
    return section
