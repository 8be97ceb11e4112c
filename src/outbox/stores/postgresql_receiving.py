"""PostgreSQL's receiving: many messages in one statement, because drivers send a batch as many."""

from __future__ import annotations

from binascii import b2a_base64
from typing import TYPE_CHECKING, Any

from sqlalchemy import DateTime, Executable, String, Text, func, insert, select

from outbox.stores.rows import GIVEN

if TYPE_CHECKING:
    from outbox.stores.sql import SqlStore

MOST_AS_JSON = 4 * 1024 * 1024  # bytes of bodies; of larger ones the copies in memory weigh more than the statements

_TYPES: dict[str, Any] = {
    **dict.fromkeys(GIVEN, Text),
    "created_at": DateTime(timezone=True),
    "queue": String,
    "expires": DateTime(timezone=True),
}


def fits_in_json(rows: list[dict[str, Any]]) -> bool:
    return sum(len(row["body"]) for row in rows) <= MOST_AS_JSON


def as_record(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `placed_row`, as JSON can say it."""
    expires = row["expires"]
    return {
        **row,
        "body": b2a_base64(row["body"], newline=False).decode(),
        "created_at": row["created_at"].isoformat(),
        "expires": expires and expires.isoformat(),
    }


def placing(store: SqlStore) -> Executable:
    """The statement that writes all of them."""
    rows = store.records("rows", _TYPES).alias("placed")
    columns: dict[str, Any] = {name: rows.c[name] for name in GIVEN} | {
        "body": func.pg_catalog.decode(rows.c.body, "base64"),
        "destination": rows.c.queue,
        "expires_at": rows.c.expires,
        "due_at": store.clock(),
        "routed_at": store.clock(),
    }
    return insert(store.messages).from_select(list(columns), select(*columns.values()))
