"""Shop: takes orders over HTTP, tells the warehouse of each one, and hears from it whether there is enough."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outbox import Message, after_commit, emit, http_app, listen, running, setup, transaction, transactional

SECRET = os.environ["ORDERS_SECRET"]
CREDIT = 100_000  # cents that a customer may owe

setup(
    db_engine_url="sqlite+aiosqlite:///shop.db",
    transport=os.environ["WAREHOUSE_URL"],
    source="/shop",
    webhook_secrets=SECRET,
)


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"

    order_id: Mapped[str] = mapped_column(primary_key=True)
    customer_email: Mapped[str]
    cents: Mapped[int]
    status: Mapped[str] = mapped_column(default="pending")
    created_at: Mapped[datetime] = mapped_column(default=lambda: datetime.now(UTC))


class NewOrder(BaseModel):
    order_id: str = Field(pattern=r"^[\w-]{1,40}$")
    customer_email: str
    cents: int = Field(gt=0)


@listen("stock.*", queue="answers")
async def hear_from_warehouse(answer: dict[str, str], message: Message, session: AsyncSession) -> None:
    order = await session.get_one(Order, answer["order_id"])
    order.status = "confirmed" if message.routing_key == "stock.reserved" else "refused"
    after_commit(session, lambda: print("order", order.order_id, "is", order.status, flush=True))


events = http_app([hear_from_warehouse], secrets=SECRET)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with transaction() as session:
        await (await session.connection()).run_sync(Base.metadata.create_all)
    async with running(relay=True), events.running():
        yield


app = FastAPI(lifespan=lifespan)
app.mount("/events", events)


@app.post("/orders", status_code=201)
@transactional
async def create_order(new: NewOrder, session: AsyncSession) -> dict[str, str]:
    order = Order(**new.model_dump())
    session.add(order)
    await emit(session, "order.created", new, key=new.order_id)
    after_commit(session, lambda: print("order", order.order_id, "is", order.status, flush=True))
    if new.cents > CREDIT:
        raise HTTPException(402, "more than your credit")  # and there never was an order, nor a message
    return {"order_id": new.order_id, "status": "pending"}


@app.get("/orders/{order_id}")
@transactional
async def show_order(order_id: str, session: AsyncSession) -> dict[str, str]:
    order = await session.get(Order, order_id)
    if order is None:
        raise HTTPException(404, "no such order")
    return {"order_id": order.order_id, "status": order.status}


@app.exception_handler(IntegrityError)
async def refuse(request: Request, error: IntegrityError) -> JSONResponse:
    return JSONResponse({"detail": "there is an order with this id"}, 409)
