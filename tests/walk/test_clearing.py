"""Clear: an outbox that earlier tests used starts again without rows, on every database."""

from __future__ import annotations

import asyncio

from sqlalchemy import func, select

from outbox import Message, Outbox, Reject, listen
from outbox.testing import clear, drain
from tests.support.outboxes import MakeOutbox


@listen("order.*", queue="orders")
async def on_order(order: int) -> None:
    if order < 0:
        raise Reject("no such order")


async def rows(outbox: Outbox) -> int:
    tables = outbox.metadata.sorted_tables
    async with outbox.transaction() as session:
        counts = [await session.scalar(select(func.count()).select_from(each)) for each in tables]
    return sum(count or 0 for count in counts)


async def test_an_outbox_that_was_cleared_has_no_rows_and_works_as_a_new_one(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox(clean_up_after="NEVER")
    for _ in range(2):
        async with outbox.transaction() as session:
            await outbox.emit_many(session, "order.created", [1, -1])
            await outbox.emit(session, "order.due", 1, timer_id="order-1", eta=3600)
        drained = await drain(outbox, [on_order])
        assert (drained.handled, drained.dead) == (2, 1)
        await outbox.receive("orders", Message(routing_key="order.paid", body=b"1", tracking_ids=("known",)))
        assert await rows(outbox) > 4
        await clear(outbox)
        assert await rows(outbox) == 0
    assert await outbox.receive(
        "orders", Message(routing_key="order.paid", body=b"1", tracking_ids=("known",)), unwanted="wait"
    )


async def test_where_no_tables_are_there_is_nothing_to_clear(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox()
    await clear(outbox)
    assert not await outbox.store.maintenance.has_tables()


def test_the_options_stay(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox(table_name="cleared", lease=7)
    asyncio.run(clear(outbox))
    assert (outbox.settings.table_name, outbox.settings.duration("lease").total_seconds()) == ("cleared", 7)
