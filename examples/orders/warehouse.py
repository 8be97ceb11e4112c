"""Warehouse: reserves something for each order that it hears of over HTTP, and tells the shop."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import after_commit, emit, http_app, listen, running, setup, transaction

SECRET = os.environ["ORDERS_SECRET"]
STOCK = int(os.environ.get("STOCK", "100"))

setup(
    db_engine_url="sqlite+aiosqlite:///warehouse.db",
    transport=os.environ["SHOP_URL"],
    source="/warehouse",
    webhook_secrets=SECRET,
)

# No key for reservations: nothing but the inbox keeps an order from having two.
TABLES = (
    "CREATE TABLE IF NOT EXISTS stock (item TEXT PRIMARY KEY, pieces INTEGER)",
    "CREATE TABLE IF NOT EXISTS reservations (order_id TEXT)",
)


@listen("order.created", queue="reservations")
async def reserve(order: dict[str, object], session: AsyncSession) -> None:
    take = text("UPDATE stock SET pieces = pieces - 1 WHERE item = 'book' AND pieces > 0 RETURNING pieces")
    order_id = order["order_id"]
    if (await session.execute(take)).first() is None:
        await emit(session, "stock.missing", {"order_id": order_id})
        return
    await session.execute(text("INSERT INTO reservations VALUES (:id)"), {"id": order_id})
    await emit(session, "stock.reserved", {"order_id": order_id})
    after_commit(session, lambda: print("reserved a book for", order_id, flush=True))


events = http_app([reserve], secrets=SECRET)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with transaction() as session:
        for statement in TABLES:
            await session.execute(text(statement))
        fill = text("INSERT INTO stock VALUES ('book', :pieces) ON CONFLICT DO NOTHING")
        await session.execute(fill, {"pieces": STOCK})
    async with running(relay=True), events.running():
        yield


app = FastAPI(lifespan=lifespan)
app.mount("/events", events)
