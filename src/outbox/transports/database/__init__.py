"""DatabaseTransport: the store's claims as deliveries. There is no SQL here and no broker anywhere."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

from outbox.core.attempt import Attempt, Released
from outbox.core.backoff import DATABASE, Backoff, Outage, Prefetch
from outbox.core.binding import Binding, Bindings
from outbox.core.events import Observer
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.store import IN_DATABASE, Leased, QueueClaim, Selection, Store, Wanted
from outbox.core.transport import Consumer, Features, Published, Refusal, Report, Transport, unreported
from outbox.transports.database.claims import SHUTDOWN_TIMEOUT, ClaimedBatch, DatabaseDelivery, OpenClaims

IN_FLIGHT = 4  # claims that a queue may have open at once: one comes, one is at work, one is written

_Taken = tuple[int, bool]  # how many messages a claim took, and whether one of them is suspected


class DatabaseConsumer(Consumer):
    """What its listener does not take is given back."""

    def __init__(
        self,
        store: Store,
        listener: Listener,
        prefetch: int,
        lease: timedelta,
        pace: Backoff,
        open_claims: OpenClaims,
        observe: Observer,
        *,
        changed: Callable[[], None],
        closed: Callable[[DatabaseConsumer], None],
    ) -> None:
        self._store = store
        self.queue = listener.queue
        self._isolated_at = listener.isolated_at
        self._prefetch = prefetch
        self._claim_size = Prefetch(listener.appetite, max(1, prefetch // IN_FLIGHT), growth=2)
        self._lease = lease
        self._pace = pace
        self._open_claims = open_claims
        self._writing = Outage(f"outcomes of {listener.queue}", DATABASE, observe)
        self._ready: deque[DatabaseDelivery] = deque()
        self._unsettled = 0
        self._coming = 0  # claimed, and ready in a moment
        self._reserved = 0
        self._found_nothing = False  # nothing waits in the queue itself
        self._changed = changed
        self._on_close = closed
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._filling: asyncio.Task[None] | None = None
        self._closed = False

    async def __anext__(self) -> DatabaseDelivery:
        if self._filling is None and not self._closed:
            self._filling = asyncio.create_task(self._fill(), name=f"outbox claims for {self.queue}")
        while not self._ready:
            if self._filling is None or self._closed:
                raise StopAsyncIteration
            if self._filling.done():
                self._filling.result()  # raises what ended it
            self._arrived.clear()
            await self._arrived.wait()
        return self._first()

    def take(self) -> DatabaseDelivery | None:
        """The next one, if it is there."""
        return self._first() if self._ready else None

    def _first(self) -> DatabaseDelivery:
        delivery = self._ready.popleft()
        if len(self._ready) <= self._claim_size.size // 2:
            self._room.set()
            self._changed()
        return delivery

    async def aclose(self) -> None:
        """Claim no more and give back what no worker took. Deliveries that were taken stay under their lease."""
        self._closed = True
        self._on_close(self)
        self._arrived.set()
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling], timeout=SHUTDOWN_TIMEOUT)
        while self._ready:
            self._ready.popleft().settle(Released())

    def reserve(self) -> Wanted | None:
        """Keep room for the router, if nothing is left to be claimed from the queue itself."""
        room = self._wants() if self._found_nothing and not self._closed else 0
        self._reserved += room
        return Wanted(room, self._lease) if room else None

    def unreserve(self, room: int) -> None:
        self._reserved -= room
        self._room.set()

    def take_over(self, claim: Leased, room: int) -> None:
        """Hold what the router leased, ready at once."""
        self._adapt(len(claim.attempts), room)
        self._expect(len(claim.attempts))
        batch = None if self._closed else self._get_ready(self._batch(claim, claim.attempts))
        self._open_claims.start(self._hold_leased(claim, batch), name=f"outbox lease on {self.queue}")

    async def _fill(self) -> None:
        try:
            while True:
                room = self._wants()
                if not room:
                    self._room.clear()
                    await self._room.wait()
                elif not await self._claim(room):
                    self._found_nothing = True
                    self._changed()
                    try:
                        await self._store.feed.wait(self._pace.pause(), destination=self.queue)
                    finally:
                        self._found_nothing = False
        finally:
            self._arrived.set()

    def _expect(self, count: int) -> None:
        self._unsettled += count
        self._coming += count

    def _wants(self) -> int:
        """How much to claim: nothing before less than half a claim is ready and there is room for another half."""
        size = self._claim_size.size
        room = min(size, self._prefetch - self._unsettled - self._reserved)
        return 0 if len(self._ready) + self._coming > size // 2 or room < max(1, size // 2) else room

    async def _claim(self, room: int) -> bool:
        """Take a claim, held by a task of its own until all of it is settled; says whether there may be more."""
        taken: asyncio.Future[_Taken] = asyncio.get_running_loop().create_future()
        self._open_claims.start(self._hold(room, taken), name=f"outbox lease on {self.queue}")
        count, suspected = await asyncio.shield(taken)
        self._adapt(count, room)
        if count:
            self._pace.reset()
        return count >= room or suspected  # others may wait behind a suspected one that was passed over

    async def _hold(self, room: int, taken: asyncio.Future[_Taken]) -> None:
        try:
            async with self._store.feed.claim(
                Selection(
                    limit=room,
                    lease=self._lease,
                    destination=self.queue,
                    suspected=self._open_claims.wanted(self.queue),
                    isolated_at=self._isolated_at,
                )
            ) as claim:
                if self._closed:
                    return  # leaving gives everything back
                suspected = [attempt for attempt in claim.attempts if attempt.crash_count]
                self._expect(len(claim.attempts))
                taken.set_result((len(claim.attempts), bool(suspected)))
                if suspected:
                    await self._serve_suspected(claim, suspected)
                else:
                    await self._serve(self._get_ready(self._batch(claim, claim.attempts)))
        except Exception as error:
            if taken.done():
                raise
            taken.set_exception(error)
        finally:
            if not taken.done():
                taken.set_result((0, False))

    async def _hold_leased(self, leased: Leased, batch: ClaimedBatch | None) -> None:
        async with leased:
            if batch is not None:
                await self._serve(batch)

    def _batch(self, claim: QueueClaim, attempts: Sequence[Attempt]) -> ClaimedBatch:
        return ClaimedBatch(claim, attempts, self._settled, self._cannot_write)

    def _get_ready(self, batch: ClaimedBatch) -> ClaimedBatch:
        self._coming -= len(batch.attempts)
        self._ready.extend(DatabaseDelivery(attempt, batch) for attempt in batch.attempts)
        self._arrived.set()
        return batch

    async def _serve(self, batch: ClaimedBatch) -> None:
        """Write outcomes until all are written."""
        with self._open_claims.batch(batch):
            await batch.write()

    async def _serve_suspected(self, claim: QueueClaim, suspected: Sequence[Attempt]) -> None:
        """A batch of its own for the suspected one: the next can be taken when its own outcome is written."""
        alone = self._batch(claim, suspected)
        others = self._batch(claim, [attempt for attempt in claim.attempts if attempt not in suspected])
        if self._open_claims.hold_suspected(alone, self.queue):
            self._get_ready(alone)
        else:  # another queue was faster
            self._coming -= len(suspected)
            for attempt in suspected:
                alone.settle(attempt.id, Released())
        self._get_ready(others)
        async with asyncio.TaskGroup() as serving:
            serving.create_task(self._serve(alone))
            serving.create_task(self._serve(others))

    def _cannot_write(self, error: Exception, pause: float) -> None:
        self._writing.struck(error, timedelta(seconds=pause))

    def _settled(self, count: int) -> None:
        self._writing.over()
        self._unsettled -= count
        self._claim_size.settled += count
        self._room.set()
        self._changed()

    def _adapt(self, count: int, wanted: int) -> None:
        """A claim wanted so many and got that many."""
        size = self._claim_size
        size.adapt(time.monotonic(), grows=count >= wanted and size.settled >= max(1, size.size // 2))


class DatabaseOffer:
    """What the consumers of this process would take at this moment."""

    def __init__(self) -> None:
        self.wanted: dict[str, Wanted] = {}
        self._takers: dict[str, DatabaseConsumer] = {}

    def ask(self, consumer: DatabaseConsumer) -> None:
        wanted = None if consumer.queue in self.wanted else consumer.reserve()
        if wanted is not None:
            self.wanted[consumer.queue] = wanted
            self._takers[consumer.queue] = consumer

    def take(self, queue: str, claim: Leased) -> int:
        self._takers[queue].take_over(claim, self.wanted[queue].limit)
        return len(claim.attempts)

    def withdraw(self) -> None:
        for queue, consumer in self._takers.items():
            consumer.unreserve(self.wanted[queue].limit)


class DatabaseTransport(Transport):
    """Queues in the database that the messages are already in."""

    name = IN_DATABASE
    features = Features(in_store=True, completes_in_transaction=True, changes_bindings=True, movable_clock=True)

    def __init__(
        self,
        store: Store,
        *,
        lease: timedelta,
        poll_interval: float,
        observe: Observer,
        binds: bool = True,  # its queues, so that what is emitted here is routed to them
    ) -> None:
        self.dead_letters = store.dead_letters
        self._store = store
        self._binds = binds
        self._observe = observe
        self._lease = lease
        self._poll_interval = poll_interval
        self._open_claims = OpenClaims(store.queues.announce)
        self._consumers: set[DatabaseConsumer] = set()
        self._changed = asyncio.Event()  # some consumer may want more

    async def close(self) -> None:
        """Write the outcomes that are known and give back the rest."""
        await self._open_claims.close()

    async def publish(self, messages: Sequence[Message], report: Report = unreported) -> Published:
        """Store messages straight in the queues that are bound to them."""
        bindings = Bindings(await self._store.queues.bindings())
        destinations = {message.id: bindings.queues(message.routing_key) for message in messages}
        refused = {
            message.id: Refusal(f"no queue is bound to {message.routing_key!r}")
            for message in messages
            if not destinations[message.id]
        }
        await self._store.queues.deliver(messages, destinations)
        return Published(frozenset(destinations) - frozenset(refused), refused)

    async def declare(self, listeners: Sequence[Listener]) -> None:
        if self._binds:
            await self._store.queues.bind([listener.binding for listener in listeners])

    async def bindings(self, queues: Collection[str], *, at_start: bool = False) -> list[Binding] | None:
        if not self._binds:
            return None
        return [binding for binding in await self._store.queues.bindings() if binding.queue in queues]

    async def unbind(self, binding: Binding) -> None:
        await self._store.queues.unbind(binding.queue, binding.binding_key)

    def consume(self, listener: Listener, prefetch: int) -> DatabaseConsumer:
        lease = listener.lease_time or self._lease
        consumer = DatabaseConsumer(
            self._store,
            listener,
            prefetch,
            lease,
            Backoff(self._poll_interval),
            self._open_claims,
            self._observe,
            changed=self._changed.set,
            closed=self._consumers.discard,
        )
        self._consumers.add(consumer)
        return consumer

    # The router of the same process hands over what it routes.

    @property
    def takers(self) -> DatabaseTransport:
        return self

    @property
    def consuming(self) -> bool:
        return bool(self._consumers)

    @contextmanager
    def offer(self) -> Iterator[DatabaseOffer]:
        offer = DatabaseOffer()
        self._changed.clear()  # what changes from here on ends the next wait for room
        try:
            for consumer in self._consumers:
                offer.ask(consumer)
            yield offer
        finally:
            offer.withdraw()

    async def room(self, longest: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(longest):
                await self._changed.wait()
