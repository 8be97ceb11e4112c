"""Appetite: how many messages a consumer has in its hands, more while it handles them quickly.

What lies in one worker's hands is out of every other's reach, so a slow listener takes little. The broker fixes the
number when a consumer begins: for more there is another consumer on the same channel, for less all begin anew.
"""

from __future__ import annotations

import asyncio

SHORT_WORK, LONG_WORK = 0.1, 1.0  # seconds for a whole prefetch, before the next is larger or smaller
GROWTH = 4
MOST_ROOM = 50_000  # messages that wait to be tried, beside the prefetch


class Appetite:
    """The prefetch of one consumer."""

    def __init__(self, at_work: int, most: int, now: float) -> None:
        self._least = min(most, 2 * at_work)
        self._most = max(self._least, most // 2)  # what came before a change may be in hand beside what comes after it
        self.prefetch = self._least
        self._room = 0  # beside the prefetch, for suspected messages that wait
        self.changed = asyncio.Event()
        self._digested = 0
        self._since = now

    @property
    def in_hand(self) -> int:
        """How many unacknowledged deliveries the broker allows."""
        return self.prefetch + self._room

    def waiting(self, suspected: int) -> None:
        """So many wait to be tried one after another: they must not take up the prefetch of all others."""
        room = self._room
        if suspected > room + self.prefetch // 2:
            self._room = min(MOST_ROOM, suspected + max(self.prefetch, suspected // 2))
        elif not suspected:
            self._room = 0
        if self._room != room:
            self.changed.set()

    def digested(self, now: float) -> None:
        """One more was settled."""
        self._digested += 1
        if self._digested < self.prefetch:
            return
        lasted, self._since, self._digested = now - self._since, now, 0
        before = self.prefetch
        if lasted < SHORT_WORK:
            self.prefetch = min(self._most, self.prefetch * GROWTH)
        elif lasted > LONG_WORK:
            self.prefetch = max(self._least, self.prefetch // 2)
        if self.prefetch != before:
            self.changed.set()
