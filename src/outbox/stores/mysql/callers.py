"""MysqlCallers: callers' connections, on which no table is made: DDL would commit what the caller has written."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, Executable, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import Pool

from outbox.core.errors import TransactionError, WrongDatabase
from outbox.core.prepared import Parameters, SchemaNames, batches, dialect_for, prepare
from outbox.core.store import Rows
from outbox.stores.callers import CallerConnections, execute, qualified
from outbox.stores.dialect import SqlDialect
from outbox.stores.mysql import transactions
from outbox.stores.mysql.examination import refuse_older
from outbox.stores.mysql.packets import check_packets
from outbox.stores.runner import spare
from outbox.stores.tables import Tables

_DRIVERS = ("asyncmy", "pymysql", "mysqldb")  # they put parameters into the text, in the same way
_DIALECT = "mysql.pymysql"
_UNICODE = "utf8mb4"


class MysqlCallers(CallerConnections):
    """Statements name the database in which the tables are: a session may have changed to another one."""

    def __init__(self, tables: Tables, dialect: SqlDialect, given: AsyncEngine | None) -> None:
        self._tables = tables
        self._dialect = dialect
        self._own = None if given is None else given.url.database
        self._databases: WeakKeyDictionary[Pool, str] = WeakKeyDictionary()

    def locate(self, engine: Engine) -> None:
        """Say by a plain engine where the tables are."""
        self._own = engine.url.database

    def on(self, connection: Connection) -> Connection:
        return qualified(connection, dict(self._schemas_on(connection)))

    def write(self, connection: Connection, statement: Executable, rows: Rows | None = None) -> int:
        transactions.check_escapes(connection)
        schemas = self._schemas_on(connection)
        if connection.dialect.driver not in _DRIVERS or not rows:
            return execute(self.on(connection), statement, rows)
        _check_charset(connection, rows)
        check_packets(connection, rows)
        prepared = prepare(statement, tuple(rows[0]), dialect_for(_DIALECT, "format"), schemas)
        written = 0
        for together, values in batches(prepared.text, [prepared.parameters(row) for row in rows]):
            written += self._written(connection, statement, together, values)
        return written

    def _written(self, connection: Connection, statement: Executable, together: str, values: Parameters) -> int:
        try:
            return connection.exec_driver_sql(together, values).rowcount
        except IntegrityError as error:
            if not (error.orig and transactions.passes_over(statement) and self._dialect.is_already_there(error.orig)):
                raise
            return 0
        except DBAPIError as error:
            explained = None if error.orig is None else self._dialect.explained(error.orig, self._tables)
            if explained is None:
                raise
            raise explained from error

    def _schemas_on(self, connection: Connection) -> SchemaNames:
        """What our statements call their database on a caller's connection. Missing tables are made first."""
        own, pool = self._tables.messages.schema, connection.engine.pool
        if pool not in self._databases:
            self._databases[pool] = self._database_of(connection)
        return ((own, own or self._databases[pool]),)

    def _database_of(self, callers: Connection) -> str:
        beside = spare(callers.engine)
        try:
            with beside.connect() as connection:
                refuse_older(connection.dialect)
                database: str | None = connection.scalar(text("SELECT DATABASE()"))
                if database is None or (self._own is not None and database != self._own):
                    raise WrongDatabase(
                        f"this session leads to the database {database or 'of no name'!r}, and the tables of this "
                        f"outbox are in {self._own!r}: use a session on the database of the outbox, or an Outbox for "
                        "each database"
                    )
                self._make(connection)
                return database
        finally:
            beside.dispose()

    def _make(self, connection: Connection) -> None:
        try:
            self._dialect.create(connection, self._tables)
        except DBAPIError as error:
            # A role sees the tables that it has rights on: a producer sees one, and may make no other.
            denied = transactions.error_number(error.orig) in transactions.DENIED
            if not denied or self._tables.messages in self._dialect.missing(connection, self._tables):
                raise


def _check_charset(connection: Connection, rows: Rows) -> None:
    """Refuse a text that the connection's character set would change on its way."""
    used = getattr(connection.connection.driver_connection, "charset", _UNICODE)
    if used in (None, "", _UNICODE):
        return
    for row in rows:
        for name, value in row.items():
            if isinstance(value, str) and not value.isascii():
                raise TransactionError(
                    f"the {name} {value[:40]!r} is not ASCII, and this connection's character set is {used}, which may "
                    f"not have it: connect with charset={_UNICODE}"
                )
