"""Concurrency: how many messages of a listener may be handled at once, which of them one at a time, and which alone."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import Context, copy_context
from datetime import timedelta

from outbox.core.attempt import Released
from outbox.core.listener import Listener
from outbox.core.listener_options import Lane, named_lane
from outbox.core.transport import Delivery

Start = Callable[["Slots", Delivery, Exception | None], None]  # the error: it has failed before it began


class Slots:
    """One task takes from here and waits for a free slot; a run that has ended gives its own back."""

    def __init__(self, count: int, start: Start) -> None:
        self.free = count
        self._start = start
        self._freed = asyncio.Event()

    def take(self, delivery: Delivery) -> None:
        self.free -= 1
        self._start(self, delivery, None)

    def release(self, delivery: Delivery) -> None:
        self.free += 1
        self._freed.set()

    async def one_free(self) -> None:
        self._freed.clear()
        await self._freed.wait()

    def give_back(self) -> None:
        """Nothing waits here."""


class Lanes(Slots):
    """Messages of one lane go one at a time. Those that wait for their lane take no slot, so that others may have it.

    They wait under their transport's hold: a lease is renewed, and what is held counts against `prefetch_count`.
    """

    def __init__(self, count: int, start: Start, lane: Lane) -> None:
        super().__init__(count, start)
        self._lane = lane
        self._waiting: dict[str, deque[Delivery]] = {}  # for each lane that is taken
        self._taken: dict[int, str] = {}  # by whom: the identity of a delivery
        self._context = copy_context()

    def take(self, delivery: Delivery) -> None:
        try:
            name = self._name(delivery)
        except Exception as error:  # noqa: BLE001 - the user's function names the lane
            self.free -= 1
            self._start(self, delivery, error)
            return
        if name is not None and name in self._waiting:
            self._waiting[name].append(delivery)
            return
        if name is not None:
            self._waiting[name] = deque()
            self._taken[id(delivery)] = name
        super().take(delivery)

    def release(self, delivery: Delivery) -> None:
        following = self._following(delivery)
        if following is None:
            super().release(delivery)
        else:
            # Not in the context of the one that ended: what a listener leaves there is gone with it.
            self._context.copy().run(self._start, self, following, None)

    def give_back(self) -> None:
        """Let anybody have what waits. What is at work keeps its lane until it ends."""
        for waiting in self._waiting.values():
            while waiting:
                waiting.popleft().settle(Released())

    def _name(self, delivery: Delivery) -> str | None:
        return named_lane(self._lane(delivery.attempt.message) if callable(self._lane) else self._lane)

    def _following(self, delivery: Delivery) -> Delivery | None:
        """Who has the lane of a delivery that ended, if anybody waited for it."""
        name = self._taken.pop(id(delivery), None)
        if name is None:
            return None
        if not self._waiting[name]:
            del self._waiting[name]
            return None
        following = self._waiting[name].popleft()
        self._taken[id(following)] = name
        return following


def slots_for(listener: Listener, start: Start) -> Slots:
    """The slots that a listener asks for."""
    if listener.lane is None:
        return Slots(listener.concurrency, start)
    return Lanes(listener.concurrency, start, listener.lane)


# Exclusive: how one run has the process to itself.
# A message that would be a dead letter after one more crash must not die of another one's crash. Before its listener
# is called nothing else is started, and what runs is waited for. That may take long, so the wait is limited: others go
# on then, for much longer than they were held up, and the message is tried again later.

SHORTEST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds in which everything else must have ended, doubling when it has not
GO_ON = 9  # times the wait: for so long others go on undisturbed when it was in vain


class Exclusive:
    """Starts runs, all of them side by side but for those that have to be alone."""

    def __init__(self) -> None:
        self._running = 0
        self._waiting: deque[tuple[Context, Callable[[], None], Callable[[], None]]] = deque()
        self.is_kept = False  # for one run
        self._stopped = False
        self._one = asyncio.Lock()
        self._ended = asyncio.Event()
        self._longest = SHORTEST_WAIT
        self._next_at = 0.0  # not before then

    def begin(self) -> None:
        """A run begins."""
        self._running += 1

    def wait(self, start: Callable[[], None], give_back: Callable[[], None]) -> None:
        """Start a run when the process is not kept any more; after a stop it is given back instead."""
        self._waiting.append((copy_context(), start, give_back))

    def end(self) -> None:
        """It has ended."""
        self._running -= 1
        if self.is_kept:
            self._ended.set()

    def stop(self) -> None:
        """Begin nothing more."""
        self._stopped = True
        self._ended.set()
        while self._waiting:
            _, _, give_back = self._waiting.popleft()
            give_back()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[timedelta | None]:
        """Nothing else runs in this block, unless it is told after which time to try again."""
        async with self._one:
            pause = self._next_at - time.monotonic()
            if 0 < pause <= SHORTEST_WAIT:
                await asyncio.sleep(pause)
                pause = 0
            if pause > 0 or self._stopped:
                # This process is alone no more after a stop, however long it waited before; another one may be.
                yield timedelta(seconds=0 if self._stopped else pause)
                return
            self.is_kept, began, in_vain = True, time.monotonic(), True
            try:
                in_vain = not await self._quiet()
                wait = 0 if self._stopped else GO_ON * self._longest  # another process may try it at once
                yield timedelta(seconds=wait) if in_vain else None
            finally:
                took = time.monotonic() - began
                self._next_at = time.monotonic() + (GO_ON * took if in_vain else took)
                self._longest = min(LONGEST_WAIT, 2 * self._longest) if in_vain else SHORTEST_WAIT
                self._open()

    async def _quiet(self) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._longest):
                while self._running and not self._stopped:
                    self._ended.clear()
                    await self._ended.wait()
        return not self._running and not self._stopped

    def _open(self) -> None:
        self.is_kept = False
        while self._waiting:
            context, start, _ = self._waiting.popleft()
            context.run(start)  # not in the context of the run that ended
