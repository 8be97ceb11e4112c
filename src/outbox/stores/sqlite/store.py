"""SqliteStore: messages in a file, and callers' connections to it, which may lead to another one."""

from __future__ import annotations

import os
from dataclasses import replace
from weakref import WeakSet

from sqlalchemy import URL, Connection, Engine, Executable
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import Pool

from outbox.core.diagnosis import Examination
from outbox.core.durations import Retention
from outbox.core.errors import TablesMissing, WrongDatabase
from outbox.core.store import AnyEngine, Rows, Selection
from outbox.stores.callers import CallerConnections, execute, qualified
from outbox.stores.circuits import SqlCircuits
from outbox.stores.dialect import SqlDialect
from outbox.stores.queries import SqlInspection
from outbox.stores.returning import ReturningInbox, ReturningSelecting, ReturningSettling
from outbox.stores.sql import SqlStore
from outbox.stores.sqlite import examination
from outbox.stores.sqlite.dialect import SqliteDialect
from outbox.stores.sqlite.engines import busy_timeout, check_version, in_memory
from outbox.stores.sqlite.runner import SqliteRunner, SqliteWakeup
from outbox.stores.tables import Tables


class OwnFile:
    """Compares the paths that engines were made with: asking a connection would cost its caller a statement."""

    def __init__(self, url: URL | None) -> None:
        self._path = _path(url)
        self._known: WeakSet[Pool] = WeakSet()

    def check(self, engine: Engine) -> None:
        """Refuse an engine that leads to another file. What is no plain path may lead anywhere."""
        if self._path is None or engine.pool in self._known:
            return
        path = _path(engine.url)
        if path is not None and path != self._path:
            raise WrongDatabase(
                f"this session leads to the file {path!r}, and the tables of this outbox are in {self._path!r}: use a "
                "session on the database of the outbox, or an Outbox for each database"
            )
        self._known.add(engine.pool)


def _path(url: URL | None) -> str | None:
    name = None if url is None else url.database
    return None if not name or name.startswith((":memory:", "file:")) else os.path.realpath(name)


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


class SqliteStore(SqlStore):
    """Messages in a SQLite file, or in memory for tests."""

    async_drivers = ("aiosqlite",)
    sync_drivers = ("pysqlite",)
    dialect_class = SqliteDialect
    settling_class = ReturningSettling
    inbox_class = ReturningInbox

    @classmethod
    def safe_engine(cls, given: AnyEngine) -> AnyEngine:
        if in_memory(given.url):
            return given
        return cls.make_engine(given.url) if isinstance(given, AsyncEngine) else cls.make_sync_engine(given.url)

    def __init__(self, tables: Tables, engine: AsyncEngine | None, clean_up_after: Retention) -> None:
        check_version()
        dialect = SqliteDialect()
        runner = SqliteRunner(tables, dialect, engine)
        callers = SqliteCallers(tables, dialect, engine)
        super().__init__(
            tables,
            dialect,
            runner,
            clean_up_after,
            callers=callers,
            wakeup=SqliteWakeup(runner),
            selecting=SqliteSelecting(tables, dialect, runner),
        )
        self.inspection = SqliteInspection(tables, dialect, runner, self.circuits, engine)
        self._own_callers = callers

    def locate(self, engine: Engine) -> None:
        self._own_callers.locate(engine)


class SqliteSelecting(ReturningSelecting):
    """A claim takes the one lock that every writer of the file waits for, so it looks first."""

    async def anything_due(self, selection: Selection) -> bool:
        first = replace(selection, limit=1)
        return bool(await self._runner.look(lambda connection: self.search(connection, self.due, first)))


class SqliteInspection(SqlInspection):
    """Knows besides how long connections of the application wait for the write lock."""

    def __init__(
        self,
        tables: Tables,
        dialect: SqliteDialect,
        runner: SqliteRunner,
        circuits: SqlCircuits,
        engine: AsyncEngine | None,
    ) -> None:
        super().__init__(tables, dialect, runner, circuits)
        self._given = engine

    async def examine(self) -> Examination:
        found = await super().examine()
        if self._given is None or in_memory(self._given.url):
            return found
        patience = examination.patience(await busy_timeout(self._given))
        return replace(found, findings=(*found.findings, patience))
