"""Poor: stores on SQLite and PostgreSQL that use nothing which a poorer database has not.

No RETURNING, no partial index, and no UPDATE or DELETE with a LIMIT or a lock below it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Select, Table, event
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.durations import Retention
from outbox.core.store import Selection
from outbox.stores.postgresql.callers import PostgresqlCallers
from outbox.stores.postgresql.dialect import PostgresqlDialect
from outbox.stores.postgresql.runner import PostgresqlRunner
from outbox.stores.postgresql.wakeup import PostgresqlWakeup
from outbox.stores.selecting import SqlSelecting
from outbox.stores.sql import SqlStore
from outbox.stores.sqlite.dialect import SqliteDialect
from outbox.stores.sqlite.runner import SqliteRunner, SqliteWakeup
from outbox.stores.sqlite.store import SqliteCallers
from outbox.stores.tables import Tables, TableShapes

Result = TypeVar("Result")

FORBIDDEN = (
    re.compile(r"\bRETURNING\b", re.IGNORECASE),
    re.compile(r"^\s*CREATE\s+(UNIQUE\s+)?INDEX\b.*\bWHERE\b", re.IGNORECASE | re.DOTALL),
    re.compile(r"^\s*(UPDATE|DELETE)\b.*\bSELECT\b.*\b(LIMIT|FOR\s+(NO\s+KEY\s+)?UPDATE)\b", re.IGNORECASE | re.DOTALL),
)


@contextmanager
def forbidding() -> Iterator[None]:
    """Fail on each statement that a poor database would not understand, and once more at the end."""
    found: list[str] = []

    def check(_: Connection, __: object, statement: str, *___: object) -> None:
        if any(pattern.search(statement) for pattern in FORBIDDEN):
            found.append(statement)
            raise AssertionError(f"a poor database does not know this: {statement}")

    event.listen(Engine, "before_cursor_execute", check)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", check)
    assert not found


class PoorSqliteDialect(SqliteDialect):
    """SQLite's words, and indexes of whole tables."""

    index = TableShapes.index
    unique_while = TableShapes.unique_while


class PoorPostgresqlDialect(PostgresqlDialect):
    """PostgreSQL's words, and indexes of whole tables."""

    index = TableShapes.index
    unique_while = TableShapes.unique_while

    def locking(self, statement: Select[Any], table: Table) -> Select[Any]:
        return statement.with_for_update()


class PoorPostgresqlRunner(PostgresqlRunner):
    """Several statements are a transaction, because a lock must outlast the statement that took it."""

    async def _apply(self, work: Callable[[Connection], Result]) -> Result:
        return await self._transact(work)


class LookingSelecting(SqlSelecting):
    """Looks before it takes the one write lock that SQLite has."""

    async def anything_due(self, selection: Selection) -> bool:
        first = replace(selection, limit=1)
        return bool(await self._runner.look(lambda connection: self.search(connection, self.due, first)))


class PoorSqliteStore(SqlStore):
    """SQLite as a poor database."""

    async_drivers = ("aiosqlite",)
    sync_drivers = ("pysqlite",)
    dialect_class = PoorSqliteDialect

    def __init__(self, tables: Tables, engine: AsyncEngine | None, clean_up_after: Retention) -> None:
        dialect = PoorSqliteDialect()
        runner = SqliteRunner(tables, dialect, engine)
        super().__init__(
            tables,
            dialect,
            runner,
            clean_up_after,
            callers=SqliteCallers(tables, dialect, engine),
            wakeup=SqliteWakeup(runner),
            selecting=LookingSelecting(tables, dialect, runner),
        )


class PoorPostgresqlStore(SqlStore):
    """PostgreSQL as a poor database."""

    async_drivers = ("asyncpg", "psycopg")
    sync_drivers = ("psycopg", "psycopg2")
    dialect_class = PoorPostgresqlDialect

    def __init__(self, tables: Tables, engine: AsyncEngine | None, clean_up_after: Retention) -> None:
        dialect = PoorPostgresqlDialect()
        runner = PoorPostgresqlRunner(tables, dialect, engine)
        callers = PostgresqlCallers(runner.places, remember_engine=engine is None)
        super().__init__(
            tables,
            dialect,
            runner,
            clean_up_after,
            callers=callers,
            wakeup=PostgresqlWakeup(tables, dialect, runner, callers),
            selecting=SqlSelecting(tables, dialect, runner),
        )


STORES: dict[str, type[PoorSqliteStore] | type[PoorPostgresqlStore]] = {
    "sqlite": PoorSqliteStore,
    "postgresql": PoorPostgresqlStore,
}
