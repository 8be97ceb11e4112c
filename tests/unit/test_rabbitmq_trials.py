"""PoisonSuspects of one channel: whatever becomes of a trial, the next one is tried."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, cast

import pytest
from pamqp import commands

from outbox.core.attempt import Released
from outbox.core.listener import Listener
from outbox.transports.rabbitmq import poison
from outbox.transports.rabbitmq.channel import Incoming
from outbox.transports.rabbitmq.consumer import RabbitmqConsumer
from outbox.transports.rabbitmq.delivery import RabbitmqDelivery
from outbox.transports.rabbitmq.lost_runs import LostRuns
from outbox.transports.rabbitmq.poison import PoisonSuspects
from outbox.transports.rabbitmq.unacknowledged import Unacknowledged

LONG = 10.0  # seconds that no test waits


class Channel:
    """Hears everything and says nothing."""

    server_version = None

    def __init__(self) -> None:
        self.ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def settle(self, acks: object, nacks: object) -> None:
        """Taken."""

    async def heard(self) -> None:
        """At once."""

    async def cancel(self) -> None:
        """At once, too."""

    async def close(self) -> None:
        self.ended.set_result(None)


class Republisher:
    """Confirms when it is told to."""

    def __init__(self) -> None:
        self.confirms = asyncio.Event()
        self.confirms.set()

    async def back(self, parcel: object, delay: object) -> bool:
        await self.confirms.wait()
        return True

    async def back_later(self, parcel: object, delay: object) -> bool:
        return False

    async def back_at_once(self, parcel: object) -> bool:
        return True


class Consumer:
    """The deliveries of one queue, by channels that exist nowhere."""

    def __init__(self) -> None:
        self.suspects = PoisonSuspects()
        self.republisher = Republisher()
        self._tags: dict[Unacknowledged, int] = {}
        self.deliveries = RabbitmqConsumer(
            Listener("#", print, queue="queue", concurrency=1000),
            "queue",
            2000,
            supervised=cast(Any, None),
            republisher=cast(Any, self.republisher),
            suspects=self.suspects,
            lost_runs=LostRuns(),
            declare=cast(Any, None),
            observe=lambda event: None,
            all_unacknowledged=set(),
        )
        prepared: Any = asyncio.get_running_loop().create_future()
        prepared.set_result(None)
        self.deliveries._preparing = prepared
        self.deliveries._isolation_queue._is_refused = True  # so that copies go by the listener's queue

    def channel(self) -> tuple[Channel, Unacknowledged]:
        channel = Channel()
        unacknowledged = self.deliveries._current = Unacknowledged(
            cast(Any, channel), self.deliveries._consumed, self.deliveries
        )
        return channel, unacknowledged

    def delivered(self, unacknowledged: Unacknowledged, id: str, **headers: object) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._tags[unacknowledged] = tag = self._tags.get(unacknowledged, 0) + 1
        properties = commands.Basic.Properties(message_id=id, headers=cast(Any, named)).marshal()
        unacknowledged.take(Incoming(tag, True, "", "key", "consumer", properties, b""))

    def taken(self) -> str | None:
        delivery = self.deliveries.take()
        return None if delivery is None else delivery.attempt.message.id


async def test_a_channel_that_is_lost_during_a_trial_keeps_no_suspect_from_its_own() -> None:
    consumer = Consumer()
    channel, unacknowledged = consumer.channel()
    for id in ("first", "second"):
        consumer.delivered(unacknowledged, id, x_delivery_count=2)
    first = consumer.deliveries.take()
    assert first is not None
    starting = asyncio.create_task(first.start())
    await asyncio.sleep(0.01)
    consumer.delivered(unacknowledged, "first", outbox_crashes=2, outbox_on_trial=True)
    assert await asyncio.wait_for(starting, LONG) is not None
    channel.ended.set_result(None)
    await asyncio.sleep(0)
    _, unacknowledged = consumer.channel()
    consumer.delivered(unacknowledged, "third", x_delivery_count=2)
    assert consumer.taken() == "third"


def unconfirmed() -> tuple[Consumer, Unacknowledged, RabbitmqDelivery]:
    """Two suspects, the first of them taken, while the broker confirms no copy."""
    consumer = Consumer()
    _, unacknowledged = consumer.channel()
    for id in ("first", "second"):
        consumer.delivered(unacknowledged, id, x_delivery_count=2)
    first = consumer.deliveries.take()
    assert first is not None
    consumer.republisher.confirms.clear()
    return consumer, unacknowledged, first


async def test_a_copy_that_is_confirmed_late_and_goes_elsewhere_keeps_no_suspect_from_its_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(poison, "RESERVED_FOR", 0.05)
    consumer, _, first = unconfirmed()
    assert await first.start() is None  # no copy came in time
    consumer.republisher.confirms.set()
    await asyncio.sleep(0.2)
    assert consumer.taken() == "second"


async def test_a_copy_that_comes_before_it_is_confirmed_keeps_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison, "RESERVED_FOR", 0.05)
    consumer, unacknowledged, first = unconfirmed()
    starting = asyncio.create_task(first.start())
    await asyncio.sleep(0.01)
    consumer.delivered(unacknowledged, "first", outbox_crashes=2, outbox_on_trial=True)
    assert await asyncio.wait_for(starting, LONG) is not None
    consumer.republisher.confirms.set()
    await asyncio.sleep(0.2)
    assert consumer.taken() is None


async def test_any_number_of_suspects_is_given_back_at_the_end() -> None:
    consumer = Consumer()
    _, unacknowledged = consumer.channel()
    for number in range(500):
        consumer.delivered(unacknowledged, str(number), x_delivery_count=2)
    await asyncio.wait_for(consumer.deliveries.aclose(), LONG)
    await asyncio.sleep(0.1)
    assert unacknowledged.idle


async def test_a_suspect_that_no_worker_takes_keeps_no_other_from_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison, "TAKEN_WITHIN", 0.05)
    consumer = Consumer()
    _, unacknowledged = consumer.channel()
    for id in ("first", "second"):
        consumer.delivered(unacknowledged, id, x_delivery_count=2)
    await asyncio.sleep(0.08)
    first, second = consumer.deliveries.take(), consumer.deliveries.take()
    assert first is not None
    assert second is not None
    starting = asyncio.create_task(first.start())  # it is the second one's turn, but that one waits
    await asyncio.sleep(0.01)
    assert await second.start() is None  # not while a copy of another one is under way
    consumer.delivered(unacknowledged, "first", outbox_crashes=2, outbox_on_trial=True)
    assert await asyncio.wait_for(starting, LONG) is not None


async def test_without_a_delay_a_suspect_that_waited_in_vain_is_held_and_then_given_back() -> None:
    consumer = Consumer()
    _, unacknowledged = consumer.channel()
    consumer.delivered(unacknowledged, "first", x_delivery_count=2)
    first = consumer.deliveries.take()
    assert first is not None
    first.settle(Released(timedelta(seconds=0.1)))
    await asyncio.sleep(0.05)
    assert not unacknowledged.idle
    await asyncio.sleep(0.1)
    assert unacknowledged.idle
