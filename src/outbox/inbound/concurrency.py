"""Slots: how many messages of a listener may be handled at once, and which of them one at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import copy_context

from outbox.core.attempt import Released
from outbox.core.listener import Listener
from outbox.core.listener_options import Lane, named_lane
from outbox.core.transport import Delivery

Start = Callable[["Slots", Delivery, Exception | None], None]  # the error: it has failed before it began


class Slots:
    """One task takes from here and waits for a free slot; whoever has ended gives his back."""

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
        """Nobody waits here."""


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
        except Exception as error:  # noqa: BLE001 - somebody's function names the lane
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
