"""`Skills`: a section with skills, each of which is shown as its description until the model opens it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
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


SkillName = Annotated[str, Field(description="The name of the skill, as the list of skills gives it.")]
Reads = Callable[[str, str, ToolContext], Awaitable[tuple[bytes, str]]]
"""Returns the content of a skill's file, and what the model is told above it. Raises `SkillRefused`."""
Finds = Callable[[str, str, ToolContext], AbstractAsyncContextManager[tuple[Skill, str]]]
"""Finds a skill, and the normalized path of one of its files, for as long as it is used. Raises `SkillRefused`."""


class SkillRefused(Exception):
    """Raised with a message for the model if a skill, or one of its files, can't be used."""


def path_in(skill: str, files: Collection[str], path: str) -> str:
    """Return the normalized path of one of a skill's files. Raises `SkillRefused` if there is none."""
    try:
        parsed = parse_file_path(path).path
    except FileError as error:
        raise SkillRefused(str(error)) from None
    if parsed not in files:
        raise SkillRefused(f"The skill {skill!r} has no file {path!r}. Its files are: {listed(files)}.")
    return parsed


def listed(files: Collection[str]) -> str:
    """Return the paths of files as text, with at most `_MOST_LISTED` of them."""
    more = len(files) - _MOST_LISTED
    return ", ".join([*list(files)[:_MOST_LISTED], *([f"and {more} more"] if more > 0 else [])])


def reading_tool(read: Reads, **options: Any) -> Tool[Any, Any]:
    """Create a tool that shows the files of skills."""

    @tool(effect="read", **options)
    async def read_skill_file(
        skill: SkillName,
        path: Annotated[
            str, Field(description="A path in the skill's folder, such as `references/forms.md`.")
        ] = SKILL_FILE,
        from_line: Annotated[int, Field(ge=1, description="The first line to show.")] = 1,
        lines: Annotated[int, Field(ge=1, le=PAGE_LINES, description="How many lines to show.")] = PAGE_LINES,
        *,
        context: ToolContext,
    ) -> ToolResult[str]:
        try:
            content, above = await read(skill, path, context)
            return ToolResult.ok(above + page_of(path, content.decode(), from_line, lines))
        except SkillRefused as error:
            return ToolResult.error(str(error))
        except UnicodeDecodeError as error:
            return ToolResult.error(
                f"{path} is not text: it has {len(error.object)} bytes that are not UTF-8."
            )

    return read_skill_file


def running_tool(find: Finds, shell: Shell, reach: Any, **options: Any) -> Tool[Any, Any]:
    """Create a tool that runs scripts of skills on a call's files, in the sandbox, with the skill's folder mounted read-only."""

    @tool(**options)
    async def run_skill_script(
        skill: SkillName,
        script: Annotated[
            str, Field(description="The script's path in the skill's folder, such as `scripts/fill.py`.")
        ],
        arguments: Annotated[
            list[str],
            Field(
                description=f"The script's arguments. In them, `{_PLACE}` is the path of the skill's folder."
            ),
        ] = [],  # noqa: B006 (it is never changed)
        folder: Annotated[
            str, Field(description="The folder to run it in, relative to the files' folder.")
        ] = ".",
        stdin: Annotated[str | None, Field(description="The script's standard input.")] = None,
        *,
        context: ToolContext,
    ) -> ToolResult[str]:
        try:
            async with find(skill, script, context) as (owner, path):
                await run_in_thread(owner.check)
                place = str(owner.folder)
                program = _PROGRAMS.get(Path(path).suffix)
                if program is None:
                    raise SkillRefused(f"The names of scripts end in {', '.join(_PROGRAMS)}.")
                announce(context, SkillUsed, owner.name, owner.description, path)
                command = [
                    program,
                    f"{place}/{on_disk(path)}",
                    *(each.replace(_PLACE, place) for each in arguments),
                ]
                mounted = shell.mounting(owner.folder)
                finished = await mounted.run_on(context.filesystem, command, cwd=folder, stdin=stdin)
        except (SkillRefused, DefinitionError) as error:
            return ToolResult.error(f"{script} was not run. {error}")
        except ShellError as error:
            return ToolResult.error(str(error))
        announce(context, CommandRun, program, finished.exit_code)
        said = finished.render()
        return ToolResult.ok(said) if finished.ok else ToolResult.error(said)

    object.__setattr__(run_skill_script, "reach", reach)
    return run_skill_script


def _tools(skills: Mapping[str, Skill], shell: Shell) -> list[Tool[Any, Any]]:
    def find(name: str, path: str) -> tuple[Skill, str]:
        skill = skills.get(name)
        if skill is None:
            raise SkillRefused(f"There is no skill {name!r}. The skills are: {', '.join(skills) or 'none'}.")
        return skill, path_in(name, skill.files, path)

    async def read(name: str, path: str, context: ToolContext) -> tuple[bytes, str]:
        skill, parsed = find(name, path)
        announce(context, SkillUsed, skill.name, skill.description, parsed)
        try:
            return await run_in_thread(lambda: skill.read(parsed)), ""
        except OSError as error:
            raise SkillRefused(f"{path} can't be read: {error.strerror or error}.") from None

    reading = reading_tool(
        read, capabilities={"skills.read"}, description="Show a text file of a skill, in pages."
    )
    if not any(Path(path).suffix in _PROGRAMS for skill in skills.values() for path in skill.files):
        return [reading]
    running = running_tool(
        lambda name, path, context: nullcontext(find(name, path)),
        shell,
        shell.reach,
        effect="irreversible" if shell.reach else "staged",
        capabilities={"proc.exec", "fs.write"},
        description="Run a script of a skill. Its changes are kept only if it exits with code 0.",
    )
    return [reading, running]


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
        tools = _tools(by_name, shell or Shell())
        super().__init__(
            title=title,
            key=key,
            template=(_TEMPLATE if len(tools) == 1 else _TEMPLATE_SCRIPTS).replace("$", "$$"),
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
