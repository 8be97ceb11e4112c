"""README and docs name the component that acts; the short list of words here names none."""

from __future__ import annotations

import re

import pytest

from .pages import ROOT, Page, all_pages

VAGUE = re.compile(r"\b(nobody|somebody|whoever|himself)\b", re.IGNORECASE)

# Written by other hands than those of the pages: generated from the code, or shorter notes on why it is so.
ELSEWHERE = ("docs/configuration.md", "docs/decisions/", "CHANGELOG.md")

PAGES = {
    page.name: page
    for page in [*all_pages(), *(Page(path) for path in sorted(ROOT.glob("examples/*/README.md")))]
    if not page.name.startswith(ELSEWHERE)
}


def prose(page: Page) -> str:
    """What is no block of code and no code span: those show what programs are called and what they print."""
    return "\n".join(
        "".join(child.content for child in token.children or () if child.type == "text")
        for token in page.tokens
        if token.type == "inline"
    )


@pytest.mark.parametrize("name", PAGES)
def test_sentences_name_the_relay_the_worker_or_the_caller_and_not_nobody(name: str) -> None:
    found = [line for line in prose(PAGES[name]).splitlines() if VAGUE.search(line)]
    assert not found


def test_the_titles_of_decisions_and_the_index_say_the_same() -> None:
    index = Page(ROOT / "docs/index.md").text
    for path in sorted((ROOT / "docs/decisions").glob("*.md")):
        title = Page(path).text.splitlines()[0].removeprefix("# ")
        number, _, words = title.partition(" ")
        listed = re.search(rf"^- \[{number}\]\(decisions/{path.name}\) ((?:.|\n  )+)$", index, re.MULTILINE)
        assert listed is not None, path.name
        assert " ".join(listed[1].split()) == words
        assert not VAGUE.search(words)
