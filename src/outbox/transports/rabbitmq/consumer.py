"""RabbitmqConsumer: the deliveries of a queue, over as many channels as it takes one after another.

Each listener has a channel of its own: what closes one closes no other, and a slow listener holds back no other's
acknowledgements.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from outbox.core.attempt import Attempt, Dead, Reason, Released
from outbox.core.backoff import TRANSPORT, Backoff, Outage
from outbox.core.durations import NO_DELAY
from outbox.core.errors import ConfigurationError, TransportClosed, TransportUnavailable
from outbox.core.events import Handled, Observer
from outbox.core.listener import Listener
from outbox.core.loops import cancelled_from_outside
from outbox.core.message import LARGEST_BODY
from outbox.core.settlement import Settlement
from outbox.core.transport import Consumer
from outbox.transports.rabbitmq.channel import CANCELLATIONS, BrokerConnection, Channel, Incoming, Lost
from outbox.transports.rabbitmq.connection import SupervisedConnection
from outbox.transports.rabbitmq.consumed_queue import ConsumedQueue
from outbox.transports.rabbitmq.delivery import Holder, RabbitmqDelivery
from outbox.transports.rabbitmq.isolation_queue import IsolationQueue
from outbox.transports.rabbitmq.lost_runs import LostRuns
from outbox.transports.rabbitmq.poison import PoisonSuspects
from outbox.transports.rabbitmq.prefetching import ConsumerPrefetch
from outbox.transports.rabbitmq.republishing import Republisher
from outbox.transports.rabbitmq.unacknowledged import Unacknowledged

SHORTEST_CONSUME_PAUSE, LONGEST_CONSUME_PAUSE = 0.1, 2.0  # seconds between two tries to consume, doubling
MOST_PREFETCH = 65_535

_NOT_FOUND = 404
_OF_A_CHANNEL = (403, 404, 405, 406)  # refused, not found, locked, other arguments: the connection goes on


class RabbitmqConsumer(Consumer):
    """The deliveries of one listener's queue."""

    def __init__(
        self,
        listener: Listener,
        queue: str,
        prefetch: int,
        *,
        supervised: SupervisedConnection,
        republisher: Republisher,
        suspects: PoisonSuspects,
        lost_runs: LostRuns,
        declare: Callable[[], Awaitable[None]],
        observe: Observer,
        all_unacknowledged: set[Unacknowledged],
        largest_body: int = LARGEST_BODY,
    ) -> None:
        self.queue = queue
        most = min(prefetch, MOST_PREFETCH)
        # What waits for its lane is in hand too: with little in hand, one lane would keep all others from coming.
        self._prefetch = ConsumerPrefetch(listener.appetite if listener.lane is None else most, most, time.monotonic())
        self._consumed = ConsumedQueue(queue, listener, largest_body, republisher, suspects, lost_runs, self._prefetch)
        self._supervised = supervised
        self._declare = declare
        self._observe = observe
        self._consuming = Outage(f"consumer of {queue}", TRANSPORT, observe)
        self._connection: BrokerConnection | None = None  # on which it consumes, or did last
        self._isolation_queue = IsolationQueue(
            queue, supervised=supervised, republisher=republisher, reader=self._isolated_reader
        )
        self._all_unacknowledged = all_unacknowledged  # of the whole transport, which closes them
        self._current: Unacknowledged | None = None
        self._isolated: Unacknowledged | None = None
        self._ready: deque[RabbitmqDelivery] = deque()
        self._arrived = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._preparing: asyncio.Task[str | None] | None = None
        self._changing: asyncio.Future[None] | None = None
        self._closed = False

    async def __anext__(self) -> RabbitmqDelivery:
        if self._keeping is None and not self._closed:
            self._keeping = asyncio.create_task(self._keep(), name=f"outbox consumer of {self.queue}")
        while (delivery := self.take()) is None:
            if self._keeping is None or self._closed:
                raise StopAsyncIteration
            if self._keeping.done():
                self._keeping.result()  # raises what ended it
            self._arrived.clear()
            await self._arrived.wait()
        return delivery

    def take(self) -> RabbitmqDelivery | None:
        """The next one that did not expire, if it is there."""
        while self._ready:
            delivery = self._ready.popleft()
            if not delivery.expired:
                return delivery
            delivery.settle(Dead(Reason.EXPIRED, "its expiration passed before a listener took it"))
        return None

    async def aclose(self) -> None:
        """Consume no more and give back what no worker took. Deliveries that were taken stay until they are settled."""
        self._closed = True
        self._arrived.set()
        if self._preparing is not None:
            self._preparing.cancel()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping, *([] if self._changing is None else [self._changing])])
        unacknowledged = self._current
        if unacknowledged is not None:
            await unacknowledged.stop()
        while self._ready:
            self._ready.popleft().settle(Released())
        for each in (unacknowledged, self._isolated):
            if each is not None and each.idle:
                await self._close(each)

    def ready(self, delivery: RabbitmqDelivery) -> None:
        if self._closed:
            delivery.settle(Released())
        else:
            self._ready.append(delivery)
            self._arrived.set()

    def refused(self, attempt: Attempt, dead: Dead, settlement: Settlement | None = None) -> None:
        """Tell of a message that no listener was called for."""
        if settlement is None or (not settlement.cancelled() and settlement.result()):
            self._observe(Handled(self._consumed.listener.queue, attempt, dead, NO_DELAY))

    def when_prepared(self, line_up: Callable[[], None]) -> None:
        """Make the queue for isolated runs, and then let a suspected message wait for its run."""
        if self._preparing is None:
            self._preparing = asyncio.create_task(self._isolation_queue.name(), name=f"outbox trials of {self.queue}")
        if self._preparing.done():
            line_up()
        else:
            self._preparing.add_done_callback(lambda _: line_up())

    async def isolation_queue_name(self) -> str | None:
        return await self._isolation_queue.name()

    def lost(self, holder: Holder, handed_on: Iterable[RabbitmqDelivery]) -> None:
        """What came by this channel comes again by another. The worker that has taken some of it is told."""
        not_taken = {delivery for delivery in self._ready if delivery.holder is holder}
        self._ready = deque(delivery for delivery in self._ready if delivery.holder is not holder)
        if isinstance(holder, Unacknowledged):
            self._all_unacknowledged.discard(holder)
        if self._current is holder:
            self._current = None
        if self._isolated is holder:
            self._isolated = None
        if self.on_lost is not None:
            for delivery in handed_on:
                if delivery not in not_taken:
                    self._consumed.lost_runs.add(delivery)
            self.on_lost()

    def _isolated_reader(self, channel: Channel, name: str) -> Callable[[Incoming], object]:
        unacknowledged = self._isolated = Unacknowledged(channel, self._consumed, self, name)
        self._all_unacknowledged.add(unacknowledged)
        return unacknowledged.take

    async def _close(self, unacknowledged: Unacknowledged) -> None:
        await unacknowledged.close()
        self._all_unacknowledged.discard(unacknowledged)

    async def _keep(self) -> None:
        """Consume; after every end, consume again."""
        pace = Backoff(LONGEST_CONSUME_PAUSE, SHORTEST_CONSUME_PAUSE)
        try:
            while True:
                try:
                    raise await self._consume(pace)
                except TransportClosed:
                    raise
                except TransportUnavailable:
                    await asyncio.sleep(pace.pause())  # its connection tells why
                except Exception as error:  # a consumer outlives whatever its broker does
                    if cancelled_from_outside():
                        raise asyncio.CancelledError from error
                    pause = pace.pause()
                    self._consuming.struck(error, timedelta(seconds=pause), answered=self._answered(error))
                    await asyncio.sleep(pause)
        finally:
            self._arrived.set()

    def _answered(self, error: Exception) -> bool:
        """Whether the broker is there, and something is wrong with this queue alone."""
        if self._connection is None or self._connection.ended.done():
            return False
        if isinstance(error, Lost):
            return error.ended.code in _OF_A_CHANNEL or error.ended.text in CANCELLATIONS
        return isinstance(error, ConfigurationError)

    async def _consume(self, pace: Backoff) -> Exception:
        """From one beginning to its end, and why it ended."""
        connection = self._connection = await self._supervised.connection(within=LONGEST_CONSUME_PAUSE)
        channel = await connection.channel()
        unacknowledged = self._current = Unacknowledged(channel, self._consumed, self)
        self._all_unacknowledged.add(unacknowledged)
        try:
            self._prefetch.waiting(0)
            in_flight = self._prefetch.in_flight
            await channel.consume(self.queue, in_flight, unacknowledged.take)
        except Lost as error:
            if error.ended.code == _NOT_FOUND:
                await self._declare()
            return error
        pace.reset()
        self._consuming.over()
        while not channel.ended.done():
            await _either(channel.ended, self._prefetch.changed)
            self._prefetch.changed.clear()
            if not channel.ended.done():
                before, in_flight = in_flight, self._prefetch.in_flight
                self._changing = asyncio.ensure_future(self._change(channel, unacknowledged, before, in_flight))
                await asyncio.shield(self._changing)  # to be cut here would cost the channel, and what is on it
        return Lost(channel.ended.result())

    async def _change(self, channel: Channel, unacknowledged: Unacknowledged, before: int, after: int) -> None:
        """Have more in hand by a further consumer; have less by beginning anew.

        What is on its way to a consumer that ends goes back, and by the broker's count that looks like a crash.
        """
        with suppress(Lost, TimeoutError):
            if after < before:
                await unacknowledged.stop()
                before = 0
            if after > before:
                await channel.consume(self.queue, after - before, unacknowledged.take)


async def _either(ended: asyncio.Future[Any], changed: asyncio.Event) -> None:
    changing = asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait([ended, changing], return_when=asyncio.FIRST_COMPLETED)
    finally:
        changing.cancel()
