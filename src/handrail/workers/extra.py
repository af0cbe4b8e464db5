"""What workers need beside the core: the extra `workers`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from handrail.errors import WorkerError


def needed(module: str) -> Any:
    """Import a part of the extra `workers`, or say how to get it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != missing:
            raise
        raise WorkerError(
            f"workers need {missing}, which is not installed. Run `pip install 'handrail[workers]'`."
        ) from None
