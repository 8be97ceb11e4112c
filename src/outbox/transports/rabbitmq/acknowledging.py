"""Acknowledgements: what may be said about the deliveries of one channel, and when.

An acknowledgement "of all up to this one" is never sent past the lowest delivery that is still open. What is settled
above it waits a moment for that one, and is then acknowledged by itself. The moment is short while such deliveries take
up much of the prefetch: the broker sends nothing in their place, and one slow listener would hold up all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outbox.core.settlement import Settlement
from outbox.transports.rabbitmq.channel import Channel
from outbox.transports.rabbitmq.prefetching import ConsumerPrefetch

ACKNOWLEDGE_WITHIN = 0.002  # seconds that an acknowledgement waits for others to be written with it

OPEN_DELIVERY_WAIT = 0.1  # seconds that a settled delivery waits for an open one before it
SHORT_OPEN_DELIVERY_WAIT = 0.005  # the same while those that wait take up a part of the prefetch
LARGE_PART = 4  # of the prefetch: one in so many


@dataclass(slots=True)
class Words:
    """What is to be written now, and who waits for that."""

    acks: list[tuple[int, bool]] = field(default_factory=list)  # a number, and whether all before it are meant too
    settlements: list[Settlement] = field(default_factory=list)


class Acknowledgements:
    """The broker numbers the deliveries of a channel from 1, without gaps."""

    def __init__(self) -> None:
        self._lowest = 1  # the lowest that is open
        self._closed: set[int] = set()  # above it, settled in whatever way
        self._waiting: dict[int, tuple[float, Settlement]] = {}  # above it, not acknowledged yet, oldest first
        self._reached = 0  # the highest below it that is not acknowledged yet
        self._settlements: list[Settlement] = []

    def done(self, tag: int, settlement: Settlement, now: float) -> None:
        """To be acknowledged."""
        self._waiting[tag] = now, settlement
        self.settled(tag)

    def settled(self, tag: int) -> None:
        """Nothing more is to be said about it."""
        self._closed.add(tag)
        while self._lowest in self._closed:
            self._closed.discard(self._lowest)
            waited = self._waiting.pop(self._lowest, None)
            if waited is not None:
                self._reached = self._lowest  # only a number that the broker still knows may be named
                self._settlements.append(waited[1])
            self._lowest += 1

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def patience(self, prefetch: int) -> float:
        """For how long a settled delivery waits for an open one, of so many that the broker sends at most."""
        return SHORT_OPEN_DELIVERY_WAIT if len(self._waiting) * LARGE_PART >= prefetch else OPEN_DELIVERY_WAIT

    def words(self, now: float, patience: float = OPEN_DELIVERY_WAIT) -> Words:
        """What may be said by now."""
        words = Words(settlements=self._settlements)
        self._settlements = []
        if self._reached:
            words.acks.append((self._reached, True))
            self._reached = 0
        for tag in [*self._impatient(now - patience)]:
            words.acks.append((tag, False))
            words.settlements.append(self._waiting.pop(tag)[1])
        return words

    def abandon(self) -> list[Settlement]:
        """The futures of those that still wait for an answer that will not come."""
        settlements = [*self._settlements, *(settlement for _, settlement in self._waiting.values())]
        self._settlements = []
        self._waiting.clear()
        return settlements

    def _impatient(self, before: float) -> Iterable[int]:
        for tag, (since, _) in self._waiting.items():
            if since > before:
                return
            yield tag


class AcknowledgementWriter:
    """Writes them on their channel, those of a moment together."""

    def __init__(self, channel: Channel, prefetch: ConsumerPrefetch) -> None:
        self._channel = channel
        self._prefetch = prefetch
        self._acknowledgements = Acknowledgements()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.unheard = 0  # acknowledgements and the like that the queue may not have heard yet
        self.makes_room = True  # whether acknowledgements are written, for which the broker sends more

    def done(self, tag: int, settlement: Settlement) -> None:
        """Acknowledge it, soon."""
        now = self._loop.time()
        self._acknowledgements.done(tag, settlement, now)
        if self._timer is None:
            self._timer = self._loop.call_later(ACKNOWLEDGE_WITHIN, self.flush)
        elif self._timer.when() - now > SHORT_OPEN_DELIVERY_WAIT and self._patience < OPEN_DELIVERY_WAIT:
            self._timer.cancel()
            self._timer = self._loop.call_later(SHORT_OPEN_DELIVERY_WAIT, self.flush)

    def reject(self, tag: int, *, requeue: bool) -> None:
        """Give it back at once, to its queue or to its dead letters."""
        self._acknowledgements.settled(tag)
        self._write((), [(tag, requeue)])

    def flush(self, patience: float | None = None) -> None:
        """Write what may be said by now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._channel.ended.done() or not self.makes_room:
            return
        words = self._acknowledgements.words(self._loop.time(), self._patience if patience is None else patience)
        if words.acks:
            self._write(words.acks)
        for settlement in words.settlements:
            settlement.set_result(True)
        if self._acknowledgements.waiting:
            self._timer = self._loop.call_later(self._patience, self.flush)

    def abandon(self) -> list[Settlement]:
        """The channel is gone: those that wait for an acknowledgement which will not be written."""
        if self._timer is not None:
            self._timer.cancel()
        return self._acknowledgements.abandon()

    @property
    def _patience(self) -> float:
        return self._acknowledgements.patience(self._prefetch.prefetch)

    def _write(self, acks: Sequence[tuple[int, bool]], nacks: Sequence[tuple[int, bool]] = ()) -> None:
        self.unheard += len(acks) + len(nacks)
        self._channel.settle(acks, nacks)
