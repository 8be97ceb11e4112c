"""SQLite's schema table, and the SQL that mends its tables. What ALTER TABLE cannot do, a new table does."""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import Column, MetaData, Row, Table
from sqlalchemy.schema import CreateTable

from outbox.stores.ddl import as_text, indexes
from outbox.stores.schema_check import Check, Gap, LiveColumn, LiveTable, plain_default, shape

_GENERATED = (2, 3)  # how `table_xinfo` marks columns that are computed


class SqliteCheck(Check):
    """What SQLite has."""

    def read(self, table: Table) -> LiveTable | None:
        made = self._definitions(table, "table").get(table.name)
        if made is None:
            return None
        rows = self._rows(f"PRAGMA {self._schema(table)}table_xinfo({self.quoted(table.name)})")
        rows = [row for row in rows if row.hidden not in _GENERATED or row.name in table.columns]
        key = tuple(row.name for row in sorted(rows, key=lambda row: row.pk) if row.pk)
        numbered = bool(re.search(r"\bAUTOINCREMENT\b", made, re.IGNORECASE))
        return LiveTable(
            columns={row.name: _column(row, numbered and bool(row.pk)) for row in rows},
            primary_key=key,
            indexes={name: shape(sql) for name, sql in self._definitions(table, "index").items()},
        )

    def type_name(self, column: Column[Any]) -> str:
        return column.type.compile(dialect=self.dialect).upper()

    def alter(self, table: Table, column: Column[Any], live: LiveColumn) -> str:
        return ""

    def free(self, table: Table, name: str) -> str:
        return ""

    def replace_primary_key(self, table: Table) -> str:
        return ""

    def add(self, table: Table, column: Column[Any]) -> str:
        return "" if column.primary_key else super().add(table, column)

    def drop_index(self, table: Table, name: str) -> str:
        return f"DROP INDEX {self._schema(table)}{self.quoted(name)};"

    def settled(self, table: Table, live: LiveTable, gaps: list[Gap]) -> list[Gap]:
        if all(gap.mend for gap in gaps):
            return gaps
        anew = self._anew(table, live)
        return [Gap(gap.what, anew, gap.breaks) for gap in gaps]

    def _anew(self, table: Table, live: LiveTable) -> str:
        """The table made anew with all its rows. The old one stays: whatever goes wrong on the way, nothing is lost."""
        before = Table(f"{table.name}_before", MetaData(), schema=table.schema)
        old, new = self.name(before), self.name(table)
        ours = [name for name in live.columns if name in table.columns]
        added = [name for name in live.columns if name not in table.columns]
        names = ", ".join(self.quoted(name) for name in (*ours, *added))
        sequence = f"{self._schema(table)}sqlite_sequence"
        numbering = [
            f"DELETE FROM {sequence} WHERE name = '{table.name}';",
            f"INSERT INTO {sequence} SELECT '{table.name}', seq FROM {sequence} WHERE name = '{before.name}';",
        ]
        return "\n".join(
            [
                "BEGIN IMMEDIATE;",
                f"ALTER TABLE {new} RENAME TO {self.quoted(before.name)};",
                *(self.drop_index(table, str(each.name)) for each in indexes(table) if each.name in live.indexes),
                as_text(CreateTable(table), self.dialect),
                *(f"ALTER TABLE {new} ADD COLUMN {self._specification(name, live.columns[name])};" for name in added),
                f"INSERT INTO {new} ({names}) SELECT {names} FROM {old};",
                *(numbering if table.dialect_options["sqlite"]["autoincrement"] else ()),
                *(self.make_index(index) for index in indexes(table)),
                "COMMIT;",
                f"-- Look at it, make indexes and triggers of your own again, and then: DROP TABLE {old};",
            ]
        )

    def _specification(self, name: str, column: LiveColumn) -> str:
        """A column that the user added. It may be empty from now on if nothing fills it: we do not know it."""
        default = "" if column.default_as_written is None else f" DEFAULT ({column.default_as_written})"
        filled = " NOT NULL" if default and not column.nullable else ""
        return f"{self.quoted(name)} {column.type}{default}{filled}"

    def _definitions(self, table: Table, kind: str) -> dict[str, str]:
        """The statements with which things were made, by name; SQLite keeps none for those it made by itself."""
        statement = f"SELECT name, sql FROM {self._schema(table)}sqlite_master WHERE type = ? AND tbl_name = ?"
        return {row.name: row.sql for row in self._rows(statement, (kind, table.name)) if row.sql}

    def _schema(self, table: Table) -> str:
        return f"{self.quoted(table.schema)}." if table.schema else ""

    def _rows(self, statement: str, parameters: tuple[str, ...] = ()) -> list[Row[Any]]:
        return list(self.connection.exec_driver_sql(statement, parameters).all())


def _column(row: Row[Any], numbers_rows: bool) -> LiveColumn:
    return LiveColumn(
        type=re.sub(r"\s+", " ", row.type).upper(),
        nullable=not row.notnull,
        default=plain_default(row.dflt_value),
        numbers_rows=numbers_rows,
        default_as_written=row.dflt_value,
    )
