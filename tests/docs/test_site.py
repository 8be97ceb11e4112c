"""The documentation site has every page and every name. `python3 dev.py docs` builds it, and checks its links."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import outbox
import outbox.testing

from .pages import ROOT, Page


def nav() -> list[str]:
    """The pages and patterns of the navigation; mkdocs is not installed beside the tests."""
    text = (ROOT / "mkdocs.yml").read_text()
    return re.findall(r"[\w./*-]+\.md", text[text.index("\nnav:") :])


def test_every_page_of_docs_is_in_the_navigation_of_the_site() -> None:
    found = {
        path.relative_to(ROOT / "docs").as_posix()
        for pattern in nav()
        for path in (ROOT / "docs").glob(pattern)
        if pattern != "index.md"  # there stands README; the index of docs is pages.md
    }
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages - found == {"index.md"}


def test_the_api_page_has_every_public_name() -> None:
    text = Page(ROOT / "docs/api.md").text
    documented = set(re.findall(r"^::: outbox\.(?:testing\.)?(\w+)$", text, re.MULTILINE))
    named = set(re.findall(r"`(\w+)`", text)) | {"outbox"}
    assert set(outbox.__all__) - documented - named == set()
    assert set(outbox.testing.__all__) - documented == set()
    classes = {name for name in outbox.__all__ if isinstance(getattr(outbox, name), type)}
    assert classes - documented == set()


def test_a_package_index_shows_a_readme_without_links_that_lead_nowhere() -> None:
    build = hatch_build()
    text = (ROOT / "README.md").read_text()
    relative = re.compile(r"\]\((?!https:)[^)]*\)")
    assert relative.search(text)
    assert not relative.search(build.readable_anywhere(text, ""))
    absolute = build.readable_anywhere(text, "https://code.example/outbox/")
    assert not relative.search(absolute)
    assert "](https://code.example/outbox/docs/guarantees.md)" in absolute


def hatch_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_figure_of_readme_and_choose_stands_on_the_page_of_benchmarks() -> None:
    measured = Page(ROOT / "docs/benchmarks.md").text
    figure = re.compile(r"(?<![\d.])(\d+(?: \d{3})*(?:\.\d+)?)(?= (?:messages|commits) a second| ms\b| µs| percent)")
    for name, least in (("README.md", 2), ("docs/choose.md", 15)):
        figures = figure.findall(Page(ROOT / name).text.replace("\n", " "))
        assert len(figures) >= least, name
        # 200 and 500 a second are the rates at which latency is measured.
        assert [each for each in figures if not re.search(rf"(?<![\d.]){re.escape(each)}(?![\d.])", measured)] == []
