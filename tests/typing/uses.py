"""Typical uses: a type checker in strict mode accepts every line. Nothing here is run."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, Unpack, assert_type

from sqlalchemy import MetaData, create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import outbox
from outbox import (
    NEVER,
    Backlog,
    DeadLetter,
    FailedAttempt,
    Listener,
    Message,
    Options,
    Outbox,
    Reject,
    RetryPolicy,
    StoredMessage,
    after_commit,
    emit,
    emit_many,
    emit_sync,
    http_app,
    listen,
    receive,
    receive_sync,
    running,
    setup,
    transaction,
    transaction_sync,
    transactional,
)
from outbox.events import Event, Handled
from outbox.testing import drain
from outbox.transports import HttpTransport, check_url

engine = create_async_engine("sqlite+aiosqlite:///shop.db")


def seen(event: Event) -> None:
    if isinstance(event, Handled):
        print(event)


async def publish(message: Message) -> None:
    print(message.routing_key)


def configure() -> None:
    setup(db_engine=engine)
    setup(db_engine=create_engine("sqlite://"), clean_up_after=NEVER)
    setup(db_engine_url="postgresql+asyncpg://u@h/d", poll_interval=0.5, grace=timedelta(seconds=5), observers=[seen])
    setup(db_engine_url="sqlite://", transport=publish, retry_delays=(1, 10, timedelta(minutes=1)))
    setup(rabbitmq_url="amqp://localhost", batch_size=100, expiration=None)
    setup(transport=HttpTransport("https://billing.example/hook"), webhook_secrets=["whsec_1", "whsec_2"])
    setup(routes={"order.*": "https://billing.example/hook", "#": publish}, unroutable={"audit.#": "discard"})
    setup(retry_delays=RetryPolicy.exponential(1, 2, cap=timedelta(minutes=5)), clean_up_after=timedelta(days=1))


def shop(**options: Unpack[Options]) -> Outbox:
    options.setdefault("table_name", "shop_outbox")
    return Outbox(**options)


async def emitting(session: AsyncSession, timer: str | None) -> None:
    message = await emit(session, "order.created", {"id": 1})
    assert_type(message, Message)
    print(message.id)
    assert_type(await emit(session, "order.created", {"id": 1}, key="1", eta=timedelta(hours=1)), Message)
    assert_type(await emit(session, "order.due", {"id": 1}, timer_id="order-1", eta=60), Message | None)
    assert_type(await emit(session, "order.due", {"id": 1}, timer_id=timer), Message | None)
    assert_type(
        await emit_many(session, "order.created", [{"id": 1}], key=lambda order: str(order["id"])), list[Message]
    )
    assert_type(await outbox.cancel_timer(session, "order-1"), bool)


def emitting_without_a_loop(session: Session) -> None:
    assert_type(emit_sync(session, "order.created", b"body", content_type="text/plain"), Message)
    assert_type(emit_sync(session, "order.due", {"id": 1}, timer_id="order-1"), Message | None)
    with transaction_sync() as own:
        assert_type(own, Session)
        emit_sync(own, "order.created", {"id": 1})
        assert_type(receive_sync(own, "orders", Message(routing_key="order.paid", body=b"1")), bool)


async def transactions() -> None:
    async with transaction() as session:
        assert_type(session, AsyncSession)
        await session.execute(text("SELECT 1"))
        after_commit(session, lambda: print("committed"))
        assert_type(await receive(session, "orders", Message(routing_key="order.paid", body=b"1")), bool)
    await receive("orders", Message(routing_key="order.paid", body=b"1"), unwanted="wait")


@transactional
async def create_order(order_id: int, session: AsyncSession) -> int:
    await emit(session, "order.created", {"id": order_id})
    return order_id


async def compensate(error: BaseException, message: Message, session: Any, attempt: FailedAttempt) -> None:
    if attempt.is_last:
        print(error, message.id)


@listen("order.*", queue="orders", retry_delays=(1, 10), timeout=timedelta(seconds=5), on_error=compensate)
async def on_order(order: dict[str, int], message: Message, session: AsyncSession) -> None:
    if order["id"] < 0:
        raise Reject("no such order")
    await emit(session, "order.seen", order)


@listen("invoice.#", queue="invoices", batch=100)
def on_invoices(invoices: list[dict[str, int]]) -> None:
    print(len(invoices))


listeners: list[Listener] = [on_order, on_invoices]
app = http_app(listeners, secrets=None, modes=["webhook"])


async def working(own: Outbox) -> None:
    async with running(relay=True, listeners=listeners):
        await asyncio.sleep(1)
    assert_type(await own.worker([on_order]), int)
    assert_type(await own.backlog(), Backlog)
    assert_type(await own.messages(state="leased"), list[StoredMessage])
    letters = await own.dead_letters.list()
    assert_type(letters, list[DeadLetter])
    await drain(own, listeners)


def the_module() -> None:
    assert_type(outbox.metadata, MetaData)
    assert_type(outbox.__version__, str)
    print(outbox.dead_letters, outbox.outbox.settings.lease, outbox.outbox.engines.asynchronous)
    assert_type(outbox.outbox, Outbox)


def engine_of(given: AsyncEngine) -> Outbox:
    check_url("https://customer.example/hook")
    return Outbox(db_engine=given, table_name="shop")
