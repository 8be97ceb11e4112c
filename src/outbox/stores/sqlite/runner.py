"""SqliteRunner: one writer at a time, everything in one hop to a thread; and wake-ups by the file's version."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import URL, Connection, Engine, NullPool, StaticPool, create_engine, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from outbox.core.errors import ConfigurationError, TransactionError
from outbox.core.loops import LoopLocal
from outbox.stores.dialect import SqlDialect
from outbox.stores.runner import Runner
from outbox.stores.sqlite.engines import (
    BUSY_TIMEOUT,
    READING,
    any_text,
    begin,
    files,
    in_memory,
    make_private,
    prepare,
    read_any_text,
    shared,
    sharing,
)
from outbox.stores.tables import Tables
from outbox.stores.wakeup import Wakeup


class Turns:
    """The write lock of one event loop: renewals of leases first, then in the order of their coming.

    SQLite itself lets writers guess: the one that asks again soonest gets the lock, and listeners ask without a pause.
    Many listeners with a session wait here, each for all before it, and their leases run out meanwhile unless renewals
    pass.
    """

    def __init__(self) -> None:
        self.first = Turn(self)
        self.next = Turn(self)
        self._taken = False
        self._holder: asyncio.Task[Any] | None = None

    async def take(self, waiting: deque[asyncio.Future[None]]) -> None:
        task = asyncio.current_task()
        if self._holder is not None and self._holder is task:
            raise TransactionError(
                "a transaction is open in this task already, and SQLite lets no second one write: pass its session on, "
                "and use `session.begin_nested()` for a part"
            )
        if self._taken:
            await self._wait(waiting)
        self._taken, self._holder = True, task

    def give(self) -> None:
        """Hand it over. It stays taken in between, so that no other writer comes first."""
        self._holder = None
        for waiting in (self.first.waiting, self.next.waiting):
            while waiting:
                waiter = waiting.popleft()
                if not waiter.done():
                    waiter.set_result(None)
                    return
        self._taken = False

    async def _wait(self, waiting: deque[asyncio.Future[None]]) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give()  # it was handed over at the same moment
            raise


class Turn:
    """Held while something writes; those who wait for it by this name come one after another."""

    def __init__(self, turns: Turns) -> None:
        self.waiting: deque[asyncio.Future[None]] = deque()
        self._turns = turns

    async def __aenter__(self) -> None:
        await self._turns.take(self.waiting)

    async def __aexit__(self, *error: object) -> None:
        self._turns.give()


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
        shared.add(driver)

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
        return 0  # no other process can write here

    async def close(self) -> None:
        connection, self._connection, self._engine = self._connection, None, None
        if connection is not None:
            await connection.close()

    async def _driver(self) -> Any:
        async with self._connecting:
            # One, and kept open: giving one back would roll back what a caller's session has open on the same one.
            if self._connection is None:
                self._connection = await self._given.connect()
        return (await self._connection.get_raw_connection()).driver_connection


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


class SqliteRunner(Runner):
    """A thread for each event loop, and the write lock in front of it."""

    writes_side_by_side = False

    def __init__(self, tables: Tables, dialect: SqlDialect, engine: AsyncEngine | None) -> None:
        super().__init__(tables, dialect)
        self._given = engine
        self.loops = LoopLocal(SqliteLoop, SqliteLoop.close)
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()

    async def _transact(self, work: Callable[[Connection], Result]) -> Result:
        async with self.turn():
            return await self.own().run(work, reading=False)

    _apply = _transact

    async def _renew(self, work: Callable[[Connection], Result]) -> Result:
        async with self._turns_here().first:
            return await self.own().run(work, reading=False)

    async def _look(self, work: Callable[[Connection], Result]) -> Result:
        return await self.own().run(work, reading=True)

    async def _inspect(self, work: Callable[[Connection], Result]) -> Result:
        if self._given is None or in_memory(self._given.url):
            return await self._look(work)
        return await asyncio.to_thread(untouched, self._given.url, work)

    def turn(self, *, for_caller: bool = False) -> Turn:
        return self._turns_here().next

    def _turns_here(self) -> Turns:
        """Not closed with the store: a caller's transaction may still be open then, and hold the write lock."""
        loop = asyncio.get_running_loop()
        turns = self._turns.get(loop)
        if turns is None:
            turns = self._turns[loop] = Turns()
        return turns

    def own(self) -> FileThread | MemoryThread:
        """The running loop's."""
        in_loop = self.loops.here()
        if in_loop.thread is None:
            if self._given is None:
                raise ConfigurationError(
                    "this needs an async database: call setup(db_engine_url=…) with an async driver"
                )
            in_loop.thread = MemoryThread(self._given) if in_memory(self._given.url) else FileThread(self._given.url)
        return in_loop.thread

    async def close(self) -> None:
        await self.loops.close()


class SqliteLoop:
    """What belongs to one event loop."""

    def __init__(self) -> None:
        self.thread: FileThread | MemoryThread | None = None
        self.pulse: asyncio.Task[None] | None = None  # looks at the file's version

    async def close(self) -> None:
        pulse, self.pulse = self.pulse, None
        if pulse is not None:
            pulse.cancel()
        thread, self.thread = self.thread, None
        if thread is not None:
            await thread.close()


QUICK_LOOK, SLOW_LOOK = 0.005, 0.05  # seconds between two looks at the file's version, after activity and when idle


class SqliteWakeup(Wakeup):
    """A task for each event loop in which a caller waits."""

    def __init__(self, runner: SqliteRunner) -> None:
        super().__init__()
        self._runner = runner

    async def listen(self, longest: float) -> None:
        in_loop = self._runner.loops.here()
        if in_loop.pulse is None or in_loop.pulse.done():
            in_loop.pulse = asyncio.create_task(self._watch(), name="outbox watch")

    async def _watch(self) -> None:
        """Wake all tasks when the file changes: every commit of any process changes its version."""
        thread, pause = self._runner.own(), QUICK_LOOK
        seen = thread.version()
        while True:
            await asyncio.sleep(pause)
            version = thread.version()
            pause = QUICK_LOOK if version != seen else min(pause * 1.2, SLOW_LOOK)
            if version != seen:
                self.ring_all()
            seen = version
