"""README, docs, public docstrings, help, errors and the log name the component that acts; these words name none."""

from __future__ import annotations

import ast
import inspect
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import outbox
import outbox.core.events
import outbox.sqlite
import outbox.testing

from .pages import ROOT, Page, all_pages

VAGUE = re.compile(r"\b(nobody|somebody|whoever|himself)\b", re.IGNORECASE)

# What changed is said in the words of its time.
ELSEWHERE = ("CHANGELOG.md",)

SOURCES = [
    path
    for path in sorted((ROOT / "src").rglob("*.py"))
    if not path.is_relative_to(ROOT / "src/outbox/testing")  # there a user of Unix is called so, and routing keys
]

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


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Strings that a program may print, log or raise: all but docstrings."""
    tree = ast.parse(path.read_text())
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node.lineno, node.value


def test_errors_log_lines_and_settings_name_who_acts() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in SOURCES
        for line, text in texts(path)
        if VAGUE.search(text)
    ]
    assert not found


def test_the_help_of_commands_names_who_acts() -> None:
    found = [
        f"{path.name}: {node.name}"
        for path in sorted((ROOT / "src/outbox/cli").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and node.decorator_list
        and VAGUE.search(ast.get_docstring(node) or "")
    ]
    assert not found


def test_public_docstrings_name_who_acts() -> None:
    public = [
        *(getattr(module, name) for module in (outbox, outbox.testing, outbox.sqlite) for name in module.__all__),
        *(value for value in vars(outbox.core.events).values() if inspect.isclass(value)),
    ]
    methods = [
        member
        for owner in public
        if inspect.isclass(owner)
        for name, member in inspect.getmembers(owner)
        if not name.startswith("_") and (inspect.isroutine(member) or isinstance(member, property))
    ]
    found = [str(each) for each in [*public, *methods] if VAGUE.search(inspect.getdoc(each) or "")]
    assert not found


def comments_and_strings(path: Path) -> Iterator[tuple[int, str]]:
    """All of them, private docstrings included."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                yield token.start[0], token.string


def test_comments_and_private_docstrings_name_who_acts() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in SOURCES
        for line, text in comments_and_strings(path)
        if VAGUE.search(text)
    ]
    assert not found
