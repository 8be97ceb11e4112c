"""PostgreSQL's receiving: many messages in one statement, because drivers send a batch as many."""

from __future__ import annotations

from binascii import b2a_base64
from typing import Any

from sqlalchemy import Connection, DateTime, Executable, String, Text, func, insert, select

from outbox.core.kept_property import kept_property
from outbox.core.store import Rows
from outbox.stores.receiving import PlacingStatements
from outbox.stores.rows import GIVEN

MOST_AS_JSON = 4 * 1024 * 1024  # bytes of bodies; of larger ones the copies in memory weigh more than the statements

_TYPES: dict[str, Any] = {
    **dict.fromkeys(GIVEN, Text),
    "created_at": DateTime(timezone=True),
    "queue": String,
    "expires": DateTime(timezone=True),
}


class PostgresqlPlacing(PlacingStatements):
    """Many messages in one statement."""

    def place_all(self, connection: Connection, rows: Rows) -> None:
        if sum(len(row["body"]) for row in rows) <= MOST_AS_JSON:
            connection.execute(self._place_all, {"rows": self._dialect.json([as_record(row) for row in rows])})
        else:
            super().place_all(connection, rows)

    @kept_property
    def _place_all(self) -> Executable:
        rows = self._dialect.records("rows", _TYPES).alias("placed")
        columns: dict[str, Any] = {name: rows.c[name] for name in GIVEN} | {
            "body": func.pg_catalog.decode(rows.c.body, "base64"),
            "destination": rows.c.queue,
            "expires_at": rows.c.expires,
            "due_at": self._dialect.clock(),
            "routed_at": self._dialect.clock(),
        }
        return insert(self._tables.messages).from_select(list(columns), select(*columns.values()))


def as_record(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `placed_row`, as JSON can say it."""
    expires = row["expires"]
    return {
        **row,
        "body": b2a_base64(row["body"], newline=False).decode(),
        "created_at": row["created_at"].isoformat(),
        "expires": expires and expires.isoformat(),
    }
