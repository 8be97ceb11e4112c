"""Conflicts: what the database did to a transaction is no failure of its listener. It runs again, up to a limit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import timedelta

from outbox.core.events import Conflicted, Observer
from outbox.core.outage import DATABASE, Outage
from outbox.core.store import Store
from outbox.core.transport import Delivery
from outbox.inbound.inbox import NotStarted
from outbox.inbound.losing import ConnectionLost

RUNS = 10  # of one transaction that collides, within one attempt; then it has failed like any other
LOSSES = 5  # the same for lost connections: fewer, because it may be the listener that costs them, or their server
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.5  # seconds before the next run, doubling, less a random part of up to half


class Conflicts:
    """Runs a listener's transaction until no other is in its way and its connection lasts."""

    def __init__(self, store: Store, queue: str, observe: Observer) -> None:
        self._store = store
        self._queue = queue
        self._observe = observe
        self._sessions = Outage(f"session for {queue}", DATABASE, observe)

    async def run(self, call: Callable[[Delivery], Awaitable[None]], delivery: Delivery) -> None:
        """Any other failure is raised at once, and so is the last of too many conflicts or lost connections."""
        conflicts = losses = 0
        while True:
            try:
                await call(delivery)
                self._sessions.over()
                return
            except ConnectionLost as loss:
                losses += 1
                if losses == LOSSES:
                    raise loss.error from loss.error.__cause__
                pause = _pause(losses)
                self._sessions.struck(loss.error, pause)
            except Exception as error:
                if isinstance(error, NotStarted) or not self._store.is_conflict(error):
                    raise
                conflicts += 1
                if conflicts == RUNS:
                    raise
                pause = _pause(conflicts)
                self._observe(Conflicted(self._queue, delivery.attempt, conflicts, error, pause))
            await asyncio.sleep(pause.total_seconds())


def _pause(count: int) -> timedelta:
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (count - 1))
    return timedelta(seconds=longest * random.uniform(0.5, 1))  # noqa: S311 - it only spreads them
