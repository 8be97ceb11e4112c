"""Prefetch: how many messages to have at once, more while they are used up quickly, less while they last.

Messages in flight in one worker are out of reach of all others, so a slow listener takes few.
"""

from __future__ import annotations

import time

SHORT_WORK, LONG_WORK = 0.1, 1.0  # seconds that messages last before the next are more, or fewer


class Prefetch:
    """A number that adapts."""

    __slots__ = ("_growth", "_least", "_most", "_since", "settled", "size")

    def __init__(self, least: int, most: int, *, growth: int, now: float | None = None) -> None:
        self._least = min(least, most)
        self._most = most
        self._growth = growth  # so many times more
        self.size = self._least
        self.settled = 0  # since it was adapted the last time
        self._since = time.monotonic() if now is None else now

    def adapt(self, now: float, *, grows: bool) -> bool:
        """So long did those of the last time last; whether the number has changed. It grows only if it may."""
        lasted, self._since, self.settled = now - self._since, now, 0
        before = self.size
        if lasted < SHORT_WORK and grows:
            self.size = min(self._most, self.size * self._growth)
        elif lasted > LONG_WORK:
            self.size = max(self._least, self.size // 2)
        return self.size != before
