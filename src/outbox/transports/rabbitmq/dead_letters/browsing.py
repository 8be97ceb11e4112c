"""Browsing: looking through a `.dlq` queue, alone. What is not taken out goes back.

A queue cannot be read without taking messages out of it, and RabbitMQ puts what comes back before everything that was
never out. So a letter that comes with the mark of a redelivery was looked at before, and one without it begins the part
that was never seen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

from aiormq.abc import AbstractChannel

from outbox.core.errors import ConfigurationError, TransportUnavailable
from outbox.transports.rabbitmq.aiormq_channel import asked
from outbox.transports.rabbitmq.channel import BrokerConnection, Channel, Incoming, Lost
from outbox.transports.rabbitmq.dead_letters.letter import Letter, read
from outbox.transports.rabbitmq.topology import Names

ALONE_WITHIN = 30.0  # seconds that another process may look
BROWSE_AGAIN = 0.05  # seconds
QUIET_AFTER = 2.0  # seconds without a letter after which another process must have it
BACK_WITHIN = 5.0  # seconds in which what was given back is there
MOST_AT_ONCE = 1000
STEP_BYTES = 8 * 1024 * 1024  # after large letters no more are read at once than have so many, if all are as large

_ACCESS_REFUSED, _NOT_FOUND, _LOCKED = 403, 404, 405


@asynccontextmanager
async def alone(connection: BrokerConnection, lock: str) -> AsyncIterator[None]:
    """No other process looks meanwhile: letters that one has taken out would seem to be gone.

    The lock is a queue that belongs to this connection and ends with it. A user that may not make it goes without.
    """
    until = time.monotonic() + ALONE_WITHIN
    while True:
        channel = await asked(connection.client_channel())
        try:
            await asked(channel.queue_declare(lock, exclusive=True, auto_delete=True))
        except Lost as error:
            if error.ended.code == _ACCESS_REFUSED:
                yield
                return
            if error.ended.code != _LOCKED:
                raise
            if time.monotonic() > until:
                raise TransportUnavailable(
                    f"another command has been reading the dead letters for {ALONE_WITHIN:g} s: try again later"
                ) from None
            await asyncio.sleep(BROWSE_AGAIN)
        else:
            break
    try:
        yield
    finally:
        with suppress(Lost, TimeoutError):
            await asked(channel.queue_delete(lock))
            await asked(channel.close())


@asynccontextmanager
async def browsing(connection: BrokerConnection, names: Names, queue: str, largest_body: int) -> AsyncIterator[Browse]:
    """The dead letters of a listener's queue."""
    browse = Browse(await connection.channel(), await asked(connection.client_channel()), names, queue, largest_body)
    try:
        yield browse
    finally:
        await browse.close()


class Browse:
    """Letters in the order in which they come."""

    def __init__(
        self, channel: Channel, counting: AbstractChannel, names: Names, queue: str, largest_body: int
    ) -> None:
        self._channel = channel
        self._counting = counting
        self._queue = queue
        self._largest_body = largest_body  # bytes that a worker takes
        self._home = names.queue(queue)  # as the broker calls it
        self._name = names.dead_letter_queue(self._home)
        self._arrived: list[Incoming] = []
        self._arrival = asyncio.Event()
        self._consuming = False
        self._held = 0
        self._removed = False
        self._fitting = MOST_AT_ONCE
        self.most_returned = 0  # how often the broker has got one of them back

    async def count(self) -> int:
        """How many are there, without those that a process has taken out; none if there is no such queue."""
        try:
            return (await asked(self._counting.queue_declare(self._name, passive=True))).message_count or 0
        except Lost as error:
            if error.ended.code == _NOT_FOUND:
                return 0
            raise

    async def next(self, most: int) -> list[Letter]:
        """The next ones; none at the end of the queue."""
        wanted = min(most, self._fitting, await self.count())
        if wanted:
            await self._take(wanted)
        arrived, self._arrived = self._arrived, []
        largest = max((len(incoming.body) for incoming in arrived), default=0)
        self._fitting = max(1, min(MOST_AT_ONCE, STEP_BYTES // max(1, largest)))
        letters = [read(self._queue, self._home, incoming, self._largest_body) for incoming in arrived]
        self.most_returned = max([self.most_returned, *(letter.returned for letter in letters)])
        return letters

    def remove(self, letters: Iterable[Letter]) -> None:
        """Take them out for good."""
        tags = [(letter.tag, False) for letter in letters]
        self._channel.settle(tags)
        self._held -= len(tags)
        self._removed |= bool(tags)

    async def close(self) -> None:
        """Give back what was not removed, and wait until it is there."""
        with suppress(Lost, TimeoutError):
            if self._removed:
                await self._let_go()
        await self._channel.close()
        with suppress(Lost, TimeoutError):
            async with asyncio.timeout(BACK_WITHIN):
                while True:
                    if not self._held or await self.count() >= self._held:
                        break
                    await asyncio.sleep(BROWSE_AGAIN / 10)
            await asked(self._counting.close())

    async def _let_go(self) -> None:
        """Wait until removals are written: a channel hands on a few at a time, and forgets the others when it closes.

        Only the end of a consumer is answered by the queue itself. By then the channel may hand on the rest.
        """
        await self._channel.heard()
        await self._channel.cancel()
        await self._channel.heard()

    async def _take(self, wanted: int) -> None:
        """So many and no more: a consumer gets no more than it may hold."""
        if self._consuming:
            await self._channel.cancel()
        self._consuming = True
        try:
            await self._channel.consume(self._name, wanted, self._on_arrival)
        except Lost as error:
            if error.ended.code == _ACCESS_REFUSED:
                raise ConfigurationError(
                    f"this user may not read the queue {self._name!r}: give it the read permission"
                ) from None
            raise
        while len(self._arrived) < wanted and not self._channel.ended.done():
            self._arrival.clear()
            try:
                async with asyncio.timeout(QUIET_AFTER):
                    await self._arrival.wait()
            except TimeoutError:
                break
        if self._channel.ended.done():
            raise Lost(self._channel.ended.result())

    def _on_arrival(self, incoming: Incoming) -> None:
        self._held += 1
        self._arrived.append(incoming)
        self._arrival.set()
