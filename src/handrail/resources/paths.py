"""Paths under a root, each parsed to one normalized form. A path that could lead out of the root is refused.

Every Handrail filesystem parses its paths here, so the same paths are valid in memory and on disk, and each is normalized in
the same way. On disk, reserved names and links that lead out of the root are refused too.

A path is always text that can be sent and recorded, but a name on a disk is bytes. So a name that is not UTF-8, or that
contains a control character, a line separator or a backslash, is spelled with escapes: `caf\\xe9` is `caf` followed by
the byte `e9`. Each name has exactly one spelling. `spelled` and `on_disk` convert between the two forms.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, Protocol, runtime_checkable

import msgspec

from handrail.errors import PathRefused
from handrail.schema.problems import describe_kind

MAX_NAME = 255
"""Maximum bytes in one name, as in common filesystems."""
MAX_PATH = 32 * 1024
"""Maximum bytes in a whole path. A system call accepts fewer than 4096, so a long path is opened in parts."""

RESERVED = ".handrail"
"""Name of the folder where Handrail keeps its records. On disk, tools can't access a folder with this name, and commands can't change one."""

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_ODD = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\\\\\udc80-\udcff]")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_REMEMBERED = 4096
_SHORT = 256
_COMPARED = 500


def is_reserved(name: str) -> bool:
    """Return whether a name is reserved in every folder: `.handrail`, or `.<name>.handrail` for a staging folder."""
    return name.endswith(RESERVED) and name.startswith(".")


def reserved_in(path: str) -> str:
    """Return a normalized path up to and including its first reserved name, or "" if it contains none."""
    if RESERVED in path:
        names = path.split("/")
        for at, name in enumerate(names, 1):
            if is_reserved(name):
                return "/".join(names[:at])
    return ""


def spelled(name: str) -> str:
    """Return Handrail's spelling of a name or path that Python has decoded from the disk."""
    return _ODD.sub(_escaped, name) if _ODD.search(name) else name


def _escaped(found: re.Match[str]) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(found[0]))


def on_disk(path: str) -> str:
    """Return the path on disk that Handrail spells this way, as Python decodes it. The reverse of `spelled`."""
    if "\\" not in path:
        return path
    return os.fsdecode(_ESCAPE.sub(lambda found: bytes([int(found[1], 16)]), os.fsencode(path)))


class ParsedPath(msgspec.Struct, frozen=True, gc=False):
    """A parsed path. For the root, all three strings are empty."""

    path: str
    folder: str
    name: str
    as_folder: bool
    """Whether the path was written in a form that only a folder can have: `.`, `docs/` or `docs/.`."""


@runtime_checkable
class HasLinks(Protocol):
    """A filesystem that may contain links."""

    def resolved(self, path: str, /) -> str:
        """Return where a path leads: normalized, with every link resolved."""
        ...


_paths: dict[str, ParsedPath] = {}
_file_paths: dict[str, ParsedPath] = {}


def parse_path(path: str) -> ParsedPath:
    """Parse a path to its normalized form.

    Raises `PathRefused` if the path is invalid. The message says what is wrong and what to do.
    """
    try:
        return _paths[path]
    except KeyError:
        return _remember(_paths, path, _parse(path))
    except TypeError:
        _refuse_type(path)


def parse_file_path(path: str) -> ParsedPath:
    """Parse the path of a file. Raises `PathRefused` if it is invalid, or written as a folder's path, such as `docs/`."""
    try:
        return _file_paths[path]
    except (KeyError, TypeError):
        made = parse_path(path)
    if made.as_folder:
        raise PathRefused(path, "this names a folder, not a file. Name a file, as in 'docs/notes.txt'")
    return _remember(_file_paths, path, made)


def _remember(known: dict[str, ParsedPath], path: str, made: ParsedPath) -> ParsedPath:
    if len(path) <= _SHORT:
        if len(known) >= _REMEMBERED:
            known.clear()
        known[path] = made
    return made


def join(folder: str, name: str) -> str:
    """Join a folder and a name. The root is the empty string."""
    return f"{folder}/{name}" if folder else name


def split(path: str) -> tuple[str, str]:
    """Split a normalized path into folder and name."""
    folder, _, name = path.rpartition("/")
    return folder, name


def ancestors(path: str) -> Iterable[str]:
    """Yield the folders that contain a path, outermost first, without the root."""
    at = path.find("/")
    while at >= 0:
        yield path[:at]
        at = path.find("/", at + 1)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the existing name that was probably meant, or None if no name is similar.

    If there are more than 500 names, only a name that differs in nothing but case is found.
    """
    names = sorted(names)
    for other in names:
        if other.casefold() == name.casefold():
            return other
    close = get_close_matches(name, names, n=1) if len(names) <= _COMPARED else ()
    return close[0] if close else None


def _parse(path: object) -> ParsedPath:
    if not isinstance(path, str):
        _refuse_type(path)
    if not path:
        raise PathRefused(path, "the path is empty. Name a file or a folder; '.' is the root")
    if found := _CONTROL.search(path):
        raise PathRefused(path, f"it contains the control character {found[0]!r}. Remove it")
    path = _NOT_UTF8.sub(_escaped, path)  # the caller may pass a name as Python has decoded it from the disk
    if "\\" in path:
        _check_escapes(path)
    if path.startswith("/") or _ADDRESS.match(path):
        raise PathRefused(
            path, "it is absolute. Paths start at the root of the files, as in 'docs/notes.txt'"
        )
    if path == "~" or path.startswith("~/"):
        raise PathRefused(
            path,
            "it starts with '~', and there is no home folder here. Write the path from the root; './~' is a file named '~'",
        )
    names = [name for name in path.split("/") if name not in ("", ".")]
    _check_names(path, names)
    as_folder = not names or path.endswith(("/", "/."))
    *folders, last = names or [""]
    return ParsedPath("/".join(names), "/".join(folders), last, as_folder)


def _check_escapes(path: str) -> None:
    raw = on_disk(path)
    if "\0" in raw:
        raise PathRefused(path, "it contains the control character '\\x00'. Remove it")
    if spelled(raw) != path:
        if path.count("\\") != len(_ESCAPE.findall(os.fsencode(path))):
            raise PathRefused(path, "it contains a backslash. Separate folders with '/'")
        raise PathRefused(path, f"its escapes stand for ordinary characters. Write it as {spelled(raw)}")


def _check_names(path: str, names: list[str]) -> None:
    if ".." in names:
        raise PathRefused(
            path, "'..' is not allowed, because it could lead out of the root. Write the path from the root"
        )
    try:
        sizes = [len(os.fsencode(on_disk(name)) if "\\" in name else name.encode()) for name in names]
    except UnicodeEncodeError as error:
        character = error.object[error.start : error.start + 1]
        raise PathRefused(path, f"{character!r} can't be encoded as UTF-8. Use ordinary characters") from None
    if sizes and max(sizes) > MAX_NAME:
        raise PathRefused(_cut(path), f"a name in it is longer than {MAX_NAME} bytes. Use a shorter one")
    if sum(sizes) + len(sizes) - 1 > MAX_PATH:
        raise PathRefused(
            _cut(path), f"it is longer than {MAX_PATH} bytes. Use fewer folders or shorter names"
        )


def _cut(path: str) -> str:
    return f"{path[:40]}…"


def _refuse_type(path: object) -> NoReturn:
    raise PathRefused(str(path), f"a path must be a str, not {describe_kind(path)}. Pass a str")


def folder_of(files: object) -> str:
    """Return the path of a filesystem's root, `workspace:NAME` for a workspace, or "" if the files are not on disk."""
    address: object = getattr(files, "address", "")
    if isinstance(address, str) and address:
        return address
    root: object = getattr(files, "root", None)
    return str(root) if isinstance(root, Path) else ""


def folder_id_of(files: object) -> str:
    """Return the id that a filesystem's folder keeps when it is moved, or "" if it has none."""
    found: object = getattr(files, "folder_id", "")
    return found if isinstance(found, str) else ""


PART = 3800
"""Maximum bytes of a path that are passed to one system call. A name of 255 bytes can be added to it."""
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


@contextlib.contextmanager
def reach(path: str | os.PathLike[str]) -> Generator[str]:
    """Provide a path that a system call accepts and that leads to the same file, while the block runs.

    A short path is provided unchanged. For a long one, the folders above the file are opened, but not the file. So the
    file need not exist, and `reach` does not follow it if it is a link.
    """
    given = os.fspath(path)
    if len(os.fsencode(given)) <= PART:
        yield given
        return
    folder, name = os.path.split(given)
    here = -1
    try:
        for part in parts_of(os.fsencode(folder)):
            inner = os.open(part, _FOLDER, dir_fd=None if here < 0 else here)
            if here >= 0:
                os.close(here)
            here = inner
        yield f"/proc/self/fd/{here}/{name}"
    finally:
        if here >= 0:
            os.close(here)


def parts_of(path: bytes) -> Iterator[bytes]:
    """Split a path into parts that a system call accepts. Each part is relative to the one before it."""
    start = 0
    while len(path) - start > PART:
        end = path.rindex(b"/", start + 1, start + PART)
        yield path[start:end]
        start = end + 1
    yield path[start:]
