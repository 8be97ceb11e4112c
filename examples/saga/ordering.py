"""Ordering: an order goes from step to step, each in a transaction, and back again if one is refused."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Message, backlog, emit, listen, running, setup, transaction, transactional

setup(db_engine_url="sqlite+aiosqlite:///ordering.db")

TABLES = (
    "CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, pieces INTEGER, card TEXT, status TEXT)",
    "CREATE TABLE IF NOT EXISTS stock (item TEXT PRIMARY KEY, pieces INTEGER)",
    "CREATE TABLE IF NOT EXISTS payments (order_id TEXT)",
    "CREATE TABLE IF NOT EXISTS shipments (order_id TEXT)",
    "INSERT INTO stock VALUES ('book', 1000) ON CONFLICT DO NOTHING",
)


class Order(BaseModel):
    id: str
    pieces: int
    card: str


@transactional
async def place_order(order: Order, session: AsyncSession) -> None:
    await session.execute(text("INSERT INTO orders VALUES (:id, :pieces, :card, 'placed')"), order.model_dump())
    await emit(session, "order.placed", order)


# The way forward: what a step has done and the message that leads to the next one are one transaction.


@listen("order.placed", queue="inventory")
async def reserve_inventory(order: Order, session: AsyncSession) -> None:
    take = text("UPDATE stock SET pieces = pieces - :pieces WHERE item = 'book' AND pieces >= :pieces RETURNING item")
    taken = (await session.execute(take, {"pieces": order.pieces})).first()
    await emit(session, "inventory.reserved" if taken else "order.failed", order)


@listen("inventory.reserved", queue="payment")
async def charge_payment(order: Order, session: AsyncSession) -> None:
    if order.card == "blocked":
        await emit(session, "payment.refused", order)
        return
    await session.execute(text("INSERT INTO payments VALUES (:id)"), {"id": order.id})
    await emit(session, "payment.charged", order)


@listen("payment.charged", queue="shipping")
async def ship_order(order: Order, session: AsyncSession) -> None:
    await session.execute(text("INSERT INTO shipments VALUES (:id)"), {"id": order.id})
    await emit(session, "order.shipped", order)


@listen("order.shipped", queue="completion")
async def complete_order(order: Order, session: AsyncSession) -> None:
    await end(order, "completed", session)


# The way back: a compensation is a step like any other, and undoes what an earlier one has done.


@listen("payment.refused", queue="inventory.release")
async def release_inventory(order: Order, session: AsyncSession) -> None:
    give_back = text("UPDATE stock SET pieces = pieces + :pieces WHERE item = 'book'")
    await session.execute(give_back, {"pieces": order.pieces})
    await emit(session, "inventory.released", order)
    await emit(session, "order.failed", order)


@listen("order.failed", queue="cancellation")
async def cancel_order(order: Order, session: AsyncSession) -> None:
    await end(order, "cancelled", session)


async def end(order: Order, status: str, session: AsyncSession) -> None:
    await session.execute(text("UPDATE orders SET status = :status WHERE id = :id"), {"status": status, "id": order.id})
    await emit(session, f"order.{status}", order)


@listen("#", queue="log")
async def log(order: Order, message: Message) -> None:
    print(order.id, message.routing_key, flush=True)


LISTENERS = (
    reserve_inventory,
    charge_payment,
    ship_order,
    complete_order,
    release_inventory,
    cancel_order,
    log,
)


async def messages_are_on_their_way() -> bool:
    found = await backlog()
    return bool(found.waiting or any(queue.queued or queue.retrying for queue in found.queues))


async def rows(statement: str) -> Sequence[Any]:
    async with transaction() as session:
        return (await session.execute(text(statement))).all()


async def main(how_many: int) -> None:
    async with transaction() as session:
        for statement in TABLES:
            await session.execute(text(statement))
    [(placed,)] = await rows("SELECT count(*) FROM orders")
    async with running(listeners=LISTENERS):
        for number in range(placed + 1, placed + how_many + 1):
            card, pieces = "blocked" if number % 3 == 2 else "good", 5000 if number % 3 == 0 else 1
            await place_order(Order(id=f"ORD-{number}", pieces=pieces, card=card))
        while await messages_are_on_their_way():
            await asyncio.sleep(0.1)
    for row in await rows("SELECT status, count(*) FROM orders GROUP BY status ORDER BY status"):
        print(*row)
    print("stock", *(await rows("SELECT pieces FROM stock"))[0])


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
