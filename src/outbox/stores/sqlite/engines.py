"""Engines for SQLite: what their drivers know of a transaction, which files they open, and how they are made safe."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import URL, Connection, Engine, ExceptionContext, Transaction, event
from sqlalchemy.dialects.sqlite.base import SQLiteDialect
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import await_only

from outbox.core.errors import ConfigurationError, DatabaseReplaced, ForkRefused
from outbox.core.forks import ForkableLock, forget_after_fork
from outbox.core.transaction_state import TransactionState, begins_by_itself
from outbox.stores.callers import nothing_is_kept
from outbox.stores.rows import UnreadableText

# What SQLite's drivers know of a transaction.
# SQLite rolls some transactions back by itself: when the disk is full, on ON CONFLICT ROLLBACK, RAISE(ROLLBACK) or an
# interrupt. And where its driver begins transactions, a savepoint that comes first is a transaction of its own.
# SQLAlchemy knows of neither. Both are seen by comparing the driver before and after each statement.

sharing = ForkableLock()  # held while a store works on the one connection of a database in memory, in its thread
shared: WeakSet[Any] = WeakSet()  # those connections, as their driver has them
_was_open: WeakKeyDictionary[Transaction, bool] = WeakKeyDictionary()  # before its last statement
_rolled_back: WeakSet[Transaction] = WeakSet()  # by SQLite
_savepoint_first: WeakSet[Transaction] = WeakSet()

_ENDING = tuple("CcEe")  # how COMMIT and END begin, and few other statements


def is_open(driver: Any) -> bool:
    """Whether a caller's transaction is open on a driver's connection: a store's own is over when this looks."""
    if driver not in shared:
        return bool(driver.in_transaction)
    with sharing:
        return bool(driver.in_transaction)


def state_of(connection: Connection) -> TransactionState:
    """The state of a connection."""
    transaction = connection.get_transaction()
    if transaction in _rolled_back:
        return TransactionState.ABORTED
    if transaction in _savepoint_first:
        return TransactionState.RELEASED_BY_SAVEPOINT
    driver: Any = connection.connection.driver_connection
    if is_open(driver):
        return TransactionState.OPEN
    will_begin = transaction is None and any(True for _ in connection.dispatch.begin)  # such as that of `prepare`
    return TransactionState.IDLE if will_begin or _begins_by_itself(driver) else TransactionState.AUTOCOMMIT


def is_rolled_back(connection: Connection) -> bool:
    """Whether SQLite has rolled the connection's transaction back by itself, at a statement of the driver's too."""
    transaction = connection.get_transaction()
    if transaction in _rolled_back:
        return True
    if transaction is None or transaction in _savepoint_first:
        return False
    driver: Any = connection.connection.driver_connection
    return _was_open.get(transaction, False) and not is_open(driver)


def _begins_by_itself(driver: Any) -> bool:
    if hasattr(driver, "_conn"):  # of aiosqlite, whose connection is read in its own thread
        return bool(await_only(driver._execute(begins_by_itself, driver._conn)))
    return begins_by_itself(driver)


@event.listens_for(SQLiteDialect, "do_execute")
@event.listens_for(SQLiteDialect, "do_executemany")
def _executing(cursor: object, statement: str, parameters: object, context: Any) -> None:
    transaction = None if context is None else context.root_connection.get_transaction()
    if transaction is None:
        return
    driver = context.root_connection.connection.driver_connection
    if not hasattr(driver, "in_transaction"):  # another dialect that is made from SQLite's, and no store is for it
        return
    now_open = is_open(driver)
    if not now_open and _was_open.get(transaction) and transaction not in _savepoint_first:
        _rolled_back.add(transaction)  # at a statement of the driver's; with this one it may begin another
    _was_open[transaction] = now_open and statement[:1] not in _ENDING  # a caller's own COMMIT is no rollback
    if not now_open and statement.startswith("SAVEPOINT"):
        _savepoint_first.add(transaction)


@event.listens_for(SQLiteDialect, "handle_error")
def _failed(context: ExceptionContext) -> None:
    connection = context.connection
    transaction = None if connection is None else connection.get_transaction()
    if connection is None or transaction is None or not _was_open.get(transaction) or connection.invalidated:
        return
    driver: Any = connection.connection.driver_connection
    if not is_open(driver):
        _rolled_back.add(transaction)


# Files: which SQLite files connections have open, what a forked child may not use, and what was replaced meanwhile.
# SQLite remembers by itself which locks its process has on a file, and a child of `os.fork` inherits that memory
# without the locks. A connection that the child opens believes it: it waits for ever for a lock that was a parent's
# thread's, or writes to a log that another process has deleted because it saw no lock, and what it committed is gone.


class _Files:
    def __init__(self) -> None:
        self._open: Counter[str] = Counter()  # how many connections each file has
        self._inherited: set[str] = set()

    def watch(self, engine: Engine) -> None:
        """Count an engine's connections, and let it open none that would be unsafe."""
        url, file = engine.url, os.path.realpath(engine.url.database or "")
        event.listen(engine, "do_connect", lambda *_: self.check(file))
        event.listen(engine, "do_connect", lambda *_: make_private(url))
        event.listen(engine, "connect", lambda *_: self._open.update({file: 1}))
        event.listen(engine, "close", lambda *_: self._open.subtract({file: 1}))

    def check(self, file: str) -> None:
        if file in self._inherited:
            raise ForkRefused(
                f"the parent of this process had {file} open when it forked, and SQLite's locks do not survive that: "
                "transactions would be lost. Fork before the outbox is used, let the parent `await outbox.close()` "
                'first, or start processes by "spawn"'
            )

    def forked(self) -> None:
        self._inherited.update(file for file, count in self._open.items() if count > 0)


files = _Files()
forget_after_fork(files)


def make_private(url: URL) -> None:
    """Make the file that a connection would make, for this user alone: messages are in it. One that is there stays.

    SQLite gives the files beside it the same mode.
    """
    name = url.database or ""
    if name.startswith("file:"):
        made_by_connecting = url.query.get("mode", "rwc") == "rwc" and not name.startswith("file://")
        name = unquote(name.removeprefix("file:")) if made_by_connecting else ""
    if name:
        with suppress(OSError):  # it exists, or SQLite says better what is wrong
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


_FILE = "outbox file"  # in what SQLAlchemy keeps about a connection: the path, and which file was there


def notice_replacement(engine: Engine) -> None:
    """Let no transaction begin or commit in a file that is not the one at its path any more, as after a restore.

    The connection is kept: a new one would find a log that is not its file's, or make a file where one is being put.
    """
    path = Path(engine.url.database or "").absolute()

    def opened(connection: object, record: Any) -> None:
        record.info[_FILE] = path, _identity(path)

    def check(connection: Connection) -> None:
        _check(*connection.info.get(_FILE, (path, None)))

    event.listen(engine, "connect", opened)
    event.listen(engine, "begin", check)
    event.listen(engine, "commit", check)


def _check(path: Path, known: tuple[int, int] | None) -> None:
    found = _identity(path)
    if known is not None and found != known:
        raise DatabaseReplaced(
            f"{path} is {'gone' if found is None else 'another file now'}: what is written to the one that was opened "
            "is lost. Start this process again. Before a database is restored, stop all processes and remove "
            "the files beside it that end in -wal and -shm"
        )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


# UPDATE … RETURNING came with 3.35.0; this is the oldest version that the tests have been run on.
OLDEST = (3, 35, 2)

BUSY_TIMEOUT = 30.0  # seconds that a connection of ours waits for its turn to write
READING = "outbox_reading"  # the option of a connection whose transaction only reads

_letting_go: set[asyncio.Task[None]] = set()


def check_version(found: tuple[int, ...] | None = None) -> None:
    """Refuse an older library at the start, where the first claim would fail at a word that it does not know."""
    found = found or sqlite3.sqlite_version_info
    if found < OLDEST:
        version, oldest = (".".join(map(str, numbers)) for numbers in (found, OLDEST))
        raise ConfigurationError(
            f"SQLite {version} is too old, and {oldest} or newer is needed: Python uses the library of its machine "
            "(sqlite3.sqlite_version), so take a newer system or image, or a Python that brings its own"
        )


def prepare(engine: Engine | AsyncEngine) -> None:
    """Make an engine's transactions safe: they take the write lock when they begin, wait for it, and release it.

    Without it SQLite refuses a transaction that read first as soon as another one has written, and SQLAlchemy's default
    opens none at all before a SELECT; and a session that is cancelled in a statement may keep the lock for a while.
    """
    target = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
    event.listen(target, "connect", _connect)
    if not in_memory(engine.url):
        notice_replacement(target)
    event.listen(target, "begin", begin)
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
    with suppress(sqlite3.OperationalError):  # another connection is writing: the next connection switches it on
        cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()


def any_text(value: bytes) -> str:
    """A text, whatever bytes another program wrote: over one that is not UTF-8 the driver gives up a whole result."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return UnreadableText(value, "utf-8", "backslashreplace")


def read_any_text(connection: Any, record: object) -> None:
    connection.text_factory = any_text


def _let_go(connection: Any, record: object, error: BaseException | None) -> None:
    """Roll back before a connection that was cut is closed.

    SQLite keeps a closed connection, and the write lock with it, until its last cursor is collected.
    """

    async def roll_back() -> None:
        with suppress(Exception):  # it is closed already
            await connection.driver_connection.rollback()

    with suppress(RuntimeError):  # no loop runs any more, hence no task was cancelled
        loop = asyncio.get_running_loop()
        _letting_go.add(task := loop.create_task(roll_back()))
        task.add_done_callback(_letting_go.discard)


def begin(connection: Connection) -> None:
    reading = connection.get_execution_options().get(READING, False)
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _refuse_what_would_be_alone(connection: Connection, *_: object) -> None:
    """SQLite has rolled back what came before: what comes now would be committed by itself."""
    if is_rolled_back(connection):
        raise nothing_is_kept(connection)


def begin_first(connection: Connection, name: str) -> None:
    """The driver begins with the first statement that writes; a savepoint before that would commit by its release."""
    if not is_open(connection.connection.driver_connection):
        connection.exec_driver_sql("BEGIN")


async def busy_timeout(engine: AsyncEngine) -> int:
    """For how many milliseconds an engine's connections wait for the write lock."""
    if event.contains(engine.sync_engine, "connect", _connect):
        return int(BUSY_TIMEOUT * 1000)
    async with engine.connect() as connection:
        return int((await connection.exec_driver_sql("PRAGMA busy_timeout")).scalar() or 0)
