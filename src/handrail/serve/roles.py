"""`may`: decides whether a role allows an action, by the table `ALLOWED`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, get_args

Action = Literal["see", "run", "vote", "audit"]
"""The kinds of action that roles allow.

- *see*: read your own conversations, their history, and the server's metrics
- *run*: send messages, answer your own questions, cancel, undo, delete
- *vote*: see other people's questions and vote on them, if a policy lets one of your roles do so
- *audit*: read the audit log
"""

ACTIONS: tuple[Action, ...] = get_args(Action)
ROLES = ("viewer", "user", "approver", "admin")
"""The built-in roles. Policies can require other roles too, but those allow no action on their own."""

ALLOWED: Mapping[str, frozenset[Action]] = {
    "viewer": frozenset({"see"}),
    "user": frozenset({"see", "run"}),
    "approver": frozenset({"see", "run", "vote"}),
    "admin": frozenset({"see", "run", "vote", "audit"}),
}


def may(roles: Collection[str], action: Action) -> bool:
    """Return whether one of these roles allows the action."""
    return any(action in ALLOWED.get(role, ()) for role in roles)
