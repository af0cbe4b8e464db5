"""Tests for the program `handrail` without a terminal: exit codes, streams, errors and signals."""

import io
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import support
from handrail.cli import main
from handrail.cli.outcome import Failure
from handrail.cli.serve_commands import page_note
from handrail.cli.workers_commands import STARTER
from handrail.errors import DefinitionError, RunParked
from handrail.journal.location import default_journal, make_private_folder
from handrail.models.names import model_named
from handrail.models.scripted import WHAT_IT_IS, DemoModel
from handrail.serve.pages import is_built
from handrail.text.rendering import escape
from support import warm_python
from support.programs import HANDRAIL, environment, handrail, workers_folder
from support.texts import NOT_A_MODEL_NAME

pytestmark = pytest.mark.once  # starting processes is slow, and the Python version makes no difference


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return workers_folder(tmp_path / "team")


Here = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Here]:
    """Yield a function that runs the program in this process, faster than in a child, with empty standard input."""
    log = logging.getLogger("handrail")
    before = log.propagate, list(log.handlers)
    monkeypatch.chdir(folder.parent)

    def program(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["handrail", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        out, err = capsys.readouterr()
        return code if isinstance(code, int) else 0, out, err

    yield program
    log.propagate, log.handlers = before


def run(folder: Path, worker: str, *more: str, **options: str) -> subprocess.CompletedProcess[str]:
    return handrail("run", f"team/{worker}.md", "go", *more, cwd=folder.parent, **options)  # pyright: ignore[reportArgumentType]


# --- exit codes and errors ---


_HOOK = """
from handrail import Agent, ScriptedModel, ToolCall, ToolContext, tool

@tool(effect="staged", capabilities={"fs.write"})
async def write(context: ToolContext) -> str:
    \"""Write a file that runs later.\"""
    context.filesystem.write(".envrc", "new")
    return "written"

agent = Agent(ScriptedModel([ToolCall("write"), "The end."]), "Write.", tools=[write])
"""


def test_approving_everything_does_not_cover_files_that_run_later(folder: Path, here: Here):
    """A change to a startup file such as `.envrc` is denied with `--approve all`, and with `ask` if nobody is there.

    `--startup-files` allows it for the files that it names.
    """
    (folder.parent / "hooks.py").write_text(_HOOK)
    (folder.parent / "work").mkdir()
    for mode in ("all", "ask"):
        code, _, said = here("run", "hooks.py", "x", "--files", "work", "--no-journal", "--approve", mode)
        assert code == 3
        assert "need a person's approval, and nothing can replace it" in said
        assert not (folder.parent / "work" / ".envrc").exists()
    options = ("--files", "work", "--no-journal", "--startup-files", "x", "--startup-files", ".envrc")
    assert here("run", "hooks.py", "x", *options)[0] == 0
    assert (folder.parent / "work" / ".envrc").read_text() == "new"


@pytest.mark.parametrize(
    ("worker", "more", "code", "said"),
    [
        ("hello", [], 0, ""),
        ("crasher", [], 0, "crash failed"),
        ("failing", [], 1, "the key is wrong"),
        ("cut", [], 1, "The answer was cut off"),
        ("nobody", [], 2, "no model is set"),
        ("writer", [], 3, "write was not approved (nobody there)"),
        ("writer", ["--quiet"], 3, "Not approved, so it did not run: write"),
        ("writer", ["--approve", "strict"], 3, "the approval mode is strict"),
        ("payer", [], 3, "nobody there"),
        ("caller", [], 3, "⊘ pay"),
        ("payer", ["--approve", "all"], 0, "approved by --approve all"),
        ("slow", ["--deadline", "0.3s"], 4, "deadline"),
        ("looping", ["--budget-requests", "3"], 4, "budget"),
        ("looping", ["--budget-calls", "2"], 4, "budget"),
    ],
)
def test_exit_codes(folder: Path, worker: str, more: list[str], code: int, said: str):
    """Each kind of outcome has its own exit code, and its reason is printed on standard error."""
    done = run(folder, worker, *more)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert said in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "Missing argument"),
        (["run", "team/hello.md", "x", "--nonsense"], "No such option"),
        (["run", "team/hello.md", "x", "--approve", "maybe"], "not one of ask, all, strict"),
        (["run", "team/hello.md", "x", "--deadline", "soon"], "Write seconds, or 90s, 5m, 1h"),
        (["run", "team/hello.md", "x", "--deadline", "0"], "is not a duration"),
        (["run", "team/hello.md", "x", "--files", "nowhere"], "no such folder"),
        (["run", "team/hello.md", "x", "-a", "nowhere.txt"], "no such file"),
        (["run", "team/hello.md", "x", "-a", "team/tools.py"], "tools.py"),
        (["run", "team/hello.md", "x", "--model", "nonsense"], NOT_A_MODEL_NAME),
        (["run", "team/hello.md", "x", "--model", ":x"], NOT_A_MODEL_NAME),
        (
            ["run", "team/hello.md", "x", "--model", "broken:m"],
            "can't import 'broken': ModuleNotFoundError",
        ),
        (["run", "team/hello.md", "x", "--journal", "/dev/null/x"], "can't create the journal"),
        (["run", "team/hello.md", "x", "--journal", "a.db", "--no-journal"], "Pass only one of them"),
        (["run", "team/hello.md"], "the input is empty"),
        (["run", "nowhere/main.md", "x"], "handrail new nowhere"),
        (["run", "nope.md", "x"], "`handrail new nope` creates one"),
        (["serve", "nope.md"], "`handrail new nope` creates one"),
        (["workers", "check", "nope.md"], "`handrail new nope`"),
        (["new", "nope.md"], "Name a folder, such as: handrail new nope"),
        (["run", "team/none", "x"], "there is no worker 'none'"),
        (["run", "team/none.md", "x"], "There are: "),
        (["run", "team/sub/none.md", "x"], "Name a worker's file, or a folder with workers."),
        (["serve", "team/nobody.md"], "no model is set for the worker 'nobody'"),
        (["run", "team", "x"], "has several workers: "),
        (["run", "team/tools.py", "x"], "has no Agent called 'agent'. Define one in it: agent = Agent("),
        (["run", "agents.py", "x"], "Name one of its agents, such as agents.py:clerk."),
        (["run", "prompts.py", "x"], "Serve its prompt: `handrail serve prompts.py:guide`."),
        (["chat", "team/tools.py:clerk"], "team/tools.py has no Agent called 'clerk'"),
        (["run", ".", "x"], "no worker (NAME.md)"),
        (
            ["serve", "."],
            "there is no worker (NAME.md) in '.'. Name another folder, or, to serve a module, its file: app.py",
        ),
        (["chat", "nowhere"], "there is no nowhere"),
        (["workers", "nowhere"], "there is no folder nowhere"),
        (["workers", "show", "team/none"], "there is no worker"),
        (["workers", "a", "b", "c"], "handrail workers show WORKER"),
        (["new", "../.."], "can't name a folder"),
        (["new", "-x"], "No such option"),
        (["new", "a/b/c"], "there is no folder a/b"),
        (["new", "team"], "exists already"),
        (["sing"], "No such command"),
    ],
)
def test_a_wrong_command_line_is_refused_with_advice(
    folder: Path, arguments: list[str], said: str, here: Here
):
    """A wrong command line gives exit code 2 and an error message, with no traceback and nothing on standard output."""
    (folder.parent / "broken.py").write_text("import a_module_that_is_not_there\n")
    (folder.parent / "agents.py").write_text(
        "from handrail import Agent\nclerk = Agent('local:smollm2', 'x')\n"
    )
    (folder.parent / "prompts.py").write_text("from handrail import Prompt\nguide = Prompt('guide', 'x')\n")
    code, out, err = here(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_a_missing_key_is_reported_once(folder: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing key, which ends the run, is reported once."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    _, _, err = here("run", "team/hello.md", "x", "--model", "openai:gpt-5")
    assert err.count("its key is missing") == 1


@pytest.mark.parametrize("provider", ["mistral", "groq", "google", "openai"])
def test_a_planted_module_is_no_provider(folder: Path, here: Here, provider: str):
    """A module with a provider's name is never imported in the provider's place, because a tool may have written it."""
    (folder.parent / f"{provider}.py").write_text("raise SystemExit('what a model wrote has run')\n")
    found = here("run", "team/hello.md", "x", "--model", f"{provider}:model")
    assert "what a model wrote" not in "".join(map(str, found))


def test_your_own_model_is_found_in_the_current_folder(folder: Path):
    """`--model module:name` finds a module in the current folder, although that folder is not on Python's path."""
    (folder.parent / "mine.py").write_text(
        "from handrail import ScriptedModel\nmodel = ScriptedModel(['It is mine.'])\n"
    )
    program = [str(Path(sys.executable).with_name("handrail")), "run", "team/hello.md", "x", "-q"]
    done = subprocess.run(
        [*program, "--model", "mine:model"],
        cwd=folder.parent,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "It is mine.\n"), done.stderr


def test_what_a_model_makes_is_named_and_saved(folder: Path, here: Here):
    """`handrail run` names each picture that the model made, and the path of a copy. Its JSON lists them, and so does `runs show`."""
    (folder.parent / "artist.py").write_text(
        "from handrail import Agent, Attachment, ScriptedModel\n"
        "from handrail.models.scripted import Reply\n\n"
        "cat = Attachment(b'\\x89PNG\\r\\n\\x1a\\n', 'cat.png')\n"
        "agent = Agent(ScriptedModel([Reply('Here.', attachments=[cat])]), 'Draw.')\n"
    )
    png = b"\x89PNG\r\n\x1a\n"
    code, out, err = here("run", "artist:agent", "a cat")
    assert (code, out) == (0, "Here.\n")
    line = next(line for line in err.splitlines() if "cat.png" in line)
    assert line.startswith("  cat.png (image/png, 8 bytes) ")
    assert Path(line.rpartition(" ")[2]).read_bytes() == png
    newest = json.loads(here("runs", "list", "--json")[1])["runs"][0]["run_id"]
    assert "[image cat.png: image/png, 8 bytes]" in here("runs", "show", newest)[1]
    sys.modules.pop("artist")
    [made] = json.loads(here("run", "artist:agent", "a cat", "--json")[1])["attachments"]
    assert (made["name"], made["media_type"], made["size"]) == ("cat.png", "image/png", 8)
    assert Path(made["path"]).read_bytes() == png


def test_an_agent_of_a_module_is_run_and_resumed(folder: Path, here: Here):
    """`handrail run module:agent` accepts `--model` and attachments, and records the run.

    `runs resume` finds the agent again.
    """
    (folder.parent / "desk.py").write_text(
        "from handrail import Agent, CapabilityPolicy, ScriptedModel, ToolCall, tool\n\n\n"
        "@tool(capabilities={'net'})\n"
        "def pay(amount: int) -> str:\n"
        '    """Pay somebody."""\n'
        "    return 'paid'\n\n\n"
        "model = ScriptedModel(['It is another.'])\n"
        "given = {'tools': [pay], 'policies': [CapabilityPolicy({'net': 'ask'})]}\n"
        "agent = Agent(ScriptedModel([ToolCall('pay', {'amount': 5}), 'It is paid.']), 'Pay.', **given)\n"
        "parks = Agent(ScriptedModel([ToolCall('pay', {'amount': 5})]), 'Pay.', **given)\n"
    )
    assert here("run", "desk:agent", "x", "-q", "--approve", "all")[:2] == (0, "It is paid.\n")
    assert here("run", "desk.py", "x", "-q", "--model", "desk:model")[:2] == (0, "It is another.\n")
    attached = ("run", "desk:agent", "x", "-q", "--approve", "all", "-a")
    assert here(*attached, "desk.py")[:2] == (0, "It is paid.\n")
    assert here(*attached, "missing.png")[0] == 2
    assert here("run", "desk:parks", "x", "-q", "--approve", "later")[0] == 5
    newest = json.loads(here("runs", "list", "--json")[1])["runs"][0]
    assert newest["app"] == "desk:parks"
    digest = json.loads(here("runs", "show", newest["run_id"], "--json")[1])["waiting"][0]["digest"]
    assert here("runs", "answer", newest["run_id"], "--approve", "--digest", digest)[0] == 0
    (folder.parent / "after.py").write_text(
        "from handrail import ScriptedModel\nmodel = ScriptedModel(['It is paid now.'])\n"
    )
    assert here("runs", "resume", newest["run_id"], "--model", "after:model")[:2] == (0, "It is paid now.\n")


@pytest.mark.parametrize(("approve", "told"), [("all", "echo: a"), ("strict", "denied")])
def test_an_agent_uses_the_servers_of_a_file(folder: Path, here: Here, approve: str, told: str):
    """`handrail run --mcp` adds the tools of the servers in a file, and each call needs approval."""
    server = Path(support.__path__[0]) / "mcp_server.py"
    servers = {"trial": {"command": sys.executable, "args": [str(server)]}}
    (folder.parent / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    (folder.parent / "guide.py").write_text(
        "from handrail import Agent, ScriptedModel, ToolCall\n"
        "def answer(request):\n"
        "    said = request.messages[-1]\n"
        "    return said.text if len(request.messages) > 1 else ToolCall('echo', {'text': 'a'})\n"
        "model = ScriptedModel(answer)\n"
        "agent = Agent(model, 'Go.')\n"
    )
    code, out, error = here("run", "guide:agent", "x", "-q", "--approve", approve, "--mcp", "mcp.json")
    assert told in out, (code, error)


@pytest.mark.parametrize("named", ["envoy:agent", "workers/envoy.md"])
def test_a_resumed_run_has_the_servers_of_its_file(folder: Path, here: Here, named: str):
    """`runs resume` opens the servers that the run began with. It says so if their file has changed, and fails if the file is missing."""
    server = Path(support.__path__[0]) / "mcp_server.py"
    entry = {"command": sys.executable, "args": ["-S", str(server)], "env": {"API_TOKEN": "hunter2-x"}}
    config = folder.parent / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"trial": entry}}))
    source = (
        "from handrail import Agent, ScriptedModel, ToolCall\n"
        "def answer(request):\n"
        "    said = request.messages[-1]\n"
        "    return said.text if len(request.messages) > 1 else ToolCall('echo', {'text': 'a'})\n"
        "model = ScriptedModel(answer)\n"
        "agent = Agent(model, 'Go.')\n"
    )
    (folder.parent / "workers").mkdir(exist_ok=True)
    for place in (folder.parent, folder.parent / "workers"):
        (place / "envoy.py").write_text(source)
    (folder.parent / "workers" / "envoy.md").write_text("---\nname: envoy\nmodel: envoy:model\n---\nGo.\n")
    code, _, error = here("run", named, "x", "-q", "--approve", "later", "--mcp", "mcp.json")
    assert code == 5, error
    run_id = json.loads(here("runs", "list", "--json")[1])["runs"][0]["run_id"]
    digest = json.loads(here("runs", "show", run_id, "--json")[1])["waiting"][0]["digest"]
    assert here("runs", "answer", run_id, "--approve", "--digest", digest)[0] == 0
    config.rename(folder.parent / "moved.json")
    code, _, error = here("runs", "resume", run_id)
    assert code != 0
    assert "mcp.json can't be read" in error
    assert "--mcp" in error
    config.write_text(json.dumps({"mcpServers": {"trial": entry}, "more": 1}))
    code, out, error = here("runs", "resume", run_id)
    assert code == 0, error
    assert "mcp.json has changed" in out + error
    assert "echo: a" in out


def test_a_resumed_agent_keeps_its_own_model_and_resources(folder: Path, here: Here):
    """`runs resume` without `--model` uses the model and the resources of the agent's own adapter."""
    (folder.parent / "till.py").write_text(
        "from handrail import Adapter, Agent, CapabilityPolicy, ScriptedModel, ToolCall, ToolContext, given, tool\n\n\n"
        "class Till:\n"
        "    name = 'the till'\n\n\n"
        "@tool(capabilities={'net'})\n"
        "def pay(amount: int, context: ToolContext) -> str:\n"
        '    """Pay somebody."""\n'
        "    return f'paid from {context.resources.get(Till).name}'\n\n\n"
        "def answer(request):\n"
        "    last = [each for each in request.messages if 'was undone' not in each.text][-1]\n"
        "    return last.text if hasattr(last, 'results') else ToolCall('pay', {'amount': 5})\n\n\n"
        "adapter = Adapter(ScriptedModel(answer), resources=[given(Till, Till())])\n"
        "policies = [CapabilityPolicy({'net': 'ask'})]\n"
        "agent = Agent(adapter, 'Pay.', tools=[pay], policies=policies)\n"
    )
    assert here("run", "till:agent", "x", "-q", "--approve", "later")[0] == 5
    run_id = json.loads(here("runs", "list", "--json")[1])["runs"][0]["run_id"]
    digest = json.loads(here("runs", "show", run_id, "--json")[1])["waiting"][0]["digest"]
    assert here("runs", "answer", run_id, "--approve", "--digest", digest)[0] == 0
    code, out, err = here("runs", "resume", run_id)
    assert code == 0, err
    assert "paid from the till" in out


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["run", "team/hello.md", "x"], ["workers", "team"]]
)
def test_output_that_cannot_be_written_is_reported(folder: Path, arguments: list[str], buffered: bool):
    """If standard output can't be written to, for example on a full disk, a message is printed instead of a traceback."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("handrail")), *arguments],
            cwd=folder.parent,
            env={**environment(), "PYTHONUNBUFFERED": "" if buffered else "1"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_run_that_is_not_recorded_says_so(folder: Path, here: Here):
    """If the default journal can't be used, a message says so, and the run continues."""
    journal = default_journal(folder.parent)
    make_private_folder(journal.parent, folder.parent)
    journal.write_text("no journal at all")
    code, out, err = here("run", "team/hello.md", "x", "-q")
    assert (code, out) == (0, "Hello\\x1b[31m there.\n")
    assert "This run is not recorded" in err
    assert "--journal FILE" in err


def test_a_broken_worker_is_reported_with_its_line(folder: Path):
    """`run` and `workers check` report the file, the line and the problem of a broken worker, with exit code 2.

    Other workers still run, and the list of workers says which one can't be loaded.
    """
    (folder / "bad.md").write_text("---\nmodel: test:hello\ntols: [a]\n---\nGo.\n")
    for arguments in (
        ["run", "team/bad.md", "x"],
        ["workers", "check", "team"],
        ["workers", "check", "team/bad.md"],
    ):
        done = handrail(*arguments, cwd=folder.parent)
        assert done.returncode == 2
        assert "bad.md:3: " in done.stdout + done.stderr
        assert "tols" in done.stdout + done.stderr
    checked = handrail("workers", "check", "team/hello.md", cwd=folder.parent)
    assert (checked.returncode, checked.stdout) == (0, "team/hello.md: no problems found.\n")
    assert run(folder, "hello").returncode == 0  # the other workers still run
    listed = handrail("workers", "team", cwd=folder.parent)
    assert (listed.returncode, "hello\t" in listed.stdout, "bad" in listed.stdout) == (2, True, False)
    assert "can't load bad. `handrail workers check team` says why." in listed.stderr


def test_looking_at_workers_runs_nothing(folder: Path, here: Here):
    """`workers`, `list`, `show` and `check` run neither `tools.py` nor a model's module. `check --import` runs `tools.py`."""
    mark = f"import pathlib\npathlib.Path({str(folder / 'ran')!r}).touch()\n"
    with (folder / "tools.py").open("a") as tools:
        tools.write(f"{mark}def add(a: int) -> int:\n    'Add.'\n    return a\n")
    for place in (folder, folder.parent):
        (place / "planted.py").write_text(f"{mark}model = None\n")
    (folder / "hello.md").write_text("---\nmodel: planted:model\ntools: [add]\n---\nGo.\n")
    for words in (["team"], ["list", "team"], ["check", "team/hello.md"], ["show", "team/hello.md"]):
        code, out, err = here("workers", *words)
        assert (code, bool(out)) == (0 if "check" not in words else code, True), err
        assert not (folder / "ran").exists()
    here("workers", "check", "team")
    here("models", "--json")
    assert not (folder / "ran").exists()
    assert here("workers", "list", "team", "--import")[0] == 2
    assert here("workers", "check", "team/hello.md", "--import")[0] == 0
    assert (folder / "ran").exists()


def test_tracebacks_are_shown_on_request(folder: Path):
    """A traceback is shown only with `--verbose` or HANDRAIL_DEBUG=1."""
    assert "Traceback" in run(folder, "failing", "--verbose").stderr
    assert "Traceback" in run(folder, "failing", env=environment(HANDRAIL_DEBUG="1")).stderr  # pyright: ignore[reportArgumentType]
    assert "Traceback" not in run(folder, "failing").stderr


# --- standard output and standard error ---


def test_only_the_answer_goes_to_standard_output(folder: Path):
    """Standard output contains only the answer. Everything else goes to standard error, where a successful run with `--quiet` writes nothing."""
    done = run(folder, "writer", "--approve", "all")
    assert done.stdout == "Written.\n"
    assert "I write." in done.stderr
    assert "✓ write path=a.txt" in done.stderr
    assert (folder / "files" / "a.txt").read_text() == "new\n"
    quiet = run(folder, "hello", "--quiet")
    assert (quiet.stdout, quiet.stderr) == ("Hello\\x1b[31m there.\n", "")


@pytest.mark.parametrize("worker", ["hello", "writer", "half", "payer", "failing", "caller"])
def test_nothing_piped_has_an_escape(folder: Path, worker: str):
    """Piped output has no colours, no spinner and no cursor movement: neither stream contains an escape or a carriage return."""
    done = run(folder, worker, "--deadline", "1s")
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr


def test_force_color_colours_a_pipe(folder: Path):
    """`FORCE_COLOR` colours piped standard error unless `NO_COLOR` is set. The answer is never coloured."""
    forced = run(folder, "writer", env=environment(FORCE_COLOR="1"))  # pyright: ignore[reportArgumentType]
    assert "\x1b[" in forced.stderr
    assert "\x1b" not in forced.stdout
    both = run(folder, "writer", env=environment(FORCE_COLOR="1", NO_COLOR="1"))  # pyright: ignore[reportArgumentType]
    assert "\x1b" not in both.stderr


def test_json_is_one_object(folder: Path):
    """`--json` prints one line with the unescaped text, the usage, the cost and the run's id."""
    done = run(folder, "hello", "--json")
    said = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert said["run_id"]
    assert {**said, "run_id": ""} == {
        "ok": True,
        "exit_code": 0,
        "text": "Hello\x1b[31m there.",
        "output": None,
        "attachments": [],
        "stop_reason": "done",
        "not_approved": [],
        "usage": {"input": 12, "output": 3, "cached": 0, "requests": 1},
        "cost": None,
        "run_id": "",
    }


_TYPED = """
from handrail import Agent, ScriptedModel, ToolCall
from handrail.messages import Traits
from handrail.models.scripted import Reply

CALL = Reply("Here it is.", [ToolCall("final_answer", {"value": VALUE})])
native = Agent(ScriptedModel(['{"value": WRITTEN}']), "x", output=TYPE)
by_call = Agent(ScriptedModel([CALL], traits=Traits()), "x", output=TYPE)
"""


@pytest.mark.parametrize(
    ("kind", "value", "printed"),
    [
        ("int", 5, "5\n"),
        ("list[int]", [1, 2], "[\n  1,\n  2\n]\n"),
        ("int | str", "none", "none\n"),
        ("dict[str, int]", {"a": 1}, '{\n  "a": 1\n}\n'),
    ],
)
def test_a_typed_answer_is_printed_as_its_value(
    folder: Path, here: Here, kind: str, value: object, printed: str
):
    """Standard output has the value alone, whether the model sent it in an object or by a call with text before it."""
    text = _TYPED.replace("TYPE", kind).replace("VALUE", repr(value)).replace("WRITTEN", json.dumps(value))
    (folder.parent / "typed.py").write_text(text)
    for name in ("native", "by_call"):
        assert here("run", f"typed.py:{name}", "x", "--no-journal")[:2] == (0, printed)


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["team/failing.md", "x"], 1, "PromptEvaluationError"),
        (["team/none", "x"], 2, "WorkerError"),
        (["team/hello.md", "x", "--approve", "maybe"], 2, "UsageError"),
        (["team/nobody.md", "x"], 2, "WorkerError"),
        (["team/slow.md", "x", "--deadline", "0.2"], 4, "PromptEvaluationError"),
    ],
)
def test_errors_are_json_too(folder: Path, arguments: list[str], code: int, kind: str, here: Here):
    """With `--json`, an error is printed as an object with the exit code, the kind and the message."""
    ended, out, _ = here("run", *arguments, "--json")
    said = json.loads(out)
    assert (ended, said["ok"], said["exit_code"], said["error"]["kind"]) == (
        code,
        False,
        code,
        kind,
    )
    assert said["error"]["message"]


def test_json_says_what_was_not_approved(folder: Path):
    """With `--json`, the object lists the tools whose calls were not approved."""
    said = json.loads(run(folder, "payer", "--json").stdout)
    assert (said["ok"], said["exit_code"], said["not_approved"]) == (False, 3, ["pay"])


# --- input ---


@pytest.mark.parametrize("given", [[], ["-"]])
def test_input_can_be_piped(folder: Path, given: list[str]):
    """Without a message, or with `-`, the message is read from standard input."""
    done = handrail("run", "team/hello.md", *given, "--json", cwd=folder.parent, stdin="a\nb\n")
    assert json.loads(done.stdout)["ok"] is True


def test_binary_input_is_refused(folder: Path):
    """Binary input is refused with the advice to attach it as a file."""
    done = handrail("run", "team/hello.md", cwd=folder.parent, stdin=b"\xff\xfe")
    assert done.returncode == 2
    assert "Attach it as a file" in done.stderr


def test_files_are_attached_by_the_workers_rule(folder: Path):
    """A worker that accepts one attachment refuses two."""
    (folder.parent / "a.txt").write_text("hello")
    assert run(folder, "hello", "-a", "a.txt").returncode == 0
    two = run(folder, "hello", "-a", "a.txt", "-a", "team/files/a.txt")
    assert two.returncode == 2


def test_a_worker_is_found_by_file_by_name_and_by_folder(folder: Path):
    """A worker can be named by its file, by its folder and name, or by a folder that contains `main.md`."""
    for named in ("team/hello.md", "team/hello"):
        assert handrail("run", named, "x", cwd=folder.parent).returncode == 0
    (folder / "main.md").write_text("---\nmodel: test:hello\n---\nGo.\n")
    assert handrail("run", "team", "x", cwd=folder.parent).returncode == 0


def test_other_files_and_another_model(folder: Path):
    """`--files` sets the folder that may be changed, and `--model` overrides the model in the worker's file."""
    other = folder.parent / "other"
    other.mkdir()
    assert run(folder, "writer", "--approve", "all", "--files", "other").returncode == 0
    assert (other / "a.txt").read_text() == "new\n"
    assert (folder / "files" / "a.txt").read_text() == "old\n"
    assert run(folder, "writer", "--model", "test:hello", "-q").stdout == "Hello\\x1b[31m there.\n"


def test_chat_reads_piped_lines(folder: Path):
    """In a piped chat, each line is a message or a command, and the exit code is that of the last turn."""
    done = handrail("chat", "team/hello.md", cwd=folder.parent, stdin="one\n/cost\ntwo\n/nonsense\n")
    assert done.stdout == "Hello\\x1b[31m there.\n" * 2
    assert "1 request · 12 tokens in, 3 out" in done.stderr
    assert "There is no command /nonsense" in done.stderr
    assert done.returncode == 0
    assert handrail("chat", "team/payer.md", cwd=folder.parent, stdin="one\n").returncode == 3
    quiet = handrail("chat", "team/failing.md", "-q", cwd=folder.parent, stdin="one\n")
    assert (quiet.returncode, quiet.stdout, "the key is wrong" in quiet.stderr) == (1, "", True)


def test_a_failed_turn_counts_in_the_cost_of_a_chat(tmp_path: Path):
    """`/cost` includes what a run used before it failed."""
    (tmp_path / "app.py").write_text(
        "from handrail import Agent, ScriptedModel, ToolCall, tool\n"
        "@tool(effect='pure')\n"
        "def look() -> str:\n    'Look.'\n    return 'seen'\n"
        "agent = Agent(ScriptedModel([ToolCall('look', {})]), 'Help.', tools=[look])\n"
    )
    failed = handrail("chat", "app", cwd=tmp_path, stdin="one\n/cost\n")
    assert "has no answer to request 2" in failed.stderr
    assert "1 request · 0 tokens in, 0 out · cost unknown" in failed.stderr


def test_a_conversation_is_continued(tmp_path: Path):
    """`--continue` goes on with the newest conversation with this agent, in another process, and says so if there is none."""
    (tmp_path / "app.py").write_text(
        "from handrail import Agent, ScriptedModel\n"
        "agent, other = (Agent(ScriptedModel(lambda request: f'{len(request.messages)} messages'), 'Help.') for _ in range(2))\n"
    )
    none = handrail("run", "app.py", "hello", "--continue", cwd=tmp_path)
    assert (none.returncode, "Leave out --continue" in none.stderr) == (2, True)
    for app, more, said in (
        ("app:agent", [], "1 messages"),
        ("app:other", [], "1 messages"),
        ("app:agent", ["--continue"], "3 messages"),
        ("app:agent", [], "1 messages"),
        ("app:agent", ["-c"], "3 messages"),
    ):
        assert handrail("run", app, "hello", *more, cwd=tmp_path).stdout == f"{said}\n"
    assert (
        handrail("chat", "app:agent", "-c", cwd=tmp_path, stdin="one\ntwo\n").stdout
        == "5 messages\n7 messages\n"
    )


@pytest.mark.parametrize("files", ["files", "workspace:w"])
def test_an_undo_in_a_chat_is_recorded(tmp_path: Path, files: str):
    """`/undo` restores files and state, the model is told, and `runs show` says so. It reaches calls of earlier chats."""
    (tmp_path / "files").mkdir()
    (tmp_path / "app.py").write_text(
        "from handrail import Agent, ScriptedModel, ToolCall, ToolContext, tool\n"
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class Noted:\n    text: str\n"
        "@tool(effect='staged')\n"
        "def note(text: str, context: ToolContext) -> str:\n"
        "    'Note something.'\n"
        "    context.filesystem.write(text, text)\n"
        "    context.session.dispatch(Noted(text))\n"
        "    return 'noted ' + ' '.join(each.text for each in context.session[Noted].all())\n"
        "@tool(effect='read')\n"
        "def look(text: str, context: ToolContext) -> str:\n"
        "    'Look.'\n"
        "    return 'read ' + context.filesystem.read(text)\n"
        "@tool\n"
        "def send(text: str, context: ToolContext) -> str:\n"
        "    'Send a file.'\n"
        "    return 'read ' + context.filesystem.read(text)\n"
        "def answer(request):\n"
        "    last = [each for each in request.messages if 'was undone' not in each.text][-1]\n"
        "    if last.text in ('a', 'b'):\n"
        "        return ToolCall('note', {'text': last.text})\n"
        "    if last.text.startswith(('look', 'send')):\n"
        "        return ToolCall(last.text.split()[0], {'text': last.text.split()[1]})\n"
        "    told = [each.text for each in request.messages if 'was undone' in each.text]\n"
        "    return f'{last.text}, {len(told)} undone'\n"
        "agent = Agent(ScriptedModel(answer), 'Help.', tools=[note, look, send])\n"
    )
    first = handrail("chat", "app", "--files", files, cwd=tmp_path, stdin="a\n/undo\nb\n")
    assert first.stdout == "noted a, 0 undone\nnoted b, 1 undone\n"
    assert "Undone: a." in first.stderr
    again = handrail("chat", "app", "--files", files, "-c", cwd=tmp_path, stdin="/undo\n/undo\na\n")
    assert again.stdout == "noted a, 2 undone\n"
    assert ("Undone: b." in again.stderr, "Nothing to undo." in again.stderr) == (True, True)
    lines = json.loads(handrail("runs", "list", "--json", cwd=tmp_path).stdout)["runs"]
    shown = [handrail("runs", "show", line["run_id"], cwd=tmp_path).stdout for line in lines]
    assert ["  undone" in each for each in shown] == [False, True, True]
    read = handrail("chat", "app", "--files", files, "-c", cwd=tmp_path, stdin="look a\n/undo\n")
    assert "Undone: a. Later calls that had used it are undone too: look." in read.stderr
    sent = handrail("chat", "app", "--files", files, cwd=tmp_path, stdin="b\nlook b\nsend b\n/undo\n")
    assert "a later call has" in sent.stderr
    newest = json.loads(handrail("runs", "list", "--json", cwd=tmp_path).stdout)["runs"][:3]
    assert not [
        each for each in newest if "  undone" in handrail("runs", "show", each["run_id"], cwd=tmp_path).stdout
    ]


def test_an_unfinished_conversation_is_answered_before_it_is_continued(tmp_path: Path):
    """If the newest conversation waits for an answer, `--continue` says how to give it, or how to cancel the run."""
    (tmp_path / "app.py").write_text(
        "from handrail import Agent, CapabilityPolicy, ScriptedModel, ToolCall, tool\n"
        "@tool\n"
        "def pay() -> str:\n    'Pay.'\n    return 'paid'\n"
        "def answer(request):\n"
        "    asked = request.messages[-1].text == 'pay'\n"
        "    return ToolCall('pay', {}) if asked else f'{len(request.messages)} messages'\n"
        "agent = Agent(ScriptedModel(answer), 'Help.', tools=[pay], policies=[CapabilityPolicy()])\n"
    )
    assert handrail("run", "app", "hello", cwd=tmp_path).returncode == 0
    assert handrail("run", "app", "pay", "--continue", "--approve", "later", cwd=tmp_path).returncode == 5
    for command in ("run", "chat"):
        refused = handrail(command, "app", *(["so"] if command == "run" else []), "-c", "-q", cwd=tmp_path)
        assert refused.returncode == 2
        commands = re.findall(r"`handrail (runs \w+) (\w+)", refused.stderr)
        assert [verb for verb, _ in commands] == ["runs answer", "runs resume", "runs cancel"]
    assert handrail("runs", "cancel", commands[-1][1], cwd=tmp_path).returncode == 0
    assert handrail("run", "app", "so", "-c", cwd=tmp_path).stdout == "6 messages\n"


# --- `new`, `workers`, and the program itself ---


def test_new_makes_a_folder_that_runs_at_once(tmp_path: Path):
    """`handrail new demo` creates valid workers, which run without a key, and says how to run them.

    It never overwrites an existing folder.
    """
    made = handrail("new", "demo", cwd=tmp_path)
    assert made.returncode == 0
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == [
        "README.md",
        "files",
        "main.md",
        "reviewer.md",
        "tools.py",
    ]
    assert "handrail run demo/main.md" in made.stdout
    assert handrail("workers", "check", "demo", cwd=tmp_path).returncode == 0
    done = handrail("run", "demo/main.md", "buy bread", "--approve", "all", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert WHAT_IT_IS in done.stderr  # the demonstration model says what it is
    assert "✓ reviewer" in done.stderr
    assert (tmp_path / "demo/files/notes.txt").read_text().endswith("- buy bread\n")
    before = (tmp_path / "demo/main.md").read_text()
    assert handrail("new", "demo", cwd=tmp_path).returncode == 2
    assert (tmp_path / "demo/main.md").read_text() == before


def test_the_starter_is_whole():
    """The package contains all files of the starter. Its tools are in `tools.py.txt`, so they are never imported."""
    assert sorted(path.name for path in STARTER.iterdir() if path.name != "__pycache__") == [
        "README.md",
        "files",
        "main.md",
        "reviewer.md",
        "tools.py.txt",
    ]


def test_there_is_one_demonstration():
    """The demonstration model is found by name like any other model, and an unknown demonstration is refused."""
    assert isinstance(model_named("demo:notes"), DemoModel)
    with pytest.raises(DefinitionError, match="no demonstration 'songs'"):
        DemoModel("songs")


def test_workers_are_listed_and_shown(folder: Path):
    """`workers` prints one line for each worker, and `workers show` prints one worker in full."""
    listed = handrail("workers", "team", cwd=folder.parent)
    assert "hello\ttest:hello\tSays hello.\n" in listed.stdout
    assert handrail("workers", "list", "team", cwd=folder.parent).stdout == listed.stdout
    shown = handrail("workers", "show", "team/writer.md", cwd=folder.parent)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "tools        write" in shown.stdout
    assert "You are writer." in shown.stdout


def test_version_and_help():
    """`handrail` and `python -m handrail` both work, and the help lists the exit codes."""
    here = Path(sys.executable).parent
    for command in (HANDRAIL, [str(here / "handrail")]):
        version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert version.stdout.startswith("handrail 0.")
    shown = handrail("run", "--help", cwd=here)
    assert shown.returncode == 0
    words = " ".join(shown.stdout.split())
    assert "3 the run ended, but something it wanted to do was not approved" in words


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["run", "--help"]])
def test_help_loads_little(arguments: list[str]):
    """Printing the help or the version loads no workers, no adapter and no libraries that only a run needs."""
    code = (
        "import sys\n"
        f"sys.argv = ['handrail', *{arguments!r}]\n"
        "from handrail.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "late = ('handrail.workers', 'handrail.run.adapter', 'rich.live', 'yaml', 'jinja2')\n"
        "sys.stderr.write(repr([name for name in late if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_how_to_get_it(missing: str):
    """If a package of the extra `cli` is missing, the program says how to install the extra."""
    code = (
        "import sys\n"
        f"sys.modules[{missing!r}] = None\n"
        "sys.argv = ['handrail', 'workers', 'team']\n"
        "from handrail.cli import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'handrail[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


# --- signals, sent to a real process ---


def started(folder: Path, worker: str, *more: str, until: str) -> warm_python.Program:
    """Start a run, and wait until it has written this text to standard error."""
    command = ["-m", "handrail", "run", f"team/{worker}.md", "go", *more]
    process = warm_python.start(command, cwd=folder.parent, env=environment())
    assert process.stderr is not None
    seen = ""
    while until not in seen:
        line = process.stderr.readline()
        assert line, f"the program ended early: {seen}"
        seen += line
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_and_leaves_the_files_as_they_were(folder: Path, number: signal.Signals, code: int):
    """After a signal, unfinished calls end, their changes are undone, and a message says so."""
    process = started(folder, "half", until="at it")
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (code, "")
    assert "■ half_done" in err
    assert "Cancelled. Unfinished calls were undone." in err
    assert os.listdir(folder / "files") == ["a.txt"]


def test_a_cancelled_run_is_json_too(folder: Path):
    """With `--json`, a cancelled run is reported by its exit code and error kind."""
    process = started(folder, "half", "--json", until="at it")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=300)
    said = json.loads(out)
    assert (process.returncode, said["exit_code"], said["error"]["kind"]) == (130, 130, "Cancelled")


def test_a_second_ctrl_c_ends_it_at_once(folder: Path):
    """A second Ctrl-C ends the program at once, even if a handler ignores the cancellation."""
    process = started(folder, "deaf", until="deaf")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "Cancelling" not in process.stderr.readline():
        assert process.poll() is None
    while not (folder.parent / "ignored").exists():  # the tool creates it when it ignores the cancellation
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 130


def test_a_log_moves_no_cursor(folder: Path):
    """Control characters in tracebacks are escaped, because tracebacks contain text from tools."""
    tools = folder / "tools.py"
    tools.write_text(tools.read_text().replace("a secret place", "a \\x1b[2J place"))
    done = run(folder, "crasher", "--verbose")
    assert "a \\x1b[2J place in the code" in done.stderr
    assert "Traceback" in done.stderr
    assert "\x1b" not in done.stderr


# --- printed output, closed streams, unusual input ---

NOISE = '''
import subprocess
import sys

print("loaded")


@tool(effect="read")
def noisy() -> str:
    """Print."""
    print("from a tool")
    sys.stdout.flush()
    subprocess.run(["echo", "from a child"])
    return "quiet"


script("noise", [ToolCall("noisy", {})], "The answer.")
'''


@pytest.fixture
def noisy(folder: Path) -> Path:
    with (folder / "tools.py").open("a") as tools:
        tools.write(NOISE)
    (folder / "loud.md").write_text("---\nmodel: test:noise\ntools: [noisy]\n---\nBe loud.\n")
    return folder


def test_what_tools_print_is_not_part_of_the_answer(noisy: Path):
    """Standard output contains only the answer or the JSON object. What tools print goes to standard error."""
    plain = run(noisy, "loud")
    assert plain.stdout == "The answer.\n"
    said = run(noisy, "loud", "--json")
    assert json.loads(said.stdout)["text"] == "The answer."
    talked = handrail("chat", "team/loud.md", cwd=noisy.parent, stdin="go\n")
    assert talked.stdout == "The answer.\n"
    for each in (plain, said, talked):
        assert all(words in each.stderr for words in ("loaded", "from a tool", "from a child"))
    listed = handrail("workers", "team", cwd=noisy.parent)
    assert "loaded" not in listed.stdout
    assert all(line.count("\t") == 2 for line in listed.stdout.splitlines())


@pytest.mark.parametrize(
    ("closed", "more", "code", "out"),
    [
        ("<&-", "", 0, "Hello"),
        (">&-", "", 0, ""),
        ("2>&-", "", 0, "Hello"),
        ("2>&-", "--json", 0, '{"ok": true'),
        ("2>&-", "--deadline soon", 2, ""),
        ("<&- >&- 2>&-", "--approve all", 0, ""),
    ],
)
def test_closed_streams_are_harmless(folder: Path, closed: str, more: str, code: int, out: str):
    """If streams are closed, there is no traceback, and no output goes to the wrong stream."""
    command = f"{shlex.join(HANDRAIL)} run team/hello.md go {more} {closed}"
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder.parent, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == code
    assert done.stdout.startswith(out)
    assert done.stdout.count("\n") == bool(out)
    assert "Traceback" not in done.stderr


def test_characters_outside_the_encoding_are_escaped(folder: Path):
    """Characters that standard output's encoding lacks are escaped in the answer."""
    tools = folder / "tools.py"
    tools.write_text(tools.read_text().replace("Hello", "Grüße"))
    env = environment(PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    done = handrail("run", "team/hello.md", "go", cwd=folder.parent, env=env)
    assert (done.returncode, done.stdout) == (0, "Gr\\xfc\\xdfe\\x1b[31m there.\n")


@pytest.mark.parametrize("command", [["workers"], ["workers", "check"], ["workers", "show"], ["new"]])
def test_a_path_that_is_too_long_is_reported(command: list[str], here: Here):
    """A path that is too long for the system is reported in one line, without a traceback."""
    code, _, err = here(*command, f"{'x' * 300}/y")
    assert code in (1, 2)
    assert err.startswith("handrail: ")
    assert err.count("\n") == 1


def test_chat_takes_odd_commands(folder: Path):
    """Chat commands with unusual digits or huge numbers are refused, and the chat continues."""
    lines = "\n".join(["/approvals ²", f"/approvals {'9' * 5000}", "/", "hi", ""])
    done = handrail("chat", "team/hello.md", cwd=folder.parent, stdin=lines)
    assert done.returncode == 0
    assert done.stderr.count("There is no decision") == 2
    assert done.stdout.startswith("Hello")


def test_ctrl_c_ends_a_piped_chat(folder: Path):
    """Ctrl-C ends a piped chat. (In a chat at a terminal, it does not.)"""
    process = warm_python.start(
        ["-m", "handrail", "chat", "team/hello.md"], cwd=folder.parent, env=environment()
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("hi\n")
    process.stdin.flush()
    assert process.stdout.readline().startswith("Hello")
    # Wait until the program reads its next message.
    while "pipe_read" not in Path(f"/proc/{process.pid}/wchan").read_text():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == 130
    process.close()


def test_an_error_in_the_apps_code_is_not_called_a_bug_of_ours(here: Here, tmp_path: Path):
    """An error that comes through a line of the app names the innermost such line, also if Handrail raised it there."""
    (tmp_path / "app.py").write_text(
        "import json\n"
        "from handrail import Agent, ScriptedModel\n"
        "def answer(request):\n    return {}['key']\n"
        "def decode(request):\n    return json.loads('{')\n"
        "def misuse(request):\n    return Agent('openai:m', nonsense=1)\n"
        "a, b, c = (Agent(ScriptedModel(each), 'Help.') for each in (answer, decode, misuse))\n"
    )
    for name, kind, line in (("a", "KeyError: 'key'", 4), ("b", "JSONDecodeError", 6), ("c", "TypeError", 8)):
        code, _, said = here("run", f"{tmp_path / 'app.py'}:{name}", "hi", "--no-journal")
        assert (code, kind in said, f"app.py, line {line}." in said, "bug" in said) == (1, True, True, False)


def test_an_error_in_our_code_is_a_bug():
    wrong: Any = None
    with pytest.raises(AttributeError) as raised:
        escape(wrong)
    traceback = raised.value.__traceback__
    assert traceback is not None
    ours = raised.value.with_traceback(traceback.tb_next)  # without the line of this test
    message = Failure.of(ours).message
    assert "This is a bug in Handrail" in message
    assert "HANDRAIL_DEBUG=1" in message


def test_the_message_of_a_parked_run_without_open_questions_names_none():
    """If a run was parked by force, the message names no question and says how to resume the run."""
    message = Failure.of(RunParked("run", ())).message
    assert (
        message
        == "The run was parked, and it has no open question. Continue it with `handrail runs resume run`."
    )


def test_an_approval_can_be_answered_later(folder: Path):
    """With `--approve later`, a run that needs approval is parked with exit code 5, and its question can be answered later.

    The answer needs the question's digest, and the run needs a journal.
    """
    parked = run(folder, "writer", "--approve", "later")
    assert parked.returncode == 5
    assert "The run waits for an answer to write." in parked.stderr
    listed = json.loads(handrail("runs", "list", "--json", cwd=folder.parent).stdout)
    run_id = listed["runs"][0]["run_id"]
    refused = handrail("runs", "answer", run_id, "--approve", cwd=folder.parent)
    assert "--digest is missing" in refused.stderr
    shown = json.loads(handrail("runs", "show", run_id, "--json", cwd=folder.parent).stdout)
    seen = ("--digest", shown["waiting"][0]["digest"][:16])
    answered = handrail("runs", "answer", run_id, "--approve", *seen, cwd=folder.parent)
    assert f"Continue with: handrail runs resume {run_id}" in answered.stdout
    elsewhere = run(folder, "writer", "--approve", "later", "--journal", "my runs.db")
    assert "--journal 'my runs.db'`, then `handrail runs resume" in elsewhere.stderr
    alone = run(folder, "writer", "--approve", "later", "--no-journal")
    assert (alone.returncode, "--journal FILE" in alone.stderr) == (2, True)


_SEND = """
from pathlib import Path
from handrail import WorkerContext, tool

@tool
def send(context: WorkerContext) -> str:
    \"""Send the attachments.\"""
    Path("sent.txt").write_text(" ".join(f"{each.name}: {each.text()}" for each in context.attachments))
    return "sent"
"""


def test_a_resumed_run_has_its_attachments(folder: Path, here: Here):
    """`runs resume` runs an approved call with the attachments of the run, even if the attached file is gone."""
    post, attached, journal = folder.parent / "post", folder.parent / "a.txt", ("--journal", "runs.db")
    post.mkdir()
    attached.write_text("hello")
    (post / "tools.py").write_text(_SEND)
    (post / "scripted_post.py").write_text(
        "from handrail import ScriptedModel, ToolCall\nmodel = ScriptedModel([ToolCall('send'), 'Done.'])\n"
    )
    (post / "main.md").write_text(
        "---\nmodel: scripted_post:model\ntools: [send]\nattachments: {count: 1}\n---\nSend.\n"
    )
    assert here("run", "post/main.md", "go", "-a", "a.txt", "--approve", "later", *journal)[0] == 5
    attached.unlink()
    run_id = json.loads(here("runs", "list", "--json", *journal)[1])["runs"][0]["run_id"]
    (waiting,) = json.loads(here("runs", "show", run_id, "--json", *journal)[1])["waiting"]
    assert here("runs", "answer", run_id, "--approve", "--digest", waiting["digest"][:16], *journal)[0] == 0
    code, out, _ = here("runs", "resume", run_id, *journal)
    assert (code, "Done." in out) == (0, True)
    assert (folder.parent / "sent.txt").read_text() == "a.txt: hello"


@pytest.mark.parametrize("built", [True, False])
def test_serve_says_in_the_terminal_if_the_page_is_not_built(monkeypatch: pytest.MonkeyPatch, built: bool):
    """If the page is not built, the note beside the server's address says how to build it."""
    monkeypatch.setattr("handrail.serve.pages.is_built", lambda: built)
    assert ("run scripts/page" in page_note()) is not built


def test_a_page_without_libraries_is_not_built(tmp_path: Path):
    """The page counts as built once its folder `vendor` contains a file."""
    assert not is_built(tmp_path)
    (tmp_path / "vendor").mkdir()
    assert not is_built(tmp_path)
    (tmp_path / "vendor" / "lib.js").touch()
    assert is_built(tmp_path)


def test_a_chat_compacts_when_it_is_asked_to(tmp_path: Path):
    """`/compact` needs something to compact, and the next turn then says what is left out."""
    (tmp_path / "app.py").write_text(
        "from handrail import Agent, ScriptedModel\n"
        "agent = Agent(ScriptedModel(lambda request: 'word ' * 1000), 'Help.')\n"
    )
    done = handrail("chat", "app", cwd=tmp_path, stdin="/compact\none\ntwo\nthree\n/compact\nfour\n")
    assert "Nothing has been said yet." in done.stderr
    assert "The conversation will be compacted before the next request." in done.stderr
    assert done.stderr.count("· conversation compacted: of 7 messages, ") == 1
