"""A gateway puts other people's servers behind policies, and approvers decide in the inbox of `handrail serve`."""

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mcp_types import ElicitResult

from handrail import Adapter, Prompt, ScriptedModel
from handrail.errors import WorkerError
from handrail.journal.sqlite import SqliteJournal
from handrail.mcp.calls import CallUnknown
from handrail.mcp.gateway import Gateway, SharedRate, load_rules
from handrail.serve.people import People
from handrail.serve.sources import PromptSource
from mcp import Client
from support import PATIENCE
from support.gateways import SECRET, gateway
from support.passwords import cheap_hashes
from support.serving import Client as Page
from support.serving import serving

__all__ = ["cheap_hashes"]


def by(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}:{SECRET}"}


def text_of(result: Any) -> str:
    return result.content[0].text


async def waiting(page: Page, name: str = "ann") -> Any:
    """Return the first question in a person's inbox, once there is one."""
    while True:
        found = (await page.ask("GET", "/inbox", headers=by(name))).json["questions"]
        if found:
            return found[0]
        await asyncio.sleep(0.01)


async def never(context: Any, params: Any) -> ElicitResult:
    raise AssertionError("the client was asked")


@pytest.mark.parametrize("mode", ["2026-07-28", "legacy"])
@pytest.mark.parametrize("approved", [True, False])
async def test_approvers_decide_and_the_client_does_not(tmp_path: Path, mode: str, approved: bool) -> None:
    """A call that needs approval waits for an approver, who sees its arguments. The client is not asked.

    Other people can't see the question. The decision is in the audit log, and the call in the journal.
    """
    source = PromptSource(Prompt("desk", "Help."), Adapter(ScriptedModel([])))
    async with (
        gateway(tmp_path) as made,
        serving(tmp_path, source) as page,
        Client(made.server, mode=mode, elicitation_callback=never) as client,
    ):
        call = asyncio.ensure_future(client.call_tool("Send_Mail", {"text": "hi"}))
        question = await waiting(page)
        assert question["payload"]["arguments"] == {"text": "hi"}
        assert (await page.ask("GET", "/inbox", headers=by("bob"))).status == 403
        given = {"question_id": question["id"], "digest": question["digest"], "approved": approved}
        answer = await page.ask(
            "POST", "/inbox/answers", {**given, "reason": "" if approved else "no"}, by("ann")
        )
        assert answer.json == {"decided": approved}
        result = await asyncio.wait_for(call, PATIENCE)
        journal = made.calls.journal
        assert journal is not None
        (unit,) = await journal.calls.load(question["run_id"])
    assert result.is_error is not approved
    assert ("Send.Mail: hi" in text_of(result)) is approved
    assert unit.decision.startswith("ask")
    assert unit.arguments == '{"text":"hi"}'
    with closing(People(tmp_path / "people.db")) as people:
        voted = [entry for entry in people.audit() if entry["action"] == "voted"]
    assert [(entry["who"], entry["approved"]) for entry in voted] == [("ann", approved)]


async def test_an_approval_counts_at_its_own_gateway_only(tmp_path: Path) -> None:
    """A call that was approved at one gateway can't be continued at another, even with the same journal and names of servers.

    The approver sees which gateway asks, and the run is recorded under its identity. The gateway itself can be restarted.
    """
    source = PromptSource(Prompt("desk", "Help."), Adapter(ScriptedModel([])))
    async with gateway(tmp_path) as made, serving(tmp_path, source) as page:
        call = await made.calls.begin(
            (await made.tools.all("bob"))["Send_Mail"], {"text": "hi"}, principal="bob", asks=False
        )
        question = await waiting(page)
        assert str(tmp_path / "mcp.json") in question["message"]
        given = {"question_id": question["id"], "digest": question["digest"], "approved": True}
        call.remove()
        await asyncio.wait([call.task])
        assert (await page.ask("POST", "/inbox/answers", given, by("ann"))).json == {"decided": True}
    other = tmp_path / "other"
    other.mkdir()
    journal = SqliteJournal(tmp_path / "runs.db", watch=0.02)
    with closing(journal):
        for folder, env in ((other, {}), (tmp_path, {"TARGET": "elsewhere"})):
            text = json.loads((tmp_path / "mcp.json").read_text())
            text["mcpServers"]["trial"]["env"] = env
            (folder / "mcp2.json").write_text(json.dumps(text))
            rules = load_rules(tmp_path / "policies.yaml")
            wrong = Gateway(
                folder / "mcp2.json", rules, voters=lambda role, besides: {"ann": 0.0}, journal=journal
            )
            with pytest.raises(CallUnknown):
                await wrong.calls.resume(call.run_id, principal="bob", asks=False)
            assert wrong.tools.name != made.tools.name
            await wrong.close()
        (row,) = [each for each in await journal.runs.list() if each.record.id == call.run_id]
        assert row.record.prompt == made.tools.name
    async with gateway(tmp_path) as again:
        resumed: Any = await again.calls.resume(call.run_id, principal="bob", asks=False)
        result = await asyncio.wait_for(resumed.task, PATIENCE)
    assert result.message == "Send.Mail: hi"


async def test_allowed_denied_and_limited(tmp_path: Path) -> None:
    """An allowed call runs at once, a denied call does not run, and calls beyond the rate limit are denied."""
    async with gateway(tmp_path) as made, Client(made.server) as client:
        first = await client.call_tool("echo", {"text": "a"})
        denied = await client.call_tool("hang", {})
        rest = [await client.call_tool("echo", {"text": "a"}) for _ in range(3)]
    assert text_of(first) == "echo: a"
    assert "mcp.trial.hang" in text_of(denied)
    assert [each.is_error for each in rest] == [False, False, True]
    assert "Wait" in text_of(rest[-1])


async def test_trusted_client_approves(tmp_path: Path) -> None:
    """With `--trust-client`, the client's own person sees the call and approves it."""
    asked: list[str] = []

    async def agree(context: Any, params: Any) -> ElicitResult:
        asked.append(params.message)
        return ElicitResult(action="accept", content={"approved": True})

    async with (
        gateway(tmp_path, trust_client=True) as made,
        Client(made.server, elicitation_callback=agree) as client,
    ):
        result = await client.call_tool("Send_Mail", {"text": "hi"})
    assert text_of(result) == "Send.Mail: hi"
    assert len(asked) == 1
    assert "hi" in asked[0]


async def test_without_approvers_nothing_is_approved(tmp_path: Path) -> None:
    """If there is nobody who may approve, a call that needs approval is refused at once."""
    async with gateway(tmp_path) as made, Client(made.server) as client:
        with closing(People(tmp_path / "people.db")) as people:
            people.remove("ann")
            people.remove("bob")
        result = await asyncio.wait_for(client.call_tool("Send_Mail", {"text": "hi"}), PATIENCE)
    assert result.is_error


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("policies: [read_before_write]", r"policies.yaml:1: .*`capability` and `rate_limit`"),
        ("\npolicies:\n  - sequential: {a: [b]}", r"policies.yaml:3: "),
        ("limits: {tokens: 5}", "limits.tokens"),
        ("tools: [files]", "`tools` has no meaning"),
        ("policies:\n  - capability: {allow: [mcp.a], deny: [mcp.a]}", "listed twice"),
        ("policies:\n  - capability: {allow: [Mcp!]}", "nor a pattern"),
        ("policies: [capability, capability]", "two policies"),
        ("policies: {", "not YAML"),
        ("polices: []", "polices"),
        (
            "policies:\n  - capability: {alow: [mcp.a]}",
            r"(?s)^(?!.*locked).*`policies\[0\].capability.alow` unknown; did you mean allow",
        ),
    ],
)
def test_invalid_policies(tmp_path: Path, text: str, match: str) -> None:
    """An invalid policy file is refused, and the error says what is wrong."""
    (tmp_path / "policies.yaml").write_text(text)
    with pytest.raises(WorkerError, match=match):
        load_rules(tmp_path / "policies.yaml")


async def test_a_rule_that_names_no_server_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A capability of a server that the gateway does not have gives a warning. Others do not, because any tool may have them."""
    policies = """\
        policies:
          - capability:
              allow: [mcp.trial.echo, mcp.trial.later, mcp.login, "mcp.*", net]
              deny: [mcp.trail.hang, mcp.trail.*]
    """
    async with gateway(tmp_path, policies):
        pass
    told = [each.getMessage() for each in caplog.records if "names mcp" in each.getMessage()]
    assert [each.split(",")[0] for each in told] == [
        "a policy names mcp.trail.*",
        "a policy names mcp.trail.hang",
    ]
    assert told[0].endswith("The servers are: trial")


def test_rules_on_capabilities_are_always_there(tmp_path: Path) -> None:
    """A file without a capability policy gets the default one, and a limit on calls becomes a policy too."""
    (tmp_path / "policies.yaml").write_text("limits: {tool_calls: 3}")
    rules = load_rules(tmp_path / "policies.yaml")
    assert [policy.name for policy in rules.policies] == ["capability", "limits"]
    assert isinstance(rules.policies[1], SharedRate)
