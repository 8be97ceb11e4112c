"""SqlQueues: everything that concerns queues in the database."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection

from outbox.core.binding import Binding
from outbox.core.message import Message
from outbox.core.store import Lease, Receipt, Routing, Seal, Wanted
from outbox.stores.bindings import SqlBindings
from outbox.stores.receiving import PlacingStatements, SqlReceiving
from outbox.stores.routing import SqlRouting
from outbox.stores.rows import placed_row
from outbox.stores.runner import Runner
from outbox.stores.settling import SqlSettling
from outbox.stores.wakeup import Wakeup


class SqlQueues:
    """Bindings, messages on their way into queues, and the end of many of them at once."""

    def __init__(
        self,
        runner: Runner,
        *,
        bindings: SqlBindings,
        routing: SqlRouting,
        receiving: SqlReceiving,
        placing: PlacingStatements,
        settling: SqlSettling,
        wakeup: Wakeup,
    ) -> None:
        self._runner = runner
        self._bindings = bindings
        self._routing = routing
        self._receiving = receiving
        self._placing = placing
        self._settling = settling
        self._wakeup = wakeup

    async def bind(self, bindings: Sequence[Binding]) -> None:
        await self._bindings.bind(bindings)

    async def unbind(self, queue: str, binding_key: str | None = None) -> int:
        return await self._bindings.unbind(queue, binding_key)

    async def bindings(self) -> list[Binding]:
        return await self._runner.look(self._bindings.read)

    def route(
        self, limit: int, unroutable: Mapping[str, str], wanted: Mapping[str, Wanted] | None = None
    ) -> Coroutine[Any, Any, Routing]:
        return self._routing.route(limit, unroutable, wanted or {})

    async def deliver(self, messages: Sequence[Message], destinations: Mapping[str, Sequence[str]]) -> None:
        rows = [placed_row(queue, message) for message in messages for queue in destinations.get(message.id, ())]
        if rows:
            await self._runner.transact(lambda connection: connection.execute(self._placing.place, rows))
            self._wakeup.announce(*{row["queue"] for row in rows})

    def receive(
        self, queue: str, messages: Sequence[Message], *, also: str | None = None, seals: Sequence[Seal] = ()
    ) -> Coroutine[Any, Any, Receipt]:
        return self._receiving.receive(queue, messages, also, seals)

    def complete(self, connection: Connection, leases: Sequence[Lease]) -> set[int]:
        return self._settling.complete(connection, leases)

    def announce(self, *destinations: str | None) -> None:
        self._wakeup.announce(*destinations)
