"""MCP servers from npm, installed by scripts/components, and an event that is set when a server lists a tool."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from handrail.mcp import McpTools, StdioServer
from support import ROOT

FOLDER = ROOT / ".components/mcp-servers"


def command(name: str, *arguments: object) -> list[str]:
    """Return the command that starts a server, such as "filesystem".

    Fails the test if the servers are not installed.
    """
    package = "old-filesystem" if name == "old-filesystem" else f"@modelcontextprotocol/server-{name}"
    if not (FOLDER / "stamp").exists():
        pytest.fail("the MCP servers from npm are not installed. Run: scripts/components")
    return [
        str(FOLDER / "node"),
        str(FOLDER / "node_modules" / package / "dist/index.js"),
        *map(str, arguments),
    ]


class Program:
    """A server behind a script, so that a test can replace its program and kill its process."""

    def __init__(self, script: Path, *words: str, **env: str) -> None:
        self._script = script
        self._env = env
        self.install(*words)

    def install(self, *words: str) -> None:
        """Set the command that runs the next time the server is started."""
        quoted = " ".join(f"'{word}'" for word in words)
        self._script.write_text(f"echo $$ > '{self._script}.pid'\nexec {quoted}\n")

    def section(self, name: str, **options: Any) -> McpTools:
        return McpTools(
            name,
            server=StdioServer(["sh", str(self._script)], self._env),
            prefix=f"{name}_",
            **options,
        )

    def kill(self) -> None:
        os.kill(int(Path(f"{self._script}.pid").read_text()), signal.SIGKILL)


def event_of_listing(section: McpTools, name: str, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return an event that is set when the server lists a tool with this name."""
    listed = asyncio.Event()
    account = section.server.account("local")
    take = account.listed

    def notice(described: Any) -> None:
        take(described)
        if any(each.name == name for each in described):
            listed.set()

    monkeypatch.setattr(account, "listed", notice)
    return listed
