"""Router: gives stored messages their destinations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

from outbox.core.events import Observer, Routed, Unroutable
from outbox.core.store import Leased, Routing, Store, Wanted
from outbox.core.transport import Offer, Takers


class Router:
    """Moves messages from the outbox to the queues whose bindings match, a batch at a time.

    Beside a worker it routes no more than the worker's queues want, and those take it at once. While they want nothing
    it holds back, because it would only write rows that nobody reads yet: but not for long, others may wait for them.
    """

    def __init__(
        self,
        store: Store,
        takers: Takers,
        *,
        batch_size: int,
        patience: float,
        unroutable: Mapping[str, str],
        observe: Observer,
    ) -> None:
        self._store = store
        self._takers = takers
        self._largest = batch_size
        self.batch_size = batch_size  # of the last round
        self.asked = True  # whether the last round asked the store for anything
        self._patience = patience
        self._unroutable = unroutable
        self._observe = observe
        self._holding_back_since: float | None = None

    async def round(self) -> int:
        """Route one batch; how many messages it held."""
        with self._takers.offer() as offer:
            self.asked = not (self._takers.consuming and not offer.wanted and self._holds_back())
            if not self.asked:
                return 0
            self._holding_back_since = None
            wanted = sum(each.limit for each in offer.wanted.values()) or self._largest
            self.batch_size = min(self._largest, wanted)
            routing = await self._store.queues.route(self.batch_size, self._unroutable, offer.wanted)
            taken: dict[str, int] = {}
            for queue, claim in routing.claims.items():
                taken[queue] = offer.take(queue, claim)
        waiting = [queue for queue, count in routing.routed.items() if count > taken.get(queue, 0)]
        if waiting:
            self._store.queues.announce(*waiting)
        self._tell(routing)
        return routing.taken

    async def wait(self, longest: float) -> None:
        """Sleep until there may be something to route, or somebody to route it for."""
        if self._holding_back_since is None:
            await self._store.feed.wait(longest)
        else:
            await self._takers.room(longest)

    def _holds_back(self) -> bool:
        now = time.monotonic()
        if self._holding_back_since is None:
            self._holding_back_since = now
        return now - self._holding_back_since < self._patience

    def _tell(self, routing: Routing) -> None:
        for queue, count in routing.routed.items():
            self._observe(Routed(queue, count))
        for routing_key, count in routing.unroutable.items():
            self._observe(Unroutable(routing_key, count))


class _Nobody:
    """A process without consumers: everything is routed to the table, and nothing handed over."""

    consuming = False
    wanted: Mapping[str, Wanted] = MappingProxyType({})

    def offer(self) -> AbstractContextManager[Offer]:
        return nullcontext(self)

    def take(self, queue: str, claim: Leased) -> int:
        raise AssertionError(f"nobody wants {queue}")

    async def room(self, longest: float) -> None:
        await asyncio.sleep(longest)


NOBODY = _Nobody()
