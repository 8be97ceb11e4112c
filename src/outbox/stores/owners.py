"""Owners: which service a queue belongs to. The first service to record it has it until it is released."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sqlalchemy import Connection, delete, select

if TYPE_CHECKING:
    from outbox.stores.sql import SqlStore


def record(store: SqlStore, connection: Connection, owners: Mapping[str, str]) -> dict[str, str]:
    """Record those that have no owner yet; returns the owners of all of them."""
    for queue in sorted(owners):  # always in the same order: no two processes wait for each other
        connection.execute(store.ignoring(store.tables.owners), {"queue": queue, "owner": owners[queue]})
    return {queue: owner for queue, owner in read(store, connection).items() if queue in owners}


def read(store: SqlStore, connection: Connection) -> dict[str, str]:
    """Whose every queue is."""
    table = store.tables.owners
    return {row.queue: row.owner for row in connection.execute(select(table.c.queue, table.c.owner))}


def release(store: SqlStore, connection: Connection, queue: str) -> str | None:
    """Forget whose a queue is; whose it was."""
    table = store.tables.owners
    found: str | None = connection.scalar(select(table.c.owner).where(table.c.queue == queue))
    connection.execute(delete(table).where(table.c.queue == queue))
    return found
