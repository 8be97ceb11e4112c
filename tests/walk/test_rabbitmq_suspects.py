"""After a worker died with much in hand: fresh messages do not wait for those that may have killed it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import aio_pika
import pytest

from outbox import Listener, Message, Outbox
from outbox.core.attempt import Done
from outbox.core.transport import Defaults
from outbox.transports.rabbitmq import RabbitmqTransport
from outbox.transports.rabbitmq.delivery import RabbitmqDelivery
from outbox.transports.rabbitmq.provisioning import permissions
from outbox.transports.rabbitmq.topology import Names, Topology
from tests.support.broker import VirtualHost
from tests.support.observing import PATIENCE, eventually

ROOT = Path(__file__).parents[2]
MESSAGES, IN_HAND, FRESH = 300, 200, 50
FRESH_WITHIN = 3 * 5.0  # seconds: three times what is promised
EACH_WITHIN = 0.25  # seconds for one that is tried, on a slow machine; a tenth of it is usual

# Half of what it has in hand is at work when it dies, so that all of it comes back.
DOOMED_WORKER = """
import asyncio, json, os, sys
from outbox import Listener, Outbox

started = []

async def on_message(number: int) -> None:
    started.append(number)
    if len(started) == 100:
        os._exit(137)
    await asyncio.sleep(3600)

options, queue, max_crashes, retries = json.loads(sys.argv[1])
listener = Listener("#", on_message, queue=queue, concurrency=100, max_crashes=max_crashes, **retries)
asyncio.run(Outbox(**options, prefetch_count=200).worker([listener]))
"""


@pytest.mark.parametrize(  # one return makes a message a suspected one
    ("max_crashes", "rights", "retries"),
    [(1, "all", {}), (2, "all", {}), (2, "printed", {}), (2, "printed", {"retry_delays": ()})],
    ids=["1", "2", "2 with the printed rights", "2 with the printed rights and no delay"],
)
async def test_suspected_messages_hold_up_no_fresh_ones_and_are_handled_one_after_another(
    vhost: VirtualHost, table_name: str, max_crashes: int, rights: str, retries: dict[str, Any]
) -> None:
    rabbitmq_url = vhost.url
    options: dict[str, Any] = {"rabbitmq_url": rabbitmq_url, "exchange_name": table_name}
    queue = f"{table_name}.all"
    handled: Counter[int] = Counter()

    async def on_message(number: int) -> None:
        handled[number] += 1

    listener = Listener("#", on_message, queue=queue, max_crashes=max_crashes, **retries)
    outbox = Outbox(**options)
    await outbox.transport.open()
    await outbox.transport.declare([listener])
    await publish(outbox, range(MESSAGES))
    if rights == "printed":
        provisioned = Topology.of(Names(exchange_name=table_name), [listener], (), way_back=True)
        transport: Any = outbox.transport
        await transport._republisher._declare(provisioned)
        options["rabbitmq_url"] = url_of_worker(vhost, table_name, listener)
    worker_outbox = Outbox(**options)
    doomed = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        DOOMED_WORKER,
        json.dumps([options, queue, max_crashes, retries]),
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE):
        await doomed.communicate()
    assert doomed.returncode == 137
    await eventually(partial(all_back, rabbitmq_url, queue))
    suspected, fresh = set(range(IN_HAND)), set(range(MESSAGES, MESSAGES + FRESH))
    async with worker_outbox.running(listeners=[listener]):
        await publish(outbox, fresh)
        async with asyncio.timeout(FRESH_WITHIN):
            await eventually(lambda: handled.keys() >= fresh)
        waiting = suspected - handled.keys()
        assert len(waiting) > IN_HAND / 2, "suspected messages were tried before fresh ones could come"
        async with asyncio.timeout(len(waiting) * EACH_WITHIN):
            await eventually(lambda: handled.keys() >= suspected)
        await eventually(lambda: len(handled) == MESSAGES + FRESH)
    assert set(handled.values()) == {1}
    assert await outbox.dead_letters.list() == []
    await outbox.close()


@pytest.fixture
async def transports(rabbitmq_url: str, table_name: str) -> AsyncIterator[list[RabbitmqTransport]]:
    """Those of two processes."""
    both = [RabbitmqTransport(rabbitmq_url, Defaults(settings={"exchange_name": table_name})) for _ in range(2)]
    for transport in both:
        await transport.open()
    yield both
    for transport in both:
        await transport.close()


async def test_a_worker_that_dies_in_a_trial_leaves_one_message_with_one_crash_more(
    transports: list[RabbitmqTransport], rabbitmq_url: str, table_name: str
) -> None:
    first, second = transports
    listener = Listener("#", print, queue=f"{table_name}.all", max_crashes=2)
    tried = await on_trial(first, listener, rabbitmq_url)
    await first._consumer_connection.close()
    deliveries = second.consume(listener, 10)
    delivery = await asyncio.wait_for(anext(deliveries), PATIENCE)
    assert delivery.attempt.message.id == tried.attempt.message.id
    assert delivery.attempt.crash_count == 2
    assert await delivery.settle(Done())
    await deliveries.aclose()
    assert await waiting_in(rabbitmq_url, listener.queue) == 0


async def test_a_trial_with_the_printed_rights_that_its_worker_dies_in_comes_back_by_a_delay(
    vhost: VirtualHost, table_name: str
) -> None:
    listener = Listener("#", print, queue=f"{table_name}.all", max_crashes=2, retry_delays=(0.1,))
    defaults = Defaults(settings={"exchange_name": table_name})
    url = url_of_worker(vhost, table_name, listener)
    provisioning, first, second = both = [RabbitmqTransport(each, defaults) for each in (vhost.url, url, url)]
    for transport in both:
        await transport.open()
        await transport.declare([listener])
    tried = await on_trial(first, listener, vhost.url, provisioning)
    await first._consumer_connection.close()
    deliveries = second.consume(listener, 10)
    delivery = await asyncio.wait_for(anext(deliveries), PATIENCE)
    assert delivery.attempt.message.id == tried.attempt.message.id
    assert (delivery.attempt.crash_count, delivery.attempt.message.routing_key) == (2, "a")
    assert await delivery.settle(Done())
    await deliveries.aclose()
    for transport in both:
        await transport.close()


def url_of_worker(vhost: VirtualHost, exchange: str, listener: Listener) -> str:
    """A user with the printed rights and no others."""
    _, worker = permissions(Topology.of(Names(exchange_name=exchange), [listener], ()))
    return vhost.url_of_user(configure=worker.configure, write=worker.write, read=worker.read)


async def test_a_connection_that_is_lost_during_a_trial_counts_as_no_crash_for_the_process_that_lives(
    transports: list[RabbitmqTransport], rabbitmq_url: str, table_name: str
) -> None:
    transport, _ = transports
    listener = Listener("#", print, queue=f"{table_name}.all", max_crashes=2)
    tried = await on_trial(transport, listener, rabbitmq_url)
    wire = await transport._consumer_connection.connection()
    await wire.close()
    holder: Any = tried.holder
    delivery = await asyncio.wait_for(anext(holder._receiver), PATIENCE)
    assert delivery.attempt.message.id == tried.attempt.message.id
    assert (delivery.attempt.crash_count, delivery.attempt.isolated) == (1, True)
    again = await delivery.start()
    assert again is not None
    assert await again.settle(Done())
    await holder._receiver.aclose()
    assert await waiting_in(rabbitmq_url, listener.queue) == 0


async def on_trial(
    transport: RabbitmqTransport, listener: Listener, rabbitmq_url: str, publisher: RabbitmqTransport | None = None
) -> RabbitmqDelivery:
    """A message that came back once, in its trial."""
    await transport.declare([listener])
    await (publisher or transport).publish([Message(routing_key="a", body=b"0")])
    async with await aio_pika.connect(rabbitmq_url) as connection:
        channel = await connection.channel()
        queue = await channel.get_queue(listener.queue)
        await eventually(lambda: queue.get(fail=False))
    delivery = await asyncio.wait_for(anext(transport.consume(listener, 10)), PATIENCE)
    assert (delivery.attempt.crash_count, delivery.attempt.isolated) == (1, True)
    tried = await delivery.start()
    assert tried is not None
    assert tried.holder.isolation_queue is not None
    return tried


async def publish(outbox: Outbox, numbers: Iterable[int]) -> None:
    batch = [Message(routing_key="a", body=json.dumps(number).encode()) for number in numbers]
    assert len((await outbox.transport.publish(batch)).confirmed) == len(batch)


async def all_back(rabbitmq_url: str, queue: str) -> bool:
    """Whether the broker has noticed that the worker is gone."""
    return await waiting_in(rabbitmq_url, queue) == MESSAGES


async def waiting_in(rabbitmq_url: str, queue: str) -> int:
    async with await aio_pika.connect(rabbitmq_url) as connection:
        channel = await connection.channel()
        declared = await channel.declare_queue(queue, passive=True)
        return declared.declaration_result.message_count or 0
