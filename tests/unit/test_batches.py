"""Listeners that take lists, without a worker: what they may ask for, what is in a list, and what they may return."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker

from outbox import ConfigurationError, Listener, Message, Undecodable, listen
from outbox.core.attempt import Released, RetryIn
from outbox.core.durations import NO_DELAY
from outbox.core.transport import Consumer, Delivery
from outbox.inbound.batch_arguments import BatchArguments
from outbox.inbound.batches import Batches, Together
from outbox.transports.memory import MemoryTransport

SESSION = object()


class Order(BaseModel):
    id: int


async def deliveries(listener: Listener, *bodies: bytes) -> list[Delivery]:
    transport = MemoryTransport()
    await transport.declare([listener])
    await transport.publish([Message(routing_key="order.created", body=body) for body in bodies])
    consumer = transport.consume(listener, 100)
    return [await anext(consumer) for _ in bodies]


async def call(callback: Callable[..., Any], *bodies: bytes) -> Together:
    """Call it as a worker would; what it returned is in the answer."""
    listener = Listener("order.*", callback, queue="orders", batch=10)
    arguments = BatchArguments.of(listener)
    parts = [
        arguments.part(delivery) for delivery in await deliveries(listener, *(bodies or (b'{"id":1}', b'{"id":2}')))
    ]
    together = Together(parts)
    session = SESSION if arguments.session is not None else None
    returned = arguments.call(callback, arguments.bind(together), session)
    if arguments.is_async:
        await returned
    return together


# Declaring.


@pytest.mark.parametrize("batch", [0, -1, True, False, 1.5, "100", [100]])
def test_a_batch_is_a_number_of_messages(batch: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"orders: batch=.*at least 1"):
        listen("order.*", queue="orders", batch=batch)(print)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lane": "one"}, "in lists or in lanes: remove batch= or lane="),
        ({"lane": lambda message: message.key}, "in lists or in lanes"),
        ({"timeout": lambda message: 1}, "timeout is a function of one message, and batch=10 gives many to one call"),
        ({"isolation_level": lambda message: None}, "isolation_level is a function of one message"),
        ({"session_factory": lambda message: None}, "session_factory is a function of one message"),
    ],
)
def test_what_depends_on_one_message_does_not_go_with_lists(options: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"orders: .*{text}"):
        listen("order.*", queue="orders", batch=10, **options)(print)


def test_the_same_for_all_messages_goes_with_lists() -> None:
    options: Any = {"timeout": 1, "isolation_level": "SERIALIZABLE", "session_factory": sessionmaker()}
    assert Listener("order.*", print, batch=10, **options).time_limit == timedelta(seconds=1)


def takes_one(order: Order) -> None: ...


def takes_a_dict(orders: dict[int, Order]) -> None: ...


def takes_two_lists(orders: list[Order], others: list[int]) -> None: ...


def takes_nothing() -> None: ...


def takes_only_a_session(session: Session) -> None: ...


def takes_a_routing_key(orders: list[Order], routing_key: str) -> None: ...


def takes_one_message(orders: list[Order], message: Message) -> None: ...


def takes_tracking_ids(tracking_ids: tuple[str, ...]) -> None: ...


def takes_two_sessions(orders: list[Order], one: Session, two: Session) -> None: ...


def blocks_the_loop(orders: list[Order], session: AsyncSession) -> None: ...


def generates(orders: list[Order]) -> Any:
    yield orders


def holds_what_nobody_can_make(orders: list[Nowhere]) -> None:  # type: ignore[name-defined]  # noqa: F821
    ...


@pytest.mark.parametrize(
    ("callback", "text"),
    [
        (takes_one, "order is no list"),
        (takes_a_dict, "orders is no list"),
        (takes_two_lists, "found: orders, others"),
        (takes_nothing, "found: none"),
        (takes_only_a_session, "found: none"),
        (takes_a_routing_key, r"ask for `messages: list\[Message\]`"),
        (takes_one_message, "message is one message's"),
        (takes_tracking_ids, "tracking_ids is one message's"),
        (takes_two_sessions, "one session is enough"),
        (blocks_the_loop, "make it `async def`"),
        (generates, "remove its yield"),
        (holds_what_nobody_can_make, "Nowhere"),
    ],
)
def test_what_cannot_work_is_refused_before_any_message_is_touched(callback: Callable[..., Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text) as caught:
        BatchArguments.of(Listener("order.*", callback, queue="orders", batch=10))
    assert "orders: " in str(caught.value), "the text says which listener"


# Arguments.


@pytest.mark.parametrize("annotation", [list[Order], Sequence[Order], list[Order] | None])
async def test_bodies_become_what_the_list_is_annotated_to_hold(annotation: Any) -> None:
    got: list[Any] = []

    async def callback(orders: Any) -> None:
        got.append(orders)

    callback.__annotations__["orders"] = annotation
    await call(callback)
    assert got == [[Order(id=1), Order(id=2)]]


async def test_a_list_without_an_annotation_holds_json() -> None:
    got: list[Any] = []

    def plain(orders):  # type: ignore[no-untyped-def]
        got.append(orders)

    def bare(orders: list) -> None:  # type: ignore[type-arg]
        got.append(orders)

    await call(plain)
    await call(bare, b"1", b"\xff")
    assert got == [[{"id": 1}, {"id": 2}], [1, b"\xff"]]


async def test_messages_come_beside_the_bodies_or_instead_of_them() -> None:
    got: list[Any] = []

    async def both(orders: list[Order], messages: list[Message], queue_name: str, attempt_count: int) -> None:
        got.append(([order.id for order in orders], [each.body for each in messages], queue_name, attempt_count))

    async def instead(messages: list[Message], session: AsyncSession) -> None:
        got.append(([each.body for each in messages], session))

    await call(both)
    await call(instead, b"no JSON, and nobody reads it")
    assert got == [
        ([1, 2], [b'{"id":1}', b'{"id":2}'], "orders", 1),
        ([b"no JSON, and nobody reads it"], SESSION),
    ]


async def test_arguments_without_a_name_and_with_a_default_are_fine() -> None:
    got: list[Any] = []

    def callback(orders: list[Order], session: Session, /, times: int = 3) -> None:
        got.append((len(orders), session, times))

    await call(callback)
    assert got == [(2, SESSION, 3)]


async def test_a_body_that_does_not_fit_is_said_of_that_one() -> None:
    async def callback(orders: list[Order]) -> None: ...

    listener = Listener("order.*", callback, queue="orders", batch=10)
    arguments = BatchArguments.of(listener)
    good, bad = await deliveries(listener, b'{"id":1}', b'{"id":"x"}')
    assert arguments.part(good).body() == Order(id=1)
    with pytest.raises(Undecodable):
        arguments.part(bad)


# What it returns.


async def test_single_failures_are_returned_by_their_positions() -> None:
    error = ValueError("no")

    async def callback(orders: list[Order]) -> dict[int, Exception]:
        return {1: error}

    assert (await call(callback)).failures == {1: error}


async def test_a_plain_function_returns_them_too() -> None:
    error = ValueError("no")

    def callback(orders: list[Order]) -> dict[int, Exception]:
        return {0: error}

    assert (await call(callback)).failures == {0: error}


@pytest.mark.parametrize(
    "returned",
    [
        True,
        3,
        [ValueError()],
        {2: ValueError()},
        {-1: ValueError()},
        {"0": ValueError()},
        {0: "no"},
        {True: ValueError()},
    ],
)
async def test_anything_else_that_is_returned_is_an_error(returned: Any) -> None:
    async def callback(orders: list[Order]) -> Any:
        return returned

    with pytest.raises(TypeError, match="a dict of positions in its list"):
        await call(callback)


# What is in a list.


async def sizes(batches: Batches, count: int) -> list[int]:
    async with asyncio.timeout(30):
        return [len((await anext(batches)).deliveries) for _ in range(count)]


async def queue_of(count: int) -> tuple[MemoryTransport, Listener]:
    transport, listener = MemoryTransport(), Listener("#", print, queue="q", batch=4)
    await transport.declare([listener])
    await transport.publish([Message(routing_key="a", body=b"%d" % number) for number in range(count)])
    return transport, listener


async def test_a_list_holds_what_is_there_and_no_more_than_the_batch() -> None:
    transport, listener = await queue_of(9)
    assert await sizes(Batches(transport.consume(listener, 100), 4), 3) == [4, 4, 1]


async def test_what_failed_before_comes_alone() -> None:
    transport, listener = await queue_of(3)
    batches = Batches(transport.consume(listener, 100), 4)
    [first, second, third] = (await anext(batches)).deliveries
    first.settle(RetryIn(NO_DELAY, "no"))
    second.settle(Released())
    third.settle(Released())
    await transport.publish([Message(routing_key="a", body=b"fresh")])
    found = [batch.deliveries for _ in range(2) if (batch := batches.take()) is not None]
    assert [[delivery.attempt.attempt_count for delivery in batch] for batch in found] == [[1, 1, 1], [2]]


async def test_what_was_kept_to_come_alone_is_given_back_at_the_end() -> None:
    transport, listener = await queue_of(2)
    consumer = transport.consume(listener, 100)
    (await anext(consumer)).settle(RetryIn(NO_DELAY, "no"))
    batches = Batches(consumer, 4)
    assert await sizes(batches, 1) == [1]
    await batches.aclose()
    assert transport.waiting("q") == 1


async def test_a_transport_that_cannot_say_what_is_there_gives_lists_of_one() -> None:
    transport, listener = await queue_of(2)

    deliveries = transport.consume(listener, 100)

    class OneByOne(Consumer):
        async def __anext__(self) -> Delivery:
            return await anext(deliveries)

    batches = Batches(OneByOne(), 4)
    assert await sizes(batches, 2) == [1, 1]
    await batches.aclose()
