"""Errors that a provider reports inside an answer, after its response has begun.

Such an error has no HTTP status. Its kind is recognised by its code, status or type, which are numbers or words
depending on the provider.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is validated.

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from handrail.errors import ModelError
from handrail.models import ModelAnswerBroken, ModelRateLimited, ModelRequestRefused, ModelUnavailable

if TYPE_CHECKING:
    from handrail.models.http import Endpoint

_PASSING_IN_ANSWER = frozenset({408, 409, 425})
"""Statuses below 500, apart from 429, after which a retry may help."""
_FAILURES: tuple[tuple[str, type[ModelError]], ...] = (
    ("insufficient_quota", ModelRequestRefused),
    ("billing", ModelRequestRefused),
    ("rate_limit", ModelRateLimited),
    ("resource_exhausted", ModelRateLimited),
    ("too_many_requests", ModelRateLimited),
    ("tool_use_failed", ModelAnswerBroken),
    ("json_validate_failed", ModelAnswerBroken),
    ("overloaded", ModelUnavailable),
    ("timeout", ModelUnavailable),
    ("unavailable", ModelUnavailable),
    ("server_error", ModelUnavailable),
    ("internal", ModelUnavailable),
    ("invalid", ModelRequestRefused),
    ("authentication", ModelRequestRefused),
    ("permission", ModelRequestRefused),
    ("forbidden", ModelRequestRefused),
    ("not_found", ModelRequestRefused),
    ("too_large", ModelRequestRefused),
    ("context_length", ModelRequestRefused),
    ("policy", ModelRequestRefused),
    ("moderation", ModelRequestRefused),
)
"""Words in a code, status or type, and the errors that they mean. The first that is found counts."""


def failure_in_answer(endpoint: Endpoint, error: Any) -> ModelError:
    """Create the error for a failure that the provider reported inside an answer.

    A failure of an unknown kind becomes `ModelUnavailable`, which is retried.
    """
    said = error.get("message") or error if isinstance(error, dict) else error
    kind, status = _failure_kind(error)
    problem = f"it failed in the middle of its answer: {endpoint.quoted(said)}"
    return kind(endpoint.model, problem, status=status)


def _failure_kind(error: Any) -> tuple[type[ModelError], int | None]:
    marks = list(_marks(error))
    words = " ".join(mark.lower() for mark in marks if isinstance(mark, str) and not mark.isdecimal())
    for word, kind in _FAILURES:
        if word in words:
            return kind, None
    for mark in marks:
        status = int(mark) if isinstance(mark, str) and mark.isdecimal() and len(mark) == 3 else mark
        if type(status) is int and 400 <= status < 600:
            return _by_status(status), status
    return ModelUnavailable, None


def _marks(error: Any) -> Iterator[Any]:
    """Yield the values that identify the kind of an error, beginning with its code."""
    if not isinstance(error, dict):
        return
    for name in ("code", "status", "status_code", "type"):
        value = error.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            yield value
    metadata = error.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("error_type"), str):
        yield metadata["error_type"]


def _by_status(status: int) -> type[ModelError]:
    if status == 429:
        return ModelRateLimited
    return ModelUnavailable if status >= 500 or status in _PASSING_IN_ANSWER else ModelRequestRefused
