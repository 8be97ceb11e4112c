"""Storing first with a real RabbitMQ and real processes, which are killed at the worst moments."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aio_pika
import pytest

from outbox import Listener, Message, Outbox
from outbox.core.attempt import Reason
from outbox.core.events import Received, Relayed
from tests.support.amqp import channel_to
from tests.support.broker import VirtualHost
from tests.support.commands import Command
from tests.support.databases import on_asyncpg, on_both_stores
from tests.support.observing import Recorder, arrival, eventually, let_leases_run_out
from tests.support.outboxes import MakeOutbox
from tests.walk.shops import SOON, Shop, effects, emptied

FEW = 40
MOMENTS = [
    "before the storing statements",
    "after the storing statements",  # and before their commit
    "before acknowledging",  # and after the commit
    "listener",
]


@pytest.fixture
async def shipping(
    tmp_path: Path, outbox: Outbox, database_url: str, table_name: str, vhost: VirtualHost
) -> AsyncIterator[Shop]:
    """Processes of a service that stores first what comes from RabbitMQ."""
    shop = Shop(tmp_path, database_url, table_name)
    shop.set(OUTBOX_TRANSPORT=vhost.url, SHOP_STORES_FIRST="yes")
    try:
        await shop.make_tables(outbox)
        yield shop
    finally:
        shop.kill()


@pytest.fixture
async def outbox(make_outbox: MakeOutbox, vhost: VirtualHost) -> Outbox:
    return make_outbox(rabbitmq_url=vhost.url)


async def publish(outbox: Outbox, count: int, queue: str = "ledger") -> list[Message]:
    """Messages of some other service, which lie in the queue."""
    messages = [Message(routing_key="order.created", body=b"%d" % number) for number in range(count)]
    transport = outbox.transport
    await transport.open()
    await transport.declare([Listener("order.*", print, queue=queue)])
    assert len((await transport.publish(messages)).confirmed) == count
    await transport.close()
    return messages


async def in_the_broker(vhost: VirtualHost, queue: str, count: int) -> None:
    """Wait until so many messages are in a queue of the broker, those in a worker's hands included."""

    async def counted() -> bool:
        queues = await asyncio.to_thread(vhost.queues)
        return queues[queue].get("messages") == count

    await eventually(counted)


async def once_each(outbox: Outbox, shop: Shop, count: int = FEW) -> None:
    async def all_handled() -> bool:
        return sum((await effects(outbox, shop)).values()) >= count

    await eventually(all_handled)
    await emptied(outbox)
    assert await effects(outbox, shop) == Counter(dict.fromkeys(range(count), 1))
    assert await outbox.store.dead_letters.list() == []


@on_both_stores
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_worker_killed_between_storing_acknowledging_and_handling_loses_nothing_and_repeats_no_effect(
    moment: str, outbox: Outbox, shipping: Shop
) -> None:
    await publish(outbox, FEW)
    doomed = shipping.start("worker", "ledger", DIE_AT=moment)
    assert await asyncio.to_thread(doomed.wait, SOON) == -signal.SIGKILL
    await let_leases_run_out(outbox)
    shipping.start("worker", "ledger", SHOP_LEASE="30")
    await once_each(outbox, shipping)


@on_both_stores
async def test_what_was_acknowledged_and_not_handled_is_handled_by_the_next_worker(
    outbox: Outbox, shipping: Shop, vhost: VirtualHost
) -> None:
    await publish(outbox, FEW)
    await in_the_broker(vhost, "ledger", FEW)
    doomed = shipping.start("worker", "ledger", SHOP_CLAIMS_NOTHING="yes")
    await in_the_broker(vhost, "ledger", 0)
    doomed.kill()
    await asyncio.to_thread(doomed.wait, SOON)
    assert len(await outbox.messages(state="queued", queue="ledger", limit=FEW * 2)) == FEW
    shipping.start("worker", "ledger", SHOP_LEASE="30")
    await once_each(outbox, shipping)


@on_asyncpg
async def test_a_stored_message_that_kills_every_worker_is_dead_and_condemns_no_other(
    outbox: Outbox, shipping: Shop
) -> None:
    await publish(outbox, 5)
    for _ in range(3):
        shipping.live_again()
        doomed = shipping.start("worker", "ledger", DIE_AT="listener", SHOP_POISON="3", SHOP_LEASE="30")
        assert await asyncio.to_thread(doomed.wait, SOON) == -signal.SIGKILL
        await let_leases_run_out(outbox)
    shipping.live_again()
    shipping.start("worker", "ledger", DIE_AT="listener", SHOP_POISON="3", SHOP_LEASE="30")
    letters = await eventually(lambda: outbox.store.dead_letters.list(queue="ledger"))
    assert [(each.message.body, each.reason, each.crash_count) for each in letters] == [(b"3", Reason.CRASHED, 3)]
    await emptied(outbox)
    assert await effects(outbox, shipping) == Counter(dict.fromkeys((0, 1, 2, 4), 1))


@on_both_stores
async def test_work_goes_on_after_every_connection_to_the_broker_was_closed(
    outbox: Outbox, shipping: Shop, vhost: VirtualHost
) -> None:
    shipping.start("worker", "ledger", SHOP_LEASE="30")
    await eventually(lambda: asyncio.to_thread(lambda: "ledger" in vhost.queues()))
    await publish(outbox, FEW)
    await eventually(lambda: asyncio.to_thread(vhost.close_connections))
    await once_each(outbox, shipping)


@on_both_stores
async def test_a_relay_never_publishes_what_was_stored_first(
    outbox: Outbox, make_outbox: MakeOutbox, vhost: VirtualHost
) -> None:
    """One service: its relay and its stored messages share the table, and every message would match a binding."""
    recorder, handled = Recorder(), asyncio.Queue[int]()

    async def on_order(number: int) -> None:
        handled.put_nowait(number)
        raise ConnectionError("later")

    listener = Listener("order.*", on_order, queue="orders", store_first=True, retry_delays=(3600,))
    service = make_outbox(rabbitmq_url=vhost.url, observers=[recorder])
    async with service.running(relay=True, listeners=[listener]):
        foreign = {message.id for message in await publish(outbox, FEW, "orders")}
        assert await service.receive("orders", Message(routing_key="order.created", body=b"-1"))
        for _ in range(FEW + 1):
            await arrival(handled)
        async with service.transaction() as session:
            own = await service.emit(session, "order.created", 100)
        assert own is not None
        assert await arrival(handled) == 100
        await recorder.wait_for(Relayed)
        stored = await service.messages(queue="orders", limit=100)
        assert foreign < {each.message.id for each in stored}
    assert [event.attempt.message.id for event in recorder.of(Relayed)] == [own.id]
    async with channel_to(vhost.url) as channel:
        assert (await channel.queue_declare("orders", passive=True)).message_count == 0
    assert sum(event.stored for event in recorder.of(Received)) == FEW + 2


@on_asyncpg
async def test_dead_letters_of_stored_messages_are_listed_shown_and_replayed_by_the_commands(
    outbox: Outbox, make_outbox: MakeOutbox, vhost: VirtualHost, command: Command
) -> None:
    handled = asyncio.Queue[int]()

    async def on_order(number: int) -> None:
        handled.put_nowait(number)
        raise ConnectionError("the bank is away")

    listener = Listener("order.*", on_order, queue="orders", store_first=True, retry_delays=())
    service = make_outbox(rabbitmq_url=vhost.url)
    settings = {"OUTBOX_TRANSPORT": vhost.url}
    async with service.running(listeners=[listener]):
        await publish(outbox, 1, "orders")
        assert await arrival(handled) == 0
        [letter] = await eventually(lambda: service.store.dead_letters.list())
        ran = await command.run("dead-letters", "list", "--queue", "orders", "--json", **settings)
        assert [each["id"] for each in ran.document["dead_letters"]] == [str(letter.id)]
        ran = await command.run("dead-letters", "show", str(letter.id), **settings)
        assert "the bank is away" in ran.stdout
        ran = await command.run("status", "--json", **settings)
        here = [each for each in ran.document["queues"] if each["transport"] == "database"]
        assert [(each["queue"], each["dead"]) for each in here] == [("orders", 1)]
        ran = await command.run("dead-letters", "replay", str(letter.id), **settings)
        assert ran.code == 0
        assert await arrival(handled) == 0


@on_asyncpg
async def test_a_message_of_another_sender_is_stored_with_its_own_id(
    make_outbox: MakeOutbox, vhost: VirtualHost
) -> None:
    handled = asyncio.Queue[str]()

    async def on_order(order: int, message: Message) -> None:
        handled.put_nowait(message.id)

    service = make_outbox(rabbitmq_url=vhost.url)
    listener = Listener("order.*", on_order, queue="orders", store_first=True)
    async with service.running(listeners=[listener]), await aio_pika.connect(vhost.url) as connection:
        exchange = await (await connection.channel()).get_exchange("outbox")
        for id in ("one", "one", "two"):
            await exchange.publish(aio_pika.Message(b"1", message_id=id), "order.created")
        assert [await arrival(handled), await arrival(handled)] == ["one", "two"]
        await in_the_broker(vhost, "orders", 0)
    assert handled.empty()
