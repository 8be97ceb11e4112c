"""Statements: rows that are told as JSON, and rows that are found by their primary key and locked alone.

A SELECT that locks, an UPDATE and a DELETE lock each row that they read, whether it is one of those that they are for.
Where a table has few rows, the optimizer prefers to read all of them to a search by `IN (…)`, and the statement waits
for every transaction of a producer that has written to the table. Only a join from what is told to the table, in this
order and by this index, reads nothing else. No other form was found that both servers keep to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Delete,
    Float,
    FromClause,
    Integer,
    Select,
    String,
    Table,
    Text,
    Update,
    Uuid,
    bindparam,
    column,
    func,
    literal_column,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction
from sqlalchemy.types import TypeEngine

from outbox.stores.mysql.shapes import exactly

_EXACTLY = "<exactly>"  # what a column of JSON_TABLE is compared by is known when the statement is compiled

_TYPES: Mapping[type[TypeEngine[Any]], str] = {
    BigInteger: "BIGINT",
    Integer: "INT",
    Float: "DOUBLE",
    String: f"VARCHAR(255) {_EXACTLY}",
    Text: f"LONGTEXT {_EXACTLY}",
    Uuid: f"CHAR(32) {_EXACTLY}",
}

_BY_KEY = "FORCE INDEX (PRIMARY)"


class JsonTable(GenericFunction[Any]):
    """JSON_TABLE, whose second argument says the path and the columns."""

    name = "json_table"
    inherit_cache = True


@compiles(JsonTable, "mysql")
@compiles(JsonTable, "mariadb")
def _json_table(element: JsonTable, compiler: Any, **options: Any) -> str:
    arguments = ", ".join(compiler.process(each, **options) for each in element.clauses)
    return f"JSON_TABLE({arguments.replace(_EXACTLY, exactly(compiler.dialect))})"


def json_rows(name: str, columns: Mapping[str, type[TypeEngine[Any]]]) -> FromClause:
    """A table of the JSON objects that are bound under this name."""
    told = ", ".join(f"{each} {_TYPES[kind]} PATH '$.{each}'" for each, kind in columns.items())
    return _table(name, told, {each: _type(kind) for each, kind in columns.items()})


def json_ids(name: str) -> FromClause:
    """A table of the JSON numbers that are bound under this name."""
    return _table(name, "id BIGINT PATH '$'", {"id": BigInteger()}).alias(name)


def _table(name: str, told: str, columns: Mapping[str, TypeEngine[Any]]) -> FromClause:
    path: ColumnElement[Any] = literal_column(f"'$[*]' COLUMNS ({told})")
    typed = [column(each, kind) for each, kind in columns.items()]
    return func.json_table(bindparam(name, type_=Text), path).table_valued(*typed)


def _type(kind: type[TypeEngine[Any]]) -> TypeEngine[Any]:
    return Uuid(native_uuid=False) if kind is Uuid else kind()


def by_key(statement: Select[Any], table: Table) -> Select[Any]:
    """A SELECT that goes from what is told to the rows of a table."""
    told = [each for each in statement.get_final_froms() if each is not table]
    if not told:
        return statement
    ordered = statement.with_only_columns(*statement.selected_columns, maintain_column_froms=False)
    ordered = ordered.select_from(*told, table).prefix_with("STRAIGHT_JOIN")
    return ordered.with_hint(table, _BY_KEY)


class KeyedUpdate(Update):
    """An UPDATE that goes from what is told to the rows of its table."""

    inherit_cache = True


class KeyedDelete(Delete):
    """A DELETE that goes the same way."""

    inherit_cache = True


@compiles(KeyedUpdate, "mysql")
@compiles(KeyedUpdate, "mariadb")
def _keyed_update(element: KeyedUpdate, compiler: Any, **options: Any) -> str:
    text: str = compiler.visit_update(element, **options)
    name = compiler.preparer.format_table(element.table)
    before, comma, rest = text.partition(f"UPDATE {name}, ")
    if not comma or before:
        return text
    told, _, assignments = rest.partition(" SET ")
    return " ".join(("UPDATE", told, "STRAIGHT_JOIN", name, _BY_KEY, "SET", assignments))


@compiles(KeyedDelete, "mysql")
@compiles(KeyedDelete, "mariadb")
def _keyed_delete(element: KeyedDelete, compiler: Any, **options: Any) -> str:
    text: str = compiler.visit_delete(element, **options)
    name = compiler.preparer.format_table(element.table)
    before, using, rest = text.partition(f" USING {name}, ")
    if not using:
        return text
    told, _, conditions = rest.partition(" WHERE ")
    return f"{before} USING {told} STRAIGHT_JOIN {name} {_BY_KEY} WHERE {conditions}"
