"""A supervised connection ends when it is told to, whatever the client library makes of a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from outbox.core.events import Event
from outbox.transports.rabbitmq import connection
from outbox.transports.rabbitmq.channel import BrokerConnection
from outbox.transports.rabbitmq.connection import SupervisedConnection


async def test_a_cancellation_that_comes_back_as_another_error_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "DISCONNECT_WITHIN", 0.2)
    tries = 0

    async def connect() -> BrokerConnection:
        nonlocal tries
        tries += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if tries > 1:
                raise
            raise ConnectionError("closed") from None
        raise AssertionError

    events: list[Event] = []
    supervised = SupervisedConnection(connect, name="RabbitMQ consumer", observe=events.append)
    opening = asyncio.create_task(supervised.open())
    await asyncio.sleep(0.01)
    await supervised.close()
    await opening
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
    await asyncio.sleep(0.15)  # longer than the pause before a next try
    assert (tries, events) == (1, [])
