"""Journals that released versions wrote: see `scripts/released-journal`.

with journals.of_kind("postgres"):
    name = released.restore(13, tmp_path)       the name of a journal of schema 13, as it was written
"""

from __future__ import annotations

import gzip
import importlib
import re
import shutil
from pathlib import Path
from typing import Any

from handrail.journal.any_journal import AnyJournal, open_by_name
from support import postgres

FOLDER = Path(__file__).parents[1] / "journal/released"
"""The folder of the journals and of `released_shop`, the app of their runs."""
KINDS = ("sqlite", "postgres")
VERSIONS = (13, 17)
"""The schemas of the releases whose journals are kept here."""


def restore(kind: str, version: int, folder: Path) -> str:
    """Restore the journal that the release with this schema wrote, below a folder or in a new schema of a database.

    Returns the journal's name. Its key is `postgres.KEY`, in `HANDRAIL_KEY`.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if kind == "sqlite":
        for name in ("db", "people.db"):
            file = folder / f"runs.{name}"
            file.touch(mode=0o600)
            with gzip.open(FOLDER / f"{version}.{name}.gz") as packed, file.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
        return str(folder / "runs.db")
    import psycopg

    from handrail.journal.postgres.address import parse_url

    url = postgres.new_url()
    address = parse_url(url)
    script = gzip.decompress((FOLDER / f"{version}.sql.gz").read_bytes()).decode()
    script = re.sub(r"^\\.*$", "", script, flags=re.MULTILINE).replace(f"released_{version}", address.schema)
    with psycopg.connect(address.conninfo) as connection:
        connection.execute(script)  # pyright: ignore[reportArgumentType, reportCallIssue]  # our own text
    return url


def shop() -> Any:
    """Import the app whose runs the journals contain. Its folder must be on the path."""
    return importlib.import_module("released_shop")


def opened(name: str) -> AnyJournal:
    """Open a restored journal. Close it again."""
    return open_by_name(name, watches=False)
