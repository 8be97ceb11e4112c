"""DirectConnection: one connection of an event loop that leads straight to the server, if there is such a way.

Only asyncpg has one. A connection that a pooler lends out for each transaction is none: it can neither listen nor keep
a prepared statement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import Executable, func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from outbox.stores.postgresql.connection import DRIVER, Line, closed
from outbox.stores.runner import Runner

LATE_CONNECTION = 2.0  # seconds that a connection which is not wanted any more has to come about


class DirectConnection:
    """Opens it when it is first needed, and again when it was lost."""

    def __init__(self, spare_engine: Callable[[], Awaitable[AsyncEngine]], driver: str, runner: Runner) -> None:
        self._spare_engine = spare_engine
        self._runner = runner
        self.driver = driver
        self.line: Line | None = None
        self.deaf = False  # whether a pooler stands between here and the server
        self._opening = asyncio.Lock()
        self._letting_go: set[asyncio.Future[None]] = set()  # of connections that come too late

    @property
    def is_free(self) -> bool:
        return self.line is not None and self.line.is_free

    @property
    def is_cut(self) -> bool:
        return self.line is not None and self.line.is_closed

    async def ask(self, statement: Executable, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        """The rows of a statement that stands alone, by the shortest way there is."""
        if self.line is not None and self.line.is_free:
            return await self.line.ask(statement, parameters)
        return await self._runner.apply(lambda connection: connection.execute(statement, parameters).all())

    async def open(self) -> Line | None:
        """The line, if this driver has one and no pooler stands between."""
        async with self._opening:
            if self.line is not None and self.line.is_closed:
                await self.end(self.line)
            if self.line is None and self.driver == DRIVER:
                connection = await self.connected()
                try:
                    if not await self.behind_a_pooler(connection):
                        self.line = Line(connection, await raw(connection))
                finally:
                    if self.line is None:
                        await closed(connection)
        return self.line

    async def end(self, line: Line) -> None:
        if self.line is line:
            self.line = None
        await line.end()

    async def connected(self) -> AsyncConnection:
        """A connection outside of every pool, because it is kept.

        Drivers leave half a connection behind when they are cancelled while they connect: whoever wants to leave waits.
        """

        async def connect() -> AsyncConnection:
            engine = await self._spare_engine()
            connection = await engine.connect()
            return await connection.execution_options(isolation_level="AUTOCOMMIT")

        connecting = asyncio.ensure_future(connect())
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            self._letting_go.add(closing := asyncio.ensure_future(_closed_at_once(connecting)))
            closing.add_done_callback(self._letting_go.discard)
            await asyncio.wait([closing], timeout=LATE_CONNECTION)  # it goes on if that is not enough
            raise

    async def behind_a_pooler(self, connection: AsyncConnection) -> bool:
        """Whether the server was reached by way of a pooler: the process that greeted us is not the one that answers.

        Asking leaves no trace, whereas a LISTEN to try it out would stay on a connection that others use.
        """
        driver = await raw(connection)
        greeted = driver.get_server_pid() if hasattr(driver, "get_server_pid") else driver.info.backend_pid
        self.deaf = greeted != await connection.scalar(select(func.pg_catalog.pg_backend_pid()))
        return self.deaf

    async def close(self) -> None:
        if self.line is not None:
            await asyncio.wait([asyncio.ensure_future(self.end(self.line))], timeout=2 * LATE_CONNECTION)


async def _closed_at_once(connecting: Awaitable[AsyncConnection]) -> None:
    with suppress(Exception):  # it did not come about
        await closed(await connecting)


async def raw(connection: AsyncConnection) -> Any:
    """The driver's own connection."""
    return (await connection.get_raw_connection()).driver_connection
