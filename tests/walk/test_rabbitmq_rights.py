"""The whole flow at RabbitMQ under users that may make nothing, on what `outbox topology` printed."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from outbox import ConfigurationError, Outbox
from outbox.cli.exits import ExitCode
from outbox.core.attempt import Done, RetryIn
from outbox.transports.rabbitmq import RabbitmqTransport
from outbox.transports.rabbitmq.provisioning import permissions
from outbox.transports.rabbitmq.topology import Names, Topology
from tests.support.amqp import OFFERED_BEFORE, arrival, channel_to, taken
from tests.support.broker import VirtualHost
from tests.support.commands import Command, until
from tests.support.databases import on_sqlite
from tests.support.observing import PATIENCE
from tests.support.outboxes import MakeOutbox

SHOP = """
from outbox import Reject, listen

heard = []


@listen("order.*", queue="billing", retry_delays=(0.15, 6))
async def bill(order: dict, attempt_count: int, routing_key: str) -> None:
    heard.append(("billing", routing_key, attempt_count))
    if attempt_count == 1:
        raise ConnectionError("the first attempt fails")


@listen("order.*", queue="shipping", retry_delays=(6,))
async def ship(order: dict, attempt_count: int, routing_key: str) -> None:
    heard.append(("shipping", routing_key, attempt_count))


@listen("order.created", queue="audit", retry_delays=())
async def audit(order: dict, attempt_count: int, routing_key: str) -> None:
    heard.append(("audit", routing_key, attempt_count))
    raise Reject("it will never be right")


listeners = [bill, ship, audit]
later = [bill, ship, listen("order.#", queue="audit", retry_delays=(7,))(audit.callback)]
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vhost: VirtualHost) -> Command:
    """The command beside a module of listeners; its URL is an administrator's."""
    (tmp_path / "shop_of_rights.py").write_text(SHOP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shop_of_rights", raising=False)
    return Command(tmp_path, {"OUTBOX_TRANSPORT": vhost.url})


@pytest.fixture
async def provisioned(shop: Command, vhost: VirtualHost) -> Command:
    """What the command printed, imported."""
    ran = await shop.run("topology", "shop_of_rights:listeners", "--format", "json")
    vhost.management.ask("POST", "definitions", **ran.document)
    return shop


def module() -> object:
    return sys.modules["shop_of_rights"]


def users(vhost: VirtualHost, kind: str) -> tuple[str, str]:
    """The URLs of a relay and of a worker."""
    if kind == "offered before":
        url = vhost.url_of_user(**OFFERED_BEFORE)
        return url, url
    relay, worker = permissions(Topology.of(Names(), module().listeners, ()))  # type: ignore[attr-defined]
    return vhost.url_of_user(write=relay.write, read=relay.read), vhost.url_of_user(
        configure=worker.configure, write=worker.write, read=worker.read
    )


@asynccontextmanager
async def working(url: str, listeners: str = "listeners") -> AsyncIterator[None]:
    """A worker with a broker and no database."""
    async with Outbox(transport=url).running(listeners=getattr(module(), listeners)):
        yield


@on_sqlite
@pytest.mark.parametrize("kind", ["least", "offered before"])
async def test_messages_retries_and_dead_letters_go_where_they_should(
    make_outbox: MakeOutbox, provisioned: Command, vhost: VirtualHost, kind: str
) -> None:
    relaying, worker = users(vhost, kind)
    producer = make_outbox(transport=relaying)
    heard = module().heard  # type: ignore[attr-defined]
    async with producer.running(relay=True), working(worker):
        async with producer.transaction() as session:
            await producer.emit(session, "order.created", {"id": 1})
        await until(lambda: len(heard) >= 4)
        async with channel_to(vhost.url) as channel:
            assert await arrival(channel, "audit.dlq") == b'{"id":1}'
        await until(lambda: is_empty(producer))
    assert Counter(heard) == {
        ("billing", "order.created", 1): 1,
        ("billing", "order.created", 2): 1,
        ("shipping", "order.created", 1): 1,
        ("audit", "order.created", 1): 1,
    }
    async with channel_to(vhost.url) as channel:
        for queue in ("billing", "shipping", "audit", "billing.dlq", "shipping.dlq"):
            assert await taken(channel, queue) is None, queue


async def test_a_retry_without_delay_takes_the_shortest_where_the_default_exchange_is_closed(
    provisioned: Command, vhost: VirtualHost
) -> None:
    _, url = users(vhost, "least")
    bill = module().bill  # type: ignore[attr-defined]
    transport = RabbitmqTransport(url)
    await transport.open()
    await transport.declare(module().listeners)  # type: ignore[attr-defined]
    deliveries = transport.consume(bill, 10)
    async with channel_to(vhost.url) as channel:
        await channel.basic_publish(b"{}", exchange="outbox", routing_key="order.created")
    for expected in (1, 2, 3):
        delivery = await asyncio.wait_for(anext(deliveries), PATIENCE)
        assert delivery.attempt.attempt_count == expected
        outcome = RetryIn(timedelta(0), "boom") if expected < 3 else Done()
        assert await delivery.settle(outcome) is True
    await deliveries.aclose()
    await transport.close()


async def is_empty(outbox: Outbox) -> bool:
    return not (await outbox.backlog()).waiting


async def test_a_worker_that_lacks_something_ends_before_it_starts_with_what_to_do(
    provisioned: Command, vhost: VirtualHost
) -> None:
    _, url = users(vhost, "least")
    ran = await provisioned.run("worker", "shop_of_rights:later", OUTBOX_TRANSPORT=url)
    assert (ran.code, ran.error_lines) == (ExitCode.CONFIGURATION, 1)
    assert "lacks exchange 'outbox.delay_7s', queue 'outbox.delay_7s'" in ran.stderr
    assert "`outbox topology MODULE:ATTRIBUTE`" in ran.stderr


async def test_a_worker_refuses_the_topology_of_somebody_else(provisioned: Command, vhost: VirtualHost) -> None:
    async with channel_to(vhost.url) as channel:
        await channel.exchange_delete("outbox.topology_v1")
    with pytest.raises(ConfigurationError, match=r"outbox\.topology_v1"):
        async with working(users(vhost, "offered before")[1]):
            pass


@on_sqlite
async def test_the_doctor_looks_at_the_database_and_the_broker(
    make_outbox: MakeOutbox, provisioned: Command, vhost: VirtualHost, database_url: str, table_name: str
) -> None:
    producer = make_outbox(transport=vhost.url)
    async with producer.running(relay=True, listeners=module().listeners):  # type: ignore[attr-defined]
        ran = await provisioned.run(
            *("doctor", "shop_of_rights:listeners", "--json"),
            OUTBOX_DB_ENGINE_URL=database_url,
            OUTBOX_TABLE_NAME=table_name,
        )
    assert ran.code == ExitCode.FINE, ran.said
    levels = {each["subject"]: each["level"] for each in ran.document["findings"]}
    for subject in ("tables", "transport", "broker", "exchanges", "queues", "consumers"):
        assert levels[subject] == "ok", ran.said


async def test_a_queue_that_was_deleted_changes_nothing_for_the_delays_of_others(
    provisioned: Command, vhost: VirtualHost
) -> None:
    heard = module().heard  # type: ignore[attr-defined]
    async with working(vhost.url), channel_to(vhost.url) as channel:
        await channel.queue_delete("shipping")
        await until(lambda: vhost.queues().get("shipping", {}).get("consumers"))
        await channel.basic_publish(b"{}", exchange="outbox", routing_key="order.changed")
        await until(lambda: ("billing", "order.changed", 2) in heard)
    assert {name for name in vhost.exchanges() if ".delay_" in name} == {"outbox.delay_150ms", "outbox.delay_6s"}
