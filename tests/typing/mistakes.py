"""Typical mistakes: a type checker rejects each line that has a comment, with this code. Nothing here is run."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncSession

import outbox
from outbox import Message, Outbox, emit, emit_sync, emmit, listen, receive, setup, transaction  # error: attr-defined
from outbox.events import Handeld  # error: attr-defined
from outbox.extend import Transprot  # error: attr-defined
from outbox.transports import HttpTransprot  # error: attr-defined


def configure() -> None:
    setup(db_url="sqlite://")  # error: call-arg
    setup(poll_intervall=1.0)  # error: call-arg
    setup(poll_interval="1s")  # error: arg-type
    setup(batch_size="500")  # error: arg-type
    setup(clean_up_after="later")  # error: arg-type
    setup(db_engine="sqlite://")  # error: arg-type
    setup(observers=print)  # error: arg-type
    setup("sqlite://")  # error: arg-type, call-arg
    Outbox(tabel_name="shop")  # error: call-arg
    Outbox(retry_delays="1, 10")  # error: arg-type


async def emitting(session: AsyncSession) -> None:
    timer = await emit(session, "order.due", 1, timer_id="order-1")
    print(timer.id)  # error: union-attr
    await emit("order.created", {"id": 1})  # error: call-overload
    await emit(session, "order.created")  # error: call-overload
    await emit(session, "order.created", {"id": 1}, delay=5)  # error: call-overload
    emit_sync(session, "order.created", {"id": 1})  # error: call-overload
    (await emit(session, "order.created", 1)).uuid  # error: attr-defined
    await receive("orders", {"id": 1})  # error: call-overload
    await receive(session, "orders")  # error: call-overload
    await receive("orders", Message(routing_key="a", body=b""), unwanted="maybe")  # error: call-overload


async def transactions() -> None:
    with transaction() as session:  # error: attr-defined
        print(session)
    async with outbox.transaction_sync() as plain:  # error: attr-defined
        print(plain)


@listen("order.*", queu="orders")  # error: call-arg
async def on_order(order: dict[str, int]) -> None:
    print(order)


@listen(timeout=5)  # error: call-arg
async def on_payment(payment: dict[str, int]) -> None:
    print(payment)


def the_module() -> None:
    outbox.dead_letter  # error: attr-defined
    outbox.outbox.settings.polling  # error: attr-defined
    outbox.metadata.tabels  # error: attr-defined
