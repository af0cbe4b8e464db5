"""Use extras in an environment in which Handrail is installed and the checkout is not on the path.

    python -I scripts/extras.py EXTRA…             uses each extra, and fails if one does not work
    python -I scripts/extras.py --missing EXTRA…   checks that using a missing extra raises an error that names it

scripts/wheel.py runs this in clean environments. Each function uses its extra as a user would, and returns a summary. It
runs in its own process, which is forked after Handrail was imported, so that no extra finds what another one imported.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

from handrail import Adapter, Budget, Prompt, ScriptedModel
from handrail.messages import Usage
from handrail.models.scripted import Reply

_WORKER = "---\ndescription: Greets.\nmodel: openai:gpt-5\n---\n\nGreet {{ input }}.\n"


def models() -> str:
    """Check that a model over HTTP answers."""
    from handrail import OpenAIModel

    class Provider(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            message = {"role": "assistant", "content": "by HTTP"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            body = json.dumps({"id": "1", "model": "m", "choices": [choice], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Provider) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        model = OpenAIModel("m", base_url=f"http://127.0.0.1:{server.server_port}/v1", key_variable=None)
        answer = Adapter(model).evaluate(Prompt("p", "Answer."), "Hello").wait()
        server.shutdown()
    assert answer.text == "by HTTP", answer
    return "OpenAIModel answered"


def local() -> str:
    """Check that the embedded model answers. Its weights are installed separately, as documented."""
    from handrail import LocalModel

    answer = Adapter(LocalModel(max_tokens=4)).evaluate(Prompt("p", "Answer."), "Hello").wait()
    assert answer.usage.output > 0, answer
    return f"LocalModel gave {answer.usage.output} tokens"


def prices() -> str:
    """Check that a run under a money limit gets its cost from the price table."""
    model = ScriptedModel([Reply("done", usage=Usage(1000, 100))], name="openai:gpt-5")
    answer = Adapter(model).evaluate(Prompt("p", "Answer."), "Hello", budget=Budget(money=1)).wait()
    assert answer.cost, answer
    return f"a run was priced: {answer.cost}"


def bridge() -> str:
    """Check that a pydantic-ai model answers."""
    from handrail.models.bridge import BridgedModel

    try:
        model = import_module("pydantic_ai.models.test").TestModel(custom_output_text="bridged")
    except ModuleNotFoundError:
        model = "google:gemini-3-pro"
    answer = Adapter(BridgedModel(model)).evaluate(Prompt("p", "Answer."), "Hello").wait()
    assert answer.text == "bridged", answer
    return "BridgedModel answered"


def workers() -> str:
    """Check that a worker file is read, and that the package contains the JSON Schema of worker files."""
    from handrail import WorkerRegistry
    from handrail.workers import WORKER_SCHEMA

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "greeter.md").write_text(_WORKER)
        found = list(WorkerRegistry(folder).workers)
    assert found == ["greeter"], found
    assert json.loads(Path(WORKER_SCHEMA).read_text())["type"] == "object"
    return "a worker was read"


def cli() -> str:
    """Check that `handrail new` creates its starter folder, and that `handrail workers check` accepts the folder.

    Raises `RuntimeError` if a command fails.
    """
    program = Path(sys.executable).with_name("handrail")
    with tempfile.TemporaryDirectory() as folder:
        for arguments in (["new", "demo"], ["workers", "check", "demo"]):
            ended = subprocess.run(
                [program, *arguments], cwd=folder, capture_output=True, text=True, timeout=60
            )
            if ended.returncode:
                raise RuntimeError(ended.stderr)
    return "`handrail new` and `handrail workers check` ran"


def serve() -> str:
    """Check that the page and its libraries are served over HTTP."""
    from handrail import SqliteJournal
    from handrail.serve import PromptSource, asgi
    from handrail.serve.pages import PAGE
    from handrail.serve.server import address_of, listen, run

    async def visit() -> int:
        with tempfile.TemporaryDirectory() as folder:
            journal = SqliteJournal(Path(folder) / "runs.db")
            app = asgi(
                PromptSource(Prompt("p", "Answer."), Adapter(ScriptedModel(["done"]))), journal=journal
            )
            listening = listen("127.0.0.1", 0)
            ready = asyncio.Event()
            serving = asyncio.create_task(run(app, listening, ready=ready.set))
            await ready.wait()
            try:
                return await asyncio.to_thread(fetch, address_of(listening))
            finally:
                signal.raise_signal(signal.SIGTERM)  # the server is stopped by a signal, as in normal use
                await serving
                journal.close()

    def fetch(address: str) -> int:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        scripts = [path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*.js")]
        for name in ("", *(f"assets/{script}" for script in scripts)):
            with opener.open(address + name, timeout=30) as response:
                assert response.status == 200
                assert response.read(), name
        return len(scripts)

    return f"the page was served, with {asyncio.run(visit())} scripts"


def oidc() -> str:
    """Check that a sign-in provider can be configured, and that its OAuth client can be imported."""
    from handrail.serve import OidcProvider

    OidcProvider("https://login.example.org", "handrail", "secret")
    import_module("authlib.integrations.httpx_client")
    return "a provider can be configured"


def mcp() -> str:
    """Check that a run uses the tool of an MCP server, which is started as a command."""
    from handrail import ToolCall
    from handrail.mcp import McpTools

    program = (
        "from mcp.server.mcpserver import MCPServer\n"
        "server = MCPServer('trial')\n"
        "@server.tool()\n"
        "def double(n: int) -> int:\n"
        "    return 2 * n\n"
        "server.run('stdio')\n"
    )
    section = McpTools("trial", command=[sys.executable, "-I", "-c", program])
    model = ScriptedModel([ToolCall("double", {"n": 21}), "done"])

    async def use() -> None:
        async with section:
            await Adapter(model).evaluate(Prompt("p", ["Answer.", section]), "Hello")

    asyncio.run(use())
    told = model.requests[-1].messages[-1]
    assert "42" in told.text, told
    return "a tool of an MCP server was called"


def code() -> str:
    """Check that a script calls a tool."""
    from handrail import CodeMode, ToolCall, tool

    @tool(effect="pure")
    def double(n: int) -> int:
        """Double a number."""
        return 2 * n

    model = ScriptedModel([ToolCall("run_script", {"script": "await double(n=21)"}), "done"])
    Adapter(model).evaluate(Prompt("p", ["Answer.", CodeMode()], tools=[double]), "Hello").wait()
    told = model.requests[-1].messages[-1]
    assert "42" in told.text, told
    return "a script called a tool"


def postgres() -> str:
    """Check that a connection to PostgreSQL is tried. No server listens on the chosen port, so the connection is refused."""
    from handrail import PostgresJournal
    from handrail.errors import JournalError

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    try:
        PostgresJournal(f"postgresql://127.0.0.1:{port}/none")
    except JournalError as error:
        if "refused" not in str(error):
            raise
        return "a connection was tried"
    raise AssertionError("a server answered")


def dbos() -> str:
    """Check that a dispatcher on DBOS can be created."""
    from handrail import MemoryJournal
    from handrail.fleet.dbos import DbosDispatcher

    DbosDispatcher("postgresql://127.0.0.1/none", MemoryJournal())
    return "a dispatcher was created"


def procrastinate() -> str:
    """Check that a dispatcher on procrastinate can be created."""
    from handrail import MemoryJournal
    from handrail.fleet.procrastinate import ProcrastinateDispatcher

    ProcrastinateDispatcher("postgresql://127.0.0.1/none", MemoryJournal())
    return "a dispatcher was created"


def notify() -> str:
    """Check that apprise knows a receiver of its own. Nothing is sent."""
    from handrail.notify.address import Address
    from handrail.notify.sender import check

    asyncio.run(check(Address("json://127.0.0.1/questions")))
    return "apprise knows a receiver"


def otel() -> str:
    """Check that a run becomes spans, and that the exporters of spans and metrics can be imported."""
    from handrail import telemetry

    telemetry.start  # noqa: B018 # raises without the extra
    trace, export = (import_module(f"opentelemetry.sdk.trace{each}") for each in ("", ".export"))
    memory = import_module("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    provider = trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    with telemetry.start(
        tracer_provider=provider, meter_provider=import_module("opentelemetry.sdk.metrics").MeterProvider()
    ):
        Adapter(ScriptedModel(["done"])).evaluate(Prompt("p", "Answer."), "Hello").wait()
    for each in (
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        "opentelemetry.exporter.prometheus",
    ):
        import_module(each)
    names = [each.name for each in memory.get_finished_spans()]
    assert "invoke_agent p" in names, names
    return "a run was observed"


def evals() -> str:
    """Check that pydantic-evals evaluates an agent."""
    from handrail import Agent
    from handrail.evals import AgentTask, DeniedCalls

    pydantic_evals = import_module("pydantic_evals")
    task = AgentTask(Agent(ScriptedModel(["done"]), "Answer."))
    cases = [pydantic_evals.Case(name="one", inputs="Hello", evaluators=[DeniedCalls([])])]
    dataset = pydantic_evals.Dataset(name="trial", cases=cases)
    report = asyncio.run(dataset.evaluate(task, lifecycle=task.lifecycle, progress=False))
    assert [each.output for each in report.cases] == ["done"], report
    return "a case was evaluated"


def inspect() -> str:
    """Check that a tool becomes one of Inspect's."""
    from handrail import open_gate, tool
    from handrail.evals import inspect_tools

    @tool(effect="pure")
    def double(n: int) -> int:
        """Double a number."""
        return 2 * n

    assert len(inspect_tools(lambda: open_gate([double]))) == 1
    return "a tool became one of Inspect's"


USES: dict[str, Callable[[], str]] = {
    use.__name__: use
    for use in (
        models,
        local,
        prices,
        bridge,
        workers,
        cli,
        serve,
        oidc,
        mcp,
        code,
        postgres,
        dbos,
        procrastinate,
        notify,
        otel,
        evals,
        inspect,
    )
}


def try_one(extra: str, missing: bool) -> None:
    """Use the extra, print a summary, and exit with 1 on failure. With `missing`, check that the error says how to install the extra."""
    try:
        said = USES[extra]()
    except Exception as error:
        if not missing:
            raise
        named = f"pip install 'handrail[{extra}]'"
        if named not in str(error):
            sys.exit(f"{extra}: without this extra, the error does not say {named}: {error!r}")
        print(f"{extra}: if it is missing, {type(error).__name__} names {named}")
    else:
        if missing:
            sys.exit(f"{extra}: this extra is not installed, but no error was raised: {said}")
        print(f"{extra}: {said}")


def main(arguments: list[str]) -> int:
    """Use each extra in its own process. Return 1 if one of them fails."""
    missing = arguments[:1] == ["--missing"]
    codes: list[int | None] = []
    for extra in arguments[missing:]:
        process = get_context("fork").Process(target=try_one, args=(extra, missing))
        process.start()
        process.join()
        codes.append(process.exitcode)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
