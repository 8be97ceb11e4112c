"""Lookup: which transaction belongs to what a caller passes as its session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from outbox.core.errors import TransactionError
from outbox.outbound.sessions.driver_transactions import DRIVERS
from outbox.outbound.sessions.transaction import CallersTransaction, SqlalchemyTransaction


@dataclass(frozen=True, slots=True)
class Kind:
    """How one type of session or connection leads to the caller's transaction."""

    open: Callable[[Any], CallersTransaction]
    needs_loop: bool = False
    blocks_loop: bool = False


def _awaiting(session: Session | Connection) -> SqlalchemyTransaction:
    return SqlalchemyTransaction(session, needs_loop=True)


_KINDS: dict[type, Kind] = {
    AsyncSession: Kind(lambda session: _awaiting(session.sync_session), needs_loop=True),
    AsyncConnection: Kind(lambda connection: _awaiting(_started(connection)), needs_loop=True),
    async_scoped_session: Kind(lambda registry: _awaiting(registry().sync_session), needs_loop=True),
    Session: Kind(SqlalchemyTransaction),
    Connection: Kind(SqlalchemyTransaction),
    scoped_session: Kind(lambda registry: SqlalchemyTransaction(registry())),
}
_DRIVERS: dict[str, Kind] = {
    name: Kind(driver, driver.needs_loop, not driver.needs_loop) for driver in DRIVERS for name in driver.types
}
_known: WeakKeyDictionary[type, Kind] = WeakKeyDictionary(_KINDS)  # and the subclasses that were met


def transaction_of(session: object, *, awaits: bool) -> CallersTransaction:
    """The transaction on a session or connection, of a caller that awaits or has no event loop."""
    kind = _kind(session)
    if awaits and kind.blocks_loop:
        raise TransactionError(f"{_name(session)} would block the event loop: use emit_sync(…) or receive_sync(…)")
    if not awaits and kind.needs_loop:
        raise TransactionError(f"{_name(session)} needs the event loop: use `await emit(…)` or `await receive(…)`")
    return kind.open(session)


def plain_session(session: object) -> Session:
    """SQLAlchemy's plain session behind the one that a caller has."""
    transaction = _kind(session).open(session)
    if isinstance(transaction, SqlalchemyTransaction) and isinstance(transaction.session, Session):
        return transaction.session
    raise TransactionError(
        f"{_name(session)} tells nobody of its commit: pass the AsyncSession or Session that holds the transaction, or "
        "do it behind the commit"
    )


def _kind(session: object) -> Kind:
    kind = _known.get(type(session))
    if kind is None:
        kind = _find(session)
        if session.__class__ is type(session):  # a proxy may stand for something else next time
            _known[type(session)] = kind
    return kind


def _find(session: object) -> Kind:
    for each in session.__class__.__mro__:
        kind = _KINDS.get(each) or _DRIVERS.get(f"{each.__module__}.{each.__qualname__}")
        if kind is not None:
            return kind
    raise TransactionError(
        f"cannot emit on {type(session).__name__!r}: pass the AsyncSession, Session, AsyncConnection or Connection of "
        "SQLAlchemy, or the connection of asyncpg, psycopg, sqlite3, aiosqlite or Django, that holds the transaction"
    )


def _started(connection: AsyncConnection) -> Connection:
    if connection.sync_connection is None:
        raise TransactionError("the AsyncConnection is not open: await it, or use it in `async with`")
    return connection.sync_connection


def _name(session: object) -> str:
    kind = type(session)
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
