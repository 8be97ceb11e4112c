"""Wakeup: ends a sleep inside this process as soon as there may be work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from outbox.stores.tables import NOT_ROUTED


class Wakeup:
    """A wake-up for each destination. One for which no task waits is remembered for the next wait."""

    def __init__(self) -> None:
        self._bells: dict[asyncio.AbstractEventLoop, dict[str, asyncio.Event]] = {}  # of each event loop

    def announce(self, *destinations: str | None) -> None:
        """There may be work for these destinations: end sleeps here, and in other processes where that can be."""
        for destination in destinations:
            self.ring(destination or NOT_ROUTED)

    async def listen(self, longest: float) -> None:
        """Be woken by other processes from now on, where that can be, for a sleep of so many seconds."""

    async def close(self) -> None:
        """Send no wake-ups any more."""

    def ring(self, destination: str) -> None:
        """End the sleep of the task that waits for this destination. Safe to call from any thread."""
        self._soon(lambda bells: [bells[destination]] if destination in bells else [])

    def ring_all(self) -> None:
        """End every sleep."""
        self._soon(lambda bells: bells.values())

    async def wait(self, destination: str, longest: float) -> bool:
        """Sleep until a wake-up comes or the time is over; says whether one came."""
        bell = self._bell(destination)
        try:
            async with asyncio.timeout(longest):
                await bell.wait()
        except TimeoutError:
            return False
        bell.clear()
        return True

    def _bell(self, destination: str) -> asyncio.Event:
        loop = asyncio.get_running_loop()
        if loop not in self._bells:
            for other in [other for other in list(self._bells) if other.is_closed()]:
                self._bells.pop(other, None)  # an outbox may outlive its event loop, its bells do not
        return self._bells.setdefault(loop, {}).setdefault(destination, asyncio.Event())

    def _soon(self, chosen: Callable[[Mapping[str, asyncio.Event]], Iterable[asyncio.Event]]) -> None:
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None

        def ring(bells: Mapping[str, asyncio.Event]) -> None:
            for bell in chosen(bells):
                bell.set()

        for loop, bells in list(self._bells.items()):
            if loop is here:
                ring(bells)
            else:
                with suppress(RuntimeError):  # it is closed: nothing can be waiting there
                    loop.call_soon_threadsafe(ring, bells)
