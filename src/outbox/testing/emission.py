"""Emission: a message as a test speaks of it, and those that a transaction has emitted before it commits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from inspect import Parameter
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.orm import Session

from outbox.core import body as bodies
from outbox.core.durations import NO_DELAY, Eta, Seconds, as_due, as_lifetime
from outbox.core.errors import TransactionError
from outbox.core.message import Message
from outbox.outbound.emitter import SqlalchemyTransaction, WrittenMessages, awaited, transaction_of, written
from outbox.outbound.sessions import AnySession, CallersTransaction, PlainSession
from outbox.stores.rows import as_message
from outbox.testing.sql import sql_store

_MOST_IDS = 500  # in one statement

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
    """`emitted` for callers without an event loop."""
    return _emitted(transaction_of(session, awaits=False))


def _emitted(transaction: CallersTransaction) -> list[Emission]:
    if not isinstance(transaction, SqlalchemyTransaction):
        raise TransactionError("only SQLAlchemy's sessions and connections know what their transaction has emitted")
    connection = _connection(transaction.session)
    if connection is None:
        return []
    return [emission for writing in written(connection) for emission in _stored(connection, writing)]


def _connection(session: Session | Connection) -> Connection | None:
    """Where the transaction is open, if one is. A session that was joined into one may commit without ending it."""
    if isinstance(session, Connection):
        return session
    if session.in_transaction():
        return session.connection()
    return session.bind if isinstance(session.bind, Connection) else None


def _stored(connection: Connection, writing: WrittenMessages) -> Iterator[Emission]:
    """Those that are still there: a savepoint may have taken them back, and timers are cancelled."""
    schedule = writing.schedule
    messages = _messages(connection, writing)
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


def _messages(connection: Connection, writing: WrittenMessages) -> dict[str, Message]:
    store = sql_store(writing.store)
    table, connection = store.tables.messages, store.callers.on(connection)
    found: dict[str, Message] = {}
    for ids in _in_parts(writing.message_ids):
        # Not session.execute(): asking shall not flush.
        for row in connection.execute(select(table).where(table.c.message_id.in_(ids))):
            found[row.message_id] = as_message(row)
    return found


def _in_parts(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), _MOST_IDS):
        yield ids[start : start + _MOST_IDS]
