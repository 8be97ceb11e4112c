"""The shop: an application with an outbox, as you might write one. Nothing in here knows that it is watched."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel
from sqlalchemy import Column, Integer, MetaData, Table, Text, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Outbox, Reject, listen

outbox = Outbox()  # its settings come from the environment: OUTBOX_DB_ENGINE_URL and others

metadata = MetaData()
orders = Table(
    "orders",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("town", Text, nullable=False),
    Column("crates", Integer, nullable=False),
)
towns = Table("towns", metadata, Column("name", Text, primary_key=True))
# What the listeners did. No unique constraint: if something were done twice, it would stand here twice.
effects = Table(
    "effects",
    metadata,
    Column("listener", Text, nullable=False),
    Column("order_id", Integer, nullable=False),
)

SECONDS_PER_CRATE = 0.01


class Order(BaseModel):
    """What a customer sends."""

    id: int
    town: str
    crates: int = 1
    card: str = "good"  # or "declined", or "slow": the bank answers at the third attempt


class CardDeclined(Exception):
    """The order is not taken."""


async def open_shop(known_towns: list[str]) -> None:
    """Make the shop's own tables; the outbox makes its own."""
    async with outbox.transaction() as session:
        connection = await session.connection()
        await connection.run_sync(metadata.create_all)
        await session.execute(insert(towns), [{"name": name} for name in known_towns])


async def place(order: Order) -> None:
    """Store the order and tell of it, in one transaction: both happen, or neither."""
    async with outbox.transaction() as session:
        await session.execute(insert(orders).values(id=order.id, town=order.town, crates=order.crates))
        await outbox.emit(session, "order.placed", order, key=f"order-{order.id}")
        if order.card == "declined":
            raise CardDeclined  # and the transaction rolls back, with the message in it


async def learn_the_way_to(town: str) -> None:
    """From now on the courier goes there."""
    async with outbox.transaction() as session:
        await session.execute(insert(towns).values(name=town))


# Listeners ask for a session: what they write in it is committed together with the end of the message, once.


@listen("order.placed", queue="billing", retry_delays=(0.2, 0.4, 0.8))
async def billing(order: Order, session: AsyncSession, attempt_count: int) -> None:
    trace("billing", order)
    if order.card == "slow" and attempt_count < 3:
        raise ConnectionError("the bank does not answer")
    await session.execute(insert(effects).values(listener="billing", order_id=order.id))
    await outbox.emit(session, "order.paid", order, key=f"order-{order.id}")


@listen("order.placed", queue="warehouse")
async def warehouse(order: Order, session: AsyncSession) -> None:
    trace("warehouse", order)
    await session.execute(insert(effects).values(listener="warehouse", order_id=order.id))
    await asyncio.sleep(SECONDS_PER_CRATE * order.crates)  # a worker that is killed here has not committed


@listen("order.paid", queue="courier")
async def courier(order: Order, session: AsyncSession) -> None:
    trace("courier", order)
    if await session.scalar(select(towns).where(towns.c.name == order.town)) is None:
        raise Reject(f"no route leads to {order.town}")
    await session.execute(insert(effects).values(listener="courier", order_id=order.id))


listeners = (billing, warehouse, courier)


def trace(listener: str, order: Order) -> None:
    """Say that a listener runs. This is no effect in the session: of a listener that runs twice it tells twice."""
    print(listener, order.id, flush=True)
