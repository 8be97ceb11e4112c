"""Callers: the transaction of whoever emits, on any kind of session or connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Dialect, Executable
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.util import greenlet_spawn

from outbox.core.errors import TransactionError
from outbox.core.message import Message, Schedule
from outbox.core.one_connection import tied
from outbox.core.store import Rows, Store
from outbox.core.transaction_state import TransactionState
from outbox.outbound.commits import after_commit, guard
from outbox.outbound.drivers import DRIVERS
from outbox.outbound.written import note

Result = TypeVar("Result")

_NOT_ATOMIC = {
    TransactionState.AUTOCOMMIT: "on a connection in AUTOCOMMIT; use one with a transaction",
    TransactionState.RELEASED_BY_SAVEPOINT: (
        "in a SQLite transaction that began with a savepoint, whose release commits; call "
        "outbox.sqlite.prepare(engine) once for your engine"
    ),
}


class CallersTransaction(Protocol):
    """What a message is written into: somebody else's transaction, of which it shares the fate."""

    @property
    def dialect(self) -> Dialect: ...

    def not_atomic(self, store: Store) -> str | None:
        """Where nothing would be atomic, and what to do; none if a transaction is open or will be."""
        ...

    def write(self, store: Store, statement: Executable, rows: Rows) -> int:
        """Execute a store's statement; how many rows it wrote."""
        ...

    def note(self, store: Store, messages: Sequence[Message], schedule: Schedule) -> None:
        """Remember an emit for as long as the transaction lasts, if that can be known."""
        ...

    def after_commit(self, action: Callable[[], None]) -> None:
        """Call the action when the transaction has committed, if that can be known."""
        ...


class SessionTransaction:
    """The transaction of a session or connection of SQLAlchemy."""

    def __init__(self, session: Session | Connection) -> None:
        self.session = session

    @cached_property
    def _connection(self) -> Connection:
        # Not session.execute(): SQLAlchemy 2.1 would flush, and a flush is the caller's to decide.
        return tied(self.session, self.session.connection()) if isinstance(self.session, Session) else self.session

    @property
    def dialect(self) -> Dialect:
        return self._connection.dialect

    def not_atomic(self, store: Store) -> str | None:
        return _NOT_ATOMIC.get(store.state_of(self._connection))

    def write(self, store: Store, statement: Executable, rows: Rows) -> int:
        aborted = store.aborted(self._connection)
        if aborted is not None:
            raise aborted
        guard(self.session, store.aborted)
        return store.write(self._connection, statement, rows)

    def note(self, store: Store, messages: Sequence[Message], schedule: Schedule) -> None:
        note(self._connection, store, messages, schedule)

    def after_commit(self, action: Callable[[], None]) -> None:
        after_commit(self.session, action)


@dataclass(frozen=True, slots=True)
class Kind:
    """How one type of session or connection leads to the caller's transaction."""

    open: Callable[[Any], CallersTransaction]
    needs_loop: bool = False
    blocks_loop: bool = False


_KINDS: dict[type, Kind] = {
    AsyncSession: Kind(lambda session: SessionTransaction(session.sync_session), needs_loop=True),
    AsyncConnection: Kind(lambda connection: SessionTransaction(_started(connection)), needs_loop=True),
    async_scoped_session: Kind(lambda registry: SessionTransaction(registry().sync_session), needs_loop=True),
    Session: Kind(SessionTransaction),
    Connection: Kind(SessionTransaction),
    scoped_session: Kind(lambda registry: SessionTransaction(registry())),
}
_DRIVERS: dict[str, Kind] = {
    name: Kind(driver, driver.needs_loop, not driver.needs_loop) for driver in DRIVERS for name in driver.types
}
_known: WeakKeyDictionary[type, Kind] = WeakKeyDictionary(_KINDS)  # and the subclasses that were met


async def awaited(session: object, work: Callable[..., Result], *arguments: object) -> Result:
    """Run work in the transaction of a caller that awaits."""
    kind = _kind(session)
    if kind.blocks_loop:
        raise TransactionError(f"{_name(session)} would block the event loop: use emit_sync(…) or receive_sync(…)")
    if kind.needs_loop:
        return await greenlet_spawn(_run, kind, session, work, arguments)
    return _run(kind, session, work, arguments)


def at_once(session: object, work: Callable[..., Result], *arguments: object) -> Result:
    """Run work in the transaction of a caller without an event loop."""
    kind = _kind(session)
    if kind.needs_loop:
        raise TransactionError(f"{_name(session)} needs the event loop: use `await emit(…)` or `await receive(…)`")
    return _run(kind, session, work, arguments)


def plain_session(session: object) -> Session:
    """SQLAlchemy's plain session behind the one that a caller has."""
    transaction = _kind(session).open(session)
    if isinstance(transaction, SessionTransaction) and isinstance(transaction.session, Session):
        return transaction.session
    raise TransactionError(
        f"{_name(session)} tells nobody of its commit: pass the AsyncSession or Session that holds the transaction, or "
        "do it behind the commit"
    )


def _run(kind: Kind, session: object, work: Callable[..., Result], arguments: tuple[object, ...]) -> Result:
    return work(kind.open(session), *arguments)


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
