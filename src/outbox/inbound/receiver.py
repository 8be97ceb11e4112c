"""Receiver: stores messages from outside in a queue, in the caller's own transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol, get_args

from sqlalchemy import Dialect, Executable

from outbox.core.attempt import Reason
from outbox.core.binding import check_name
from outbox.core.errors import ConfigurationError, MessageError, TransactionError
from outbox.core.events import Observer, Received
from outbox.core.message import Message, check, check_message_ids, check_times
from outbox.core.store import Rows, Store
from outbox.inbound.inbox import Memory

_UNWANTED = "no listener of a worker that takes messages from the database has the queue {queue!r}"

Unwanted = Literal["dead", "wait"]  # what becomes of a message whose queue no listener has


class Transaction(Protocol):
    """The caller's transaction, of which the message shares the fate."""

    @property
    def dialect(self) -> Dialect: ...

    def not_atomic(self, store: Store) -> str | None: ...

    def write(self, store: Store, statement: Executable, rows: Rows) -> int: ...

    def after_commit(self, action: Callable[[], None]) -> None: ...


class Receiver:
    """Enters a message in the inbox, and if it is new there, stores it in its queue."""

    def __init__(self, stores: Mapping[str, Store], memory: Memory, *, max_body_size: int, observe: Observer) -> None:
        self._stores = stores
        self._memory = memory
        self._max_body_size = max_body_size
        self._observe = observe

    def check(self, queue: str, message: Message, unwanted: str) -> None:
        """Refuse what cannot be stored before anything is written."""
        check_name(queue, "queue")
        if unwanted not in get_args(Unwanted):
            raise ConfigurationError(f"unwanted={unwanted!r}: one of {', '.join(map(repr, get_args(Unwanted)))}")
        if not isinstance(message, Message) or not isinstance(message.body, bytes):
            raise MessageError("receive() takes a Message whose body is bytes: Message(routing_key=…, body=…)")
        check(message, self._max_body_size)
        check_message_ids(message)
        check_times(message)

    def receive(self, transaction: Transaction, queue: str, message: Message, unwanted: Unwanted) -> bool:
        """Write it; False if it was there before."""
        store = self._stores[transaction.dialect.name]
        where = transaction.not_atomic(store)
        if where is not None:
            raise TransactionError(f"receive {where}: otherwise a message may be entered in the inbox and not stored")
        reception = store.writing.reception(queue, message)
        if not transaction.write(store, *reception.enter):
            self._observe(Received(queue, 0, duplicates=1))
            return False
        placing = reception.place if unwanted == "wait" else reception.place_if_bound
        received = Received(queue, 1)
        too_old = self._memory.refusal(message)
        if too_old is not None:
            transaction.write(store, *reception.bury(Reason.EXPIRED, str(too_old)))
            received = Received(queue, 0, expired=1)
        elif not transaction.write(store, *placing):
            transaction.write(store, *reception.bury(Reason.UNWANTED, _UNWANTED.format(queue=queue)))
            received = Received(queue, 0, unwanted=1)
        transaction.after_commit(lambda: self._stored(store, received))
        return True

    def _stored(self, store: Store, received: Received) -> None:
        store.queues.announce(received.queue)
        self._observe(received)
