"""Listeners on a real RabbitMQ that lose their deliveries: to cut connections, and to the broker's consumer timeout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from aiormq import spec
from pamqp.common import FieldTable

from outbox import Listener, Outbox
from outbox.core.events import Handled, Troubled, Unsettled
from tests.support.amqp import channel_to
from tests.support.broker import VirtualHost
from tests.support.databases import on_sqlite
from tests.support.hanging import Hanging, HangingThread
from tests.support.observing import Recorder, eventually
from tests.support.outboxes import MakeOutbox, emit
from tests.support.proxy import Link, Proxy

CUTS = 22  # RabbitMQ 4 dead-letters a message after 21, where nobody has told it otherwise
CONSUMER_TIMEOUT = 3.0  # seconds


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


@on_sqlite
async def test_a_listener_that_hangs_through_many_lost_connections_is_handled_in_the_end(
    make_outbox: MakeOutbox, vhost: VirtualHost, link: Link, recorder: Recorder
) -> None:
    hang = Hanging()
    listener = Listener("order.*", hang, queue="orders")
    async with working(make_outbox, vhost, listener, recorder, link) as outbox:
        await emit(outbox, {"id": 1})
        for cuts in range(1, CUTS + 1):
            await eventually(lambda wanted=cuts: hang.starts == wanted)  # type: ignore[misc]
            link.cut()
        await eventually(lambda: hang.starts == CUTS + 1)
        hang.go_on.set()
        [handled] = await recorder.wait_for(Handled)
    assert (hang.starts, hang.most_at_work, len(recorder.of(Unsettled))) == (CUTS + 1, 1, CUTS)
    attempt = handled.attempt
    assert (attempt.attempt_count, attempt.crash_count, attempt.isolated) == (1, 0, False)


@on_sqlite
async def test_a_thread_whose_connection_is_lost_again_and_again_runs_once_at_a_time(
    make_outbox: MakeOutbox, vhost: VirtualHost, link: Link, recorder: Recorder
) -> None:
    hang = HangingThread()
    listener = Listener("order.*", hang, queue="orders", retry_delays=[0.1, 1])
    async with working(make_outbox, vhost, listener, recorder, link) as outbox:
        await emit(outbox, {"id": 1})
        await eventually(lambda: hang.starts == 1)
        for cuts in range(3):
            link.cut()
            await recorder.wait_for(Troubled, 2 * (cuts + 1))  # both connections of the worker
            await asyncio.sleep(0.5)
        assert hang.starts == 1
        hang.go_on.set()
        [handled] = await recorder.wait_for(Handled)
    assert (hang.starts, hang.most_at_work, handled.attempt.crash_count) == (2, 1, 0)


@on_sqlite
async def test_counts_that_a_stranger_wrote_are_not_taken_for_the_brokers(
    make_outbox: MakeOutbox, vhost: VirtualHost, link: Link, recorder: Recorder
) -> None:
    """RabbitMQ 4.3 leaves the first of them as it was written, and counts in the second; 3.10 knows only the first."""
    hang = Hanging()
    async with working(make_outbox, vhost, Listener("order.*", hang, queue="orders"), recorder, link):
        async with channel_to(vhost.url) as channel:
            forged: FieldTable = {"x-delivery-count": 50, "x-acquired-count": 50}
            await channel.basic_publish(
                b"{}",
                exchange="outbox",
                routing_key="order.created",
                properties=spec.Basic.Properties(content_type="application/json", headers=forged),
            )
        await eventually(lambda: hang.starts == 1)
        link.cut()
        await eventually(lambda: hang.starts == 2)
        hang.go_on.set()
        [handled] = await recorder.wait_for(Handled)
    attempt = handled.attempt
    assert (attempt.attempt_count, attempt.crash_count, attempt.isolated) == (1, 0, False)


@on_sqlite
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
    hang = Hanging()
    listener = Listener("order.*", hang, queue="orders", concurrency=1)
    async with working(make_outbox, vhost, listener, recorder) as outbox:
        await emit(outbox, {"id": 1})
        await eventually(lambda: hang.starts == 4)
        hang.go_on.set()
        [handled] = await recorder.wait_for(Handled)
    assert hang.most_at_work == 1
    assert (handled.attempt.attempt_count, handled.attempt.crash_count, handled.attempt.isolated) == (1, 0, False)
    told = {str(each.error) for each in recorder.of(Troubled) if each.where == "consumer of orders"}
    assert told and all("not acknowledged within the consumer timeout" in each for each in told)
