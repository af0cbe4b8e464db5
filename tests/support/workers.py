"""A real `handrail worker` of the fleet's app, on a SQLite journal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from support import PATIENCE, fleet_app
from support.programs import HANDRAIL, handrail

APP = str(Path(fleet_app.__file__))


class Worker:
    """A worker process with a journal in `folder`. It is killed at the end of the block, unless it was stopped."""

    def __init__(self, folder: Path, *options: str, **variables: str) -> None:
        self._folder = folder
        self._log = folder / "worker.log"
        self.wake = folder / "log.wake"
        """The tool `doze` returns when this file exists."""
        paths = {"FLEET_LOG": str(folder / "log"), "HANDRAIL_JOURNAL": str(folder / "runs.db")}
        self._env = {**os.environ, **paths, **variables}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*HANDRAIL, "worker", APP, *options], cwd=folder, env=self._env, stdout=log, stderr=log
            )

    def __enter__(self) -> Self:
        self.until(lambda: "executes up to" in self.said())
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(PATIENCE)

    def said(self) -> str:
        """Return what the worker has written to its standard streams."""
        return self._log.read_text()

    def submit(self, text: str) -> str:
        """Leave a run for the worker, and return its id."""
        done = handrail("submit", APP, text, cwd=self._folder, env=self._env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def until(self, holds: Callable[[], Any]) -> Any:
        """Wait until this function returns a true value, and return that value."""
        end = time.monotonic() + PATIENCE
        while not (found := holds()):
            if time.monotonic() > end or self._process.poll() is not None:
                raise AssertionError(f"the condition never held. The worker said:\n{self.said()}")
            time.sleep(0.02)
        return found

    def get(self, path: str) -> tuple[int, str]:
        """Return the status and the body of a response of a worker with `--listen`."""
        found = re.search(r"Metrics are at (http://\S+/)metrics", self.said())
        assert found is not None, self.said()
        try:
            with urllib.request.urlopen(found[1] + path, timeout=PATIENCE) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def health(self) -> dict[str, Any]:
        return json.loads(self.get("health")[1])

    def signal(self) -> None:
        """Tell the worker to drain."""
        self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Drain the worker, and wait for its end."""
        self.signal()
        assert self._process.wait(PATIENCE) == 0, self.said()
