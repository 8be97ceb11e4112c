"""Metering: what is said to a database, counted in statements and in round trips."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox import Outbox
from outbox.core.store import Wanted
from tests.walk.round_trips import RoundTrips

MANY = 100
LEASE = timedelta(seconds=60)


@dataclass
class Cost:
    """What was used since the last look."""

    statements: int
    round_trips: int


class Meter:
    """An outbox whose every word to the database is counted, and a producer beside it who is not."""

    def __init__(self, outbox: Outbox, engine: AsyncEngine, producer: Outbox, trips: RoundTrips) -> None:
        self.outbox = outbox
        self.engine = engine
        self._producer = producer
        self._trips = trips
        self._statements: list[str] = []

    def count(self, connection: Connection, _: object, statement: str, *__: object) -> None:
        if connection.engine.url == self.engine.url:
            self._statements.append(statement)

    async def cost(self, work: Callable[[], Awaitable[object]]) -> Cost:
        self._statements.clear()
        before = self._trips.count
        await work()
        for statement in self._statements:
            print(statement)  # shown by pytest where a count is not what it was
        return Cost(len(self._statements), self._trips.count - before)

    async def emit(self, count: int = MANY, routing_key: str = "order.created") -> None:
        async with self._producer.transaction() as session:
            await self._producer.emit_many(session, routing_key, [{"number": n} for n in range(count)])

    async def routed(self, wanted: int = 0) -> Any:
        return await self.outbox.store.queues.route(MANY, {}, {"q": Wanted(wanted, LEASE)} if wanted else None)
