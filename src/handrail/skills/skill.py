"""`Skill`: a folder with a `SKILL.md` in the public Agent Skills format."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from handrail.errors import DefinitionError
from handrail.resources.directory.disk import open_beneath
from handrail.resources.paths import on_disk, spelled
from handrail.text.rendering import counted
from handrail.workers.front_matter import Finder, Sheet, WorkerProblem, parse_sheet, read_text

SKILL_FILE = "SKILL.md"
MOST_FILES = 512
"""Maximum number of files in a skill, as in MCP."""
MOST_BYTES = 16 * 2**20
"""Maximum total size of the files in a skill, as in MCP."""
_DEEPEST = 4
"""How deep below a folder of skills a skill's own folder may be."""
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")
_TOOL = re.compile(r"([^\s,()]+)(\([^)]*\))?")


class Skill(msgspec.Struct, frozen=True):
    """A skill: its front matter, its instructions, and the files of its folder."""

    name: str
    description: str
    folder: Path
    """The skill's folder, with all links resolved."""
    sheet: Sheet
    files: tuple[str, ...]
    """The paths of all files, relative to the folder, as Handrail spells them, sorted. Those whose name begins with a dot are left out."""

    @property
    def body(self) -> str:
        return self.sheet.body

    @property
    def front_matter(self) -> Mapping[str, Any]:
        """The front matter as its author wrote it, with all its fields."""
        return cast("Mapping[str, Any]", self.sheet.data)

    @property
    def allowed_tools(self) -> tuple[str, ...]:
        """The names of the tools in `allowed-tools`, which grants nothing."""
        given = self.front_matter.get("allowed-tools") or ""
        words = given if isinstance(given, str) else " ".join(map(str, cast("list[Any]", given)))
        return tuple(dict.fromkeys(match[1] for match in _TOOL.finditer(words)))

    def read(self, path: str) -> bytes:
        """Return the content of one of the skill's files, up to `MOST_BYTES`. Raises `OSError` if it is no regular file of the folder."""
        folder = os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            opened = open_beneath(folder, on_disk(path), os.O_RDONLY | os.O_NONBLOCK)
        finally:
            os.close(folder)
        with open(opened, "rb") as file:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise OSError(f"{path} is not a regular file")
            return file.read(MOST_BYTES)

    def check(self) -> None:
        """Raise `DefinitionError` if the folder now has something other than files, or too much."""
        find = Finder(self.folder / SKILL_FILE)
        _files_in(self.folder, find)
        if find.problems:
            raise DefinitionError(str(find.problems[0]))


def load_skills(folders: Iterable[str | Path]) -> tuple[list[Skill], list[WorkerProblem]]:
    """Read the skills in folders, and report the problems of those that are left out.

    Each folder is itself a skill, or has skills below it. Raises `DefinitionError` if a folder does not exist.
    """
    skills: dict[str, Skill] = {}
    problems: list[WorkerProblem] = []
    for given in folders:
        top = Path(os.path.abspath(Path(given).expanduser()))
        if not top.is_dir():
            raise DefinitionError(
                f"there is no folder of skills {str(given)!r}. Create it, or correct its path."
            )
        for folder in _skill_folders(top, _DEEPEST, problems):
            find = Finder(folder / SKILL_FILE)
            skill = load_skill(folder, find)
            if skill is not None and skill.name in skills:
                first = skills[skill.name].folder / SKILL_FILE
                line = skill.sheet.line_of("name")
                find.add(line, f"the name {skill.name!r} is taken by {first}", "Rename one of the skills.")
            problems += find.problems
            if skill is not None and not find.problems:
                skills[skill.name] = skill
    return list(skills.values()), problems


def _skill_folders(folder: Path, depth: int, problems: list[WorkerProblem]) -> Iterator[Path]:
    """Yield the folders that have a `SKILL.md`, and add those that can't be read to `problems`.

    Nothing below such a folder is a skill of its own. A link is followed only to a skill's folder, so the search ends.
    """
    if os.path.lexists(folder / SKILL_FILE):
        yield folder
    elif depth:
        try:
            inside = sorted(folder.iterdir())
        except OSError as error:
            find = Finder(folder)
            find.add(1, f"it can't be read: {error.strerror}", "Make it a readable folder.")
            problems += find.problems
            return
        for each in inside:
            is_far = each.is_symlink() and not os.path.lexists(each / SKILL_FILE)
            if os.path.isdir(each) and not is_far and not each.name.startswith("."):
                yield from _skill_folders(each, depth - 1, problems)


def load_skill(folder: Path, find: Finder, name: str | None = None) -> Skill | None:
    """Read a skill. Returns None, and reports the problems to `find`, if it is invalid.

    `name` is what its folder is called, if a link leads there by a different name.
    """
    files = _files_in(folder, find)
    if find.problems:
        return None
    text = read_text(folder / SKILL_FILE, find)
    sheet = None if text is None else parse_skill(text, name or folder.name, find)
    if sheet is None:
        return None
    return Skill(sheet.data["name"], sheet.data["description"], folder.resolve(), sheet, files)


def parse_skill(text: str, name: str, find: Finder) -> Sheet | None:
    """Parse a `SKILL.md` in a folder with this name. Returns None, and reports the problems to `find`, if it is invalid."""
    sheet = parse_sheet(text, find)
    if sheet is None:
        return None
    if not isinstance(cast("object", sheet.data), dict):
        find.add(2, "its front matter is not a mapping", "Write `name: ...` and `description: ...`.")
        return None
    for key, problem, hint in front_matter_problems(sheet.data, name):
        find.add(sheet.line_of(key), problem, hint)
    return None if find.problems else sheet


def front_matter_problems(front: Mapping[str, Any], folder: str) -> Iterator[tuple[str, str, str]]:
    """Yield the key, the problem and a hint for each value that is invalid for a skill in a folder with this name."""
    name, description = front.get("name"), front.get("description")
    if not isinstance(name, str) or len(name) > 64 or not _NAME.match(name):
        hint = "Use 1 to 64 lower-case letters, digits and single hyphens between them."
        yield "name", f"`name` is {_shown(name)}", hint
    elif name != folder:
        yield "name", f"`name` is {name!r}, and its folder {folder!r}", "Give both the same name."
    if not isinstance(description, str) or not description.strip() or len(description) > 1024:
        hint = "Say in at most 1024 characters what the skill does and when to use it."
        yield "description", f"`description` is {_shown(description)}", hint
    tools: Any = front.get("allowed-tools", "")
    if tools is not None and not isinstance(tools, str | list):
        yield "allowed-tools", f"`allowed-tools` is {_shown(tools)}", "Write the names of tools, with spaces."


def _shown(value: object) -> str:
    if isinstance(value, str) and len(value) > 64:
        return f"a text of {counted(len(value), 'character')}"
    return "missing" if value is None else repr(value)


def _files_in(folder: Path, find: Finder) -> tuple[str, ...]:
    """Return the paths of the files in a skill's folder, and report what must not be in it.

    A link may lead out of the folder, and a socket or a device to other programs. So neither is allowed, not even in hidden folders.
    """
    found: list[str] = []
    size = count = 0

    def unreadable(error: OSError) -> None:
        find.add(1, f"{spelled(error.filename)} can't be read: {error.strerror}", "Make it readable.")

    for parent, folders, files in os.walk(folder, onerror=unreadable):
        for name in (*folders, *files):
            at = os.path.join(parent, name)
            path = spelled(os.path.relpath(at, folder))
            count += 1
            try:
                status = os.lstat(at)
                leads = spelled(os.readlink(at)) if stat.S_ISLNK(status.st_mode) else ""
            except OSError as error:  # it was removed meanwhile
                unreadable(error)
                continue
            if leads:
                find.add(
                    1, f"{path} is a link to {leads}", "Put the file itself there: a skill has no links."
                )
            elif stat.S_ISREG(status.st_mode):
                size += status.st_size
                found.append(path)
            elif not stat.S_ISDIR(status.st_mode):
                said = f"{path} is not a regular file"
                find.add(1, said, "Remove it: a skill has only files and folders.")
        if size > MOST_BYTES or count > MOST_FILES:
            said = f"it has more than {MOST_FILES} files and folders, or more than {MOST_BYTES // 2**20} MiB"
            find.add(1, said, "Move what the skill does not need elsewhere.")
            break
    return tuple(sorted(each for each in found if not any(part.startswith(".") for part in each.split("/"))))
