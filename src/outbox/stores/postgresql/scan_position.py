"""ScanPosition: where in a queue the live rows begin.

A row that was handled is dead, and an old transaction somewhere in the database keeps the dead from being removed. Each
look for due messages then steps over all of them, from the first. When that has become slow, looks go on from where the
last one ended, and only now and then from the very beginning: such a look finds who was overtaken, a message whose
transaction took long to commit, or whose lease ran out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any

from outbox.core.durations import EARLIEST

BEGINNING = EARLIEST

SLOW = 0.015  # seconds for a look from the beginning that make it worth its while to ask for the dead
MANY = 10_000  # dead rows that make it worth its while to remember the head
RESPITE = 20  # looks from the beginning take at most one part in so many of the time
SHORTEST_RESPITE = 1.0  # seconds
OVERTAKEN = timedelta(seconds=0.25)  # how much longer than others a transaction may take and still be met on the way

_due_at = itemgetter(0)


@dataclass(slots=True)
class Scan:
    """One look for due messages."""

    since: datetime
    found: Sequence[Any] = ()  # rows that begin with when they were due
    ended: bool = True  # there was nothing more to find

    @property
    def bound(self) -> datetime | None:
        """The same for a statement. None: from the very beginning, where a row of another program may be due."""
        return None if self.since == BEGINNING else self.since


class ScanPosition:
    """The head of one queue, as this process knows it."""

    def __init__(self) -> None:
        self._reached = BEGINNING
        self._from_beginning_at = 0.0
        self._ask_again_at = 0.0
        self.in_doubt = False  # whether the dead should be counted

    @contextmanager
    def looking(self) -> Iterator[Scan]:
        """Scan from where the live rows begin, or from the beginning if that is cheap or its time has come."""
        known = time.monotonic() < self._from_beginning_at and self._reached > BEGINNING
        look = Scan(self._reached - OVERTAKEN if known else BEGINNING)
        began = time.perf_counter()
        yield look
        took = time.perf_counter() - began
        last = max(map(_due_at, look.found), default=self._reached)
        if known:
            self._reached = max(self._reached, last)
            return
        self._reached = max(self._reached, last) if look.ended else last
        if took > SLOW and time.monotonic() > self._ask_again_at:
            respite = max(SHORTEST_RESPITE, RESPITE * took)
            self._ask_again_at = time.monotonic() + respite
            self.in_doubt = True

    def counted(self, dead: int) -> None:
        """So many dead rows lie in the table."""
        self.in_doubt = False
        if dead > MANY:
            self._from_beginning_at = self._ask_again_at
