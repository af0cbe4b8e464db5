"""A served app: AG-UI over SSE for any client, and a page of our own with it.

    from handrail.serve import PromptSource, asgi
    app = asgi(PromptSource(prompt, adapter), journal=SqliteJournal("runs.db"))

`handrail serve APP` does this for a module, a worker's file or a folder. Needs `pip install 'handrail[serve]'`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from handrail.serve.extra import NEEDED, missing_extra

if TYPE_CHECKING:
    from handrail.serve.app import ServedApp, asgi
    from handrail.serve.limits import Limits
    from handrail.serve.source import PromptSource, Source, WorkersSource, load
    from handrail.serve.threads import Threads

__all__ = ["Limits", "PromptSource", "ServedApp", "Source", "Threads", "WorkersSource", "asgi", "load"]

_HOMES = {
    "Limits": "limits",
    "PromptSource": "source",
    "ServedApp": "app",
    "Source": "source",
    "Threads": "threads",
    "WorkersSource": "source",
    "asgi": "app",
    "load": "source",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{home}"), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in NEEDED:
            raise
        raise missing_extra(missing) from None
