"""Returning: the moment in which a broker that was away, blocked or silent takes messages again."""

from __future__ import annotations

import asyncio

from outbox.core.errors import OutboxError, TransportClosed
from outbox.transports.rabbitmq.channel import Lost
from outbox.transports.rabbitmq.connection import SupervisedConnection

PROBE_AGAIN = 0.2  # seconds between two looks at what this process knows of the broker
RECONNECTED_WITHIN = 60.0  # seconds of one wait for a connection; there may be any number of them


async def taking_messages(supervised: SupervisedConnection) -> None:
    """Wait until the broker is there, has no alarm and answers. Raises TransportClosed if the link is closed for good.

    A broker that answers nothing loses its connection over it, and the link opens another one.
    """
    while True:
        if await _takes_messages(supervised):
            return
        await asyncio.sleep(PROBE_AGAIN)


async def _takes_messages(supervised: SupervisedConnection) -> bool:
    try:
        connection = await supervised.connection(within=RECONNECTED_WITHIN)
        if await connection.blocked() is not None:
            return False
        channel = await connection.channel()
        await channel.close()
    except TransportClosed:
        raise
    except (OutboxError, Lost, TimeoutError):
        return False  # the link tells why
    return True
