"""PoisonSuspects: messages that may have killed their worker.

The broker counts how often it got a message back without an end. That is no count of crashes: it counts the whole
prefetch of a worker that died, and what was given back on purpose. So it makes a message a suspect, no more.

Suspects wait in a line, one of each process is tried at a time. For its trial the process runs nothing else, and it is
published anew, to a queue of this process, with the crash counted: if the copy comes back from there, its worker died
of it. A user that may not make such a queue publishes it to its own queue, with a header that says so: the worker that
gets the copy starts its listener, and if that copy comes back, its worker died of it. The last crash that makes a
message a dead letter is always one of these.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

from outbox.core.listener import Listener
from outbox.transports.rabbitmq.envelope import Envelope

RESERVED_FOR = 0.5  # seconds in which a copy for trial may come to another process, or wait behind many others
COPY_WITHIN = 0.25  # seconds in which it comes to this one if it is ever to: nothing else runs meanwhile
TAKEN_WITHIN = 2.0  # seconds in which a worker takes one whose turn it is, before another one has its turn, too
MOST_FORGIVEN = 50_000  # messages whose return was no crash, remembered

Key = tuple[str, str | None]  # a queue and a message id
AnyDelivery = Any  # of this transport


class Verdict(Enum):
    """How a delivery is to be met."""

    TRUSTED = auto()
    SUSPECT = auto()  # it waits in the line
    ISOLATED = auto()  # this copy is its isolated run
    DEAD = auto()  # it killed as many workers as it may


class PoisonSuspects:
    """Those of one process."""

    def __init__(self) -> None:
        self._on_trial: Key | None = None
        self._is_sent = False  # its copy is on its way, or here
        self._is_here = False
        self._advancing = False
        self._line: deque[tuple[Key, Callable[[], bool]]] = deque()
        self._reservation: asyncio.TimerHandle | None = None
        self._leaving = 0  # others on trial that came while one was, and are on their way back
        self._left = asyncio.Event()
        self._over = asyncio.Event()
        self._forgiven: OrderedDict[Key, int] = OrderedDict()
        self._interrupted: OrderedDict[Key, int] = OrderedDict()  # trials that their channel ended
        self._expected: dict[Key, asyncio.Future[AnyDelivery]] = {}  # copies for trial that a run waits for

    def judge(self, envelope: Envelope, key: Key, listener: Listener) -> tuple[Verdict, int]:
        """How a delivery is to be met, and how many crashes are counted."""
        if envelope.is_fresh:
            return Verdict.TRUSTED, 0
        returned, crashes = envelope.returned, envelope.crashes
        if returned:
            returned -= min(returned, self._forgiven.get(key, 0))
        if crashes is None:
            suspect = returned >= _suspicious(listener)
            return (Verdict.SUSPECT, listener.max_crashes - 1) if suspect else (Verdict.TRUSTED, 0)
        if envelope.on_trial:
            crashes += returned
        elif self._interrupted.get(key) == crashes:
            crashes -= 1
        if crashes >= listener.max_crashes:
            return Verdict.DEAD, crashes
        return (Verdict.ISOLATED if envelope.on_trial else Verdict.SUSPECT), crashes

    def would_suspect(self, envelope: Envelope, listener: Listener) -> bool:
        """Whether a delivery that goes back now would be a suspect soon, though nothing has happened to it."""
        return bool(envelope.returned) or envelope.crashes is not None or _suspicious(listener) == 1

    def clear(self, envelope: Envelope, key: Key) -> None:
        """It goes back because its channel is gone, and this process is alive: that was no crash."""
        _remember(self._forgiven, key, envelope.returned + 1)

    def clear_isolated(self, envelope: Envelope, key: Key) -> None:
        """The same for a copy in a trial queue, in which a crash is counted beforehand."""
        _remember(self._interrupted, key, envelope.crashes or 0)

    def wait(self, key: Key, turn: Callable[[], bool]) -> None:
        """Wait in the line; `turn` makes it ready for its trial, or says that it has gone."""
        self._line.append((key, turn))
        self._next()

    def begin(self, key: Key) -> bool:
        """Whether the trial of a copy that has come may begin."""
        if self._on_trial not in (None, key):
            return False
        self._reserve(key)
        self._is_sent = self._is_here = True
        return True

    def send(self, key: Key) -> bool:
        """Whether its copy may be sent: not while another one's is under way. Whose turn it is may still wait."""
        if self._is_sent and self._on_trial != key:
            return False
        self._reserve(key)
        self._is_sent = True
        return True

    @contextmanager
    def expecting(self, key: Key) -> Iterator[asyncio.Future[AnyDelivery]]:
        """Around the way of a copy for trial to this process: what it is delivered as."""
        self._expected[key] = arrival = asyncio.get_running_loop().create_future()
        try:
            yield arrival
        finally:
            del self._expected[key]

    def sent(self, key: Key) -> None:
        """The copy is at the broker, which may send it to another process."""
        if self._on_trial == key and not self._is_here:
            self._reservation = asyncio.get_running_loop().call_later(RESERVED_FOR, self.end, key)

    def arrived(self, key: Key, delivery: AnyDelivery) -> bool:
        """Whether a run waits for this copy."""
        expected = self._expected.get(key)
        if expected is None or expected.done():
            return False
        expected.set_result(delivery)
        return True

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Around the way back of one that may not be tried now: its copy must be gone before another one starts."""
        self._leaving += 1
        try:
            yield
        finally:
            self._leaving -= 1
            self._left.set()

    async def alone(self) -> None:
        """Wait until no other is on its way back."""
        while self._leaving:
            self._left.clear()
            await self._left.wait()

    def end(self, key: Key) -> None:
        """Its trial is over, or it has gone."""
        if self._on_trial == key:
            self._reserve(None)
            self._over.set()
            self._next()

    async def ended(self, key: Key) -> None:
        """Wait until a trial is over."""
        while self._on_trial == key:
            self._over.clear()
            await self._over.wait()

    def _next(self) -> None:
        if self._advancing:  # a turn that is over at once: the loop below goes on
            return
        self._advancing = True
        try:
            while self._on_trial is None and self._line:
                key, turn = self._line.popleft()
                self._reserve(key)
                if not turn():
                    self._reserve(None)
                elif self._on_trial == key:
                    self._reservation = asyncio.get_running_loop().call_later(TAKEN_WITHIN, self.end, key)
        finally:
            self._advancing = False

    def _reserve(self, key: Key | None) -> None:
        if self._reservation is not None:
            self._reservation.cancel()
            self._reservation = None
        self._on_trial = key
        self._is_sent = self._is_here = False


def _remember(memory: OrderedDict[Key, int], key: Key, number: int) -> None:
    memory[key] = number
    memory.move_to_end(key)
    if len(memory) > MOST_FORGIVEN:
        memory.popitem(last=False)


def _suspicious(listener: Listener) -> int:
    """How many returns make a message a suspect."""
    return max(1, listener.max_crashes - 1)
