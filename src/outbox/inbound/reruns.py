"""Reruns: a transaction that the database undid is not its listener's failure, and runs again, up to a limit."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta

from outbox.core.backoff import DATABASE, Outage
from outbox.core.events import Conflicted, Observer
from outbox.core.roles import Setback
from outbox.core.store import Store
from outbox.core.transport import Delivery
from outbox.inbound.inbox import NotStarted
from outbox.inbound.transactions import ConnectionLost, SnapshotTaken

RUNS = 10  # of one transaction that collides, within one attempt; then it has failed like any other
LOSSES = 5  # the same for lost connections: fewer, because it may be the listener that costs them, or their server
FIRST_RERUN_PAUSE, LONGEST_RERUN_PAUSE = (
    0.01,
    0.5,
)  # seconds before the next run, doubling, less a random part of up to half


class Reruns:
    """Says how often a listener's transaction runs until no other is in its way and its connection lasts."""

    def __init__(self, store: Store, queue: str, observe: Observer) -> None:
        self.store = store
        self.queue = queue
        self.observe = observe
        self.outage = Outage(f"session for {queue}", DATABASE, observe)

    def of(self, delivery: Delivery) -> Rerun:
        """The runs of one delivery, from its first failure on."""
        return Rerun(self, delivery)


class Rerun:
    """The runs of one delivery's transaction that failed so far."""

    def __init__(self, reruns: Reruns, delivery: Delivery) -> None:
        self._reruns = reruns
        self._delivery = delivery
        self._conflicts = 0
        self._losses = 0

    @property
    def in_doubt(self) -> bool:
        """Whether the database has to answer before the listener is called again."""
        return self._losses > 0

    async def wait(self, error: Exception) -> bool:
        """Wait before the next run; False if there is none: after any other failure, and after too many of these."""
        reruns = self._reruns
        if isinstance(error, SnapshotTaken):
            return True  # the next run renews the leases first
        setback = None if isinstance(error, NotStarted) else reruns.store.transactions.setback(error)
        if setback is Setback.READ_ONLY:
            raise NotStarted(f"no database that may be written for {reruns.queue}") from error
        if isinstance(error, ConnectionLost):
            self._losses += 1
            if self._losses == LOSSES:
                raise error.error from error.error.__cause__
            pause = _rerun_pause(self._losses)
            reruns.outage.struck(error.error, pause)
        else:
            if setback is None:
                return False
            self._conflicts += 1
            if self._conflicts == RUNS:
                return False
            pause = _rerun_pause(self._conflicts)
            reruns.observe(Conflicted(reruns.queue, self._delivery.attempt, self._conflicts, error, pause))
        await asyncio.sleep(pause.total_seconds())
        return True


def _rerun_pause(count: int) -> timedelta:
    longest = min(LONGEST_RERUN_PAUSE, FIRST_RERUN_PAUSE * 2 ** (count - 1))
    return timedelta(seconds=longest * random.uniform(0.5, 1))  # noqa: S311 - it only spreads them
