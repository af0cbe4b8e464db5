"""Models: classes for the providers' APIs. Each implements the `Model` protocol, which streams an answer in parts.

This module also defines the errors of model requests. `ModelError`, their base class, is in `handrail.errors`.

ModelError
├── ModelRateLimited                     transient: too many requests
├── ModelUnavailable (ConnectionError)   transient: not reachable, or not able to answer
├── ModelAnswerBroken (ValueError)       transient: the answer was cut off or can't be used
└── ModelRequestRefused (ValueError)     the request is wrong: a retry won't help
    └── ModelKeyMissing                    .variables: the environment variables that could hold the key; none is set
"""

from __future__ import annotations

from collections.abc import Sequence

from handrail.errors import ModelError


class ModelRateLimited(ModelError):
    """Raised if the provider's rate limit has been reached."""

    transient = True


class ModelUnavailable(ModelError, ConnectionError):
    """Raised if the provider can't be reached or can't answer."""

    transient = True


class ModelAnswerBroken(ModelError, ValueError):
    """Raised if the answer was cut off or can't be used, for example because it can't be read. No part of it is used."""

    transient = True


class ModelRequestRefused(ModelError, ValueError):
    """Raised if a request is refused, for example because its key, model or settings are wrong. A retry won't help."""


class ModelRequestTooLong(ModelRequestRefused):
    """Raised if a request has more tokens than the model's window. The run leaves out older messages once, and asks again."""


class ModelKeyMissing(ModelRequestRefused):
    """Raised if the environment has no key for a model's provider. Nothing was sent."""

    def __init__(self, model: str, variables: Sequence[str]) -> None:
        super().__init__(
            model,
            f"its key is missing. Set {variables[0]} in the environment; `handrail models` lists the models that "
            "work now",
        )
        self.variables = tuple(variables)
