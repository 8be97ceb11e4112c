"""AMQP: what a test says to RabbitMQ beside the library."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiormq
from aiormq.abc import AbstractChannel

from outbox.transports.rabbitmq.declaring import Declared, OpenChannel, declare
from outbox.transports.rabbitmq.topology import Topology
from tests.support.commands import until

# The permissions of those who come from kbairak's outbox.
OFFERED_BEFORE = {"write": r"^(outbox|outbox\.delay_.*)$", "read": ".*"}


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[OpenChannel]:
    connection = await aiormq.connect(url)
    try:
        yield connection.channel
    finally:
        await connection.close()


async def declare_at(url: str, topology: Topology) -> Declared:
    async with connected(url) as open_channel:
        return await declare(open_channel, topology)


@asynccontextmanager
async def channel_to(url: str) -> AsyncIterator[AbstractChannel]:
    async with connected(url) as open_channel:
        yield await open_channel()


async def taken(channel: AbstractChannel, queue: str) -> bytes | None:
    """The next message's body; counts lag behind on quorum queues."""
    message = await channel.basic_get(queue, no_ack=True)
    return message.body if isinstance(message.delivery, aiormq.spec.Basic.GetOk) else None


async def arrival(channel: AbstractChannel, queue: str) -> bytes:
    found: list[bytes] = []

    async def arrived() -> bool:
        body = await taken(channel, queue)
        if body is not None:
            found.append(body)
        return bool(found)

    await until(arrived)
    return found[0]


async def has_rejected(channel: AbstractChannel, queue: str) -> bool:
    message = await channel.basic_get(queue)
    if not isinstance(message.delivery, aiormq.spec.Basic.GetOk):
        return False
    await channel.basic_reject(message.delivery.delivery_tag or 0, requeue=False)
    return True
