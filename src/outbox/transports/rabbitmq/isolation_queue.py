"""Trials: the queue in which this process tries the suspected messages of one listener's queue.

A copy in the listener's own queue would wait behind all that waits there, or go to another process. In this queue there
is nothing but the copy that is tried now, and no other process reads it. The copy counts the start: if its worker dies,
it comes back to the listener's queue after a second, as from a delay queue, with one crash more than before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outbox.core.errors import ConfigurationError
from outbox.transports.rabbitmq.channel import Channel, Incoming, Lost
from outbox.transports.rabbitmq.connection import LONGEST_RECONNECT, SupervisedConnection
from outbox.transports.rabbitmq.republishing import Republisher

COPIES_HERE = 10  # copies that may be here: one is tried, and others are on their way back
ISOLATED_WITHIN = 2.0  # seconds in which a copy comes, while nothing else runs
WRITTEN_AFTER = 1.0  # seconds: RabbitMQ 3.10 that crashes sooner may forget a new queue, with its messages

Reader = Callable[[Channel, str], Callable[[Incoming], object]]  # of what a channel delivers from a trial queue


class IsolationQueue:
    """Made when the first message is suspected; read until the consumer closes."""

    def __init__(
        self, queue: str, *, supervised: SupervisedConnection, republisher: Republisher, reader: Reader
    ) -> None:
        self._queue = queue
        self._supervised = supervised
        self._republisher = republisher
        self._reader = reader
        self._name: str | None = None
        self._channel: Channel | None = None
        self._is_refused = False
        self._opening = asyncio.Lock()

    async def name(self) -> str | None:
        """The queue, which this process reads by now; None: this user may not make it, or the broker is away."""
        async with self._opening:
            if not self._is_read and not self._is_refused:
                try:
                    await self._open()
                except ConfigurationError:
                    self._is_refused = True
                except Lost as error:
                    self._name = None  # it may be gone, and the next one is another
                    self._is_refused = error.ended.code == _ACCESS_REFUSED
                except Exception:  # noqa: BLE001, S110 - whatever it is, the listener's own queue is there
                    pass
        return self._name if self._is_read else None

    @property
    def _is_read(self) -> bool:
        return self._channel is not None and not self._channel.ended.done()

    async def _open(self) -> None:
        if self._name is None:
            name = await self._republisher.make_isolation_queue(self._queue)
            await asyncio.sleep(WRITTEN_AFTER)
            self._name = name
        connection = await self._supervised.connection(within=LONGEST_RECONNECT)
        channel = await connection.channel()
        await channel.consume(self._name, COPIES_HERE, self._reader(channel, self._name))
        self._channel = channel


_ACCESS_REFUSED = 403
