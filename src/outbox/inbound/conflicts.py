"""Conflicts: a transaction that the database could not fit between others is run again, on a count of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import timedelta

from outbox.core.events import Conflicted, Observer
from outbox.core.store import Store
from outbox.core.transport import Delivery
from outbox.inbound.inbox import NotStarted

RUNS = 10  # of one transaction, within one attempt; then it has failed like any other
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.5  # seconds before the next run, doubling, less a random part of up to half


class Conflicts:
    """Runs somebody's transaction until no other is in its way."""

    def __init__(self, store: Store, queue: str, observe: Observer) -> None:
        self._store = store
        self._queue = queue
        self._observe = observe

    async def run(self, call: Callable[[Delivery], Awaitable[None]], delivery: Delivery) -> None:
        """A failure that is no conflict is raised at once, and so is the last of too many conflicts."""
        for run in range(1, RUNS):
            try:
                return await call(delivery)
            except Exception as error:
                if isinstance(error, NotStarted) or not self._store.is_conflict(error):
                    raise
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (run - 1)) * random.uniform(0.5, 1)  # noqa: S311
                self._observe(Conflicted(self._queue, delivery.attempt, run, error, timedelta(seconds=pause)))
            await asyncio.sleep(pause)
        return await call(delivery)
