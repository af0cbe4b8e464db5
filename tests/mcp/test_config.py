"""Tests for loading the servers in `mcp.json` files of other programs."""

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import support
from handrail.errors import DefinitionError
from handrail.mcp import load_servers

SERVER = Path(support.__path__[0]) / "mcp_server.py"


def written(folder: Path, servers: Any, key: str = "mcpServers") -> Path:
    """Write an mcp.json and return its path."""
    path = folder / "mcp.json"
    path.write_text(json.dumps({key: servers}))
    return path


async def test_servers_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server becomes a section, except disabled ones. If there are several, a tool's name begins with its server's name.

    Variables are expanded, and characters that a section's key can't contain are replaced.
    """
    monkeypatch.setenv("TRIAL", str(SERVER))
    entry = {"type": "stdio", "command": sys.executable, "args": ["${env:TRIAL}"], "alwaysAllow": ["echo"]}
    (alone,) = load_servers(written(tmp_path, {"one": entry, "off": {"disabled": True}}))
    both = load_servers(
        written(tmp_path, {"one": entry, "two.b": {"url": "http://127.0.0.1:9/${PORT:-mcp}"}}, "servers")
    )
    async with alone, both[0]:
        assert "echo" in {tool.name for tool in alone.current_tools()}
        assert "one_echo" in {tool.name for tool in both[0].current_tools()}
    assert both[1].key == "two-b"


@given(
    st.lists(st.text("aA_-b", min_size=1, max_size=6) | st.text("a_", min_size=29, max_size=34), min_size=2)
)
def test_no_server_can_take_the_name_of_a_tool(names: list[str]) -> None:
    """No server's prefix begins with another server's, so their tools have different names, whatever tools they list."""
    named = {name.lower(): {"command": "x"} for name in names}
    with tempfile.TemporaryDirectory() as folder:
        sections = load_servers(written(Path(folder), named))
    prefixes = [section.server.prefix for section in sections]
    pairs = itertools.permutations(prefixes, 2)
    assert not [pair for pair in pairs if pair[0].startswith(pair[1])]


@pytest.mark.parametrize(
    ("servers", "match"),
    [
        ({}, "names no servers"),
        ({"a": 3}, "not an object"),
        ({"a.b": {"command": "x"}, "A_b": {"command": "x"}}, "policies can't tell apart"),
        ({"a": {}}, 'needs a "command"'),
        ({"a": {"command": "x", "args": "y"}}, "as a list"),
        ({"a": {"url": "http://x/sse", "type": "sse"}}, "old SSE transport"),
        (
            {"a": {"command": "${NOT_SET_ANYWHERE}"}},
            r"^\S+, server 'a' needs the environment variable NOT_SET_ANYWHERE",
        ),
        ({"a": {"command": "x", "env": []}}, "objects of strings"),
    ],
)
def test_invalid_files(tmp_path: Path, servers: Any, match: str) -> None:
    """An invalid file is refused, and the error says what is wrong."""
    with pytest.raises(DefinitionError, match=match):
        load_servers(written(tmp_path, servers))


def test_files_as_other_programs_write_them(tmp_path: Path) -> None:
    """A byte order mark is skipped, and a key whose value is null counts as absent."""
    entry = {"command": "server", "args": None, "env": None, "cwd": None, "url": None, "headers": None}
    path = written(tmp_path, {"one": entry})
    path.write_text(path.read_text(), "utf-8-sig")
    (section,) = load_servers(path)
    assert section.server.name == "one"


def test_file_that_is_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "mcp.json").write_text("[" * 100_000)
    with pytest.raises(DefinitionError, match="not valid JSON"):
        load_servers(tmp_path / "mcp.json")


def test_file_that_is_no_json(tmp_path: Path) -> None:
    """A file that can't be read or is not JSON is refused with an error that says so."""
    with pytest.raises(DefinitionError, match=r"mcp\.json can't be read"):
        load_servers(tmp_path / "mcp.json")
    (tmp_path / "mcp.json").write_text("{")
    with pytest.raises(DefinitionError, match="not valid JSON"):
        load_servers(tmp_path / "mcp.json")


def test_issuer_of_a_login(tmp_path: Path) -> None:
    """A file may name the issuer of a server's login, and origins on which the issuer's endpoints may be."""
    oauth = {"issuer": "https://login.example.org", "endpoints": ["https://tokens.example.org"]}
    (section,) = load_servers(
        written(tmp_path, {"mail": {"url": "https://mail.example.org/mcp", "oauth": oauth}})
    )
    login = cast(Any, section.server).server.login
    assert (login.issuer, login.endpoints) == (oauth["issuer"], ("https://tokens.example.org",))
    for wrong in ({"issuer": 3}, {"endpoints": "https://tokens.example.org"}, {"endpoints": [3]}):
        with pytest.raises(DefinitionError, match="oauth"):
            load_servers(written(tmp_path, {"mail": {"url": "https://mail.example.org/mcp", "oauth": wrong}}))
