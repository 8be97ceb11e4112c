"""Polled or read from the log: a relay keeps what the contract of publishing promises, on every kind of destination."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from outbox import Listener, Message, Outbox
from outbox.core.attempt import Done
from outbox.core.message import NOW
from outbox.core.transport import Consumer
from outbox.core.webhooks import Secrets
from outbox.testing.publishing_contract import AT_THE_LIMITS, IGNORED, REFUSED, Destination
from outbox.transports import function
from outbox.transports.rabbitmq import RabbitmqTransport
from tests.contract.destinations import FunctionDestination, listening
from tests.support.observing import Recorder, eventually
from tests.support.outboxes import MakeOutbox

pytestmark = pytest.mark.parametrize("database_url", ["postgresql+asyncpg", "wal"], indirect=True)

LIMITS = [Message(**{"routing_key": "order.created", "body": b"{}", **fields}) for fields in AT_THE_LIMITS.values()]
LIMITS_OF_A_BROKER = [each for each in LIMITS if each.created_at.year >= 1970]  # its consumers read no earlier times
KEYS = {each.routing_key for each in LIMITS}


class RabbitmqDestination:
    """A queue for the keys of these tests. A broker refuses what no queue is bound to, and always answers."""

    def __init__(self, url: str) -> None:
        self.taken: list[str] = []
        self._url = url

    def transport(self) -> RabbitmqTransport:
        return RabbitmqTransport(self._url)

    @asynccontextmanager
    async def taking(self) -> AsyncIterator[RabbitmqDestination]:
        transport = self.transport()
        listeners = [Listener(key, print, queue=f"taken.{n}") for n, key in enumerate(sorted(KEYS))]
        await transport.open()
        await transport.declare(listeners)
        consumers = [transport.consume(listener, 100) for listener in listeners]
        tasks = [asyncio.create_task(self._take(consumer)) for consumer in consumers]
        yield self
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for consumer in consumers:
            await consumer.aclose()
        await transport.close()

    async def until_ignored(self) -> None:
        raise AssertionError

    async def _take(self, deliveries: Consumer) -> None:
        while True:
            delivery = await anext(deliveries)
            self.taken.append(delivery.attempt.message.id)
            delivery.settle(Done())


@pytest.fixture(params=["http", "signed", "binary", "function", "rabbitmq"])
async def destination(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Destination]:
    if request.param == "function":
        monkeypatch.setattr(function, "CALLED_WITHIN", 30)
        yield FunctionDestination()
    elif request.param == "rabbitmq":
        async with RabbitmqDestination(request.getfixturevalue("rabbitmq_url")).taking() as taking:
            yield taking
    else:
        options: dict[str, Any] = {"signed": {"secrets": Secrets(bytes(32))}, "binary": {"mode": "binary"}}
        async with listening(**options.get(request.param, {})) as listening_destination:
            yield listening_destination


async def store(outbox: Outbox, *messages: Message) -> None:
    async with outbox.transaction() as session:
        statement, rows = outbox.store.writing.insert(messages, NOW)
        await session.execute(statement, rows)


def messages(count: int) -> list[Message]:
    return [Message(routing_key="order.created", body=str(number).encode()) for number in range(count)]


async def test_what_is_committed_arrives_at_its_limits_too_and_leaves_the_table(
    make_outbox: MakeOutbox, destination: Destination
) -> None:
    outbox = make_outbox(transport=destination.transport())
    async with outbox.running(relay=True):
        limits = LIMITS if not isinstance(destination, RabbitmqDestination) else LIMITS_OF_A_BROKER
        sent = [*messages(50), *limits]
        await store(outbox, *sent)
        await eventually(lambda: _is_empty(outbox))
        await eventually(lambda: len(destination.taken) >= len(sent))
    assert sorted(destination.taken) == sorted(each.id for each in sent)
    assert await outbox.store.dead_letters.list() == []


async def test_a_refused_message_is_dead_alone(make_outbox: MakeOutbox, destination: Destination) -> None:
    outbox = make_outbox(transport=destination.transport(), relay_retry_delays=())
    refused, sent = Message(routing_key=REFUSED, body=b"no"), messages(6)
    async with outbox.running(relay=True):
        await store(outbox, *sent[:3], refused, *sent[3:])
        await eventually(lambda: _is_empty(outbox))
        await eventually(lambda: len(destination.taken) >= len(sent))
    assert sorted(destination.taken) == sorted(each.id for each in sent)
    [letter] = await outbox.store.dead_letters.list()
    assert (letter.message.id, letter.attempt_count) == (refused.id, 1)


async def test_what_gets_no_answer_stays_and_burns_no_attempt(
    make_outbox: MakeOutbox, destination: Destination, recorder: Recorder
) -> None:
    if isinstance(destination, RabbitmqDestination):
        pytest.skip("a broker answers")
    outbox = make_outbox(transport=destination.transport(), grace=0.2, observers=[recorder])
    ignored, sent = Message(routing_key=IGNORED, body=b""), messages(6)
    await outbox.create_tables()
    running = asyncio.create_task(_relay(outbox))
    await store(outbox, *sent[:3], ignored, *sent[3:])
    await destination.until_ignored()
    await eventually(lambda: _has_only(outbox, ignored))
    running.cancel()
    await asyncio.wait([running])
    [stored] = await outbox.messages()
    assert (stored.message.id, stored.attempt_count, stored.crash_count) == (ignored.id, 0, 0)
    assert sorted(destination.taken) == sorted(each.id for each in sent)


async def _is_empty(outbox: Outbox) -> bool:
    return not await outbox.messages(limit=1)


async def _has_only(outbox: Outbox, message: Message) -> bool:
    return [each.message.id for each in await outbox.messages()] == [message.id]


async def _relay(outbox: Outbox) -> None:
    async with outbox.running(relay=True):
        await asyncio.Event().wait()
