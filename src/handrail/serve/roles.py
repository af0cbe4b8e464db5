"""Roles: what each may do. This table is the only place that says so."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, get_args

Action = Literal["see", "run", "vote", "audit"]
"""What a request does.

- *see*: read one's own conversations, their history, and the server's numbers
- *run*: send messages, answer one's own questions, cancel, undo, delete
- *vote*: see and answer the questions of others that a policy puts to people like oneself
- *audit*: read the audit log
"""

ACTIONS: tuple[Action, ...] = get_args(Action)
ROLES = ("viewer", "user", "approver", "admin")
"""The built-in roles. Any other name is a role that policies can ask for; it allows nothing by itself."""

ALLOWED: Mapping[str, frozenset[Action]] = {
    "viewer": frozenset({"see"}),
    "user": frozenset({"see", "run"}),
    "approver": frozenset({"see", "run", "vote"}),
    "admin": frozenset({"see", "run", "vote", "audit"}),
}


def may(roles: Collection[str], action: Action) -> bool:
    """Return whether one of these roles allows the action."""
    return any(action in ALLOWED.get(role, ()) for role in roles)
