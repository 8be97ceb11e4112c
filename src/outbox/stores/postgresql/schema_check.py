"""PostgreSQL's catalogs, and the SQL that mends its tables while they are in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Column, Connection, Index, Row, String, Table, bindparam, text
from sqlalchemy.dialects.postgresql import OID

from outbox.stores.postgresql.connection import as_array
from outbox.stores.schema_check import NO_DEFAULT, Check, Gap, LiveColumn, LiveTable, plain_default, shape

_OID = bindparam("table", type_=OID)

_TABLE = text(
    """
    SELECT c.oid, c.relpersistence <> 'u' AS survives_crashes, c.reloptions
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relname = CAST(:name AS text) AND c.relkind IN ('r', 'p')
      AND CASE WHEN CAST(:schema AS text) IS NULL THEN pg_catalog.pg_table_is_visible(c.oid)
               ELSE n.nspname = CAST(:schema AS text) END
    """
).bindparams(bindparam("name", type_=String), bindparam("schema", type_=String))

_PRESENT = text(
    """
    SELECT c.relname AS name
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relname = ANY(CAST(:names AS text[])) AND c.relkind IN ('r', 'p', 'f', 'v', 'm')
      AND CASE WHEN CAST(:schema AS text) IS NULL THEN pg_catalog.pg_table_is_visible(c.oid)
               ELSE n.nspname = CAST(:schema AS text) END
    """
).bindparams(bindparam("names", type_=String), bindparam("schema", type_=String))

_COLUMNS = text(
    """
    SELECT a.attname AS name, pg_catalog.format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull AS filled,
           a.attidentity <> '' AS identity,
           CASE WHEN a.attgenerated = '' THEN pg_catalog.pg_get_expr(d.adbin, d.adrelid) END AS default
    FROM pg_catalog.pg_attribute a
    LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE a.attrelid = CAST(:table AS oid) AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attnum
    """
).bindparams(_OID)

_INDEXES = text(
    """
    SELECT c.relname AS name, pg_catalog.pg_get_indexdef(i.indexrelid) AS definition, i.indisvalid AS valid
    FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
    WHERE i.indrelid = CAST(:table AS oid) AND NOT i.indisprimary
    """
).bindparams(_OID)

_PRIMARY_KEY = text(
    """
    SELECT o.conname AS name, (
        SELECT pg_catalog.array_agg(a.attname::text ORDER BY k.place)
        FROM pg_catalog.unnest(o.conkey) WITH ORDINALITY AS k(number, place)
        JOIN pg_catalog.pg_attribute a ON a.attrelid = o.conrelid AND a.attnum = k.number
    ) AS columns
    FROM pg_catalog.pg_constraint o WHERE o.conrelid = CAST(:table AS oid) AND o.contype = 'p'
    """
).bindparams(_OID)

_SCHEMA = text("SELECT count(*) FROM pg_catalog.pg_namespace WHERE nspname = CAST(:schema AS text)")

_TYPES = {"VARCHAR": "character varying"}  # where PostgreSQL has a longer word of its own
_VACUUM = "autovacuum_enabled"


def present_tables(connection: Connection, names: Sequence[str], schema: str | None) -> set[str]:
    """Which of these tables are there: in a schema, or where statements look for them."""
    return set(connection.execute(_PRESENT, {"names": as_array(names), "schema": schema}).scalars())


class PostgresqlCheck(Check):
    """What PostgreSQL has. Every role may read its catalogs, whatever it may do with the tables."""

    def read(self, table: Table) -> LiveTable | None:
        found = self.connection.execute(_TABLE, {"name": table.name, "schema": table.schema}).first()
        if found is None:
            return None
        here = {"table": found.oid}
        key = self._primary_key_of(found.oid)
        return LiveTable(
            columns={row.name: _column(row) for row in self.connection.execute(_COLUMNS, here)},
            primary_key=tuple(key.columns) if key else (),
            indexes={row.name: _index(row) for row in self.connection.execute(_INDEXES, here)},
            settings=dict(option.split("=", 1) for option in found.reloptions or ()),
            survives_crashes=found.survives_crashes,
        )

    def type_name(self, column: Column[Any]) -> str:
        name = column.type.compile(dialect=self.dialect)
        for short, long in _TYPES.items():
            name = name.replace(short, long)
        return name.lower()

    def make(self, table: Table) -> str:
        made = super().make(table)
        if table.schema is None or self.connection.scalar(_SCHEMA, {"schema": table.schema}):
            return made
        return f"CREATE SCHEMA IF NOT EXISTS {self.quoted(table.schema)};\n{made}"

    def alter(self, table: Table, column: Column[Any], live: LiveColumn) -> str:
        changes = list(self._changes(column, live))
        statements = [f"ALTER TABLE {self.name(table)} {', '.join(changes)};"] if changes else []
        if column.identity is not None and not live.numbers_rows:
            statements += self._number_rows(table, column)
        return "\n".join(statements)

    def _changes(self, column: Column[Any], live: LiveColumn) -> Iterator[str]:
        name, needed = f"ALTER COLUMN {self.quoted(column.name)}", self.type_name(column)
        wrong_type = live.type != needed
        wrong_default = live.default != self.default(column)
        if live.default != NO_DEFAULT and (wrong_type or wrong_default):  # it may not be a value of the new type
            yield f"{name} DROP DEFAULT"
        if wrong_type:
            yield f"{name} TYPE {needed} USING {self.quoted(column.name)}::{needed}"
        if self.default(column) != NO_DEFAULT and (wrong_type or wrong_default):
            yield f"{name} SET DEFAULT {self.compiler.get_column_default_string(column)}"
        if live.nullable != bool(column.nullable):
            yield f"{name} {'DROP' if column.nullable else 'SET'} NOT NULL"

    def _number_rows(self, table: Table, column: Column[Any]) -> Iterator[str]:
        """Numbers go on behind the largest that is there."""
        owner, name = self.name(table), self.quoted(column.name)
        sequence = f"pg_catalog.pg_get_serial_sequence('{owner}', '{column.name}')"
        yield f"ALTER TABLE {owner} ALTER COLUMN {name} ADD GENERATED BY DEFAULT AS IDENTITY;"
        yield f"SELECT pg_catalog.setval({sequence}, coalesce(max({name}), 0) + 1, false) FROM {owner};"

    def free(self, table: Table, name: str) -> str:
        return f"ALTER TABLE {self.name(table)} ALTER COLUMN {self.quoted(name)} DROP NOT NULL;"

    def replace_primary_key(self, table: Table) -> str:
        oid = self.connection.execute(_TABLE, {"name": table.name, "schema": table.schema}).one().oid
        key = self._primary_key_of(oid)
        columns = ", ".join(self.quoted(column.name) for column in table.primary_key)
        gone = f"DROP CONSTRAINT {self.quoted(key.name)}, " if key else ""
        return f"ALTER TABLE {self.name(table)} {gone}ADD PRIMARY KEY ({columns});"

    def make_index(self, index: Index) -> str:
        return super().make_index(index).replace("INDEX", "INDEX CONCURRENTLY", 1)

    def drop_index(self, table: Table, name: str) -> str:
        schema = f"{self.quoted(table.schema)}." if table.schema else ""
        return f"DROP INDEX CONCURRENTLY {schema}{self.quoted(name)};"

    def _settings(self, table: Table, live: LiveTable) -> Iterator[Gap]:
        alter = f"ALTER TABLE {self.name(table)}"
        if not live.survives_crashes:
            yield Gap("the table is UNLOGGED: a crash of the server would empty it", f"{alter} SET LOGGED;")
        needed = self.tables.storage(table)
        wrong = {name: value for name, value in needed.items() if not _equal(live.settings.get(name), value)}
        if wrong:
            what = [f"{name} is {live.settings.get(name, 'not set')} instead of {wrong[name]}" for name in wrong]
            setting = ", ".join(f"{name} = {value}" for name, value in wrong.items())
            yield Gap(", ".join(what), f"{alter} SET ({setting});", breaks=False)
        if live.settings.get(_VACUUM, "true") not in ("true", "on", "1", "yes"):
            yield Gap("autovacuum is switched off for the table", f"{alter} RESET ({_VACUUM});", breaks=False)

    def _primary_key_of(self, oid: int) -> Row[Any] | None:
        return self.connection.execute(_PRIMARY_KEY, {"table": oid}).first()


def _column(row: Row[Any]) -> LiveColumn:
    default = plain_default(row.default)
    numbers_rows = row.identity or default.startswith("nextval(")
    return LiveColumn(row.type, not row.filled, NO_DEFAULT if numbers_rows else default, numbers_rows)


def _index(row: Row[Any]) -> str:
    # CREATE INDEX CONCURRENTLY leaves such a one behind when it fails: it costs as much as another and serves no query.
    return shape(row.definition) if row.valid else "invalid"


def _equal(found: str | None, needed: str) -> bool:
    try:
        return found is not None and float(found) == float(needed)
    except ValueError:
        return found == needed
