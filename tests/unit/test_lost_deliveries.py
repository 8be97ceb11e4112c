"""What a worker does with runs whose deliveries are lost, whatever moment they are in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from outbox import Listener, Message
from outbox.core.attempt import Attempt, Outcome
from outbox.core.settlement import Settlement
from outbox.core.transport import Consumer, Delivery
from outbox.inbound.worker import Worker

LONG = 10.0


class Lost(Delivery):
    """One that can be lost."""

    is_lost = False

    def __init__(self, number: int) -> None:
        self.attempt = Attempt(Message(routing_key="k", body=b""), 1, number)
        self.outcomes: list[Outcome] = []

    def settle(self, outcome: Outcome) -> Settlement:
        self.outcomes.append(outcome)
        settlement = Settlement()
        settlement.set_result(not self.is_lost)
        return settlement


class Source(Consumer):
    """Gives out what it is given; the first one is lost before its run has begun, if that is wanted."""

    def __init__(self, *, loses_first: bool) -> None:
        self._waiting: asyncio.Queue[Lost] = asyncio.Queue()
        self._loses = loses_first

    def consume(self, listener: Listener, prefetch: int) -> Consumer:
        return self

    def put(self, delivery: Lost) -> None:
        self._waiting.put_nowait(delivery)

    async def __anext__(self) -> Lost:
        delivery = await self._waiting.get()
        if self._loses:
            self._loses = False
            asyncio.get_running_loop().call_soon(self.lose, delivery)
        return delivery

    def lose(self, delivery: Lost) -> None:
        delivery.is_lost = True
        assert self.on_lost is not None
        self.on_lost()


class Handling:
    """Hangs, and notes what it was called for."""

    def __init__(self, *, can_be_cut: bool = True) -> None:
        self.can_be_cut = can_be_cut
        self.called: asyncio.Queue[Delivery] = asyncio.Queue()
        self.cancelled = 0

    async def handle(self, delivery: Delivery, refusal: Exception | None = None) -> None:
        self.called.put_nowait(delivery)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@asynccontextmanager
async def working(source: Source, handling: Handling) -> AsyncIterator[None]:
    listener = Listener("k", print, queue="q", concurrency=1)
    worker = Worker(source, {listener: handling}, prefetch=10, grace=timedelta(0), observe=lambda event: None)
    stop = asyncio.Event()
    running = asyncio.create_task(worker.run(stop, asyncio.Event()))
    yield
    stop.set()
    await asyncio.wait_for(running, LONG)


async def test_a_run_that_is_lost_before_it_begins_gives_its_slot_back() -> None:
    source, handling = Source(loses_first=True), Handling()
    first, second = Lost(1), Lost(2)
    async with working(source, handling):
        source.put(first)
        source.put(second)
        assert await asyncio.wait_for(handling.called.get(), LONG) is second
    assert len(first.outcomes) == 1


async def test_a_run_that_is_lost_is_cut_once_and_has_an_end() -> None:
    source, handling = Source(loses_first=False), Handling()
    first, second = Lost(1), Lost(2)
    async with working(source, handling):
        source.put(first)
        source.put(second)
        assert await asyncio.wait_for(handling.called.get(), LONG) is first
        source.lose(first)
        source.lose(first)
        assert await asyncio.wait_for(handling.called.get(), LONG) is second
        assert handling.cancelled == 1
    assert len(first.outcomes) == 1


async def test_a_run_that_cannot_be_ended_keeps_its_slot() -> None:
    source, handling = Source(loses_first=False), Handling(can_be_cut=False)
    first, second = Lost(1), Lost(2)
    async with working(source, handling):
        source.put(first)
        source.put(second)
        assert await asyncio.wait_for(handling.called.get(), LONG) is first
        source.lose(first)
        await asyncio.sleep(0.01)
        assert handling.called.empty()
        assert not handling.cancelled
