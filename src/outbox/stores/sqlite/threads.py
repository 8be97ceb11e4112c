"""Threads in which SQLite's connections of our own work: a whole transaction costs one hop."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, NullPool, StaticPool, create_engine, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from outbox.stores.sqlite.engines import BUSY_TIMEOUT, READING, any_text, begin, prepare, read_any_text
from outbox.stores.sqlite.files import files, make_private
from outbox.stores.sqlite.state import shared, sharing

Result = TypeVar("Result")


class FileThread:
    """A thread with a connection of its own: a whole transaction costs one hop to it."""

    def __init__(self, url: URL) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="outbox-sqlite")
        self._engine = create_engine(url.set(drivername="sqlite"), connect_args={"timeout": BUSY_TIMEOUT})
        prepare(self._engine)
        event.listen(self._engine, "connect", read_any_text)
        files.watch(self._engine)
        self._watcher: sqlite3.Connection | None = None

    async def run(self, work: Callable[[Connection], Result], *, reading: bool) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, _in_transaction, self._engine, work, reading)

    def version(self) -> object:
        """A number that changes with every commit by another connection. It costs a few microseconds: no thread."""
        if self._watcher is None:
            self._watcher = sqlite3.connect(**self._connect_arguments())
        return self._watcher.execute("PRAGMA data_version").fetchone()

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, self._engine.dispose)
        self._executor.shutdown(wait=False)
        if self._watcher is not None:
            self._watcher.close()

    def _connect_arguments(self) -> dict[str, Any]:
        arguments, options = self._engine.dialect.create_connect_args(self._engine.url)
        return {"database": arguments[0], **options, "check_same_thread": False}


class MemoryThread:
    """A database in memory has one connection, which the caller's sessions use too.

    Work runs as a whole in that connection's own thread, and only while no caller's transaction is open in it.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._given = engine
        self._connection: AsyncConnection | None = None
        self._connecting = asyncio.Lock()
        self._engine: Engine | None = None

    async def run(self, work: Callable[[Connection], Result], *, reading: bool) -> Result:
        driver = await self._driver()

        def when_free() -> tuple[Result] | None:
            if driver._conn.in_transaction:
                return None
            if self._engine is None:
                self._engine = create_engine("sqlite://", creator=lambda: driver._conn, poolclass=StaticPool)
                event.listen(self._engine, "begin", begin)
            callers, driver._conn.text_factory = driver._conn.text_factory, any_text
            try:
                with sharing:
                    return (_in_transaction(self._engine, work, reading),)
            finally:
                driver._conn.text_factory = callers

        while True:
            # aiosqlite runs what it is given in the connection's thread; only its own methods go that way publicly.
            result: tuple[Result] | None = await driver._execute(when_free)
            if result is not None:
                return result[0]
            await asyncio.sleep(0.002)

    def version(self) -> object:
        return 0  # nobody outside of this process can write here

    async def close(self) -> None:
        connection, self._connection, self._engine = self._connection, None, None
        if connection is not None:
            await connection.close()

    async def _driver(self) -> Any:
        async with self._connecting:
            # One, and kept open: giving one back would roll back what a caller's session has open on the same one.
            if self._connection is None:
                self._connection = await self._given.connect()
        driver: Any = (await self._connection.get_raw_connection()).driver_connection
        shared.add(driver)
        return driver


def untouched(url: URL, work: Callable[[Connection], Result]) -> Result:
    """Run work on a connection that does not even switch the file's journal."""
    make_private(url)
    engine = create_engine(url.set(drivername="sqlite"), poolclass=NullPool, connect_args={"timeout": BUSY_TIMEOUT})
    event.listen(engine, "connect", read_any_text)
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA query_only = ON")
        return work(connection)


def _in_transaction(engine: Engine, work: Callable[[Connection], Result], reading: bool) -> Result:
    with engine.connect().execution_options(**{READING: reading}) as connection, connection.begin():
        return work(connection)
