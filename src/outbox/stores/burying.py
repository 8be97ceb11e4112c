"""SqlBurying: moves messages to the dead letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import BigInteger, Connection, Executable, Integer, Select, String, Text, insert, select
from sqlalchemy.types import TypeEngine

from outbox.core.kept_property import kept_property
from outbox.stores.dialect import SqlDialect
from outbox.stores.tables import MESSAGE_COLUMNS, Tables

# What a statement that buries says of each message; the rest is copied from its row.
BURIAL: Mapping[str, type[TypeEngine[Any]]] = {
    "id": BigInteger,
    "reason": String,
    "error": Text,
    "attempts": Integer,
    "starts": Integer,
    "history": Text,
}
SAID = [name for name in BURIAL if name != "id"]
KEPT = [name for name in MESSAGE_COLUMNS if name not in BURIAL]


class SqlBurying:
    """Three steps, for databases whose `apply` is a transaction."""

    def __init__(self, tables: Tables, dialect: SqlDialect) -> None:
        self._tables = tables
        self._dialect = dialect

    def bury(self, connection: Connection, statement: Select[Any], parameters: dict[str, Any]) -> list[int]:
        """Move the rows that a SELECT of the columns in BURIAL names to the dead letters; returns their ids."""
        found = connection.execute(statement, parameters).all()
        if not found:
            return []
        ids = [row.id for row in found]
        rows = [dict(row._mapping) for row in found]
        connection.execute(self._copy_dead, {"rows": self._dialect.json(rows)})
        self._delete(connection, ids, parameters)
        return ids

    def _delete(self, connection: Connection, ids: Sequence[int], parameters: Mapping[str, Any]) -> None:
        """Delete what was copied; the parameters are those of the SELECT that has locked it."""
        connection.execute(self._gone, {"ids": self._dialect.listed(ids)})

    @kept_property
    def _copy_dead(self) -> Executable:
        chosen = self._dialect.records("rows", BURIAL).alias("chosen")
        columns = self._tables.messages.c
        source = select(
            self._dialect.clock(), *(chosen.c[name] for name in SAID), *(columns[name] for name in KEPT)
        ).where(columns.id == chosen.c.id)
        return insert(self._tables.dead_letters).from_select(["died_at", *SAID, *KEPT], source)

    @kept_property
    def _gone(self) -> Executable:
        messages = self._tables.messages
        return self._dialect.delete(messages).where(self._dialect.among(messages.c.id, "ids"))
