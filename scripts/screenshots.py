"""Take screenshots of the page in a browser, and save them in docs/img or the given folder.

    .venv/bin/python scripts/screenshots.py [FOLDER] [NAME ...]

Each of the twelve screens is taken in light, in dark (`NAME-dark`) and on a phone (`NAME-phone`). `NAME` alone names all
three. Only the screenshots that the documentation uses are in git. The others are for inspection.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from playwright.sync_api import Browser, Page, sync_playwright  # noqa: E402 (tests/ is on the path only now)

from handrail import Adapter, CapabilityPolicy, Prompt, ScriptedModel, ToolContext, tool  # noqa: E402
from handrail.guard import ask  # noqa: E402
from handrail.serve.people import People  # noqa: E402
from handrail.serve.sources import PromptSource, Source  # noqa: E402
from support.browsers import launched  # noqa: E402
from support.researched_app import research, source  # noqa: E402
from support.served import GATES, Served, serving, source_in  # noqa: E402
from support.serving import play  # noqa: E402

WIDE = (1180, 800)
PHONE = (390, 844)


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def allow(page: Page) -> None:
    page.get_by_role("button", name="Allow once").click()


def empty(page: Page, server: Served) -> None:
    page.get_by_label("Message", exact=True).wait_for()


def sign_in(page: Page, server: Served) -> None:
    """Sign in with a wrong password."""
    page.get_by_label("Name").fill("ann")
    page.get_by_label(re.compile("^Password")).fill("not the right one")
    page.keyboard.press("Enter")
    page.get_by_role("alert").wait_for()


def inbox(page: Page, server: Served) -> None:
    """Look at a question of another person's run."""
    say(page, 'call pay {"amount": 5}')
    page.get_by_text("Waiting for 1 person").wait_for()
    context = page.context
    context.clear_cookies()
    server.sign_in(context, name="bob", password=PASSWORD)
    page.reload()
    page.get_by_role("button", name=re.compile("^Inbox, 1 waiting")).click()
    page.get_by_role("dialog").get_by_role("group", name="Approval of pay").wait_for()


def chat(page: Page, server: Served) -> None:
    edit(page, server)
    allow(page)
    page.get_by_text("It says Monday now.").wait_for()
    say(page, "show")
    page.get_by_text("That is all.").wait_for()


def edit(page: Page, server: Served) -> None:
    say(page, "edit")
    page.get_by_role("group", name="Approval of edit_file").wait_for()


def form(page: Page, server: Served) -> None:
    say(page, "book")
    page.get_by_label("seats").fill("40")
    page.get_by_role("button", name="Send", exact=True).first.click()


def progress(page: Page, server: Served) -> None:
    say(page, "sheep")
    page.get_by_text("4 of 8").wait_for()


def nested(page: Page, server: Served) -> None:
    say(page, "research")
    page.get_by_role("group", name="Approval of pay").wait_for()


def failed(page: Page, server: Served) -> None:
    say(page, "break")
    page.get_by_role("group", name="Approval of break_off").or_(
        page.get_by_text("It failed.")
    ).first.wait_for()
    say(page, "fail")
    page.get_by_text("The run failed.").wait_for()


def files(page: Page, server: Served) -> None:
    chat(page, server)
    page.get_by_role("tab", name="Files").click()
    page.get_by_role("button", name="Undo").first.wait_for()


def timeline(page: Page, server: Served) -> None:
    nested(page, server)
    allow(page)
    page.get_by_text("It is known now.").wait_for()
    page.get_by_role("tab", name="Timeline").click()
    page.wait_for_timeout(500)


def timeline_call(page: Page, server: Served) -> None:
    """Look at a call that changed a file."""
    chat(page, server)
    page.get_by_role("tab", name="Timeline").click()
    page.get_by_label("Run").select_option(index=0)
    page.get_by_role("treeitem", name="edit_file").click()
    page.get_by_role("dialog").get_by_text("Changes").wait_for()


def reconnecting(page: Page, server: Served) -> None:
    chat(page, server)
    server.stop()
    page.get_by_text("Reconnecting…").wait_for()


def menu(page: Page, server: Served) -> None:
    chat(page, server)
    page.get_by_role("button", name="Threads").click()


def steering(page: Page, server: Served) -> None:
    """Say three things to a run while it works, edit one, and type another."""
    say(page, "sheep")
    page.get_by_text("4 of 8").wait_for()
    when = page.get_by_label("When the model is told")
    for text, moment in [
        ("Count the black ones twice.", "next step"),
        ("Then tell the shepherd how many there are, and which of them are still missing.", "afterwards"),
        ("And the dogs.", "next step"),
    ]:
        page.get_by_label("Message", exact=True).fill(text)
        when.select_option(moment)
        page.keyboard.press("Enter")
        page.get_by_role("button", name=f"Edit: {text}").wait_for()
    page.get_by_role("button", name="Withdraw: And the dogs.").click()
    page.get_by_role("button", name="Edit: Count").click()
    page.get_by_label("Edit the message").fill("Count the black ones only once.")
    page.keyboard.press("Enter")
    page.get_by_text("(edited)").wait_for()
    page.get_by_label("Message", exact=True).fill("And skip the lambs")


def editing(page: Page, server: Served) -> None:
    """Edit a message that is told meanwhile."""
    steering(page, server)
    page.get_by_role("button", name="Edit: Count").click()
    page.get_by_label("Edit the message").fill("Count them all.")
    GATES["sheep"].set()
    page.get_by_role("button", name="Send as new").wait_for()


def paused(page: Page, server: Served) -> None:
    """Pause a run, say something to it, and open the menu."""
    say(page, "sheep")
    page.get_by_text("4 of 8").wait_for()
    page.get_by_role("button", name="Pause or wrap up").click()
    page.get_by_role("menuitem", name="Pause").click()
    page.get_by_role("button", name="Withdraw: Pause").wait_for()
    GATES["sheep"].set()
    page.get_by_role("button", name="Continue").wait_for()
    say(page, "Only the black ones, please.")
    page.get_by_role("button", name="Edit: Only").wait_for()
    page.get_by_role("button", name="Pause or wrap up").click()


def background(page: Page, server: Served) -> None:
    """Begin three background runs."""
    say(page, "Take me to the sea.")
    page.get_by_text("waiting at the gate").wait_for()


def background_ended(page: Page, server: Served) -> None:
    """Let the background runs end, and open the longest answer."""
    background(page, server)
    with ThreadPoolExecutor() as pool:  # the browser's loop has this thread
        pool.submit(research, server.folder).result()
    GATES["wait"].set()
    page.get_by_text("timetable of the boats").wait_for()
    page.locator("details.background summary").press("Enter")


PASSWORD = "a long password of theirs"


def nobody(folder: Path) -> PromptSource:
    """Return an app with two users, one of whom must approve what the other pays."""
    people = People(folder / "people.db")
    for name, role in (("ann", "user"), ("bob", "approver")):
        people.add(name, [role], PASSWORD)
    people.close()
    policy = CapabilityPolicy({"money": ask(approvals=1)})
    return PromptSource(
        Prompt("desk", "Help.", tools=[wire], policies=[policy]), Adapter(ScriptedModel(play))
    )


@tool(name="pay", capabilities={"money"})
async def wire(amount: int, context: ToolContext) -> str:
    """Pay somebody."""
    return f"paid {amount}"


Scene = Callable[[Page, Served], None]
Size = tuple[int, int]
SOURCES: dict[Scene, Callable[[Path], Source]] = {
    background: lambda folder: source(),
    background_ended: lambda folder: source(),
    sign_in: nobody,
    inbox: nobody,
}
"""The apps of the scenes that `support.served` does not play."""
PERSON: dict[Scene, dict[str, str] | None] = {sign_in: None, inbox: {"name": "ann", "password": PASSWORD}}
"""Who signs in before a scene. By default, a link is used."""
SCREENS: dict[str, Scene] = {
    "empty": empty,
    "sign-in": sign_in,
    "chat": chat,
    "approval": edit,
    "inbox": inbox,
    "form": form,
    "timeline": timeline,
    "files": files,
    "nested": nested,
    "failed": failed,
    "steering": steering,
    "background": background_ended,
}
PICTURES: dict[str, tuple[Scene, str, Size]] = {
    **{
        f"{name}{suffix}": (scene, theme, size)
        for name, scene in SCREENS.items()
        for suffix, theme, size in (("", "light", WIDE), ("-dark", "dark", WIDE), ("-phone", "light", PHONE))
    },
    "progress": (progress, "light", WIDE),
    "steering-late": (editing, "light", WIDE),
    "steering-late-phone": (editing, "dark", PHONE),
    "paused": (paused, "light", WIDE),
    "paused-phone": (paused, "dark", PHONE),
    "background-begun": (background, "light", WIDE),
    "timeline-call": (timeline_call, "light", WIDE),
    "timeline-call-dark": (timeline_call, "dark", WIDE),
    "timeline-call-phone": (timeline_call, "light", PHONE),
    "reconnecting": (reconnecting, "light", WIDE),
    "menu-phone": (menu, "light", PHONE),
}


@contextmanager
def opened(
    browser: Browser, scene: Scene, theme: str, size: tuple[int, int]
) -> Generator[tuple[Page, Served]]:
    """Start a server, open its page in the browser, and yield both."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with serving(folder, source=SOURCES.get(scene, source_in)(folder)) as server:
            context = browser.new_context(
                viewport={"width": size[0], "height": size[1]},
                color_scheme="dark" if theme == "dark" else "light",
                reduced_motion="reduce",
            )
            page = context.new_page()
            page.on(
                "pageerror",
                lambda error: print(f"an error occurred in the page: {error.stack}", file=sys.stderr),
            )
            if (person := PERSON.get(scene, {})) is not None:
                server.sign_in(context, **person)
            page.goto(server.url)
            yield page, server
            context.close()
            for gate in ("sheep", "wait"):
                GATES[gate].set()


def main(given: list[str]) -> None:
    folder = Path(given[0]) if given else ROOT / "docs" / "img"
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = launched(playwright)
        for name, (scene, theme, size) in PICTURES.items():
            if given[1:] and not {name, re.sub("-(dark|phone)$", "", name)} & set(given[1:]):
                continue
            for gate in ("sheep", "wait"):
                GATES[gate].clear()
            with opened(browser, scene, theme, size) as (page, server):
                scene(page, server)
                page.wait_for_timeout(
                    600
                )  # wait for animations to end, and for the buttons of a new question
                page.screenshot(path=folder / f"page-{name}.png")
                print(folder / f"page-{name}.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
