"""Serve an app to any AG-UI client over SSE, together with Handrail's own web page.

    from handrail.serve import PromptSource, asgi
    app = asgi(PromptSource(prompt, adapter), journal=SqliteJournal("runs.db"))

`handrail serve APP` does the same for a module, a worker file or a folder. Needs `pip install 'handrail[serve]'`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from handrail.errors import DefinitionError
from handrail.imports import names_on_first_use

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


def missing_extra(name: str, extra: str = "serve", user: str = "serving") -> DefinitionError:
    """Return the error to raise when `name`, a package that `extra` installs and that `user` needs, is missing."""
    return DefinitionError(
        f"{user} needs {name}, which is not installed. Install it with: pip install 'handrail[{extra}]'"
    )


if not TYPE_CHECKING:  # a type checker would take every name for one of the package's
    __getattr__ = names_on_first_use(
        __name__,
        {
            "app": "ServedApp asgi",
            "limits": "Limits",
            "oidc": "OidcProvider",
            "people": "People",
            "sources": "PromptSource Source WorkersSource load",
            "threads": "Threads",
        },
        lambda missing, home: (
            missing_extra(missing, "oidc" if home == "oidc" else "serve") if missing in REQUIRED else None
        ),
    )
