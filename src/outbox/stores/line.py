"""Line: a connection that leads straight to the server, kept for the statements that a message waits for.

A pool and SQLAlchemy's execution take as long as such a statement itself. Here it stays prepared, which a pooler in
between would mix up, and is asked through the driver, asyncpg. Wake-ups are heard over the same connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import Executable
from sqlalchemy.ext.asyncio import AsyncConnection

from outbox.core.prepared import prepare
from outbox.stores.sql import WORK_WITHIN
from outbox.stores.straight import DIALECT

LAST_WORDS = 2.0  # seconds that ending waits for who is being answered


class Line:
    """One of asyncpg's connections, on which every statement commits by itself."""

    def __init__(self, connection: AsyncConnection, raw: Any) -> None:
        self._connection = connection
        self._raw = raw
        self._statements: dict[str, Any] = {}
        self._turn = asyncio.Lock()
        self._ended = False

    @property
    def is_closed(self) -> bool:
        closed: bool = self._raw.is_closed()
        return closed

    @property
    def is_free(self) -> bool:
        return not self._turn.locked() and not self.is_closed

    async def ask(self, statement: Executable, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        """The rows of a statement. A failure ends the line: nobody knows what it left behind."""
        prepared = prepare(statement, tuple(parameters), DIALECT)
        async with self._turn:
            try:
                known = self._statements.get(prepared.text)
                if known is None:
                    known = self._statements[prepared.text] = await self._raw.prepare(prepared.text)
                values = prepared.parameters(parameters)
                rows: Sequence[Sequence[Any]] = await known.fetch(*values, timeout=WORK_WITHIN)
            except BaseException:
                self._raw.terminate()
                raise
        return rows

    async def listen(self, channel: str, heard: Callable[[str], None]) -> asyncio.Event:
        """Pass on what is notified; the event tells when that has ended."""
        ended = asyncio.Event()
        self._raw.add_termination_listener(lambda *_: ended.set())
        async with self._turn:
            await self._raw.add_listener(channel, lambda *words: heard(words[3]))
        return ended

    async def check(self) -> None:
        """Find out whether it still leads anywhere."""
        async with self._turn:
            await self._raw.execute("SELECT 1")

    async def end(self) -> None:
        """Close it after whoever is being answered, and serve nobody any more."""
        if self._ended:
            return
        self._ended = True
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS):
                await self._turn.acquire()
        await closed(self._connection)


async def closed(connection: AsyncConnection) -> None:
    """End a connection for good: one that listened is of no use to anybody else."""
    await connection.invalidate()
    await connection.close()
    await connection.engine.dispose()
