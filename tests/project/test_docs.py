"""Tests for the documentation, built as `make docs` builds it. Every link within the site works, and nothing is loaded from other sites."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown.extensions.toc import slugify
from playwright.sync_api import Browser, TimeoutError

import handrail
from handrail import Adapter, Agent, PromptResponse, errors, events
from handrail.run.options import HostArguments, ResumeArguments, RunArguments
from project.documents import DOCS, ROOT, documents
from support import PATIENCE
from support.browsers import browser

__all__ = ["browser"]

pytestmark = pytest.mark.once  # the builder is installed for only one interpreter

LOADS = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
"""HTML elements that make a browser fetch something, each with the attribute that contains the address."""


@dataclass
class Page(HTMLParser):
    """The links, loaded assets and anchors of one built page."""

    path: Path
    links: list[str] = field(default_factory=list[str])
    loads: list[str] = field(default_factory=list[str])
    anchors: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in LOADS and LOADS[tag] in given:
            self.loads.append(given[LOADS[tag]])


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site and return the completed process. `-q` is not used, because strict mode counts only logged warnings."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def broken(pages: dict[Path, Page], root: Path) -> list[str]:
    """Return the links whose page, file or anchor is missing, and the assets that are missing."""
    found: list[str] = []
    for page in pages.values():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            start = root if parts.path.startswith("/") else page.path.parent
            target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else page.path
            anchor = unquote(parts.fragment)
            if not target.is_file() or (
                anchor and target.suffix == ".html" and anchor not in pages[target].anchors
            ):
                found.append(f"{page.path.name}: {link}")
    return found


def foreign(pages: dict[Path, Page]) -> list[str]:
    """Return the addresses that a browser would load from other sites."""
    loads = [load for page in pages.values() for load in page.loads]
    sheets = {sheet for page in pages.values() for sheet in page.path.parent.rglob("*.css")}
    imported = [
        url
        for sheet in sheets
        for url in re.findall(r"url\(['\"]?(https?://[^)'\"]*|//[^)'\"]*)", sheet.read_text())
    ]
    return [load for load in loads if urlsplit(load).netloc] + imported


@pytest.fixture(scope="module")
def built_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fixture: the folder of the site, which was built without warnings."""
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT / "mkdocs.yml", folder)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stdout + built.stderr
    return folder


def test_the_site_holds_together(built_site: Path):
    """No link within the site is broken, nothing is loaded from other sites, and the reference describes every error."""
    site = {path: Page(path) for path in sorted(built_site.rglob("*.html"))}
    assert len(site) > 25
    assert sum(len(page.links) for page in site.values()) > 1000
    assert broken(site, built_site) == []
    assert any(page.loads for page in site.values())
    assert foreign(site) == []
    shown = site[built_site / "reference/errors.html"].anchors
    kinds = [
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.HandrailError)
    ]
    assert len(kinds) > 40
    assert [name for name in kinds if f"handrail.errors.{name}" not in shown] == []


def test_the_site_is_searched_without_a_server(built_site: Path, browser: Browser):
    """A site that was opened from its folder finds a page by its words, and loads nothing from elsewhere."""
    page = browser.new_page()
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url))
    found = page.locator(".md-search-result__link", has_text="Continue by an id")
    for _ in range(30):  # what is typed before the page's script listens is lost
        page.goto((built_site / "guide/tools.html").as_uri())
        page.locator(".md-search__input").fill("continue a conversation by its id")
        with contextlib.suppress(TimeoutError):
            found.first.wait_for(state="attached", timeout=PATIENCE * 1000 / 30)
            break
    found.first.evaluate("link => link.click()")
    page.wait_for_url("**/guide/conversations.html*")
    assert [url for url in loaded if urlsplit(url).scheme not in ("file", "data", "blob")] == []
    page.close()


def test_every_public_name_is_in_the_reference_once():
    """Every public name, except errors and events, has exactly one entry in the reference."""
    named: list[str] = []
    for page in (DOCS / "reference").glob("*.md"):
        named += re.findall(r"^::: handrail\.(\w+)$", page.read_text(), re.MULTILINE)
    raised = {
        name
        for name in handrail.__all__
        if isinstance(getattr(handrail, name), type) and issubclass(getattr(handrail, name), BaseException)
    }
    modules = {"errors", "events", "runs"}
    published = {name for name in handrail.__all__ if getattr(handrail, name).__module__ == events.__name__}
    assert sorted(set(named) - modules) == sorted(set(handrail.__all__) - raised - published)
    assert len(named) == len(set(named))


@pytest.mark.parametrize("part", ["runs", "serve", "testing"])
def test_every_name_of_a_public_part_is_in_the_reference(part: str):
    """The reference page of each public package mentions every name in the package's `__all__`."""
    page = (DOCS / "reference" / f"{part}.md").read_text()
    names = importlib.import_module(f"handrail.{part}").__all__
    assert [name for name in names if not re.search(rf"\b{name}\b", page)] == []


def test_every_import_on_the_pages_works():
    """Every name that a page imports from Handrail exists, in snippets that the tests don't run and in prose too."""
    imports = {
        found
        for page in documents()
        for found in re.findall(r"from (handrail[\w.]*) import (\w+(?: as \w+)?(?:, \w+)*)", page.read_text())
    }
    assert len(imports) > 50
    missing: list[str] = []
    for module, names in imports:
        try:
            exec(f"from {module} import {names}", {})
        except ImportError as error:
            missing.append(str(error))
    assert missing == []


def test_a_broken_link_fails_the_build(tmp_path: Path):
    """Strict mode reports a missing page and a missing anchor."""
    for link in ("nowhere.md", "index.md#nowhere"):
        docs = tmp_path / "docs"
        docs.mkdir(exist_ok=True)
        (docs / "index.md").write_text(f"# Title\n\n[a link]({link})\n")
        config = tmp_path / "mkdocs.yml"
        config.write_text(
            "site_name: x\ntheme: {name: material, font: false}\nplugins: []\n"
            "validation: {links: {not_found: warn, anchors: warn}}\n"
        )
        built = build(config, tmp_path / "site")
        assert built.returncode != 0
        assert "nowhere" in built.stderr


def test_broken_links_and_foreign_loads_are_found(tmp_path: Path):
    """The checks in this file find broken links, missing assets and assets that are loaded from other sites."""
    one = tmp_path / "one.html"
    one.write_text(
        '<h1 id="here"></h1><a href="#here">ok</a><a href="two.html#there">ok</a><a href="https://x.org">out</a>'
        '<a href="#gone">1</a><a href="three.html">2</a><a href="two.html#gone">3</a>'
        '<script src="https://cdn.example/x.js"></script><img src="missing.png">'
    )
    (tmp_path / "two.html").write_text(
        '<a name="there"></a><link href="//fonts.example/f.css" rel="stylesheet">'
    )
    pages = {path: Page(path) for path in tmp_path.glob("*.html")}
    assert broken(pages, tmp_path) == [
        "one.html: #gone",
        "one.html: three.html",
        "one.html: two.html#gone",
        "one.html: missing.png",
    ]
    assert sorted(foreign(pages)) == ["//fonts.example/f.css", "https://cdn.example/x.js"]


def test_the_index_names_every_extra():
    """The table of extras on the index page has a row for every extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = re.findall(r"^\| `(\w+)` \|", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert sorted(set(extras) - set(told)) == []


def test_the_tests_in_the_table_of_times_exist():
    """The design page names a test for everything that has a time."""
    table = (ROOT / "docs" / "design.md").read_text().split("## Time\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`(test_\w+)`", table))
    found = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert len(named) > 20
    assert named - found == set()


def test_the_table_of_runs_arguments_is_complete():
    """The table has each argument of `run`, and says which of `Adapter`, `Agent` and `resume` take it too."""
    takes = {
        "Adapter": {*parameters(Adapter.__init__), *HostArguments.__annotations__},
        "Agent": parameters(Agent.__init__),
        "resume": {*ResumeArguments.__annotations__},
    }
    arguments, response = (DOCS / "guide/run.md").read_text().split("## What comes back")
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ?(.*) \|$", arguments, re.MULTILINE))
    assert set(rows) == parameters(Agent.run) | {*RunArguments.__annotations__}
    for name, others in rows.items():
        assert re.findall(r"`(\w+)`", others) == [owner for owner in takes if name in takes[owner]], name
    fields = {
        name
        for row in re.findall(r"^\| (`.*?) \|", response, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert fields | {"unclosed", "conversation", "length"} == {*PromptResponse.__struct_fields__, "messages"}


def parameters(function: Callable[..., object]) -> set[str]:
    """Return the names of a function's parameters, without `self` and `**arguments`."""
    return {
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self" and parameter.kind is not parameter.VAR_KEYWORD
    }


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "examples/README.md", "bench/README.md"])
def test_links_outside_the_site_lead_somewhere(page: str):
    """Each link of a page that the site does not have leads to a file, and to a heading of it."""
    text = (ROOT / page).read_text()
    targets = re.findall(r"\]\((?!https?:)([^)]+)\)", text)
    assert targets
    missing: list[str] = []
    for target in targets:
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path
        headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if anchor else []
        if not file.exists() or (anchor and anchor not in [slugify(each, "-") for each in headings]):
            missing.append(target)
    assert missing == []
