"""MemoryTransport: delays that outlive an event loop, and a time that can be moved."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from outbox.core.attempt import Dead, Done, Reason, RetryIn
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.transports import memory
from outbox.transports.memory import MemoryDelivery, MemoryTransport

MINUTE = timedelta(minutes=1)
SOON = 15.0  # seconds within which everything must have come


def listener(queue: str = "q") -> Listener:
    return Listener("#", print, queue=queue)


def message(body: bytes = b"1", expires_at: datetime | None = None) -> Message:
    return Message(routing_key="order.created", body=body, expires_at=expires_at)


def taken(transport: MemoryTransport, queue: str = "q") -> MemoryDelivery:
    delivery = transport.consume(listener(queue), 1).take()
    assert delivery is not None
    return delivery


async def test_nothing_is_taken_that_is_not_there() -> None:
    assert MemoryTransport().consume(listener(), 1).take() is None


async def test_no_more_is_taken_than_may_be_unsettled() -> None:
    transport = MemoryTransport()
    transport.put("q", message())
    transport.put("q", message())
    deliveries = transport.consume(listener(), 1)
    first = deliveries.take()
    assert first is not None
    assert deliveries.take() is None
    first.settle(Done())
    assert deliveries.take() is not None


async def test_it_tells_how_long_until_the_next_delay_is_over() -> None:
    transport = MemoryTransport()
    assert transport.until_next_due(["q", "other"]) is None
    for queue, delay in (("q", 5 * MINUTE), ("other", MINUTE)):
        transport.put(queue, message())
        taken(transport, queue).settle(RetryIn(delay, "failed"))
    [first, both] = [transport.until_next_due(queues) for queues in (["q"], ["q", "other"])]
    assert first is not None and 4 * MINUTE < first <= 5 * MINUTE
    assert both is not None and both <= MINUTE
    assert transport.waiting() == transport.waiting("q") + transport.waiting("other") == 2


async def test_a_delay_is_over_when_the_time_was_moved_that_far() -> None:
    transport = MemoryTransport()
    transport.put("q", message())
    taken(transport).settle(RetryIn(5 * MINUTE, "failed"))
    transport.advance(4 * MINUTE)
    assert transport.consume(listener(), 1).take() is None
    transport.advance(MINUTE)
    assert taken(transport).attempt.attempt_count == 2


async def test_moving_the_time_wakes_whoever_waits() -> None:
    transport = MemoryTransport()
    transport.put("q", message())
    deliveries = transport.consume(listener(), 1)
    (await anext(deliveries)).settle(RetryIn(5 * MINUTE, "failed"))
    waiting = asyncio.ensure_future(anext(deliveries))
    await asyncio.sleep(0)
    transport.advance(5 * MINUTE)
    async with asyncio.timeout(SOON):
        assert (await waiting).attempt.attempt_count == 2


async def test_delayed_messages_come_in_the_order_in_which_they_are_due() -> None:
    transport = MemoryTransport()
    for body, delay in ((b"late", 5 * MINUTE), (b"early", MINUTE), (b"early too", MINUTE)):
        transport.put("q", message(body))
        taken(transport).settle(RetryIn(delay, "failed"))
    transport.advance(10 * MINUTE)
    assert [taken(transport).attempt.message.body for _ in range(3)] == [b"early", b"early too", b"late"]


async def test_messages_expire_and_dead_letters_grow_old_when_the_time_is_moved() -> None:
    transport = MemoryTransport()
    transport.put("q", message(b"short", expires_at=datetime.now(UTC) + MINUTE))
    transport.put("q", message(b"long", expires_at=datetime.now(UTC) + timedelta(days=1)))
    transport.advance(MINUTE)
    delivery = taken(transport)
    assert delivery.attempt.message.body == b"long"
    delivery.settle(Dead(Reason.REJECTED))
    expired, rejected = await transport.dead_letters.list()
    assert (expired.reason, rejected.reason) == (Reason.EXPIRED, Reason.REJECTED)
    transport.advance(timedelta(days=1))
    assert expired.died_at - (await transport.dead_letters.show(expired.id)).died_at == timedelta(days=1)


def test_a_delay_goes_on_in_another_event_loop() -> None:
    transport = MemoryTransport()

    async def fail() -> None:
        transport.put("q", message())
        taken(transport).settle(RetryIn(timedelta(seconds=0.2), "failed"))
        await transport.close()

    async def wait() -> int:
        async with asyncio.timeout(SOON):
            return (await anext(transport.consume(listener(), 1))).attempt.attempt_count

    asyncio.run(fail())
    assert transport.waiting("q") == 1
    assert asyncio.run(wait()) == 2


async def test_a_worker_whose_hands_are_full_waits_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = MemoryTransport()
    transport.put("q", message())
    transport.put("q", message())
    taken(transport).settle(RetryIn(timedelta(0), "failed"))
    deliveries = transport.consume(listener(), 1)
    held = await anext(deliveries)
    looks = 0
    take = memory.MemoryConsumer.take

    def counted(self: memory.MemoryConsumer) -> MemoryDelivery | None:
        nonlocal looks
        looks += 1
        return take(self)

    monkeypatch.setattr(memory.MemoryConsumer, "take", counted)
    waiting = asyncio.ensure_future(anext(deliveries))
    for _ in range(100):
        await asyncio.sleep(0)
    assert looks < 5
    held.settle(Done())
    async with asyncio.timeout(SOON):
        await waiting
