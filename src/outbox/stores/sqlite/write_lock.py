"""Turns: who writes next, where a database lets one write at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from outbox.core.errors import TransactionError


class Turns:
    """The write lock of one event loop: renewals of leases first, then in the order of their coming.

    SQLite itself lets writers guess: the one that asks again soonest gets the lock, and listeners ask without a pause.
    Many listeners with a session wait here, each for all before it, and their leases run out meanwhile unless renewals
    pass.
    """

    def __init__(self) -> None:
        self.first = Turn(self)
        self.next = Turn(self)
        self._taken = False
        self._holder: asyncio.Task[Any] | None = None

    async def take(self, waiting: deque[asyncio.Future[None]]) -> None:
        task = asyncio.current_task()
        if self._holder is not None and self._holder is task:
            raise TransactionError(
                "a transaction is open in this task already, and SQLite lets no second one write: pass its session on, "
                "and use `session.begin_nested()` for a part"
            )
        if self._taken:
            await self._wait(waiting)
        self._taken, self._holder = True, task

    def give(self) -> None:
        """Hand it over. It stays taken in between, so that no other writer comes first."""
        self._holder = None
        for waiting in (self.first.waiting, self.next.waiting):
            while waiting:
                waiter = waiting.popleft()
                if not waiter.done():
                    waiter.set_result(None)
                    return
        self._taken = False

    async def _wait(self, waiting: deque[asyncio.Future[None]]) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give()  # it was handed over at the same moment
            raise


class Turn:
    """Held while something writes; those who wait for it by this name come one after another."""

    def __init__(self, turns: Turns) -> None:
        self.waiting: deque[asyncio.Future[None]] = deque()
        self._turns = turns

    async def __aenter__(self) -> None:
        await self._turns.take(self.waiting)

    async def __aexit__(self, *error: object) -> None:
        self._turns.give()
