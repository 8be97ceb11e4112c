"""Inbox: the table of (queue, message id) that makes a listener's database effects happen once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from outbox.core.durations import Retention, in_words
from outbox.core.errors import LeaseLost, MessageIdInvalid, Undecodable
from outbox.core.message import Message, check_message_ids
from outbox.core.roles import Setback
from outbox.core.store import Store
from outbox.core.transport import Delivery

LEASE_LOST_PAUSE = timedelta(seconds=5)  # if the lease holds after all, something hides the row from its listener


class AlreadyHandled(Exception):
    """The message was already handled: nothing is to be done."""


class NotStarted(Exception):
    """The listener was not called: its session has no connection, or no entry can be made. It is no attempt."""


class CommitUnknown(Exception):
    """The connection was lost around COMMIT. Whether it committed is known when the message comes again."""


class TooOld(Exception):
    """The message is older than inbox entries become: it is not known whether it was handled."""


@contextmanager
def committing() -> Iterator[None]:
    """Around the COMMIT of a listener's transaction: only an answer of the database is an answer."""
    try:
        yield
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
        raise CommitUnknown("the connection was lost around COMMIT") from error
    except OSError as error:
        raise CommitUnknown("the connection was lost around COMMIT") from error


class Memory:
    """For how long entries are kept, and whose may be gone."""

    def __init__(self, retention: Retention) -> None:
        self._retention = retention if isinstance(retention, timedelta) else None

    def refusal(self, message: Message) -> TooOld | None:
        """Why it cannot be told whether a message is new, if the entry of an earlier copy may be gone already."""
        if self._retention is None or (message.due_at or message.created_at) >= datetime.now(UTC) - self._retention:
            return None
        return TooOld(
            f"it is older than inbox_retention={in_words(self._retention)}: it is not known whether it was handled; "
            "replay it if it was not"
        )


class Inbox:
    """Ties a delivery's end to the listener's transaction."""

    def __init__(self, store: Store, memory: Memory, queue: str, *, also: str | None = None) -> None:
        self._store = store
        self._memory = memory
        self._queue = queue  # as its destination calls it: two services may each have one that a listener calls alike
        self._also = also  # what the listener calls it, if that is something else: entries of that name count too

    def refusal(self, message: Message) -> TooOld | Undecodable | None:
        """Why there can be no entry for a message, if there cannot."""
        too_old = self._memory.refusal(message)
        if too_old is not None:
            return too_old
        try:
            check_message_ids(message)
        except MessageIdInvalid as error:
            return Undecodable(str(error))
        return None

    @contextmanager
    def entered(self, connection: Connection, queue: str, delivery: Delivery) -> Iterator[None]:
        """Around the listener, inside its transaction: it commits with the delivery's end, or not at all.

        A transport that completes deliveries in the database needs no entry: its delivery ends with the transaction.
        Everywhere else the entry comes first, so that of two copies one waits for the other and then skips.
        """
        completion = delivery.completion()
        if completion is None:
            refusal = self.refusal(delivery.attempt.message)
            if refusal is not None:
                raise refusal
            entry = self._store.inbox.remember(self._queue, delivery.attempt.message.id, also=self._also)
            with self._entering(queue):
                is_new = self._store.writing.write(connection, *entry)
            if not is_new:
                raise AlreadyHandled
            yield
        else:
            yield
            if self._store.writing.write(connection, *completion) != 1:
                raise LeaseLost(
                    f"{queue}: the lease on {delivery.attempt.message.id} ran out before its work committed"
                )

    @contextmanager
    def _entering(self, queue: str) -> Iterator[None]:
        """Around the writing of entries: without them no listener is called."""
        try:
            yield
        except Exception as error:
            if self._store.transactions.setback(error) is Setback.CONFLICT:
                raise  # a copy was handled since this transaction's snapshot: the next run sees it
            raise NotStarted(f"no inbox for {queue}") from error
