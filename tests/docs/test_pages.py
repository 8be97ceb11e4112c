"""What the pages say of each other and of the project is so."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from .pages import ROOT, Page, all_pages

PAGES = {page.name: page for page in all_pages()}
ENTRANCE = PAGES["docs/index.md"]


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_to_a_file_and_a_heading_of_this_project(name: str) -> None:
    page = PAGES[name]
    for link in page.links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        assert target.exists(), link
        assert not anchor or anchor in Page(target).anchors, link


def test_the_index_leads_to_every_page_of_the_docs() -> None:
    linked = {(ENTRANCE.path.parent / link.partition("#")[0]).resolve() for link in ENTRANCE.links}
    missing = {page.name for page in PAGES.values() if page.name.startswith("docs/") and page.path not in linked}
    assert missing == {ENTRANCE.name}


def test_the_readme_can_be_read_in_a_few_minutes() -> None:
    assert 60 <= len(PAGES["README.md"].text.splitlines()) <= 120


def test_the_commands_that_the_readme_names_are_there() -> None:
    named = set(re.findall(r"(?:make|dev\.py) (\w+)", PAGES["README.md"].text))
    assert named == {"demo", "test"}
    makefile, program = (ROOT / "Makefile").read_text(), (ROOT / "dev.py").read_text()
    for command in named:
        assert re.search(rf"^[\w ]*\b{command}\b[\w ]*:", makefile, re.MULTILINE)
        assert f'"{command}": {command}' in program


def test_every_page_of_the_docs_opens_with_what_it_answers() -> None:
    silent = [
        page.name
        for page in PAGES.values()
        if page.name.startswith("docs/")
        and "decisions/" not in page.name
        and "This page answers:" not in page.text[:400]
    ]
    assert not silent


def test_every_decision_has_a_context_a_decision_and_a_consequence() -> None:
    decisions = [page for page in PAGES.values() if page.name.startswith("docs/decisions/")]
    numbers = [int(Path(page.name).name[:4]) for page in decisions]
    assert numbers == list(range(1, len(decisions) + 1))
    for page in decisions:
        headings = re.findall(r"^## (.+)$", page.text, re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequence"], page.name


def test_the_configuration_page_is_what_the_code_generates() -> None:
    generate = _load(ROOT / "docs/generate.py")
    assert PAGES["docs/configuration.md"].text == generate.page(), "run: python docs/generate.py"


def test_editors_and_type_checkers_are_shown_every_option_as_the_settings_declare_it() -> None:
    generate = _load(ROOT / "docs/generate.py")
    assert (ROOT / "src/outbox/options.py").read_text() == generate.typed_options(), "run: python docs/generate.py"


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
