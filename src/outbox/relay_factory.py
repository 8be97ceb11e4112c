"""RelayFactory: what a process runs to hand messages on and to clean up, made from the settings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from outbox.core.binding import Binding
from outbox.core.events import Advised, Bound, Observer, Unbound
from outbox.core.log import LogReader
from outbox.core.store import Feed, Store
from outbox.core.transport import Takers, Transport
from outbox.outbound.circuit import Breaker, Circuits
from outbox.outbound.cleanup import Cleanup
from outbox.outbound.publishing import Publisher
from outbox.outbound.relay import NO_TAKERS, Relay, Round, Rounds, Router
from outbox.rebinding import further_keys
from outbox.settings import Settings

CLEAN_UP_EVERY = 10  # poll intervals


class Running(Protocol):
    """A part of a process that works until it is told to stop."""

    async def run(self, stop: asyncio.Event) -> None: ...


class RelayFactory:
    """Makes the relays of one outbox."""

    def __init__(self, store: Store, settings: Settings, observe: Observer) -> None:
        self._store = store
        self._settings = settings
        self._observe = observe

    def of(
        self, transport: Transport, relay: bool, *, routes: bool = True, reader: LogReader | None = None
    ) -> list[Running]:
        """Those of a process: each cleans up; a relay publishes; with queues in the database, a router routes."""
        look = self._settings.seconds_between_looks
        relays: list[Running] = [self._relay(self.cleanup(), asyncio.sleep, look * CLEAN_UP_EVERY, "cleanup")]
        relays += [] if reader is None else [reader]
        if transport.takers is not None:
            relays += [self._routing(transport.takers)] if routes else []
        elif transport.routes and relay:
            relays.append(self._routing(NO_TAKERS))
            circuits = Circuits(self._store)
            relays += [self._publishing(each.transport, circuits, each.name) for each in transport.routes]
        elif relay:
            feed = None if reader is None else reader.feed
            relays.append(self._publishing(transport, Circuits(self._store), feed=feed))
        return relays

    def rounds(self, transport: Transport) -> list[Round]:
        """The same work, for a caller that does it round by round and shares nothing with others."""
        if transport.takers is not None:
            return [self.cleanup(), self._router(transport.takers)]
        if transport.routes:
            publishers = [self._publisher(each.transport, None, each.name) for each in transport.routes]
            return [self.cleanup(), self._router(NO_TAKERS), *publishers]
        return [self.cleanup(), self._publisher(transport)]

    async def bind(self, transport: Transport) -> None:
        """Ask for what the routes are to get. What others asked for before stays and is told, or goes."""
        bindings = [binding for route in transport.routes for binding in route.bindings]
        await self._store.queues.bind(bindings)
        for binding in bindings:
            self._observe(Bound(binding))
        for further in further_keys(await self._store.queues.bindings(), transport.routes):
            if further.is_routes and self._settings.rebind_queues:
                for key in further.keys:
                    await self._store.queues.unbind(further.queue, key)
                    self._observe(Unbound(Binding(further.queue, key)))
            else:
                self._observe(Advised("relay", f"{further.told}. If nothing else serves them, {further.removal}"))

    def cleanup(self) -> Cleanup:
        return Cleanup(
            self._store,
            clean_up_after=self._settings.clean_up_after,
            inbox_retention=self._settings.inbox_retention,
            observe=self._observe,
        )

    def _routing(self, takers: Takers) -> Relay:
        router = self._router(takers)
        return self._relay(router, router.wait, self._settings.seconds_between_looks, "relay")

    def _router(self, takers: Takers) -> Router:
        return Router(
            self._store,
            takers,
            batch_size=self._settings.batch_size,
            patience=self._settings.seconds_between_looks,
            unroutable=self._settings.unroutable,
            observe=self._observe,
        )

    def _publishing(
        self, transport: Transport, circuits: Circuits, destination: str | None = None, *, feed: Feed | None = None
    ) -> Relay:
        breaker = self._breaker(circuits, destination) if transport.features.shares_outages else None
        publisher = self._publisher(transport, breaker, destination, feed)
        return self._relay(
            publisher,
            publisher.wait,
            self._settings.seconds_between_looks,
            "relay" if destination is None else f"relay to {destination}",
            destination=destination,
            back=transport.back,
            rounds=Rounds(publisher),
        )

    def _breaker(self, circuits: Circuits, destination: str | None) -> Breaker:
        return Breaker(
            self._store,
            circuits,
            destination,
            batch_size=self._settings.batch_size,
            lease=self._settings.duration("lease"),
            observe=self._observe,
            restart_delay=self._settings.restart_delay,
        )

    def _publisher(
        self,
        transport: Transport,
        breaker: Breaker | None = None,
        destination: str | None = None,
        feed: Feed | None = None,
    ) -> Publisher:
        return Publisher(
            feed or self._store.feed,
            transport,
            batch_size=self._settings.batch_size,
            lease=self._settings.duration("lease"),
            retry_policy=self._settings.policy("relay_retry_delays"),
            observe=self._observe,
            destination=destination,
            breaker=breaker,
        )

    def _relay(
        self,
        work: Round,
        wait: Callable[[float], Awaitable[None]],
        longest: float,
        name: str,
        *,
        destination: str | None = None,
        back: Callable[[], Awaitable[None]] | None = None,
        rounds: Rounds | None = None,
    ) -> Relay:
        return Relay(
            work,
            wait=wait,
            poll_interval=longest,
            observe=self._observe,
            name=name,
            destination=destination,
            back=back,
            restart_delay=self._settings.restart_delay,
            rounds=rounds,
        )
