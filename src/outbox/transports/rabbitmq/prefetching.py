"""ConsumerPrefetch: how many unacknowledged deliveries a consumer may have.

The broker fixes the number when a consumer begins: for more there is another consumer on the same channel, for less all
begin anew.
"""

from __future__ import annotations

import asyncio

from outbox.core.backoff import Prefetch

GROWTH = 4
MOST_ROOM = 50_000  # suspected messages that wait for an isolated run, beside the prefetch


class ConsumerPrefetch:
    """The prefetch of one consumer."""

    def __init__(self, at_work: int, most: int, now: float) -> None:
        least = min(most, 2 * at_work)
        # What came before a change may be in flight beside what comes after it.
        self._adaptive = Prefetch(least, max(least, most // 2), growth=GROWTH, now=now)
        self._room = 0  # beside the prefetch, for suspected messages that wait
        self.changed = asyncio.Event()

    @property
    def prefetch(self) -> int:
        return self._adaptive.size

    @property
    def in_flight(self) -> int:
        """How many unacknowledged deliveries the broker allows."""
        return self._adaptive.size + self._room

    def waiting(self, suspected: int) -> None:
        """So many wait for an isolated run, one after another: they must not take up the prefetch of all others."""
        room, prefetch = self._room, self._adaptive.size
        if suspected > room + prefetch // 2:
            self._room = min(MOST_ROOM, suspected + max(prefetch, suspected // 2))
        elif not suspected:
            self._room = 0
        if self._room != room:
            self.changed.set()

    def settled(self, now: float) -> None:
        """One more was settled."""
        adaptive = self._adaptive
        adaptive.settled += 1
        if adaptive.settled >= adaptive.size and adaptive.adapt(now, grows=True):
            self.changed.set()
