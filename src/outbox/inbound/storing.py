"""Storing: deliveries of a broker are stored in the database, acknowledged, and handled from there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import replace
from datetime import timedelta

from outbox.core.attempt import Dead, Done, Reason, Released
from outbox.core.dead_letter import clean
from outbox.core.events import Handled, Observer, Received
from outbox.core.landing import Landing
from outbox.core.listener import Listener
from outbox.core.outage import DATABASE, Outage
from outbox.core.pace import Pace
from outbox.core.store import Receipt, Store
from outbox.core.transport import Delivery, Transport
from outbox.inbound.inbox import Memory

AGAIN = 0.1, 5.0  # seconds between two tries to store, doubling: the broker keeps what is not acknowledged
NEVER_CONDEMNED = 2**31 - 1  # crashes: storing runs no listener, so a message cannot have caused one


class Storing:
    """Stores the deliveries of one queue, as many in a transaction as came while the last one was written."""

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
        self._store = store
        self._memory = memory
        self._queue = queue
        self._also = queue_name  # what was handled without being stored first is known by that name
        self._batch_size = batch_size
        self._redact_error = redact_error
        self._observe = observe
        self._storing = Outage(f"storing for {queue}", DATABASE, observe)
        self._waiting: list[tuple[Delivery, asyncio.Future[None]]] = []  # first come, first served
        self._writing: asyncio.Task[None] | None = None

    async def handle(self, delivery: Delivery, refusal: Exception | None = None) -> None:
        """Ends when the delivery is stored and settled. Whoever gives up on it gives it back unstored."""
        too_old = self._memory.refusal(delivery.attempt.message)
        if too_old is not None:
            self._bury(delivery, Dead(Reason.EXPIRED, str(too_old)))
            return
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((delivery, stored))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(), name=f"outbox storing of {self._queue}")
        try:
            await stored
        except asyncio.CancelledError:
            delivery.settle(Released())
            raise

    async def close(self) -> None:
        """Write no more."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])

    async def _write(self) -> None:
        again = Pace(AGAIN[1], AGAIN[0])
        while batch := self._next():
            try:
                messages = [delivery.attempt.message for delivery, _ in batch]
                receipt = await self._store.receive(self._queue, messages, also=self._also)
            except Exception as error:  # noqa: BLE001 - drivers throw what they like
                # Whether it was committed is unknown, and nothing is acknowledged. Storing again does no harm.
                pause = again.pause()
                self._storing.struck(error, timedelta(seconds=pause))
                await asyncio.sleep(pause)
                continue
            again.reset()
            self._storing.over()
            self._settle(batch, receipt)

    def _next(self) -> list[tuple[Delivery, asyncio.Future[None]]]:
        """What waits and was not given back meanwhile."""
        self._waiting = [each for each in self._waiting if not each[1].done()]
        return self._waiting[: self._batch_size]

    def _settle(self, batch: list[tuple[Delivery, asyncio.Future[None]]], receipt: Receipt) -> None:
        for delivery, stored in batch:
            if stored.done():
                continue  # given back while it was stored: its next copy is known
            error = receipt.refused.get(delivery.attempt.message.id)
            if error is None:
                delivery.settle(Done())
            else:
                self._bury(delivery, Dead(Reason.REFUSED, self._redacted(error)))
            stored.set_result(None)
        count = len(receipt.stored)
        self._observe(Received(self._queue, count, duplicates=len(batch) - count - len(receipt.refused)))

    def _bury(self, delivery: Delivery, dead: Dead) -> None:
        """The broker keeps what the database cannot."""
        delivery.settle(dead).then(lambda landing: self._buried(delivery, dead, landing))

    def _redacted(self, error: str) -> str:
        try:
            return clean(self._redact_error(clean(error)))
        except Exception as failure:  # noqa: BLE001 - what could not be redacted is not shown
            return f"the database cannot hold it (why could not be had: {type(failure).__name__})"

    def _buried(self, delivery: Delivery, dead: Dead, landing: Landing) -> None:
        if not landing.cancelled() and landing.result():
            self._observe(Handled(self._queue, delivery.attempt, dead, timedelta(0)))


class Sources:
    """Where each listener's deliveries come from: what is stored first comes from the database."""

    def __init__(self, broker: Transport, database: Transport, stored: Collection[Listener]) -> None:
        self._broker = broker
        self._database = database
        self._stored = {listener.queue for listener in stored}

    def consume(self, listener: Listener, prefetch: int) -> AsyncIterator[Delivery]:
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
