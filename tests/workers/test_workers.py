"""Workers: agents defined in files and called by name, through the gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    Budget,
    CapabilityPolicy,
    MemoryFilesystem,
    Prompt,
    PromptEvaluationError,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    WorkerContext,
    WorkerRegistry,
    open_gate,
    tool,
)
from handrail.content import Attachment
from handrail.errors import DefinitionError, WorkerError
from handrail.events import MessageAdded, ModelRequested
from handrail.journal.sqlite import MemoryJournal
from handrail.models.scripted import Reply
from handrail.testing import Nobody, worker_context
from support.worker_folders import PLAIN, Watched, folder, sound

S3 = '''
from handrail.tools import tool_context

@tool_context
async def analyze_config(raw: str, ctx) -> str:
    """Analyze a config."""
    return await ctx.call_worker("config_parser", raw)
'''
MAIN = "---\ntools: [analyze_config]\nworkers: [config_parser]\n---\nLook at configs."


async def test_the_example_of_the_source_runs_as_written(tmp_path: Path) -> None:
    """A function in tools.py calls a worker and returns the worker's text, which the model gets as the result."""
    registry = sound(tmp_path, S3, main=MAIN, config_parser=PLAIN)
    main = ScriptedModel([ToolCall("analyze_config", {"raw": "a = 1"}), "It is fine."])
    parser = ScriptedModel(["one key"])
    watched = Watched()
    response = await registry.run(
        "main", "check it", model=main, models={"config_parser": parser},
        approvals="approve_all", session=watched.session,
    )  # fmt: skip
    assert response.text == "It is fine."
    assert main.requests[1].messages[-1].text == "one key"
    assert parser.requests[0].messages[0].text == "a = 1"
    assert watched.ended == [("analyze_config > config_parser", "ok"), ("analyze_config", "ok")]


async def test_the_context_is_hidden_from_the_schema(tmp_path: Path) -> None:
    """The model sees only `raw` in the schema, and a call that passes `ctx` is refused before anything runs."""
    registry = sound(tmp_path, S3, main=MAIN, config_parser=PLAIN)
    (made,) = [each for each in registry["main"].prompt.tools if each.name == "analyze_config"]
    assert made.json_schema == {
        "type": "object",
        "properties": {"raw": {"type": "string"}},
        "required": ["raw"],
        "additionalProperties": False,
    }
    main = ScriptedModel([ToolCall("analyze_config", {"raw": "a", "ctx": {"depth": 0}}), "sorry"])
    watched = Watched()
    await registry.run("main", "go", model=main, approvals="approve_all", session=watched.session)
    assert "ctx" in main.requests[1].messages[-1].text
    assert watched.ended == [("analyze_config", "invalid")]


async def test_a_function_without_an_effect_asks(tmp_path: Path) -> None:
    """A function that declares no effect needs approval by default, and `policies: []` removes that requirement."""
    for text, status in ((MAIN, "denied"), (MAIN.replace("---\ntools", "---\npolicies: []\ntools"), "ok")):
        registry = sound(tmp_path / status, S3, main=text, config_parser=PLAIN)
        watched = Watched()
        script = ScriptedModel([ToolCall("analyze_config", {"raw": "a"}), "end"])
        await registry.run(
            "main",
            "go",
            model=script,
            models={"config_parser": ScriptedModel(["x"])},
            session=watched.session,
        )
        assert watched.ended[-1] == ("analyze_config", status)


OUTPUT = """
    ---
    output:
      type: object
      properties:
        keys: {type: array, items: {type: string}, description: Their names.}
        schema: {type: integer, minimum: 0}
        class: {enum: [small, large]}
      required: [keys, schema]
    ---
    Parse.
    """


@pytest.mark.parametrize("native", [True, False])
async def test_an_output_schema_is_enforced_and_its_value_is_plain_data(tmp_path: Path, native: bool) -> None:
    """A model must correct an output that does not match the schema, and the value is a plain dict."""
    from handrail.messages import Traits

    registry = sound(tmp_path, parser=OUTPUT)
    good = {"keys": ["a"], "schema": 2}
    bad = {"keys": ["a"], "schema": -1, "class": "tiny", "more": 1}
    if native:
        script = ScriptedModel(
            ['{"keys": ["a"], "schema": -1, "class": "tiny", "more": 1}', '{"keys": ["a"], "schema": 2}']
        )
    else:
        calls = [ToolCall("final_answer", bad), ToolCall("final_answer", good)]
        script = ScriptedModel(calls, traits=Traits(native_output=False))
    response = await registry.run("parser", "x", model=script)
    assert response.output == good
    told = script.requests[1].messages[-1].text
    assert all(word in told for word in ("schema", "class", "more"))


async def test_call_worker_gives_the_output_and_fails_with_the_result(tmp_path: Path) -> None:
    """`call_worker` returns a worker's value or raises `CallFailed`, and `call` returns a `ToolResult`."""
    tools = '''
    from handrail import CallFailed, ToolContext, tool

    @tool(effect="idempotent", capabilities={"own"})
    async def look(context: ToolContext) -> list[str]:
        """Look at something."""
        seen = [repr(await context.call_worker("parser", {"a": 1}))]
        result = await context.call("parser", input="x")
        seen.append(f"{result.success} {result.value}")
        try:
            await context.call_worker("parser", "y")
        except CallFailed as error:
            seen.append(f"{type(error).__name__} {error.result.success}")
        return seen
    '''
    main = "---\npolicies: []\ntools: [look]\nworkers: [parser]\n---\nGo."
    registry = sound(tmp_path, tools, main=main, parser=OUTPUT)
    parser = ScriptedModel(
        ['{"keys": [], "schema": 1}', '{"keys": [], "schema": 2}', RuntimeError("broken"), *["x"] * 9]
    )
    script = ScriptedModel([ToolCall("look", {}), "end"])
    response = await registry.run("main", "go", model=script, models={"parser": parser})
    assert response.text == "end"
    assert parser.requests[0].messages[0].text == '{"a":1}'
    told = script.requests[1].messages[-1].text
    assert "{'keys': [], 'schema': 1}" in told
    assert "True {'keys': [], 'schema': 2}" in told
    assert "CallFailed False" in told


REACHING = '''
from handrail import CallFailed, ToolContext, tool

@tool(effect="irreversible")
async def reach(how: str, name: str, context: ToolContext) -> str:
    """Reach for something."""
    if how == "call":
        return (await context.call(name, input="x")).message
    try:
        return await context.call_worker(name, "x")
    except CallFailed as error:
        return error.result.message

@tool(effect="pure")
def unlisted() -> str:
    """Is not listed."""
    return "reached"

def imported_elsewhere() -> None:
    """Never listed."""
'''


@pytest.mark.parametrize("how", ["call", "call_worker"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("other", "main may not call the worker other"),
        ("unlisted", "unlisted"),
        ("listedd", "Did you mean"),
        ("nobody", "There is no tool 'nobody'"),
    ],
)
async def test_what_is_not_listed_is_not_reached(tmp_path: Path, how: str, name: str, said: str) -> None:
    """No unlisted worker, unlisted function or unknown name can be called, with `call` or with `call_worker`."""
    main = "---\npolicies: []\ntools: [reach]\nworkers: [listed]\n---\nGo."
    registry = sound(tmp_path, REACHING, main=main, listed=PLAIN, other=PLAIN)
    other = ScriptedModel([])
    script = ScriptedModel([ToolCall("reach", {"how": how, "name": name}), "end"])
    await registry.run("main", "go", model=script, models={"other": other, "listed": other})
    assert said in script.requests[1].messages[-1].text
    assert other.requests == []


async def test_a_model_reaches_no_more_than_code_does(tmp_path: Path) -> None:
    """Unlisted workers and functions are not offered to the model, and its calls to them are refused."""
    main = "---\npolicies: []\ntools: [reach]\nworkers: [listed]\n---\nGo."
    registry = sound(tmp_path, REACHING, main=main, listed=PLAIN, other=PLAIN)
    offered: list[str] = []
    script = ScriptedModel([[ToolCall("other", {"input": "x"}), ToolCall("unlisted", {})], "end"])
    watched = Watched()
    await registry.run("main", "go", model=script, session=watched.session)
    offered = [each.tool.name for each in script.requests[0].tools]
    assert offered == ["reach", "listed"]
    assert watched.ended == [("other", "invalid"), ("unlisted", "invalid")]


async def test_a_prompt_evaluated_in_a_workers_tool_reaches_what_the_worker_does(tmp_path: Path) -> None:
    """The tools of a prompt that a worker's tool evaluates get a `WorkerContext`, and can't call workers that the worker may not call."""
    tools = '''
    from handrail import Prompt, ToolContext, WorkerContext, tool

    @tool
    async def inner(context: ToolContext) -> str:
        """Inner."""
        assert isinstance(context, WorkerContext)
        return (await context.call("other", input="x")).message

    @tool
    async def outer(context: ToolContext) -> str:
        """Outer."""
        return (await context.adapter.evaluate(Prompt("p", "Go.", tools=[inner]), "x")).text
    '''
    registry = sound(
        tmp_path, tools, main="---\npolicies: []\ntools: [outer]\n---\nGo.", other=PLAIN,
    )  # fmt: skip
    script = ScriptedModel([ToolCall("outer", {}), ToolCall("inner", {}), "nested", "end"])
    await registry.run("main", "go", model=script)
    assert "main may not call the worker other" in script.requests[2].messages[-1].text


async def test_call_worker_does_not_call_plain_tools(tmp_path: Path) -> None:
    """`call_worker` with the name of a plain tool is refused, and the tool does not run."""
    main = "---\npolicies: []\ntools: [reach, unlisted]\nworkers: []\n---\nGo."
    registry = sound(tmp_path, REACHING, main=main)
    script = ScriptedModel([ToolCall("reach", {"how": "call_worker", "name": "unlisted"}), "end"])
    watched = Watched()
    await registry.run("main", "go", model=script, session=watched.session)
    assert "a tool here, not a worker" in script.requests[1].messages[-1].text
    assert watched.ended == [("reach", "ok")]


async def test_a_journal_given_beside_an_adapter_records_the_run(tmp_path: Path) -> None:
    registry, journal = sound(tmp_path, main=PLAIN), MemoryJournal()
    adapter = Adapter(ScriptedModel(["fine"]))
    response = await registry.run("main", "x", adapter=adapter, journal=journal)
    assert [row.record.id for row in await journal.runs.list()] == [response.run_id]


async def test_an_adapter_given_workers_lets_any_run_call_them(tmp_path: Path) -> None:
    """With `Adapter(model, workers=registry)`, a plain prompt's tools can call workers with `call_worker` and `call`.

    A value that is not a registry is refused.
    """
    registry = sound(tmp_path, helper=PLAIN)
    seen: list[Any] = []

    @tool
    async def ask(context: ToolContext) -> str:
        """Ask the helper."""
        assert not isinstance(context, WorkerContext)
        seen.append(await context.call_worker("helper", "one"))
        seen.append((await context.call("helper", input="two")).value)
        return "done"

    script = ScriptedModel([ToolCall("ask", {}), "first", "second", "end"])
    response = await Adapter(script, workers=registry).evaluate(Prompt("p", "Go.", tools=[ask]), "go")
    assert (response.text, seen) == ("end", ["first", "second"])
    with pytest.raises(DefinitionError, match="workers is a str"):
        Adapter(script, workers="folder")  # pyright: ignore[reportArgumentType]


async def test_a_prompts_tool_may_not_hide_a_worker(tmp_path: Path) -> None:
    """A prompt with a tool that has the same name as a worker is refused before the run begins."""
    registry = sound(tmp_path, helper=PLAIN)

    @tool
    def helper() -> str:
        """Help somebody."""
        return ""

    with pytest.raises(DefinitionError, match="'helper'"):
        await Adapter(ScriptedModel(["x"]), workers=registry).evaluate(
            Prompt("p", "Go.", tools=[helper]), "go"
        )


async def test_a_worker_is_a_tool_of_any_prompt(tmp_path: Path) -> None:
    """`registry.tool(name)` is a tool with the worker's name and description, and with `input` as its argument."""
    registry = sound(tmp_path, helper="---\ndescription: Helps.\n---\nHelp.")
    made = registry.tool("helper")
    assert (made.name, made.description, made.effect) == ("helper", "Helps.", "idempotent")
    assert list(made.json_schema["properties"]) == ["input"]
    assert "description" not in made.json_schema
    script = ScriptedModel([ToolCall("helper", {"input": "x"}), "helped", "end"])
    prompt = Prompt("p", "Go.", tools=[made], policies=[CapabilityPolicy()])
    response = await Adapter(script).evaluate(prompt, "go")
    assert response.text == "end"
    assert script.requests[1].system == "Help."


async def test_calling_a_worker_does_not_ask_but_its_capability_decides(tmp_path: Path) -> None:
    """A call to a worker needs no approval, whatever the worker may do. A policy can still deny the capability `worker`."""
    tools = '@__import__("handrail").tool\ndef burn() -> str:\n    """Burn."""\n    return "burnt"\n'
    helper = "---\ntools: [burn]\n---\nHelp."
    for line, wanted in (
        ("", [("helper > burn", "denied"), ("helper", "ok")]),
        ("policies: [capability: {deny: [worker]}]", [("helper", "denied")]),
    ):
        registry = sound(
            tmp_path / str(len(line)), tools, main=f"---\nworkers: [helper]\n{line}\n---\nGo.", helper=helper
        )
        assert registry.tool("helper").effect == "irreversible"
        watched = Watched()
        inner = ScriptedModel([ToolCall("burn", {}), "could not"])
        script = ScriptedModel([ToolCall("helper", {"input": "x"}), "end"])
        await registry.run("main", "go", model=script, models={"helper": inner}, session=watched.session)
        assert watched.ended == wanted


async def test_a_worker_that_failed_leaves_nothing_to_undo_of_its_own(tmp_path: Path) -> None:
    """When an outer call fails, an irreversible call inside a worker is reported as not undone. The worker is not reported."""
    tools = '''
    from handrail import ToolContext, tool

    @tool
    def burn() -> str:
        """Burn."""
        return "burnt"

    @tool
    async def outer(context: ToolContext) -> str:
        """Call and fail."""
        await context.call_worker("helper", "x")
        raise ValueError("after all")
    '''
    registry = sound(
        tmp_path, tools, main="---\npolicies: []\ntools: [outer]\nworkers: [helper]\n---\nGo.",
        helper="---\npolicies: []\ntools: [burn]\n---\nHelp.",
    )  # fmt: skip
    for inner, left in ((["idle"], ""), ([ToolCall("burn", {}), "did"], "Could not be undone: burn.")):
        script = ScriptedModel([ToolCall("outer", {}), "end"])
        await registry.run("main", "go", model=script, models={"helper": ScriptedModel(inner)})
        told = script.requests[1].messages[-1].text
        assert "helper" not in told
        assert (left in told) if left else ("undone: helper" not in told)


# --- models and limits --------------------------------------------------------------------------


async def test_which_model_runs_which_worker(tmp_path: Path) -> None:
    """A worker without a model uses its caller's. It is an error if neither has one, or if the model in a file has no provider."""
    registry = sound(tmp_path, main="---\nworkers: [helper]\n---\nGo.", helper=PLAIN)
    with pytest.raises(WorkerError, match="no model is set"):
        registry.run("main", "x")
    script = ScriptedModel([ToolCall("helper", {"input": "x"}), "from the same", "end"])
    assert (await registry.run("main", "x", adapter=Adapter(script))).text == "end"
    assert len(script.requests) == 3
    (problem,) = folder(tmp_path / "bad", main="---\nmodel: gpt-5\n---\nGo.").check()
    assert (problem.line, "provider:name" in problem.hint) == (2, True)


async def test_limits_of_the_file_hold_nested_and_at_the_root(tmp_path: Path) -> None:
    """A nested worker that reaches its file's limit fails alone. At the root, the file's limits and the budget both apply."""
    helper = "---\nlimits: {requests: 1}\nworkers: [helper]\n---\nHelp."
    registry = sound(tmp_path, main="---\nworkers: [helper]\n---\nGo.", helper=helper)
    inner = ScriptedModel([ToolCall("helper", {"input": "again"}), "x"])
    script = ScriptedModel([ToolCall("helper", {"input": "x"}), "went on"])
    response = await registry.run("main", "go", model=script, models={"helper": inner})
    assert response.text == "went on"
    assert len(inner.requests) == 1
    assert "share of the budget for requests is too low" in script.requests[1].messages[-1].text
    with pytest.raises(PromptEvaluationError, match="requests is too low"):
        await registry.run(
            "helper", "x", model=ScriptedModel([ToolCall("nothing", {}), "x"]), budget=Budget(requests=9)
        )
    with pytest.raises(PromptEvaluationError, match="tool_calls"):
        await registry.run(
            "main",
            "x",
            model=ScriptedModel([ToolCall("helper", {"input": ""}), "x"]),
            budget=Budget(tool_calls=0),
        )


async def test_a_files_depth_is_counted_from_the_worker(tmp_path: Path) -> None:
    """With `limits: {depth: 0}`, a worker's calls to workers fail as nested too deeply, and the worker itself continues."""
    helper = "---\nlimits: {depth: 0}\nworkers: [helper]\n---\nHelp."
    registry = sound(tmp_path, main="---\nworkers: [helper]\n---\nGo.", helper=helper)
    models = {
        "helper": ScriptedModel([ToolCall("helper", {"input": "x"}), "out"]),
    }
    watched = Watched()
    script = ScriptedModel([ToolCall("helper", {"input": "x"}), "end"])
    await registry.run("main", "go", model=script, models=models, session=watched.session)
    assert watched.ended == [("helper > helper", "error"), ("helper", "ok")]
    assert "nested 2 levels deep" in models["helper"].requests[1].messages[-1].text


async def test_a_worker_runs_out_of_its_seconds(tmp_path: Path) -> None:
    """A nested worker that exceeds its time limit fails alone, and its caller continues."""
    registry = sound(
        tmp_path, main="---\nworkers: [slow]\n---\nGo.", slow="---\nlimits: {seconds: 0.05}\n---\nHelp."
    )
    script = ScriptedModel([ToolCall("slow", {"input": "x"}), "went on"])
    slow = ScriptedModel([Reply("late", delay=30)])
    response = await registry.run("main", "go", model=script, models={"slow": slow})
    assert response.text == "went on"
    assert "deadline" in script.requests[1].messages[-1].text


# --- attachments --------------------------------------------------------------------------------

TAKES = "---\nattachments: {count: 2, max_bytes: 50, suffixes: [.txt, .bin]}\n---\nYou have {{ attachments|join(', ') }}."


async def test_attachments_reach_the_worker(tmp_path: Path) -> None:
    """The model sees short text attachments and the names of others, and tools can read all of them."""
    tools = '''
    from handrail import tool, WorkerContext

    @tool(effect="read")
    def sizes(context: WorkerContext) -> dict[str, int]:
        """Sizes."""
        return {each.name: each.size for each in context.attachments if each.read() is not None}
    '''
    registry = sound(tmp_path / "w", tools, main=TAKES.replace("---\nattach", "---\ntools: [sizes]\nattach"))
    file = tmp_path / "note.txt"
    file.write_text("buy ``` milk")
    script = ScriptedModel(
        [
            [ToolCall("sizes", {}), ToolCall("read_attachment", {"name": "note.txt"})],
            [ToolCall("read_attachment", {"name": "x.bin"}), ToolCall("read_attachment", {"name": "../y"})],
            "end",
        ]
    )
    await registry.run("main", "look", model=script, attachments=[file, Attachment(b"\xff\x00", "x.bin")])
    first = script.requests[0]
    assert first.system == "You have note.txt, x.bin."
    assert first.messages[0].text == (
        "look\n\nAttachments:\n\n- note.txt (12 bytes):\n\n````\nbuy ``` milk\n````\n\n- x.bin (2 bytes, not text)"
    )
    assert script.requests[1].messages[-1].text == '{"note.txt":12,"x.bin":2}\nbuy ``` milk'
    told = script.requests[2].messages[-1].text
    assert "not text" in told
    assert "The attachments are: note.txt, x.bin" in told


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a.txt", "a.txt", "a.txt"], "at most 2"),
        (["a.txt", "./a.txt"], ""),
        (["big.txt"], "60 bytes, and at most 50 are allowed"),
        (["a.exe"], "a.exe does not end in .txt or .bin"),
        (["../out.txt"], "out.txt"),
        (["/etc/passwd.txt"], "passwd"),
        (["missing.txt"], "missing.txt"),
        (["folder.txt"], "is a folder"),
        (["a\n.txt"], "is not a file name"),
        ([{"name": "a.txt", "base64": "!!"}], "base64"),
    ],
)
async def test_attachments_are_held_to_the_callees_rule(tmp_path: Path, given: list[Any], said: str) -> None:
    """The paths, encoding, count, size and suffixes of attachments are checked before the callee runs."""
    registry = sound(tmp_path, main="---\nworkers: [reader]\n---\nGo.", reader=TAKES)
    files = MemoryFilesystem()
    files.write("a.txt", "hello")
    files.write("big.txt", "x" * 60)
    files.mkdir("folder.txt")
    script = ScriptedModel([ToolCall("reader", {"input": "x", "attachments": given}), "end"])
    reader = ScriptedModel(["read"])
    await registry.run("main", "go", model=script, models={"reader": reader}, filesystem=files)
    told = script.requests[1].messages[-1].text
    assert (told == "read") if not said else (said in told)
    assert len(reader.requests) == (0 if said else 1)


async def test_a_worker_without_a_rule_takes_no_attachments(tmp_path: Path) -> None:
    """A worker without a rule for attachments refuses them with a reason."""
    registry = sound(tmp_path, main="---\nworkers: [plain]\n---\nGo.", plain=PLAIN)
    script = ScriptedModel([ToolCall("plain", {"input": "x", "attachments": ["a.txt"]}), "end"])
    await registry.run("main", "go", model=script)
    assert "plain takes no attachments" in script.requests[1].messages[-1].text
    with pytest.raises(WorkerError, match=r"main takes no attachments.* `attachments:` in its file"):
        registry.run("main", "x", model=script, attachments=[Attachment(b"", "a")])


async def test_code_hands_over_bytes_and_paths(tmp_path: Path) -> None:
    """`call_worker(..., attachments=[...])` accepts paths and `Attachment` objects."""
    tools = '''
    from handrail import ToolContext, tool
    from handrail.content import Attachment

    @tool
    async def give(context: ToolContext) -> str:
        """Give."""
        return await context.call_worker("reader", "x", attachments=["a.txt", Attachment(b"\\xff", "b.bin")])
    '''
    registry = sound(
        tmp_path, tools, main="---\npolicies: []\ntools: [give]\nworkers: [reader]\n---\nGo.", reader=TAKES
    )
    files = MemoryFilesystem()
    files.write("a.txt", "hello")
    reader = ScriptedModel(["read"])
    script = ScriptedModel([ToolCall("give", {}), "end"])
    await registry.run("main", "go", model=script, models={"reader": reader}, filesystem=files)
    assert reader.requests[0].system == "You have a.txt, b.bin."


# --- the context, messages, chats ---------------------------------------------------------------


async def test_a_workers_tools_get_a_worker_context(tmp_path: Path) -> None:
    """A worker's tools get a `WorkerContext`, even if they are annotated with `ToolContext` or use `@tool_context`.

    The context shows which workers may be called.
    """
    tools = '''
    from handrail import ToolContext, WorkerContext, tool
    from handrail.tools import tool_context

    @tool(effect="read")
    def one(context: ToolContext) -> str:
        """One."""
        return type(context).__name__

    @tool(effect="read")
    @tool_context
    def two(ctx) -> str:
        """Two."""
        return f"{type(ctx).__name__} {ctx.registry.names} {dict(ctx.registry.descriptions)} {dict(ctx.creation_defaults)}"
    '''
    registry = sound(
        tmp_path, tools, other=PLAIN, helper="---\ndescription: Helps.\n---\nHelp.",
        main="---\ntools: [one, two]\nworkers: [helper]\ncreation_defaults: {model: 'openai:b'}\n---\nGo.",
    )  # fmt: skip
    script = ScriptedModel([[ToolCall("one", {}), ToolCall("two", {})], "end"])
    await registry.run("main", "go", model=script)
    assert script.requests[1].messages[-1].text == (
        "WorkerContext\nWorkerContext ('helper',) {'helper': 'Helps.'} {'model': 'openai:b'}"
    )


@tool(effect="read")
def only_in_a_worker(context: WorkerContext) -> str:
    """Do something that needs a worker."""
    return ",".join(each.name for each in context.attachments)


async def test_a_tool_that_needs_a_worker_is_not_offered_elsewhere() -> None:
    """A tool that needs a worker is not offered outside a worker, and if it is called anyway, the error says what is missing."""
    script = ScriptedModel([ToolCall("only_in_a_worker", {}), "end"])
    await Adapter(script).evaluate(Prompt("p", "Go.", tools=[only_in_a_worker]), "go")
    assert [each.tool.name for each in script.requests[0].tools] == []
    assert "needs 'a worker'" in script.requests[1].messages[-1].text
    result = await open_gate([only_in_a_worker]).invoke("only_in_a_worker")
    assert not result.success
    assert "tools:" in result.message


async def test_a_handler_is_tested_with_a_made_up_worker_context() -> None:
    """A handler can be tested with `worker_context`, which has attachments, workers and prepared results."""
    context = worker_context(
        workers={"helper": "Helps."}, attachments=[Attachment(b"x", "a.txt")], results={"helper": "yes"}
    )
    assert only_in_a_worker.function(context) == "a.txt"
    assert context.registry.names == ("helper",)
    assert context.message_callback is None
    assert await context.call_worker("helper", "x") == "yes"


async def test_the_message_callback_hears_every_worker_with_its_path(tmp_path: Path) -> None:
    """The message callback gets each message of the root and nested runs once, in order, with the worker's path."""
    registry = sound(tmp_path, S3, main=MAIN, config_parser=PLAIN)
    heard: list[tuple[tuple[str, ...], str]] = []
    await registry.run(
        "main", "hi", model=ScriptedModel([ToolCall("analyze_config", {"raw": "a"}), "end"]),
        models={"config_parser": ScriptedModel(["parsed"])}, approvals="approve_all",
        message_callback=lambda said: heard.append((said.path, said.message.text)),
    )  # fmt: skip
    nested = ("main", "analyze_config", "config_parser")
    assert heard == [
        (("main",), "hi"),
        (("main",), ""),
        (nested, "a"),
        (nested, "parsed"),
        (("main",), "parsed"),
        (("main",), "end"),
    ]


async def test_on_the_same_session_the_conversation_continues(tmp_path: Path) -> None:
    """A second run on a session continues the first, streamed or not, and nested conversations stay separate."""
    registry = sound(tmp_path, main="---\nworkers: [helper]\n---\nGo.", helper=PLAIN)
    session = Session()
    script = ScriptedModel([ToolCall("helper", {"input": "n"}), "one", "two"])
    models = {"helper": ScriptedModel(["nested"])}
    await registry.run("main", "first", model=script, models=models, session=session)
    stream = registry.stream("main", "second", model=script, models=models, session=session)
    events = [event async for event in stream]
    assert (await stream.response).text == "two"
    assert any(isinstance(event, ModelRequested) for event in events)
    assert [message.text for message in script.requests[2].messages] == [
        "first",
        "",
        "nested",
        "one",
        "second",
    ]
    assert len({each.conversation for each in session[MessageAdded].all()}) == 2


def test_a_worker_runs_from_a_script(tmp_path: Path) -> None:
    """A script can run a worker with `.wait()`, and stream one with a plain `for` loop."""
    registry = sound(tmp_path, main=PLAIN)
    assert registry.run("main", "x", model=ScriptedModel(["a"]), environment=Nobody()).wait().text == "a"
    assert list(registry.stream("main", "x", model=ScriptedModel(["a"])))


def test_a_file_finds_its_registry(tmp_path: Path) -> None:
    """`of_file` returns a file's registry and worker, and raises `WorkerError` for a file that is not a worker.

    An unknown worker and a missing folder are refused too.
    """
    sound(tmp_path, main="---\nname: chief\n---\nGo.", helper=PLAIN)
    registry, worker = WorkerRegistry.of_file(tmp_path / "main.md")
    assert (worker.name, sorted(registry), "chief" in registry) == ("chief", ["chief", "helper"], True)
    assert registry["chief"] is worker
    assert dict(registry.workers) == {"chief": worker, "helper": registry["helper"]}
    (tmp_path / "README.md").write_text("# About\n")
    for wrong in ("nothing.md", "tools.py", "README.md"):
        with pytest.raises(WorkerError):
            WorkerRegistry.of_file(tmp_path / wrong)
    with pytest.raises(WorkerError, match="Did you mean 'chief'"):
        registry["chif"]
    with pytest.raises(WorkerError, match="there is no folder"):
        WorkerRegistry(tmp_path / "missing")


def test_a_path_stands_for_a_worker(tmp_path: Path):
    """A worker may be given as a file, as a folder and a name, or as a folder with a `main` or only one worker."""
    for name in ("main", "other"):
        (tmp_path / f"{name}.md").write_text("---\ndescription: It works.\n---\nGo.\n")
    for path, name in (("", "main"), ("other", "other"), ("other.md", "other")):
        assert WorkerRegistry.worker_at(tmp_path / path).name == name
    for path, said in (
        ("othr", "Did you mean 'other'?"),
        ("none.md", "There are: "),
        ("a/b", "Name a worker's file"),
    ):
        with pytest.raises(WorkerError, match=said.replace("?", r"\?")):
            WorkerRegistry.worker_at(tmp_path / path)
    (tmp_path / "main.md").rename(tmp_path / "third.md")
    with pytest.raises(WorkerError, match="has several workers: other, third"):
        WorkerRegistry.worker_at(tmp_path)
    (tmp_path / "third.md").unlink()
    assert WorkerRegistry.worker_at(tmp_path).name == "other"
