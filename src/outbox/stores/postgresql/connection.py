"""Connection: asyncpg spoken to directly, for the statements that a message waits for.

A pool and SQLAlchemy's execution take as long as such a statement itself. On a dedicated connection it stays prepared,
which a pooler in between would mix up, and NOTIFY is received over the same connection. Many rows are read by their
columns' positions: SQLAlchemy makes an object of each row, which costs more than to read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Executable
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.util import await_only

from outbox.core.prepared import dialect_for, prepare
from outbox.stores.runner import WORK_WITHIN

DRIVER = "asyncpg"
DIALECT = dialect_for(f"postgresql.{DRIVER}", "numeric_dollar")
CLOSE_WITHIN = 2.0  # seconds that ending waits for who is being answered


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
            async with asyncio.timeout(CLOSE_WITHIN):
                await self._turn.acquire()
        await closed(self._connection)


async def closed(connection: AsyncConnection) -> None:
    """End a connection for good: one that listened is of no use to anybody else."""
    await connection.invalidate()
    await connection.close()
    await connection.engine.dispose()


def fetched(connection: Connection, statement: Executable, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
    """The rows of a statement, on a connection whose statements commit by themselves."""
    if connection.dialect.driver != DRIVER:
        return connection.execute(statement, parameters).all()
    prepared = prepare(statement, tuple(parameters), DIALECT)
    raw: Any = connection.connection.driver_connection
    try:
        rows: Sequence[Sequence[Any]] = await_only(raw.fetch(prepared.text, *prepared.parameters(parameters)))
    except BaseException:
        connection.invalidate()  # nobody knows what the statement left behind, and SQLAlchemy has not seen it
        raise
    return rows


def begin(coroutine: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
    """A task whose first step is over when this returns; asyncio's own would take it when the caller next waits.

    That step runs as part of whatever runs now: it must not ask for its own task, as a timeout would, nor speak through
    SQLAlchemy, which would come back to whoever is at work now.
    """
    loop = asyncio.get_running_loop()
    try:
        waits_for = coroutine.send(None)
    except StopIteration:
        over: asyncio.Future[None] = loop.create_future()
        over.set_result(None)
        return over
    return loop.create_task(_Begun(coroutine, waits_for))


class _Begun(Coroutine[Any, Any, None]):
    """The rest of it, as a task sees it: a coroutine that first waits for what the first step waits for."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._first = [waits_for]

    def send(self, value: Any) -> Any:
        return self._first.pop() if self._first else self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        self._first.clear()  # it was told to go on without
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise TypeError("only a task runs it")
