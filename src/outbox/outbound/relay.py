"""Relay: claims due messages from the store and hands them on, until it is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Protocol

from outbox.core.backoff import DATABASE, TRANSPORT, Backoff, ErrorBackoff, Outage, RestartDelay
from outbox.core.errors import ClosedForGood, TransportUnavailable
from outbox.core.events import Observer, Troubled
from outbox.outbound.rounds import Rounds

SHORTEST_TROUBLE, LONGEST_TROUBLE = 0.2, 30.0  # seconds of pause after an error, doubling
LONGEST_AWAY = 2.0  # seconds of pause while the destination is away: nothing was asked of it, so asking costs nothing


class Round(Protocol):
    """One batch of a relay's work: a router's or a publisher's."""

    @property
    def batch_size(self) -> int: ...

    @property
    def asked(self) -> bool:
        """Whether the last round asked the store for anything: if not, it has shown nothing about the database."""
        ...

    async def round(self) -> int:
        """How much of a batch there was."""
        ...


class Relay:
    """Runs rounds: at once while batches are full, then at a growing pace, sooner when it is woken."""

    def __init__(
        self,
        work: Round,
        *,
        wait: Callable[[float], Awaitable[None]],
        poll_interval: float,
        observe: Observer,
        name: str,
        destination: str | None = None,  # the route, where there are several
        back: Callable[[], Awaitable[None]] | None = None,  # waits for a destination that is away
        restart_delay: RestartDelay | None = None,
        rounds: Rounds | None = None,  # of the same work, where one may begin while others wait for answers
    ) -> None:
        self._work = work
        self._rounds = rounds
        self._wait = wait
        self._back = back
        self._pace = Backoff(poll_interval)
        self._trouble = ErrorBackoff(LONGEST_TROUBLE, SHORTEST_TROUBLE, restart_delay)
        self._observe = observe
        self._name = name
        self._database = Outage(name, DATABASE, observe)
        self._destination = Outage(name, destination or TRANSPORT, observe)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`. A round that has begun is finished."""
        async with nullcontext() if self._rounds is None else self._rounds:
            await self._rounds_until(stop)
        for error in () if self._rounds is None else self._rounds.errors():
            self._observe(Troubled(self._name, error, timedelta(0)))

    async def _rounds_until(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                taken = await self._next(stop)
                if taken:
                    self._pace.reset()
                if self._rounds is not None and self._rounds.answered:
                    self._destination.over()
                if not self._is_busy(taken):
                    ending = () if self._rounds is None else self._rounds.ending
                    await unless(stop, self._wait(self._pace.pause()), *ending)
                if self._work.asked:
                    self._trouble.reset()
                    self._database.over()
            except ClosedForGood:
                raise
            except Exception as error:  # noqa: BLE001 - a relay outlives whatever its database or broker throws
                away = isinstance(error, TransportUnavailable)
                pause = self._trouble.pause(error, LONGEST_AWAY if away else None)
                (self._destination if away else self._database).struck(error, timedelta(seconds=pause))
                await unless(stop, asyncio.sleep(pause))
                if away and self._back is not None:
                    await unless(stop, self._back())

    def _is_busy(self, taken: int) -> bool:
        """Whether the next round begins at once.

        A batch that was not full left nothing behind. But while a publisher waits for answers more is committed, and
        notifications are spaced: the next claim finds it sooner. A router's rounds are short.
        """
        return taken >= self._work.batch_size or (taken > 0 and self._rounds is not None)

    async def _next(self, stop: asyncio.Event) -> int:
        if self._rounds is None:
            return await self._work.round()
        if self._rounds.full:
            await unless(stop, self._rounds.one_ended())
            if stop.is_set():
                return 0
        return await self._rounds.next()


async def unless(stop: asyncio.Event, sleep: Awaitable[None], *events: asyncio.Event) -> None:
    """Sleep, but not past a stop, nor past other events."""
    sleeping = asyncio.timeout(None)

    async def wake(event: asyncio.Event) -> None:
        await event.wait()
        if not sleeping.expired():
            sleeping.reschedule(0)

    waking = [asyncio.ensure_future(wake(event)) for event in (stop, *events)]
    try:
        async with sleeping:
            await sleep
    except TimeoutError:
        if not sleeping.expired():
            raise
    finally:
        for each in waking:
            each.cancel()
