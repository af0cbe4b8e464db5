"""`PrincipalFiles`: a separate folder for each principal's files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from handrail.errors import DefinitionError

if TYPE_CHECKING:
    from handrail.journal.protocol import Journal
    from handrail.resources.directory import DirectoryFilesystem

PLACEHOLDER = "{principal}"
_PLAIN = re.compile(r"[a-z0-9_@-]")
_MOST = 200


def folder_name(principal: str) -> str:
    """Return the name of a principal's folder. It is unique, even on disks that ignore case.

    Lowercase letters, digits and `_ @ -` are kept, and so are dots, except at the start. Other characters are written
    as `%` and two hexadecimal digits for each of their UTF-8 bytes. A long name is shortened and ends with a digest.
    """
    written = "".join(
        char
        if _PLAIN.fullmatch(char) or (char == "." and place)
        else "".join(f"%{byte:02x}" for byte in char.encode("utf-8", "surrogatepass"))
        for place, char in enumerate(principal)
    )
    if len(written) <= _MOST:
        return written
    return f"{written[:100]}={hashlib.sha256(principal.encode('utf-8', 'surrogatepass')).hexdigest()}"


class PrincipalFiles:
    """A folder for each principal, named by a pattern such as `work/{principal}`. It is created when it is first used.

    Raises `DefinitionError` if the pattern is invalid, or if the folder that contains the others does not exist.
    """

    def __init__(self, pattern: str, startup_files: Collection[str] = ()) -> None:
        path = Path(pattern)
        name = path.name
        if name.count(PLACEHOLDER) != 1 or PLACEHOLDER in str(path.parent):
            raise DefinitionError(
                f"{pattern!r} must contain {PLACEHOLDER} exactly once, in its last folder's name."
            )
        if not path.parent.is_dir():
            raise DefinitionError(
                f"{str(path.parent)!r} is not a folder. Create it first, or give another path."
            )
        self.root = path.parent.resolve()
        """The folder that contains the principals' folders."""
        self._before, _, self._after = name.partition(PLACEHOLDER)
        self._open: dict[Path, DirectoryFilesystem] = {}
        self._startup_files = startup_files

    def of(self, principal: str) -> DirectoryFilesystem:
        """Return the filesystem of one principal. Creates the folder if it does not exist.

        Raises `OSError` if the folder can't be created, and `DefinitionError` if it is a symbolic link or can't be opened.
        """
        path = self.root / f"{self._before}{folder_name(principal)}{self._after}"
        path.mkdir(mode=0o700, exist_ok=True)
        return self._at(path)

    async def recover(self, journal: Journal, /) -> None:
        """Finish the commits that an earlier process left unfinished, in every principal's folder."""
        for path in sorted(self.root.iterdir()):
            inside = path.name.startswith(self._before) and path.name.endswith(self._after)
            if inside and not path.name.startswith(".") and path.is_dir() and not path.is_symlink():
                await self._at(path).recover(journal)

    def _at(self, path: Path) -> DirectoryFilesystem:
        from handrail.resources.directory import DirectoryFilesystem

        if path.is_symlink():
            raise DefinitionError(f"{str(path)!r} is a symbolic link. Replace it with a folder.")
        found = self._open.get(path)
        if found is None:
            found = self._open[path] = DirectoryFilesystem(path, startup_files=self._startup_files)
        return found
