"""DatabaseTransport: the store's claims as deliveries. There is no SQL here and no broker anywhere."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Executable

from outbox.core.attempt import Attempt, Outcome, Released
from outbox.core.binding import Binding, Bindings
from outbox.core.dead_letter import DeadLetters
from outbox.core.events import Observer
from outbox.core.landing import Landing
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.outage import DATABASE, Outage
from outbox.core.pace import Pace
from outbox.core.store import IN_DATABASE, Claim, Lease, Leased, Rows, Store, Suspected, Wanted
from outbox.core.transport import Features, Published, Refusal

SETTLE_WITHIN = 0.02  # seconds that an outcome waits for others to be written with it
SETTLE_AGAIN = 0.1, 5.0  # seconds between two tries to write outcomes, doubling: the lease decides how long it matters
CLOSE_WITHIN = 5.0  # seconds that closing waits for outcomes to be written
LAST_WORDS = 8.0  # seconds more for those that a silent database holds up
IN_FLIGHT = 4  # claims that a queue may have open at once: one comes, one is at work, one is written
SHORT_WORK, LONG_WORK = 0.1, 1.0  # seconds that a claim lasts before the next one is larger, or smaller


class DatabaseTransport:
    """Queues in the database that the messages are already in."""

    name = IN_DATABASE
    features = Features(completes_in_transaction=True)

    def __init__(
        self,
        store: Store,
        *,
        lease: timedelta,
        poll_interval: float,
        observe: Observer,
        binds: bool = True,  # its queues, so that what is emitted here is routed to them
    ) -> None:
        self._store = store
        self._binds = binds
        self._observe = observe
        self._lease = lease
        self._poll_interval = poll_interval
        self._held = _Held(store.announce)
        self._consumers: set[DatabaseDeliveries] = set()
        self._changed = asyncio.Event()  # some consumer may want more

    @property
    def dead_letters(self) -> DeadLetters:
        return self._store.dead_letters

    async def open(self) -> None:
        """Nothing to connect to: the store is."""

    async def close(self) -> None:
        """Write the outcomes that are known and give back the rest."""
        await self._held.close()

    async def publish(self, messages: Sequence[Message]) -> Published:
        """Store messages straight in the queues that are bound to them."""
        bindings = Bindings(await self._store.bindings())
        destinations = {message.id: bindings.queues(message.routing_key) for message in messages}
        refused = {
            message.id: Refusal(f"no queue is bound to {message.routing_key!r}")
            for message in messages
            if not destinations[message.id]
        }
        await self._store.deliver(messages, destinations)
        return Published(frozenset(destinations) - frozenset(refused), refused)

    async def declare(self, listeners: Sequence[Listener]) -> None:
        if self._binds:
            await self._store.bind([listener.binding for listener in listeners])

    async def bindings(self, queues: Collection[str], *, at_start: bool = False) -> list[Binding] | None:
        if not self._binds:
            return None
        return [binding for binding in await self._store.bindings() if binding.queue in queues]

    async def unbind(self, binding: Binding) -> None:
        await self._store.unbind(binding.queue, binding.binding_key)

    def consume(self, listener: Listener, prefetch: int) -> DatabaseDeliveries:
        lease = listener.lease_time or self._lease
        deliveries = DatabaseDeliveries(
            self._store,
            listener,
            prefetch,
            lease,
            Pace(self._poll_interval),
            self._held,
            self._observe,
            changed=self._changed.set,
            closed=self._consumers.discard,
        )
        self._consumers.add(deliveries)
        return deliveries

    # The router of the same process hands over what it routes.

    @property
    def consuming(self) -> bool:
        return bool(self._consumers)

    @contextmanager
    def offer(self) -> Iterator[DatabaseOffer]:
        offer = DatabaseOffer()
        self._changed.clear()  # what changes from here on ends the next wait for room
        try:
            for deliveries in self._consumers:
                offer.ask(deliveries)
            yield offer
        finally:
            offer.withdraw()

    async def room(self, longest: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(longest):
                await self._changed.wait()


class DatabaseOffer:
    """Room that consumers keep free for the router until it has answered."""

    def __init__(self) -> None:
        self.wanted: dict[str, Wanted] = {}
        self._takers: dict[str, DatabaseDeliveries] = {}

    def ask(self, deliveries: DatabaseDeliveries) -> None:
        wanted = None if deliveries.queue in self.wanted else deliveries.reserve()
        if wanted is not None:
            self.wanted[deliveries.queue] = wanted
            self._takers[deliveries.queue] = deliveries

    def take(self, queue: str, claim: Leased) -> int:
        self._takers[queue].take_over(claim, self.wanted[queue].limit)
        return len(claim.attempts)

    def withdraw(self) -> None:
        for queue, deliveries in self._takers.items():
            deliveries.unreserve(self.wanted[queue].limit)


class DatabaseDelivery:
    """An attempt under a lease."""

    __slots__ = ("_batch", "attempt")

    def __init__(self, attempt: Attempt, batch: _Batch) -> None:
        self.attempt = attempt
        self._batch = batch

    @property
    def raw(self) -> Message:
        return self.attempt.message

    def completion(self) -> tuple[Executable, Rows]:
        return self._batch.claim.completion(self.attempt)

    def conclude(self, connection: Connection, outcome: Outcome) -> bool:
        return self._batch.claim.conclude(connection, self.attempt, outcome)

    @property
    def lease(self) -> Lease:
        return self._batch.claim.lease_on(self.attempt)

    @property
    def claim(self) -> Claim:
        return self._batch.claim

    async def start(self) -> DatabaseDelivery | None:
        return self if await self._batch.claim.start(self.attempt) else None

    async def settled(self) -> None:
        await self._batch.written.wait()

    def settle(self, outcome: Outcome) -> Landing:
        return self._batch.settle(self.attempt.id, outcome)


class DatabaseDeliveries:
    """The deliveries of one queue: claimed in batches ahead of the listener, given back if it does not take them."""

    def __init__(
        self,
        store: Store,
        listener: Listener,
        prefetch: int,
        lease: timedelta,
        pace: Pace,
        held: _Held,
        observe: Observer,
        *,
        changed: Callable[[], None],
        closed: Callable[[DatabaseDeliveries], None],
    ) -> None:
        self._store = store
        self.queue = listener.queue
        self._isolated_at = listener.isolated_at
        self._prefetch = prefetch
        self._appetite = _Appetite(listener.appetite, max(1, prefetch // IN_FLIGHT))
        self._lease = lease
        self._pace = pace
        self._held = held
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

    def __aiter__(self) -> DatabaseDeliveries:
        return self

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
        if len(self._ready) <= self._appetite.size // 2:
            self._room.set()
            self._changed()
        return delivery

    async def aclose(self) -> None:
        """Claim no more and give back what nobody took. Deliveries that were taken stay under their lease."""
        self._closed = True
        self._on_close(self)
        self._arrived.set()
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling], timeout=LAST_WORDS)
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
        self._appetite.had(len(claim.attempts), room)
        self._expect(len(claim.attempts))
        batch = None if self._closed else self._get_ready(self._batch(claim, claim.attempts))
        self._held.start(self._hold_leased(claim, batch), name=f"outbox lease on {self.queue}")

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
                        await self._store.wait(self._pace.pause(), destination=self.queue)
                    finally:
                        self._found_nothing = False
        finally:
            self._arrived.set()

    def _expect(self, count: int) -> None:
        self._unsettled += count
        self._coming += count

    def _wants(self) -> int:
        """How much to claim: nothing before less than half a claim is ready and there is room for another half."""
        size = self._appetite.size
        room = min(size, self._prefetch - self._unsettled - self._reserved)
        return 0 if len(self._ready) + self._coming > size // 2 or room < max(1, size // 2) else room

    async def _claim(self, room: int) -> bool:
        """Take a claim, held by a task of its own until all of it is settled; says whether there may be more."""
        taken: asyncio.Future[_Taken] = asyncio.get_running_loop().create_future()
        self._held.start(self._hold(room, taken), name=f"outbox lease on {self.queue}")
        count, suspected = await asyncio.shield(taken)
        self._appetite.had(count, room)
        if count:
            self._pace.reset()
        return count >= room or suspected  # others may wait behind a suspected one that was passed over

    async def _hold(self, room: int, taken: asyncio.Future[_Taken]) -> None:
        try:
            async with self._store.claim(
                room,
                lease=self._lease,
                destination=self.queue,
                suspected=self._held.wanted(self.queue),
                isolated_at=self._isolated_at,
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

    async def _hold_leased(self, leased: Leased, batch: _Batch | None) -> None:
        async with leased:
            if batch is not None:
                await self._serve(batch)

    def _batch(self, claim: Claim, attempts: Sequence[Attempt]) -> _Batch:
        return _Batch(claim, attempts, self._settled, self._cannot_write)

    def _get_ready(self, batch: _Batch) -> _Batch:
        self._coming -= len(batch.attempts)
        self._ready.extend(DatabaseDelivery(attempt, batch) for attempt in batch.attempts)
        self._arrived.set()
        return batch

    async def _serve(self, batch: _Batch) -> None:
        """Write outcomes until all are written."""
        with self._held.batch(batch):
            await batch.write()

    async def _serve_suspected(self, claim: Claim, suspected: Sequence[Attempt]) -> None:
        """A batch of its own for the suspected one: the next can be taken when its own outcome is written."""
        alone = self._batch(claim, suspected)
        others = self._batch(claim, [attempt for attempt in claim.attempts if attempt not in suspected])
        if self._held.hold_suspected(alone, self.queue):
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
        self._appetite.digested(count)
        self._room.set()
        self._changed()


_Taken = tuple[int, bool]  # how many messages a claim took, and whether one of them is suspected


class _Batch:
    """A claim whose outcomes are written together."""

    def __init__(
        self,
        claim: Claim,
        attempts: Sequence[Attempt],
        settled: Callable[[int], None],
        cannot_write: Callable[[Exception, float], None],
    ) -> None:
        self.claim = claim
        self.attempts = attempts
        self._settled = settled
        self._cannot_write = cannot_write
        self._open = {attempt.id for attempt in attempts}
        self._outcomes: dict[int, Outcome] = {}
        self._landings: dict[int, Landing] = {}
        self.written = asyncio.Event()  # all of them, or they never will be
        self._some = asyncio.Event()
        self._all = asyncio.Event()
        self._closing = False

    def settle(self, id: int, outcome: Outcome) -> Landing:
        """Note an outcome; the landing tells whether it was written."""
        landing = Landing()
        if id not in self._open or id in self._landings:
            landing.cancel()
            return landing
        self._outcomes[id] = outcome
        self._landings[id] = landing
        self._some.set()
        if len(self._outcomes) == len(self._open):
            self._all.set()
        return landing

    async def write(self) -> None:
        """Write outcomes as they come, until there are none to come."""
        while self._open and not (self._closing and not self._outcomes):
            await self._some.wait()
            if not self._closing:
                with suppress(TimeoutError):
                    async with asyncio.timeout(SETTLE_WITHIN):
                        await self._all.wait()
            self._some.clear()
            outcomes, self._outcomes = self._outcomes, {}
            if outcomes:
                self._written(outcomes, await self._try(outcomes))

    def close(self) -> None:
        """Expect no more outcomes."""
        self._closing = True
        self._some.set()
        self._all.set()

    def end(self) -> None:
        """Nobody writes any more: whoever waits for an outcome to land is let go."""
        self._open.clear()
        self.written.set()
        for landing in self._landings.values():
            landing.cancel()

    async def _try(self, outcomes: Mapping[int, Outcome]) -> frozenset[int]:
        again = Pace(SETTLE_AGAIN[1], SETTLE_AGAIN[0])
        while True:
            try:
                return await self.claim.settle(outcomes)
            except Exception as error:
                if self._closing:
                    raise
                # The database is away, or refuses. Every write is fenced, so trying again can do no harm.
                pause = again.pause()
                self._cannot_write(error, pause)
                await asyncio.sleep(pause)

    def _written(self, outcomes: Mapping[int, Outcome], lost: frozenset[int]) -> None:
        self._open -= outcomes.keys()
        self._settled(len(outcomes))
        for id in outcomes:
            self._landings.pop(id).set_result(id not in lost)


class _Held:
    """The claims that are open, each in a task of its own.

    No more than one of their messages is a suspected poison message: of two, the one that kills its worker again would
    count against the other.
    """

    def __init__(self, announce: Callable[..., None]) -> None:
        self._announce = announce
        self._tasks: set[asyncio.Task[None]] = set()
        self._batches: set[_Batch] = set()
        self._suspected: _Batch | None = None
        self._waiting: set[str] = set()  # queues that may have suspected messages, which cannot be taken yet

    def start(self, holding: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(holding, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def wanted(self, queue: str) -> Suspected:
        """Whether a suspected message may be claimed; if not, the queue is notified when one may."""
        if self._suspected is None:
            return Suspected.ONE
        self._waiting.add(queue)
        return Suspected.NONE

    def hold_suspected(self, batch: _Batch, queue: str) -> bool:
        """Whether this is the only one, until it is settled."""
        if self.wanted(queue) is Suspected.NONE:
            return False
        self._suspected = batch
        return True

    @contextmanager
    def batch(self, batch: _Batch) -> Iterator[None]:
        self._batches.add(batch)
        try:
            yield
        finally:
            self._batches.discard(batch)
            batch.end()
            if batch is self._suspected:
                self._suspected = None
                waiting, self._waiting = self._waiting, set()
                self._announce(*waiting)

    async def close(self) -> None:
        for batch in self._batches:
            batch.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_WITHIN)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_WORDS)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a claim that could not be written runs out: later, not lost


class _Appetite:
    """How much to claim at once: more while claims are used up quickly, less while they last."""

    def __init__(self, least: int, most: int) -> None:
        self._least = min(least, most)
        self._most = most
        self.size = self._least
        self._digested = 0
        self._had_at = time.monotonic()

    def digested(self, count: int) -> None:
        """So many were settled."""
        self._digested += count

    def had(self, count: int, wanted: int) -> None:
        """A claim wanted so many and got that many."""
        now = time.monotonic()
        lasted, self._had_at = now - self._had_at, now
        if count >= wanted and lasted < SHORT_WORK and self._digested >= max(1, self.size // 2):
            self.size = min(self._most, self.size * 2)
        elif lasted > LONG_WORK:
            self.size = max(self._least, self.size // 2)
        self._digested = 0
