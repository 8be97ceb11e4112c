"""Store first: deliveries of a broker are stored in the database, acknowledged, and handled from there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import ClassVar

from outbox.core.attempt import Dead, Done, Reason, Released
from outbox.core.backoff import Backoff
from outbox.core.dead_letter import clean
from outbox.core.events import Handled, Observer
from outbox.core.listener import Listener
from outbox.core.settlement import Settlement
from outbox.core.store import Receipt, Store
from outbox.core.transport import Consumer, Delivery, Transport
from outbox.inbound.group_commit import GroupCommit
from outbox.inbound.inbox import Memory

STORE_AGAIN = 0.1, 5.0  # seconds between two tries to store, doubling: the broker keeps what is not acknowledged
NEVER_CONDEMNED = 2**31 - 1  # crashes: storing runs no listener, so a message cannot have caused one


@dataclass(slots=True, eq=False)
class DeliveryToStore:
    """A delivery that is acknowledged once it is stored."""

    delivery: Delivery
    size: ClassVar[int] = 1
    stored: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class DeliveryStorage(GroupCommit[DeliveryToStore]):
    """Stores the deliveries of one queue."""

    can_be_cut = True

    def __init__(
        self,
        store: Store,
        memory: Memory,
        queue: str,
        *,
        queue_name: str | None = None,  # what the broker calls it, if that is something else
        batch_size: int,
        redact_error: Callable[[str], str],
        observe: Observer,
    ) -> None:
        super().__init__(queue, batch_size=batch_size, observe=observe)
        self._store = store
        self._memory = memory
        self._also = queue_name  # what was handled without being stored first is known by that name
        self._redact_error = redact_error
        self._again = Backoff(STORE_AGAIN[1], STORE_AGAIN[0])

    async def handle(self, delivery: Delivery, refusal: Exception | None = None) -> None:
        """Ends when the delivery is stored and settled. If its worker gives up on it, it is given back unstored."""
        too_old = self._memory.refusal(delivery.attempt.message)
        if too_old is not None:
            self._bury(delivery, Dead(Reason.EXPIRED, str(too_old)))
            return
        try:
            await self.store(DeliveryToStore(delivery))
        except asyncio.CancelledError:
            delivery.settle(Released())
            raise

    async def _receive(self, batch: Sequence[DeliveryToStore]) -> Receipt:
        messages = [item.delivery.attempt.message for item in batch]
        return await self._store.queues.receive(self._queue, messages, also=self._also)

    async def _failed(self, batch: Sequence[DeliveryToStore], error: Exception) -> None:
        pause = self._again.pause()
        self._outage.struck(error, timedelta(seconds=pause))
        await asyncio.sleep(pause)

    def _conclude(self, batch: Sequence[DeliveryToStore], receipt: Receipt) -> None:
        self._again.reset()
        for item in batch:
            if item.stored.done():
                continue  # given back while it was stored: its next copy is known
            error = receipt.refused.get(item.delivery.attempt.message.id)
            if error is None:
                item.delivery.settle(Done())
            else:
                self._bury(item.delivery, Dead(Reason.REFUSED, self._redacted(error)))
            item.stored.set_result(None)
        self._tell(batch, receipt)

    def _bury(self, delivery: Delivery, dead: Dead) -> None:
        """The broker keeps what the database cannot."""
        delivery.settle(dead).then(lambda landing: self._buried(delivery, dead, landing))

    def _redacted(self, error: str) -> str:
        try:
            return clean(self._redact_error(clean(error)))
        except Exception as failure:  # noqa: BLE001 - what could not be redacted is not shown
            return f"the database cannot hold it (why could not be had: {type(failure).__name__})"

    def _buried(self, delivery: Delivery, dead: Dead, landing: Settlement) -> None:
        if not landing.cancelled() and landing.result():
            self._observe(Handled(self._queue, delivery.attempt, dead, timedelta(0)))


class Sources:
    """Where each listener's deliveries come from: what is stored first comes from the database."""

    def __init__(self, broker: Transport, database: Transport, stored: Collection[Listener]) -> None:
        self._broker = broker
        self._database = database
        self._stored = {listener.queue for listener in stored}

    def consume(self, listener: Listener, prefetch: int) -> Consumer:
        source = self._database if listener.queue in self._stored else self._broker
        return source.consume(listener, prefetch)


def stored_first(listener: Listener) -> Listener:
    """The same listener, its deliveries stored first."""
    return replace(listener, store_first=True)


def as_storage(listener: Listener, batch_size: int) -> Listener:
    """What consumes the listener's queue for storing: one batch is gathered while another is written.

    Its other options are about handling, and handling is done from the database.
    """
    return Listener(
        listener.binding_key,
        listener.callback,
        queue=listener.queue,
        concurrency=2 * batch_size,
        max_crashes=NEVER_CONDEMNED,
    )
