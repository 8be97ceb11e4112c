"""LostRuns: listeners at work for deliveries whose channel is gone.

Such a message comes again at once. Started beside its first run it would be at work twice in one process, and once more
with every further loss. So it waits until that run has ended: here for a moment, because most end soon, and then behind
a delay.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta

from outbox.transports.rabbitmq.delivery import RabbitmqDelivery
from outbox.transports.rabbitmq.poison import Key

WAITS_HERE = 2.0  # seconds in which a first run may end before its message goes behind a delay
SHORTEST_LOST_DELAY, LONGEST_LOST_DELAY = 1.0, 60.0  # seconds of such a delay, doubling


@dataclass(slots=True, eq=False)
class _Runs:
    """Those of one message."""

    deliveries: set[RabbitmqDelivery] = field(default_factory=set)
    delay: float = SHORTEST_LOST_DELAY
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class LostRuns:
    """Those of one process."""

    def __init__(self) -> None:
        self.by_key: dict[Key, _Runs] = {}  # empty at most times, which costs a delivery nothing

    def add(self, delivery: RabbitmqDelivery) -> None:
        """Its listener is at work, and its channel is gone."""
        self.by_key.setdefault(delivery.key, _Runs()).deliveries.add(delivery)

    def end(self, delivery: RabbitmqDelivery) -> None:
        """Its listener has ended."""
        runs = self.by_key.get(delivery.key)
        if runs is not None:
            runs.deliveries.discard(delivery)
            if not runs.deliveries:
                del self.by_key[delivery.key]
                runs.ended.set()

    async def wait(self, key: Key, closing: asyncio.Event) -> timedelta | None:
        """Wait for the end of a first run; if it goes on, behind which delay its message may wait."""
        runs = self.by_key.get(key)
        if runs is None:
            return None
        either = [asyncio.ensure_future(event.wait()) for event in (runs.ended, closing)]
        try:
            await asyncio.wait(either, timeout=WAITS_HERE, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in either:
                waiting.cancel()
        if runs.ended.is_set():
            return None
        delay, runs.delay = runs.delay, min(LONGEST_LOST_DELAY, 2 * runs.delay)
        return timedelta(seconds=delay)
