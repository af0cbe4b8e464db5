"""`handrail worker --listen`: a real worker's metrics and health over HTTP."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.programs import handrail
from support.workers import APP, Worker

pytestmark = pytest.mark.once


def values(text: str) -> dict[str, float]:
    """Return the values of a worker's samples, by their names and the values of their labels."""
    families = text_string_to_metric_families(text)
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize("disabled", ["", "true"], ids=["otel", "without"])
def test_a_worker_is_scraped_while_it_executes_a_run(tmp_path: Path, disabled: str):
    with Worker(tmp_path, "--listen", "127.0.0.1:0", OTEL_SDK_DISABLED=disabled) as worker:
        assert worker.health() == {"status": "ok", "runs": 0, "limit": 10}
        worker.submit("doze")
        worker.until(lambda: worker.health()["runs"] == 1)
        status, text = worker.get("metrics")
        found = values(text)
        assert (status, found["handrail_runs"], found["handrail_runs_limit"]) == (200, 1, 10)
        assert found["handrail_queue_wait_seconds_count"] == 1
        worker.submit("choose tea")
        worker.until(lambda: "handrail_legs_total{" in worker.get("metrics")[1])
        assert values(worker.get("metrics")[1])["handrail_legs_total parked"] == 1
        assert worker.get("elsewhere")[0] == 404
        worker.signal()
        worker.until(lambda: worker.get("health")[0] == 503)
        assert worker.health()["status"] == "draining"
        worker.wake.touch()
        worker.stop()


@pytest.mark.parametrize(
    "address", ["9464", "localhost", "localhost:99999", ":80", "http://localhost:80", ""]
)
def test_a_malformed_address_is_refused(tmp_path: Path, address: str):
    done = handrail("worker", APP, "--listen", address, cwd=tmp_path)
    assert done.returncode == 2
    assert f"--listen {address!r} is not an address" in done.stderr


def test_an_address_in_use_is_named(tmp_path: Path):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = handrail("worker", APP, "--listen", address, cwd=tmp_path)
    assert done.returncode == 2
    assert f"can't listen on {address}: Address already in use" in done.stderr
