"""Settings for all tests: Hypothesis profiles, hooks and the model servers.

An ordinary run draws the same examples every time, so that its verdict depends only on the code. A deep run draws
new ones. The servers (see servers.py) start when a test first needs one.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from handrail.testing import run_virtual, virtual_time
from support import PATIENCE, strict_wires
from support.filesystems import folders, new_files
from support.schedule import Schedule, arranged, collecting
from support.servers import Aimock, Embedded, Llmock, aimock, embedded, llmock

__all__ = ["folders", "new_files"]

UNCHECKED = [HealthCheck.too_slow, HealthCheck.filter_too_much]
"""Health checks that are suppressed, because they depend on the machine's speed and on the examples drawn."""

ALL_WIRES = bool(os.environ.get("HANDRAIL_DEEP") or os.environ.get("HANDRAIL_WIRES"))
"""Whether the requests of all tests are checked on all wires, and not only those of the tests in `adapter` and `models`."""

settings.register_profile(
    "quick", max_examples=25, deadline=None, derandomize=True, suppress_health_check=UNCHECKED
)
settings.register_profile("deep", max_examples=2000, deadline=None, suppress_health_check=UNCHECKED)
settings.register_profile("brief", settings.get_profile("quick"), max_examples=5)
"""The profile for all Python versions but the first, to look only for differences between versions."""
settings.load_profile(
    os.environ.get("HANDRAIL_EXAMPLES") or ("deep" if os.environ.get("HANDRAIL_DEEP") else "quick")
)


def pytest_configure(config: pytest.Config) -> None:
    """Check the requests to model APIs, and keep default journals out of the developer's state folder.

    In virtual time, wait for a handler's thread as long as a busy machine needs. Where a thread hangs on purpose, the test
    says how long to wait for it.
    """
    state = tempfile.TemporaryDirectory(prefix="handrail-state-")
    config.add_cleanup(state.cleanup)
    os.environ["XDG_STATE_HOME"] = state.name
    os.environ.pop("HANDRAIL_JOURNAL", None)
    strict_wires.watch()
    virtual_time._THREAD_GRACE = PATIENCE


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test if the grammar of a wire refuses one of its requests."""
    strict_wires.every = ALL_WIRES or item.path.parent.name in ("adapter", "models")
    strict_wires.take_refused()
    yield
    refused = strict_wires.take_refused()
    assert not refused, refused[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Escape lone surrogates in a report. An xdist worker can't send them: it would fail, and end the whole run."""
    report = yield
    report.sections = [(name, _printable(text)) for name, text in report.sections]
    if report.failed and report.longrepr is not None:
        text = str(report.longrepr)
        if _printable(text) != text:
            report.longrepr = _printable(text)
    return report


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(strict_wires.summary())


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on its own event loop, with the marker `virtual_time` in virtual time.

    A coroutine test with `@given` gets a loop for each example. Returns None for other tests, which pytest then runs itself.
    """
    run = run_virtual if pyfuncitem.get_closest_marker("virtual_time") else _run
    if is_hypothesis_test(pyfuncitem.obj):
        property_test = pyfuncitem.obj.hypothesis
        if inspect.iscoroutinefunction(property_test.inner_test):
            property_test.inner_test = _on_its_own_loop(property_test.inner_test, run)
        return None
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in wanted}
    _on_its_own_loop(pyfuncitem.obj, run)(**arguments)
    return True


def _run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


def _on_its_own_loop(test: Any, run: Callable[..., object]) -> Callable[..., None]:
    @functools.wraps(test)
    def sync(*args: Any, **arguments: Any) -> None:
        run(functools.partial(test, *args, **arguments))

    return sync


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Let one xdist worker collect first, so that the others find the bytecode that it writes."""
    with collecting(session.config):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest tests, which `support.schedule.LONGEST` lists, before all others."""
    items[:] = arranged(items)


def pytest_collection_finish() -> None:
    """Exempt the collected tests from garbage collection, which would scan them again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Schedule | None:
    """Use `Schedule` for `--dist loadfile`.

    Returns None for the other modes, which keep their own scheduler.
    """
    return Schedule(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """Close the browser after a test, unless the next test uses it too."""
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
