"""Router: gives stored messages their destinations."""

from __future__ import annotations

from collections.abc import Mapping

from outbox.core.events import Observer, Routed, Unroutable
from outbox.core.store import Store


class Router:
    """Moves messages from the outbox to the queues whose bindings match, a batch at a time."""

    def __init__(self, store: Store, *, batch_size: int, unroutable: Mapping[str, str], observe: Observer) -> None:
        self._store = store
        self.batch_size = batch_size
        self._unroutable = unroutable
        self._observe = observe

    async def round(self) -> int:
        """Route one batch; how many messages it held."""
        routing = await self._store.route(self.batch_size, self._unroutable)
        if routing.routed:
            self._store.announce(*routing.routed)
        for queue, count in routing.routed.items():
            self._observe(Routed(queue, count))
        for routing_key, count in routing.unroutable.items():
            self._observe(Unroutable(routing_key, count))
        return routing.taken
