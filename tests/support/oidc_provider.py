"""An OpenID Connect provider: a mock server from PyPI, in its own process."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from support import PATIENCE
from support.reserved_port import reserved_port


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


def fetch(address: str, form: dict[str, str] | None = None) -> tuple[int, str]:
    """Return the status of a response and the address it redirects to, or "". Redirects are not followed."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay())
    data = None if form is None else urllib.parse.urlencode(form).encode()
    try:
        with opener.open(address, data, timeout=PATIENCE) as said:
            return said.status, ""
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers.get("location", "")


@contextmanager
def provider(users_claims: Sequence[Mapping[str, Any]]) -> Generator[str]:
    """Run the provider, with a user for each of these claims. Yields its address."""
    users = [part for claims in users_claims for part in ("--user-claims", json.dumps(claims))]
    with reserved_port() as port:
        program = [sys.executable, "-W", "ignore", "-m", "oidc_provider_mock", "--port", str(port), *users]
        process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.05)
            assert process.poll() is None, "the provider did not start"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()
