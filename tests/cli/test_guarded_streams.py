"""What other code writes to the terminal is escaped, waits while a question is open, and has no secrets of servers in it."""

import json
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from support import PATIENCE
from support.mcp_http import Reply, Request, ordinary
from support.programs import HANDRAIL, environment, handrail
from support.terminals import Window, window

pytestmark = pytest.mark.once  # starting processes is slow, and the Python version makes no difference

CHOICE = "your choice, then Enter:"
ESCAPE = "\x1b[7;7HFORGED"
"""Text that a terminal would draw in the middle of the screen."""
ESCAPED = r"\x1b[7;7HFORGED"
KEY = "SECRETKEY/7f3a9c1d"

APP = '''
import logging, sys, threading, time, warnings
from pathlib import Path
from handrail import Agent, CapabilityPolicy, ScriptedModel, ToolCall, tool

ESCAPE = "\\x1b[7;7HFORGED"

class Late:
    def __del__(self):
        raise ValueError(f"unraisable {ESCAPE}")

def make_noise():
    for name in ("app", "handrail", *logging.root.manager.loggerDict):
        logging.getLogger(name).error("logger of %s %s", name, ESCAPE)
    warnings.warn(f"a warning {ESCAPE}")
    print(f"printed {ESCAPE}")
    sys.stderr.write(f"written {ESCAPE}\\n")
    logging.getLogger("app").error("%d", f"wrongly formatted {ESCAPE}")
    Late()
    Path("noisy").touch()
    raise ValueError(f"of a thread {ESCAPE}")

def wait():
    while not Path("start").exists():
        time.sleep(0.01)
    make_noise()

@tool(effect="irreversible", capabilities={"money"})
def pay(to: str, euros: int) -> str:
    """Pay."""
    return "paid"

model = ScriptedModel([ToolCall("pay", {"to": "mallory", "euros": 90000}), "done"])
agent = Agent(model, "x", tools=[pay], policies=[CapabilityPolicy(name="mine")])
'''


@pytest.fixture
def seen() -> Generator[Window]:
    with window(columns=400, rows=300) as made:
        yield made


class UrlServer(ThreadingHTTPServer):
    """An MCP server over HTTP on threads. It writes an event on its stream when it is told to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.attack = threading.Event()
        self.streams = threading.Semaphore(0)
        """Released each time that the client opens a stream for events."""
        self.redirect = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: UrlServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = ordinary(Request("POST", {}, body), session="s1")
        if self.server.redirect:
            reply = Reply(307, {"Location": self.server.redirect + self.path})
        content = b"".join(reply.body)
        self.send_response(reply.status)
        for name, value in {**reply.headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.server.streams.release()
        self.server.attack.wait()
        self.wfile.write(b"retry: 1\nevent: " + ESCAPE.encode() + b"\ndata: x\n\n")
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def url_server() -> Generator[UrlServer]:
    with UrlServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.attack.set()
            server.shutdown()
            thread.join()


def settings(folder: Path, url: str) -> None:
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"mail": {"url": url}}}))


def start(seen: Window, cwd: Path, *arguments: str) -> None:
    seen.start([*HANDRAIL, *arguments], env=environment(MCP_API_KEY=KEY), cwd=cwd)


def test_a_url_server_can_not_draw_over_an_approval(tmp_path: Path, seen: Window):
    """What the SDK logs about a server's events is not shown while a question is open, and is escaped afterwards."""
    (tmp_path / "app.py").write_text(APP)
    with url_server() as server:
        settings(tmp_path, f"{server.url}/mcp")
        start(seen, tmp_path, "run", "app.py", "go", "--mcp", "mcp.json")
        seen.wait_for(CHOICE)
        shown = seen.shown()
        assert "90000" in shown
        assert server.streams.acquire(timeout=PATIENCE)
        server.attack.set()
        assert server.streams.acquire(timeout=PATIENCE)  # the client has read the first stream to its end
        seen.take(0.2)
        assert seen.shown() == shown
        seen.type("n\n")
        seen.wait_for(f"Unknown SSE event: {ESCAPED}")
        seen.end()
    assert ESCAPE.encode() not in seen.raw


@pytest.mark.parametrize("options", [[], ["-v"], ["--quiet"]])
def test_nothing_is_written_while_a_question_is_open(tmp_path: Path, seen: Window, options: list[str]):
    """Log records of every logger, warnings, prints and errors of threads wait for the answer, and are escaped then."""
    (tmp_path / "app.py").write_text(f"{APP}\nthreading.Thread(target=wait, daemon=True).start()\n")
    start(seen, tmp_path, "run", "app.py", "go", *options)
    seen.wait_for(CHOICE)
    shown = seen.shown()
    (tmp_path / "start").touch()
    until = time.monotonic() + PATIENCE
    while not (tmp_path / "noisy").exists():
        assert time.monotonic() < until
        seen.take(0.05)
    seen.take(0.2)
    assert seen.shown() == shown
    seen.type("n\n")
    seen.end()
    for each in ("app: logger of app", "a warning", "printed", "written", "unraisable", "of a thread"):
        assert f"{each} {ESCAPED}" in seen.text()
    assert "wrongly formatted" in seen.text()
    assert ESCAPE.encode() not in seen.raw
    assert "logger of httpx2" in seen.text()


COMMANDS = [
    ["run", "app.py", "go"], ["chat", "app.py"], ["serve", "app.py", "--port", "0"], ["worker", "app.py"],
    ["submit", "app.py", "go"], ["mcp", "app.py"],
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_every_command_escapes_what_the_app_writes(tmp_path: Path, seen: Window, command: list[str]):
    """Whichever command imports the app, the app's output, log records and errors can't control the terminal."""
    (tmp_path / "app.py").write_text(f"{APP}\nmake_noise()\n")
    start(seen, tmp_path, *command)
    seen.end()
    for each in ("app: logger of app", "a warning", "printed", "written", "of a thread"):
        assert f"{each} {ESCAPED}" in seen.text()
    assert ESCAPE.encode() not in seen.raw


def test_a_record_of_several_lines_has_a_bar(tmp_path: Path):
    """Only the first line of a log record begins without a bar, and it begins with the logger's name."""
    forged = "? Allow pay?"
    (tmp_path / "app.py").write_text(f"import logging\nlogging.getLogger('x').error('one\\n{forged}')\n1 / 0")
    written = handrail("run", "app.py", "go", cwd=tmp_path).stderr
    assert f"x: one\n  │ {forged}\n" in written


def test_a_long_record_is_wrapped_behind_the_bar(tmp_path: Path):
    """A terminal does not wrap a record itself, so no part of its text but its first line begins in the first column."""
    (tmp_path / "app.py").write_text("import logging\nlogging.getLogger('x').error('y' * 1000)\n1 / 0")
    with window(columns=60) as seen:
        start(seen, tmp_path, "run", "app.py", "go")
        seen.end()
        lines = [line for line in seen.text().split("\n") if "yy" in line]
    assert len(lines) > 10
    assert [line[:4] for line in lines] == ["x: y", *["  │ "] * (len(lines) - 1)]


def test_an_app_may_configure_its_own_logging(tmp_path: Path):
    """What an app sets with `logging.basicConfig` holds, and what it prints is escaped; its colours are dropped."""
    lines = (
        "import logging\nlogging.basicConfig(level=logging.INFO, format='own \\x1b[31m%(message)s\\x1b[0m')\n"
    )
    (tmp_path / "app.py").write_text(f"{lines}logging.getLogger('x').info({ESCAPE!r})\n1 / 0")
    assert f"own {ESCAPED}\n" in handrail("run", "app.py", "go", cwd=tmp_path).stderr


@pytest.mark.parametrize("options", [[], ["-v"]])
@pytest.mark.parametrize(
    "address", ["/u/${MCP_API_KEY}/mcp", "/mcp?key=${MCP_API_KEY}", f"/mcp?api_key={KEY}"]
)
def test_secrets_of_servers_are_hidden_in_other_log_lines(tmp_path: Path, address: str, options: list[str]):
    """A key in the address of a server is hidden where the SDK and the HTTP library log the address."""
    (tmp_path / "app.py").write_text(APP)
    with url_server() as server:
        server.redirect = "http://127.0.0.1:1/elsewhere"
        settings(tmp_path, f"{server.url}{address}")
        done = handrail(
            "run",
            "app.py",
            "go",
            "--mcp",
            "mcp.json",
            *options,
            cwd=tmp_path,
            env=environment(MCP_API_KEY=KEY),
        )
    whole = done.stdout + done.stderr
    assert "not followed" in whole
    assert "[secret]" in whole or ("?" in address and not options)  # the SDK leaves the query out
    assert "7f3a9c1d" not in whole


def test_importing_handrail_changes_no_logging_and_no_streams(tmp_path: Path):
    """A process that embeds Handrail keeps its own logging, warnings and streams."""
    import subprocess
    import sys

    script = """
import logging, sys, warnings
before = sys.stdout, sys.stderr, logging.lastResort, warnings.showwarning, list(logging.root.handlers), sys.excepthook
import handrail, handrail.mcp.section, handrail.cli.run_command
from handrail import Agent, ScriptedModel
Agent(ScriptedModel(["a"]), "x").run("go")
assert before == (sys.stdout, sys.stderr, logging.lastResort, warnings.showwarning, logging.root.handlers, sys.excepthook)
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
