"""Weight: how many messages of a destination a claim may take, by how large they are.

The statement that claims them adds up their sizes, so that no claim fetches more than it may. What is known of earlier
ones only keeps it from looking at more than it will take.

A claim that is not fetched within the time for a piece of work takes nothing. Over a slow connection a batch of large
messages would be asked for again and again, and never come.
"""

from __future__ import annotations

from collections.abc import Iterable

AIM = 8 * 1024 * 1024  # bytes of bodies, headers and tracking ids in a claim
SMALLEST_AIM = 64 * 1024  # the same after claims that were not fetched in time
QUICK = 10.0  # seconds: after a claim that was as large as it might be and took no longer, the aim doubles


class Weight:
    """What the messages of one destination weigh, by those that were claimed, and how much is fetched in time."""

    def __init__(self) -> None:
        self._aim = AIM
        self._average: float | None = None  # bytes; none: nothing is known
        self._too_slow = False

    @property
    def most(self) -> int:
        """Bytes of the next claim; a message that is larger comes alone."""
        return self._aim

    def limit(self, wanted: int) -> int:
        """How many messages to claim where so many are wanted."""
        if self._average is None:
            return min(1, wanted) if self._too_slow else wanted
        return min(wanted, max(1, int(self._aim / max(self._average, 1.0))))

    def took(self, count: int, size: int, seconds: float) -> None:
        """So many messages came, with bodies of so many bytes, in this time."""
        mean = size / count
        if self._average is None:
            self._average = mean
        else:
            self._average = max(mean, (self._average + mean) / 2)
            if seconds <= QUICK and size + mean > self._aim:
                self._aim = min(AIM, self._aim * 2)

    def took_too_long(self) -> None:
        """A claim was not fetched in time. The next one takes one message, which tells what they weigh now."""
        self._aim = max(SMALLEST_AIM, self._aim // 2)
        self._average = None
        self._too_slow = True


def how_many_fit(sizes: Iterable[int | None], most: int) -> int:
    """How many messages, from the first on, have no more bytes than `most`; at least one."""
    count = total = 0
    for size in sizes:
        total += size or 0
        if count and total > most:
            break
        count += 1
    return count
