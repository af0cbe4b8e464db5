"""Caps on spending on a server: who is asked at the cap, who may raise it, and what becomes of the run."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from handrail import Adapter, Budget, Prompt, ScriptedModel, Spend
from handrail.cli.command_options import parse_spend
from handrail.cli.outcome import UsageError
from handrail.errors import DefinitionError
from handrail.messages import Traits, Usage
from handrail.models.scripted import Reply
from handrail.run.limits import caps_of
from handrail.serve.sources import PromptSource
from serve.test_votes import by, inbox, people_in, vote
from support.passwords import cheap_hashes
from support.serving import said_by, serving

__all__ = ["cheap_hashes"]

TEAM = (("ann", ["user"]), ("bea", ["user"]), ("bob", ["admin"]), ("eve", ["approver"]))


def desk(spend: Any, tokens: int = 5000) -> PromptSource:
    model = ScriptedModel(lambda request: Reply("Done.", usage=Usage(0, tokens, requests=1)), traits=Traits())
    return PromptSource(Prompt("desk", "Help."), Adapter(model, spend=spend, max_tokens=tokens))


async def test_at_the_cap_a_user_with_the_role_is_asked_and_the_run_goes_on_once_they_raised_it(
    tmp_path: Path,
) -> None:
    people_in(tmp_path, *TEAM)
    async with serving(tmp_path, desk(Spend(Budget(tokens=8000)))) as client:
        await client.say("t", "one", by("ann"))
        await client.idle("t", by("ann"))
        await client.say("t", "two", by("ann"))
        question = await client.asked("t", by("ann"))
        assert (question["kind"], question["quorums"]) == ("approval", [{"role": "admin", "approvals": 1}])
        assert "ann has spent 5000 tokens" in question["message"]
        await client.say("u", "mine", by("bea"))  # others have a cap of their own
        assert said_by((await client.idle("u", by("bea")))["messages"])[-1] == "Done."
        answer = {"question_id": question["id"], "digest": question["digest"], "value": {"approved": True}}
        assert (await client.ask("POST", "/threads/t/answers", answer, by("ann"))).status == 409
        assert await inbox(client, "eve") == []
        assert (await vote(client, "eve", question)).status == 409
        [seen] = await inbox(client, "bob")
        assert (seen["id"], seen["principal"]) == (question["id"], "ann")
        assert (await vote(client, "bob", seen)).json == {"decided": True}
        assert said_by((await client.idle("t", by("ann")))["messages"])[-1] == "Done."
        [raised] = [
            each for state in await client.app.threads.journal.spending.list() for each in state.raises
        ]
        assert (raised.by, raised.amounts) == ("bob", {"tokens": 8000})
        entries = client.app.principals.people.audit()
        assert [each["action"] for each in entries if each["who"] == "bob"] == ["saw", "voted"]


async def test_a_denied_raise_fails_the_run_and_its_thread_says_why(tmp_path: Path) -> None:
    people_in(tmp_path, *TEAM)
    async with serving(tmp_path, desk(Spend(Budget(tokens=10)))) as client:
        await client.say("t", "one", by("ann"))
        question = await client.asked("t", by("ann"))
        assert (await vote(client, "bob", question, approved=False, reason="tomorrow")).json == {
            "decided": False
        }
        thread = await client.idle("t", by("ann"))
        assert thread["status"] == "failed"
        assert "A raise was denied by bob" in thread["problem"]
        assert "tomorrow" in thread["problem"]


async def test_a_server_with_an_unpriced_model_refuses_a_cap_on_money_at_its_start(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError, match="price of the model 'scripted:script' is not known"):
        async with serving(tmp_path, desk(Spend(5))):
            raise AssertionError("it started")


def test_the_option_names_what_is_capped_for_whom_and_where() -> None:
    assert parse_spend(["20", "1.5/app", "500000tokens@Europe/Berlin", "7requests/app@UTC"]) == (
        Spend(Decimal(20)),
        Spend(Decimal("1.5"), by="app"),
        Spend(Budget(tokens=500_000), zone="Europe/Berlin"),
        Spend(Budget(requests=7), by="app"),
    )
    assert caps_of(parse_spend(None)) == ()
    for wrong in ("", "x", "-5", "5.5tokens", "5/team", "5@"):
        with pytest.raises(UsageError, match="not an amount"):
            parse_spend([wrong])
    with pytest.raises(DefinitionError, match="Mars"):
        parse_spend(["5@Mars"])


async def test_everybody_sees_their_own_usage_and_only_admins_everybodys(tmp_path: Path) -> None:
    people_in(tmp_path, *TEAM)
    async with serving(tmp_path, desk(())) as client:
        for name in ("ann", "bea", "ann"):
            await client.say("t", "one", by(name))
            await client.idle("t", by(name))
        own = (await client.ask("GET", "/usage?by=person&by=model", headers=by("ann"))).json
        [line] = own["lines"]
        assert (line["person"], line["model"], line["requests"], line["output"]) == (
            "ann",
            "scripted:script",
            2,
            10_000,
        )
        for name in ("ann", "eve"):
            assert (await client.ask("GET", "/usage?everybody=1", headers=by(name))).status == 403
        everybody = await client.ask("GET", "/usage?everybody=1&by=person&format=csv", headers=by("bob"))
        assert everybody.headers["content-type"].startswith("text/csv")
        assert [each.split(",")[:2] for each in everybody.body.decode().splitlines()[1:]] == [
            ["ann", "2"],
            ["bea", "1"],
        ]
        assert client.app.principals.people.audit()[-1]["action"] == "read everybody's usage"
        for wrong in ("by=team", "days=0", "days=x", "zone=Mars"):
            assert (await client.ask("GET", f"/usage?{wrong}", headers=by("ann"))).status == 422
