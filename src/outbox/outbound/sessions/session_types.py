"""Connections: what a message can be emitted on, as a type checker sees it. None of these drivers need be installed."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session


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


class DjangoConnection(Protocol):
    """django.db.connection, or one of django.db.connections."""

    @property
    def vendor(self) -> str: ...

    @property
    def in_atomic_block(self) -> bool: ...

    def get_autocommit(self) -> bool: ...


PlainSession = (
    Session | Connection | scoped_session[Any] | PsycopgConnection | SqliteConnection | DjangoConnection
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
)
