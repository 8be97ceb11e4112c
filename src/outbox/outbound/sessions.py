"""Sessions: what a message can be emitted on, and what the caller's transaction there is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import Connection, Dialect, Executable
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from outbox.core.message import Message, Schedule
from outbox.core.store import Rows, Store


class AsyncpgConnection(Protocol):
    """A connection of asyncpg, or one that its pool lent."""

    def is_in_transaction(self) -> bool: ...

    def transaction(self) -> Any: ...


class AsyncPsycopgConnection(Protocol):
    """psycopg.AsyncConnection."""

    @property
    def autocommit(self) -> bool: ...

    @property
    def pgconn(self) -> Any: ...

    def commit(self) -> Awaitable[None]: ...


class PsycopgConnection(Protocol):
    """psycopg.Connection."""

    @property
    def autocommit(self) -> bool: ...

    @property
    def pgconn(self) -> Any: ...

    def commit(self) -> None: ...


class AiosqliteConnection(Protocol):
    """aiosqlite.Connection."""

    @property
    def in_transaction(self) -> bool: ...

    @property
    def isolation_level(self) -> str | None: ...

    def commit(self) -> Awaitable[None]: ...


class SqliteConnection(Protocol):
    """sqlite3.Connection."""

    @property
    def in_transaction(self) -> bool: ...

    @property
    def isolation_level(self) -> str | None: ...

    def commit(self) -> None: ...


class AsyncmyConnection(Protocol):
    """asyncmy.Connection, or one that its pool lent."""

    def get_transaction_status(self) -> bool: ...

    def get_autocommit(self) -> bool: ...

    def commit(self) -> Awaitable[None]: ...


class MysqlConnection(Protocol):
    """A connection of pymysql or mysqlclient."""

    def get_autocommit(self) -> bool: ...

    def insert_id(self) -> int: ...

    def commit(self) -> None: ...


class DjangoConnection(Protocol):
    """django.db.connection, or one of django.db.connections."""

    @property
    def vendor(self) -> str: ...

    @property
    def in_atomic_block(self) -> bool: ...

    def get_autocommit(self) -> bool: ...


PlainSession = (
    Session
    | Connection
    | scoped_session[Any]
    | PsycopgConnection
    | SqliteConnection
    | MysqlConnection
    | DjangoConnection
)  # for code without an event loop
AnySession = (
    AsyncSession
    | AsyncConnection
    | async_scoped_session[Any]
    | Session
    | Connection
    | scoped_session[Any]
    | AsyncpgConnection
    | AsyncPsycopgConnection
    | AiosqliteConnection
    | AsyncmyConnection
)


@dataclass(frozen=True, slots=True)
class WrittenMessages:
    """One emit. Only the ids are held, because a transaction may emit more than fits in memory."""

    store: Store
    message_ids: tuple[str, ...]
    schedule: Schedule

    def __call__(self) -> None:
        """After the commit: wake relays and workers."""
        self.store.queues.announce(None)


class CallersTransaction(ABC):
    """A transaction of the caller's. Nothing here flushes it, commits it, or begins one of its own."""

    needs_loop: bool  # its statements are awaited

    @property
    @abstractmethod
    def dialect(self) -> Dialect:
        """The dialect of its database; asking opens no connection."""

    @abstractmethod
    def emit(self, store: Store, messages: Sequence[Message], schedule: Schedule) -> bool:
        """Write messages; False if the timer already waits."""

    @abstractmethod
    def cancel(self, store: Store, timer_id: str) -> bool:
        """Delete the timer if it still waits; says whether it did."""

    @abstractmethod
    def not_atomic(self, store: Store) -> str | None:
        """Where nothing would be atomic, and what to do; none if a transaction is open or will be."""

    @abstractmethod
    def write(self, store: Store, statement: Executable, rows: Rows) -> int:
        """Execute a store's statement; how many rows it wrote."""

    @abstractmethod
    def after_commit(self, action: Callable[[], None]) -> None:
        """Call the action when the transaction has committed, if that can be known."""
