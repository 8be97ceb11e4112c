"""Check: the tables that are there, held against those that this version needs. Only catalogs are read."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Column, Connection, Index, Table
from sqlalchemy.schema import CreateIndex

from outbox.core.store import Difference
from outbox.stores.ddl import as_text, creation, indexes
from outbox.stores.tables import Tables

NO_DEFAULT = "no default"


@dataclass(frozen=True)
class LiveColumn:
    """A column as the database has it."""

    type: str
    nullable: bool
    default: str  # as `plain_default` writes it
    numbers_rows: bool  # the database fills it with numbers by itself
    default_as_written: str | None = None


@dataclass(frozen=True)
class LiveTable:
    """A table as the database has it."""

    columns: Mapping[str, LiveColumn]
    primary_key: tuple[str, ...]
    indexes: Mapping[str, str]  # by name, as `shape` writes them
    settings: Mapping[str, str] = field(default_factory=dict)
    survives_crashes: bool = True


@dataclass(frozen=True)
class Gap:
    """A difference before it is known how the table as a whole is mended."""

    what: str
    mend: str  # empty where the database can only make the table anew
    breaks: bool = True


class Check(ABC):
    """What every database is asked alike. How it answers, and how it is mended, is in its own file."""

    def __init__(self, connection: Connection, tables: Tables) -> None:
        self.connection = connection
        self.tables = tables
        self.dialect = connection.dialect
        self.compiler: Any = self.dialect.ddl_compiler(self.dialect, None)  # type: ignore[arg-type]

    def differences(self) -> list[Difference]:
        return [found for table in self.tables.metadata.sorted_tables for found in self._differences(table)]

    def _differences(self, table: Table) -> list[Difference]:
        live = self.read(table)
        if live is None:
            return [Difference(table.fullname, "the table is missing", self.make(table), breaks=True)]
        gaps = [
            *self._columns(table, live),
            *self._primary_key(table, live),
            *self._indexes(table, live),
            *self._settings(table, live),
        ]
        return [Difference(table.fullname, gap.what, gap.mend, gap.breaks) for gap in self.settled(table, live, gaps)]

    # How a database does it.

    @abstractmethod
    def read(self, table: Table) -> LiveTable | None:
        """The table as it is; None if it is missing."""

    @abstractmethod
    def type_name(self, column: Column[Any]) -> str:
        """A column's type as `read` spells it."""

    @abstractmethod
    def alter(self, table: Table, column: Column[Any], live: LiveColumn) -> str:
        """The SQL that makes a column what it must be; empty if the table must be made anew."""

    @abstractmethod
    def free(self, table: Table, name: str) -> str:
        """The SQL that lets a column of another program be left out."""

    @abstractmethod
    def replace_primary_key(self, table: Table) -> str:
        """The SQL that makes the primary key what it must be."""

    def make(self, table: Table) -> str:
        """The SQL that makes a missing table."""
        return "\n".join(creation(table, self.dialect))

    def add(self, table: Table, column: Column[Any]) -> str:
        """The SQL that adds a missing column."""
        statement = f"ALTER TABLE {self.name(table)} ADD COLUMN {self.compiler.get_column_specification(column)};"
        if column.nullable or column.server_default is not None or column.identity is not None:
            return statement
        return (
            "-- Runs while the table is empty. Where rows are there, first give them a value with a DEFAULT.\n"
            + statement
        )

    def make_index(self, index: Index) -> str:
        return as_text(CreateIndex(index), self.dialect)

    @abstractmethod
    def drop_index(self, table: Table, name: str) -> str: ...

    def settled(self, table: Table, live: LiveTable, gaps: list[Gap]) -> list[Gap]:
        """The gaps of one table, each with its SQL."""
        return gaps

    # What is compared.

    def _columns(self, table: Table, live: LiveTable) -> Iterator[Gap]:
        for column in table.columns:
            found = live.columns.get(column.name)
            if found is None:
                yield Gap(f"the column {column.name} is missing", self.add(table, column))
                continue
            what = self._wrong_with(column, found)
            if what:
                yield Gap(f"the column {column.name} {' and '.join(what)}", self.alter(table, column, found))
        for name, added in live.columns.items():
            filled = added.nullable or added.numbers_rows or added.default != NO_DEFAULT
            if name not in table.columns and not filled:
                yield Gap(
                    f"the column {name} is not ours and must be filled, which we do not do", self.free(table, name)
                )

    def _wrong_with(self, column: Column[Any], found: LiveColumn) -> list[str]:
        wrong = []
        needed_type, default = self.type_name(column), self.default(column)
        if found.type != needed_type:
            wrong.append(f"is {found.type} instead of {needed_type}")
        if found.nullable and not column.nullable:
            wrong.append("may be empty and must not")
        if column.nullable and not found.nullable:
            wrong.append("must be filled and need not")
        if column.identity is not None and not found.numbers_rows:
            wrong.append("does not number the rows")
        if found.default != default:
            wrong.append(f"has {_default_in_words(found.default)} instead of {_default_in_words(default)}")
        return wrong

    def default(self, column: Column[Any]) -> str:
        """The default that a column needs."""
        return plain_default(self.compiler.get_column_default_string(column))

    def _primary_key(self, table: Table, live: LiveTable) -> Iterator[Gap]:
        needed = tuple(column.name for column in table.primary_key)
        if live.primary_key != needed:
            key = f"on {', '.join(live.primary_key)}" if live.primary_key else "missing"
            instead = f" instead of on {', '.join(needed)}" if live.primary_key else ""
            yield Gap(f"the primary key is {key}{instead}", self.replace_primary_key(table))

    def _indexes(self, table: Table, live: LiveTable) -> Iterator[Gap]:
        for index in indexes(table):
            name, needed = str(index.name), shape(as_text(CreateIndex(index), self.dialect))
            found = live.indexes.get(name)
            if found is None:
                yield Gap(f"the index {name} is missing", self.make_index(index), breaks=bool(index.unique))
            elif found != needed:
                again = f"{self.drop_index(table, name)}\n{self.make_index(index)}"
                yield Gap(f"the index {name} is {found} instead of {needed}", again, breaks=bool(index.unique))

    def _settings(self, table: Table, live: LiveTable) -> Iterator[Gap]:
        """What a database lets a table be tuned with; most let nothing."""
        return iter(())

    def name(self, table: Table) -> str:
        return self.dialect.identifier_preparer.format_table(table)

    def quoted(self, name: str) -> str:
        return self.dialect.identifier_preparer.quote(name)


_CAST = re.compile(r'::(?:"[^"]+"|[a-z_]+(?: [a-z_]+)*)(?:\(\d+\))?(?:\[\])?')
_INDEX = re.compile(r"CREATE\s+(UNIQUE\s+)?INDEX\s+[^(]*?(?:\sUSING\s+(\w+)\s*)?\((.*)", re.IGNORECASE | re.DOTALL)
_STORAGE = re.compile(r"\sWITH\s*\([^)]*\)", re.IGNORECASE)


def shape(definition: str) -> str:
    """What an index is, however its CREATE INDEX was written: `unique on timer_id where timer_id is not null`.

    Databases add casts and parentheses. None of our conditions mixes AND with OR, so that parentheses tell nothing.
    """
    found = _INDEX.match(definition.strip().rstrip(";"))
    if found is None:
        return definition
    unique, method, rest = found.groups()
    parts = re.split(r"\bwhere\b", _STORAGE.sub("", rest), maxsplit=1, flags=re.IGNORECASE)
    kind = "" if method is None or method.lower() == "btree" else f"{method.lower()} "
    return f"{kind}{'unique ' if unique else ''}on {' where '.join(map(_plain, parts))}"


def plain_default(written: str | None) -> str:
    """A default without quotes, casts and parentheses: `0`, `false`, or nothing for the empty text."""
    if written is None:
        return NO_DEFAULT
    text = _CAST.sub("", written).strip()
    while text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    quoted = len(text) > 1 and text[0] == text[-1] == "'"
    return text[1:-1] if quoted else text.lower()


def _plain(expression: str) -> str:
    words = re.sub(r"[()\"`\[\]]", " ", _CAST.sub("", expression))
    parts = re.split(r"('(?:[^']|'')*')", words)  # what is in quotes stays as it is
    lowered = "".join(part if part.startswith("'") else part.lower() for part in parts)
    return re.sub(r"\s+", " ", lowered).strip().replace(" ,", ",")


def _default_in_words(default: str) -> str:
    return default if default == NO_DEFAULT else f"the default {default or repr('')}"
