"""Approvals of calls through a gateway: the person at the client can approve only with `--trust-client`, and only the call that was shown."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from mcp_types import ElicitResult, ErrorData, InputRequiredResult

from handrail.mcp import tasks
from mcp import Client, MCPError
from support import PATIENCE
from support.gateways import gateway
from support.mcp_tasks import TasksClient, TaskSession
from support.passwords import cheap_hashes

__all__ = ["cheap_hashes"]

YES = ElicitResult(action="accept", content={"approved": True})
modes = pytest.mark.parametrize("mode", ["2026-07-28", "legacy"])


def text_of(result: Any) -> str:
    return result.content[0].text


@modes
@pytest.mark.parametrize(
    "answer",
    [
        ElicitResult(action="accept", content={"approved": False}),
        ElicitResult(action="decline", content={"approved": True}),
        ElicitResult(action="cancel", content={"approved": True}),
        ErrorData(code=-1, message="the person left"),
        None,
    ],
)
async def test_only_an_approval_approves(tmp_path: Path, mode: Any, answer: Any) -> None:
    """The call is not made if the person denies, declines or cancels, if the client fails, or if the client can't ask."""

    async def reply(context: Any, params: Any) -> Any:
        return answer

    async with (
        gateway(tmp_path, trust_client=True) as made,
        Client(made.server, mode=mode, elicitation_callback=None if answer is None else reply) as client,
    ):
        try:
            result = await asyncio.wait_for(client.call_tool("Send_Mail", {"text": "hi"}), PATIENCE)
        except MCPError:
            result = None  # the SDK's client raises this if its callback returns an error
        assert await reached(made) == []
    assert result is None or result.is_error


@modes
async def test_an_answer_that_does_not_fit_is_asked_again(tmp_path: Path, mode: Any) -> None:
    """Only a boolean decides. After any other answer, the person is asked again and told why."""
    answers: list[Any] = ["yes", 1, "true", None, True]
    shown: list[str] = []

    async def reply(context: Any, params: Any) -> ElicitResult:
        shown.append(params.message)
        return ElicitResult(action="accept", content={"approved": answers.pop(0)})

    async with (
        gateway(tmp_path, trust_client=True) as made,
        Client(made.server, mode=mode, elicitation_callback=reply) as client,
    ):
        result = await asyncio.wait_for(client.call_tool("Send_Mail", {"text": "hi"}), PATIENCE)
    assert (len(shown), answers, text_of(result)) == (5, [], "Send.Mail: hi")
    assert "approved" in shown[1].partition("\n")[0]


async def test_the_call_that_was_shown_is_made(tmp_path: Path) -> None:
    """If a client sends an approval with other arguments or for a different tool, only the call that the person saw can be made.

    An approval in a first request, before anything was shown, does not count. An approval counts once.
    """
    async with gateway(tmp_path, trust_client=True) as made, asking(made) as client:
        early = await send(client, "Send_Mail", "hi", {"approval": YES})
        assert isinstance(early, InputRequiredResult)
        ((key, request),) = (early.input_requests or {}).items()
        assert "hi" in str(request)
        for name, text in (("Send_Mail", "all the money"), ("change", "all the money")):
            try:
                await send(client, name, text, {key: YES}, early.request_state)
            except MCPError:
                continue
        again = await refused(client, "Send_Mail", "hi", {key: YES}, early.request_state)
        made_calls = await reached(made)
    assert set(made_calls) <= {("Send_Mail", '{"text":"hi"}')}
    assert again or len(made_calls) == 1


async def test_an_untrusted_client_can_not_approve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An approval that an untrusted client sends in an update of its task is ignored, before and after a restart of the gateway."""
    monkeypatch.setattr(tasks, "TASK_AFTER", 0.0)
    async with gateway(tmp_path) as made, asking(made) as client:
        session = TaskSession(client.session)
        task = (await session.call("Send_Mail", text="hi"))["taskId"]
        await approve(session, task)
        assert await reached(made) == []
    async with gateway(tmp_path) as restarted, asking(restarted) as client:
        session = TaskSession(client.session)
        await approve(session, task)
        found = await session.send("tasks/get", taskId=task)
        assert await reached(restarted) == []
    assert found["status"] == "working"
    assert "inputRequests" not in found


def asking(made: Any) -> Client:
    async def never(context: Any, params: Any) -> ElicitResult:
        raise AssertionError("the client was asked")

    return Client(made.server, mode="2026-07-28", elicitation_callback=never, extensions=[TasksClient()])


async def send(client: Client, name: str, text: str, answers: Any, state: str | None = None) -> Any:
    return await client.session.call_tool(
        name, {"text": text}, input_responses=answers, request_state=state, allow_input_required=True
    )


async def refused(client: Client, *arguments: Any) -> bool:
    try:
        return bool((await send(client, *arguments)).is_error)
    except MCPError:
        return True


async def approve(session: TaskSession, task: str) -> None:
    """Try to approve a task under several names that its question may have."""
    yes = {"action": "accept", "content": {"approved": True}}
    given = dict.fromkeys(["approval", "approve", f"{task}.1~1?1", f"{task}.1~1?2"], yes)
    await session.send("tasks/update", taskId=task, inputResponses=given)


async def reached(made: Any) -> list[tuple[str, str]]:
    """Return the tools and arguments of the calls that succeeded."""
    found: list[tuple[str, str]] = []
    for row in await made.calls.journal.runs.list():
        units = await made.calls.journal.calls.load(row.record.id)
        found += [(unit.tool, unit.arguments) for unit in units if unit.status == "ok"]
    return found
