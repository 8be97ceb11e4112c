"""SqliteCallers: callers' connections to SQLite, which may lead to another file."""

from __future__ import annotations

from sqlalchemy import Connection, Engine, Executable
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.errors import TablesMissing
from outbox.core.store import Rows
from outbox.stores.callers import CallerConnections, execute
from outbox.stores.dialect import SqlDialect
from outbox.stores.qualified import qualified
from outbox.stores.sqlite.own_file import OwnFile
from outbox.stores.tables import Tables


class SqliteCallers(CallerConnections):
    """Missing tables are made in the caller's transaction."""

    def __init__(self, tables: Tables, dialect: SqlDialect, engine: AsyncEngine | None) -> None:
        self._tables = tables
        self._dialect = dialect
        self._own_file = OwnFile(None if engine is None else engine.url)

    def locate(self, engine: Engine) -> None:
        """Say by a plain engine where the tables are."""
        self._own_file = OwnFile(engine.url)

    def on(self, connection: Connection) -> Connection:
        self._own_file.check(connection.engine)
        if "schema_translate_map" not in connection.get_execution_options():
            return connection
        schema = self._tables.messages.schema
        return qualified(connection, {schema: schema or "main"})

    def write(self, connection: Connection, statement: Executable, rows: Rows | None = None) -> int:
        own = self.on(connection)
        try:
            try:
                return execute(own, statement, rows)
            except OperationalError as error:
                if not isinstance(self._explained(error), TablesMissing):
                    raise
                # In the caller's transaction: it holds the only lock there is, and DDL rolls back with it.
                self._dialect.create(connection, self._tables)
                return execute(own, statement, rows)
        except OperationalError as error:
            explained = self._explained(error)
            if explained is None:
                raise
            raise explained from error

    def _explained(self, error: OperationalError) -> Exception | None:
        return None if error.orig is None else self._dialect.explained(error.orig, self._tables)
