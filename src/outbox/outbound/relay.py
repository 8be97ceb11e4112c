"""Relay: claims due messages from the store and hands them on, until it is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Protocol

from outbox.core.errors import TransportClosed, TransportUnavailable
from outbox.core.events import Observer, Troubled
from outbox.core.pace import Pace, RestartDelay, Trouble

SHORTEST_TROUBLE, LONGEST_TROUBLE = 0.2, 30.0  # seconds of pause after an error, doubling
LONGEST_AWAY = 2.0  # seconds of pause while the destination is away: nothing was asked of it, so asking costs nothing


class Round(Protocol):
    """One batch of a relay's work: a router's or a publisher's."""

    @property
    def batch_size(self) -> int: ...

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
        back: Callable[[], Awaitable[None]] | None = None,  # waits for a destination that is away
        restart_delay: RestartDelay | None = None,
        side_by_side: int = 1,  # rounds under way while batches are full: one may claim or settle while another sends
    ) -> None:
        self._work = work
        self._side_by_side = side_by_side
        self._wait = wait
        self._back = back
        self._pace = Pace(poll_interval)
        self._trouble = Trouble(LONGEST_TROUBLE, SHORTEST_TROUBLE, restart_delay)
        self._observe = observe
        self._name = name

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`. A round that has begun is finished."""
        while not stop.is_set():
            try:
                taken = await self._work.round()
                if taken:
                    self._pace.reset()
                if taken >= self._work.batch_size and self._side_by_side > 1:
                    taken = await self._several(stop)
                if taken < self._work.batch_size:  # nothing is left, or somebody would have rung the bell
                    await unless(stop, self._wait(self._pace.pause()))
                self._trouble.reset()
            except TransportClosed:
                raise
            except Exception as error:  # noqa: BLE001 - a relay outlives whatever its database or broker throws
                away = isinstance(error, TransportUnavailable)
                pause = self._trouble.pause(error, LONGEST_AWAY if away else None)
                self._observe(Troubled(self._name, error, timedelta(seconds=pause)))
                await unless(stop, asyncio.sleep(pause))
                if away and self._back is not None:
                    await unless(stop, self._back())

    async def _several(self, stop: asyncio.Event) -> int:
        """Rounds side by side until one is not full; how much that one held. Whichever fails, no other is cut."""
        ends = await asyncio.gather(*(self._one_of(stop) for _ in range(self._side_by_side)), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        return min(end for end in ends if isinstance(end, int))

    async def _one_of(self, stop: asyncio.Event) -> int:
        taken = self._work.batch_size
        while taken >= self._work.batch_size and not stop.is_set():
            taken = await self._work.round()
        return taken


async def unless(stop: asyncio.Event, sleep: Awaitable[None]) -> None:
    """Sleep, but not past a stop."""
    sleeping = asyncio.timeout(None)

    async def wake() -> None:
        await stop.wait()
        sleeping.reschedule(0)

    stopping = asyncio.ensure_future(wake())
    try:
        async with sleeping:
            await sleep
    except TimeoutError:
        if not sleeping.expired():
            raise
    finally:
        stopping.cancel()
