"""Deliveries from the database: they end with the listener's transaction, never under somebody else's lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import NEVER, LeaseLost, Listener, Outbox, listen
from outbox.core.attempt import Done
from outbox.core.store import Selection
from outbox.inbound.inbox import Inbox, Memory
from outbox.transports.database import DatabaseTransport
from outbox.transports.database.claims import DatabaseDelivery
from tests.support.observing import PATIENCE
from tests.support.outboxes import emit


@listen("#", queue="q")
async def listener(body: int) -> None: ...


@pytest.fixture
async def delivery(outbox: Outbox) -> AsyncIterator[DatabaseDelivery]:
    """A message in a worker's hands."""
    async with consuming(outbox) as transport:
        await transport.declare([listener])
        await emit(outbox, 1)
        await outbox.store.queues.route(10, {})
        async with aclosing(transport.consume(listener, 10)) as deliveries:
            yield await anext(deliveries)


@asynccontextmanager
async def consuming(outbox: Outbox) -> AsyncIterator[DatabaseTransport]:
    transport = DatabaseTransport(
        outbox.store, lease=timedelta(minutes=10), poll_interval=0.2, observe=lambda event: None
    )
    yield transport
    await transport.close()


def handle(connection: Any, outbox: Outbox, delivery: DatabaseDelivery) -> None:
    with Inbox(outbox.store, Memory(NEVER), "q").entered(connection, "q", delivery):
        pass


async def handled(session: AsyncSession, outbox: Outbox, delivery: DatabaseDelivery) -> None:
    connection = await session.connection()
    await connection.run_sync(handle, outbox, delivery)


async def take_away(outbox: Outbox) -> None:
    """Let somebody else have the lease."""
    async with outbox.transaction() as session:
        await session.execute(update(outbox.tables.messages).values(lease_token=uuid4()))


async def test_the_end_of_a_delivery_commits_with_the_listeners_transaction(
    outbox: Outbox, delivery: DatabaseDelivery
) -> None:
    async with outbox.transaction() as session:
        await handled(session, outbox, delivery)
    assert await outbox.messages() == []


async def test_the_end_of_a_delivery_rolls_back_with_the_listeners_transaction(
    outbox: Outbox, delivery: DatabaseDelivery
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with outbox.transaction() as session:
            await handled(session, outbox, delivery)
            raise ZeroDivisionError
    assert len(await outbox.messages()) == 1


async def test_a_transaction_cannot_commit_when_the_lease_is_somebody_elses(
    outbox: Outbox, delivery: DatabaseDelivery
) -> None:
    await take_away(outbox)
    with pytest.raises(LeaseLost):
        async with outbox.transaction() as session:
            await handled(session, outbox, delivery)
    assert len(await outbox.messages()) == 1


async def test_whoever_settles_under_somebody_elses_lease_is_told_so(
    outbox: Outbox, delivery: DatabaseDelivery
) -> None:
    await take_away(outbox)
    assert await asyncio.wait_for(delivery.settle(Done()), PATIENCE) is False
    assert len(await outbox.messages()) == 1


async def test_while_one_suspect_is_tried_no_other_is_claimed(outbox: Outbox) -> None:
    """Of two messages that killed their worker, the one that does it again would condemn the other."""
    queues = {name: Listener(name, listener.callback, queue=name) for name in ("a", "b")}
    async with AsyncExitStack() as stack:
        transport = await stack.enter_async_context(consuming(outbox))
        await transport.declare(list(queues.values()))
        for name in queues:
            await emit(outbox, "suspect", routing_key=name)
            await outbox.store.queues.route(10, {})
            await crash(stack, outbox, name)
        await emit(outbox, "fresh", routing_key="b")
        await outbox.store.queues.route(10, {})
        first, second = [await stack.enter_async_context(aclosing(transport.consume(queues[name], 4))) for name in "ab"]
        async with asyncio.timeout(PATIENCE):
            tried = await anext(first)
            assert (tried.attempt.message.body, tried.attempt.crash_count) == (b'"suspect"', 1)
            assert (await anext(second)).attempt.message.body == b'"fresh"'
            tried.settle(Done())
            assert (await anext(second)).attempt.message.body == b'"suspect"'


async def crash(stack: AsyncExitStack, outbox: Outbox, queue: str) -> None:
    """Claim what lies in a queue and let the lease run out, as if the process had died."""
    short = timedelta(milliseconds=300)
    claim: Any = await stack.enter_async_context(
        outbox.store.feed.claim(Selection(limit=10, lease=short, destination=queue))
    )
    assert len(claim.attempts) == 1
    claim._renewal.cancel()
    async with asyncio.timeout(PATIENCE):
        while any(stored.leased_until for stored in await outbox.messages(queue=queue)):
            await asyncio.sleep(0.05)
