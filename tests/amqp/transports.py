"""Transports: the one of RabbitMQ, connected to a peer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from outbox.core.transport import Transport
from outbox.transports.rabbitmq import RabbitmqTransport


@asynccontextmanager
async def connected(url: str, by_hand: bool, **options: Any) -> AsyncIterator[Transport]:
    transport = RabbitmqTransport(url, by_hand=by_hand, **options)
    await transport.open()
    yield transport
    await transport.close()
