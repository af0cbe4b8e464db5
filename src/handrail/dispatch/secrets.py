"""Calls that were given a secret: what the record has of them, and that they are not run again from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pydantic_core

from handrail.schema.secrets import MASK, masks_in

if TYPE_CHECKING:
    from handrail.dispatch.call import LiveCall
    from handrail.tools import Tool


def had_secret(tool: Tool[Any, Any], arguments: Any) -> bool:
    """Is there a secret, or a mask in the place of one, among these arguments?"""
    return MASK in tool.mask(arguments)


def is_masked(arguments: Any) -> bool:
    """Do these arguments come from a record, with a mask where a secret was?"""
    if not isinstance(arguments, str | bytes):
        return False
    try:
        return any(True for _ in masks_in(pydantic_core.from_json(arguments)))
    except ValueError:
        return False


def enters_again(call: LiveCall) -> bool:
    """May this call's handler, once it was cut, be entered again from the top?

    Not where it was given a secret: that is kept nowhere, so nobody could give it again.
    """
    tool = call.tool
    return tool.enters_again and not (tool.secret and had_secret(tool, call.arguments))
