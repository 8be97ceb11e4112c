""" "Concurrency strategy", its five controllers by what they let run at the same time.

The ruling: they are `concurrency` and `lane` of a listener. Without either, ten messages go side by side; the project's
default, a mutex over everything, is one listener with `concurrency=1`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from outbox import Listener, Message, Outbox, listen
from outbox.core.events import Handled
from tests.compatibility.pg_transactional_outbox.movies import tell
from tests.support.databases import on_both_stores
from tests.support.observing import Recorder, eventually

KINDS = ("movie.movie_created", "movie.movie_deleted", "customer.customer_updated")


class Room:
    """Where handlers are while they work: how many at a time, in all and by a name."""

    def __init__(self) -> None:
        self.inside: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.most_in_all = 0

    @contextmanager
    def entry(self, name: str) -> Iterator[None]:
        self.inside[name] += 1
        self.most[name] = max(self.most[name], self.inside[name])
        self.most_in_all = max(self.most_in_all, self.inside.total())
        try:
            yield
        finally:
            self.inside[name] -= 1


@pytest.fixture
def room() -> Room:
    return Room()


async def tell_of_each(outbox: Outbox, kinds: Sequence[str], count: int) -> None:
    for number in range(count):
        for kind in kinds:
            await tell(outbox, f"{kind} {number}", routing_key=kind)


async def test_full_concurrency_lets_everything_run_side_by_side(
    outbox: Outbox, recorder: Recorder, room: Room
) -> None:
    @listen("#", queue="all", concurrency=100)
    async def handle(payload: object, routing_key: str) -> None:
        with room.entry(routing_key):
            await eventually(lambda: room.most_in_all == 30)

    await tell_of_each(outbox, KINDS, 10)
    async with outbox.running(listeners=[handle]):
        await recorder.wait_for(Handled, 30)
    assert room.most_in_all == 30


async def test_a_mutex_lets_one_message_run_after_the_other_in_the_order_in_which_they_came(
    outbox: Outbox, recorder: Recorder, room: Room
) -> None:
    """Across all kinds of messages, which one listener is bound to."""
    titles: list[str] = []

    @listen("#", queue="all", concurrency=1)
    async def handle(movie: dict[str, str], routing_key: str) -> None:
        with room.entry(routing_key):
            titles.append(movie["title"])
            await asyncio.sleep(0.001)

    await tell_of_each(outbox, KINDS, 10)
    async with outbox.running(listeners=[handle]):
        await recorder.wait_for(Handled, 30)
    assert room.most_in_all == 1
    assert titles == [f"{kind} {number}" for number in range(10) for kind in KINDS]


async def test_a_semaphore_lets_a_number_of_messages_run_side_by_side(
    outbox: Outbox, recorder: Recorder, room: Room
) -> None:
    @listen("#", queue="all", concurrency=3)
    async def handle(payload: object, routing_key: str) -> None:
        with room.entry(routing_key):
            await eventually(lambda: room.most_in_all >= 3)
            await asyncio.sleep(0.005)

    await tell_of_each(outbox, KINDS, 5)
    async with outbox.running(listeners=[handle]):
        await recorder.wait_for(Handled, 15)
    assert room.most_in_all == 3


async def test_a_discriminating_mutex_lets_one_message_of_each_kind_run(
    outbox: Outbox, recorder: Recorder, room: Room
) -> None:
    @listen("#", queue="all", lane=lambda message: message.routing_key, concurrency=100)
    async def handle(payload: object, routing_key: str) -> None:
        with room.entry(routing_key):
            await eventually(lambda: room.most_in_all == len(KINDS))
            await asyncio.sleep(0.002)

    await tell_of_each(outbox, KINDS, 5)
    async with outbox.running(listeners=[handle]):
        await recorder.wait_for(Handled, 15)
    assert room.most == dict.fromkeys(KINDS, 1)
    assert room.most_in_all == len(KINDS)


async def test_a_discriminator_may_be_any_calculated_value(outbox: Outbox, recorder: Recorder, room: Room) -> None:
    """Here the aggregate: messages of one movie keep their order, whatever their type."""
    order: list[tuple[str, int]] = []

    def aggregate(message: Message) -> str:
        return f"{message.routing_key.partition('.')[0]} {message.key}"

    @listen("#", queue="all", lane=aggregate, concurrency=100)
    async def handle(number: int, letter: Message) -> None:
        with room.entry(aggregate(letter)):
            await eventually(lambda: room.most_in_all == 3)
            order.append((aggregate(letter), number))

    async with outbox.transaction() as session:
        for number in range(6):
            await outbox.emit(session, KINDS[number % 2], number, key="1")
            await outbox.emit(session, KINDS[number % 2], number, key="2")
            await outbox.emit(session, KINDS[2], number, key="1")
    async with outbox.running(listeners=[handle]):
        await recorder.wait_for(Handled, 18)
    assert room.most == {"movie 1": 1, "movie 2": 1, "customer 1": 1}
    assert room.most_in_all == 3
    for lane in room.most:
        assert [number for name, number in order if name == lane] == list(range(6))


@on_both_stores
async def test_a_multi_controller_chooses_by_the_message_over_rabbitmq(
    rabbitmq_outbox: Outbox, recorder: Recorder, room: Room
) -> None:
    """The strategy of the project's example: ABC in parallel, the others by their aggregate type and message type."""

    def strategy(message: Message) -> str | None:
        return None if message.routing_key == "movie.ABC" else message.routing_key

    @listen("#", queue="all", lane=strategy, concurrency=100, store_first=True)
    async def handle(payload: object, routing_key: str) -> None:
        with room.entry(routing_key):
            await eventually(lambda: room.most_in_all == 4 + len(KINDS))

    async with rabbitmq_outbox.running(relay=True, listeners=[handle]):
        await tell_of_each(rabbitmq_outbox, (*KINDS, "movie.ABC"), 4)
        await recorder.wait_for(Handled, 16)
    assert room.most == {**dict.fromkeys(KINDS, 1), "movie.ABC": 4}


async def test_a_multi_controller_may_hold_a_mutex_over_several_kinds(
    outbox: Outbox, recorder: Recorder, room: Room
) -> None:
    def strategy(message: Message) -> str | None:
        match message.routing_key.partition(".")[0]:
            case "movie":
                return "one at a time"
            case _:
                return None

    @listen("#", queue="all", lane=strategy, concurrency=100)
    async def handle(payload: object, routing_key: str) -> None:
        with room.entry(routing_key.partition(".")[0]):
            await eventually(lambda: room.most_in_all == 5)

    await tell_of_each(outbox, KINDS, 4)
    async with outbox.running(listeners=[handle]):
        await recorder.wait_for(Handled, 12)
    assert room.most == {"movie": 1, "customer": 4}


async def test_by_default_ten_messages_of_a_queue_run_side_by_side(
    outbox: Outbox, recorder: Recorder, room: Room
) -> None:
    async def handle(payload: object, routing_key: str) -> None:
        with room.entry(routing_key):
            await eventually(lambda: room.most_in_all == 10)
            await asyncio.sleep(0.005)

    await tell_of_each(outbox, KINDS, 6)
    async with outbox.running(listeners=[Listener("#", handle, queue="all")]):
        await recorder.wait_for(Handled, 18)
    assert room.most_in_all == 10
