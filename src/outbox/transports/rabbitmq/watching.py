"""Watching: whether a broker would take messages at this moment, for those who do not publish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from outbox.core.errors import ConfigurationError, TransportUnavailable
from outbox.transports.rabbitmq.channels import Lost
from outbox.transports.rabbitmq.frames import FrameWire

ANSWER_WITHIN = 3.0  # seconds: whoever looks at a status does not want to wait for long
CLOSE_WITHIN = 0.5  # a broker that takes no publishes does not read a goodbye either


class Watch:
    """One connection for any number of looks: a broker with an alarm keeps those that were left until it is over."""

    def __init__(self, connect: Callable[[], Awaitable[FrameWire]]) -> None:
        self._connect = connect
        self._wire: FrameWire | None = None

    async def trouble(self) -> str | None:
        """Why the broker takes no messages, if it does not."""
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                return await self._asked()
        except TimeoutError:
            await self.close()
            return f"away: no answer within {ANSWER_WITHIN:g} s"
        except (TransportUnavailable, Lost) as error:
            await self.close()
            return f"away: {error}"
        except ConfigurationError as error:
            return f"refuses us: {error}"

    async def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            with suppress(Exception):
                async with asyncio.timeout(CLOSE_WITHIN):
                    await wire.close()

    async def _asked(self) -> str | None:
        if self._wire is None:
            self._wire = await self._connect()
        reason = await self._wire.asked_to_publish()
        return None if reason is None else f"takes no messages: {reason}"
