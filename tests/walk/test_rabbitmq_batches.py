"""Listeners that take lists, over a real RabbitMQ: which messages come together is up to the broker."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from pydantic import BaseModel
from sqlalchemy import Column, Integer, MetaData, Table, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Message, Outbox, Reason, listen
from outbox.core.attempt import Dead, Done
from outbox.core.events import Handled
from tests.support.broker import VirtualHost
from tests.support.observing import Recorder, eventually
from tests.support.outboxes import MakeOutbox

COUNT, COPIES = 300, 100
FAILS_ONCE, POISON = 7, 13


class Order(BaseModel):
    id: int


def sent(number: object) -> Message:
    return Message(routing_key="order.created", body=json.dumps(number).encode())


async def test_every_message_counts_once_whatever_the_others_in_its_list_do(
    make_outbox: MakeOutbox, table_name: str, vhost: VirtualHost
) -> None:
    recorder = Recorder()
    outbox = make_outbox(rabbitmq_url=vhost.url, observers=[recorder])
    effects = Table(f"{table_name}_effects", MetaData(), Column("id", Integer, primary_key=True), Column("n", Integer))
    async with outbox.engines.asynchronous.begin() as connection:
        await connection.run_sync(effects.metadata.create_all)
    calls: list[list[int]] = []

    @listen("order.*", queue="q", batch=50, retry_delays=(0.1,))
    async def listener(orders: list[Order], session: AsyncSession, attempt_count: int) -> dict[int, Exception]:
        calls.append([order.id for order in orders])
        failed: dict[int, Exception] = {
            n: OSError("once") for n, order in enumerate(orders) if order.id == FAILS_ONCE and attempt_count == 1
        }
        for n, order in enumerate(orders):
            if n not in failed:
                await session.execute(insert(effects).values(n=order.id))
            if order.id == POISON:
                raise ValueError("poison")
        return failed

    messages = [sent({"id": number}) for number in range(COUNT)]
    await fill(outbox, listener, [*messages, sent("no order")], messages[:COPIES])
    async with outbox.running(listeners=[listener]):
        await eventually(lambda: len(_ends(recorder)) == COUNT + 1 + COPIES)
        await eventually(lambda: _empty(vhost))
    assert len(calls) < COUNT, "they came in lists"
    assert await written(outbox, effects) == Counter(number for number in range(COUNT) if number != POISON)
    letters = {letter.message.body: letter.reason for letter in await outbox.dead_letters.list(queue="q")}
    assert letters == {b'"no order"': Reason.UNDECODABLE, b'{"id": 13}': Reason.EXHAUSTED}


async def fill(outbox: Outbox, listener: Any, *publishings: list[Message]) -> None:
    await outbox.create_tables()
    await outbox.transport.open()
    await outbox.transport.declare([listener])
    for messages in publishings:
        published = await outbox.transport.publish(messages)
        assert len(published.confirmed) == len(messages)
    await outbox.transport.close()


async def written(outbox: Outbox, effects: Table) -> Counter[int]:
    async with outbox.transaction() as session:
        return Counter(await session.scalars(select(effects.c.n)))


def _ends(recorder: Recorder) -> list[Handled]:
    return [event for event in recorder.of(Handled) if isinstance(event.outcome, Done | Dead)]


async def _empty(vhost: VirtualHost) -> bool:
    queue = vhost.queues()["q"]
    return queue.get("messages") == 0
