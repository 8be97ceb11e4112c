"""Cleanup: removes what is no longer needed, in bounded batches, whether or not messages flow."""

from __future__ import annotations

from datetime import timedelta

from outbox.core.durations import Retention
from outbox.core.events import CleanedUp, Observer
from outbox.core.store import Store

BATCH = 1000  # rows in one statement


class Cleanup:
    """A relay's rounds over what is expired, sent long ago, or remembered long enough."""

    batch_size = BATCH
    asked = True

    def __init__(
        self, store: Store, *, clean_up_after: Retention, inbox_retention: Retention, observe: Observer
    ) -> None:
        self._store = store
        self._clean_up_after = clean_up_after
        self._inbox_retention = inbox_retention
        self._observe = observe

    async def round(self) -> int:
        """One batch of each kind; how many rows went."""
        gone = self._tell("expired", await self._store.maintenance.expire(BATCH))
        if isinstance(self._clean_up_after, timedelta):
            gone += self._tell("sent", await self._store.maintenance.purge(self._clean_up_after, BATCH))
        if isinstance(self._inbox_retention, timedelta):
            gone += self._tell("inbox", await self._store.inbox.purge(self._inbox_retention, BATCH))
        return gone

    def _tell(self, what: str, count: int) -> int:
        if count:
            self._observe(CleanedUp(what, count))
        return count
