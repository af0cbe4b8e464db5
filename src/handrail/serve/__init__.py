"""Serve an app to any AG-UI client over SSE, together with Handrail's own web page.

    from handrail.serve import PromptSource, asgi
    app = asgi(PromptSource(prompt, adapter), journal=SqliteJournal("runs.db"))

`handrail serve APP` does the same for a module, a worker file or a folder. Needs `pip install 'handrail[serve]'`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from handrail.errors import DefinitionError

if TYPE_CHECKING:
    from handrail.serve.app import ServedApp, asgi
    from handrail.serve.limits import Limits
    from handrail.serve.oidc import OidcProvider
    from handrail.serve.people import People
    from handrail.serve.sources import PromptSource, Source, WorkersSource, load
    from handrail.serve.threads import Threads

__all__ = [
    "Limits",
    "OidcProvider",
    "People",
    "PromptSource",
    "ServedApp",
    "Source",
    "Threads",
    "WorkersSource",
    "asgi",
    "load",
]

REQUIRED = ("starlette", "uvicorn", "ag_ui")
"""The packages that the `serve` extra installs, by the names under which they are imported."""
_HOMES = {
    "Limits": "limits",
    "OidcProvider": "oidc",
    "People": "people",
    "PromptSource": "sources",
    "ServedApp": "app",
    "Source": "sources",
    "Threads": "threads",
    "WorkersSource": "sources",
    "asgi": "app",
    "load": "sources",
}


def missing_extra(name: str, extra: str = "serve") -> DefinitionError:
    """Return the error to raise when `name`, a package that `extra` installs, is missing."""
    return DefinitionError(
        f"serving needs {name}, which is not installed. Install it with: pip install 'handrail[{extra}]'"
    )


if not TYPE_CHECKING:  # a type checker would take every name for one of the package's

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"{__name__}.{home}"), name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in REQUIRED:
                raise
            raise missing_extra(missing, "oidc" if home == "oidc" else "serve") from None
