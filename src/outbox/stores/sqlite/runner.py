"""SqliteRunner: one writer at a time, everything in one hop to a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.errors import ConfigurationError
from outbox.core.loops import LoopLocal
from outbox.stores.dialect import SqlDialect
from outbox.stores.runner import Runner
from outbox.stores.sqlite.engines import in_memory
from outbox.stores.sqlite.threads import FileThread, MemoryThread, untouched
from outbox.stores.sqlite.write_lock import Turn, Turns
from outbox.stores.tables import Tables

Result = TypeVar("Result")


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
