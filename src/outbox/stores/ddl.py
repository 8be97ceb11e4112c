"""DDL: the statements that make a table, as text for people and their migrations."""

from __future__ import annotations

from sqlalchemy import Dialect, Index, Table
from sqlalchemy.schema import CreateIndex, CreateTable, ExecutableDDLElement


def creation(table: Table, dialect: Dialect) -> list[str]:
    """The statements that make a table and its indexes, in the same order each time."""
    return [as_text(CreateTable(table), dialect), *(as_text(CreateIndex(index), dialect) for index in indexes(table))]


def indexes(table: Table) -> list[Index]:
    """A table's indexes by name: SQLAlchemy keeps them in a set."""
    return sorted(table.indexes, key=lambda index: str(index.name))


def as_text(statement: ExecutableDDLElement, dialect: Dialect) -> str:
    lines = str(statement.compile(dialect=dialect)).strip().splitlines()
    return "\n".join(line.rstrip() for line in lines).expandtabs(4) + ";"
