"""MemoryTransport: queues in this process, for tests and for trying things out. What it holds ends with the process."""

from __future__ import annotations

import asyncio
import builtins
import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Self, assert_never

from outbox.core.attempt import Attempt, Dead, Done, Outcome, Reason, Released, RetryIn
from outbox.core.binding import Binding, Bindings
from outbox.core.dead_letter import DeadLetter, clean
from outbox.core.errors import NotFound
from outbox.core.landing import Landing
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.transport import Features, Published, Refusal


class MemoryTransport:
    """Topic bindings, delays and dead letters without a broker."""

    name = "memory"
    features = Features()

    def __init__(self) -> None:
        self._bindings: set[Binding] = set()
        self._queues: defaultdict[str, _Queue] = defaultdict(lambda: _Queue(self))
        self._ids = itertools.count(1)
        self.published: list[Message] = []  # everything ever confirmed, for assertions
        self.dead_letters = MemoryDeadLetters(self)

    @classmethod
    def of(cls, url: str) -> Self:
        """`memory://`"""
        return cls()

    async def open(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Messages stay, to be consumed by the next worker of this process."""
        for queue in self._queues.values():
            queue.stop_timers()

    async def publish(self, messages: Sequence[Message]) -> Published:
        bindings = Bindings(self._bindings)
        refused = {}
        for message in messages:
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

    def consume(self, listener: Listener, prefetch: int) -> MemoryDeliveries:
        return MemoryDeliveries(self._queues[listener.queue], listener.queue, prefetch)

    def put(self, queue: str, message: Message) -> None:
        """A fresh attempt at the end of a queue."""
        self._queues[queue].put(Attempt(message, 1, next(self._ids)))

    def waiting(self, queue: str) -> int:
        """How many messages lie in a queue, delayed ones included, those in a worker's hands not."""
        return self._queues[queue].waiting()


class MemoryDelivery:
    """An attempt taken from a queue in memory."""

    def __init__(self, attempt: Attempt, queue_name: str, queue: _Queue, deliveries: MemoryDeliveries) -> None:
        self.attempt = attempt
        self._queue_name = queue_name
        self._queue = queue
        self._deliveries = deliveries
        self._settled = False

    @property
    def raw(self) -> Message:
        return self.attempt.message

    def completion(self) -> None:
        return None

    def settle(self, outcome: Outcome) -> Landing:
        landing = Landing()
        if self._settled:
            landing.cancel()
            return landing
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
        landing.set_result(True)
        return landing


class MemoryDeliveries:
    """The deliveries of one queue."""

    def __init__(self, queue: _Queue, queue_name: str, prefetch: int) -> None:
        self._queue = queue
        self._queue_name = queue_name
        self._prefetch = prefetch
        self._unsettled = 0

    def __aiter__(self) -> MemoryDeliveries:
        return self

    async def __anext__(self) -> MemoryDelivery:
        while True:
            now = datetime.now(UTC)
            while self._unsettled < self._prefetch and self._queue.ready:
                attempt = self._queue.ready.popleft()
                self._unsettled += 1
                delivery = MemoryDelivery(attempt, self._queue_name, self._queue, self)
                expires_at = attempt.message.expires_at
                if expires_at is None or expires_at > now:
                    return delivery
                delivery.settle(Dead(Reason.EXPIRED))
            await self._queue.change()

    async def aclose(self) -> None:
        """Nothing is taken ahead, so there is nothing to give back."""

    def settled(self) -> None:
        self._unsettled -= 1
        self._queue.changed()


class _Queue:
    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.ready: deque[Attempt] = deque()
        self._delayed: dict[asyncio.TimerHandle, Attempt] = {}
        self._waiters: set[asyncio.Future[None]] = set()

    def put(self, attempt: Attempt) -> None:
        self.ready.append(attempt)
        self.changed()

    def put_back(self, attempt: Attempt) -> None:
        self.ready.appendleft(attempt)
        self.changed()

    def put_later(self, attempt: Attempt, delay: timedelta) -> None:
        def due() -> None:
            del self._delayed[handle]
            self.put(attempt)

        handle = asyncio.get_running_loop().call_later(delay.total_seconds(), due)
        self._delayed[handle] = attempt

    def stop_timers(self) -> None:
        """Delays belong to the loop that counts them: what is delayed when it ends is due at once in the next."""
        for handle, attempt in self._delayed.items():
            handle.cancel()
            self.ready.append(attempt)
        self._delayed.clear()

    def waiting(self) -> int:
        return len(self.ready) + len(self._delayed)

    def changed(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)


class MemoryDeadLetters:
    """Dead letters of queues in memory."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport
        self._letters: dict[int, DeadLetter] = {}
        self._ids = itertools.count(1)

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

    async def list(
        self,
        *,
        queue: str | None = None,
        reason: Reason | None = None,
        error: str | None = None,
        limit: int = 100,
        after: int = 0,
    ) -> list[DeadLetter]:
        found = [
            letter
            for letter in self._letters.values()
            if letter.id > after
            and queue in (None, letter.queue)
            and reason in (None, letter.reason)
            and (error is None or error in letter.error)
        ]
        return found[:limit]

    async def show(self, id: int) -> DeadLetter:
        if id not in self._letters:
            raise NotFound(f"no dead letter has the id {id}")
        return self._letters[id]

    async def replay(self, ids: Sequence[int]) -> int:
        letters = self._pop(ids)
        for letter in letters:
            self._transport.put(letter.queue or "", replace(letter.message, expires_at=None))
        return len(letters)

    async def discard(self, ids: Sequence[int]) -> int:
        return len(self._pop(ids))

    def _pop(self, ids: Sequence[int]) -> builtins.list[DeadLetter]:
        return [self._letters.pop(id) for id in dict.fromkeys(ids) if id in self._letters]
