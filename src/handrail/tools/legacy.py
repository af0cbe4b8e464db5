"""`legacy_handler`: handlers from before there was a context, for the time of a migration."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from handrail.errors import ToolDefinitionError
from handrail.tools.signature import caller_namespace, positional, read


def legacy_handler(function: Callable[[Any], Any]) -> Any:
    """Wrap a handler that does not take `context`, for the time of a migration.

    Called as `function(params)`. Warns `DeprecationWarning` once, here where it is defined.
    """
    name = str(getattr(function, "__name__", function))
    signature = read(name, function, caller_namespace(), "handler")
    if "context" in signature.parameters:
        raise ToolDefinitionError(
            name, "it takes `context` already", "Use it as it is, without `legacy_handler`."
        )
    positional(name, signature, 1, "handler", "(params, *, context: ToolContext) -> ToolResult[...]")
    warnings.warn(
        f"handler {name!r} does not take `context`: add `*, context: ToolContext` and drop `legacy_handler`",
        DeprecationWarning,
        stacklevel=2,
    )
    if signature.is_async:

        async def async_wrapper(params: Any, *, context: Any) -> Any:
            return await function(params)

        wrapper: Any = async_wrapper
    else:

        def plain_wrapper(params: Any, *, context: Any) -> Any:
            return function(params)

        wrapper = plain_wrapper
    hints: Mapping[str, Any] = signature.hints
    names = list(signature.parameters)
    wrapper.__name__ = name
    wrapper.__annotations__ = {
        **({"params": hints[names[0]]} if names and names[0] in hints else {}),
        **({"return": hints["return"]} if "return" in hints else {}),
    }
    return wrapper
