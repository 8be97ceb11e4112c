"""Confirms: which of the messages on a channel the broker has answered for, and how."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple


class BrokerAnswer(Enum):
    """What became of one publish."""

    CONFIRMED = auto()  # a positive acknowledgement of its own number, and it was not returned
    RETURNED = auto()  # no queue is bound
    REJECTED = auto()  # a negative acknowledgement
    UNKNOWN = auto()  # no answer
    MISSING = auto()  # there is no such exchange
    FORBIDDEN = auto()  # the user may not write to that exchange


class Outgoing(NamedTuple):
    """One publish, ready to be written."""

    exchange: str
    routing_key: str
    properties: bytes
    body: bytes
    id: str  # the message's


class Window:
    """The publishes of one write, which the broker answers for one by one or in ranges."""

    __slots__ = ("_low", "_missing", "_returned", "answers", "batch", "done", "first", "last")

    def __init__(self, first: int, batch: Sequence[Outgoing], done: asyncio.Future[None]) -> None:
        self.first = first
        self.last = first + len(batch) - 1
        self.batch = batch
        self.answers = [BrokerAnswer.UNKNOWN] * len(batch)
        self.done = done
        self._low = 0  # everything before it is answered
        self._missing = len(batch)
        self._returned: set[int] = set()

    def answer(self, tag: int, multiple: bool, answer: BrokerAnswer) -> None:
        end = min(tag, self.last) - self.first
        answers = self.answers
        for position in range(self._low, end + 1) if multiple else (end,):
            if answers[position] is BrokerAnswer.UNKNOWN:
                # A return comes before the acknowledgement of the same publish.
                answers[position] = BrokerAnswer.RETURNED if position in self._returned else answer
                self._missing -= 1
        if multiple:
            self._low = end + 1
        if not self._missing and not self.done.done():
            self.done.set_result(None)

    def returned(self, exchange: str, routing_key: str, id: str | None) -> bool:
        """Whether this was the publish that no queue is bound to."""
        for position, outgoing in enumerate(self.batch):
            if (
                outgoing.id == id
                and outgoing.routing_key == routing_key
                and outgoing.exchange == exchange
                and position not in self._returned
                and self.answers[position] is BrokerAnswer.UNKNOWN
            ):
                self._returned.add(position)
                return True
        return False


class Confirms:
    """The windows of a channel that are still open, in the order in which they were written."""

    def __init__(self) -> None:
        self._windows: deque[Window] = deque()
        self._next = 1  # the broker counts publishes from 1

    def expect(self, batch: Sequence[Outgoing]) -> Window:
        """Number a batch, in the moment in which it is written."""
        window = Window(self._next, batch, asyncio.get_running_loop().create_future())
        self._next += len(batch)
        self._windows.append(window)
        return window

    def answered(self, tag: int, multiple: bool, answer: BrokerAnswer) -> None:
        """The broker's answer for one publish, or for all up to it."""
        windows = self._windows
        while windows and windows[0].done.done():
            windows.popleft()
        for window in windows:
            if window.first > tag:
                break
            if multiple or tag <= window.last:
                window.answer(tag, multiple, answer)

    def returned(self, exchange: str, routing_key: str, id: str | None) -> None:
        """The broker found no queue for one of the open publishes; it names it by what it carried."""
        for window in self._windows:
            if window.returned(exchange, routing_key, id):
                return

    def end(self) -> None:
        """No more answers will come."""
        for window in self._windows:
            if not window.done.done():
                window.done.set_result(None)
        self._windows.clear()
