"""Connections of our own to PostgreSQL: beside a pool, straight to the server, and what a pooler asks of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import URL, Connection, Engine, Executable, event, func, select
from sqlalchemy.dialects.postgresql.psycopg import PGDialectAsync_psycopg
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from outbox.core.errors import ConfigurationError
from outbox.core.prepared import dialect_for, prepare
from outbox.stores.runner import WORK_WITHIN, Runner, spare


@event.listens_for(PGDialectAsync_psycopg, "handle_error")
def _left_in_pipeline(context: ExceptionContext) -> BaseException | None:
    """End a connection that psycopg leaves in pipeline mode, and tell the caller what happened: it was cancelled.

    `executemany` that is cancelled while it enters the pipeline (psycopg 3.3.9 and later wait there) fails an assertion
    instead of leaving it, and the next statement on that connection would get no results.
    """
    error = context.original_exception
    if not isinstance(error, AssertionError) or not isinstance(error.__context__, asyncio.CancelledError):
        return None
    context.is_disconnect = True
    context.invalidate_pool_on_disconnect = False  # the others are in order
    return error.__context__


# Pooling: what a connection pooler such as PgBouncer asks of a driver when any transaction may run on any connection.
# Nothing of ours outlives a transaction: no session's lock, no SET, no temporary table. What is left are prepared
# statements, which drivers keep to be quicker: the next transaction may meet a server that does not know them or,
# worse, that knows another one by the same name.

# For each driver the connect_args without which it keeps prepared statements.
UNPREPARED: Mapping[str, Mapping[str, Any]] = {
    "asyncpg": {"statement_cache_size": 0, "prepared_statement_cache_size": 0},
    "psycopg": {"prepare_threshold": None},
}

_MIXED_UP = {
    "42P05",  # this prepared statement exists already: another client made it
    "26000",  # there is no such prepared statement: it was made on another connection
    "08P01",  # it takes other parameters: it is another client's statement of the same name
}


def unprepared(url: URL) -> dict[str, Any]:
    """The connect_args for an engine of our own, unless its URL has settings of that kind."""
    settings = UNPREPARED.get(url.get_driver_name(), {})
    return {} if settings.keys() & url.query.keys() else dict(settings)


@contextmanager
def explained(driver: str) -> Iterator[None]:
    """Turn the errors of mixed up prepared statements into one that says what to do."""
    try:
        yield
    except Exception as error:
        if driver in UNPREPARED and _mixed_up(error):
            raise ConfigurationError(
                "prepared statements got mixed up: a pooler such as PgBouncer runs each transaction on any of its "
                f"connections. Make your engine with connect_args={dict(UNPREPARED[driver])!r}"
            ) from error
        raise


def _mixed_up(error: Exception) -> bool:
    # An error while a connection is made is the driver's own, not wrapped by SQLAlchemy.
    original = getattr(error, "orig", None) or error
    return getattr(original, "sqlstate", None) in _MIXED_UP and "prepared statement" in str(original)


# Connection: asyncpg spoken to directly, for the statements that a message waits for.
# A pool and SQLAlchemy's execution take as long as such a statement itself. On a dedicated connection it stays
# prepared, which a pooler in between would mix up, and NOTIFY is received over the same connection.

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
        """The rows of a statement. A failure ends the line: what it left behind is not known."""
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
        """Pre-ping: find out whether the connection still works."""
        async with self._turn:
            await self._raw.execute("SELECT 1")

    async def end(self) -> None:
        """Close it after the statement under way, and accept no further one."""
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


def as_array(values: Iterable[object]) -> str:
    """A list to bind as text, of numbers or of names of letters, digits and underscores.

    For another type asyncpg asks each new connection what it is, and switches a session's jit for that.
    """
    return "{" + ",".join(map(str, values)) + "}"


def begin(coroutine: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
    """A task whose first step is over when this returns; asyncio's own would take it when the caller next waits.

    That step runs as part of whatever runs now: it must not ask for its own task, as a timeout would, nor speak through
    SQLAlchemy, which would come back to the task that is at work now.
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


# DirectConnection: one connection of an event loop that leads straight to the server, if there is such a way.
# Only asyncpg has one. A connection that a pooler lends out for each transaction is none: it can neither listen nor
# keep a prepared statement.

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

        Drivers leave half a connection behind when they are cancelled while they connect: so the caller waits.
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


class PlainLine:
    """One connection in AUTOCOMMIT, made when it is first needed and again when it was lost."""

    def __init__(self, engine: Engine, on: Callable[[Connection], Connection]) -> None:
        self._engine = spare(engine)
        self._on = on  # names the schema of the tables
        self._connection: Connection | None = None

    def ask(self, statement: Executable, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        """The rows of a statement that stands alone."""
        was_open = self._connection is not None
        try:
            return self._asked(statement, parameters)
        except DBAPIError as error:
            self.close()
            if not (was_open and error.connection_invalidated):
                raise
            return self._asked(statement, parameters)  # its server may have been started again meanwhile

    def _asked(self, statement: Executable, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        if self._connection is None:
            self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        return self._on(self._connection).execute(statement, parameters).all()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        with suppress(Exception):  # it is lost
            if connection is not None:
                connection.close()
        self._engine.dispose()
