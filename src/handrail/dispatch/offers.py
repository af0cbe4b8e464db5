"""Offers: whether a model may be offered a tool that its provider runs itself.

Such a tool never passes the gate, because it has run before Handrail sees the answer. So the policies decide on the offer,
before each answer is requested, as they would on a call without arguments.
"""

from __future__ import annotations

import asyncio

from handrail.dispatch.attempt import Attempt
from handrail.dispatch.call import Call
from handrail.dispatch.failures import Refused
from handrail.dispatch.gate import Gate
from handrail.dispatch.policies import (
    check_policies,
    close_policy_context,
    close_resources,
    reason_to_ask,
)
from handrail.dispatch.transaction import new_transaction
from handrail.dispatch.views import end_subscriptions
from handrail.errors import DefinitionError
from handrail.isolation import isolated
from handrail.place import Place
from handrail.tools import ProviderTool
from handrail.tools.effect import refusal


async def why_withheld(gate: Gate, tool: ProviderTool, answer: Place) -> str | None:
    """Return why a tool must not be offered to the model; None if it may be offered.

    `answer` is the place of the answer that is about to be requested. The policies of the run and of the runs around it
    decide, unless the effect of the call around the run forbids the tool anyway. The offer is not a call: it has no
    number and no record, and it costs nothing. Raises `DefinitionError` if a policy asks.
    """
    outer = gate.frame.outer
    why_not = None if outer is None else refusal(outer.tool.effect, tool.effect)
    if why_not is not None:
        return why_not
    policies = gate.frame.policies
    if not policies:
        return None
    attempt = Attempt(_offer(gate, tool, answer), gate.frame)
    transaction = attempt.transaction = new_transaction(attempt, tool)
    try:
        if (waiting := check_policies(attempt, policies)) is not None:
            await isolated(waiting)
        if attempt.decision != "allow":
            raise DefinitionError(
                f"{tool.name} can't be offered: {reason_to_ask(attempt).rstrip('.')}, and nobody can be asked before the "
                f"provider runs it. Allow or deny it, as in CapabilityPolicy({{'provider.{tool.name}': 'allow'}})."
            )
    except Refused as refused:
        return str(refused)
    finally:
        attempt.close()
        transaction.drop()
        await close_resources(attempt)
        close_policy_context(attempt)
        end_subscriptions(attempt)
    return None


def _offer(gate: Gate, tool: ProviderTool, answer: Place) -> Call:
    """Create a call that stands for the offer in the policies' context. It is never run."""
    frame = gate.frame
    outer = frame.outer
    return Call(
        gate,
        tool.name,
        None,
        answer.id(frame.run_context.request_id),
        (tool.name,) if outer is None else (*outer.path, tool.name),
        asyncio.get_running_loop(),
        0,
        tool,
        parent=outer,
        depth=0 if outer is None else outer.depth + 1,
        _place=answer,
    )
