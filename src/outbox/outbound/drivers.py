"""Drivers: the caller's transaction on a driver's own connection, without SQLAlchemy's.

The statement is the store's own, compiled once for each driver. A further driver is a further class in `DRIVERS`.
"""

from __future__ import annotations

import asyncio
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar

from sqlalchemy import Dialect, Executable
from sqlalchemy.util import await_only

from outbox.core.errors import TransactionError
from outbox.core.message import Message, Schedule
from outbox.core.prepared import Parameters, dialect_for, prepare
from outbox.core.store import Rows, Store
from outbox.core.transaction_state import TransactionState, begins_by_itself, libpq_state, warn_not_atomic
from outbox.outbound.sessions import CallersTransaction, WrittenMessages

_IN_TRANSACTION, _NO_BACKSLASH_ESCAPES = 1, 512  # of the status that comes with each answer of MariaDB and MySQL
_ROLLED_BACK = (
    "the server had rolled this transaction back, as it does after a deadlock, and the error was caught: the message "
    "was stored at once, and nothing that was written before is kept. Let such an error out"
)
_WRONG_BYTES = (
    "asyncmy writes bytes wrongly in the sql_mode NO_BACKSLASH_ESCAPES: take it out of the session's sql_mode, or emit "
    "through pymysql"
)


class DriverTransaction(CallersTransaction):
    """The transaction that is open on a driver's connection, or that its next statement opens."""

    types: ClassVar[tuple[str, ...]]  # what it serves, by name: looking must not import a driver
    dialect_name: str  # SQLAlchemy's
    paramstyle: ClassVar[str]
    begin: ClassVar[str]  # how the driver's users begin a transaction

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    @property
    def dialect(self) -> Dialect:
        return dialect_for(self.dialect_name, self.paramstyle)

    def emit(self, store: Store, messages: Sequence[Message], schedule: Schedule) -> bool:
        if (where := self.not_atomic(store)) is not None:
            warn_not_atomic(where)
        written = self.write(store, *store.writing.insert(messages, schedule))
        if schedule.timer_id is not None and not written:
            return False
        self.after_commit(WrittenMessages(store, tuple(message.id for message in messages), schedule))
        return True

    def cancel(self, store: Store, timer_id: str) -> bool:
        if (where := self.not_atomic(store)) is not None:
            warn_not_atomic(where)
        return self.write(store, *store.writing.cancel(timer_id)) > 0

    def not_atomic(self, store: Store) -> str | None:
        if self.commits_by_itself():
            return f"on a connection without an open transaction; begin one with `{self.begin}`"
        return None

    def write(self, store: Store, statement: Executable, rows: Rows) -> int:
        prepared = prepare(statement, tuple(rows[0]), self.dialect)
        try:
            return self.execute(prepared.text, [prepared.parameters(row) for row in rows])
        except Exception as error:
            if store.writing.is_already_there(self.cause(error)):
                return 0
            explained = store.writing.explained(self.cause(error))
            if explained is None:
                raise
            raise explained from error

    @abstractmethod
    def commits_by_itself(self) -> bool:
        """Whether the next statement is committed as soon as it is executed."""

    @abstractmethod
    def execute(self, text: str, rows: Sequence[Parameters]) -> int:
        """Execute a statement, several rows as one batch; how many rows it wrote."""

    def cause(self, error: Exception) -> BaseException:
        """The database's own error."""
        return error

    # A driver does not report the end of a transaction.

    def after_commit(self, action: Callable[[], None]) -> None:
        """Nothing: the next look at the table finds what was written."""


def _run(cursor: Any, text: str, rows: Sequence[Parameters]) -> int:
    """Execute a statement on a cursor of PEP 249, several rows as one batch."""
    cursor.executemany(text, rows) if len(rows) > 1 else cursor.execute(text, rows[0])
    return int(cursor.rowcount)


async def _run_awaited(cursor: Any, text: str, rows: Sequence[Parameters]) -> int:
    """The same on a cursor whose methods are awaited."""
    await (cursor.executemany(text, rows) if len(rows) > 1 else cursor.execute(text, rows[0]))
    return int(cursor.rowcount)


class AsyncpgTransaction(DriverTransaction):
    types = ("asyncpg.connection.Connection", "asyncpg.pool.PoolConnectionProxy")
    needs_loop = True
    dialect_name = "postgresql.asyncpg"
    paramstyle = "numeric_dollar"
    begin = "async with connection.transaction()"

    def commits_by_itself(self) -> bool:
        return not self.connection.is_in_transaction()

    def execute(self, text: str, rows: Sequence[Parameters]) -> int:
        if len(rows) > 1:
            await_only(self.connection.executemany(text, rows))
            return len(rows)
        status: str = await_only(self.connection.execute(text, *rows[0]))  # "INSERT 0 1"
        return int(status.rpartition(" ")[2])


class PsycopgTransaction(DriverTransaction):
    types = ("psycopg.Connection",)
    needs_loop = False
    dialect_name = "postgresql.psycopg"
    paramstyle = "format"
    begin = "with connection.transaction()"

    def commits_by_itself(self) -> bool:
        return libpq_state(self.connection) is TransactionState.AUTOCOMMIT

    def execute(self, text: str, rows: Sequence[Parameters]) -> int:
        # Not connection.cursor(): its class is the caller's choice, and some of them read other placeholders.
        with sys.modules["psycopg"].Cursor(self.connection) as cursor:
            _run(cursor, text, rows)
            if cursor.rowcount < 0:  # a pipeline of the caller's answers when one within it ends
                with self.connection.pipeline():
                    pass
            return int(cursor.rowcount)


class AsyncPsycopgTransaction(PsycopgTransaction):
    types = ("psycopg.AsyncConnection",)
    needs_loop = True
    begin = "async with connection.transaction()"

    def execute(self, text: str, rows: Sequence[Parameters]) -> int:
        return await_only(self._batch(text, rows) if len(rows) > 1 else self._work(text, rows))

    async def _batch(self, text: str, rows: Sequence[Parameters]) -> int:
        """psycopg leaves its connection in pipeline mode if it is cancelled while it enters it: then this ends it."""
        before = self.connection.info.pipeline_status
        try:
            return await self._work(text, rows)
        except BaseException as error:
            if self.connection.closed or self.connection.info.pipeline_status == before:
                raise
            await self.connection.close()
            if isinstance(error, AssertionError) and isinstance(error.__context__, asyncio.CancelledError):
                raise error.__context__ from None
            raise

    async def _work(self, text: str, rows: Sequence[Parameters]) -> int:
        async with sys.modules["psycopg"].AsyncCursor(self.connection) as cursor:
            await _run_awaited(cursor, text, rows)
            if cursor.rowcount < 0:
                async with self.connection.pipeline():
                    pass
            return int(cursor.rowcount)


class SqliteTransaction(DriverTransaction):
    types = ("sqlite3.Connection",)
    needs_loop = False
    dialect_name = "sqlite.pysqlite"
    paramstyle = "qmark"
    begin = 'connection.execute("BEGIN IMMEDIATE")'

    def commits_by_itself(self) -> bool:
        return not self.connection.in_transaction and not begins_by_itself(self.connection)

    def execute(self, text: str, rows: Sequence[Parameters]) -> int:
        with closing(self.connection.cursor()) as cursor:
            return _run(cursor, text, rows)


class AiosqliteTransaction(SqliteTransaction):
    types = ("aiosqlite.core.Connection",)
    needs_loop = True
    begin = 'await connection.execute("BEGIN IMMEDIATE")'

    def commits_by_itself(self) -> bool:
        if self.connection.in_transaction:
            return False
        # The attribute may only be read in the connection's own thread.
        return not await_only(self.connection._execute(begins_by_itself, self.connection._conn))

    def execute(self, text: str, rows: Sequence[Parameters]) -> int:
        async def work() -> int:
            batch = len(rows) > 1
            run = self.connection.executemany(text, rows) if batch else self.connection.execute(text, rows[0])
            async with run as cursor:
                return int(cursor.rowcount)

        return await_only(work())


class MysqlTransaction(DriverTransaction):
    """What every driver of MariaDB and MySQL has in common."""

    dialect_name = "mysql.pymysql"
    paramstyle = "format"

    def write(self, store: Store, statement: Executable, rows: Rows) -> int:
        was_open = not self.commits_by_itself()
        written = super().write(store, statement, rows)
        if was_open and self.commits_by_itself():
            raise TransactionError(_ROLLED_BACK)
        return written


class PymysqlTransaction(MysqlTransaction):
    types = ("pymysql.connections.Connection",)
    needs_loop = False
    begin = "connection.begin()"

    def commits_by_itself(self) -> bool:
        # Of the last answer: the server tells with each whether a transaction is open.
        return bool(self.connection.get_autocommit()) and not self.connection.server_status & _IN_TRANSACTION

    def execute(self, text: str, rows: Sequence[Parameters]) -> int:
        # Not connection.cursor(): its class is the caller's choice, and some of them hold their results back.
        with sys.modules["pymysql.cursors"].Cursor(self.connection) as cursor:
            return _run(cursor, text, rows)


class AsyncmyTransaction(MysqlTransaction):
    types = ("asyncmy.connection.Connection",)
    needs_loop = True
    begin = "await connection.begin()"

    def commits_by_itself(self) -> bool:
        return bool(self.connection.get_autocommit()) and not self.connection.get_transaction_status()

    def execute(self, text: str, rows: Sequence[Parameters]) -> int:
        if self.connection.server_status & _NO_BACKSLASH_ESCAPES:
            raise TransactionError(_WRONG_BYTES)

        async def work() -> int:
            async with self.connection.cursor(sys.modules["asyncmy.cursors"].Cursor) as cursor:
                return await _run_awaited(cursor, text, rows)

        return await_only(work())


class MysqlclientTransaction(MysqlTransaction):
    types = ("MySQLdb.connections.Connection",)
    needs_loop = False
    dialect_name = "mysql.mysqldb"
    begin = "connection.begin()"

    def commits_by_itself(self) -> bool:
        return bool(self.connection.get_autocommit()) and not self._is_in_transaction()

    def _is_in_transaction(self) -> bool:
        """Ask MariaDB whether one was begun in spite of autocommit: the driver does not tell, nor does MySQL."""
        with self._cursor() as cursor:
            try:
                cursor.execute("SELECT @@in_transaction")
            except self.connection.OperationalError:  # MySQL has no such variable
                return False
            return bool(cursor.fetchone()[0])

    def execute(self, text: str, rows: Sequence[Parameters]) -> int:
        with self._cursor() as cursor:
            return _run(cursor, text, rows)

    def _cursor(self) -> Any:
        return sys.modules["MySQLdb.cursors"].Cursor(self.connection)


class DjangoTransaction(DriverTransaction):
    types = ("django.db.backends.base.base.BaseDatabaseWrapper", "django.utils.connection.ConnectionProxy")
    needs_loop = False
    paramstyle = "format"
    begin = "with transaction.atomic()"

    _dialect_names: ClassVar[Mapping[str, str]] = {
        "postgresql": "postgresql.psycopg",
        "sqlite": "sqlite.pysqlite",
        "mysql": "mysql.mysqldb",
    }

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        vendor = str(getattr(connection, "vendor", "no database"))
        if vendor not in self._dialect_names:
            known = ", ".join(self._dialect_names)
            raise TransactionError(f"cannot emit on a Django connection to {vendor}: {known} are known")
        self.dialect_name = self._dialect_names[vendor]

    def commits_by_itself(self) -> bool:
        return bool(self.connection.get_autocommit())

    def execute(self, text: str, rows: Sequence[Parameters]) -> int:
        with self.connection.cursor() as cursor:
            return _run(cursor, text, rows)

    def cause(self, error: Exception) -> BaseException:
        return error.__cause__ or error

    def after_commit(self, action: Callable[[], None]) -> None:
        if self.connection.in_atomic_block or self.connection.get_autocommit():  # Django refuses it elsewhere
            self.connection.on_commit(action)


DRIVERS: tuple[type[DriverTransaction], ...] = (
    AsyncpgTransaction,
    PsycopgTransaction,
    AsyncPsycopgTransaction,
    SqliteTransaction,
    AiosqliteTransaction,
    PymysqlTransaction,
    AsyncmyTransaction,
    MysqlclientTransaction,
    DjangoTransaction,
)
