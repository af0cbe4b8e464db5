"""The app of a run: where its prompt is found again, and a digest of its code."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from pathlib import Path
from typing import Any, cast

from handrail.errors import RunError
from handrail.neighbours import find_app, import_app
from handrail.prompt import Prompt


def code_of(app: str) -> str:
    """Return a digest of an app's own files: its module, or the `.md` and `.py` files in its folder; "" if there is no app.

    Nothing is imported, except the packages around a module. Raises `ImportError` if there is no such module or file.
    """
    if not app:
        return ""
    module, colon, _ = app.partition(":")
    if colon and not app.endswith(".md"):
        loaded = sys.modules.get(module)
        spec = find_app(module) if loaded is None else None
        if loaded is None and spec is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        files = [Path(str(spec.origin if spec else getattr(loaded, "__file__", "")))]
    elif app.endswith(".md") and not Path(app).is_file():
        raise ImportError(f"there is no file {app!r}")
    else:
        folder = Path(app) if Path(app).is_dir() else Path(app).parent
        files = sorted([*folder.glob("*.md"), *folder.glob("*.py")])
    found = hashlib.sha256()
    for file in files:
        with contextlib.suppress(OSError):
            found.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()


def prompt_of(run_id: str, app: str) -> Prompt[Any]:
    """Import and return the prompt of an app, `module:name`.

    Raises `RunError` if `app` has a different form, if importing it raises `ImportError`, or if it has no prompt.
    """
    module, colon, name = app.partition(":")
    if not colon or app.endswith(".md"):
        raise RunError(
            run_id,
            f"its app {app!r} does not have the form module:name"
            if app
            else "it began without a reference to its prompt",
            "Pass the prompt: resume(run_id, prompt), or --app module:name on the command line.",
        )
    try:
        found: Any = getattr(import_app(module), name, None)
    except ImportError as error:
        raise RunError(
            run_id,
            f"its prompt is at {app!r}, which can't be imported: {error}",
            "Resume where it can be imported, or pass the prompt: resume(run_id, prompt), or --app module:name on the command line.",
        ) from error
    prompt: object = getattr(found, "prompt", found)  # the prompt itself, or an agent that has one
    if not isinstance(prompt, Prompt):
        raise RunError(
            run_id,
            f"there is no Prompt at {app!r}",
            "Pass the prompt: resume(run_id, prompt), or --app module:name on the command line.",
        )
    return cast("Prompt[Any]", prompt)
