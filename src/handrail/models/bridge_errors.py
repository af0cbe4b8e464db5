"""Errors of a bridged model, as Handrail's own and without its key."""

from __future__ import annotations

import os
import re
from importlib import import_module
from typing import Any

from handrail.errors import ModelError
from handrail.models.model_errors import (
    ModelAnswerBroken,
    ModelRateLimited,
    ModelRequestRefused,
    ModelUnavailable,
)

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 6
_MOST_SAID = 500


def failure_of(model: str, error: Exception, silence: float) -> ModelError:
    """Convert an error of pydantic-ai. An unexpected one counts as an unreadable answer."""
    known: Any = import_module("pydantic_ai.exceptions")
    said = _without_secrets(_said(error))[:_MOST_SAID]
    status: int | None = getattr(error, "status_code", None)
    wait: float | None = getattr(error, "retry_after", None)
    if isinstance(error, known.ModelRequestRejectedError | known.ModelQuotaExceededError | known.UserError):
        return ModelRequestRefused(model, said, status=status)
    if isinstance(error, known.ModelRateLimitError) or status == 429:
        return ModelRateLimited(model, said, status=status, retry_after=wait)
    if isinstance(error, known.ModelTimeoutError):
        return ModelUnavailable(model, f"nothing came for {silence:g} seconds")
    if isinstance(error, known.ModelAPIError):
        if status is not None and 400 <= status < 500 and status not in (408, 409, 425):
            return ModelRequestRefused(model, said, status=status)
        return ModelUnavailable(model, said, status=status, retry_after=wait)
    return ModelAnswerBroken(model, said)


def _said(error: Exception) -> str:
    body = getattr(error, "body", None)
    if isinstance(body, dict):
        inner: Any = body.get("error", body)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if isinstance(inner, dict) and inner.get("message"):  # pyright: ignore[reportUnknownMemberType]
            return str(inner["message"])  # pyright: ignore[reportUnknownArgumentType]
    return str(error) or type(error).__name__


def _without_secrets(text: str) -> str:
    """Remove keys: some providers echo them, and only the provider knows which variable they came from."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET.search(name):
            text = text.replace(value, "[the key]")
    return text
