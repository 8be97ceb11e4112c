"""DatabaseTransport: the store's claims as deliveries. There is no SQL here and no broker anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

from outbox.core.backoff import Backoff
from outbox.core.binding import Binding, Bindings
from outbox.core.events import Observer
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.store import IN_DATABASE, Store
from outbox.core.transport import Features, Published, Refusal, Report, Transport, unreported
from outbox.transports.database.claims import OpenClaims
from outbox.transports.database.consumer import DatabaseConsumer, DatabaseOffer


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
