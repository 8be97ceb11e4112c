"""Clock: lets time pass for everything that an outbox keeps, without waiting.

The database's own clock decides what is due, and a test cannot move that. So the outbox's rows are moved instead: each
becomes older by the same time, which is all that waiting would do to them.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, DateTime, Float, case, literal, select, update

from outbox.core.durations import EARLIEST, Seconds, as_delay
from outbox.instance import Outbox
from outbox.stores.rows import as_seconds
from outbox.stores.sql import SqlStore
from outbox.testing.sql import may_write, sql_store


async def advance(outbox: Outbox, by: Seconds) -> None:
    """Let time pass: delays and leases run out, messages expire, as if everybody had waited for so long."""
    delay = as_delay(by, what="by")
    if outbox.engines.configured:
        store = sql_store(outbox.store)
        await may_write(store)
        destinations = await store.runner.transact(lambda connection: _age(connection, store, as_seconds(delay)))
        store.queues.announce(*destinations)
    outbox.transport.advance(delay)


def _age(connection: Connection, store: SqlStore, seconds: float) -> list[str]:
    """Move every time in the tables into the past; where messages are that may be due now."""
    tables = store.tables
    for table in tables.metadata.sorted_tables:
        times = [column for column in table.columns if isinstance(column.type, DateTime)]
        if times and table is not tables.state:  # who sleeps is no matter of the messages
            connection.execute(
                update(table).values({column.name: _earlier(store, column, seconds) for column in times})
            )
    return list(connection.scalars(select(store.tables.messages.c.destination).distinct()))


def _earlier(store: SqlStore, column: ColumnElement[Any], seconds: float) -> ColumnElement[Any]:
    """That much earlier, but no earlier than anybody looks for due messages."""
    earlier = store.dialect.later(column, literal(-seconds, Float))
    beginning = literal(EARLIEST, DateTime(timezone=True))
    return case((earlier < beginning, beginning), else_=earlier)
