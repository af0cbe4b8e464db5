"""Settings for every test: the number of examples drawn, and the model servers.

An ordinary run draws the same examples every time, so its verdict depends on the code alone; a deep run
draws new ones. The servers (see servers.py) start when a test first needs one.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from support.filesystems import folders, new_files
from support.schedule import Schedule, arranged
from support.servers import Aimock, Embedded, Llmock, aimock, embedded, llmock

__all__ = ["folders", "new_files"]

UNCHECKED = [HealthCheck.too_slow, HealthCheck.filter_too_much]
"""What Hypothesis does not fail for: both depend on which examples it happens to draw."""

settings.register_profile(
    "quick", max_examples=25, deadline=None, derandomize=True, suppress_health_check=UNCHECKED
)
settings.register_profile("deep", max_examples=2000, deadline=None, suppress_health_check=UNCHECKED)
settings.register_profile("brief", settings.get_profile("quick"), max_examples=10)
"""For every interpreter after the first: the laws are the same, so only differences between Pythons matter."""
settings.load_profile(
    os.environ.get("HANDRAIL_EXAMPLES") or ("deep" if os.environ.get("HANDRAIL_DEEP") else "quick")
)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest."""
    items[:] = arranged(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Schedule | None:
    """Give the workers of `--dist loadfile` whole files, in the order they are collected in."""
    return Schedule(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """Let the browser be shared by tests that follow each other."""
    yield
    browsers = sys.modules.get("support.browsers")
    if browsers is not None:
        browsers.close_unless_used(nextitem)


@pytest.fixture(scope="session")
def started_aimock() -> Iterator[Aimock]:
    with aimock() as server:
        yield server


@pytest.fixture(scope="session")
def started_llmock() -> Iterator[Llmock]:
    with llmock() as server:
        yield server


@pytest.fixture(scope="session")
def embedded_server() -> Iterator[Embedded]:
    with embedded() as server:
        yield server


@pytest.fixture
def aimock_server(started_aimock: Aimock) -> Aimock:
    started_aimock.script([])
    return started_aimock


@pytest.fixture
def llmock_server(started_llmock: Llmock) -> Llmock:
    started_llmock.script([])
    return started_llmock
