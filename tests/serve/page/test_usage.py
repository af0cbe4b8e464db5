"""At a cap, a run waits on the page until an admin allows the raise; and people see what they used, an admin what everybody did."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from handrail import Adapter, Budget, Prompt, ScriptedModel, Spend
from handrail.messages import Usage
from handrail.models.scripted import Reply
from handrail.serve.people import People
from handrail.serve.sources import PromptSource
from serve.page.test_people import PASSWORDS, log, read, say, shoot, windows
from support.browsers import browser
from support.passwords import cheap_hashes
from support.served import serving

pytestmark = pytest.mark.once
__all__ = ["browser", "cheap_hashes"]


def test_a_cap_is_raised_and_usage_is_shown(browser: Browser, tmp_path: Path) -> None:
    people = People(tmp_path / "people.db")
    for name, role in (("ann", "user"), ("bob", "admin")):
        people.add(name, [role], PASSWORDS[name])
    people.close()
    model = ScriptedModel(lambda request: Reply("Nine euros.", usage=Usage(0, 1500, requests=1)))
    source = PromptSource(
        Prompt("desk", "Help."), Adapter(model, spend=Spend(Budget(tokens=2500)), max_tokens=1500)
    )
    with serving(tmp_path, source=source) as server, windows(browser, server, "ann", "bob") as (ann, bob):
        say(ann, "A fare?")
        expect(log(ann)).to_contain_text("Nine euros.")
        say(ann, "Another?")
        inbox = read(bob)
        expect(inbox).to_contain_text("ann has spent 1500 tokens")
        shoot(bob, "cap")
        inbox.get_by_role("button", name="Allow once").click()
        expect(inbox).to_contain_text("Nothing is waiting for you.")
        expect(log(ann).get_by_text("Nine euros.")).to_have_count(2)
        bob.keyboard.press("Escape")

        ann.get_by_role("button", name="Menu of ann").click()
        ann.get_by_role("menuitem", name="Usage").click()
        own = ann.get_by_role("dialog", name="Usage")
        day = own.get_by_role("listitem")
        expect(day).to_have_count(1)
        expect(day).to_contain_text("$0 + ?2 requests · 0 tokens in · 3k out")
        expect(own.get_by_label("Everybody’s")).to_have_count(0)

        bob.get_by_role("button", name="Menu of bob").click()
        bob.get_by_role("menuitem", name="Usage").click()
        everybody = bob.get_by_role("dialog", name="Usage")
        expect(everybody).to_contain_text("Nothing was used")
        everybody.get_by_label("Everybody’s").check()
        everybody.get_by_label("By", exact=True).select_option("Person")
        expect(everybody.get_by_role("listitem").get_by_role("strong")).to_have_text(["ann"])
        shoot(bob, "usage")
