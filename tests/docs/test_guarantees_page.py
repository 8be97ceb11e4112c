"""Every promise names tests, and every test that is named exists and runs."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from markdown_it.token import Token

from .pages import ROOT, Page

PAGE = Page(ROOT / "docs/guarantees.md")
CONTRACTS = {
    "StoreContract": sorted((ROOT / "src/outbox/testing/store").glob("*.py")),
    "TransportContract": sorted((ROOT / "src/outbox/testing/transport").glob("*.py")),
    "PublishingContract": [ROOT / "src/outbox/testing/publishing_contract.py"],
}


def test_every_promise_names_tests() -> None:
    promises = _promises()
    assert len(promises) > 20
    assert not [promise for promise, tests in promises.items() if not tests]


def test_every_test_that_is_named_exists() -> None:
    named = [span for span in PAGE.code_spans if "::" in span]
    assert not [name for name in named if not _exists(name)]


def test_the_contracts_that_are_named_are_inherited_by_tests_that_run() -> None:
    inherited = {
        getattr(base, "id", "")
        for path in ROOT.glob("tests/contract/test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test")
        for base in node.bases
    }
    assert inherited == set(CONTRACTS)


def _promises() -> dict[str, list[str]]:
    """The outer items of the lists below "Promises", each with the tests that it names."""
    found: dict[str, list[str]] = {}
    promise, depth = "", 0
    for token in _tokens_below("Promises"):
        depth += token.nesting if token.type.startswith("bullet_list") else 0
        if token.type == "inline" and depth == 1:
            promise = token.content
            found[promise] = []
        elif token.type == "inline" and depth == 2:
            spans = [child.content for child in token.children or () if child.type == "code_inline"]
            found[promise] += [span for span in spans if "::test_" in span]
    return found


def _tokens_below(heading: str) -> list[Token]:
    """The part of the page from a heading of the second level to the next one."""
    tokens = PAGE.tokens
    starts = [position for position, token in enumerate(tokens) if token.type == "heading_open" and token.tag == "h2"]
    for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        if tokens[start + 1].content == heading:
            return tokens[start + 3 : end]
    raise AssertionError(f"no heading {heading!r}")


def _exists(name: str) -> bool:
    where, _, test = name.partition("::")
    paths = CONTRACTS.get(where, [ROOT / where])
    return re.fullmatch(r"test_\w+", test) is not None and any(path.exists() and test in _tests(path) for path in paths)


@cache
def _tests(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
