"""SQLite: one writer at a time, everything in one hop to a thread, wake-ups by looking at the file's version."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    DateTime,
    Dialect,
    Engine,
    Executable,
    Float,
    FromClause,
    Insert,
    Integer,
    LargeBinary,
    NullPool,
    Select,
    StaticPool,
    String,
    Table,
    TypeDecorator,
    Uuid,
    bindparam,
    case,
    cast,
    create_engine,
    event,
    func,
    literal_column,
    null,
    select,
    type_coerce,
)
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.types import TypeEngine

from outbox.core.diagnosis import Examination, Finding
from outbox.core.durations import LATEST, OLDEST, Retention
from outbox.core.errors import ConfigurationError, SnapshotConflict, TablesMissing, TransactionError
from outbox.core.loops import LoopLocal
from outbox.core.store import AnyEngine, Difference, Rows
from outbox.core.transaction_state import TransactionState
from outbox.stores import sqlite_examination, sqlite_state
from outbox.stores.failures import nothing_is_kept
from outbox.stores.qualified import qualified
from outbox.stores.rows import Undecodable, as_utc
from outbox.stores.sql import SqlStore
from outbox.stores.sqlite_check import SqliteCheck
from outbox.stores.sqlite_files import files, make_private, notice_replacement
from outbox.stores.sqlite_path import OwnFile
from outbox.stores.tables import Tables
from outbox.stores.turns import Turn, Turns

Result = TypeVar("Result")

BUSY_TIMEOUT = 30.0  # seconds that a connection of ours waits for its turn to write
QUICK_LOOK, SLOW_LOOK = 0.005, 0.05  # seconds between two looks at the file's version, after activity and when idle

_FORMAT = "%Y-%m-%d %H:%M:%f000"  # as SQLAlchemy writes datetimes: fixed width, so that text order is time order
_CONFLICTS = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_READING = "outbox_reading"
_letting_go: set[asyncio.Task[None]] = set()


class SqliteStore(SqlStore):
    """Messages in a SQLite file, or in memory for tests."""

    async_drivers = ("aiosqlite",)
    sync_drivers = ("pysqlite",)
    writes_side_by_side = False
    connections_can_die = False

    @classmethod
    def make_engine(cls, url: URL) -> AsyncEngine:
        engine = super().make_engine(url)
        if in_memory(url):
            event.listen(engine.sync_engine, "savepoint", _begin_first)
        else:
            prepare(engine)
            files.watch(engine.sync_engine)
        return engine

    @classmethod
    def make_sync_engine(cls, url: URL) -> Engine:
        if in_memory(url):
            raise ConfigurationError("a database in memory has one connection, which threads cannot share: use a file")
        engine = super().make_sync_engine(url)
        prepare(engine)
        files.watch(engine)
        return engine

    @classmethod
    def safe_engine(cls, given: AnyEngine) -> AnyEngine:
        if in_memory(given.url):
            return given
        return cls.make_engine(given.url) if isinstance(given, AsyncEngine) else cls.make_sync_engine(given.url)

    def __init__(self, tables: Tables, engine: AsyncEngine | None, clean_up_after: Retention) -> None:
        super().__init__(tables, clean_up_after)
        self._given = engine
        self._loops = LoopLocal(_InLoop, _InLoop.close)
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()
        self._own_file = OwnFile(None if engine is None else engine.url)

    async def _transact(self, work: Callable[[Connection], Result]) -> Result:
        async with self.turn():
            return await self._own().run(work, reading=False)

    _apply = _transact

    async def _look(self, work: Callable[[Connection], Result]) -> Result:
        return await self._own().run(work, reading=True)

    async def _glance(self, work: Callable[[Connection], Result]) -> Result:
        if self._given is None or in_memory(self._given.url):
            return await self._look(work)
        return await asyncio.to_thread(_untouched, self._given.url, work)

    async def close(self) -> None:
        await self.lost_claims.close()
        await self._loops.close()

    def turn(self, *, for_caller: bool = False) -> Turn:
        return self._turns_here().next

    def _turns_here(self) -> Turns:
        """Not closed with the store: a caller's transaction may still be open then, and hold the write lock."""
        loop = asyncio.get_running_loop()
        turns = self._turns.get(loop)
        if turns is None:
            turns = self._turns[loop] = Turns()
        return turns

    async def _renew(self, work: Callable[[Connection], Result]) -> Result:
        async with self._turns_here().first:
            return await self._own().run(work, reading=False)

    async def anything_due(self, wanted: Mapping[str, Any]) -> bool:
        # A claim takes the one lock that every writer of the file waits for.
        parameters = {**wanted, "limit": 1}
        return await self.look(lambda connection: self.search(connection, self.due, parameters)) != []

    async def wait(self, longest: float, *, destination: str | None = None) -> None:
        in_loop = self._loops.here()
        if in_loop.pulse is None or in_loop.pulse.done():
            in_loop.pulse = asyncio.create_task(self._watch(), name="outbox watch")
        await super().wait(longest, destination=destination)

    # The caller's connection.

    def on(self, connection: Connection) -> Connection:
        self._own_file.check(connection.engine)
        if "schema_translate_map" not in connection.get_execution_options():
            return connection
        return qualified(connection, {self.messages.schema: self.messages.schema or "main"})

    def write(self, connection: Connection, statement: Executable, rows: Rows | None = None) -> int:
        own = self.on(connection)
        try:
            return self.execute(own, statement, rows)
        except OperationalError as error:
            match self.explained(error.orig) if error.orig is not None else None:
                case TablesMissing():
                    # In the caller's transaction: it holds the only lock there is, and DDL rolls back with it.
                    self.create(connection)
                    return self.execute(own, statement, rows)
                case None:
                    raise
                case explained:
                    raise explained from error

    def explained(self, error: BaseException) -> TransactionError | None:
        if "no such table" in str(error):
            return self.tables_missing()
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY_SNAPSHOT:
            return SnapshotConflict(
                "this transaction read before it wrote, and somebody else wrote meanwhile: SQLite cannot let it "
                "write any more. Roll it back and try again; to avoid it, begin with `async with transaction() as "
                "session`, call outbox.sqlite.prepare(engine) once for your own engine, or begin with BEGIN IMMEDIATE"
            )
        return None

    def driver_state_of(self, connection: Connection) -> TransactionState:
        return sqlite_state.state_of(connection)

    def is_aborted(self, connection: Connection, *, in_doubt: bool) -> bool:
        return sqlite_state.is_rolled_back(connection)

    def is_own_conflict(self, error: BaseException) -> bool:
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in _CONFLICTS  # what is above says which kind

    def isolation(self, level: str) -> Mapping[str, Any]:
        return {}  # every transaction is serializable, and that is more than any level asks for

    def create(self, connection: Connection) -> None:
        self.tables.metadata.create_all(connection)

    def differences(self, connection: Connection) -> list[Difference]:
        return SqliteCheck(connection, self.tables).differences()

    def server(self, connection: Connection) -> str:
        return sqlite_examination.server(connection)

    def findings(self, connection: Connection) -> Iterator[Finding]:
        return sqlite_examination.findings(connection)

    async def examine(self) -> Examination:
        found = await super().examine()
        if self._given is None or in_memory(self._given.url):
            return found
        patience = sqlite_examination.patience(await _busy_timeout(self._given))
        return replace(found, findings=(*found.findings, patience))

    # How SQLite spells it.

    def now(self) -> ColumnElement[Any]:
        return func.strftime(_FORMAT, "now")

    def clock(self) -> ColumnElement[Any]:
        return func.strftime(_FORMAT, "now")

    def later(self, moment: ColumnElement[Any], seconds: ColumnElement[Any]) -> ColumnElement[Any]:
        moved = func.strftime(_FORMAT, moment, func.printf("%+.6f seconds", seconds))
        return case((seconds.is_(None), null()), else_=moved)

    def seconds_until(self, moment: ColumnElement[Any]) -> ColumnElement[float]:
        return cast((func.julianday(moment) - func.julianday("now")) * 86_400, Float)

    def readable(self, column: ColumnElement[Any], otherwise: datetime | None = None) -> ColumnElement[Any]:
        if isinstance(column.type, DateTime):
            return type_coerce(column, _Time(otherwise))
        if isinstance(column.type, Uuid):
            return type_coerce(column, String)
        return type_coerce(column, _Bytes()) if isinstance(column.type, LargeBinary) else column

    def before_all(self) -> ColumnElement[Any]:
        return literal_column("-9e999")  # numbers are before texts

    def among(self, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
        return column.in_(select(func.json_each(bindparam(name)).table_valued("value").c.value))

    def listed(self, values: Sequence[Any]) -> Any:
        return json.dumps(list(values))

    def records(self, name: str, columns: Mapping[str, type[TypeEngine[Any]]]) -> FromClause:
        rows = func.json_each(bindparam(name)).table_valued("value")
        fields = [
            func.json_extract(rows.c.value, f"$.{column}", type_=column_type).label(column)
            for column, column_type in columns.items()
        ]
        return select(*fields).subquery()

    def ignoring(self, table: Table) -> Insert:
        return sqlite_insert(table).on_conflict_do_nothing()

    def ending(self, text: ColumnElement[str], length: int) -> ColumnElement[str]:
        return func.substr(text, -length)

    def skipping_locked(self, statement: Select[Any]) -> Select[Any]:
        return statement  # whoever is in a transaction that writes is alone

    def size(self, column: ColumnElement[Any]) -> ColumnElement[int]:
        return func.length(column, type_=Integer)

    def rows_written(self, connection: Connection) -> int:
        found = connection.exec_driver_sql("SELECT seq FROM sqlite_sequence WHERE name = ?", (self.messages.name,))
        return int(found.scalar() or 0)

    # Waking up.

    async def _watch(self) -> None:
        """Ring every bell when the file changes, as every commit of anybody changes its version."""
        thread, pause = self._own(), QUICK_LOOK
        seen = thread.version()
        while True:
            await asyncio.sleep(pause)
            version = thread.version()
            pause = QUICK_LOOK if version != seen else min(pause * 1.2, SLOW_LOOK)
            if version != seen:
                self._wakeup.ring_all()
            seen = version

    def _own(self) -> _Thread | _MemoryThread:
        in_loop = self._loops.here()
        if in_loop.thread is None:
            if self._given is None:
                raise ConfigurationError(
                    "this needs an async database: call setup(db_engine_url=…) with an async driver"
                )
            in_loop.thread = _MemoryThread(self._given) if in_memory(self._given.url) else _Thread(self._given.url)
        return in_loop.thread


class _Time(TypeDecorator[datetime]):
    """Reads a time where any text may be, or a number: SQLite checks no types."""

    impl = String
    cache_ok = True

    def __init__(self, otherwise: datetime | None) -> None:
        super().__init__()
        self.otherwise = otherwise

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        try:
            moment = as_utc(datetime.fromisoformat(value))
        except (TypeError, ValueError, OverflowError):
            return self.otherwise
        return moment if OLDEST <= moment < LATEST else self.otherwise


class _Bytes(TypeDecorator[bytes]):
    """Reads bytes where there may be anything else."""

    impl = String
    cache_ok = True

    def process_result_value(self, value: Any, dialect: Dialect) -> bytes | None:
        return value if isinstance(value, bytes) else None


class _InLoop:
    """What of a store belongs to one event loop."""

    def __init__(self) -> None:
        self.thread: _Thread | _MemoryThread | None = None
        self.pulse: asyncio.Task[None] | None = None

    async def close(self) -> None:
        pulse, self.pulse = self.pulse, None
        if pulse is not None:
            pulse.cancel()
        thread, self.thread = self.thread, None
        if thread is not None:
            await thread.close()


class _Thread:
    """A thread with a connection of its own: a whole transaction costs one hop to it."""

    def __init__(self, url: URL) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="outbox-sqlite")
        self._engine = create_engine(url.set(drivername="sqlite"), connect_args={"timeout": BUSY_TIMEOUT})
        prepare(self._engine)
        event.listen(self._engine, "connect", _read_any_text)
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


class _MemoryThread:
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
                event.listen(self._engine, "begin", _begin)
            callers, driver._conn.text_factory = driver._conn.text_factory, any_text
            try:
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
        return (await self._connection.get_raw_connection()).driver_connection


def prepare(engine: Engine | AsyncEngine) -> None:
    """Make an engine's transactions safe: they take the write lock when they begin, wait for their turn, and let go.

    Without it SQLite refuses a transaction that read first as soon as somebody else wrote, and SQLAlchemy's default
    opens none at all before a SELECT; and a session that is cancelled in a statement may keep the lock for a while.
    """
    target = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
    event.listen(target, "connect", _connect)
    if not in_memory(engine.url):
        notice_replacement(target)
    event.listen(target, "begin", _begin)
    event.listen(target, "before_cursor_execute", _refuse_what_would_be_alone)
    if isinstance(engine, AsyncEngine):
        event.listen(target, "invalidate", _let_go)


def in_memory(url: URL) -> bool:
    """Whether a URL means a database that lives in one connection."""
    return url.database in (None, "", ":memory:") or "mode=memory" in (url.database or "")


def _connect(connection: Any, record: object) -> None:
    connection.isolation_level = None  # SQLAlchemy's `begin` event says BEGIN, not the driver
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT * 1000)}")
    with suppress(sqlite3.OperationalError):  # somebody writes at this moment: the next connection switches it on
        cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()


def any_text(value: bytes) -> str:
    """A text, whatever bytes another program wrote: over one that is not UTF-8 the driver gives up a whole result."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return Undecodable(value, "utf-8", "backslashreplace")


def _read_any_text(connection: Any, record: object) -> None:
    connection.text_factory = any_text


def _let_go(connection: Any, record: object, error: BaseException | None) -> None:
    """Roll back before a connection that was cut is closed.

    SQLite keeps a closed connection, and the write lock with it, until its last cursor is collected.
    """

    async def roll_back() -> None:
        with suppress(Exception):  # it is closed already
            await connection.driver_connection.rollback()

    with suppress(RuntimeError):  # no loop runs any more, hence nobody was cancelled
        loop = asyncio.get_running_loop()
        _letting_go.add(task := loop.create_task(roll_back()))
        task.add_done_callback(_letting_go.discard)


def _begin(connection: Connection) -> None:
    reading = connection.get_execution_options().get(_READING, False)
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _refuse_what_would_be_alone(connection: Connection, *_: object) -> None:
    """SQLite has rolled back what came before: what comes now would be committed by itself."""
    if sqlite_state.is_rolled_back(connection):
        raise nothing_is_kept(connection)


def _begin_first(connection: Connection, name: str) -> None:
    """The driver begins with the first statement that writes; a savepoint before that would commit by its release."""
    driver: Any = connection.connection.driver_connection
    if not driver.in_transaction:
        connection.exec_driver_sql("BEGIN")


async def _busy_timeout(engine: AsyncEngine) -> int:
    """For how many milliseconds an engine's connections wait for their turn."""
    if event.contains(engine.sync_engine, "connect", _connect):
        return int(BUSY_TIMEOUT * 1000)
    async with engine.connect() as connection:
        return int((await connection.exec_driver_sql("PRAGMA busy_timeout")).scalar() or 0)


def _untouched(url: URL, work: Callable[[Connection], Result]) -> Result:
    """Run work on a connection that does not even switch the file's journal."""
    make_private(url)
    engine = create_engine(url.set(drivername="sqlite"), poolclass=NullPool, connect_args={"timeout": BUSY_TIMEOUT})
    event.listen(engine, "connect", _read_any_text)
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA query_only = ON")
        return work(connection)


def _in_transaction(engine: Engine, work: Callable[[Connection], Result], reading: bool) -> Result:
    with engine.connect().execution_options(**{_READING: reading}) as connection, connection.begin():
        return work(connection)
