"""A gateway to a server that misbehaves on request, with an approver and an ordinary user."""

import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path

from handrail.journal.sqlite import SqliteJournal
from handrail.mcp.gateway import Gateway, load_rules
from handrail.serve.people import People
from support import SUPPORT

SECRET = "correct horse battery"
POLICIES = """\
policies:
  - capability:
      allow: [mcp.trial.echo]
      deny: [mcp.trial.hang]
  - rate_limit: {most: 3, per_seconds: 60}
limits:
  seconds: 30
"""


@asynccontextmanager
async def gateway(
    folder: Path, policies: str = POLICIES, *, trust_client: bool = False
) -> AsyncGenerator[Gateway]:
    """Open a gateway whose journal and users are in this folder, where `support.serving` finds them too."""
    servers = {"trial": {"command": sys.executable, "args": ["-S", str(SUPPORT / "mcp_server.py")]}}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    (folder / "policies.yaml").write_text(policies)
    rules = load_rules(folder / "policies.yaml", trust_client=trust_client)
    journal = SqliteJournal(folder / "runs.db", watch=0.02)
    with closing(journal), closing(People(folder / "people.db")) as people:
        for name, roles in (("ann", ["approver"]), ("bob", ["user"])):
            if people.find(name) is None:
                people.add(name, roles, SECRET)
        made = Gateway(
            folder / "mcp.json", rules, voters=None if trust_client else people.who_may_vote, journal=journal
        )
        try:
            yield made
        finally:
            await made.calls.stop()
            await made.close()
