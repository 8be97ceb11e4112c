"""Consuming from a broker that does what a real one seldom does: nothing is acknowledged before its end is safe."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pamqp import body, frame, header
from pamqp.commands import Basic, Channel, Exchange, Queue

from outbox import Listener, Message
from outbox.core.attempt import Dead, Done, Reason, Released, RetryIn
from outbox.core.backoff import TRANSPORT
from outbox.core.errors import TransportUnavailable
from outbox.core.events import Event, Troubled
from outbox.core.message import LARGEST_BODY
from outbox.core.settlement import Settlement
from outbox.core.transport import Defaults, Delivery, Transport
from outbox.transports.rabbitmq import acknowledging
from tests.amqp.peer import LONG, Consuming, Peer, Published
from tests.amqp.transports import connected

TEN_SECONDS = RetryIn(timedelta(seconds=10), "try again")
LISTENER = Listener("order.#", print, queue="orders", retry_delays=[10])

# What RabbitMQ 4 writes into the headers of a message that came back and was dead-lettered before.
OF_RABBITMQ_4 = {
    "x-delivery-count": 1,
    "x-acquired-count": 1,
    "x-opt-deaths": [{"queue": "outbox.delay_10s", "reason": "expired", "count": 1}],
    "x-death": [
        {
            "count": 1,
            "reason": "expired",
            "queue": "outbox.delay_10s",
            "time": datetime(2026, 1, 1, tzinfo=UTC),
            "exchange": "outbox.delay_10s",
            "routing-keys": ["orders"],
        }
    ],
    "x-first-death-exchange": "outbox.delay_10s",
    "x-first-death-queue": "outbox.delay_10s",
    "x-first-death-reason": "expired",
    "x-last-death-exchange": "outbox.delay_10s",
    "x-last-death-queue": "outbox.delay_10s",
    "x-last-death-reason": "expired",
}


@pytest.fixture
async def transport(peer: Peer, by_hand: bool) -> AsyncIterator[Transport]:
    async with connected(peer.url, by_hand) as transport:
        await transport.declare([LISTENER])
        yield transport


class Taking:
    """A worker's hand in a queue."""

    def __init__(self, transport: Transport, prefetch: int = 10) -> None:
        self.deliveries: Any = transport.consume(LISTENER, prefetch)
        self._next: asyncio.Task[Delivery] | None = None

    def begin(self) -> None:
        """Ask for a delivery, which is what starts a consumer."""
        self._next = self._next or asyncio.create_task(anext(self.deliveries))

    async def take(self) -> Delivery:
        self.begin()
        taking, self._next = self._next, None
        assert taking is not None
        async with asyncio.timeout(LONG):
            return await taking

    async def take_several(self, count: int) -> list[Delivery]:
        return [await self.take() for _ in range(count)]

    async def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait([self._next])
        await self.deliveries.aclose()


@pytest.fixture
async def taking(transport: Transport) -> AsyncIterator[Taking]:
    taking = Taking(transport)
    taking.begin()
    yield taking
    await taking.close()


@pytest.fixture
async def consumer(peer: Peer, taking: Taking) -> Consuming:
    return await peer.consuming()


class Ledger:
    """What a channel's deliveries came to, as a broker keeps it."""

    def __init__(self, peer: Peer, *tags: int) -> None:
        self._peer = peer
        self.open = set(tags)
        self.acked: set[int] = set()
        self.given_back: set[int] = set()

    async def until_acked(self, *tags: int) -> None:
        while not self.acked >= set(tags):
            await self.hear()

    async def hear(self) -> None:
        settled = await self._peer.settled()
        method = settled.method
        assert settled.tag in self.open, "RabbitMQ closes a channel over a number that it does not know"
        covered = (
            {tag for tag in self.open if tag <= settled.tag} if getattr(method, "multiple", False) else {settled.tag}
        )
        self.open -= covered
        (self.acked if isinstance(method, Basic.Ack) else self.given_back).update(covered)


async def confirm(published: Published) -> Published:
    published.channel.ack(published.tag)
    return published


async def landed(landing: Settlement) -> bool:
    async with asyncio.timeout(LONG):
        return await landing


# Deliveries


async def test_a_consumer_asks_for_its_prefetch_and_must_acknowledge(peer: Peer, transport: Transport) -> None:
    taking = Taking(transport, prefetch=7)
    taking.begin()
    _, qos = await peer.asked(Basic.Qos)
    _, consume = await peer.asked(Basic.Consume)
    assert (qos.prefetch_count, consume.queue, consume.no_ack) == (7, "orders", False)
    await taking.close()


async def test_a_delivery_is_acknowledged_when_it_is_done_and_not_before(
    peer: Peer, taking: Taking, consumer: Consuming
) -> None:
    tag = consumer.deliver(b'{"id": 1}', headers={"color": "red"}, routing_key="order.paid")
    delivery = await taking.take()
    message = delivery.attempt.message
    assert (message.routing_key, message.body, dict(message.headers)) == ("order.paid", b'{"id": 1}', {"color": "red"})
    assert delivery.attempt.attempt_count == 1
    assert not peer.has_settled
    landing = delivery.settle(Done())
    await Ledger(peer, tag).until_acked(tag)
    assert await landed(landing)


async def test_acknowledgements_of_many_never_reach_past_an_open_delivery(
    peer: Peer, taking: Taking, consumer: Consuming
) -> None:
    tags = [consumer.deliver() for _ in range(6)]
    ledger = Ledger(peer, *tags)
    deliveries = await taking.take_several(6)
    for position in (5, 1, 3, 4):
        deliveries[position].settle(Done())
    await ledger.until_acked(tags[1], tags[3], tags[4], tags[5])
    assert ledger.open == {tags[0], tags[2]}
    for position in (2, 0):
        deliveries[position].settle(Done())
    await ledger.until_acked(*tags)


async def test_one_slow_delivery_does_not_keep_the_prefetch_of_the_others(
    peer: Peer, taking: Taking, consumer: Consuming, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker sends nothing in the place of what is not acknowledged."""
    monkeypatch.setattr(acknowledging, "OPEN_DELIVERY_WAIT", 10 * LONG)
    tags = [consumer.deliver() for _ in range(16)]
    ledger = Ledger(peer, *tags)
    slow, first, *others = await taking.take_several(16)
    first.settle(Done())
    await asyncio.sleep(0.02)  # it waits for the slow one, and a timer for it is set
    for delivery in others:
        delivery.settle(Done())
    async with asyncio.timeout(LONG):
        await ledger.until_acked(*tags[1:])
    assert ledger.open == {tags[0]}
    slow.settle(Done())


async def test_a_thousand_done_in_any_order_are_all_acknowledged_once(peer: Peer, transport: Transport) -> None:
    taking = Taking(transport, prefetch=1000)
    taking.begin()
    consumer = await peer.consuming()
    tags = [consumer.deliver() for _ in range(1000)]
    deliveries = await taking.take_several(1000)
    for start in range(7):
        for delivery in deliveries[start::7]:
            delivery.settle(Done())
        await asyncio.sleep(0.005)
    ledger = Ledger(peer, *tags)
    await ledger.until_acked(*tags)
    assert not ledger.given_back
    await taking.close()


async def test_settled_twice_is_acknowledged_once(peer: Peer, taking: Taking, consumer: Consuming) -> None:
    tags = [consumer.deliver(), consumer.deliver()]
    first, second = await taking.take_several(2)
    assert await landed(first.settle(Done()))
    assert first.settle(TEN_SECONDS).cancelled()
    second.settle(Done())
    ledger = Ledger(peer, *tags)
    await ledger.until_acked(*tags)
    assert not peer.has_published and not peer.has_settled


async def test_a_delivery_in_many_pieces_arrives_whole(peer: Peer, taking: Taking, consumer: Consuming) -> None:
    text = bytes(range(256)) * 4
    frames: list[Any] = [
        Basic.Deliver(consumer.consumer_tag, next(consumer.channel.delivery_tags), False, "outbox", "order.created"),
        header.ContentHeader(0, len(text), Basic.Properties(message_id="in pieces")),
        *(body.ContentBody(text[start : start + 100]) for start in range(0, len(text), 100)),
    ]
    data = b"".join(frame.marshal(one, consumer.channel.number) for one in frames)
    for start in range(0, len(data), 37):
        consumer.channel.connection.write(data[start : start + 37])
        await asyncio.sleep(0)
    delivery = await taking.take()
    assert (delivery.attempt.message.id, delivery.attempt.message.body) == ("in pieces", text)


async def test_an_empty_body_is_delivered(taking: Taking, consumer: Consuming) -> None:
    consumer.deliver(b"")
    consumer.deliver(b"next")
    first, second = await taking.take_several(2)
    assert (first.attempt.message.body, second.attempt.message.body) == (b"", b"next")


async def test_the_headers_that_rabbitmq_4_writes_are_not_the_listeners_business(by_hand: bool) -> None:
    async with Peer(version="4.1.0") as peer, connected(peer.url, by_hand) as transport:
        await transport.declare([LISTENER])
        taking = Taking(transport)
        taking.begin()
        consumer = await peer.consuming()
        consumer.deliver(headers={**OF_RABBITMQ_4, "color": "red", "outbox-attempt": 2}, exchange="")
        attempt = (await taking.take()).attempt
        assert dict(attempt.message.headers) == {"color": "red"}
        assert attempt.attempt_count == 2
        await taking.close()


async def test_what_another_program_published_without_any_properties_is_delivered(
    taking: Taking, consumer: Consuming
) -> None:
    consumer.deliver(b"anything", message_id=None, content_type=None)
    message = (await taking.take()).attempt.message
    assert (message.body, message.routing_key) == (b"anything", "order.created")
    assert message.id


# Retries and dead letters


async def is_acknowledged_once_confirmed(peer: Peer, tag: int, copy: Published, landing: Settlement) -> None:
    """A copy carries on nothing of the broker's own, and until the broker has it, nothing is said of its original."""
    assert [name for name in copy.properties.headers or {} if name.startswith("x-")] == ["x-original-routing-key"]
    await asyncio.sleep(0.3)  # longer than acknowledgements wait for each other
    assert not peer.has_settled and not landing.done()
    await confirm(copy)
    await Ledger(peer, tag).until_acked(tag)
    assert await landed(landing)


async def test_a_retry_is_safe_in_its_delay_before_the_delivery_is_acknowledged(
    peer: Peer, taking: Taking, consumer: Consuming
) -> None:
    tag = consumer.deliver(b"again", headers={**OF_RABBITMQ_4, "color": "red"}, priority=3, correlation_id="abc")
    delivery = await taking.take()
    landing = delivery.settle(TEN_SECONDS)
    copy = await peer.published()
    assert (copy.method.exchange, copy.body) == ("outbox.delay_10s", b"again")
    assert copy.method.mandatory
    assert copy.properties.message_id == delivery.attempt.message.id
    assert (copy.properties.delivery_mode, copy.properties.priority, copy.properties.correlation_id) == (2, 3, "abc")
    headers = copy.properties.headers or {}
    assert (headers["color"], headers["outbox-attempt"]) == ("red", 2)
    await is_acknowledged_once_confirmed(peer, tag, copy, landing)


async def test_a_retry_that_the_broker_rejects_is_carried_again_and_not_acknowledged(
    peer: Peer, taking: Taking, consumer: Consuming
) -> None:
    tag = consumer.deliver()
    (await taking.take()).settle(TEN_SECONDS)
    rejected = await peer.published()
    rejected.channel.nack(rejected.tag)
    copy = await peer.published()
    assert copy.properties.message_id == rejected.properties.message_id
    assert not peer.has_settled
    await confirm(copy)
    await Ledger(peer, tag).until_acked(tag)


async def test_a_retry_whose_delay_is_missing_makes_it_and_is_not_lost(
    peer: Peer, taking: Taking, consumer: Consuming
) -> None:
    tag = consumer.deliver()
    (await taking.take()).settle(RetryIn(timedelta(seconds=77), "a delay that nobody listed"))
    returned = await peer.published()
    returned.channel.give_back(returned)
    await confirm(returned)
    copy = await peer.published()
    assert copy.method.exchange == returned.method.exchange
    declared = [method for _, method in peer.history if isinstance(method, Queue.Declare) and not method.passive]
    assert returned.method.exchange in {method.queue for method in declared}
    assert not peer.has_settled
    await confirm(copy)
    await Ledger(peer, tag).until_acked(tag)


async def test_a_retry_whose_exchange_is_missing_makes_it_and_is_not_lost(
    peer: Peer, taking: Taking, consumer: Consuming
) -> None:
    tag = consumer.deliver()
    (await taking.take()).settle(RetryIn(timedelta(seconds=77), "a delay that nobody listed"))
    refused = await peer.published()
    exchange = refused.method.exchange
    refused.channel.close(404, f"NOT_FOUND - no exchange '{exchange}' in vhost '/'")
    copy = await peer.published()
    declared = [method for _, method in peer.history if isinstance(method, Exchange.Declare) and not method.passive]
    assert exchange in {method.exchange for method in declared}
    assert copy.method.exchange == exchange
    await confirm(copy)
    await Ledger(peer, tag).until_acked(tag)


async def test_a_retry_whose_connection_is_cut_before_its_confirm_is_carried_again(
    peer: Peer, taking: Taking, consumer: Consuming
) -> None:
    tag = consumer.deliver()
    (await taking.take()).settle(TEN_SECONDS)
    lost = await peer.published()
    assert lost.channel.connection is not consumer.channel.connection
    lost.channel.connection.reset()
    copy = await peer.published()
    assert copy.properties.message_id == lost.properties.message_id
    assert not peer.has_settled
    await confirm(copy)
    await Ledger(peer, tag).until_acked(tag)


async def test_a_retry_waits_while_the_broker_takes_no_publishes(
    peer: Peer, transport: Transport, taking: Taking, consumer: Consuming
) -> None:
    publisher = peer.connections[0]
    assert publisher is not consumer.channel.connection
    publisher.block()
    await blocked(transport)
    tags = [consumer.deliver(), consumer.deliver()]
    failed, done = await taking.take_several(2)
    failed.settle(TEN_SECONDS)
    done.settle(Done())
    ledger = Ledger(peer, *tags)
    await ledger.until_acked(tags[1])  # who only acknowledges is not held up
    assert ledger.open == {tags[0]}
    publisher.unblock()
    while (await confirm(await peer.published())).method.routing_key == "a.probe":
        pass
    await ledger.until_acked(tags[0])


async def blocked(transport: Transport) -> None:
    """Wait until the client has heard that it may not publish."""
    async with asyncio.timeout(LONG):
        while True:
            publishing = asyncio.create_task(transport.publish([Message(routing_key="a.probe", body=b"")]))
            await asyncio.wait([publishing], timeout=0.2)
            if publishing.done() and isinstance(publishing.exception(), TransportUnavailable):
                return
            publishing.cancel()
            await asyncio.wait([publishing])


async def test_a_dead_letter_is_safe_before_the_delivery_is_acknowledged(
    peer: Peer, taking: Taking, consumer: Consuming
) -> None:
    tag = consumer.deliver(b"poison", headers={**OF_RABBITMQ_4, "color": "red"})
    delivery = await taking.take()
    landing = delivery.settle(Dead(Reason.REJECTED, "no such order"))
    copy = await peer.published()
    assert (copy.method.exchange, copy.body) == ("outbox.dlx", b"poison")
    headers = copy.properties.headers or {}
    assert (headers["outbox-reason"], headers["outbox-error"], headers["color"]) == ("rejected", "no such order", "red")
    await is_acknowledged_once_confirmed(peer, tag, copy, landing)


async def test_a_dead_letter_that_the_broker_rejects_is_neither_acknowledged_nor_lost(
    peer: Peer, taking: Taking, consumer: Consuming
) -> None:
    tag = consumer.deliver()
    (await taking.take()).settle(Dead(Reason.EXHAUSTED, "failed"))
    rejected = await peer.published()
    rejected.channel.nack(rejected.tag)
    await confirm(await peer.published())
    ledger = Ledger(peer, tag)
    await ledger.hear()
    assert ledger.acked == {tag}


async def test_headers_that_nobody_can_read_make_a_dead_letter_and_end_nobody_elses_delivery(
    peer: Peer, taking: Taking, consumer: Consuming
) -> None:
    bad = consumer.deliver(b"{}", headers={"outbox-attempt": "seven"}, exchange="")
    good = consumer.deliver(b"next")
    assert (await taking.take()).attempt.message.body == b"next"
    copy = await confirm(await peer.published())
    assert copy.method.exchange == "outbox.dlx"
    assert (copy.properties.headers or {})["outbox-reason"] == "undecodable"
    ledger = Ledger(peer, bad, good)
    await ledger.until_acked(bad)
    assert ledger.open == {good}


async def test_what_only_the_broker_can_carry_is_given_to_it_and_ends_nobody_elses_delivery(
    peer: Peer, taking: Taking, consumer: Consuming
) -> None:
    bad = consumer.deliver(b"x" * (LARGEST_BODY + 1))
    consumer.deliver(b"next")
    assert (await taking.take()).attempt.message.body == b"next"
    settled = (await peer.settled()).method
    assert isinstance(settled, Basic.Nack)
    assert (settled.delivery_tag, settled.requeue) == (bad, False)


async def test_what_expired_on_its_way_is_a_dead_letter_and_no_delivery(
    peer: Peer, taking: Taking, consumer: Consuming
) -> None:
    past = int(datetime(2020, 1, 1, tzinfo=UTC).timestamp() * 1_000_000)
    expired = consumer.deliver(b"old", headers={"outbox-expires-at": past})
    consumer.deliver(b"new")
    assert (await taking.take()).attempt.message.body == b"new"
    copy = await confirm(await peer.published())
    assert (copy.properties.headers or {})["outbox-reason"] == "expired"
    await Ledger(peer, expired).until_acked(expired)


# Ends that nobody asked for


async def again(peer: Peer, taking: Taking) -> Consuming:
    taking.begin()
    return await peer.consuming()


async def test_a_cancelled_consumer_consumes_again_and_says_nothing_of_what_it_held(
    peer: Peer, taking: Taking, consumer: Consuming
) -> None:
    consumer.deliver(b"held")
    held = await taking.take()
    consumer.cancel()
    second = await again(peer, taking)
    assert not await landed(held.settle(Done()))
    tag = second.deliver(b"held", redelivered=True)
    (await taking.take()).settle(Done())
    await Ledger(peer, tag).until_acked(tag)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (404, "NOT_FOUND - no queue 'orders' in vhost '/'"),
        (406, "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out. Timeout value used: 1800000 ms"),
        (541, "INTERNAL_ERROR"),
    ],
)
async def test_a_consumer_whose_channel_is_closed_consumes_again(
    peer: Peer, taking: Taking, consumer: Consuming, code: int, text: str
) -> None:
    consumer.deliver(b"held")
    held = await taking.take()
    consumer.channel.close(code, text)
    second = await again(peer, taking)
    assert second.channel.connection is consumer.channel.connection
    assert not await landed(held.settle(Done()))
    tag = second.deliver()
    (await taking.take()).settle(Done())
    await Ledger(peer, tag).until_acked(tag)


@pytest.mark.parametrize("how", ["cancelled", "refused", "rejected copy", "cut"])
async def test_what_the_broker_refuses_one_queue_is_told_apart_from_its_outage(
    peer: Peer, by_hand: bool, how: str
) -> None:
    heard: list[Event] = []
    troubled = asyncio.Event()

    def observe(event: Event) -> None:
        if isinstance(event, Troubled) and event.where in ("consumer of orders", "copies for orders"):
            heard.append(event)
            troubled.set()

    async with connected(peer.url, by_hand, defaults=Defaults(observe=observe)) as transport:
        await transport.declare([LISTENER])
        taking = Taking(transport)
        taking.begin()
        consumer = await peer.consuming()
        match how:
            case "cancelled":
                consumer.cancel()
            case "refused":
                consumer.channel.close(403, "ACCESS_REFUSED - read access to queue 'orders' refused")
            case "cut":
                consumer.channel.connection.reset()
            case _:
                consumer.deliver()
                (await taking.take()).settle(TEN_SECONDS)
                rejected = await peer.published()
                rejected.channel.nack(rejected.tag)
        async with asyncio.timeout(LONG):
            await troubled.wait()
            if how == "rejected copy":
                await confirm(await peer.published())
            else:
                await again(peer, taking)
        await taking.close()
    assert {(event.where, event.outage_of) for event in heard if isinstance(event, Troubled)} == {
        ("copies for orders", "copies for orders")
        if how == "rejected copy"
        else ("consumer of orders", TRANSPORT if how == "cut" else "consumer of orders")
    }


async def test_a_queue_that_is_gone_is_made_again(peer: Peer, taking: Taking, consumer: Consuming) -> None:
    answers = iter([Channel.Close(404, "NOT_FOUND - no queue 'orders' in vhost '/'", 60, 20)])
    peer.replies[Basic.Consume] = lambda method: next(answers, Basic.ConsumeOk(method.consumer_tag))
    before = declared(peer, "orders")
    consumer.cancel()
    taking.begin()
    await peer.consuming()  # the one that is refused
    second = await peer.consuming()
    assert declared(peer, "orders") > before
    tag = second.deliver()
    (await taking.take()).settle(Done())
    await Ledger(peer, tag).until_acked(tag)


def declared(peer: Peer, queue: str) -> int:
    return sum(isinstance(method, Queue.Declare) and method.queue == queue for _, method in peer.history)


@pytest.mark.parametrize("how", ["reset", "closed by an operator", "half a frame"])
async def test_a_consumer_whose_connection_ends_consumes_again_on_another(
    peer: Peer, taking: Taking, consumer: Consuming, how: str
) -> None:
    consumer.deliver(b"held")
    held = await taking.take()
    connection = consumer.channel.connection
    match how:
        case "reset":
            connection.reset()
        case "half a frame":
            connection.write(b"\x01\x00\x01\x00\x00")
            connection.reset()
        case _:
            connection.close(320, "CONNECTION_FORCED - Closed via management plugin")
    second = await again(peer, taking)
    assert second.channel.connection is not connection
    assert not await landed(held.settle(Done()))
    tag = second.deliver(b"held", redelivered=True)
    delivery = await taking.take()
    assert delivery.attempt.attempt_count == 1  # nobody failed
    delivery.settle(Done())
    await Ledger(peer, tag).until_acked(tag)


async def test_a_broker_that_falls_silent_is_noticed_by_a_consumer_that_only_waits(by_hand: bool) -> None:
    async with Peer() as peer, connected(f"{peer.url}?heartbeat=1", by_hand) as transport:
        await transport.declare([LISTENER])
        taking = Taking(transport)
        taking.begin()
        first = await peer.consuming()
        first.channel.connection.hush()
        second = await peer.consuming()
        second.deliver(b"after the silence")
        assert (await taking.take()).attempt.message.body == b"after the silence"
        await taking.close()


async def test_what_was_delivered_but_not_taken_when_the_connection_ended_is_not_handed_out(
    peer: Peer, taking: Taking, consumer: Consuming
) -> None:
    consumer.deliver(b"taken")
    consumer.deliver(b"waiting")
    await taking.take()
    consumer.channel.connection.reset()
    second = await peer.consuming()
    second.deliver(b"waiting again")
    assert (await taking.take()).attempt.message.body == b"waiting again"


# The end


async def test_closing_gives_back_what_was_not_taken_and_still_acknowledges_what_was(
    peer: Peer, taking: Taking, consumer: Consuming
) -> None:
    tags = [consumer.deliver() for _ in range(3)]
    ledger = Ledger(peer, *tags)
    taken = await taking.take()
    closing = asyncio.create_task(taking.close())
    await peer.asked(Basic.Cancel)
    while ledger.given_back != set(tags[1:]):
        await ledger.hear()
    taken.settle(Done())
    await ledger.until_acked(tags[0])
    await closing


async def test_a_delivery_given_back_untried_is_requeued(peer: Peer, taking: Taking, consumer: Consuming) -> None:
    tag = consumer.deliver()
    delivery = await taking.take()
    assert await landed(delivery.settle(Released()))
    settled = await peer.settled()
    assert isinstance(settled.method, Basic.Nack | Basic.Reject)
    assert (settled.tag, settled.method.requeue) == (tag, True)


async def test_the_transport_closes_its_connections_in_good_order(peer: Peer, by_hand: bool) -> None:
    async with connected(peer.url, by_hand) as transport:
        await transport.declare([LISTENER])
        taking = Taking(transport)
        taking.begin()
        consumer = await peer.consuming()
        tag = consumer.deliver()
        (await taking.take()).settle(Done())
        await taking.close()
    ledger = Ledger(peer, tag)
    await ledger.until_acked(tag)  # although it was settled in the last moment
