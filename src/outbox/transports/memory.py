"""MemoryTransport: queues in this process, for tests and for trying things out. What it holds ends with the process."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Self, assert_never

from outbox.core.attempt import Attempt, Dead, Done, Outcome, Reason, Released, RetryIn
from outbox.core.binding import Binding, Bindings
from outbox.core.dead_letter import FIRST_OF_QUEUES, DeadLetter, DeadLetters, Filter, clean
from outbox.core.errors import NotFound
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.settlement import Settlement
from outbox.core.transport import (
    Consumer,
    Defaults,
    Delivery,
    Features,
    Published,
    Refusal,
    Report,
    Transport,
    unreported,
)

_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)  # nothing becomes older


class MemoryTransport(Transport):
    """Topic bindings, delays and dead letters without a broker."""

    name = "memory"
    features = Features(movable_clock=True)
    dead_letters: MemoryDeadLetters

    def __init__(self) -> None:
        self._bindings: set[Binding] = set()
        self._queues: defaultdict[str, _MemoryQueue] = defaultdict(lambda: _MemoryQueue(self))
        self._ids = itertools.count(1)
        self.published: list[Message] = []  # everything ever confirmed, for assertions
        self.dead_letters = MemoryDeadLetters(self)

    @classmethod
    def of(cls, url: str, defaults: Defaults) -> Self:
        """`memory://`"""
        return cls()

    async def close(self) -> None:
        """Messages stay, to be consumed by the next worker of this process."""

    async def publish(self, messages: Sequence[Message], report: Report = unreported) -> Published:
        bindings = Bindings(self._bindings)
        refused = {}
        for message in tuple(messages):  # they may be those of `published`
            queues = bindings.queues(message.routing_key)
            if not queues:
                refused[message.id] = Refusal(f"no queue is bound to {message.routing_key!r}")
                continue
            self.published.append(message)
            for queue in queues:
                self.put(queue, message)
        return Published(frozenset(message.id for message in messages) - frozenset(refused), refused)

    async def declare(self, listeners: Sequence[Listener]) -> None:
        self._bindings.update(listener.binding for listener in listeners)

    def consume(self, listener: Listener, prefetch: int) -> MemoryConsumer:
        return MemoryConsumer(self._queues[listener.queue], listener.queue, prefetch)

    def put(self, queue: str, message: Message) -> None:
        """A fresh attempt at the end of a queue."""
        self._queues[queue].put(Attempt(message, 1, next(self._ids)))

    def waiting(self, queue: str | None = None) -> int:
        """How many messages wait in a queue or in all, delayed ones included, those in flight to a worker not."""
        queues = self._queues.values() if queue is None else [self._queues[queue]]
        return sum(each.waiting() for each in queues)

    def until_next_due(self, queues: Collection[str]) -> timedelta | None:
        """How long until the first delayed message of these queues is due; none if nothing is delayed."""
        moments = [due for queue in queues if (due := self._queues[queue].next_due()) is not None]
        return timedelta(seconds=max(0.0, min(moments) - time.monotonic())) if moments else None

    def advance(self, by: timedelta) -> None:
        """Let time pass for every message here: each becomes older by that much."""
        for queue in self._queues.values():
            queue.age(by)
        self.dead_letters.age(by)


class MemoryDelivery(Delivery):
    """An attempt taken from a queue in memory."""

    def __init__(self, attempt: Attempt, queue_name: str, queue: _MemoryQueue, deliveries: MemoryConsumer) -> None:
        self.attempt = attempt
        self._queue_name = queue_name
        self._queue = queue
        self._deliveries = deliveries
        self._settled = False

    def settle(self, outcome: Outcome) -> Settlement:
        settlement = Settlement()
        if self._settled:
            settlement.cancel()
            return settlement
        self._settled = True
        self._deliveries.settled()
        match outcome:
            case Done():
                pass
            case RetryIn(delay):
                again = replace(self.attempt, attempt_count=self.attempt.attempt_count + 1)
                self._queue.put_later(again, delay)
            case Dead(reason, error):
                self._queue.transport.dead_letters.add(self._queue_name, self.attempt, reason, error)
            case Released():
                self._queue.put_back(self.attempt)
            case _:
                assert_never(outcome)
        settlement.set_result(True)
        return settlement


class MemoryConsumer(Consumer):
    """The deliveries of one queue."""

    def __init__(self, queue: _MemoryQueue, queue_name: str, prefetch: int) -> None:
        self._queue = queue
        self._queue_name = queue_name
        self._prefetch = prefetch
        self._unsettled = 0

    async def __anext__(self) -> MemoryDelivery:
        while (delivery := self.take()) is None:
            await self._queue.change()
        return delivery

    def take(self) -> MemoryDelivery | None:
        """The next delivery, if one is due and may be taken."""
        now = datetime.now(UTC)
        while self._unsettled < self._prefetch and (attempt := self._queue.take()) is not None:
            self._unsettled += 1
            delivery = MemoryDelivery(attempt, self._queue_name, self._queue, self)
            expires_at = attempt.message.expires_at
            if expires_at is None or expires_at > now:
                return delivery
            delivery.settle(Dead(Reason.EXPIRED))
        return None

    def settled(self) -> None:
        self._unsettled -= 1
        self._queue.changed()


class _MemoryQueue:
    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self._ready: deque[Attempt] = deque()
        self._delayed: list[tuple[float, int, Attempt]] = []  # a heap: when it is due, a number, the attempt
        self._numbers = itertools.count()
        self._waiters: set[asyncio.Future[None]] = set()

    def put(self, attempt: Attempt) -> None:
        self._ready.append(attempt)
        self.changed()

    def put_back(self, attempt: Attempt) -> None:
        self._ready.appendleft(attempt)
        self.changed()

    def put_later(self, attempt: Attempt, delay: timedelta) -> None:
        heapq.heappush(self._delayed, (time.monotonic() + delay.total_seconds(), next(self._numbers), attempt))
        self.changed()

    def take(self) -> Attempt | None:
        self._ripen()
        return self._ready.popleft() if self._ready else None

    def next_due(self) -> float | None:
        return self._delayed[0][0] if self._delayed else None

    def age(self, by: timedelta) -> None:
        self._ready = deque(_older(attempt, by) for attempt in self._ready)
        seconds = by.total_seconds()
        self._delayed = [(due - seconds, number, _older(attempt, by)) for due, number, attempt in self._delayed]
        self.changed()

    def waiting(self) -> int:
        return len(self._ready) + len(self._delayed)

    def changed(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def change(self) -> None:
        """Wait until something was put or settled, or the next delay is over."""
        if self._ripen():
            return
        due = self.next_due()
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due is None else due - time.monotonic()):
                    await waiter
        finally:
            self._waiters.discard(waiter)

    def _ripen(self) -> bool:
        """Let what is due again join the queue; says whether anything did."""
        before = len(self._ready)
        while self._delayed and self._delayed[0][0] <= time.monotonic():
            self._ready.append(heapq.heappop(self._delayed)[2])
        return len(self._ready) > before


def _older(attempt: Attempt, by: timedelta) -> Attempt:
    message = attempt.message
    times: dict[str, Any] = {
        name: _earlier(moment, by)
        for name in ("created_at", "due_at", "expires_at")
        if (moment := getattr(message, name)) is not None
    }
    return replace(attempt, message=replace(message, **times))


def _earlier(moment: datetime, by: timedelta) -> datetime:
    return max(_BEGINNING, moment - by)


class MemoryDeadLetters(DeadLetters):
    """Dead letters of queues in memory."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport
        self._letters: dict[int, DeadLetter] = {}
        self._ids = itertools.count(FIRST_OF_QUEUES + 1)

    def add(self, queue: str, attempt: Attempt, reason: Reason, error: str) -> None:
        """Keep a dead letter."""
        letter = DeadLetter(
            id=next(self._ids),
            message=attempt.message,
            queue=queue,
            reason=reason,
            error=clean(error),
            attempt_count=attempt.attempt_count,
            crash_count=attempt.crash_count,
            history="",
            died_at=datetime.now(UTC),
        )
        self._letters[letter.id] = letter

    def age(self, by: timedelta) -> None:
        """Let time pass since each of them died."""
        self._letters = {id: replace(each, died_at=_earlier(each.died_at, by)) for id, each in self._letters.items()}

    async def chosen(self, filter: Filter) -> list[DeadLetter]:
        return [letter for letter in self._letters.values() if filter.lets_through(letter)][: filter.limit]

    async def show(self, id: int) -> DeadLetter:
        if id not in self._letters:
            raise NotFound(f"no dead letter has the id {id}")
        return self._letters[id]

    async def replay(self, ids: Sequence[int]) -> int:
        letters = self._pop(ids)
        for letter in letters:
            message = replace(letter.message, expires_at=None, due_at=datetime.now(UTC))
            self._transport.put(letter.queue or "", message)
        return len(letters)

    async def discard(self, ids: Sequence[int]) -> int:
        return len(self._pop(ids))

    def _pop(self, ids: Sequence[int]) -> list[DeadLetter]:
        return [self._letters.pop(id) for id in dict.fromkeys(ids) if id in self._letters]
