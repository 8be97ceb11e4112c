"""TransportCases: what the cases of the contract share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from outbox.core.attempt import Done
from outbox.core.dead_letter import DeadLetters
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.transport import Consumer, Delivery, Transport

SOON = 30.0  # seconds within which everything must have come, on the slowest machine
QUIET = 0.3  # seconds in which nothing may come

MakeTransport = Callable[[], Transport]


async def nothing(body: object) -> None:
    """A callback: the contract takes deliveries by itself."""


def listener(queue: str = "q", binding_key: str = "order.created", **options: Any) -> Listener:
    return Listener(binding_key, nothing, queue=queue, **options)


def message(routing_key: str = "order.created", body: bytes = b"{}", **fields: Any) -> Message:
    return Message(routing_key=routing_key, body=body, **fields)


@asynccontextmanager
async def consuming(transport: Transport, queue: str = "q", prefetch: int = 10) -> AsyncIterator[Consumer]:
    """The deliveries of a queue, closed at the end."""
    deliveries = transport.consume(listener(queue), prefetch)
    try:
        yield deliveries
    finally:
        await deliveries.aclose()


async def take(deliveries: Consumer, count: int = 1) -> list[Delivery]:
    """The next deliveries."""
    async with asyncio.timeout(SOON):
        return [await anext(deliveries) for _ in range(count)]


def skip_where(transport: Transport, feature: str, value: object, why: str) -> None:
    """Skip a case that is not asked of a transport with this feature, so that the report has its name and counts it."""
    if getattr(transport.features, feature) == value:
        pytest.skip(f"{feature}={value!r}: {why}")


def dead_letters_of(transport: Transport) -> DeadLetters:
    """What it keeps of the dead; a case about them is skipped where it keeps none."""
    skip_where(transport, "keeps_dead_letters", False, "it keeps no dead letters")
    assert transport.dead_letters is not None
    return transport.dead_letters


async def quiet(deliveries: Consumer) -> bool:
    """Whether nothing comes for a while."""
    try:
        async with asyncio.timeout(QUIET):
            await anext(deliveries)
    except TimeoutError:
        return True
    return False


async def emptied(transport: Transport, queue: str = "q", count: int = 1) -> list[Message]:
    """The messages of a queue that holds so many and no more, settled as done."""
    async with consuming(transport, queue, 100) as deliveries:
        found = await take(deliveries, count)
        for delivery in found:
            await delivery.settle(Done())
        assert await quiet(deliveries), f"{queue} holds more than {count}"
        return [delivery.attempt.message for delivery in found]


DECLARED = {  # methods that a feature says are there
    "declare": "consumes",
    "consume": "consumes",
    "watched": "knows_health",
    "counted": "counts_queues",
    "bindings": "changes_bindings",
    "unbind": "changes_bindings",
    "topology": "describes_topology",
}


def check_declared_features(transport: Transport) -> None:
    """What is declared is there, and what is there is declared."""
    for method, feature in DECLARED.items():
        is_there = getattr(type(transport), method) is not getattr(Transport, method)
        assert getattr(transport.features, feature) == is_there, f"{feature}: {method}() is there: {is_there}"
    assert transport.features.in_store == (transport.takers is not None)
    assert transport.features.keeps_dead_letters == (transport.dead_letters is not None)


@pytest.mark.asyncio
class TransportCases:
    """A transport that is open."""

    @pytest.fixture
    async def transport(self, make_transport: MakeTransport) -> AsyncIterator[Transport]:
        transport = make_transport()
        await transport.open()
        yield transport
        await transport.close()
