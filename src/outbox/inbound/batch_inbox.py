"""BatchInbox: the inbox for a list of messages, in one statement before the listener or one after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection

from outbox.core.errors import LeaseLost
from outbox.core.transport import Delivery
from outbox.inbound.batches import Part, Together
from outbox.inbound.inbox import Handled, Inbox, NotStarted


class Apart(Exception):
    """Some of a list have an end of their own, by this error. The others are to be called again without them."""

    def __init__(self, error: Exception, parts: Sequence[Part]) -> None:
        super().__init__(str(error))
        self.error = error
        self.parts = parts


class BatchInbox(Inbox):
    """Ties the ends of many deliveries to the one transaction of their listener."""

    @contextmanager
    def entered(self, connection: Connection, queue: str, delivery: Delivery) -> Iterator[None]:
        assert isinstance(delivery, Together)  # noqa: S101 - nobody else calls with this inbox
        if delivery.is_under_leases:
            yield
            self._complete(connection, queue, delivery)
        else:
            self._check_ages(delivery.parts)
            self._enter(connection, queue, delivery)
            yield
            failed = [id for position, id in enumerate(delivery.message_ids) if position in delivery.failures]
            if failed:
                self._store.forget(connection, queue, failed)

    def _check_ages(self, parts: Sequence[Part]) -> None:
        old = [part for part in parts if self.is_too_old(part.delivery.attempt.message)]
        if old:
            raise Apart(self.too_old(), old)

    def _enter(self, connection: Connection, queue: str, together: Together) -> None:
        """Enter all of them; those that were handled before are not for the listener."""
        try:
            new = self._store.remember_all(connection, queue, together.message_ids)
        except Exception as error:
            raise NotStarted(f"no inbox for {queue}") from error
        if not new:
            raise Handled
        together.parts = [part for part in together.parts if part.delivery.attempt.message.id in new]

    def _complete(self, connection: Connection, queue: str, together: Together) -> None:
        ending = [lease for position, lease in enumerate(together.leases) if position not in together.failures]
        lost = {lease.id for lease in ending} - (self._store.complete(connection, ending) if ending else set())
        if lost:
            parts = [part for part in together.parts if part.delivery.attempt.id in lost]
            raise Apart(LeaseLost(f"{queue}: {len(lost)} leases ran out before their work committed"), parts)
