"""Engines for SQLite whose transactions are safe: they take the write lock when they begin, and wait for it."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import suppress
from typing import Any

from sqlalchemy import URL, Connection, Engine, event
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.stores.failures import nothing_is_kept
from outbox.stores.rows import UnreadableText
from outbox.stores.sqlite import state
from outbox.stores.sqlite.files import notice_replacement

BUSY_TIMEOUT = 30.0  # seconds that a connection of ours waits for its turn to write
READING = "outbox_reading"  # the option of a connection whose transaction only reads

_letting_go: set[asyncio.Task[None]] = set()


def prepare(engine: Engine | AsyncEngine) -> None:
    """Make an engine's transactions safe: they take the write lock when they begin, wait for their turn, and let go.

    Without it SQLite refuses a transaction that read first as soon as somebody else wrote, and SQLAlchemy's default
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
    with suppress(sqlite3.OperationalError):  # somebody writes at this moment: the next connection switches it on
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

    with suppress(RuntimeError):  # no loop runs any more, hence nobody was cancelled
        loop = asyncio.get_running_loop()
        _letting_go.add(task := loop.create_task(roll_back()))
        task.add_done_callback(_letting_go.discard)


def begin(connection: Connection) -> None:
    reading = connection.get_execution_options().get(READING, False)
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _refuse_what_would_be_alone(connection: Connection, *_: object) -> None:
    """SQLite has rolled back what came before: what comes now would be committed by itself."""
    if state.is_rolled_back(connection):
        raise nothing_is_kept(connection)


def begin_first(connection: Connection, name: str) -> None:
    """The driver begins with the first statement that writes; a savepoint before that would commit by its release."""
    if not state.is_open(connection.connection.driver_connection):
        connection.exec_driver_sql("BEGIN")


async def busy_timeout(engine: AsyncEngine) -> int:
    """For how many milliseconds an engine's connections wait for their turn."""
    if event.contains(engine.sync_engine, "connect", _connect):
        return int(BUSY_TIMEOUT * 1000)
    async with engine.connect() as connection:
        return int((await connection.exec_driver_sql("PRAGMA busy_timeout")).scalar() or 0)
