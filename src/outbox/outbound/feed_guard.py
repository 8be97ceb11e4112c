"""FeedGuard: ends a relay that polls, once another one has the messages of its table from the database's log."""

from __future__ import annotations

import asyncio
from typing import Protocol

from outbox.core.errors import FeedMismatch
from outbox.core.store import Feed
from outbox.outbound.relay import unless

CHECK_EVERY = 1.0  # seconds between two checks, at least


class RecordedFeeds(Protocol):
    """Where a table's messages come from, as it is recorded."""

    async def feeds(self) -> list[str]: ...


class FeedGuard:
    """Beside a relay that polls: what both would send goes out twice until one of them ends."""

    def __init__(self, recorded: RecordedFeeds, table: str, poll_interval: float) -> None:
        self._recorded = recorded
        self._table = table
        self._every = max(CHECK_EVERY, poll_interval)
        self.feed: Feed | None = None  # the store's own

    async def begin(self) -> None:
        """FeedMismatch if the messages come from the log."""
        if await self._recorded.feeds():
            raise FeedMismatch(
                f"the messages of the table {self._table!r} come from the write-ahead log, and this relay would poll "
                "them: start it with relay_from='wal' (outbox relay --from wal). If the change is meant, stop the "
                "relays that read the log and run: outbox wal drop"
            )

    async def run(self, stop: asyncio.Event) -> None:
        """The same until `stop`."""
        while not stop.is_set():
            await unless(stop, asyncio.sleep(self._every))
            try:
                await self.begin()
            except FeedMismatch:
                raise
            except Exception:  # noqa: BLE001, S110 - the database is away: the relay says so
                pass
