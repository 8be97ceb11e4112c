"""PostgresqlRunner: one pool for each event loop, and a direct connection for what a message waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, Executable
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.errors import ConfigurationError
from outbox.core.loops import LoopLocal, finish
from outbox.stores.dialect import SqlDialect
from outbox.stores.postgresql import notifying_thread
from outbox.stores.postgresql.callers import Places
from outbox.stores.postgresql.connection import DirectConnection, explained
from outbox.stores.runner import LOOK_WITHIN, WORK_WITHIN, Runner, spare
from outbox.stores.tables import Tables

Result = TypeVar("Result")

GOODBYE = 5.0  # seconds for closing connections


class PostgresqlRunner(Runner):
    """Connections made as the given engine makes its: listeners may use up the given pool."""

    def __init__(self, tables: Tables, dialect: SqlDialect, engine: AsyncEngine | None) -> None:
        super().__init__(tables, dialect)
        self._given = engine
        self.loops = LoopLocal(self._in_loop, PostgresqlLoop.close)
        self.places = Places(tables, dialect, engine, self.first_look)

    def _in_loop(self) -> PostgresqlLoop:
        return PostgresqlLoop(DirectConnection(self.spare_engine, self.driver, self))

    @property
    def driver(self) -> str:
        """The name of the driver that connections of our own use."""
        return "" if self._given is None else self._given.dialect.driver

    @property
    def direct(self) -> DirectConnection:
        """The running loop's."""
        return self.loops.here().direct

    async def open(self) -> None:
        await super().open()
        await self.places.find_own()

    async def own(self) -> LoopEngines:
        """The running loop's connections."""
        in_loop = self.loops.here()
        if in_loop.engines is None:
            engine = await self.spare_engine()
            in_loop.engines = in_loop.engines or LoopEngines(engine)
        return in_loop.engines

    async def spare_engine(self) -> AsyncEngine:
        """A further engine that connects as the given one does."""
        if self._given is None:
            raise ConfigurationError("this needs an async database: call setup(db_engine_url=…) with an async driver")
        if not hasattr(self._given.dialect, "default_isolation_level"):
            # SQLAlchemy asks the server once what it can do, on the given pool's first connection, and a pool beside it
            # would not wait for the answer. That connection is not left there: it is this loop's.
            async with self._given.connect() as connection:
                await connection.invalidate()
        return AsyncEngine(spare(self._given.sync_engine))

    async def _transact(self, work: Callable[[Connection], Result]) -> Result:
        with explained(self.driver):
            async with (await self.own()).transactions.begin() as connection:
                return await connection.run_sync(work)

    async def _apply(self, work: Callable[[Connection], Result]) -> Result:
        with explained(self.driver):
            async with (await self.own()).statements.connect() as connection:
                return await connection.run_sync(work)

    _look = _apply

    async def _survey(self, work: Callable[[Connection], Result]) -> Result:
        with explained(self.driver):
            async with (await self.own()).snapshots.begin() as connection:
                return await connection.run_sync(work)

    async def first_look(self, work: Callable[[Connection], Result]) -> Result:
        """Run work that only reads, before it is known where the tables are."""
        return await self._look(work)

    async def administer(self, work: Callable[[Connection], Result]) -> Result:
        """Run a statement that needs no table, and may wait for the transactions of others to end."""
        return await finish(self._apply(work), LOOK_WITHIN)

    async def ask(self, statement: Executable, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        await self.open()
        return await finish(self.direct.ask(statement, parameters), WORK_WITHIN)

    async def close(self) -> None:
        await self.loops.close()
        await notifying_thread.thread.run(self.loops.close, GOODBYE)


class LoopNotifier(Protocol):
    """What wakes other processes from one event loop."""

    def notify(self, destinations: set[str]) -> None: ...

    def is_pending(self, destinations: set[str]) -> bool: ...

    async def listen(self, longest: float) -> None: ...

    async def close(self) -> None: ...


class PostgresqlLoop:
    """What belongs to one event loop."""

    def __init__(self, direct: DirectConnection) -> None:
        self.direct = direct
        self.engines: LoopEngines | None = None
        self.notifier: LoopNotifier | None = None  # closed first: it uses the others

    async def close(self) -> None:
        if self.notifier is not None:
            await self.notifier.close()
        await self.direct.close()
        engines, self.engines = self.engines, None
        if engines is not None:
            # A connection says goodbye to its server, which may not answer any more.
            await asyncio.wait([asyncio.ensure_future(engines.statements.dispose())], timeout=GOODBYE)


class LoopEngines:
    """One pool, for statements that stand alone, for transactions, and for looks at one moment."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.statements = engine.execution_options(isolation_level="AUTOCOMMIT")
        # Rows are locked and looked at anew: a stricter level, if the application likes one, would only fail.
        self.transactions = engine.execution_options(isolation_level="READ COMMITTED")
        self.snapshots = engine.execution_options(isolation_level="REPEATABLE READ")
