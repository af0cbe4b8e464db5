"""Errors of requests to models. `ModelError`, their base, is in `handrail.errors`.

ModelError
├── ModelRateLimited                     transient: too many requests
├── ModelUnavailable (ConnectionError)   transient: not reachable, or not able to answer
├── ModelAnswerBroken (ValueError)       transient: the answer was cut off or can't be read
└── ModelRequestRefused (ValueError)     the request is wrong: a retry won't help
"""

from __future__ import annotations

from handrail.errors import ModelError


class ModelRateLimited(ModelError):
    """The provider takes no more for now."""

    transient = True


class ModelUnavailable(ModelError, ConnectionError):
    """The provider could not be reached, or could not answer."""

    transient = True


class ModelAnswerBroken(ModelError, ValueError):
    """The answer was cut off or can't be read, and nothing of it was used."""

    transient = True


class ModelRequestRefused(ModelError, ValueError):
    """The provider refuses the request itself: a key, a model, or a setting is wrong."""
