"""Sources: what is due right now, without waiting for more: rows of the store, queues in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Protocol

from sqlalchemy import ColumnElement, Connection, case, func, or_, select, true

from outbox.core.attempt import Dead, Done, Reason
from outbox.core.durations import NO_DELAY
from outbox.core.listener import Listener
from outbox.core.store import Selection
from outbox.core.transport import Consumer, Delivery, Transport
from outbox.inbound.batches import Batches
from outbox.stores.sql import SqlStore
from outbox.stores.tables import NOT_ROUTED
from outbox.transports.database.claims import ClaimedBatch, DatabaseDelivery

LEASE = timedelta(hours=1)  # a listener that is stopped in a debugger keeps its message


class DueSource(Protocol):
    """Where a listener's deliveries come from."""

    def taken(self, listener: Listener) -> AbstractAsyncContextManager[Delivery | None]:
        """A delivery that is due, or none. Its outcome is written when the block ends."""
        ...


class StoreSource:
    """Queues in the store. Their deliveries are those of the database transport, as in a worker."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    @asynccontextmanager
    async def taken(self, listener: Listener) -> AsyncIterator[Delivery | None]:
        selection = Selection(limit=listener.batch or 1, lease=LEASE, destination=listener.queue)
        async with self._store.feed.claim(selection) as claim:
            batch = ClaimedBatch(claim, claim.attempts, _nothing_to_do, _nothing_to_do)
            try:
                yield await _in_hand(listener, ClaimAtHand([DatabaseDelivery(each, batch) for each in claim.attempts]))
                batch.close()
                await batch.write()
            finally:
                batch.end()


def _nothing_to_do(*_: object) -> None:
    """Where a worker claims more, or reports that outcomes cannot be written; here the error is raised at once."""


class MemorySource:
    """Queues in memory."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @asynccontextmanager
    async def taken(self, listener: Listener) -> AsyncIterator[Delivery | None]:
        yield await _in_hand(listener, self._transport.consume(listener, listener.batch or 1))


async def _in_hand(listener: Listener, deliveries: Consumer) -> Delivery | None:
    """What a worker would hand over next, in a list if the listener takes lists."""
    if listener.batch is None:
        return deliveries.take()
    batches = Batches(deliveries, listener.batch)
    batch = batches.take()
    await batches.aclose()
    return batch


class ClaimAtHand(Consumer):
    """The deliveries of a claim, one after another."""

    def __init__(self, deliveries: Sequence[DatabaseDelivery]) -> None:
        self._left = iter(deliveries)

    async def __anext__(self) -> DatabaseDelivery:
        raise StopAsyncIteration

    def take(self) -> DatabaseDelivery | None:
        return next(self._left, None)


class StoredSource:
    """Queues in memory, whose messages are stored first."""

    def __init__(self, transport: Transport, store: SqlStore) -> None:
        self._transport = transport
        self._store = store

    @asynccontextmanager
    async def taken(self, listener: Listener) -> AsyncIterator[Delivery | None]:
        deliveries = self._transport.consume(listener, 1)
        while (arrived := deliveries.take()) is not None:
            receipt = await self._store.queues.receive(listener.queue, [arrived.attempt.message])
            refused = receipt.refused.get(arrived.attempt.message.id)
            arrived.settle(Done() if refused is None else Dead(Reason.REFUSED, refused))
        async with StoreSource(self._store).taken(listener) as delivery:
            yield delivery


class Rest:
    """What is still to be done in a store."""

    def __init__(self, store: SqlStore, queues: Collection[str]) -> None:
        self._store = store
        self._queues = queues

    async def until_next_due(self, stuck: Collection[str]) -> timedelta | None:
        """How long until the relay or a listener has something to do; none if they never will."""
        columns, dialect = self._store.tables.messages.c, self._store.dialect
        nobodys = columns.lease_until.is_(None) | (columns.lease_until <= dialect.now())
        ours = (columns.destination == NOT_ROUTED) | columns.destination.in_(self._queues)
        statement = select(func.min(dialect.seconds_until(columns.due_at))).where(
            columns.done_at.is_(None), nobodys, ours, ~self._stuck(stuck)
        )
        seconds = await self._store.runner.look(lambda connection: connection.scalar(statement))
        return None if seconds is None else max(NO_DELAY, timedelta(seconds=float(seconds)))

    async def count(self, stuck: Collection[str]) -> tuple[int, int]:
        """How many messages no queue is bound to, and how many are there besides."""
        columns = self._store.tables.messages.c
        is_stuck = func.coalesce(func.sum(case((self._stuck(stuck), 1), else_=0)), 0)
        statement = select(is_stuck, func.count()).where(columns.done_at.is_(None))

        def work(connection: Connection) -> tuple[int, int]:
            unroutable, everything = connection.execute(statement).one()
            return int(unroutable), int(everything) - int(unroutable)

        return await self._store.runner.look(work)

    def _stuck(self, message_ids: Collection[str]) -> ColumnElement[bool]:
        columns = self._store.tables.messages.c
        return or_(columns.unroutable, columns.message_id.in_(message_ids) if message_ids else ~true())
