"""`AccessLog`: a file with one line of JSON for each request."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from handrail.errors import DefinitionError


class AccessLog:
    """Appends one line for each request to a file. If the file is new, only its owner can read it.

    A line contains the template of the route, but no ids from the path, no query and no body. Each line is written with
    one system call, so several processes can share the file. Raises `DefinitionError` if the file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DefinitionError(
                f"can't write the access log {str(path)!r}: {error.strerror}. Give another file."
            ) from None

    def write(self, line: dict[str, Any]) -> None:
        os.write(self._file, (json.dumps(line, ensure_ascii=True) + "\n").encode())
