""" "Custom Database Operations", "Advanced Transaction Control" and "Activity Transaction Control".

The rulings: an activity is a transactional function, `ctx.session` its argument, `ctx.transaction()` a savepoint,
`ctx.register_post_commit()` is `after_commit`. A warning is given where nothing is atomic, and not for a session that
begins by itself.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import String, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outbox import BodyNotJson, NotAtomicWarning, Outbox
from outbox.sqlite import prepare


class OrderCreated(BaseModel):
    order_id: str
    customer_id: str
    amount: float
    items: list[str]


class Shop:
    """The project's tables, in the same database as the outbox, and what was committed."""

    def __init__(self, outbox: Outbox, table_name: str) -> None:
        class Base(DeclarativeBase): ...

        class Order(Base):
            __tablename__ = f"{table_name}_orders"
            order_id: Mapped[str] = mapped_column(String(64), primary_key=True)
            status: Mapped[str] = mapped_column(String(64), default="pending")

        class Payment(Base):
            __tablename__ = f"{table_name}_payments"
            order_id: Mapped[str] = mapped_column(String(64), primary_key=True)
            amount: Mapped[float]

        self.outbox = outbox
        self.metadata = Base.metadata
        self.Order: Any = Order
        self.Payment: Any = Payment

    async def orders(self) -> list[str]:
        async with self.outbox.transaction() as session:
            return sorted(await session.scalars(select(self.Order.order_id)))

    async def payments(self) -> list[str]:
        async with self.outbox.transaction() as session:
            return sorted(await session.scalars(select(self.Payment.order_id)))

    async def events(self) -> list[str]:
        return [stored.message.routing_key for stored in await self.outbox.messages()]


@pytest.fixture
async def shop(outbox: Outbox, table_name: str) -> AsyncIterator[Shop]:
    shop = Shop(outbox, table_name)
    async with outbox.engines.asynchronous.begin() as connection:
        await connection.run_sync(shop.metadata.create_all)
    await outbox.create_tables()
    yield shop
    async with outbox.engines.asynchronous.begin() as connection:
        await connection.run_sync(shop.metadata.drop_all)


# Custom database operations


async def test_an_activity_commits_your_data_and_the_event_together(shop: Shop) -> None:
    @shop.outbox.transactional
    async def process_payment(order_id: str, amount: float, session: AsyncSession) -> dict[str, str]:
        session.add(shop.Payment(order_id=order_id, amount=amount))
        await shop.outbox.emit(session, "payment.processed", {"order_id": order_id, "amount": amount})
        assert session.in_transaction()
        return {"order_id": order_id, "status": "processed"}

    assert await process_payment("ORD-1", 99.99) == {"order_id": "ORD-1", "status": "processed"}
    assert await shop.payments() == ["ORD-1"]
    assert await shop.events() == ["payment.processed"]


async def test_if_your_data_cannot_be_stored_the_event_is_not_sent(shop: Shop) -> None:
    @shop.outbox.transactional
    async def create_order(order_id: str, session: AsyncSession) -> None:
        await shop.outbox.emit(session, "order.created", {"order_id": order_id})
        session.add(shop.Order(order_id=order_id))

    await create_order("ORD-1")
    with pytest.raises(IntegrityError):
        await create_order("ORD-1")
    assert await shop.orders() == ["ORD-1"]
    assert await shop.events() == ["order.created"]


async def test_if_the_event_cannot_be_stored_your_data_is_rolled_back(shop: Shop) -> None:
    @shop.outbox.transactional
    async def create_order(order_id: str, session: AsyncSession) -> None:
        session.add(shop.Order(order_id=order_id))
        await session.flush()
        await shop.outbox.emit(session, "order.created", {"order_id": object()})

    with pytest.raises(BodyNotJson):
        await create_order("ORD-1")
    assert await shop.orders() == []
    assert await shop.events() == []


async def test_pydantic_models_are_taken_as_they_are(shop: Shop) -> None:
    event = OrderCreated(order_id="ORD-123", customer_id="CUST-456", amount=99.99, items=["item1", "item2"])

    @shop.outbox.transactional
    async def create_order(session: AsyncSession) -> None:
        await shop.outbox.emit(session, "order.created", event)

    await create_order()
    (stored,) = await shop.outbox.messages()
    assert OrderCreated.model_validate_json(stored.message.body) == event
    assert stored.message.content_type == "application/json"


# Advanced transaction control


async def test_a_payment_that_fails_in_a_savepoint_leaves_the_order_and_tells_of_the_failure(shop: Shop) -> None:
    @shop.outbox.transactional
    async def process_order_with_optional_payment(order_id: str, session: AsyncSession) -> None:
        session.add(shop.Order(order_id=order_id))
        await shop.outbox.emit(session, "order.created", {"order_id": order_id})
        try:
            async with session.begin_nested():
                await shop.outbox.emit(session, "payment.attempted", {"order_id": order_id})
                session.add(shop.Payment(order_id=order_id, amount=100.0))
                await session.flush()
                raise ConnectionError("Payment gateway unavailable")
        except ConnectionError:
            failed = {"order_id": order_id, "reason": "gateway_unavailable"}
            await shop.outbox.emit(session, "payment.failed", failed)

    await process_order_with_optional_payment("ORD-1")
    assert (await shop.orders(), await shop.payments()) == (["ORD-1"], [])
    assert await shop.events() == ["order.created", "payment.failed"]


async def test_an_activity_that_another_one_calls_is_such_a_savepoint(shop: Shop) -> None:
    @shop.outbox.transactional
    async def pay(order_id: str, session: AsyncSession) -> None:
        session.add(shop.Payment(order_id=order_id, amount=100.0))
        await shop.outbox.emit(session, "payment.processed", {"order_id": order_id})
        if order_id == "ORD-2":
            raise ConnectionError("Payment gateway unavailable")

    @shop.outbox.transactional
    async def order_and_pay(order_id: str, session: AsyncSession) -> None:
        session.add(shop.Order(order_id=order_id))
        try:
            await pay(order_id)
        except ConnectionError:
            await shop.outbox.emit(session, "payment.failed", {"order_id": order_id})

    for order_id in ("ORD-1", "ORD-2"):
        await order_and_pay(order_id)
    assert (await shop.orders(), await shop.payments()) == (["ORD-1", "ORD-2"], ["ORD-1"])
    assert await shop.events() == ["payment.processed", "payment.failed"]


async def test_a_workflow_controls_its_transaction_by_itself(shop: Shop) -> None:
    async with shop.outbox.transaction() as session:
        session.add(shop.Order(order_id="ORD-1"))
        await shop.outbox.emit(session, "workflow.started", {})
    with pytest.raises(ConnectionError):
        async with shop.outbox.transaction() as session:
            session.add(shop.Order(order_id="ORD-2"))
            await shop.outbox.emit(session, "workflow.started", {})
            raise ConnectionError
    assert await shop.orders() == ["ORD-1"]
    assert await shop.events() == ["workflow.started"]


async def test_what_is_registered_for_after_the_commit_is_called_then(shop: Shop) -> None:
    called: list[str] = []

    @shop.outbox.transactional
    async def create_order(order_id: str, session: AsyncSession) -> None:
        async def look() -> None:
            called.extend(await shop.orders())

        shop.outbox.after_commit(session, look)
        session.add(shop.Order(order_id=order_id))
        await session.flush()
        if order_id == "ORD-2":
            raise ConnectionError

    await create_order("ORD-1")
    with pytest.raises(ConnectionError):
        await create_order("ORD-2")
    assert called == ["ORD-1"]


async def test_an_activity_that_is_cancelled_is_rolled_back(shop: Shop) -> None:
    reached = asyncio.Event()

    @shop.outbox.transactional
    async def create_order(order_id: str, session: AsyncSession) -> None:
        session.add(shop.Order(order_id=order_id))
        await shop.outbox.emit(session, "order.created", {"order_id": order_id})
        reached.set()
        await asyncio.Event().wait()

    activity = asyncio.create_task(create_order("ORD-1"))
    await reached.wait()
    activity.cancel()
    with pytest.raises(asyncio.CancelledError):
        await activity
    assert await shop.orders() == []
    assert await shop.events() == []


# Understanding transaction warnings


async def test_outside_of_a_transaction_the_event_is_sent_with_a_warning(shop: Shop, database_url: str) -> None:
    engine = create_async_engine(database_url, isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        with pytest.warns(NotAtomicWarning, match="use one with a transaction"):
            await shop.outbox.emit(connection, "order.created", {"order_id": "ORD-1"})
        await connection.rollback()
    await engine.dispose()
    assert await shop.events() == ["order.created"]


async def test_an_activity_is_never_warned_of(shop: Shop, db_engine: AsyncEngine) -> None:
    @shop.outbox.transactional
    async def create_order(order_id: str, session: AsyncSession) -> None:
        await shop.outbox.emit(session, "order.created", {"order_id": order_id})

    if db_engine.dialect.name == "sqlite":
        prepare(db_engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await create_order("ORD-1")
        async with AsyncSession(db_engine) as session:
            assert not session.in_transaction()  # it begins with the first statement
            await shop.outbox.emit(session, "order.created", {"order_id": "ORD-2"})
            assert session.in_transaction()
            await session.commit()
    assert len(await shop.events()) == 2
