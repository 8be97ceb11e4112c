"""What the information schema says of the tables, and the SQL that corrects them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Column, Connection, Row, String, Table, bindparam, text

from outbox.stores.mysql.shapes import ENGINE, collation, exactly
from outbox.stores.schema_check import NO_DEFAULT, Check, Gap, LiveColumn, LiveTable, plain_default

_HERE = "TABLE_SCHEMA = COALESCE(:schema, DATABASE())"

_ENGINES = text(
    f"SELECT TABLE_NAME AS name, ENGINE AS engine FROM information_schema.TABLES WHERE TABLE_NAME IN :names AND {_HERE}"
).bindparams(bindparam("names", expanding=True))

_COLUMNS = text(
    f"""
    SELECT COLUMN_NAME AS name, COLUMN_TYPE AS type, COLLATION_NAME AS collation, IS_NULLABLE AS nullable,
           COLUMN_DEFAULT AS written, EXTRA AS extra, GENERATION_EXPRESSION AS expression
    FROM information_schema.COLUMNS WHERE TABLE_NAME = :name AND {_HERE} ORDER BY ORDINAL_POSITION
    """
)

_INDEXES = text(
    f"""
    SELECT INDEX_NAME AS name, NON_UNIQUE AS many, COLUMN_NAME AS told, SUB_PART AS part, INDEX_TYPE AS kind
    FROM information_schema.STATISTICS WHERE TABLE_NAME = :name AND {_HERE} ORDER BY INDEX_NAME, SEQ_IN_INDEX
    """
)

_PRIMARY = "PRIMARY"
_NAMES = {"bool": "tinyint(1)", "integer": "int"}  # what the servers call them
_WIDTH = re.compile(r"\b(bigint|int)\(\d+\)")  # with which MariaDB shows numbers
_INTRODUCER = re.compile(r"_utf8mb[34](?=')")


def engines_of(connection: Connection, names: Sequence[str], schema: str | None) -> dict[str, str]:
    """The engine of each of these tables that is there."""
    rows = connection.execute(_ENGINES, {"names": list(names), "schema": schema})
    return {row.name: row.engine or "none" for row in rows}


class MysqlCheck(Check):
    """What MariaDB or MySQL has. Their information schema shows a role the tables that it has any right on."""

    def read(self, table: Table) -> LiveTable | None:
        engines = engines_of(self.connection, [table.name], table.schema)
        if not engines:
            return None
        here = {"name": table.name, "schema": table.schema}
        parts: defaultdict[str, list[Row[Any]]] = defaultdict(list)
        for row in self.connection.execute(_INDEXES, here):
            parts[row.name].append(row)
        return LiveTable(
            columns={row.name: self._column(row) for row in self.connection.execute(_COLUMNS, here)},
            primary_key=tuple(row.told for row in parts.pop(_PRIMARY, ())),
            indexes={name: _index(rows) for name, rows in parts.items()},
            settings={"engine": engines[table.name]},
        )

    def _column(self, row: Row[Any]) -> LiveColumn:
        kind = _WIDTH.sub(r"\1", row.type.lower())
        if row.collation is not None and not kind.startswith("char"):
            kind = f"{kind} {row.collation}"
        if row.expression:
            kind = f"{kind} as {_expression(row.expression)}"
        # MariaDB writes that there is none as NULL, and a text in quotes.
        written = None if row.written == "NULL" or row.expression else row.written
        default = NO_DEFAULT if written is None else plain_default(written or "''")
        return LiveColumn(kind, row.nullable == "YES", default, "auto_increment" in row.extra.lower(), row.written)

    def type_name(self, column: Column[Any]) -> str:
        compiled = column.type.compile(dialect=self.dialect).lower()
        name = _NAMES.get(compiled, compiled)
        if _is_text(column):
            name = f"{compiled} {collation(self.dialect)}"
        if column.computed is not None:
            name = f"{name} as {_expression(str(column.computed.sqltext))}"
        return name

    def default(self, column: Column[Any]) -> str:
        found = super().default(column)
        return "0" if found == "false" else found

    def alter(self, table: Table, column: Column[Any], live: LiveColumn) -> str:
        return f"ALTER TABLE {self.name(table)} MODIFY COLUMN {self._specified(column)};"

    def add(self, table: Table, column: Column[Any]) -> str:
        specified: str = self.compiler.get_column_specification(column)
        return super().add(table, column).replace(specified, self._specified(column))

    def _specified(self, column: Column[Any]) -> str:
        """With its collation: a table that another program made may have another one."""
        specified: str = self.compiler.get_column_specification(column)
        if not _is_text(column):
            return specified
        kind = column.type.compile(dialect=self.dialect)
        return specified.replace(f" {kind}", f" {kind} {exactly(self.dialect)}", 1)

    def free(self, table: Table, name: str) -> str:
        live = self.read(table)
        kind = "" if live is None else live.columns[name].type.partition(" ")[0]
        return f"ALTER TABLE {self.name(table)} MODIFY COLUMN {self.quoted(name)} {kind} NULL;"

    def replace_primary_key(self, table: Table) -> str:
        live = self.read(table)
        columns = ", ".join(self.quoted(column.name) for column in table.primary_key)
        gone = "DROP PRIMARY KEY, " if live is not None and live.primary_key else ""
        return f"ALTER TABLE {self.name(table)} {gone}ADD PRIMARY KEY ({columns});"

    def drop_index(self, table: Table, name: str) -> str:
        return f"DROP INDEX {self.quoted(name)} ON {self.name(table)};"

    def _settings(self, table: Table, live: LiveTable) -> Iterator[Gap]:
        engine = live.settings["engine"]
        if engine.lower() != ENGINE.lower():
            what = f"the table is in the engine {engine}, which has no transactions, instead of {ENGINE}"
            yield Gap(what, f"ALTER TABLE {self.name(table)} ENGINE={ENGINE};")


def _is_text(column: Column[Any]) -> bool:
    return isinstance(column.type, String)


def _index(rows: Sequence[Row[Any]]) -> str:
    kind = "" if rows[0].kind == "BTREE" else f"{rows[0].kind.lower()} "
    told = ", ".join(row.told if row.part is None else f"{row.told} {row.part}" for row in rows)
    return f"{kind}{'' if rows[0].many else 'unique '}on {told.lower()}"


def _expression(written: str) -> str:
    """A computed column's, without what the servers add to it."""
    bare = re.sub(r"[()`]", " ", _INTRODUCER.sub("", written.replace("\\'", "'")))  # MySQL escapes quotes
    return re.sub(r"\s+", " ", bare).strip().lower()
