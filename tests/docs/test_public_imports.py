"""What README, docs and examples import is public, and the page on it names every module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from .pages import ROOT, Page, all_pages

PUBLIC = (
    "outbox",
    "outbox.django",
    "outbox.events",
    "outbox.extend",
    "outbox.sqlite",
    "outbox.testing",
    "outbox.testing.servers",
    "outbox.testing.store_contract",
    "outbox.testing.transport_contract",
    "outbox.transports",
)
LATE = {"outbox": {"__version__", "dead_letters", "metadata"}}  # public beside `__all__`

SOURCES = {page.name: page.path for page in all_pages()} | {
    file.relative_to(ROOT).as_posix(): file for file in sorted((ROOT / "examples").rglob("*.py"))
}


def imports(code: str) -> Iterator[tuple[str, str | None]]:
    """The modules of the library that code imports, each with the name that it takes from there."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)


def codes(path: Path) -> list[str]:
    if path.suffix == ".py":
        return [path.read_text()]
    return [block.text for block in Page(path).blocks if block.language == "python"]


@pytest.mark.parametrize("source", SOURCES)
def test_nothing_is_imported_that_is_not_public(source: str) -> None:
    for code in codes(SOURCES[source]):
        for module, name in imports(code):
            if module.partition(".")[0] != "outbox":
                continue
            assert module in PUBLIC, f"{module} is private: re-export what is needed of it in a public module"
            if name is not None and f"{module}.{name}" not in PUBLIC:
                public = set(import_module(module).__all__) | LATE.get(module, set())
                assert name in public, f"{module}.{name} is not public"


def test_a_private_import_would_be_found() -> None:
    assert list(imports("async def f():\n    from outbox.core.x import y")) == [("outbox.core.x", "y")]
    assert len([module for path in SOURCES.values() for code in codes(path) for module, _ in imports(code)]) > 300


def test_the_page_names_the_public_modules_and_no_others() -> None:
    table = (ROOT / "docs/public-api.md").read_text().partition("## What a version promises")[0]
    assert set(re.findall(r"`(outbox(?:\.[a-z_]+)*)`(?=[ ,][^\n]*\|)", table)) == set(PUBLIC)


@pytest.mark.parametrize("module", PUBLIC)
def test_every_name_of_a_public_module_is_there(module: str) -> None:
    names = import_module(module).__all__
    assert names
    for name in names:
        assert getattr(import_module(module), name) is not None
