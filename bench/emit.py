"""Emit: what a message costs the transaction that writes it, beside a row inserted by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from sqlalchemy import func, insert
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from bench.business import make_orders, orders
from bench.database import Database
from bench.programs.payload import body
from bench.report import Report, at_least, number, spread
from bench.settings import Settings
from bench.turns import in_turns, ratios
from outbox import Outbox

DRIVERS = ("asyncpg", "psycopg")
TRANSACTIONS = 100  # in a turn
TURNS = 10  # in a round: short ones, so that both meet the same disk


@dataclass(frozen=True)
class Way:
    """A way to write a message in the transaction of a session."""

    name: str
    write: Callable[[AsyncSession, int], Awaitable[object]]


async def measure(database: Database, settings: Settings) -> Report:
    rows, targets = [], []
    await make_orders(database)
    for driver in DRIVERS:
        rates = await in_turns_through(driver, database, settings)
        to_hand = ratios(rates["emit"], rates["by hand"])
        rows += [(f"{driver}, {name}", spread(values)) for name, values in rates.items()]
        rows += [(f"{driver}, ratio", spread(to_hand))]
        targets.append(at_least(f"emit: commits a second through {driver}, to an insert by hand", 0.9, to_hand))
    return Report(
        "Emit",
        f"Transactions a second of one AsyncSession after the other, each with a row of the application's own and a "
        f"message; by hand means a Core insert into a table of the same shape. {settings.rounds * TURNS} turns of "
        f"{number(TRANSACTIONS)} transactions.",
        ("", "commits/s"),
        rows,
        targets,
    )


async def in_turns_through(driver: str, database: Database, settings: Settings) -> dict[str, list[float]]:
    engine = create_async_engine(database.url_for(driver))
    by_hand, by_outbox = (Outbox(db_engine=engine, table_name=f"by_{who}_{driver}") for who in ("hand", "outbox"))
    ways = [await by_core(by_hand), await by_emit(by_outbox)]
    rates = await in_turns(ways, settings.rounds * TURNS, lambda way: commits(engine, way), lambda way: way.name)
    await by_hand.close()
    await by_outbox.close()
    await engine.dispose()
    return rates


async def by_core(outbox: Outbox) -> Way:
    await outbox.create_tables()
    statement = insert(outbox.tables.messages).values(due_at=func.now())

    async def write(session: AsyncSession, count: int) -> object:
        return await session.execute(statement, row(count))

    return Way("by hand", write)


def row(count: int) -> dict[str, Any]:
    return {
        "message_id": str(uuid4()),
        "routing_key": "bench.order",
        "content_type": "application/json",
        "created_at": datetime.now(UTC),
        "body": json.dumps(body(count)).encode(),
    }


async def by_emit(outbox: Outbox) -> Way:
    await outbox.create_tables()

    async def write(session: AsyncSession, count: int) -> object:
        return await outbox.emit(session, "bench.order", body(count))

    return Way("emit", write)


async def commits(engine: AsyncEngine, way: Way) -> float:
    """Transactions a second."""
    begun = time.monotonic()
    for count in range(TRANSACTIONS):
        async with AsyncSession(engine) as session, session.begin():
            await session.execute(insert(orders), {"total": count})
            await way.write(session, count)
    return TRANSACTIONS / (time.monotonic() - begun)
