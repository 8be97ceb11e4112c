"""MysqlRunner: connections of the store's own, whose transactions run again where the server could not fit them in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.pool import Pool

from outbox.core.errors import ConfigurationError, LeaseLost
from outbox.core.loops import LoopLocal
from outbox.stores.dialect import SqlDialect
from outbox.stores.mysql import examination, transactions
from outbox.stores.mysql.settling import carefully
from outbox.stores.runner import Runner, spare
from outbox.stores.tables import Tables

Result = TypeVar("Result")

GOODBYE = 5.0  # seconds for closing connections
TRIES = 5  # of a transaction that lost a conflict
LONGEST_PAUSE = 0.05  # seconds before the second try, twice as long before each further one
LOCK_WAIT = 10  # seconds: several of them fit into the time for a piece of work

# READ COMMITTED locks rows and no gaps between them, where producers insert. What a connection of the application was
# told when it was made does not count here.
_SESSION = (
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    "SET SESSION time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION',"
    f" innodb_lock_wait_timeout = {LOCK_WAIT}, lock_wait_timeout = {LOCK_WAIT}",
)


class MysqlRunner(Runner):
    """Connections made as the given engine makes its, beside its pool."""

    def __init__(self, tables: Tables, dialect: SqlDialect, engine: AsyncEngine | None) -> None:
        super().__init__(tables, dialect)
        self._given = engine
        self.loops = LoopLocal(MysqlLoop, MysqlLoop.close)

    async def own(self) -> AsyncEngine:
        """The running loop's connections."""
        in_loop = self.loops.here()
        if in_loop.engine is None:
            engine = await self._spare_engine()
            in_loop.engine = in_loop.engine or engine
        return in_loop.engine

    async def _spare_engine(self) -> AsyncEngine:
        if self._given is None:
            raise ConfigurationError("this needs an async database: call setup(db_engine_url=…) with an async driver")
        if not hasattr(self._given.dialect, "default_isolation_level"):
            # SQLAlchemy asks the server once what it can do, on the given pool's first connection, and a pool beside it
            # would not wait for the answer. That connection is not left there: it is this loop's.
            async with self._given.connect() as connection:
                await connection.invalidate()
        examination.refuse_older(self._given.dialect)
        engine = spare(self._given.sync_engine)
        session_is_ours(engine.pool)
        return AsyncEngine(engine)

    async def _transact(self, work: Callable[[Connection], Result]) -> Result:
        engine, pause, careful = await self.own(), LONGEST_PAUSE, False
        for tries_left in reversed(range(TRIES)):
            async with engine.connect() as connection:
                try:
                    result = await connection.run_sync(_carefully(work) if careful else work)
                except LeaseLost:  # some were not changed: which, is found out by another transaction
                    if not tries_left:
                        raise
                    careful = True
                    await connection.rollback()
                    continue
                except DBAPIError as error:
                    if error.orig is not None and transactions.is_read_only(error.orig):
                        await engine.dispose()  # after a failover all of them lead to what was the primary
                    if not tries_left or not self._may_succeed(error):
                        raise
                    await _let_go(connection)
                else:
                    await connection.commit()
                    return result
            await asyncio.sleep(random.uniform(0, pause))  # noqa: S311 - no secret
            pause *= 2
        raise AssertionError("the last try returns or raises")

    def _may_succeed(self, error: DBAPIError) -> bool:
        """Whether nothing was kept, and a new try is worth it: no COMMIT was sent yet."""
        return error.connection_invalidated or (error.orig is not None and self._dialect.is_own_conflict(error.orig))

    async def _look(self, work: Callable[[Connection], Result]) -> Result:
        return await self._transact(work)

    async def _survey(self, work: Callable[[Connection], Result]) -> Result:
        def at_one_moment(connection: Connection) -> Result:
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            return work(connection)

        return await self._transact(at_one_moment)

    async def close(self) -> None:
        await self.loops.close()


def _carefully(work: Callable[[Connection], Result]) -> Callable[[Connection], Result]:
    return lambda connection: work(carefully(connection))


async def _sent(statement: str, driver: Any) -> None:
    await driver.query(statement)


async def _let_go(connection: AsyncConnection) -> None:
    if not connection.invalidated:
        await connection.rollback()


def session_is_ours(pool: Pool) -> None:
    """Let each new connection of a pool be as ours are."""

    def connected(connection: Any, record: Any) -> None:
        # Past asyncmy's cursors, which log each warning: MySQL has one for this sql_mode.
        for statement in _SESSION:
            connection.run_async(partial(_sent, statement))

    event.listen(pool, "connect", connected)
    transactions.roll_back_what_is_open(pool)


class MysqlLoop:
    """What belongs to one event loop."""

    def __init__(self) -> None:
        self.engine: AsyncEngine | None = None

    async def close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            # A connection says goodbye to its server, which may not answer any more.
            await asyncio.wait([asyncio.ensure_future(engine.dispose())], timeout=GOODBYE)
