"""What RabbitMQ 4.3 does otherwise than 3.10, played by a peer: its counts, its cancels and its refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from pamqp import base
from pamqp.commands import Basic, Channel, Exchange, Queue

from outbox import Listener
from outbox.core.diagnosis import Finding, Level
from outbox.core.events import Advised, Event, Troubled
from outbox.core.retry import as_retry_policy
from outbox.core.transport import Defaults, Transport
from outbox.transports.rabbitmq.doctor import examine
from outbox.transports.rabbitmq.topology import Names
from tests.amqp.peer import LONG, Consuming, Peer
from tests.amqp.transports import connected

LISTENER = Listener("order.#", print, queue="orders", retry_delays=[10])
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with Peer(version="4.3.6") as peer:
        yield peer


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
async def transport(peer: Peer, by_hand: bool, events: list[Event]) -> AsyncIterator[Transport]:
    async with connected(peer.url, by_hand, defaults=Defaults(observe=events.append)) as transport:
        yield transport


# Rights


def refuse_as_with_the_printed_rights(peer: Peer) -> None:
    """Nothing may be made, and of what the user has no right on nothing is told."""

    def refused(what: str, class_id: int, method_id: int) -> Channel.Close:
        return Channel.Close(403, f"ACCESS_REFUSED - {what} refused for user 'worker'", class_id, method_id)

    def exchange(method: Any) -> base.Frame:
        if not method.passive or method.exchange in ("outbox", "outbox.topology_v1"):
            return refused(f"configure access to exchange '{method.exchange}' in vhost '/'", 40, 10)
        return Exchange.DeclareOk()

    def queue(method: Any) -> base.Frame:
        if not method.passive or method.queue.endswith(".dlq"):
            return refused(f"configure access to queue '{method.queue}' in vhost '/'", 50, 10)
        return Queue.DeclareOk(method.queue, 0, 1)

    def unbind(method: Any) -> base.Frame:
        return refused("read access to exchange 'amq.direct' in vhost '/'", 40, 40)

    def consume(method: Any) -> base.Frame:
        if (method.arguments or {}).get("x-priority") is not None:
            return Channel.Close(406, "PRECONDITION_FAILED - invalid arg 'x-priority'", 60, 20)
        return Basic.ConsumeOk(method.consumer_tag)

    peer.replies |= {
        Exchange.Declare: exchange,
        Exchange.Unbind: unbind,
        Queue.Declare: queue,
        Queue.Bind: lambda method: refused(f"write access to queue '{method.queue}'", 50, 20),
        Basic.Consume: consume,
    }


async def test_a_worker_with_the_printed_rights_starts_where_it_may_not_see_everything(
    peer: Peer, transport: Transport
) -> None:
    refuse_as_with_the_printed_rights(peer)
    await transport.declare([LISTENER])


async def examined(peer: Peer) -> Sequence[Finding]:
    return (await examine(peer.url, Names(), [LISTENER], as_retry_policy((10,)), management_url=NOWHERE)).findings


async def test_the_doctor_says_what_it_may_not_see_and_ends_in_no_error(peer: Peer) -> None:
    refuse_as_with_the_printed_rights(peer)
    found = await examined(peer)
    told = {each.subject: each for each in found}
    assert {each.level for each in found} <= {Level.OK, Level.WARNING}
    assert "may not see whether there is 'outbox', 'outbox.topology_v1'" in told["exchanges"].what
    assert "may not see whether there is 'orders.dlq'" in told["queues"].what
    assert told["consumers"].what == "every queue has one, of 1"


async def test_a_broker_that_goes_away_while_the_doctor_looks_is_an_error_and_no_exception(peer: Peer) -> None:
    def close(method: Any) -> base.Frame | None:
        peer.connections[-1].close(320, "CONNECTION_FORCED - shutdown")
        return None

    peer.replies[Queue.Declare] = close
    found = await examined(peer)
    assert [each.subject for each in found if each.level is Level.ERROR] == ["broker"]


# Limits


async def test_a_queue_that_limits_deliveries_is_told_with_what_happens_and_a_policy(
    peer: Peer, transport: Transport, events: list[Event]
) -> None:
    def queue(method: Any) -> base.Frame:
        if method.queue == "orders" and "x-delivery-limit" in (method.arguments or {}):
            text = "inequivalent arg 'x-delivery-limit' for queue 'orders' in vhost '/': received the value '-1' of "
            text += "type 'signedint' but current is none"
            return Channel.Close(406, f"PRECONDITION_FAILED - {text}", 50, 10)
        return Queue.DeclareOk(method.queue, 0, 0)

    peer.replies[Queue.Declare] = queue
    await transport.declare([LISTENER])
    [advised] = [each for each in events if isinstance(each, Advised)]
    assert "the queue 'orders' has no x-delivery-limit instead of x-delivery-limit=-1" in advised.advice
    assert "21 lost connections, although nothing failed" in advised.advice
    assert """rabbitmqctl set_policy --apply-to queues orders-limit '^orders$' '{"delivery-limit": -1}'""" in (
        advised.advice
    )
    assert "crashes" not in advised.advice


async def test_the_broker_tells_its_version(transport: Transport) -> None:
    assert await transport.server_version() == "4.3.6"


# Cancels


async def consuming(peer: Peer, deliveries: Any) -> tuple[Consuming, asyncio.Task[Any]]:
    taking = asyncio.ensure_future(anext(deliveries))
    return await peer.consuming(), taking


async def test_a_cancelled_consumer_is_told_as_what_it_may_be(
    peer: Peer, transport: Transport, events: list[Event]
) -> None:
    await transport.declare([LISTENER])
    deliveries = transport.consume(LISTENER, 10)
    consumer, taking = await consuming(peer, deliveries)
    consumer.cancel()
    await peer.consuming()
    taking.cancel()
    await asyncio.wait([taking])
    await deliveries.aclose()
    [troubled] = [each for each in events if isinstance(each, Troubled)]
    assert "not acknowledged within the consumer timeout, or its queue was deleted" in str(troubled.error)
    assert troubled.outage_of == "consumer of orders"


# Counts


@pytest.mark.parametrize(
    ("counts", "is_suspected"),
    [
        ({"x-acquired-count": 9}, False),  # given back, nine times
        ({"x-delivery-count": 9, "x-acquired-count": 1}, False),  # given back, and its publisher wrote the other one
        ({"x-delivery-count": 2, "x-acquired-count": 5}, True),
        ({"x-delivery-count": 2, "x-acquired-count": 2}, True),
    ],
)
async def test_what_was_only_given_back_is_not_suspected(
    peer: Peer, transport: Transport, counts: dict[str, int], is_suspected: bool
) -> None:
    await transport.declare([LISTENER])
    deliveries: Any = transport.consume(LISTENER, 10)
    consumer, taking = await consuming(peer, deliveries)
    consumer.deliver(redelivered=True, headers=counts)
    async with asyncio.timeout(LONG):
        delivery = await taking
    assert delivery.attempt.isolated is is_suspected
    await deliveries.aclose()


async def test_before_4_3_only_a_stranger_writes_an_acquired_count(by_hand: bool) -> None:
    async with Peer(version="4.2.1") as peer, connected(peer.url, by_hand) as transport:
        await transport.declare([LISTENER])
        deliveries: Any = transport.consume(LISTENER, 10)
        consumer, taking = await consuming(peer, deliveries)
        consumer.deliver(redelivered=True, headers={"x-delivery-count": 2, "x-acquired-count": 0})
        async with asyncio.timeout(LONG):
            delivery = await taking
        assert delivery.attempt.isolated
        await deliveries.aclose()
