"""SqliteStore: one writer at a time, wake-ups by looking at the file's version."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.diagnosis import Examination
from outbox.core.durations import Retention
from outbox.core.store import AnyEngine, Selection
from outbox.stores.circuits import SqlCircuits
from outbox.stores.queries import SqlInspection
from outbox.stores.returning import ReturningInbox, ReturningSelecting, ReturningSettling
from outbox.stores.sql import SqlStore
from outbox.stores.sqlite import examination
from outbox.stores.sqlite.callers import SqliteCallers
from outbox.stores.sqlite.dialect import SqliteDialect
from outbox.stores.sqlite.engines import busy_timeout, in_memory
from outbox.stores.sqlite.runner import SqliteRunner
from outbox.stores.sqlite.wakeup import SqliteWakeup
from outbox.stores.tables import Tables


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
