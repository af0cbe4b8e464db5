"""While a model's failed requests are tried again, or another model is asked, one line of the page says so."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from handrail import Adapter, Prompt, ScriptedModel, first_that_works
from handrail.messages import ModelPart, ModelRequest, Traits
from handrail.models import ModelUnavailable
from handrail.run.adapter import Retry
from handrail.serve.sources import PromptSource
from support.browsers import PATIENCE, browser
from support.served import GATES, serving

pytestmark = pytest.mark.once
__all__ = ["browser"]


class Down:
    """A model that fails at once the first time, and after that when its gate opens."""

    def __init__(self, name: str, answer: str = "") -> None:
        self.name, self.traits = name, Traits()
        self._answer, self._asked = answer, 0

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        self._asked += 1
        if self._asked > 1 or self._answer:
            await GATES.passed(self.name)
        if not self._answer:
            raise ModelUnavailable(self.name, "Overloaded")
        async for part in ScriptedModel([self._answer]).stream(request):
            yield part


def test_what_failed_is_told_until_it_goes_on(browser: Browser, tmp_path: Path) -> None:
    for name in ("a:1", "b:1"):
        GATES[name].clear()
    model = first_that_works(Down("a:1"), Down("b:1", "All is well."))
    adapter = Adapter(model, retry=Retry(attempts=2, first_wait=0.0))
    with serving(tmp_path, source=PromptSource(Prompt("desk", "Help."), adapter)) as server:
        context = browser.new_context(viewport={"width": 390, "height": 844}, reduced_motion="reduce")
        context.set_default_timeout(PATIENCE)
        server.sign_in(context)
        page = context.new_page()
        page.goto(server.url)
        page.get_by_label("Message", exact=True).fill("hello")
        page.keyboard.press("Enter")
        line = page.locator(".failing")
        expect(line).to_have_text("a:1: Overloaded. Trying again…")
        page.reload()
        expect(line).to_contain_text("Trying again…")
        GATES["a:1"].set()
        expect(line).to_contain_text("Asking b:1 instead…")
        expect(line).to_have_count(1)

        GATES["b:1"].set()
        expect(page.get_by_text("All is well.")).to_be_visible()
        expect(line).to_have_count(0)
        context.close()
