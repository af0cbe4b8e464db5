"""`Pages`: serves the files of the web page."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from handrail.serve.refusals import RequestRefused

PAGE = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_NOT_BUILT = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Handrail</title>
<h1>The page is not built</h1>
<p>This installation comes from a source checkout that lacks the page's libraries. Run <code>scripts/page</code> in the
checkout (it needs npm). If you installed Handrail from the checkout, install it again. Then reload this page.</p>
<p>The server itself works: AG-UI clients can use <code>/agent</code>.</p>
</html>
"""


def is_built(folder: Path = PAGE) -> bool:
    """Return whether the page has its libraries, which a source checkout lacks until `scripts/page` has run."""
    vendor = folder / "vendor"
    return vendor.is_dir() and any(vendor.iterdir())


class Pages:
    """Serves the page's files. `asset` serves nothing outside one folder. `file` serves any path with a known suffix."""

    def __init__(self, folder: Path = PAGE) -> None:
        self._folder = folder.resolve()
        self._cache: dict[Path, tuple[tuple[int, int], str, bytes]] = {}

    def page(self, request: Request, name: str = "index.html") -> Response:
        """Return a page, or a 503 with instructions if its libraries are missing."""
        if not is_built(self._folder):
            return HTMLResponse(_NOT_BUILT, 503)
        return self.file(request, self._folder / name)

    def asset(self, request: Request, name: str) -> Response:
        """Return one of the page's files. Raises `RequestRefused` if the folder has no such file."""
        parts = name.split("/")
        if not all(_PART.fullmatch(part) for part in parts):
            raise _missing()
        path = self._folder.joinpath(*parts)
        if not path.resolve().is_relative_to(self._folder):
            raise _missing()
        return self.file(request, path)

    def file(self, request: Request, path: Path) -> Response:
        """Return a file with its media type and an ETag, or a 304 if the client already has it.

        Raises `RequestRefused` if the file can't be read, or if its suffix is unknown.
        """
        kind = _TYPES.get(path.suffix)
        try:
            stat = path.stat()
            if kind is None or not path.is_file():
                raise _missing()
            stamp = (stat.st_mtime_ns, stat.st_size)
            cached = self._cache.get(path)
            if cached is None or cached[0] != stamp:
                data = path.read_bytes()
                cached = self._cache[path] = (stamp, f'"{hashlib.sha256(data).hexdigest()[:32]}"', data)
        except OSError:
            raise _missing() from None
        _, tag, data = cached
        headers = {"etag": tag, "cache-control": "no-cache"}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers, media_type=kind)


def _missing() -> RequestRefused:
    return RequestRefused(404, "NotFound", "there is no such file")
