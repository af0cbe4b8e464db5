"""Secrets in a model's arguments: only the handler receives them, and they are never stored."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic_core
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import AnyUrl, BaseModel, Field, SecretStr, create_model, field_validator

from handrail import (
    Adapter,
    Handoff,
    MarkdownSection,
    Parked,
    Prompt,
    ScriptedModel,
    Session,
    SqliteJournal,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    run_as_agent,
    tool,
)
from handrail.cli.screens import PlainView
from handrail.clock import SYSTEM_CLOCK
from handrail.errors import ToolValidationError
from handrail.events import CallDelta, MessageAdded
from handrail.guard import CapabilityPolicy
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    CallAsked,
    CallPart,
    Kept,
    ModelPart,
    ModelRequest,
    StopPart,
    TextPart,
    ToolMessage,
    UserMessage,
)
from handrail.runs import export, show
from handrail.schema.secrets import MASK, WITHHELD
from handrail.serve import snapshots
from handrail.serve.agui.interrupts import frontend_tool
from handrail.serve.agui.wire_events import plain_json
from handrail.serve.sources import PromptSource
from handrail.serve.threads import Threads
from handrail.session import load, save
from support.examples import at_most
from support.planted_secrets import (
    LEAVES,
    MARK,
    SECRETS,
    WIDER,
    Drawn,
    Key,
    Login,
    _around,
    _model,
    everything,
    logged,
    login_with,
    recorded_in,
    revealed,
    written,
)
from support.rig import Rig
from support.served_threads import events, over

TYPES = st.recursive(st.sampled_from(LEAVES), _around, max_leaves=4)


@st.composite
def logins(draw: st.DrawFn, types: st.SearchStrategy[Drawn] = TYPES, secret: bool = False) -> Login:
    fields = draw(st.lists(types, min_size=1, max_size=2))
    drawn = _model([*fields, Drawn(SecretStr, SECRETS)] if secret else fields)
    got: list[Any] = []

    async def handler(params: Any, *, context: ToolContext) -> ToolResult[str]:
        got.append(params)
        return ToolResult.ok("in", "Logged in.")

    made = Tool("login", "Log in.", handler, params=drawn.kind, result=str, effect="read")
    return Login(made, json.loads(json.dumps(draw(drawn.values))), got)


# --- the arguments of one tool -----------------------------------------------------------------


@given(logins(WIDER))
def test_what_is_masked_has_no_secret_and_all_the_rest(login: Login) -> None:
    """Masking replaces every secret and nothing else. Masking again changes nothing. A mask is refused as input."""
    text = json.dumps(login.arguments, ensure_ascii=False)
    assert revealed(login.tool.parse(text)) == login.arguments
    masked = login.tool.mask(text) if login.tool.secret else text
    assert MARK not in masked
    assert (MASK in masked) == login.secret
    assert _put_back(json.loads(masked), login.arguments) == login.arguments
    if login.tool.secret:
        assert login.tool.mask(masked) == masked
        assert json.loads(login.tool.dump(login.tool.parse(text))) == json.loads(masked)
    if login.secret:
        with pytest.raises(ToolValidationError, match="is masked"):
            login.tool.parse(masked)


def _put_back(masked: Any, real: Any) -> Any:
    """Return the masked value with each mask replaced by its secret."""
    if masked == MASK and isinstance(real, str) and MARK in real:
        return real
    if isinstance(masked, dict):
        return {key: _put_back(one, real[key]) for key, one in masked.items()}  # pyright: ignore
    if isinstance(masked, list):
        return [_put_back(one, real[at]) for at, one in enumerate(masked)]  # pyright: ignore
    return masked


@given(logins(WIDER, secret=True), st.data())
def test_what_does_not_fit_is_withheld_and_not_quoted(login: Login, data: st.DataObject) -> None:
    """Invalid arguments of a tool with secrets are withheld entirely, because a secret may be anywhere in them."""
    wrong = dict(login.arguments)
    name = data.draw(st.sampled_from(sorted(wrong)))
    how = data.draw(st.sampled_from(["renamed", "bare", "listed", "boxed", "cut", "missing"]))
    if how == "renamed":
        wrong["pasword"] = wrong.pop(name)
    elif how == "missing":
        del wrong[name]
    else:
        shapes = {"bare": f"{MARK} {wrong[name]}", "listed": [wrong[name]], "boxed": {"x": wrong[name]}}
        wrong[name] = shapes.get(how, wrong[name])
    text = json.dumps(wrong)[: -1 if how == "cut" else None]
    refused = _refusal(login.tool, text)
    assert MARK not in login.tool.mask(text)
    if refused:
        assert login.tool.mask(text) == WITHHELD
    assert MARK not in refused


def _refusal(login: Tool[Any, Any], text: str) -> str:
    try:
        login.parse(text)
    except ToolValidationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", [list[SecretStr], dict[str, SecretStr], Key, list[Key], tuple[int, Key]])
def test_a_secret_in_the_place_of_what_is_around_it_is_not_quoted(kind: Any) -> None:
    """A secret in the wrong place is not quoted. The model is told only what was expected."""

    params = create_model("Params", keys=(kind, ...), name=(int, 0))
    login: Tool[Any, Any] = Tool("login", "Log in.", params=params)
    refused = _refusal(login, json.dumps({"keys": MARK, "name": "ann"}))
    assert "keys: must be" in refused
    assert MARK not in refused
    assert "name: must be a whole number" in refused
    assert "ann" not in refused  # the model may have mixed up two arguments


class Round(BaseModel):
    kind: Literal["round"] = "round"


class Square(BaseModel):
    kind: Literal["square"] = "square"


class Strict(BaseModel):
    """Parameters with a secret, and a validator whose error contains its input backwards."""

    amount: int = Field(0, ge=0, le=10)
    code: str = Field("a", pattern="^a$")
    who: Literal["ann", "bob"] = "ann"
    link: AnyUrl = AnyUrl("https://example.org")
    shape: Annotated[Round | Square, Field(discriminator="kind")] = Field(default_factory=lambda: Round())
    checked: str = ""
    key: SecretStr = SecretStr("")

    @field_validator("checked")
    @classmethod
    def _check(cls, given: str) -> str:
        if given:
            raise ValueError(f"I do not like {given[::-1]}")
        return given


@pytest.mark.parametrize(
    "wrong",
    [
        {"amount": MARK},
        {"amount": 73_921},
        {"code": MARK},
        {"who": MARK},
        {"link": f"{MARK}"},
        {"shape": {"kind": MARK}},
        {"shape": MARK},
        {"checked": MARK},
        {"key": [MARK]},
    ],
)
def test_nothing_is_quoted_where_a_secret_may_be_among_the_arguments(wrong: dict[str, Any]) -> None:
    """A model that puts a secret into the wrong argument is told which one is wrong, but not what it sent."""
    login: Tool[Any, Any] = Tool("login", "Log in.", params=Strict)
    refused = _refusal(login, json.dumps(wrong))
    assert next(iter(wrong)) in refused
    assert not any(secret in refused for secret in (MARK, MARK[::-1], "73921", "73,921"))


class Keyed(BaseModel):
    pins: dict[SecretStr, int] = {}
    deep: list[dict[str, dict[SecretStr, list[int]]]] = []
    long: dict[Annotated[SecretStr, Field(min_length=30)], int] = {}
    rates: dict[SecretStr, float] = {}
    other: dict[SecretStr, int] | list[int] = {}


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"pins": {MARK: "x"}}, 'pins["…"]'),
        ({"pins": {f"{MARK} é": None}}, 'pins["…"]'),
        ({"deep": [{"a": {MARK: [1, "x"]}}]}, 'deep[0].a["…"][1]'),
        ({"deep": [{"a": {MARK: MARK}}]}, 'deep[0].a["…"]'),
        ({"long": {MARK: 1}}, 'long["…"]'),
        ({"rates": {MARK: float("nan")}}, 'rates["…"]'),
        ({"rates": {MARK: 10**400}}, 'rates["…"]'),
        ({"other": {MARK: "x"}}, 'other["…"]'),
    ],
)
def test_keys_that_may_be_secret_are_not_quoted(wrong: dict[str, Any], where: str) -> None:
    """An error in a dictionary names the fields on the way to it, but no key that is a secret."""
    refused = _refusal(Tool("open", "Open.", params=Keyed), json.dumps(wrong))
    assert where in refused
    assert MARK not in refused


def test_an_error_of_the_type_itself_is_not_repeated() -> None:
    """The message of an exception that pydantic does not catch is withheld, because it may quote the arguments."""

    class Odd(BaseModel):
        key: SecretStr

        @field_validator("key")
        @classmethod
        def _check(cls, given: SecretStr) -> SecretStr:
            raise KeyError(given.get_secret_value())

    refused = _refusal(Tool("login", "Log in.", params=Odd), json.dumps({"key": MARK}))
    assert "refused by the type itself: KeyError" in refused
    assert MARK not in refused


def test_a_clients_tool_with_a_secret_does_not_quote() -> None:
    """The arguments of a client's tool are not quoted if its schema marks one of them as `writeOnly`."""
    properties = {"key": {"type": "string", "writeOnly": True}, "amount": {"type": "integer"}}
    login = frontend_tool("login", "Log in.", {"type": "object", "properties": properties})
    refused = _refusal(login, json.dumps({"amount": MARK}))
    assert "amount" in refused
    assert MARK not in refused


def test_a_tool_without_secrets_keeps_its_quick_way() -> None:
    """Whether a tool has secrets is known from its definition, so a tool without any keeps its fast path."""

    @tool
    async def plain(text: str) -> str:
        """Return the text."""
        return text

    @tool
    async def login(key: SecretStr) -> str:
        """Log in."""
        return "in"

    assert not plain.secret
    assert plain._quick is not None  # pyright: ignore[reportPrivateUsage]
    assert login.secret
    assert login._quick is None  # pyright: ignore[reportPrivateUsage]


async def test_a_secret_is_handed_on_as_it_is() -> None:
    """A tool can pass a secret on to an inner call unmasked, even under a policy."""
    got: list[str] = []

    @tool(effect="read")
    async def inner(key: SecretStr) -> str:
        """Record the secret."""
        got.append(key.get_secret_value())
        return "used"

    @tool(effect="read")
    async def outer(key: SecretStr, context: ToolContext) -> str:
        """Pass the secret on to the inner tool."""
        return (await context.call("inner", key=key)).message

    for policies in ((), (CapabilityPolicy(),)):
        rig = Rig([inner, outer], policies=policies)
        assert (await rig.call("outer", key=MARK)).success
    assert got == [MARK, MARK]


async def test_a_mask_is_refused_by_name() -> None:
    """A model that sends a mask is told to send the secret itself."""

    @tool(effect="read")
    async def login(user: str, key: SecretStr) -> str:
        """Log in."""
        raise AssertionError("a mask must not reach the handler")

    rig = Rig([login])
    result = await rig.gate.invoke("login", json.dumps({"user": "ann", "key": MASK}))
    assert not result.success
    assert "key: is masked" in result.message
    assert "Send it again" in result.message


def test_a_model_that_plays_a_client_gets_params_as_they_are() -> None:
    """`run_as_agent` passes a secret in the params to the client unmasked."""
    got: list[str] = []
    pick: Any = Handoff("pick", "Let somebody pick.", params=Key)

    @pick.before
    async def before(params: Key, *, context: ToolContext) -> Parked[int, str]:
        return Parked(1, "which?")

    @pick.client
    async def client(public: str, params: Key, *, context: ToolContext) -> str:
        got.append(params.key.get_secret_value())
        return "a"

    @pick.after
    async def after(private: int, answer: str, *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok(answer)

    run_as_agent(pick, "which?", Key(key=SecretStr(MARK)), model=ScriptedModel([])).wait()
    assert got == [MARK]


# --- everything that shows a run ---------------------------------------------------------------


@tool(effect="read")
async def look(context: ToolContext) -> str:
    """Return the body of the model request that led to this call."""
    request = context.request
    assert request is not None
    return str(request.body)


async def _run_and_look(login: Login, script: list[Any], folder: Path) -> dict[str, Any]:
    """Run the script, streamed and recorded, and return everything that the run shows or records, by place."""
    journal = SqliteJournal(folder / "runs.db")
    adapter = Adapter(ScriptedModel(script), journal=journal)
    prompt = Prompt("p", "Do.", tools=[login.tool, look])
    session = Session(id="session")
    heard: list[object] = []
    session.dispatcher.subscribe(object, heard.append)
    lines = io.StringIO()
    with logged() as log, contextlib.redirect_stderr(lines), contextlib.redirect_stdout(lines):
        view = PlainView(SYSTEM_CLOCK, verbose=True)
        with view.begin():
            stream = adapter.stream(prompt, "go", session=session, run_id="run")
            async for event in stream:
                view.show(event)
            response = await stream.response
            view.answer(response.text)
    await export(journal, "run", folder / "run.jsonl")
    found = {
        "events": heard,
        "session": save(session),
        "tree": await show(journal, "run"),
        "shown tree": snapshots.run_tree(await show(journal, "run")),
        "export": written(folder / "run.jsonl"),
        "terminal": lines.getvalue(),
        "log": log.getvalue(),
        "plain": plain_json([each.message for each in session[MessageAdded].all()]),
        "journal": recorded_in(folder),
    }
    journal.close()
    found["closed journal"] = recorded_in(folder)
    return found


@settings(max_examples=at_most(15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(logins(secret=True), st.sampled_from(["fits", "wrong", "unknown"]))
def test_nothing_but_the_handler_has_a_secret(login: Login, how: str) -> None:
    """A secret is in no event, delta, session, journal, export, tree, output, log or request that a tool reads."""
    name = "logn" if how == "unknown" else "login"
    given = {**login.arguments, "pasword": MARK} if how == "wrong" else login.arguments
    with tempfile.TemporaryDirectory() as folder:
        calls = [ToolCall(name, given), ToolCall("look")]
        found = asyncio.run(_run_and_look(login, [calls, [ToolCall("look")], "done"], Path(folder)))
    for where, value in found.items():
        assert MARK not in everything(value), where
    assert [revealed(each) for each in login.got] == ([login.arguments] if how == "fits" else [])
    told: list[Any] = found["events"]
    at = next(at for at, each in enumerate(told) if isinstance(each, MessageAdded) and _calls(each))
    deltas = [each.arguments for each in told[:at] if isinstance(each, CallDelta) and not each.index]
    expected = login.tool.mask(json.dumps(given)) if how == "fits" else WITHHELD
    assert [each for each in deltas if each] == [expected]
    assert told[at].message.calls[0].arguments == expected


def _calls(added: MessageAdded) -> bool:
    return isinstance(added.message, AssistantMessage) and bool(added.message.calls)


async def _serve_and_look(login: Login, folder: Path) -> dict[str, Any]:
    journal = SqliteJournal(folder / "runs.db", watch=0.01)
    prompt: Prompt[None] = Prompt("p", "Do.", tools=[login.tool])
    found: dict[str, Any] = {}

    def make() -> Threads:
        model = ScriptedModel([ToolCall("login", login.arguments, id="c1"), "done"])
        return Threads(PromptSource(prompt, Adapter(model)), journal, poll_seconds=None)

    threads = make()
    await threads.start()
    thread = threads.thread("ada", "t")
    joined: list[Any] = []
    run_id = await thread.say("go")
    while thread.live is not None:
        joined.append([event.data for event in (await snapshots.joining_events(journal, thread))[0]])
        await asyncio.sleep(0)
    await over(thread)
    found["feed"] = events(thread.feed)
    found["joined"] = joined
    found["snapshot"] = await snapshots.thread_snapshot(journal, thread)
    found["tree"] = snapshots.run_tree(await show(journal, run_id))
    await threads.stop(0.05)
    threads = make()
    await threads.start()
    found["after a restart"] = await snapshots.thread_snapshot(journal, threads.thread("ada", "t"))
    await threads.stop(0.05)
    journal.close()
    found["journal"] = recorded_in(folder)
    return found


@settings(max_examples=at_most(8), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(logins(secret=True))
def test_nobody_who_watches_a_thread_sees_a_secret(login: Login) -> None:
    """A secret is in no event or snapshot that a thread's client gets, even after a restart."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(_serve_and_look(login, Path(folder)))
    for where, value in found.items():
        assert MARK not in everything(value), where
    assert [revealed(each) for each in login.got] == [login.arguments]
    told = [each["delta"] for each in found["feed"] if each["type"] == "TOOL_CALL_ARGS"]
    assert told == [login.tool.mask(json.dumps(login.arguments))]


async def test_what_is_not_secret_is_seen_as_it_is_written() -> None:
    """A tool's arguments are streamed unmasked even if its name is a prefix of the name of a tool with secrets."""

    @tool(effect="read")
    async def log(text: str) -> str:
        """Return the text."""
        return text

    @tool(effect="read")
    async def say(text: str) -> str:
        """Return the text."""
        return text

    class InPieces(ScriptedModel):
        async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
            if len(request.messages) > 1:
                yield TextPart("done")
                yield StopPart("done")
                return
            for index, name in enumerate(["log/in", "log", "say"]):
                first, _, last = name.partition("/")
                text = json.dumps({"key" if last else "text": MARK})
                yield CallPart(index, f"c{index}", first, text[:3])
                yield CallPart(index, "", last, text[3:9])
                yield CallPart(index, "", "", text[9:])
            yield StopPart("calls")

    login = login_with("read")
    stream = Adapter(InPieces([])).stream(Prompt("p", "Do.", tools=[login.tool, log, say]), "go")
    pieces: dict[int, list[str]] = {}
    async for event in stream:
        if isinstance(event, CallDelta) and event.arguments:
            pieces.setdefault(event.index, []).append(event.arguments)
    text = json.dumps({"text": MARK})
    assert pieces == {0: [f'{{"key":"{MASK}"}}'], 1: [text], 2: [text[:3], text[3:9], text[9:]]}
    assert login.got == [MARK]


async def test_the_provider_sees_its_own_words_until_the_process_ends() -> None:
    """While a session is in memory, the provider gets its conversation unmasked. After it is saved and loaded, the conversation is masked."""
    login, model = login_with("read"), ScriptedModel([ToolCall("login", {"key": MARK}), "in", "again"])
    journal = MemoryJournal()
    prompt = Prompt("p", "Do.", tools=[login.tool])
    session = Session(id="s")
    await Adapter(model, journal=journal).evaluate(prompt, "go", session=session)
    await Adapter(model, journal=journal).evaluate(prompt, "go on", session=session)
    assert MARK in everything(list(model.requests[2].messages))
    later = ScriptedModel(["later"])
    again = load(save(session))
    await Adapter(later).evaluate(prompt, "go on", session=again)
    sent = everything(list(later.requests[0].messages))
    assert MARK not in sent
    assert MASK in sent


async def test_what_a_provider_wants_back_is_masked_too() -> None:
    """A provider's own data is recorded with secrets masked, whether it holds arguments as text or as an object."""

    class Thinking(ScriptedModel):
        async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
            async for part in super().stream(request):
                if isinstance(part, StopPart) and part.reason == "calls":
                    blocks = [{"thinking": "hm", "signature": "x"}, {"input": {"key": MARK}}]
                    texts = [{"arguments": json.dumps({"key": MARK})}]
                    data = pydantic_core.to_json([*blocks, *texts])
                    part = StopPart("calls", Kept("w", data))
                yield part

    login, journal = login_with("read"), MemoryJournal()
    model = Thinking([ToolCall("login", json.dumps({"key": MARK})), "in"])
    session = Session(id="s")
    await Adapter(model, journal=journal).evaluate(
        Prompt("p", "Do.", tools=[login.tool]), "go", session=session, run_id="run"
    )
    assert MARK in everything(list(model.requests[1].messages))
    recorded = everything([save(session), await journal.calls.entries("run"), await journal.runs.get("run")])
    assert MARK not in recorded
    (kept,) = [each.message.kept for each in session[MessageAdded].all() if _calls(each)]  # pyright: ignore
    assert kept is not None
    assert json.loads(kept.data)[1:] == [{"input": {"key": MASK}}, {"arguments": f'{{"key":"{MASK}"}}'}]


async def test_a_history_from_elsewhere_is_recorded_masked() -> None:
    """The model gets the `history` argument unmasked, and the session and the journal keep it masked."""
    login, journal, session = login_with("read"), MemoryJournal(), Session(id="s")
    history = [
        UserMessage("go"),
        AssistantMessage("", (CallAsked("c", "login", json.dumps({"key": MARK})),)),
        ToolMessage((CallAnswered("c", "login", "in"),)),
    ]
    model = ScriptedModel(["done"])
    await Adapter(model, journal=journal).evaluate(
        Prompt("p", "Do.", tools=[login.tool]), "go", session=session, history=history, run_id="run"
    )
    assert MARK in everything(list(model.requests[0].messages))
    assert MARK not in everything([save(session), (await journal.runs.get("run")).record.begin])


async def test_a_history_is_masked_by_tools_that_are_not_shown_yet_and_by_the_answer_too() -> None:
    """Calls in a history are masked even if their tool is in a section shown as a summary, or is `final_answer`."""
    login = login_with("read")
    folded: Any = MarkdownSection(
        "Accounts", "accounts", "Log in.", tools=[login.tool], summary="Accounts.", visibility="summary"
    )
    prompts: list[Any] = [Prompt("p", sections=[folded]), Prompt("q", "Do.", output=Key)]
    for prompt, name in zip(prompts, ("login", "final_answer"), strict=True):
        journal, session = MemoryJournal(), Session(id="s")
        history = [
            UserMessage("go"),
            AssistantMessage("", (CallAsked("c", name, json.dumps({"key": MARK})),)),
            ToolMessage((CallAnswered("c", name, "in"),)),
        ]
        model = ScriptedModel([ToolCall("final_answer", {"key": "no"})] if name != "login" else ["done"])
        await Adapter(model, journal=journal).evaluate(
            prompt, "go", session=session, history=history, run_id="run"
        )
        assert MARK not in everything([save(session), (await journal.runs.get("run")).record.begin])


async def test_an_answer_with_a_secret_is_given_by_a_call() -> None:
    """An output type with a secret is requested as a tool call, because a secret in text could not be masked."""
    journal = MemoryJournal()
    model = ScriptedModel([ToolCall("final_answer", {"key": MARK})])
    prompt: Any = Prompt("p", "Do.", output=Key)
    response = await Adapter(model, journal=journal).evaluate(prompt, "go", run_id="run")
    assert response.output.key.get_secret_value() == MARK
    assert MARK not in everything(
        [save(response.session), await journal.calls.entries("run"), await journal.runs.get("run")]
    )


async def test_a_later_run_of_other_tools_shows_none_of_what_was_masked_before() -> None:
    """A later run's tools get a masked request, although the conversation in memory is not masked."""
    login, session = login_with("read"), Session(id="s")
    script = [ToolCall("login", {"key": MARK}), "in", ToolCall("look"), "done"]
    adapter = Adapter(ScriptedModel(script))
    await adapter.evaluate(Prompt("p", "Do.", tools=[login.tool]), "go", session=session)
    await adapter.evaluate(Prompt("q", "Look.", tools=[look]), "go on", session=session)
    assert MARK not in everything(save(session))


async def test_a_call_of_no_tool_without_arguments_has_nothing_to_withhold() -> None:
    """A call to an unknown tool without arguments masks nothing.

    If its empty arguments counted as a secret, they would match everywhere.
    """
    login, session = login_with("read"), Session(id="s")
    script = [[ToolCall("gone", ""), ToolCall("away", "{}")], ToolCall("look"), "done"]
    prompt = Prompt("p", "Do.", tools=[login.tool, look])
    await Adapter(ScriptedModel(script)).evaluate(prompt, "go", session=session)
    assert MASK not in everything(save(session))
