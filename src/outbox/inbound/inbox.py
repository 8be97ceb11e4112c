"""Inbox: the table of (queue, message id) that makes a listener's database effects happen once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from outbox.core.errors import LeaseLost
from outbox.core.store import Store
from outbox.core.transport import Delivery


class Handled(Exception):
    """The message was already handled: nothing is to be done."""


class NotStarted(Exception):
    """The listener was not called: its session has no connection, or no entry can be made. Nobody's attempt."""


class Inbox:
    """Ties a delivery's end to the listener's transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @contextmanager
    def entered(self, connection: Connection, queue: str, delivery: Delivery) -> Iterator[None]:
        """Around the listener, inside its transaction: it commits with the delivery's end, or not at all.

        A transport that completes deliveries in the database needs no entry: its delivery ends with the transaction.
        Everywhere else the entry comes first, so that of two copies one waits for the other and then skips.
        """
        completion = delivery.completion()
        if completion is None:
            entry = self._store.remember(queue, delivery.attempt.message.id)
            try:
                is_new = self._store.write(connection, entry)
            except Exception as error:
                if self._store.is_conflict(error):
                    raise  # a copy was handled since this transaction's snapshot: the next run sees it
                raise NotStarted(f"no inbox for {queue}") from error
            if not is_new:
                raise Handled
            yield
        else:
            yield
            if connection.execute(completion).rowcount != 1:
                raise LeaseLost(
                    f"{queue}: the lease on {delivery.attempt.message.id} ran out before its work committed"
                )
