"""Listeners on a real RabbitMQ that lose their deliveries: to cut connections, and to the broker's consumer timeout."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from aiormq import spec

from outbox import Listener, Outbox
from outbox.core.events import Handled, Troubled, Unsettled
from tests.conftest import MakeOutbox
from tests.support.amqp import channel_to
from tests.support.broker import VirtualHost
from tests.support.observing import PATIENCE, Recorder, eventually
from tests.support.proxy import Link, Proxy

CUTS = 22  # RabbitMQ 4 dead-letters a message after 21, where nobody has told it otherwise
CONSUMER_TIMEOUT = 3.0  # seconds

one_database = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def link(vhost: VirtualHost) -> Iterator[Link]:
    """What the worker's connections pass through."""
    with Proxy() as proxy:
        yield proxy.broker_link("worker", urlsplit(vhost.url).port or 5672)


@asynccontextmanager
async def working(
    make_outbox: MakeOutbox, vhost: VirtualHost, listener: Listener, recorder: Recorder, link: Link | None = None
) -> AsyncIterator[Outbox]:
    """A relay that reaches the broker, and a worker that does so by the link."""
    address = urlsplit(vhost.url)
    port = address.port if link is None else link.port
    url = address._replace(netloc=f"{address.username}:{address.password}@127.0.0.1:{port}").geturl()
    outbox = make_outbox(rabbitmq_url=vhost.url)
    worker = Outbox(rabbitmq_url=url, observers=[recorder], log=False)
    async with outbox.running(relay=True), worker.running(listeners=[listener]):
        yield outbox
    await worker.close()


async def emit(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        await outbox.emit(session, "order.created", {"id": 1})


@one_database
async def test_a_listener_that_hangs_through_many_lost_connections_is_handled_in_the_end(
    make_outbox: MakeOutbox, vhost: VirtualHost, link: Link, recorder: Recorder
) -> None:
    starts, at_work, most_at_work = 0, 0, 0
    go_on = asyncio.Event()

    async def hang(order: object) -> None:
        nonlocal starts, at_work, most_at_work
        starts += 1
        at_work += 1
        most_at_work = max(most_at_work, at_work)
        try:
            await go_on.wait()
        finally:
            at_work -= 1

    listener = Listener("order.*", hang, queue="orders")
    async with working(make_outbox, vhost, listener, recorder, link) as outbox:
        await emit(outbox)
        for cuts in range(1, CUTS + 1):
            await eventually(lambda wanted=cuts: starts == wanted)  # type: ignore[misc]
            link.cut()
        await eventually(lambda: starts == CUTS + 1)
        go_on.set()
        [handled] = await recorder.wait_for(Handled)
    assert (starts, most_at_work, len(recorder.of(Unsettled))) == (CUTS + 1, 1, CUTS)
    attempt = handled.attempt
    assert (attempt.attempt_count, attempt.crash_count, attempt.isolated) == (1, 0, False)


@one_database
async def test_a_thread_whose_connection_is_lost_again_and_again_runs_once_at_a_time(
    make_outbox: MakeOutbox, vhost: VirtualHost, link: Link, recorder: Recorder
) -> None:
    starts, at_work, most_at_work = 0, 0, 0
    go_on = threading.Event()

    def hang(order: object) -> None:
        nonlocal starts, at_work, most_at_work
        starts += 1
        at_work += 1
        most_at_work = max(most_at_work, at_work)
        go_on.wait(PATIENCE)
        at_work -= 1

    listener = Listener("order.*", hang, queue="orders", retry_delays=[0.1, 1])
    async with working(make_outbox, vhost, listener, recorder, link) as outbox:
        await emit(outbox)
        await eventually(lambda: starts == 1)
        for cuts in range(3):
            link.cut()
            await recorder.wait_for(Troubled, 2 * (cuts + 1))  # both connections of the worker
            await asyncio.sleep(0.5)
        assert starts == 1
        go_on.set()
        [handled] = await recorder.wait_for(Handled)
    assert (starts, most_at_work, handled.attempt.crash_count) == (2, 1, 0)


@one_database
async def test_counts_that_a_stranger_wrote_are_not_taken_for_the_brokers(
    make_outbox: MakeOutbox, vhost: VirtualHost, link: Link, recorder: Recorder
) -> None:
    """RabbitMQ 4.3 leaves the first of them as it was written, and counts in the second; 3.10 knows only the first."""
    starts = 0
    go_on = asyncio.Event()

    async def hang(order: object) -> None:
        nonlocal starts
        starts += 1
        await go_on.wait()

    async with working(make_outbox, vhost, Listener("order.*", hang, queue="orders"), recorder, link):
        async with channel_to(vhost.url) as channel:
            forged = {"x-delivery-count": 50, "x-acquired-count": 50}
            await channel.basic_publish(
                b"{}",
                exchange="outbox",
                routing_key="order.created",
                properties=spec.Basic.Properties(content_type="application/json", headers=forged),
            )
        await eventually(lambda: starts == 1)
        link.cut()
        await eventually(lambda: starts == 2)
        go_on.set()
        [handled] = await recorder.wait_for(Handled)
    attempt = handled.attempt
    assert (attempt.attempt_count, attempt.crash_count, attempt.isolated) == (1, 0, False)


@one_database
async def test_a_consumer_timeout_is_told_as_one_and_costs_no_slot_and_no_attempt(
    make_outbox: MakeOutbox, vhost: VirtualHost, recorder: Recorder
) -> None:
    if vhost.server_version < (4, 3):
        pytest.skip("before 4.3 the broker looks once a minute, and closes the channel")
    vhost.management.ask(
        "PUT",
        *("policies", vhost.name, "late"),
        pattern="^orders$",
        definition={"consumer-timeout": int(1000 * CONSUMER_TIMEOUT)},
        **{"apply-to": "queues"},
    )
    starts, at_work, most_at_work = 0, 0, 0
    go_on = asyncio.Event()

    async def hang(order: object) -> None:
        nonlocal starts, at_work, most_at_work
        starts += 1
        at_work += 1
        most_at_work = max(most_at_work, at_work)
        try:
            await go_on.wait()
        finally:
            at_work -= 1

    listener = Listener("order.*", hang, queue="orders", concurrency=1)
    async with working(make_outbox, vhost, listener, recorder) as outbox:
        await emit(outbox)
        await eventually(lambda: starts == 4)
        go_on.set()
        [handled] = await recorder.wait_for(Handled)
    assert most_at_work == 1
    assert (handled.attempt.attempt_count, handled.attempt.crash_count, handled.attempt.isolated) == (1, 0, False)
    told = {str(each.error) for each in recorder.of(Troubled) if each.where == "consumer of orders"}
    assert told and all("not acknowledged within the consumer timeout" in each for each in told)
