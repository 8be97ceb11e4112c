"""Emitter: writes messages in the caller's own transaction, on whatever session or connection that is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Dialect, Executable
from sqlalchemy.engine import Transaction
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.util import greenlet_spawn

from outbox.core import body as bodies
from outbox.core.cloudevents import SOURCE
from outbox.core.durations import LATEST, NO_DELAY, Eta, Seconds, as_due, as_lifetime
from outbox.core.errors import HeaderInvalid, TimeInvalid, TransactionError
from outbox.core.events import Emitted, Observer
from outbox.core.headers import is_reserved
from outbox.core.message import Message, Schedule, check, check_timer_id, is_media_type
from outbox.core.store import Rows, Store
from outbox.core.transaction_state import NOT_ATOMIC, tied
from outbox.core.urls import check_uri_reference
from outbox.outbound.after_commit import after_commit, committing, guard
from outbox.outbound.drivers import DRIVERS
from outbox.outbound.sessions import AnySession, CallersTransaction, PlainSession, WrittenMessages

Result = TypeVar("Result")


class SqlalchemyTransaction(CallersTransaction):
    """The one that is open there, or that its next statement opens."""

    def __init__(self, session: Session | Connection, *, needs_loop: bool = False) -> None:
        self.session = session
        self.needs_loop = needs_loop
        self._connection: Connection | None = None

    @property
    def dialect(self) -> Dialect:
        return self.session.get_bind().dialect if isinstance(self.session, Session) else self.session.dialect

    def emit(self, store: Store, messages: Sequence[Message], schedule: Schedule) -> bool:
        connection = self._connect()
        waiting = committing(self.session, store.transactions.aborted)
        if not store.writing.emit(connection, messages, schedule):
            return False
        transaction = connection.get_transaction()
        if transaction is not None:
            emitted = WrittenMessages(store, tuple(message.id for message in messages), schedule)
            _written.setdefault(transaction, []).append(emitted)
        waiting.actions.append(partial(store.queues.announce, None))
        return True

    def cancel(self, store: Store, timer_id: str) -> bool:
        connection = self._connect()
        guard(self.session, store.transactions.aborted)
        return store.writing.cancel_timer(connection, timer_id)

    def not_atomic(self, store: Store) -> str | None:
        return NOT_ATOMIC.get(store.transactions.state_of(self._connection or self._connect()))

    def write(self, store: Store, statement: Executable, rows: Rows) -> int:
        connection = self._connection or self._connect()
        aborted = store.transactions.aborted(connection)
        if aborted is not None:
            raise aborted
        guard(self.session, store.transactions.aborted)
        return store.writing.write(connection, statement, rows)

    def _connect(self) -> Connection:
        """The session's connection, for which its pool may have to be waited for."""
        # Not session.execute(): SQLAlchemy 2.1 would flush, and a flush is the caller's to decide.
        session = self.session
        self._connection = tied(session, session.connection()) if isinstance(session, Session) else session
        return self._connection

    def after_commit(self, action: Callable[[], None]) -> None:
        after_commit(self.session, action)


# For tests: what a transaction that is still open has emitted.

_written: WeakKeyDictionary[Transaction, list[WrittenMessages]] = WeakKeyDictionary()


def written(connection: Connection) -> Sequence[WrittenMessages]:
    """The emits of the connection's transaction, those of savepoints that were rolled back included."""
    transaction = connection.get_transaction()
    return () if transaction is None else tuple(_written.get(transaction, ()))


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
_known_kinds: WeakKeyDictionary[type, Kind] = WeakKeyDictionary(_KINDS)  # and the subclasses that were met


def transaction_of(session: object, *, awaits: bool) -> CallersTransaction:
    """The transaction on a session or connection, of a caller that awaits or has no event loop."""
    kind = _kind(session)
    if awaits and kind.blocks_loop:
        raise TransactionError(f"{_name(session)} would block the event loop: use emit_sync(…) or receive_sync(…)")
    if not awaits and kind.needs_loop:
        raise TransactionError(f"{_name(session)} needs the event loop: use `await emit(…)` or `await receive(…)`")
    return kind.open(session)


def awaited(transaction: CallersTransaction, work: Callable[..., Result], *arguments: object) -> Awaitable[Result]:
    """Run plain code that uses a transaction, for a caller that awaits."""
    if transaction.needs_loop:
        return greenlet_spawn(work, *arguments)
    return _done(work(*arguments))


async def _done(result: Result) -> Result:
    return result


def plain_session(session: object) -> Session:
    """SQLAlchemy's plain session behind the one that a caller has."""
    transaction = _kind(session).open(session)
    if isinstance(transaction, SqlalchemyTransaction) and isinstance(transaction.session, Session):
        return transaction.session
    raise TransactionError(
        f"{_name(session)} does not show its commit: pass the AsyncSession or Session that holds the transaction, or "
        "do it behind the commit"
    )


def _kind(session: object) -> Kind:
    kind = _known_kinds.get(type(session))
    if kind is None:
        kind = _find(session)
        if session.__class__ is type(session):  # a proxy may stand for something else next time
            _known_kinds[type(session)] = kind
    return kind


def _find(session: object) -> Kind:
    for each in session.__class__.__mro__:
        kind = _KINDS.get(each) or _DRIVERS.get(f"{each.__module__}.{each.__qualname__}")
        if kind is not None:
            return kind
    raise TransactionError(
        f"cannot emit on {type(session).__name__!r}: pass the AsyncSession, Session, AsyncConnection or Connection of "
        "SQLAlchemy, or the connection of asyncpg, psycopg, sqlite3, aiosqlite, asyncmy, pymysql, mysqlclient or "
        "Django, that holds the transaction"
    )


def _started(connection: AsyncConnection) -> Connection:
    if connection.sync_connection is None:
        raise TransactionError("the AsyncConnection is not open: await it, or use it in `async with`")
    return connection.sync_connection


def _name(session: object) -> str:
    kind = type(session)
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


Key = str | Callable[[Any], str] | None


class Emitter:
    """Makes messages from the arguments of callers, and writes them to the store of the caller's database."""

    def __init__(
        self,
        stores: Mapping[str, Store],  # by the name of a dialect
        *,
        expiration: timedelta | None,
        max_body_size: int,
        observe: Observer,
    ) -> None:
        self._stores = stores
        self._expiration = expiration
        self._max_body_size = max_body_size
        self._observe = observe

    def message(
        self,
        routing_key: str,
        body: object,
        key: Key,
        headers: Mapping[str, str] | None,
        content_type: str | None,
        source: str | None,
    ) -> Message:
        """A checked message."""
        encoded, default_type = bodies.encode(body, routing_key)
        message = Message(
            routing_key=routing_key,
            body=encoded,
            content_type=content_type or default_type,
            headers=_as_headers(headers, source),
            key=key(body) if callable(key) else key,
        )
        check(message, self._max_body_size)
        if content_type:
            _check_media_type(content_type)
        _check_names(message.headers)
        return message

    def schedule(self, eta: Eta | None, expiration: Seconds | None, timer_id: str | None) -> Schedule:
        """When a message is due and until when it is worth delivering."""
        if timer_id is not None:
            check_timer_id(timer_id)
        lifetime = self._expiration if expiration is None else as_lifetime(expiration)
        due = NO_DELAY if eta is None else as_due(eta)
        if isinstance(due, datetime) and lifetime is not None and lifetime >= LATEST - due:
            raise TimeInvalid(f"expiration ends too late, in the year {LATEST.year} or after: {lifetime} from {due}")
        return Schedule(due=due, expiration=lifetime, timer_id=timer_id)

    async def write(self, session: AnySession, messages: list[Message], schedule: Schedule) -> bool:
        """Write messages; False if the timer already waits."""
        transaction = transaction_of(session, awaits=True)
        if not messages:
            return True
        store = self._stores[transaction.dialect.name]
        written = await awaited(transaction, transaction.emit, store, messages, schedule)
        if written:
            self._observe(Emitted(messages))
        return written

    def write_now(self, session: PlainSession, messages: list[Message], schedule: Schedule) -> bool:
        """The same for a caller without an event loop."""
        transaction = transaction_of(session, awaits=False)
        if not messages:
            return True
        written = transaction.emit(self._stores[transaction.dialect.name], messages, schedule)
        if written:
            self._observe(Emitted(messages))
        return written

    async def cancel(self, session: AnySession, timer_id: str) -> bool:
        """Delete the timer if it still waits; says whether it did."""
        check_timer_id(timer_id)
        transaction = transaction_of(session, awaits=True)
        return await awaited(transaction, transaction.cancel, self._stores[transaction.dialect.name], timer_id)

    def cancel_now(self, session: PlainSession, timer_id: str) -> bool:
        """The same for a caller without an event loop."""
        check_timer_id(timer_id)
        transaction = transaction_of(session, awaits=False)
        return transaction.cancel(self._stores[transaction.dialect.name], timer_id)


def _as_headers(headers: Mapping[str, str] | None, source: str | None) -> dict[str, str]:
    if headers is not None and not isinstance(headers, Mapping):
        raise HeaderInvalid(f"headers are a mapping of names to values, not {type(headers).__name__}")
    found = dict(headers or {})
    if source is None:
        return found
    if source == "" or found.get(SOURCE, source) != source:
        raise HeaderInvalid(f"source is not empty, and the header {SOURCE!r} is the same thing: give one of them")
    return {**found, SOURCE: source}


def _check_media_type(content_type: str) -> None:
    """Only of what is emitted: a broker's messages from elsewhere are taken as they are."""
    if not is_media_type(content_type):
        raise HeaderInvalid(f"content type {content_type!r} is no media type: write for example 'text/plain'")


def _check_names(headers: Mapping[str, str]) -> None:
    """Refuse what only a message from outside may be called: RabbitMQ would not take it from us."""
    for name in headers:
        if is_reserved(name):
            raise HeaderInvalid(
                f"header name {name!r} has a meaning of its own: CC, BCC and what begins with outbox- or x-opt- is "
                "reserved, and so are x-outbox-tracking-ids, x-original-routing-key and what RabbitMQ writes itself; "
                "give yours another name"
            )
    if SOURCE in headers:
        check_uri_reference(headers[SOURCE], "source", HeaderInvalid)
