"""LogWaking: wakes relays, routers and workers, here and in other processes, for rows that the log told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outbox.core.backoff import Backoff
from outbox.stores.postgresql.wal.inserted_row import Microseconds
from outbox.stores.postgresql.wal.pgoutput import Insert
from outbox.stores.postgresql.wal.table import LoggedTable
from outbox.stores.postgresql.wal.window import LoggedTransaction, LogWindow
from outbox.stores.tables import NOT_ROUTED

# A wake-up is a hint: what it leads to is claimed from the table, and polling finds it without. So a row is settled for
# the log as soon as it was announced. But a claim that comes before other transactions see the commit finds nothing,
# and the next poll may be far away.

AGAIN, LONGEST_AGAIN = 0.001, 0.5  # seconds between two questions whether a commit can be seen
TOGETHER = 0.005  # seconds after an announcement in which further commits wait for each other
MOST_PENDING = 10_000  # transactions that cannot be seen yet; then the stream is paused


class LogWaking:
    """A sink by itself, where messages are routed in the database; and part of a feed that leaves such rows alone."""

    is_needed = False
    is_idle = True

    def __init__(self, table: LoggedTable, announce: Callable[..., None]) -> None:
        self._table = table
        self._announce = announce
        self._pending: dict[LoggedTransaction, tuple[LogWindow, set[str]]] = {}
        self._working: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()
        self.window = LogWindow()

    @property
    def has_room(self) -> bool:
        return len(self._pending) < MOST_PENDING

    async def take_slot(self, system: str, timeline: int) -> None:
        self.window = LogWindow()

    def insert(self, insert: Insert, transaction: LoggedTransaction) -> None:
        self.announce(insert, transaction, self.window)

    def announce(self, insert: Insert, transaction: LoggedTransaction, window: LogWindow) -> None:
        """Wake who claims what has the row's destination, once statements can see it."""
        if transaction not in self._pending:
            self._pending[transaction] = window, set()
            transaction.unsettled += 1
        _, destinations = self._pending[transaction]
        destinations.add(destination_of(insert))
        if self._working is None or self._working.done():
            self._working = asyncio.get_running_loop().create_task(self._work(), name="outbox log wake-ups")

    def set_time(self, now: Microseconds) -> None: ...

    def progress(self) -> None: ...

    def stop(self) -> None: ...

    async def lose_slot(self) -> None:
        """What is pending is announced all the same: the slot may be gone for long."""

    async def close(self) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])

    async def _work(self) -> None:
        again = Backoff(LONGEST_AGAIN, AGAIN)
        while self._pending:
            if await self._announce_visible():
                again.reset()
                await asyncio.sleep(TOGETHER)
            else:
                await asyncio.sleep(again.pause())

    async def _announce_visible(self) -> bool:
        """Announce what statements see; whether there was any."""
        try:
            seen = await self._table.seen()
        except Exception:  # noqa: BLE001 - drivers throw what they like when their database is away
            return False
        visible = [transaction for transaction in self._pending if seen.has(transaction.xid)]
        if visible:
            ended = [(transaction, *self._pending.pop(transaction)) for transaction in visible]
            self._announce(*set().union(*(destinations for _, _, destinations in ended)))
            for transaction, window, _ in ended:
                window.settled(transaction)
            self.changed.set()
        return bool(visible)


def destination_of(insert: Insert) -> str:
    """The queue or route that a row has already; of one that cannot be read, none."""
    value = insert.values.get("destination")
    return value.decode(errors="replace") if isinstance(value, bytes) else NOT_ROUTED
