"""SqlStore: a store made of parts. Each database's folder says which of them are its own."""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from outbox.core.durations import Retention
from outbox.core.store import AnyEngine
from outbox.stores.bindings import SqlBindings
from outbox.stores.burying import SqlBurying
from outbox.stores.callers import CallerConnections, PlacingStatements, SqlTransactions, SqlWriting
from outbox.stores.circuits import SqlCircuits
from outbox.stores.claiming import SqlFeed
from outbox.stores.dead_letters import SqlDeadLetters
from outbox.stores.dialect import SqlDialect
from outbox.stores.inbox import SqlInbox
from outbox.stores.maintenance import SqlMaintenance
from outbox.stores.owners import SqlOwners
from outbox.stores.queries import SqlInspection
from outbox.stores.receiving import SqlReceiving
from outbox.stores.routing import SqlQueues, SqlRouting
from outbox.stores.runner import Runner, ask_the_doubtful, cut_in_children
from outbox.stores.selecting import SqlSelecting
from outbox.stores.settling import SqlSettling
from outbox.stores.tables import Tables
from outbox.stores.wakeup import Wakeup


class SqlStore:
    """Messages in tables. A database gives its dialect and its runner, and parts of its own where it can do more."""

    async_drivers: ClassVar[tuple[str, ...]]
    sync_drivers: ClassVar[tuple[str, ...]]
    dialect_class: ClassVar[type[SqlDialect]]
    settling_class: ClassVar[type[SqlSettling]] = SqlSettling
    inbox_class: ClassVar[type[SqlInbox]] = SqlInbox
    burying_class: ClassVar[type[SqlBurying]] = SqlBurying
    placing_class: ClassVar[type[PlacingStatements]] = PlacingStatements
    maintenance_class: ClassVar[type[SqlMaintenance]] = SqlMaintenance

    @classmethod
    def make_engine(cls, url: URL) -> AsyncEngine:
        # Error texts go to logs: the parameters of a statement are the user's data.
        arguments = cls.dialect_class.connect_args(url)
        engine = create_async_engine(url, hide_parameters=True, connect_args=arguments)
        cls._guard(engine.sync_engine)
        cls.dialect_class.set_up(engine)
        return engine

    @classmethod
    def make_sync_engine(cls, url: URL) -> Engine:
        engine = create_engine(url, hide_parameters=True, connect_args=cls.dialect_class.connect_args(url))
        cls._guard(engine)
        cls.dialect_class.set_up(engine)
        return engine

    @classmethod
    def _guard(cls, engine: Engine) -> None:
        if cls.dialect_class.connections_can_die:
            ask_the_doubtful(engine)
            cut_in_children(engine)

    @classmethod
    def tables_named(cls, table_name: str, schema: str | None = None) -> Tables:
        return Tables.named(table_name, schema, cls.dialect_class())

    @classmethod
    def roles_sql(cls, tables: Tables, prefix: str) -> str | None:
        return None

    @classmethod
    def safe_engine(cls, given: AnyEngine) -> AnyEngine:
        return given

    def __init__(
        self,
        tables: Tables,
        dialect: SqlDialect,
        runner: Runner,
        clean_up_after: Retention,
        *,
        callers: CallerConnections,
        wakeup: Wakeup,
        selecting: SqlSelecting,
    ) -> None:
        self.tables = tables
        self.dialect = dialect
        self.runner = runner
        self.callers = callers
        self._wakeup = wakeup
        parts: tuple[Any, Any, Any] = tables, dialect, runner
        placing = self.placing_class(tables, dialect)
        burying = self.burying_class(tables, dialect)
        settling = self.settling_class(tables, dialect, callers, clean_up_after)
        bindings = SqlBindings(*parts, wakeup)
        self.transactions = SqlTransactions(dialect, runner)
        self.writing = SqlWriting(tables, dialect, callers, self.transactions, placing)
        self.feed = SqlFeed(
            *parts, callers=callers, selecting=selecting, settling=settling, burying=burying, wakeup=wakeup
        )
        self.inbox = self.inbox_class(*parts, callers)
        self.queues = SqlQueues(
            runner,
            bindings=bindings,
            routing=SqlRouting(*parts, bindings=bindings, feed=self.feed, selecting=selecting),
            receiving=SqlReceiving(runner, self.inbox, placing, wakeup),
            placing=placing,
            settling=settling,
            wakeup=wakeup,
        )
        self.circuits = SqlCircuits(*parts)
        self.owners = SqlOwners(*parts)
        self.inspection = SqlInspection(*parts, self.circuits)
        self.dead_letters = SqlDeadLetters(*parts, wakeup)
        self.maintenance = self.maintenance_class(
            *parts, burying=burying, circuits=self.circuits, owners=self.owners, wakeup=wakeup
        )

    async def open(self) -> None:
        await self.runner.open()

    async def close(self) -> None:
        await self.feed.close()
        await self._wakeup.close()
        await self.runner.close()
