"""Written: what a transaction that is still open has emitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from sqlalchemy import Connection
from sqlalchemy.engine import Transaction

from outbox.core.message import Message, Schedule
from outbox.core.store import Store


@dataclass(frozen=True, slots=True)
class Writing:
    """One emit. Only the ids are held, because a transaction may emit more than fits in memory."""

    store: Store
    message_ids: tuple[str, ...]
    schedule: Schedule


_writings: WeakKeyDictionary[Transaction, list[Writing]] = WeakKeyDictionary()


def note(connection: Connection, store: Store, messages: Sequence[Message], schedule: Schedule) -> None:
    """Remember an emit for as long as its transaction lasts."""
    transaction = connection.get_transaction()
    if transaction is not None:
        writing = Writing(store, tuple(message.id for message in messages), schedule)
        _writings.setdefault(transaction, []).append(writing)


def written(connection: Connection) -> Sequence[Writing]:
    """The emits of the connection's transaction, those of savepoints that were rolled back included."""
    transaction = connection.get_transaction()
    return () if transaction is None else tuple(_writings.get(transaction, ()))
