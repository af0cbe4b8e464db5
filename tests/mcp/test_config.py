"""`mcp.json` files of other programs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

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
    """Each server becomes a section. With several servers, the name of each is the prefix of its tools."""
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


@pytest.mark.parametrize(
    ("servers", "match"),
    [
        ({}, "names no servers"),
        ({"a": 3}, "not an object"),
        ({"a": {}}, 'needs a "command"'),
        ({"a": {"command": "x", "args": "y"}}, "as a list"),
        ({"a": {"url": "http://x/sse", "type": "sse"}}, "old SSE transport"),
        ({"a": {"command": "${NOT_SET_ANYWHERE}"}}, "NOT_SET_ANYWHERE"),
        ({"a": {"command": "x", "env": []}}, "objects of strings"),
    ],
)
def test_invalid_files(tmp_path: Path, servers: Any, match: str) -> None:
    """An invalid file is refused, and the error says what is wrong."""
    with pytest.raises(DefinitionError, match=match):
        load_servers(written(tmp_path, servers))


def test_file_that_is_no_json(tmp_path: Path) -> None:
    """If a file can't be read or parsed, the error names the file."""
    with pytest.raises(DefinitionError, match=r"mcp\.json can't be read"):
        load_servers(tmp_path / "mcp.json")
    (tmp_path / "mcp.json").write_text("{")
    with pytest.raises(DefinitionError, match="not valid JSON"):
        load_servers(tmp_path / "mcp.json")
