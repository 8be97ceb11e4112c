"""Acknowledgements: what may be said about the deliveries of one channel, and when.

An acknowledgement "of all up to this one" is never sent past the lowest delivery that is still open. What is settled
above it waits a moment for that one, and is then acknowledged by itself. The moment is short while such deliveries take
up much of the prefetch: the broker sends nothing in their place, and one slow listener would hold up all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from outbox.core.landing import Landing

PATIENCE = 0.1  # seconds that a settled delivery waits for an open one before it
IMPATIENCE = 0.005  # the same while those that wait take up a part of the prefetch
LARGE_PART = 4  # of the prefetch: one in so many


@dataclass(slots=True)
class Words:
    """What is to be written now, and who waits for that."""

    acks: list[tuple[int, bool]] = field(default_factory=list)  # a number, and whether all before it are meant too
    landings: list[Landing] = field(default_factory=list)


class Acknowledgements:
    """The broker numbers the deliveries of a channel from 1, without gaps."""

    def __init__(self) -> None:
        self._lowest = 1  # the lowest that is open
        self._closed: set[int] = set()  # above it, settled in whatever way
        self._waiting: dict[int, tuple[float, Landing]] = {}  # above it, not acknowledged yet, oldest first
        self._reached = 0  # the highest below it that is not acknowledged yet
        self._landings: list[Landing] = []

    def done(self, tag: int, landing: Landing, now: float) -> None:
        """To be acknowledged."""
        self._waiting[tag] = now, landing
        self.settled(tag)

    def settled(self, tag: int) -> None:
        """Nothing more is to be said about it."""
        self._closed.add(tag)
        while self._lowest in self._closed:
            self._closed.discard(self._lowest)
            waited = self._waiting.pop(self._lowest, None)
            if waited is not None:
                self._reached = self._lowest  # only a number that the broker still knows may be named
                self._landings.append(waited[1])
            self._lowest += 1

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def patience(self, prefetch: int) -> float:
        """For how long a settled delivery waits for an open one, of so many that the broker sends at most."""
        return IMPATIENCE if len(self._waiting) * LARGE_PART >= prefetch else PATIENCE

    def words(self, now: float, patience: float = PATIENCE) -> Words:
        """What may be said by now."""
        words = Words(landings=self._landings)
        self._landings = []
        if self._reached:
            words.acks.append((self._reached, True))
            self._reached = 0
        for tag in [*self._impatient(now - patience)]:
            words.acks.append((tag, False))
            words.landings.append(self._waiting.pop(tag)[1])
        return words

    def abandon(self) -> list[Landing]:
        """Whoever still waits for a word that nobody will hear."""
        landings = [*self._landings, *(landing for _, landing in self._waiting.values())]
        self._landings = []
        self._waiting.clear()
        return landings

    def _impatient(self, before: float) -> Iterable[int]:
        for tag, (since, _) in self._waiting.items():
            if since > before:
                return
            yield tag
