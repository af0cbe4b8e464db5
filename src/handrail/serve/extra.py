"""What serving needs beside the core: the extra `serve`."""

from __future__ import annotations

from handrail.errors import DefinitionError

NEEDED = ("starlette", "uvicorn", "ag_ui")


def missing_extra(name: str) -> DefinitionError:
    """What to say where a part of it is not installed."""
    return DefinitionError(
        f"serving needs {name}, which is not installed. Install it with: pip install 'handrail[serve]'"
    )
