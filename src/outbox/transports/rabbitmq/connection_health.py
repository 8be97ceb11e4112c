"""Watching: whether a broker would take messages at this moment, for those who do not publish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from outbox.core.errors import ConfigurationError, TransportUnavailable
from outbox.transports.rabbitmq.channel import Lost
from outbox.transports.rabbitmq.frames import FrameConnection

PROBED_WITHIN = 3.0  # seconds: a status is asked for by a person
PROBE_CLOSED_WITHIN = 0.5  # a broker that takes no publishes does not read a goodbye either


class HealthProbe:
    """One connection for any number of looks: a broker with an alarm keeps those that were left until it is over."""

    def __init__(self, connect: Callable[[], Awaitable[FrameConnection]]) -> None:
        self._connect = connect
        self._connection: FrameConnection | None = None

    async def trouble(self) -> str | None:
        """Why the broker takes no messages, if it does not."""
        try:
            async with asyncio.timeout(PROBED_WITHIN):
                return await self._asked()
        except TimeoutError:
            await self.close()
            return f"away: no answer within {PROBED_WITHIN:g} s"
        except (TransportUnavailable, Lost) as error:
            await self.close()
            return f"away: {error}"
        except ConfigurationError as error:
            return f"refuses us: {error}"

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):
                async with asyncio.timeout(PROBE_CLOSED_WITHIN):
                    await connection.close()

    async def _asked(self) -> str | None:
        if self._connection is None:
            self._connection = await self._connect()
        reason = await self._connection.asked_to_publish()
        return None if reason is None else f"takes no messages: {reason}"
