"""PostgresqlStore: leases in one statement, wake-ups by NOTIFY from a connection of our own."""

from __future__ import annotations

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.durations import Retention
from outbox.stores.postgresql.burying import PostgresqlBurying
from outbox.stores.postgresql.callers import PostgresqlCallers
from outbox.stores.postgresql.dialect import PostgresqlDialect
from outbox.stores.postgresql.receiving import PostgresqlPlacing
from outbox.stores.postgresql.roles import roles_sql
from outbox.stores.postgresql.runner import PostgresqlRunner
from outbox.stores.postgresql.selecting import PostgresqlSelecting
from outbox.stores.postgresql.wakeup import PostgresqlWakeup
from outbox.stores.returning import ReturningInbox, ReturningSettling
from outbox.stores.sql import SqlStore
from outbox.stores.tables import Tables


class PostgresqlStore(SqlStore):
    """Messages in PostgreSQL, through asyncpg or psycopg."""

    async_drivers = ("asyncpg", "psycopg")
    sync_drivers = ("psycopg", "psycopg2")
    dialect_class = PostgresqlDialect
    settling_class = ReturningSettling
    inbox_class = ReturningInbox
    burying_class = PostgresqlBurying
    placing_class = PostgresqlPlacing

    @classmethod
    def roles_sql(cls, tables: Tables, prefix: str) -> str | None:
        return roles_sql(tables, prefix)

    def __init__(self, tables: Tables, engine: AsyncEngine | None, clean_up_after: Retention) -> None:
        dialect = PostgresqlDialect()
        runner = PostgresqlRunner(tables, dialect, engine)
        self._places = runner.places
        callers = PostgresqlCallers(self._places, remember_engine=engine is None)
        self.wakeup = PostgresqlWakeup(tables, dialect, runner, callers)
        selecting = PostgresqlSelecting(tables, dialect, runner, self.wakeup)
        super().__init__(
            tables, dialect, runner, clean_up_after, callers=callers, wakeup=self.wakeup, selecting=selecting
        )

    def locate(self, engine: Engine) -> None:
        self._places.locate(engine)

    @property
    def notifies_in_thread(self) -> bool:
        return self.wakeup.notifies_in_thread

    @notifies_in_thread.setter
    def notifies_in_thread(self, value: bool) -> None:
        self.wakeup.notifies_in_thread = value
