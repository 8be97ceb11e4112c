"""Wakeup: ends a sleep inside this process as soon as there may be work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Wakeup:
    """A bell for each destination. Ringing one that nobody waits for is remembered for the next wait."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bells: dict[str, asyncio.Event] = {}

    def ring(self, destination: str) -> None:
        """End the sleep of whoever waits for this destination. Safe to call from any thread."""
        self._soon(self._ring, destination)

    def ring_all(self) -> None:
        """End every sleep."""
        self._soon(self._ring_all)

    async def wait(self, destination: str, longest: float) -> bool:
        """Sleep until the bell rings or the time is over; says whether it rang."""
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
        if self._loop is not loop:  # an outbox may outlive its event loop, its bells do not
            self._loop, self._bells = loop, {}
        return self._bells.setdefault(destination, asyncio.Event())

    def _ring(self, destination: str) -> None:
        bell = self._bells.get(destination)
        if bell is not None:
            bell.set()

    def _ring_all(self) -> None:
        for bell in self._bells.values():
            bell.set()

    def _soon(self, ring: Callable[..., None], *destination: str) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        try:
            here = asyncio.get_running_loop() is loop
        except RuntimeError:
            here = False
        if here:
            ring(*destination)
        else:
            loop.call_soon_threadsafe(ring, *destination)
