"""Wake-up: what telling a worker at once costs those who commit."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

from sqlalchemy import create_engine, insert
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from bench import contenders
from bench.business import make_orders, orders
from bench.database import Database
from bench.programs.payload import body
from bench.report import Report, at_least, spread
from bench.settings import Settings
from bench.turns import in_turns, ratios
from outbox import Outbox

PRODUCERS = 8
SECONDS = 5.0  # in a turn


@dataclass(frozen=True)
class Way:
    name: str
    worker: bool
    wake: bool


NO_TAKERS = Way("no worker", worker=False, wake=True)
POLLING = Way("a worker that is not notified", worker=True, wake=False)
WOKEN = Way("a worker that is woken", worker=True, wake=True)


async def measure(database: Database, settings: Settings) -> Report:
    await make_orders(database)
    ways = [NO_TAKERS, POLLING, WOKEN]
    rates = await in_turns(ways, settings.rounds, lambda way: commits(database, way), lambda way: way.name)
    to_polling = ratios(rates[WOKEN.name], rates[POLLING.name])
    return Report(
        "Wake-ups",
        f"Transactions a second of {PRODUCERS} producers side by side in one process, each with a row of the "
        "application's own and a message. The worker drains them on the same machine, so the wake-ups are what lies "
        "between the last two lines.",
        ("", "commits/s", "to a worker that is not notified"),
        [(name, spread(values), spread(ratios(values, rates[POLLING.name]))) for name, values in rates.items()],
        [at_least("wake-up: commits a second, to a worker that is not notified", 0.9, to_polling)],
    )


async def commits(database: Database, way: Way) -> float:
    """Transactions a second of all producers together."""
    engine = create_async_engine(database.url_for("asyncpg"), pool_size=PRODUCERS)
    outbox = _outbox(database, engine, way)
    worker = contenders.ours(database)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.dispose)
        stack.push_async_callback(outbox.close)
        await produce(engine, outbox, seconds=0.1)  # makes the tables and the connections
        await worker.clear(database)
        if way.worker:
            working = await stack.enter_async_context(worker.working(tell_every=1))
            await produce(engine, outbox, seconds=0.1)
            await working.heard()
            working.ignore()
        begun = time.monotonic()
        return await produce(engine, outbox, SECONDS) / (time.monotonic() - begun)


def _outbox(database: Database, engine: AsyncEngine, way: Way) -> Outbox:
    if way.wake:
        return Outbox(db_engine=engine)
    # With a plain engine it has no connection of its own on this loop, and hence wakes nobody.
    return Outbox(db_engine=create_engine(database.url_for("psycopg")))


async def produce(engine: AsyncEngine, outbox: Outbox, seconds: float) -> int:
    """How many transactions were committed."""
    end = time.monotonic() + seconds

    async def one() -> int:
        count = 0
        while time.monotonic() < end:
            async with AsyncSession(engine) as session, session.begin():
                await session.execute(insert(orders), {"total": count})
                await outbox.emit(session, "bench.order", body(count))
            count += 1
        return count

    return sum(await asyncio.gather(*(one() for _ in range(PRODUCERS))))
