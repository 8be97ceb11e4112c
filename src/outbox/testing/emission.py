"""Emission: a message as a test speaks of it, and those that a transaction has emitted before it commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from inspect import Parameter
from typing import Any

from sqlalchemy import Connection, Select, select
from sqlalchemy.orm import Session

from outbox.core import body as bodies
from outbox.core.durations import NO_DELAY, Eta, Seconds, as_due, as_lifetime
from outbox.core.errors import TransactionError
from outbox.core.message import Message
from outbox.outbound.drivers import DjangoTransaction
from outbox.outbound.emitter import SqlalchemyTransaction, awaited, transaction_of, written
from outbox.outbound.sessions import AnySession, CallersTransaction, PlainSession, WrittenMessages
from outbox.stores.rows import as_message
from outbox.stores.sql import SqlStore
from outbox.testing import on_django
from outbox.testing.sql import sql_store

_MOST_IDS = 500  # in one statement

ReadRows = Callable[[SqlStore, Select[Any]], Iterable[Any]]  # executes a SELECT in the transaction

_decode = bodies.decoder(Parameter.empty)


@dataclass(frozen=True, slots=True)
class Emission:
    """What `emit` was given, in one spelling.

    A body is what a listener without an annotation would get: `Order(id=1)` and `{"id": 1}` are the same. A delay is a
    timedelta, and `eta=60_000` is a minute.
    """

    routing_key: str
    body: Any
    _: KW_ONLY
    key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    eta: Eta | None = None
    expiration: Seconds | None = None
    timer_id: str | None = None
    content_type: str = ""  # default: that of the body
    message: Message | None = field(default=None, repr=False, compare=False)  # with its id and tracking ids

    def __post_init__(self) -> None:
        body, content_type = bodies.encode(self.body, self.routing_key)
        due = as_due(self.eta)
        self._set("body", _decode(body))
        self._set("content_type", self.content_type or content_type)
        self._set("headers", dict(self.headers))
        self._set("eta", None if due == NO_DELAY else due)
        self._set("expiration", None if self.expiration is None else as_lifetime(self.expiration))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


async def emitted(session: AnySession) -> list[Emission]:
    """What the session's open transaction has emitted so far, in this order. Nothing after its commit or rollback."""
    transaction = transaction_of(session, awaits=True)
    return await awaited(transaction, _emitted, transaction)


def emitted_sync(session: PlainSession) -> list[Emission]:
    """`emitted` for callers without an event loop: on SQLAlchemy's sessions and connections, and on Django's."""
    return _emitted(transaction_of(session, awaits=False))


def _emitted(transaction: CallersTransaction) -> list[Emission]:
    if isinstance(transaction, DjangoTransaction):
        connection, dialect = transaction.connection, transaction.dialect
        return _stored(
            on_django.written(connection), lambda store, statement: on_django.rows(connection, dialect, statement)
        )
    if not isinstance(transaction, SqlalchemyTransaction):
        raise TransactionError("only SQLAlchemy's sessions and connections, and Django's, know what they have emitted")
    opened = _connection(transaction.session)
    if opened is None:
        return []
    # Not session.execute(): asking shall not flush.
    return _stored(written(opened), lambda store, statement: store.callers.on(opened).execute(statement))


def _connection(session: Session | Connection) -> Connection | None:
    """Where the transaction is open, if one is. A session that was joined into one may commit without ending it."""
    if isinstance(session, Connection):
        return session
    if session.in_transaction():
        return session.connection()
    return session.bind if isinstance(session.bind, Connection) else None


def _stored(writings: Sequence[WrittenMessages], rows: ReadRows) -> list[Emission]:
    """Those that are still there: a savepoint may have taken them back, and timers are cancelled."""
    return [emission for writing in writings for emission in _emissions(writing, rows)]


def _emissions(writing: WrittenMessages, rows: ReadRows) -> Iterator[Emission]:
    schedule = writing.schedule
    messages = _messages(writing, rows)
    for message_id in writing.message_ids:
        message = messages.get(message_id)
        if message is not None:
            yield Emission(
                message.routing_key,
                message.body,
                key=message.key,
                headers=message.headers,
                eta=schedule.due,
                expiration=schedule.expiration,
                timer_id=schedule.timer_id,
                content_type=message.content_type,
                message=message,
            )


def _messages(writing: WrittenMessages, rows: ReadRows) -> dict[str, Message]:
    store = sql_store(writing.store)
    table = store.tables.messages
    found: dict[str, Message] = {}
    for ids in _in_parts(writing.message_ids):
        for row in rows(store, select(table).where(table.c.message_id.in_(ids))):
            found[row.message_id] = as_message(row)
    return found


def _in_parts(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), _MOST_IDS):
        yield ids[start : start + _MOST_IDS]
