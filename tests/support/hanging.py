"""Hanging: listeners that are at work until they are told to go on, and how many of them were at once."""

from __future__ import annotations

import asyncio
import threading

from tests.support.observing import PATIENCE


class Hanging:
    """A listener that hangs until it is told to go on, or cancelled."""

    def __init__(self) -> None:
        self.starts = self.cancelled = self.at_work = self.most_at_work = 0
        self.go_on = asyncio.Event()

    async def __call__(self, order: object) -> None:
        self.starts += 1
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.at_work -= 1


class HangingThread:
    """A plain listener, which nothing can end."""

    def __init__(self) -> None:
        self.starts = self.at_work = self.most_at_work = 0
        self.go_on = threading.Event()

    def __call__(self, order: object) -> None:
        self.starts += 1
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        self.go_on.wait(PATIENCE)
        self.at_work -= 1
