"""Effects: what a call may change, and whether that can be undone. `EFFECTS` has the rules for each effect."""

from __future__ import annotations

from typing import Literal

import msgspec

Effect = Literal["pure", "read", "staged", "idempotent", "compensable", "irreversible"]

AfterCrash = Literal["run again", "run again with the same key", "probe, else compensate", "outcome unknown"]
UnderPolicy = Literal["allow", "allow in scope", "by capability", "ask"]


class EffectRules(msgspec.Struct, frozen=True):
    """The rules for running a call with a given effect."""

    strength: int
    """Rank of the effect. A transactional call may only use tools of its own strength or weaker."""
    writes: bool
    """Whether the call may change the session's state and the filesystem."""
    transactional: bool
    """Whether everything that the call does is inside the transaction, so that it can simply be run again."""
    retried: bool
    """Whether the call may be retried after its handler has raised `TransientError`."""
    after_crash: AfterCrash
    previewed: bool
    """Whether the call can run before it is approved, so that a person sees its diff before deciding."""
    policy: UnderPolicy
    """The decision of a `CapabilityPolicy` that has no verdict for the call, unless the tool delegates."""


EFFECTS: dict[Effect, EffectRules] = {
    "pure": EffectRules(0, False, True, True, "run again", False, "allow"),
    "read": EffectRules(1, False, True, True, "run again", False, "allow"),
    "staged": EffectRules(2, True, True, True, "run again", True, "allow in scope"),
    "idempotent": EffectRules(3, True, False, True, "run again with the same key", False, "by capability"),
    "compensable": EffectRules(4, True, False, False, "probe, else compensate", False, "ask"),
    "irreversible": EffectRules(5, True, False, False, "outcome unknown", False, "ask"),
}


def effect_refusal(outer: Effect, inner: Effect) -> str | None:
    """Return why a call with the effect `outer` may not use a tool with the effect `inner`, or None if it may."""
    if EFFECTS[outer].transactional and EFFECTS[inner].strength > EFFECTS[outer].strength:
        return f"a {outer!r} call may not use a tool whose effect is {inner!r}"
    return None
