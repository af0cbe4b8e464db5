"""Remembered approvals and denials: for whom they hold, how much they cover, and what they never cover."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from handrail import (
    Adapter,
    CapabilityPolicy,
    DirectoryFilesystem,
    MemoryFilesystem,
    PathArg,
    PolicyDecision,
    Prompt,
    ScriptedModel,
    Session,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    open_gate,
    tool,
)
from handrail.context import Approval
from handrail.environment.form import list_choices
from handrail.errors import DefinitionError, EventRefused, SessionError
from handrail.events import ApprovalDecided, ApprovalRemembered, ApprovalRequested, ApprovalRevoked
from handrail.guard import Broker, approvals_of
from handrail.journal.sqlite import MemoryJournal
from handrail.protocols import Filesystem, Fork
from handrail.question import Question
from handrail.resources.bindings import given as bound
from handrail.resources.memory import FileLimits
from handrail.resources.shell import Allow, Shell, probe
from handrail.run.call import run_turn
from handrail.sections.commands import run_command_tool
from handrail.sections.files import delete_file, write_file
from handrail.session.serialization import load, save
from handrail.testing import Agent, Person, VirtualClock
from support.examples import at_most
from support.parked_runs import answer_to

ran: list[str] = []

EXACT = {"approved": True, "remember": "exact"}
SCOPE = {"approved": True, "remember": "scope"}


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


@tool
async def pay(amount: int, context: ToolContext, to: str = "bob") -> str:
    """Pay somebody."""
    ran.append(f"pay {amount}")
    return "paid"


@tool(capabilities={"fs.write"})
async def put(path: Annotated[str, PathArg("write")], context: ToolContext) -> str:
    """Put something somewhere, without using a fork."""
    ran.append(f"put {path}")
    return "put"


@tool(capabilities={"fs.write"})
async def wipe(path: Annotated[str, PathArg("write")], context: ToolContext) -> str:
    """Wipe something, without using a fork."""
    ran.append(f"wipe {path}")
    return "wiped"


@tool(capabilities={"fs.write", "net"})
async def publish(path: Annotated[str, PathArg("write")], context: ToolContext) -> str:
    """Show something to the world."""
    ran.append(f"publish {path}")
    return "out"


@tool(capabilities={"fs.write"})
async def copy(
    source: Annotated[str, PathArg("read")], target: Annotated[str, PathArg("write")], context: ToolContext
) -> str:
    """Copy something."""
    ran.append(f"copy {source} {target}")
    return "copied"


@tool(capabilities={"fs.write"})
async def tidy(context: ToolContext, path: Annotated[str | None, PathArg("write")] = None) -> str:
    """Tidy up one path, or everything."""
    ran.append(f"tidy {path}")
    return "tidied"


@tool
async def stamp(path: Annotated[str, PathArg("write")], context: ToolContext) -> str:
    """Stamp something. The tool declares no capabilities."""
    ran.append(f"stamp {path}")
    return "stamped"


@tool(effect="staged", capabilities={"fs.write"})
async def edit(
    path: Annotated[str, PathArg("write")], text: str, context: ToolContext, also: str = ""
) -> str:
    """Write one file whose path the params declare, and optionally another whose path they don't."""
    context.filesystem.write(path, text)
    if also:
        context.filesystem.write(also, text)
    return "written"


@tool(effect="idempotent")
async def wonder(message: str, context: ToolContext, again: int = 0) -> list[Any]:
    """Request approval from inside the handler."""
    approval = await context.request_approval(message)
    return [approval.approved, approval.outcome, approval.reason]


@tool(effect="idempotent")
async def need(kind: str, context: ToolContext, again: int = 0) -> bool:
    """Request a permission."""
    return (await context.request_permission(kind)).approved


@tool(effect="idempotent")
async def need_too(kind: str, context: ToolContext) -> bool:
    """Request a permission, as another tool."""
    return (await context.request_permission(kind)).approved


@tool(effect="staged", capabilities={"fs.write"})
async def build(context: ToolContext) -> str:
    """Copy `source` to `built`, then move `part` to `moved`, if they are there."""
    if context.filesystem.exists("source"):
        context.filesystem.write("built", context.filesystem.read_bytes("source"))
    if context.filesystem.exists("part"):
        context.filesystem.move("part", "moved")
    return "built"


TOOLS = [pay, put, wipe, publish, copy, tidy, stamp, edit, build, wonder, need, need_too]
POLICY = CapabilityPolicy({"fs.write": "ask"}, effects={"idempotent": "allow"})


class Desk:
    """One session and its person. Each call opens a new gate."""

    def __init__(self, says: Any, session: Session | None = None, **options: Any) -> None:
        self.person = Person(says)
        self.session = session or Session(id="one", principal="ada")
        self.options: dict[str, Any] = {"environment": self.person, "policies": [POLICY], **options}

    async def call(self, name: str, /, **arguments: Any) -> ToolResult[Any]:
        return await open_gate(TOOLS, session=self.session, **self.options).invoke(name, arguments)

    @property
    def asked(self) -> int:
        return len(self.person.questions)

    @property
    def scopes(self) -> list[str]:
        """The scopes that the last question offered."""
        return self.person.questions[-1].payload["scopes"]

    @property
    def decided(self) -> list[tuple[str, bool]]:
        return [(each.how, each.approval.approved) for each in self.session[ApprovalDecided].all()]


class Unseen(Broker):
    """A broker that asks before a call runs, and therefore shows no diff."""

    shows_previews = False  # pyright: ignore[reportAssignmentType,reportIncompatibleMethodOverride]


def picking(scope: str, approved: bool = True) -> Any:
    """Return a function that answers with this scope if the question offers it, and otherwise approves the call once."""

    def says(question: Question) -> Any:
        if scope in question.payload["scopes"]:
            return {"approved": approved, "remember": "scope", "scope": scope, "reason": "as I said"}
        return {"approved": True}

    return says


# --- answers that are not remembered, or remembered for exactly one call -------------------------


@pytest.mark.parametrize("says", [True, {"approved": True}, {"approved": True, "remember": "once"}])
async def test_nothing_is_remembered_unless_somebody_says_so(says: Any):
    """An answer whose `remember` is absent or "once" decides one call, and the next identical call is asked about again."""
    desk = Desk(says)
    await desk.call("pay", amount=1)
    await desk.call("pay", amount=1)
    assert desk.asked == 2
    assert approvals_of(desk.session).list() == ()


async def test_exactly_this_is_not_asked_about_again_in_the_session():
    """An exact approval covers the same call later in its session, even with a different broker or argument order."""
    desk = Desk(EXACT)
    assert (await desk.call("pay", amount=1, to="ann")).success
    gate = open_gate(TOOLS, session=desk.session, **desk.options)
    assert (await gate.invoke("pay", ' {"to" : "ann",\n "amount":1} ')).success
    assert desk.asked == 1
    assert ran == ["pay 1", "pay 1"]
    assert desk.decided == [("asked", True), ("remembered", True)]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("pay", {"amount": 2}),
        ("pay", {"amount": 1, "to": "eve"}),
        ("wonder", {"message": "pay"}),
        ("need", {"kind": "pay"}),
    ],
)
async def test_exactly_this_is_nothing_else(name: str, arguments: dict[str, Any]):
    """An exact approval covers neither different arguments nor requests by other tools."""
    desk = Desk(EXACT)
    await desk.call("pay", amount=1)
    await desk.call(name, **arguments)
    assert desk.asked == 2


async def test_who_asks_is_part_of_it():
    """A policy's question, a handler's approval request and its permission request are remembered separately, even if all have the same name."""

    @tool
    async def confess(context: ToolContext) -> list[bool]:
        """Request an approval and a permission under one name."""
        return [
            (await context.request_approval("confess")).approved,
            (await context.request_permission("confess")).approved,
        ]

    desk = Desk(EXACT)
    gate = open_gate([confess], session=desk.session, **desk.options)
    for _ in range(2):
        assert (await gate.invoke("confess")).value == [True, True]
    assert desk.asked == 3


async def test_another_tool_of_the_same_name_is_another():
    """An approval does not cover a tool of the same name with different capabilities."""
    desk = Desk(SCOPE)
    await desk.call("pay", amount=1)

    @tool(name="pay", capabilities={"net"})
    async def other(amount: int, context: ToolContext, to: str = "bob") -> str:
        """Pay somebody."""
        return "paid"

    await open_gate([other], session=desk.session, **desk.options).invoke("pay", {"amount": 1})
    assert desk.asked == 2


async def test_arguments_that_nobody_saw_are_part_of_it():
    """An exact approval does not cover a call with a different secret, and the saved session reveals neither secret."""
    got: list[str] = []

    @tool
    async def login(user: str, password: SecretStr, context: ToolContext) -> str:
        """Log in."""
        got.append(password.get_secret_value())
        return "in"

    desk = Desk(EXACT)
    for password in ("hunter2", "hunter3", "hunter2"):
        gate = open_gate([login], session=desk.session, **desk.options)
        assert (await gate.invoke("login", {"user": "ada", "password": password})).success
    assert got == ["hunter2", "hunter3", "hunter2"]
    assert desk.asked == 2
    assert b"hunter" not in save(desk.session)


async def test_what_nobody_saw_is_remembered_in_this_process_only(monkeypatch: pytest.MonkeyPatch):
    """Without a journal, an exact approval of a call with a secret holds only in this process.

    If the call has no secret, the approval holds in other processes too.
    """

    @tool
    async def login(user: str, context: ToolContext, password: SecretStr | None = None) -> str:
        """Log in."""
        return "in"

    desk = Desk(EXACT)
    gate = open_gate([login], session=desk.session, **desk.options)
    arguments: list[dict[str, Any]] = [{"user": "ada"}, {"user": "ada", "password": "hunter2"}]
    for each in arguments:
        await gate.invoke("login", each)
    monkeypatch.setattr("handrail.guard.remembered._KEY", b"that of another process")
    for each in arguments:
        await gate.invoke("login", each)
    assert [question.payload["arguments"]["password"] for question in desk.person.questions] == [
        None,
        "**********",
        "**********",
    ]


async def test_what_a_handler_does_to_its_arguments_is_not_what_is_asked_about():
    """The person is shown the arguments that the call was made with, even if the handler changes its params."""

    @dataclass
    class Order:
        text: str

    async def handler(params: Order, *, context: ToolContext) -> ToolResult[str]:
        params.text = "harmless"
        await context.request_approval("go on?")
        return ToolResult.ok("done")

    sly = Tool("sly", "Change what it was given.", handler, effect="staged")
    desk = Desk(EXACT, policies=[CapabilityPolicy(effects={"staged": "ask"})])
    await open_gate([sly], session=desk.session, **desk.options).invoke("sly", {"text": "harmful"})
    assert [each.payload["arguments"]["text"] for each in desk.person.questions] == ["harmful"] * 2


# --- scopes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "scopes"),
    [
        ("pay", {"amount": 1}, ["pay (any arguments)"]),
        ("put", {"path": "docs/a.md"}, ["fs.write under docs/"]),
        ("put", {"path": "./docs//a.md"}, ["fs.write under docs/"]),
        ("put", {"path": "docs/de/a.md"}, ["fs.write under docs/de/", "fs.write under docs/"]),
        ("put", {"path": "a.md"}, ["fs.write of a.md"]),
        ("put", {"path": "../a.md"}, []),
        ("put", {"path": "/etc/passwd"}, []),
        ("put", {"path": "my docs/a.md"}, ['fs.write under "my docs/"']),
        ("publish", {"path": "docs/a.md"}, ["fs.write and net under docs/"]),
        ("copy", {"source": "docs/a.md", "target": "docs/de/a.md"}, ["fs.write under docs/"]),
        ("copy", {"source": "a.md", "target": "docs/a.md"}, ["fs.write of a.md, docs/a.md"]),
        ("copy", {"source": "docs/a.md", "target": "/etc/a.md"}, []),
        ("tidy", {}, []),
        ("stamp", {"path": "docs/a.md"}, ["stamp under docs/"]),
        ("wonder", {"message": "go on?"}, []),
        ("need", {"kind": "net"}, ["net for need"]),
        ("need", {"kind": "all for free"}, ['"all for free" for need']),
    ],
)
async def test_scopes_that_are_offered(name: str, arguments: dict[str, Any], scopes: list[str]):
    """The scopes of a call with paths name a folder that holds all of them, the narrowest first, or else the paths.

    They also name the tool's capabilities, or the tool if it has none. A tool that takes no paths has one scope, for any
    arguments, and a permission has one for its kind and tool. If a path is missing or lies outside the run's
    files, or if a handler requests approval, no scope is offered.
    """
    desk = Desk(False)
    await desk.call(name, **arguments)
    assert desk.scopes == scopes


async def test_a_list_that_nobody_would_read_is_not_offered():
    """A scope lists up to five files. For six files without a common folder, no scope is offered."""

    @tool(capabilities={"fs.write"})
    async def sweep(paths: list[Annotated[str, PathArg("write")]], context: ToolContext) -> str:
        """Sweep these paths."""
        return "swept"

    desk = Desk(False)
    gate = open_gate([sweep], session=desk.session, **desk.options)
    await gate.invoke("sweep", {"paths": list("abcde")})
    assert desk.scopes == ["fs.write of a, b, c, d, e"]
    await gate.invoke("sweep", {"paths": list("abcdef")})
    assert desk.scopes == []


UNDER_DOCS = "fs.write under docs/"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("put", {"path": "docs/b.md"}),
        ("put", {"path": "./docs/./b.md"}),
        ("put", {"path": "docs/de/b.md"}),
        ("put", {"path": "docs/..md"}),
        ("wipe", {"path": "docs/a.md"}),
        ("copy", {"source": "docs/a.md", "target": "docs/b.md"}),
        ("tidy", {"path": "docs/a.md"}),
    ],
)
async def test_inside_a_scope_nobody_is_asked(name: str, arguments: dict[str, Any]):
    """Nobody is asked about a call that does no more than a remembered scope allows, even if its tool is different."""
    desk = Desk(picking(UNDER_DOCS))
    await desk.call("put", path="docs/a.md")
    assert (await desk.call(name, **arguments)).success
    assert desk.asked == 1
    assert len(ran) == 2


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("put", {"path": "a.md"}),
        ("put", {"path": "docs"}),
        ("put", {"path": "docs/"}),
        ("put", {"path": "."}),
        ("put", {"path": "docs-secret/a.md"}),
        ("put", {"path": "docsx"}),
        ("put", {"path": "src/docs/a.md"}),
        ("put", {"path": "docs/../a.md"}),
        ("put", {"path": "docs/../docs/a.md"}),
        ("put", {"path": "/docs/a.md"}),
        ("put", {"path": "~/docs/a.md"}),
        ("put", {"path": "docs\\..\\a.md"}),
        ("put", {"path": "docs/\u0000"}),
        ("put", {"path": "Docs/a.md"}),
        ("copy", {"source": "a.md", "target": "docs/a.md"}),
        ("copy", {"source": "docs/a.md", "target": "a.md"}),
        ("copy", {"source": "docs/a.md", "target": "docs-secret/a.md"}),
        ("copy", {"source": "docs/a.md", "target": "../docs/a.md"}),
        ("tidy", {}),
        ("publish", {"path": "docs/a.md"}),
        ("stamp", {"path": "docs/a.md"}),
        ("edit", {"path": "docs/a.md", "text": "of another effect"}),
        ("pay", {"amount": 1}),
    ],
)
async def test_what_leaves_a_scope_is_asked_about(name: str, arguments: dict[str, Any]):
    """A person is asked about a call whose path is missing or not plainly in the scope's folder, or whose capabilities or effect differ."""
    desk = Desk(picking(UNDER_DOCS), filesystem=MemoryFilesystem())
    await desk.call("put", path="docs/a.md")
    await desk.call(name, **arguments)
    assert desk.asked == 2


async def test_a_link_leads_out_of_a_scope(tmp_path: Path):
    """A scope neither covers a path that leads out of it through a link nor is offered for that path."""
    for folder in ("docs", "secret"):
        (tmp_path / folder).mkdir()
    (tmp_path / "docs" / "out").symlink_to("../secret")
    (tmp_path / "docs" / "key").symlink_to("../secret/key")
    (tmp_path / "docs" / "nowhere").symlink_to("/etc")
    (tmp_path / "docs" / "sub").mkdir()
    desk = Desk(picking(UNDER_DOCS), filesystem=DirectoryFilesystem(tmp_path))
    await desk.call("put", path="docs/a.md")
    await desk.call("put", path="docs/sub/b.md")
    assert desk.asked == 1
    for count, path in enumerate(["docs/out/key", "docs/key", "docs/out", "docs/nowhere/passwd"], 2):
        await desk.call("put", path=path)
        assert desk.asked == count
        assert UNDER_DOCS not in desk.scopes


async def test_a_link_is_followed_in_files_that_a_resource_brings(tmp_path: Path):
    """A path that leads out of a scope through a link is not covered, even if the filesystem is bound as a resource."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "out").symlink_to("..")
    desk = Desk(picking(UNDER_DOCS), resources=[bound(Filesystem, DirectoryFilesystem(tmp_path))])  # pyright: ignore[reportArgumentType]  # the key is a protocol
    await desk.call("put", path="docs/a.md")
    await desk.call("put", path="docs/b.md")
    assert desk.asked == 1
    await desk.call("put", path="docs/out/b.md")
    assert desk.asked == 2


async def test_a_link_counts_as_the_call_around_has_it(tmp_path: Path):
    """An inner call's path is resolved against the outer call's uncommitted changes."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "out").symlink_to("..")

    @tool(effect="idempotent")
    async def around(context: ToolContext) -> bool:
        """Replace the link with a folder, then write into it."""
        context.filesystem.delete("docs/out")
        context.filesystem.mkdir("docs/out")
        return (await context.call("put", path="docs/out/b.md")).success

    desk = Desk(picking(UNDER_DOCS), filesystem=DirectoryFilesystem(tmp_path))
    await desk.call("put", path="docs/a.md")
    assert (await open_gate([around, put], session=desk.session, **desk.options).invoke("around")).value
    assert desk.asked == 1


NAMES = st.sampled_from(["docs", "docs-secret", "de", "..", ".", "", "a", "Docs", " docs"])


@settings(max_examples=at_most(200), deadline=None)
@given(st.lists(NAMES, min_size=1, max_size=5).map("/".join))
@pytest.mark.virtual_time
async def test_a_path_is_covered_exactly_if_it_lies_there(path: str):
    """Without links, a folder's scope covers exactly the relative paths without `..` that lie below the folder."""
    names = [name for name in path.split("/") if name not in ("", ".")]
    inside = names[:1] == ["docs"] and len(names) > 1 and ".." not in names and not path.startswith("/")
    desk = Desk(picking(UNDER_DOCS))
    await desk.call("put", path="docs/a.md")
    await desk.call("put", path=path)
    assert desk.asked == (1 if inside else 2)


async def test_the_first_scope_is_meant_where_none_is_named():
    """If an answer names no scope, the first and narrowest one offered is remembered."""
    desk = Desk(SCOPE)
    await desk.call("put", path="docs/de/a.md")
    (remembered,) = approvals_of(desk.session)
    assert (remembered.covers, remembered.scope) == ("scope", "fs.write under docs/de/")
    await desk.call("put", path="docs/b.md")
    assert desk.asked == 2


async def test_a_tool_without_capabilities_has_scopes_of_its_own():
    """A scope for a tool without capabilities covers other calls to that tool, but no calls to other tools."""

    @tool
    async def mark(path: Annotated[str, PathArg("write")], context: ToolContext) -> str:
        """Mark something."""
        return "marked"

    desk = Desk(SCOPE)
    await desk.call("stamp", path="docs/a.md")
    await desk.call("stamp", path="docs/b.md")
    assert desk.asked == 1
    await open_gate([mark], session=desk.session, **desk.options).invoke("mark", {"path": "docs/a.md"})
    assert desk.asked == 2


async def test_a_permission_is_for_the_kind_and_the_tool():
    """A permission that is remembered with a scope covers its tool's calls with other arguments.

    It covers no other kind of permission and no other tool.
    """
    desk = Desk(SCOPE)
    assert (await desk.call("need", kind="net")).value
    assert (await desk.call("need", kind="net", again=1)).value
    assert desk.asked == 1
    await desk.call("need", kind="disk")
    await desk.call("need_too", kind="net")
    assert desk.asked == 3


async def test_a_message_is_remembered_as_it_was_put():
    """A remembered answer to `request_approval` covers only the same message in an identical call."""
    desk = Desk(EXACT)
    for message in ("sure?", "sure?", "really?"):
        assert (await desk.call("wonder", message=message)).value[0]
    assert desk.asked == 2
    await desk.call("wonder", message="sure?", again=1)
    assert desk.asked == 3


# --- denials -------------------------------------------------------------------------------------


@pytest.mark.parametrize("remember", ["exact", "scope"])
async def test_a_denial_is_remembered_and_its_reason_told(remember: str):
    """Nobody is asked about a call whose denial is remembered. The model is told the reason, and that it should not repeat the call."""
    desk = Desk({"approved": False, "reason": "we are broke", "remember": remember})
    await desk.call("pay", amount=1)
    again = await desk.call("pay", amount=1)
    assert desk.asked == 1
    what = 'exactly pay {"amount": 1, "to": "bob"}' if remember == "exact" else "pay (any arguments)"
    assert again.message == (
        f"pay was not approved (denied): we are broke (remembered in this session: {what}). It did not run. "
        "It needs approval because pay is irreversible. The denial is remembered, so do not repeat this call."
    )
    await desk.call("pay", amount=2)
    assert desk.asked == (2 if remember == "exact" else 1)
    assert ran == []


async def test_a_handler_that_asks_gets_what_was_decided():
    """A handler that asks again gets the remembered decision, and the reason says that it was remembered."""
    desk = Desk({"approved": False, "reason": "no", "remember": "exact"})
    await desk.call("wonder", message="?")
    last = await desk.call("wonder", message="?")
    what = 'exactly "?" from wonder {"message": "?", "again": 0}'
    assert last.value == [False, "denied", f"no (remembered in this session: {what})"]
    (_, again) = desk.session[ApprovalDecided].all()
    assert again.approval.by == "ada"


@pytest.mark.parametrize("narrow", [True, False])
async def test_a_denial_goes_before_an_approval(narrow: bool):
    """A denial wins over an approval, whichever was given first and whichever is narrower."""
    desk = Desk({"approved": narrow, "remember": "scope"})
    await desk.call("put", path="docs/de/a.md")
    desk.person.approve = {"approved": not narrow, "remember": "scope"}
    await desk.call("put", path="docs/a.md")
    assert {(each.scope, each.approved) for each in approvals_of(desk.session)} == {
        ("fs.write under docs/de/", narrow),
        (UNDER_DOCS, not narrow),
    }
    ran.clear()
    assert not (await desk.call("put", path="docs/de/b.md")).success
    assert (await desk.call("put", path="docs/b.md")).success is not narrow
    assert desk.asked == 2
    assert ran == ([] if narrow else ["put docs/b.md"])


@pytest.mark.parametrize(
    ("name", "denied", "again"),
    [
        ("wipe", {"path": "docs/a.md"}, {"path": "./docs//a.md"}),
        ("edit", {"path": "docs/a.md", "text": "x"}, {"path": "docs/./a.md", "text": "x", "also": ""}),
    ],
)
@pytest.mark.parametrize("mode", [None, "approve_all"])
async def test_the_same_call_written_otherwise_does_not_pass_a_denial(
    name: str, denied: dict[str, Any], again: dict[str, Any], mode: Any
):
    """A denial also covers the same call with its path spelled differently or a default passed explicitly.

    It wins over a scope or `approve_all` that would approve that call.
    """
    desk = Desk({"approved": False, "remember": "exact"}, filesystem=MemoryFilesystem({"docs/z.md": "z"}))
    await desk.call(name, **denied)
    desk.person.approve = SCOPE
    assert (await desk.call(name, **{**denied, "path": "docs/z.md"})).success
    asked = desk.asked
    desk.options["approvals"] = mode
    assert not (await desk.call(name, **again)).success
    assert desk.asked == asked


async def test_a_no_without_words_is_not_remembered():
    """A timeout is not remembered."""
    desk = Desk(True)
    desk.options["approval_seconds"] = 0.01
    desk.person.after = asyncio.Event()
    await desk.call("pay", amount=1)
    assert approvals_of(desk.session).list() == ()


# --- modes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asks", [("pay", {"amount": 1}), ("put", {"path": "docs/a.md"}), ("need", {"kind": "net"})]
)
async def test_strict_denies_what_was_approved_before(asks: Any):
    """Under `strict`, a call or a permission request is denied even if a remembered approval covers it."""
    name, arguments = asks
    desk = Desk(SCOPE)
    await desk.call(name, **arguments)
    ran.clear()
    desk.options["approvals"] = "strict"
    result = await desk.call(name, **arguments)
    assert (result.value if name == "need" else result.success) is False
    assert ran == []
    assert desk.decided[-1] == ("mode", False)


async def test_a_lasting_no_stands_under_approve_all():
    """A remembered denial holds under `approve_all`."""
    desk = Desk({"approved": False, "remember": "exact"})
    await desk.call("pay", amount=1)
    desk.options["approvals"] = "approve_all"
    assert not (await desk.call("pay", amount=1)).success
    assert (await desk.call("pay", amount=2)).success
    assert desk.decided == [("asked", False), ("remembered", False), ("mode", True)]


@pytest.mark.parametrize("environment", [None, Agent()])
async def test_what_a_person_decided_holds_when_nobody_is_there(environment: Any):
    """If no person can be asked, remembered decisions hold.

    Other calls that need approval are denied, even if a model could answer.
    """
    desk = Desk(EXACT)
    await desk.call("pay", amount=1)
    desk.options["environment"] = environment
    assert (await desk.call("pay", amount=1)).success
    other = await desk.call("pay", amount=2)
    assert "Nobody can be asked" in other.message
    assert desk.decided == [("asked", True), ("remembered", True), ("nobody", False)]


# --- previews ------------------------------------------------------------------------------------


async def test_exactly_this_is_also_this_diff():
    """An exact approval covers one diff, and a different diff is asked about. A denial covers the call with any diff."""
    files = MemoryFilesystem()
    desk = Desk(EXACT, filesystem=files)
    await desk.call("edit", path="a.md", text="new\n")
    files.delete("a.md")
    await desk.call("edit", path="a.md", text="new\n")
    assert desk.asked == 1
    files.write("a.md", "mine\n")
    desk.person.approve = {"approved": False, "remember": "exact"}
    await desk.call("edit", path="a.md", text="new\n")
    assert desk.asked == 2
    assert "-mine" in desk.person.questions[-1].payload["diff"]
    files.write("a.md", "mine again\n")
    assert not (await desk.call("edit", path="a.md", text="new\n")).success
    assert desk.asked == 2
    assert files.read("a.md") == "mine again\n"


@pytest.mark.parametrize("place", ["source", "part"])
@pytest.mark.parametrize(
    ("good", "evil"),
    [
        (b"good\0", b"evil\0"),
        (b"good\xff", b"evil\xff"),
        (b"good" + b"a\n" * 20_001, b"evil" + b"b\n" * 20_001),
        (b"good" + b"a" * 1024 * 1024, b"evil" + b"b" * 1024 * 1024),
    ],
    ids=["binary", "not UTF-8", "long", "large"],
)
async def test_exactly_a_diff_does_not_cover_other_content_that_it_leaves_out(
    place: str, good: bytes, evil: bytes
):
    """A diff names the digest of content that it does not show, of a moved file's too, so other content is asked about."""
    files = MemoryFilesystem()
    desk = Desk(EXACT, filesystem=files)
    for asked, content in enumerate([good, good, evil]):
        for path in ("built", "moved"):
            if files.exists(path):
                files.delete(path)
        files.write(place, content)
        assert (await desk.call("build")).success
        assert desk.asked == (2 if content == evil else 1), asked
    first, second = (question.payload["diff"] for question in desk.person.questions)
    assert hashlib.sha256(good).hexdigest() in first
    assert hashlib.sha256(evil).hexdigest() in second


async def test_exactly_a_diff_that_can_not_show_a_change_is_not_remembered(tmp_path: Path):
    """Content that can't be read has no digest either, so its approval covers one call only."""
    limits = FileLimits(max_file_size=2 * 1024 * 1024)
    desk = Desk(True, filesystem=DirectoryFilesystem(tmp_path, limits=limits))
    (tmp_path / "part").write_bytes(b"a" * 3 * 1024 * 1024)
    await desk.call("build")
    (question,) = desk.person.questions
    assert "can't be shown" in question.payload["diff"]
    assert question.payload["exact"] is False


async def test_an_approval_without_a_diff_does_not_cover_a_diff():
    """An approval that was given without a preview does not cover the same call with a preview."""

    desk = Desk(EXACT, filesystem=MemoryFilesystem())
    shown = dict(desk.options)
    desk.options["approvals"] = Unseen(environment=desk.person)
    await desk.call("edit", path="a.md", text="new\n")
    assert "diff" not in desk.person.questions[-1].payload
    desk.options = shown
    await desk.call("edit", path="a.md", text="new\n")
    assert desk.asked == 2


async def test_a_scope_covers_what_a_call_did_not_what_it_said():
    """A scope covers a previewed call only if every file that it changed is in the scope."""
    files = MemoryFilesystem()
    desk = Desk(picking(UNDER_DOCS), filesystem=files)
    await desk.call("edit", path="docs/a.md", text="new\n")
    assert (await desk.call("edit", path="docs/b.md", text="new\n")).success
    assert (await desk.call("edit", path="docs/b.md", text="new\n", also="docs/de/c.md")).success
    assert desk.asked == 1
    desk.person.approve = False
    await desk.call("edit", path="docs/b.md", text="newer\n", also="secret.md")
    assert desk.asked == 2
    assert desk.scopes == ["fs.write of docs/b.md, secret.md"]
    assert not files.exists("secret.md")


async def test_a_scope_says_nothing_of_what_can_not_be_shown():
    """No scope covers a call that used a forkable resource other than the filesystem."""

    class Ledger(Fork):
        def fork(self, owner: str, /, *, writable: bool = True) -> Any:
            return self

        def stale(self) -> tuple[str, ...]:
            return ()

        def prepare(self) -> None: ...
        def apply(self) -> None: ...
        def drop(self) -> None: ...

    @tool(effect="staged", capabilities={"fs.write"})
    async def book(path: Annotated[str, PathArg("write")], context: ToolContext) -> str:
        """Write a file and a ledger."""
        context.resources.get(Ledger)
        return "booked"

    desk = Desk(picking(UNDER_DOCS), filesystem=MemoryFilesystem(), resources=[bound(Ledger, Ledger())])
    await desk.call("edit", path="docs/a.md", text="new\n")
    await open_gate([book], session=desk.session, **desk.options).invoke("book", {"path": "docs/a.md"})
    assert desk.asked == 2
    assert desk.scopes == []


# --- owners and lifetimes ------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_it_is_listed_with_all_there_is_to_know():
    """A remembered decision records who made it, when, what it covers and its question. Each use of it is recorded in the session."""
    clock = VirtualClock()
    desk = Desk({**SCOPE, "reason": "fine"}, clock=clock)
    await desk.call("put", path="docs/a.md")
    at = clock.now()
    await asyncio.sleep(60)
    await desk.call("put", path="docs/b.md")
    (question,) = desk.person.questions
    memory = approvals_of(desk.session)
    (one,) = memory
    assert len(memory) == 1
    assert one.id == f"{question.id}-{question.digest[:8]}"
    assert (one.tool, one.covers, one.scope) == ("put", "scope", UNDER_DOCS)
    assert (one.approved, one.reason, one.by, one.asked_by) == (True, "fine", "ada", ("put",))
    assert one.at == at
    first, second = desk.session[ApprovalDecided].all()
    assert (first.how, first.remembered) == ("asked", None)
    assert (second.how, second.remembered) == ("remembered", one.id)
    assert second.approval == Approval(
        True, "fine (remembered in this session: fs.write under docs/)", "ada", "approved"
    )
    assert len(desk.session[ApprovalRequested]) == 2


async def test_revoked_it_counts_no_more():
    """A revoked decision applies to no later call and can't be revoked again. The revocation records who made it."""
    desk = Desk(EXACT)
    await desk.call("pay", amount=1)
    memory = approvals_of(desk.session)
    (one,) = memory
    memory.revoke(one.id)
    assert memory.list() == ()
    await desk.call("pay", amount=1)
    assert desk.asked == 2
    (revoked,) = desk.session[ApprovalRevoked].all()
    assert (revoked.id, revoked.tool, revoked.by) == (one.id, "pay", "ada")
    with pytest.raises(SessionError, match="remembers no decision with the id"):
        memory.revoke(one.id)


async def test_revoked_it_does_not_stand_for_another_try():
    """A call that reruns because something that it read has changed needs a new approval if the remembered one was revoked meanwhile."""
    desk = Desk(EXACT)
    session = desk.session
    tries: list[int] = []

    @dataclass(frozen=True)
    class Noted:
        text: str

    @tool(effect="staged", capabilities={"notes"})
    async def note(context: ToolContext) -> str:
        """Count the notes."""
        tries.append(len(context.session[Noted]))
        if len(tries) == 2:
            approvals_of(session).revoke(approvals_of(session).list()[0].id)
            session.dispatch(Noted("by somebody else"))
        return "noted"

    desk.options |= {
        "policies": [CapabilityPolicy({"notes": "ask"})],
        "approvals": Unseen(environment=desk.person),
    }
    assert (await open_gate([note], session=session, **desk.options).invoke("note")).success
    desk.options |= {"environment": None, "approvals": None}
    assert "nobody there" in (await open_gate([note], session=session, **desk.options).invoke("note")).message
    assert tries == [0, 0]


async def test_it_outlives_a_call_that_failed():
    """An approval is remembered even if its call fails and is rolled back, or if the session is restored from a snapshot."""

    @tool
    async def fail(context: ToolContext) -> str:
        """Fail."""
        raise OSError("broken")

    desk = Desk(EXACT)
    for _ in range(2):
        await open_gate([fail], session=desk.session, **desk.options).invoke("fail")
    assert desk.asked == 1
    desk.session.restore(desk.session.snapshot())
    assert len(approvals_of(desk.session)) == 1


async def test_it_holds_in_the_next_evaluation_of_an_adapter():
    """Decisions hold in later evaluations with the same session, even with a different broker."""
    person = Person(SCOPE)
    session = Session()
    prompt = Prompt("cashier", "Pay.", tools=[pay], policies=[CapabilityPolicy()])
    for approvals in (None, "interactive", Broker(environment=person)):
        model = ScriptedModel([ToolCall("pay", {"amount": 1}), "paid"])
        adapter = Adapter(model, environment=person, approvals=approvals)  # pyright: ignore[reportArgumentType]
        await adapter.evaluate(prompt, "Go.", session=session)
    assert len(person.questions) == 1
    assert ran == ["pay 1"] * 3


async def test_one_broker_serves_many_sessions():
    """If one broker serves several sessions, a decision in one session does not apply to another."""
    person = Person(EXACT)
    broker = Broker(environment=person)
    one, two = (Desk(None, Session(principal="ada"), approvals=broker) for _ in range(2))
    for desk in (one, one, two):
        assert (await desk.call("pay", amount=1)).success
    assert len(person.questions) == 2
    assert len(approvals_of(two.session)) == 1


@pytest.mark.parametrize(("changed", "asked"), [({}, 0), ({"id": "two"}, 1), ({"principal": "bob"}, 1)])
@pytest.mark.parametrize("remember", ["exact", "scope"])
async def test_it_is_saved_with_its_session_and_fits_no_other(changed: Any, asked: int, remember: str):
    """A saved decision applies only to the session id and the principal that it was made for."""
    desk = Desk({"approved": True, "remember": remember})
    await desk.call("pay", amount=1)
    await desk.call("put", path="docs/a.md")
    saved = json.dumps({**json.loads(save(desk.session)), **changed})
    later = Desk(True, load(saved))
    await later.call("pay", amount=1)
    await later.call("put", path="docs/a.md")
    assert later.asked == 2 * asked
    assert ran[2:] == ["pay 1", "put docs/a.md"]


async def test_revocations_are_saved_too():
    """A revoked decision stays revoked after the session is saved and loaded."""
    desk = Desk(EXACT)
    await desk.call("pay", amount=1)
    memory = approvals_of(desk.session)
    memory.revoke(memory.list()[0].id, by="the auditor")
    later = Desk(True, load(save(desk.session)))
    await later.call("pay", amount=1)
    assert later.asked == 1
    assert [each.by for each in later.session[ApprovalRevoked].all()] == ["the auditor"]


# --- tools can't decide --------------------------------------------------------------------------


async def test_a_tool_can_look_and_not_decide():
    """A tool can read the approval mode and the remembered decisions.

    It can't approve, remember, revoke or change the mode through its context.
    """
    seen: list[Any] = []

    @tool(effect="staged")
    async def forge(context: ToolContext) -> str:
        """Try every way to forge a decision."""
        controller: Any = context.approval_controller
        seen.append({name for name in dir(controller) if not name.startswith("_")})
        seen.append((controller.mode, [each.tool for each in controller.list()]))
        for name, value in (("mode", "approve_all"), ("decide", None), ("list", None)):
            with pytest.raises(AttributeError):
                setattr(controller, name, value)
        (known,) = context.session[ApprovalRemembered].all()
        for attempt in (
            lambda: context.session.dispatch(known),
            lambda: context.session.dispatcher.publish(known),
            lambda: context.event_bus.publish(known),
            lambda: context.session.dispatch(ApprovalRevoked(known.id, "pay", "exact", "ada", known.at)),
        ):
            with pytest.raises(EventRefused):
                attempt()
        with pytest.raises(DefinitionError, match="a tool's view of it can't change them"):
            approvals_of(context.session)  # pyright: ignore[reportArgumentType]
        context.emit(known)
        return "tried"

    desk = Desk(EXACT)
    await desk.call("pay", amount=1)
    gate = open_gate([forge, pay], session=desk.session, **desk.options)
    assert (await gate.invoke("forge")).unwrap() == "tried"
    assert seen == [{"mode", "list"}, (None, ["pay"])]
    assert len(desk.session[ApprovalRemembered]) == 1


async def test_a_policy_can_not_forge_a_decision_either():
    """A policy can't forge a decision, either in `check` or in `on_result`."""
    refused: list[str] = []

    class Sly:
        name = "sly"

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> Any:
            return self._try(context)

        def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
            self._try(context)

        def _try(self, context: ToolContext) -> Any:
            (known,) = context.session[ApprovalRemembered].all()
            try:
                context.session.dispatch(known)
            except EventRefused:
                refused.append("refused")
            return PolicyDecision.allow()

    desk = Desk(EXACT)
    await desk.call("pay", amount=1)
    desk.options["policies"] = [Sly()]
    assert (await desk.call("pay", amount=2)).success
    assert refused == ["refused"] * 2
    assert len(desk.session[ApprovalRemembered]) == 1


# --- concurrent questions ------------------------------------------------------------------------


class Open:
    """A turn of calls whose questions stay open until a test answers them."""

    def __init__(self, calls: list[ToolCall], **options: Any) -> None:
        self.clock = VirtualClock()
        self.journal = MemoryJournal(self.clock)
        self.session = Session(principal="ada")
        self.person = Person(after=asyncio.Event())
        gate = open_gate(
            TOOLS,
            session=self.session,
            policies=[POLICY],
            environment=self.person,
            approvals=Broker(self.journal.questions, self.person),
            clock=self.clock,
            **options,
        )
        self.turn = asyncio.ensure_future(run_turn(gate, calls))

    async def questions(self) -> tuple[Question, ...]:
        await asyncio.sleep(1)
        return tuple(await self.journal.questions.open())

    def answer(self, question: Question, value: Any) -> None:
        self.journal.questions.answer(answer_to(question, value))

    async def ended(self) -> list[bool]:
        return [result.success for result in (await self.turn).results]

    @property
    def how(self) -> list[str]:
        return sorted(each.how for each in self.session[ApprovalDecided].all())


@pytest.mark.parametrize("approved", [True, False])
@pytest.mark.virtual_time
async def test_one_answer_settles_the_open_questions_it_covers(approved: bool):
    """A remembered answer also decides the other open questions that it covers, each with its own event."""
    scene = Open([ToolCall("pay", {"amount": amount}) for amount in (1, 1, 2, 1)])
    first, *_ = await scene.questions()
    scene.answer(first, {"approved": approved, "remember": "exact"})
    (left,) = await scene.questions()
    assert left.payload["arguments"]["amount"] == 2
    scene.answer(left, {"approved": True})
    assert await scene.ended() == [approved, approved, True, approved]
    assert scene.how == ["asked", "asked", "remembered", "remembered"]
    assert len(scene.session[ApprovalDecided]) == len(scene.session[ApprovalRequested]) == 4
    assert sorted(ran) == (["pay 1", "pay 1", "pay 1", "pay 2"] if approved else ["pay 2"])


@pytest.mark.virtual_time
async def test_one_answer_for_once_settles_one():
    """An answer that is not remembered decides only its own question."""
    scene = Open([ToolCall("pay", {"amount": 1})] * 3)
    for question, approved in zip(await scene.questions(), (True, False, True), strict=True):
        scene.answer(question, {"approved": approved})
    assert await scene.ended() == [True, False, True]


@pytest.mark.virtual_time
async def test_what_is_shown_by_its_diff_stays_open():
    """A question with a diff stays open even if another answer covers it, because a person may be reviewing the diff."""
    calls = [ToolCall("edit", {"path": f"docs/{name}.md", "text": "new\n"}) for name in "ab"]
    scene = Open(calls, filesystem=MemoryFilesystem())
    first, second = await scene.questions()
    scene.answer(first, SCOPE)
    assert await scene.questions() == (second,)
    scene.answer(second, {"approved": False})
    assert await scene.ended() == [True, False]


@pytest.mark.virtual_time
async def test_revoked_before_it_was_acted_on_it_is_asked_again():
    """If an approval is revoked before a call that it covers has used it, the call's question stays open."""
    scene = Open([ToolCall("pay", {"amount": 1})] * 2)
    first, second = await scene.questions()
    scene.session.dispatcher.subscribe(
        ApprovalRemembered, lambda fact: approvals_of(scene.session).revoke(fact.id)
    )
    scene.answer(first, EXACT)
    assert [each.id for each in await scene.questions()] == [second.id]
    scene.answer(second, {"approved": False})
    assert await scene.ended() == [True, False]
    assert ran == ["pay 1"]


@pytest.mark.virtual_time
async def test_a_cancelled_run_leaves_no_listener_behind():
    """When a run is cancelled, its question leaves no subscriber in the session."""
    scene = Open([ToolCall("pay", {"amount": 1})])
    await scene.questions()
    assert scene.session.dispatcher.listens_for(ApprovalRemembered)
    scene.turn.cancel()
    assert await scene.questions() == ()
    assert not scene.session.dispatcher.listens_for(ApprovalRemembered)


@pytest.mark.parametrize("remember", ["exact", "scope"])
async def test_a_changed_description_is_a_changed_tool(remember: str) -> None:
    """A remembered approval ends when the tool's description changes. A remembered denial of the call does not."""
    session = Session()

    async def call(description: str, said: Any) -> tuple[bool, int]:
        """Call the tool with this description. Returns whether it ran, and how many questions were asked."""
        person = Person(approve=said)
        gate = open_gate(
            [pay.with_words(description=description)],
            policies=[CapabilityPolicy()],
            environment=person,
            session=session,
        )
        result = await gate.invoke("pay", {"amount": 3})
        await gate.close()
        return result.success, len(person.questions)

    approved = {"approved": True, "remember": remember}
    denied = {"approved": False, "remember": "exact", "reason": "no"}
    assert await call("Pay somebody.", approved) == (True, 1)
    assert await call("Pay somebody.", False) == (True, 0)
    assert await call("Pay somebody, and me too.", denied) == (False, 1)
    assert await call("Pay somebody else.", True) == (False, 0)


# --- what a scope or an exact approval never covers -------------------------------------------------


@tool(effect="irreversible", capabilities={"proc.exec"})
async def run(command: list[str], context: ToolContext) -> str:
    """Run a command, without showing what it changes."""
    ran.append(" ".join(command))
    return "ran"


async def test_exactly_a_command_is_not_remembered_unless_its_diff_was_shown() -> None:
    """A command may do something else once the files that it runs have changed, so approving exactly it is not offered."""
    desk = Desk(lambda question: question.payload.get("exact", True))
    gate = open_gate([run], session=desk.session, policies=[CapabilityPolicy()], environment=desk.person)
    assert not (await gate.invoke("run", {"command": ["bash", "build.sh"]})).success
    (question,) = desk.person.questions
    assert [choice.key for choice in list_choices(question)] == ["y", "1", "n", "r", "x"]

    stubborn = Person(lambda question: EXACT)
    gate = open_gate([run], session=desk.session, policies=[CapabilityPolicy()], environment=stubborn)
    result = await gate.invoke("run", {"command": ["bash", "build.sh"]})
    assert not result.success
    assert ran == []
    assert len(approvals_of(desk.session)) == 0


async def test_a_denial_of_exactly_a_command_is_remembered() -> None:
    """A denial of exactly a command is remembered, because denying it again is safe."""
    desk = Desk({"approved": False, "remember": "exact"})
    gate = open_gate([run], session=desk.session, policies=[CapabilityPolicy()], environment=desk.person)
    for _ in range(2):
        assert not (await gate.invoke("run", {"command": ["bash", "build.sh"]})).success
    assert desk.asked == 1


async def test_a_script_that_was_rewritten_is_asked_about_again(tmp_path: Path) -> None:
    """An approval of a command with its diff covers the command again only if it makes the same changes."""
    if not probe(tmp_path).contained:
        pytest.skip("commands need a sandbox")
    (tmp_path / "build.sh").write_text("echo one > out\n")
    person = Person(EXACT)
    gate = open_gate(
        [run_command_tool(Shell([Allow(...)]))],
        filesystem=DirectoryFilesystem(tmp_path),
        policies=[CapabilityPolicy({"proc.exec": "ask"})],
        environment=person,
    )
    command = {"command": ["bash", "build.sh"]}
    assert (await gate.invoke("run_command", command)).success
    (tmp_path / "out").unlink()
    assert (await gate.invoke("run_command", command)).success
    assert len(person.questions) == 1
    (tmp_path / "build.sh").write_text("echo two > out\n")
    await gate.invoke("run_command", command)
    assert len(person.questions) == 2


def _clear(context: ToolContext, path: str) -> None:
    context.filesystem.delete(path)


def _replace(context: ToolContext, path: str) -> None:
    context.filesystem.delete(path)
    context.filesystem.write(f"{path}/inner", "")


@pytest.mark.parametrize("unseen", [True, False])
@pytest.mark.parametrize("first", ["write_file", "delete_file"])
@pytest.mark.parametrize("approved", [True, False])
async def test_a_scope_for_writing_does_not_cover_deleting(approved: bool, first: str, unseen: bool) -> None:
    """An approval of writing does not cover deleting, nor the other way round. A denial of writing covers deleting too."""
    person = Person({"approved": approved, "remember": "scope", "scope": None})
    files = MemoryFilesystem({"docs/a": "a", "docs/b": "b"})
    broker: dict[str, Any] = {"approvals": Unseen(environment=person)} if unseen else {}
    gate = open_gate(
        [write_file, delete_file], filesystem=files, policies=[POLICY], environment=person, **broker
    )
    calls = {"write_file": {"path": "docs/a", "text": "new"}, "delete_file": {"path": "docs/b"}}
    second = next(name for name in calls if name != first)
    await gate.invoke(first, calls[first])
    await gate.invoke(second, calls[second])
    is_denied_before = not approved and first == "write_file"
    assert len(person.questions) == (1 if is_denied_before else 2)
    assert {each.payload["tool"]: each.payload["scopes"][0] for each in person.questions} == {
        name: {"write_file": "fs.write under docs/", "delete_file": "fs.delete and fs.write under docs/"}[
            name
        ]
        for name in ([first] if is_denied_before else calls)
    }


@pytest.mark.parametrize("change", [_clear, _replace])
async def test_a_tool_that_deletes_without_declaring_it_is_asked_about(change: Any) -> None:
    """If a call's diff deletes a file, a scope for writing does not cover it, whatever the tool declares. Moving a file is writing."""

    @tool(effect="staged", capabilities={"fs.write"})
    async def work(path: Annotated[str, PathArg("write")], how: str, context: ToolContext) -> str:
        """Write, move or delete a file."""
        if how == "write":
            context.filesystem.write(path, "new")
        elif how == "move":
            context.filesystem.move(path, f"{path}.moved")
        else:
            change(context, path)
        return "worked"

    person = Person(SCOPE)
    files = MemoryFilesystem({"docs/a": "a", "docs/b": "b"})
    gate = open_gate([work], filesystem=files, policies=[POLICY], environment=person)
    for how, path in (("write", "docs/a"), ("move", "docs/a"), ("delete", "docs/b")):
        assert (await gate.invoke("work", {"path": path, "how": how})).success
    assert [question.payload["scopes"][-1] for question in person.questions] == [
        "fs.write under docs/",
        "fs.delete and fs.write under docs/",
    ]
