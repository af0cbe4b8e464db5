"""A real nginx with deploy/nginx.conf in front of a server: a prefix, TLS, sessions and streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from handrail.serve.people import People
from support import PATIENCE, ROOT
from support.reserved_port import reserved_port
from support.serving import serving

pytestmark = pytest.mark.once  # nginx does not depend on the Python version

NGINX = Path("/usr/sbin/nginx")
SECRET = "a long password of ann"
MAIN = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/site.conf;
}}
"""


@contextlib.asynccontextmanager
async def behind_nginx(folder: Path, address: str) -> AsyncGenerator[httpx.AsyncClient]:
    """Yield a client that speaks to the server through nginx, as a browser at https://chat.example does."""
    if not NGINX.is_file():
        raise RuntimeError(
            "nginx is not installed. Run `scripts/components`, or as root `apt install nginx-light`."
        )
    key = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=chat.example",
    ]
    files = [
        "-keyout",
        folder / "tls.key",
        "-out",
        folder / "tls.crt",
        "-addext",
        "subjectAltName=DNS:chat.example",
    ]
    subprocess.run([*key, *files], check=True, stderr=subprocess.DEVNULL)
    with reserved_port() as port:
        site = (ROOT / "deploy/nginx.conf").read_text().replace("/etc/handrail", str(folder))
        site = site.replace("127.0.0.1:8600", urlsplit(address).netloc).replace(
            "listen 443", f"listen 127.0.0.1:{port}"
        )
        (folder / "site.conf").write_text(site)
        (folder / "nginx.conf").write_text(MAIN.format(folder=folder))
        user = [] if os.geteuid() else ["-g", "user root;"]
        process = subprocess.Popen([NGINX, "-c", folder / "nginx.conf", "-e", folder / "error.log", *user])
        try:
            async with httpx.AsyncClient(
                base_url=f"https://127.0.0.1:{port}",
                verify=ssl.create_default_context(cafile=str(folder / "tls.crt")),
                headers={"Host": "chat.example", "Origin": "https://chat.example"},
                timeout=PATIENCE,
                trust_env=False,
            ) as client:
                yield client
        finally:
            process.terminate()
            process.wait()


async def test_people_sign_in_and_follow_a_run_below_a_prefix_with_tls(tmp_path: Path) -> None:
    """The session's cookie is for TLS and the prefix only, and events arrive while the run still waits."""
    people = People(tmp_path / "people.db")
    people.add("ann", secret=SECRET)
    people.close()
    sni = {"sni_hostname": "chat.example"}
    options: Any = {"prefix": "/agents", "hosts": ["chat.example"], "origins": ["https://chat.example"]}
    async with serving(tmp_path, **options) as served, behind_nginx(tmp_path, served.address) as client:
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(httpx.ConnectError):
                    if (await client.get("/agents/readyz", extensions=sni)).status_code == 200:
                        break
                await asyncio.sleep(0.05)
        assert (await client.get("/agents/", extensions=sni)).status_code == 200
        assert (await client.get("/readyz", extensions=sni)).status_code == 404  # of nginx
        signed = await client.post("/agents/login", json={"name": "ann", "password": SECRET}, extensions=sni)
        assert signed.status_code == 200, signed.text
        cookie = signed.headers["set-cookie"]
        assert "Secure" in cookie
        assert cookie.startswith("__Host-")
        session = {"Cookie": cookie.partition(";")[0], "Handrail-Key": signed.json()["key"]}
        said = await client.post(
            "/agents/threads/a/messages", json={"text": "call order"}, headers=session, extensions=sni
        )
        assert said.status_code == 202, said.text
        async with client.stream(
            "GET", "/agents/threads/a/events?follow=1", headers=session, extensions=sni
        ) as stream:
            async with asyncio.timeout(PATIENCE):
                async for line in stream.aiter_lines():
                    if (
                        line.startswith("data:")
                        and "order" in json.loads(line[5:]).__str__()
                        and "menu" in line
                    ):
                        break  # the question arrived, although the run and its stream go on
