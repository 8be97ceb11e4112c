"""Lanes: a few connections of our own, kept open and used one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy import Connection, Engine, QueuePool
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

Result = TypeVar("Result")

MOST = 4  # statements of one process at the same time: each is short, and none waits for another


class Lanes:
    """Runs work on open connections. A pool would ask the server before each use whether it is still there.

    Whoever uses us tries again anyway, so a connection that broke while it lay idle costs one error.
    """

    def __init__(self, engine: Callable[[], Awaitable[AsyncEngine]]) -> None:
        self._make_engine = engine
        self._opening = asyncio.Lock()
        self._engine: AsyncEngine | None = None
        self._room = asyncio.Semaphore(MOST)
        self._idle: list[AsyncConnection] = []

    async def apply(self, work: Callable[[Connection], Result]) -> Result:
        """Run work on a connection that nobody else uses, each of its statements by itself."""
        engine = self._engine or await self._open()
        async with self._room:
            connection = self._idle.pop() if self._idle else await _connected(engine)
            try:
                result = await connection.run_sync(work)
            except BaseException:
                # It may have been cut in the middle of a statement, or of a transaction, or its server may be gone.
                await connection.invalidate()
                await connection.close()
                raise
            self._idle.append(connection)
            return result

    async def transact(self, work: Callable[[Connection], Result]) -> Result:
        """Run work in one transaction."""

        def transaction(connection: Connection) -> Result:
            # Rows are locked and looked at anew: a stricter level, if the application likes one, would only fail.
            connection.exec_driver_sql("BEGIN ISOLATION LEVEL READ COMMITTED")
            result = work(connection)
            connection.exec_driver_sql("COMMIT")
            return result

        return await self.apply(transaction)

    async def close(self) -> None:
        """End the connections that nobody uses."""
        while self._idle:
            await self._idle.pop().close()
        if self._engine is not None:
            await self._engine.dispose()

    async def _open(self) -> AsyncEngine:
        async with self._opening:
            if self._engine is None:
                engine = await self._make_engine()
                if isinstance(engine.pool, QueuePool):  # a small pool is somebody's wish
                    self._room = asyncio.Semaphore(min(MOST, engine.pool.size() or MOST))
                self._engine = engine
        return self._engine


async def _connected(engine: AsyncEngine) -> AsyncConnection:
    connection = await engine.connect()
    try:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        await connection.begin()
    except BaseException:
        await connection.close()
        raise
    return connection


def spare(engine: Engine) -> Engine:
    """An engine that connects exactly as the given one, beside its pool: a full pool cannot block it."""
    return Engine(engine.pool.recreate(), engine.dialect, engine.url, hide_parameters=engine.hide_parameters)
