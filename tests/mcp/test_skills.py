"""Skills over MCP (SEP-2640), both ways: served to the official client, and read from servers."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any, Literal

import mcp_types as wire
import pytest

from handrail import MemoryFilesystem, Prompt, Skills
from handrail.mcp import ToolServer
from handrail.mcp.skills import EXTENSION, OneSkill, SkillEntry, SkillList, SkillParams
from mcp import Client, MCPError
from skills.test_skills import skill

modes = pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])


class ListSkills(wire.PaginatedRequest[Literal["skills/list"]]):
    method: Literal["skills/list"] = "skills/list"


class GetSkill(wire.Request[SkillParams, Literal["skills/get"]]):
    method: Literal["skills/get"] = "skills/get"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Provide a folder with two skills, one with a file that is not text."""
    skill(
        tmp_path / "skills", "refunds", "license: MIT\nmetadata:\n  version: '2'\n", references__a_DOT_md="é"
    )
    place = skill(tmp_path / "skills", "letters")
    (place / "seal.bin").write_bytes(b"\xff\x00")
    (place / ".git").mkdir()
    (place / ".git" / "config").write_text("hidden")
    return tmp_path / "skills"


async def content_at(client: Client, uri: str) -> bytes:
    (content,) = (await client.read_resource(uri)).contents
    if isinstance(content, wire.BlobResourceContents):
        return base64.b64decode(content.blob)
    return content.text.encode()


@modes
async def test_each_skill_is_listed_with_all_its_files(mode: Any, folder: Path) -> None:
    """The entries have the front matter as it was written, and a digest for every file, which the files have when they are read."""
    server = ToolServer(Prompt("guide", [Skills(folder)]))
    async with Client(server.server, mode=mode) as client:
        listed = await client.session.send_request(ListSkills(), SkillList)
        one = await client.session.send_request(
            GetSkill(params=SkillParams(uri="skill://refunds/SKILL.md")), OneSkill
        )
        for entry in listed.skills:
            assert isinstance(entry.resources, list)
            for each in entry.resources:
                content = await content_at(client, each.uri)
                assert each.digest == f"sha256:{hashlib.sha256(content).hexdigest()}"
                assert each.size == len(content)
    assert [(each.uri, _paths(each)) for each in listed.skills] == [
        ("skill://letters/SKILL.md", ["skill://letters/SKILL.md", "skill://letters/seal.bin"]),
        ("skill://refunds/SKILL.md", ["skill://refunds/SKILL.md", "skill://refunds/references/a.md"]),
    ]
    assert one.skill == listed.skills[1]
    assert one.skill.frontmatter == {
        "name": "refunds",
        "description": "How to refunds.",
        "license": "MIT",
        "metadata": {"version": "2"},
    }


def _paths(entry: SkillEntry) -> list[str]:
    return [each.uri for each in entry.resources if not isinstance(each, str)]


@modes
async def test_what_is_not_served_is_an_error(mode: Any, folder: Path) -> None:
    """Neither unknown skills nor files outside a skill, hidden ones or folders are read."""
    server = ToolServer(Prompt("guide", [Skills(folder)]))
    wrong = (
        "skill://other/SKILL.md",
        "skill://letters",
        "skill://letters/none.md",
        "skill://letters/.git/config",
        "skill://letters/../refunds/SKILL.md",
        "skill://letters/%2e%2e/refunds/SKILL.md",
        "file:///etc/passwd",
    )
    async with Client(server.server, mode=mode) as client:
        for uri in wrong:
            with pytest.raises(MCPError, match="no such resource"):
                await client.read_resource(uri)
            with pytest.raises(MCPError, match="no skill is served") as refused:
                await client.session.send_request(GetSkill(params=SkillParams(uri=uri)), OneSkill)
            assert refused.value.code == wire.INVALID_PARAMS


@modes
async def test_skills_and_files_are_resources_together(mode: Any, folder: Path) -> None:
    """A server that serves files too lists each skill once, before the files, and reads both."""
    files = MemoryFilesystem()
    files.write("a.txt", "a file")
    server = ToolServer(
        Prompt("guide", [Skills(folder)]), files=lambda principal: files, resource_address="files:///"
    )
    async with Client(server.server, mode=mode) as client:
        listed = (await client.list_resources()).resources
        assert await content_at(client, "files:///a.txt") == b"a file"
    assert [str(each.uri) for each in listed] == [
        "skill://letters/SKILL.md",
        "skill://refunds/SKILL.md",
        "files:///a.txt",
    ]
    assert listed[0].description == "How to letters."


async def test_a_changed_skill_is_listed_as_it_is_now(folder: Path) -> None:
    """The entry agrees with the files after a change, and a skill that has become invalid is not served."""
    server = ToolServer(Prompt("guide", [Skills(folder)]))
    skill(folder, "refunds", "license: BSD\n")
    (folder / "letters" / "x").symlink_to("/etc/passwd")
    async with Client(server.server) as client:
        listed = await client.session.send_request(ListSkills(), SkillList)
        with pytest.raises(MCPError):
            await client.read_resource("skill://letters/x")
    assert [each.frontmatter.get("license") for each in listed.skills] == ["BSD"]


async def test_only_a_server_with_skills_declares_the_extension(folder: Path) -> None:
    """A client of the version that has extensions sees it, and a server without skills knows no such method."""
    async with Client(ToolServer(Prompt("guide", [Skills(folder)])).server) as client:
        assert (client.server_capabilities.extensions or {})[EXTENSION] == {}
        assert client.server_capabilities.resources is not None
    server = ToolServer(Prompt("guide", "Guide."))
    async with Client(server.server) as client:
        assert EXTENSION not in (client.server_capabilities.extensions or {})
        with pytest.raises(MCPError):
            await client.session.send_request(ListSkills(), SkillList)
