"""RabbitMQ and HTTP behind a relay that reads the log."""

from __future__ import annotations

import asyncio
from typing import Any

from outbox import Listener, Outbox
from outbox.core.cloudevents import parse
from outbox.core.events import CircuitOpened
from tests.support.broker import VirtualHost
from tests.support.http_sink import HttpSink, by_type, hang, status

MANY = 3000


async def test_rabbitmq_gets_everything_in_commit_order(
    make: Any, outbox: Outbox, emit: Any, vhost: VirtualHost, until_empty: Any
) -> None:
    shop = make(transport=vhost.url, batch_size=100)
    arrived: list[int] = []

    async def on_order(body: int) -> None:
        arrived.append(body)

    listener = Listener("order.*", on_order, queue="orders", concurrency=1)
    async with shop.running(listeners=[listener]):
        committed: list[int] = []

        async def produce(first: int) -> None:
            for number in range(first, MANY, 3):
                async with outbox.transaction() as session:
                    await outbox.emit(session, "order.created", number)
                committed.append(number)

        await outbox.store.owners.release("")
        async with shop.running(relay=True):
            await asyncio.gather(*(produce(first) for first in range(3)))
            async with asyncio.timeout(60):
                while len(arrived) < MANY:
                    await asyncio.sleep(0.05)
            await until_empty()
    assert sorted(arrived) == list(range(MANY))
    for first in range(3):  # each producer waits for its commits: their order is known
        assert [number for number in arrived if number % 3 == first] == list(range(first, MANY, 3))


async def test_a_broker_that_closes_connections_loses_nothing_and_keeps_the_order(
    make: Any, outbox: Outbox, emit: Any, vhost: VirtualHost, until_empty: Any
) -> None:
    shop = make(transport=vhost.url, batch_size=20)
    arrived: list[int] = []

    async def on_order(body: int) -> None:
        arrived.append(body)

    async with shop.running(listeners=[Listener("order.*", on_order, queue="orders", concurrency=1)]):
        async with shop.running(relay=True):
            for number in range(400):
                await emit(str(number))
                if number in (100, 250):
                    await asyncio.to_thread(vhost.close_connections)
            await until_empty()
        async with asyncio.timeout(60):
            while set(arrived) != set(range(400)):
                await asyncio.sleep(0.05)


async def test_http_gets_everything_and_a_refused_event_is_dead(
    make: Any, outbox: Outbox, emit: Any, until_empty: Any
) -> None:
    async with HttpSink() as sink:
        sink.behave(by_type({"order.refused": status(422)}))
        shop = make(transport=f"{sink.url}/events", relay_retry_delays=())
        async with shop.running(relay=True):
            await emit(*map(str, range(50)))
            async with outbox.transaction() as session:
                await outbox.emit(session, "order.refused", b"no")
            await until_empty()
        found = [parse(request.headers, request.body)[0].message for request in sink.requests]
        assert sorted(int(each.body) for each in found if each.routing_key == "order.created") == list(range(50))
    [letter] = await outbox.dead_letters.list()
    assert letter.reason in ("refused", "exhausted")


async def test_http_that_does_not_answer_is_waited_for(
    make: Any, outbox: Outbox, emit: Any, recorder: Any, until_empty: Any
) -> None:
    async with HttpSink() as sink:
        sink.behave(hang(), times=2)
        shop = make(transport=f"{sink.url}/events?timeout=1", restart_delay=0.2)
        async with shop.running(relay=True):
            await emit("one")
            await recorder.wait_for(CircuitOpened)
            await emit("two")
            await until_empty()
        found = [parse(request.headers, request.body)[0].message for request in sink.requests]
        assert {each.body for each in found} == {b"one", b"two"}
