"""`ServedSkills`: skills as resources of an MCP server, with the Skills extension (SEP-2640)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote, unquote

import mcp_types as wire
from mcp.server.lowlevel.server import Server
from pydantic import BaseModel

from handrail.concurrency.threads import run_in_thread
from handrail.content import guess_type
from handrail.mcp.offers import FileResources, content_result, not_found
from handrail.prompt import Section
from handrail.prompt.section import walk
from handrail.skills import Skill, Skills
from handrail.skills.skill import SKILL_FILE, load_skill
from handrail.workers.front_matter import Finder
from mcp import MCPError

EXTENSION = "io.modelcontextprotocol/skills"
SCHEME = "skill://"


class SkillParams(wire.RequestParams):
    """The params of `skills/get`."""

    uri: str


class FolderParams(wire.PaginatedRequestParams):
    """The params of `resources/directory/read`."""

    uri: str


class SkillResource(BaseModel):
    """A file of a skill."""

    uri: str
    digest: str
    """The SHA-256 digest of its bytes, as `sha256:` and 64 hexadecimal digits."""
    size: int


class SkillEntry(BaseModel):
    """What a server says of one skill."""

    uri: str
    """The address of its `SKILL.md`."""
    frontmatter: dict[str, Any]
    resources: list[SkillResource] | Literal["dynamic"]


class SkillList(wire.CacheableResult):
    """The result of `skills/list`."""

    result_type: Literal["complete"] = "complete"
    skills: list[SkillEntry]
    next_cursor: str | None = None


class OneSkill(wire.CacheableResult):
    """The result of `skills/get`."""

    result_type: Literal["complete"] = "complete"
    skill: SkillEntry


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class ServedSkills:
    """The skills of a prompt's sections on a server, beside the files that it serves as resources, if any.

    A skill is read again for each request, so its entry and its files agree. One that has become invalid is not served meanwhile.
    """

    def __init__(self, sections: Sequence[Section[Any]], files: FileResources | None) -> None:
        found = [each for _, each in walk(sections) if isinstance(each, Skills)]
        self._skills: Mapping[str, Skill] = {
            name: skill for section in reversed(found) for name, skill in section.skills.items()
        }
        self._files = files

    def __bool__(self) -> bool:
        return bool(self._skills)

    def declare(self, server: Server[Any]) -> None:
        """Add the extension and its methods to a server."""
        server.extensions[EXTENSION] = {"directoryRead": True}
        server.add_request_handler("skills/list", wire.PaginatedRequestParams, self._list)
        server.add_request_handler("skills/get", SkillParams, self._get)
        server.add_request_handler("resources/directory/read", FolderParams, self._folder)

    async def resources(self, request: Any, params: Any) -> wire.ListResourcesResult:
        """Return the `SKILL.md` of each skill on the first page, before the files."""
        listed = wire.ListResourcesResult(resources=[])
        if self._files is not None:
            listed = await self._files.list(request, params)
        if params is None or params.cursor is None:
            mine = [
                wire.Resource(
                    uri=_uri(skill), name=name, description=skill.description, mime_type="text/markdown"
                )
                for name, skill in sorted(self._skills.items())
            ]
            listed = listed.model_copy(update={"resources": [*mine, *listed.resources]})
        return listed

    async def read(self, request: Any, params: wire.ReadResourceRequestParams) -> wire.ReadResourceResult:
        """Return a file's content. Raises `MCPError` if there is none at this address."""
        uri = str(params.uri)
        if not uri.startswith(SCHEME) and self._files is not None:
            return await self._files.read(request, params)
        name, _, path = unquote(uri.removeprefix(SCHEME)).partition("/")
        skill = await self._current(name) if uri.startswith(SCHEME) else None
        if skill is None or path not in skill.files:
            raise not_found(request, uri)
        try:
            content = await run_in_thread(lambda: skill.read(path))
        except OSError:
            raise not_found(request, uri) from None
        return content_result(uri, content, path)

    async def _list(self, request: Any, params: Any) -> SkillList:
        entries = [await self._entry(name) for name in sorted(self._skills)]
        return SkillList(skills=[entry for entry in entries if entry is not None])

    async def _get(self, request: Any, params: SkillParams) -> OneSkill:
        name = params.uri.removeprefix(SCHEME).removesuffix(f"/{SKILL_FILE}")
        entry = await self._entry(name) if name in self._skills else None
        if entry is None or entry.uri != params.uri:
            raise MCPError(wire.INVALID_PARAMS, f"no skill is served at {params.uri}")
        return OneSkill(skill=entry)

    async def _folder(self, request: Any, params: FolderParams) -> wire.ListResourcesResult:
        """Return what is directly in a skill's folder, or in a folder in it."""
        name, _, path = unquote(params.uri.removeprefix(SCHEME)).partition("/")
        skill = await self._current(name) if params.uri.startswith(SCHEME) else None
        children = [] if skill is None else _children_of(skill, path)
        if not children or params.uri.endswith("/"):
            raise MCPError(wire.INVALID_PARAMS, f"no folder is served at {params.uri}")
        return wire.ListResourcesResult(resources=children)

    async def _current(self, name: str) -> Skill | None:
        known = self._skills.get(name)
        if known is None:
            return None
        return await run_in_thread(lambda: load_skill(known.folder, Finder(known.folder / SKILL_FILE), name))

    async def _entry(self, name: str) -> SkillEntry | None:
        skill = await self._current(name)
        return None if skill is None else await run_in_thread(lambda: _entry_of(skill))


def _uri(skill: Skill, path: str = SKILL_FILE) -> str:
    return f"{SCHEME}{skill.name}/{quote(path)}"


def _children_of(skill: Skill, path: str) -> list[wire.Resource]:
    """Return the files and folders directly in one of a skill's folders; [] if it has no such folder."""
    above = f"{path}/" if path else ""
    found = (each.removeprefix(above).partition("/") for each in skill.files if each.startswith(above))
    children = {name: bool(below) for name, below, _ in found}
    return [
        wire.Resource(
            uri=_uri(skill, above + name),
            name=name,
            mime_type="inode/directory" if is_folder else guess_type(b"", name),
        )
        for name, is_folder in children.items()
    ]


def _entry_of(skill: Skill) -> SkillEntry | None:
    try:
        contents = {path: skill.read(path) for path in skill.files}
    except OSError:  # it changes while it is read
        return None
    resources = [
        SkillResource(uri=_uri(skill, path), digest=digest_of(content), size=len(content))
        for path, content in contents.items()
    ]
    return SkillEntry(uri=_uri(skill), frontmatter=dict(skill.front_matter), resources=resources)
