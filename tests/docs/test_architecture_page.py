"""The architecture page tells what is in the code."""

from __future__ import annotations

import re
from datetime import timedelta
from importlib import import_module

from outbox.stores.tables import Tables

from .pages import ROOT, Page

PAGE = Page(ROOT / "docs/architecture.md")
PACKAGE = ROOT / "src/outbox"


def test_every_table_column_and_index_is_told() -> None:
    told = {word for span in PAGE.code_spans for word in re.split(r"[^\w]+", span)}
    tables = Tables.named("outbox_table")
    names = {table.name for table in tables.metadata.sorted_tables}
    names |= {column.name for table in tables.metadata.sorted_tables for column in table.columns}
    names |= {str(index.name) for table in tables.metadata.sorted_tables for index in table.indexes}
    assert names - told == set()


def test_every_number_is_the_one_in_the_code() -> None:
    rows = re.findall(r"^\| `(outbox\.[\w.]+)\.([A-Z_]+)` \| ([\d., ]+) \|", PAGE.text, re.MULTILINE)
    assert len(rows) > 10
    for module, name, told in rows:
        assert told == _as_told(getattr(import_module(module), name)), f"{module}.{name}"


def test_every_part_of_the_house_is_drawn_and_nothing_else() -> None:
    house = next(block.text for block in PAGE.blocks if block.text.startswith("src/outbox/"))
    drawn = set(re.findall(r"^  (\w+(?:\.py|/))", house, re.MULTILINE))
    built = {f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    built |= {path.name for path in PACKAGE.glob("*.py") if path.name != "__main__.py"}
    assert drawn == built


def test_every_file_that_is_named_is_there() -> None:
    named = {span for span in PAGE.code_spans if re.fullmatch(r"[\w/]+\.py", span)}
    missing = {name for name in named if not any((folder / name).exists() for folder in (PACKAGE, ROOT))}
    assert not missing


def _as_told(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_as_told, value))
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g}"
    return f"{value:g}" if isinstance(value, float) else str(value)
