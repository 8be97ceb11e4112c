"""The inbox around a listener's transaction: a delivery's end commits with it, or neither does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import LeaseLost, Outbox, listen
from outbox.inbound.inbox import Inbox
from outbox.transports.database import DatabaseDelivery, DatabaseTransport
from tests.walk.test_worker import emit


@listen("#", queue="q")
async def listener(body: int) -> None: ...


@pytest.fixture
async def delivery(outbox: Outbox) -> AsyncIterator[DatabaseDelivery]:
    """A message in a worker's hands."""
    store = outbox.store
    transport = DatabaseTransport(store, lease=timedelta(minutes=10), poll_interval=0.2, observe=lambda event: None)
    await transport.declare([listener])
    await emit(outbox, 1)
    await store.route(10, {})
    async with AsyncExitStack() as stack:
        stack.push_async_callback(transport.close)
        deliveries = transport.consume(listener, 10)
        stack.push_async_callback(deliveries.aclose)
        yield await anext(deliveries)


def handle(connection: Any, outbox: Outbox, delivery: DatabaseDelivery) -> None:
    with Inbox(outbox.store).entered(connection, "q", delivery):
        pass


async def handled(session: AsyncSession, outbox: Outbox, delivery: DatabaseDelivery) -> None:
    connection = await session.connection()
    await connection.run_sync(handle, outbox, delivery)


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
    other = {"lease_token": outbox.store.new_token()}  # type: ignore[attr-defined]
    async with outbox.transaction() as session:
        await session.execute(update(outbox.tables.messages).values(other))
    with pytest.raises(LeaseLost):
        async with outbox.transaction() as session:
            await handled(session, outbox, delivery)
    assert len(await outbox.messages()) == 1
