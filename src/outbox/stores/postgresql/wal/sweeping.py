"""LogSweeping: leaves to the table what the slot did not bring, whatever the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from outbox.core.events import Advised, Observer
from outbox.stores.postgresql.wal.slot import LogSlot
from outbox.stores.postgresql.wal.table import LoggedTable

SWEEP_EVERY = 300.0  # seconds between two sweeps


class LogSweeping:
    """One sweep at a time, in a task beside the stream, as long as one connection has the slot.

    It notes the oldest transaction that runs and a position. When everything before that position is settled, a row of
    an older transaction that is still there was not brought.
    """

    def __init__(self, table: LoggedTable, slot: LogSlot, observe: Observer, swept: Callable[[int], None]) -> None:
        self._table = table
        self._slot = slot
        self._observe = observe
        self._swept = swept  # called with how many rows were found
        self._loop = asyncio.get_running_loop()
        self._before: tuple[str, int] | None = None  # a transaction, and the position to be confirmed before
        self._sweep_at = 0.0  # by the loop's clock
        self._working: asyncio.Task[None] | None = None

    async def begin(self) -> int:
        """Note where the next sweep ends; the position up to which an earlier holder may have settled messages."""
        self._before = await self._table.sweep_bound()
        return self._before[1]

    def progress(self, confirmed: int) -> None:
        """Begin what it is time for."""
        if self._working is not None and not self._working.done():
            return
        now = self._loop.time()
        if self._before is not None and confirmed >= self._before[1]:
            before, self._before = self._before[0], None
            self._sweep_at = now + SWEEP_EVERY
            self._start(self._sweep(before))
        elif self._before is None and now >= self._sweep_at:
            self._sweep_at = now + SWEEP_EVERY
            self._start(self._bound())

    async def end(self) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._working = self._loop.create_task(work, name="outbox log sweep")

    async def _bound(self) -> None:
        with suppress(Exception):  # it is tried again
            await self.begin()

    async def _sweep(self, before: str) -> None:
        try:
            count = await self._table.sweep(before)
        except Exception:  # noqa: BLE001 - drivers throw what they like when their database is away
            self._sweep_at = 0.0
            return
        self._swept(count)
        if count:
            found = f"{count} messages were in the table that the slot {self._slot.name} did not bring, and go out now"
            self._observe(Advised("relay", f"{found}: it was made or moved after they were committed"))
