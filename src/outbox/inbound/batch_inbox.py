"""BatchInbox: the inbox for a list of messages, in one statement before the listener or one after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection

from outbox.core.errors import LeaseLost
from outbox.core.transport import Delivery
from outbox.inbound.batches import Part, Together
from outbox.inbound.inbox import AlreadyHandled, Inbox


class Apart(Exception):
    """Some of a list have an end of their own, each by its error. The others are to be called again without them."""

    def __init__(self, errors: Mapping[Part, Exception]) -> None:
        super().__init__(f"{len(errors)} of a list end by themselves")
        self.errors = errors


class BatchInbox(Inbox):
    """Ties the ends of many deliveries to the one transaction of their listener."""

    @contextmanager
    def entered(self, connection: Connection, queue: str, delivery: Delivery) -> Iterator[None]:
        assert isinstance(delivery, Together)  # noqa: S101 - only batches are called with this inbox
        if delivery.is_under_leases:
            yield
            self._complete(connection, queue, delivery)
        else:
            self._refuse(delivery.parts)
            self._enter(connection, queue, delivery)
            yield
            failed = [id for position, id in enumerate(delivery.message_ids) if position in delivery.failures]
            if failed:
                self._store.inbox.forget(connection, self._queue, failed)

    def _refuse(self, parts: Sequence[Part]) -> None:
        """Take out those that cannot be entered."""
        refusals = {part: self.refusal(part.delivery.attempt.message) for part in parts}
        errors = {part: refusal for part, refusal in refusals.items() if refusal is not None}
        if errors:
            raise Apart(errors)

    def _enter(self, connection: Connection, queue: str, together: Together) -> None:
        """Enter all of them; those that were handled before are not for the listener."""
        with self._entering(queue):
            ids = together.message_ids
            new = self._store.inbox.remember_all(connection, self._queue, ids, also=self._also)
        if not new:
            raise AlreadyHandled
        together.parts = [part for part in together.parts if part.delivery.attempt.message.id in new]

    def _complete(self, connection: Connection, queue: str, together: Together) -> None:
        ending = [lease for position, lease in enumerate(together.leases) if position not in together.failures]
        lost = {lease.id for lease in ending} - (self._store.queues.complete(connection, ending) if ending else set())
        if lost:
            parts = [part for part in together.parts if part.delivery.attempt.id in lost]
            error = LeaseLost(f"{queue}: {len(lost)} leases ran out before their work committed")
            raise Apart(dict.fromkeys(parts, error))
