"""Queues: what tests see and do at RabbitMQ, beside the library."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from tests.support.observing import eventually

EXPIRES_AT = "outbox-expires-at"  # in microseconds since 1970


async def taken(channel: AbstractChannel, queue: str) -> AbstractIncomingMessage:
    """The next message of a queue, taken out of it."""
    found = await channel.get_queue(queue)
    return await eventually(lambda: found.get(fail=False, no_ack=True))


async def is_empty(channel: AbstractChannel, queue: str) -> bool:
    """Whether nothing waits there; what a worker holds does not wait."""
    found = await channel.declare_queue(queue, passive=True)
    return found.declaration_result.message_count == 0


async def bring_back(channel: AbstractChannel, message: AbstractIncomingMessage, exchange: str = "") -> None:
    """Publish a message again with all that it carries, as a shovel or the end of a delay does.

    The routing key of dead letters and of retries is the name of their queue.
    """
    properties: dict[str, Any] = {
        "headers": message.headers,
        "content_type": message.content_type,
        "message_id": message.message_id,
        "timestamp": message.timestamp,
        "delivery_mode": message.delivery_mode,
    }
    target = await channel.get_exchange(exchange) if exchange else channel.default_exchange
    await target.publish(aio_pika.Message(message.body, **properties), message.routing_key or "")


async def make_older(channel: AbstractChannel, queue: str, age: timedelta, exchange: str = "") -> None:
    """Take a message from where it waits and publish it again as if so much time had passed."""
    await bring_back(channel, older(await taken(channel, queue), age), exchange)


def older(message: AbstractIncomingMessage, age: timedelta) -> AbstractIncomingMessage:
    """A message that expires sooner."""
    message.headers[EXPIRES_AT] -= age // timedelta(microseconds=1)  # type: ignore[operator]
    return message
