"""MysqlCallers: callers' connections, on which no table is made: DDL would commit what the caller has written."""

from __future__ import annotations

from weakref import WeakSet

from sqlalchemy import Connection, Executable
from sqlalchemy.pool import Pool

from outbox.core.store import Rows
from outbox.stores.callers import CallerConnections
from outbox.stores.dialect import SqlDialect
from outbox.stores.mysql.transactions import check_escapes
from outbox.stores.runner import spare
from outbox.stores.tables import Tables


class MysqlCallers(CallerConnections):
    """Tables are made on a connection beside the caller's, before its first write."""

    def __init__(self, tables: Tables, dialect: SqlDialect) -> None:
        self._tables = tables
        self._dialect = dialect
        self._ready: WeakSet[Pool] = WeakSet()

    def on(self, connection: Connection) -> Connection:
        check_escapes(connection)
        pool = connection.engine.pool
        if pool not in self._ready:
            self._make_beside(connection)
            self._ready.add(pool)
        return connection

    def write(self, connection: Connection, statement: Executable, rows: Rows | None = None) -> int:
        return self._dialect.enter(self.on(connection), statement, rows)

    def _make_beside(self, callers: Connection) -> None:
        own = spare(callers.engine)
        try:
            with own.begin() as connection:
                self._dialect.create(connection, self._tables)
        finally:
            own.dispose()
