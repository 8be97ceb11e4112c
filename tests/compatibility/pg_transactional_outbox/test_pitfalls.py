""" "Context", the four cases of its first picture. An order service, RabbitMQ, a shipment service.

Each test first does it without an outbox or an inbox, and sees what the picture warns of. Then it does it with them.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from urllib.parse import urlsplit

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from sqlalchemy import Column, Insert, Integer, MetaData, String, Table, insert, select
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from outbox import Outbox, listen
from outbox.core.attempt import RetryIn
from outbox.core.events import Handled
from tests.support.broker import VirtualHost
from tests.support.databases import on_both_stores
from tests.support.observing import Recorder, eventually
from tests.support.outboxes import MakeOutbox
from tests.support.proxy import Link, Proxy
from tests.support.queues import is_empty, taken

pytestmark = on_both_stores

ORDERED = "order.created"


class Services:
    """The tables of both services, and what lies in them. Nothing keeps an order from being shipped twice."""

    def __init__(self, engine: AsyncEngine, name: str) -> None:
        self._engine = engine
        self.orders = Table(f"{name}_orders", MetaData(), Column("id", Integer, primary_key=True))
        self.shipments = Table(
            f"{name}_shipments",
            MetaData(),
            Column("id", Integer, primary_key=True, autoincrement=True),
            Column("order_id", Integer),
            Column("carrier", String(16)),
        )

    async def create(self, table: Table) -> None:
        async with self._engine.begin() as connection:
            await connection.run_sync(table.metadata.create_all)

    def order(self, number: int) -> Insert:
        return insert(self.orders).values(id=number)

    def ship(self, number: int) -> Insert:
        return insert(self.shipments).values(order_id=number, carrier="bicycle")

    async def ordered(self) -> list[int]:
        return await self._numbers(self.orders.c.id)

    async def shipped(self) -> list[int]:
        return await self._numbers(self.shipments.c.order_id)

    async def _numbers(self, column: Column[int]) -> list[int]:
        async with self._engine.connect() as connection:
            return list(await connection.scalars(select(column).order_by(column)))


@pytest.fixture
async def services(db_engine: AsyncEngine, table_name: str) -> Services:
    services = Services(db_engine, table_name)
    await services.create(services.orders)
    return services


@pytest.fixture
def link(vhost: VirtualHost) -> Iterator[Link]:
    """A line to the broker that can fail."""
    port = urlsplit(vhost.url).port
    assert port is not None
    with Proxy() as proxy:
        yield proxy.broker_link(vhost.name, port)


def through(link: Link, url: str) -> str:
    """The broker's address at the near end of the line."""
    address = urlsplit(url)
    return address._replace(netloc=f"{address.username}:{address.password}@127.0.0.1:{link.port}").geturl()


async def place_order(outbox: Outbox, services: Services, number: int) -> None:
    """An order service with an outbox: the order and its event are one transaction."""
    async with outbox.transaction() as session:
        await outbox.emit(session, ORDERED, number)
        await session.execute(services.order(number))


async def send(url: str, queue: str, number: int) -> None:
    """An order service without one: it tells the broker by itself."""
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        await channel.default_exchange.publish(aio_pika.Message(b"%d" % number), queue)


# aio-pika leaves one behind when a connection is refused.
@pytest.mark.filterwarnings("ignore:coroutine 'Connection.close' was never awaited:RuntimeWarning")
async def test_case_1_the_order_is_stored_and_its_event_cannot_be_sent(
    make_rabbitmq_outbox: MakeOutbox, db_engine: AsyncEngine, services: Services, vhost: VirtualHost
) -> None:
    await services.create(services.shipments)
    url = vhost.url_of_user()

    async def order_without_an_outbox(number: int) -> None:
        async with AsyncSession(db_engine) as session, session.begin():
            await session.execute(services.order(number))
        await send(url, "shipments", number)

    @listen(ORDERED, queue="shipments")
    async def ship(number: int, session: AsyncSession) -> None:
        await session.execute(services.ship(number))

    vhost.let_in(url, False)  # as far as these services can tell, the broker is away
    with pytest.raises(aio_pika.exceptions.AMQPError):
        await order_without_an_outbox(1)
    gc.collect()  # here, and not in another test
    outbox = make_rabbitmq_outbox(rabbitmq_url=url)
    await place_order(outbox, services, 2)
    vhost.let_in(url, True)
    async with outbox.running(relay=True, listeners=[ship]):
        await eventually(services.shipped)
    assert await services.ordered() == [1, 2]
    assert await services.shipped() == [2], "nobody will ever ship the first one"


async def test_case_2_the_event_is_sent_and_the_order_cannot_be_stored(
    rabbitmq_outbox: Outbox, db_engine: AsyncEngine, services: Services, vhost: VirtualHost
) -> None:
    await services.create(services.shipments)

    async def order_without_an_outbox(number: int) -> None:
        async with AsyncSession(db_engine) as session, session.begin():
            await send(vhost.url, "shipments", number)
            await session.execute(services.order(number))
            await session.execute(services.order(number))  # whatever makes a transaction fail

    @listen(ORDERED, queue="shipments", concurrency=1)
    async def ship(number: int, session: AsyncSession) -> None:
        await session.execute(services.ship(number))

    async with rabbitmq_outbox.running(relay=True, listeners=[ship]):
        with pytest.raises(IntegrityError):
            await order_without_an_outbox(1)
        with pytest.raises(IntegrityError):
            async with rabbitmq_outbox.transaction() as session:
                await rabbitmq_outbox.emit(session, ORDERED, 2)
                await session.execute(services.order(2))
                await session.execute(services.order(2))
        await place_order(rabbitmq_outbox, services, 3)
        await eventually(lambda: _contains(services, 3))
    assert await services.ordered() == [3]
    assert await services.shipped() == [1, 3], "the first one is shipped, and nobody knows of such an order"


async def test_case_3_the_shipment_is_started_and_the_message_not_acknowledged(
    make_rabbitmq_outbox: MakeOutbox,
    db_engine: AsyncEngine,
    services: Services,
    vhost: VirtualHost,
    channel: AbstractChannel,
    link: Link,
) -> None:
    await services.create(services.shipments)

    async def ship_without_an_inbox(*, acknowledge: bool) -> None:
        async with await aio_pika.connect(vhost.url) as connection:
            channel = await connection.channel()
            message = await taken_and_held(channel, "plain")
            async with AsyncSession(db_engine) as session, session.begin():
                await session.execute(services.ship(int(message.body)))
            if acknowledge:
                await message.ack()

    await channel.declare_queue("plain", durable=True)
    await send(vhost.url, "plain", 1)
    await ship_without_an_inbox(acknowledge=False)  # its connection is lost first
    await ship_without_an_inbox(acknowledge=True)
    assert await services.shipped() == [1, 1], "two shipments for a single order"

    lost = asyncio.Event()
    counted: list[int] = []

    @listen(ORDERED, queue="shipments", concurrency=1)
    async def ship(number: int, session: AsyncSession) -> None:
        await session.execute(services.ship(number))
        if number == 2:
            await eventually(lambda: 2 in counted)  # both have it in hand
            link.swallow()  # from now on the broker hears nothing of this service
            lost.set()

    @listen(ORDERED, queue="counted", concurrency=1)
    async def count(number: int) -> None:
        counted.append(number)
        await eventually(lost.is_set)

    orders, shipments = make_rabbitmq_outbox(), make_rabbitmq_outbox(rabbitmq_url=through(link, vhost.url))
    async with shipments.running(listeners=[ship, count]), orders.running(relay=True):
        await place_order(orders, services, 2)
        await eventually(lambda: _contains(services, 2))
        link.cut()
        await eventually(lambda: _waits(channel, "shipments"))
        await eventually(lambda: _waits(channel, "counted"))
        link.heal()
        await place_order(orders, services, 3)  # the broker delivers it after its second delivery of 2
        await eventually(lambda: _contains(services, 3))
        await eventually(lambda: 3 in counted)
    assert counted == [2, 2, 3], "whoever asks for no session sees both deliveries"
    assert await services.shipped() == [1, 1, 2, 3]


@pytest.mark.parametrize("store_first", [False, True])
async def test_case_4_the_message_is_acknowledged_and_the_shipment_cannot_be_stored(
    rabbitmq_outbox: Outbox,
    db_engine: AsyncEngine,
    services: Services,
    vhost: VirtualHost,
    channel: AbstractChannel,
    recorder: Recorder,
    store_first: bool,
) -> None:
    async def ship_without_an_inbox() -> None:
        message = await taken(channel, "plain")  # and acknowledged
        async with AsyncSession(db_engine) as session, session.begin():
            await session.execute(services.ship(int(message.body)))

    @listen(ORDERED, queue="shipments", retry_delays=(0.1,) * 500, store_first=store_first)
    async def ship(number: int, session: AsyncSession) -> None:
        await session.execute(services.ship(number))

    await channel.declare_queue("plain", durable=True)
    await send(vhost.url, "plain", 1)
    with pytest.raises(DBAPIError):  # there is no table for shipments yet
        await ship_without_an_inbox()
    assert await is_empty(channel, "plain")

    async with rabbitmq_outbox.running(relay=True, listeners=[ship]):
        await place_order(rabbitmq_outbox, services, 2)
        [failed, *_] = await recorder.wait_for(Handled)
        assert isinstance(failed.outcome, RetryIn)
        await services.create(services.shipments)
        await eventually(services.shipped)
    assert await services.shipped() == [2], "the first customer will not receive the goods"


async def taken_and_held(channel: AbstractChannel, queue: str) -> aio_pika.abc.AbstractIncomingMessage:
    """The next message of a queue, which the broker keeps until it is acknowledged."""
    found = await channel.get_queue(queue)
    return await eventually(lambda: found.get(fail=False))


async def _waits(channel: AbstractChannel, queue: str) -> bool:
    return not await is_empty(channel, queue)


async def _contains(services: Services, number: int) -> bool:
    return number in await services.shipped()
