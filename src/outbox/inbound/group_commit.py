"""GroupCommit: what comes for one queue is stored together, as much as came while the last transaction was written."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from outbox.core.backoff import DATABASE, Outage
from outbox.core.events import Observer, Received
from outbox.core.store import Receipt


class Storable(Protocol):
    """What has to be stored as a whole."""

    @property
    def size(self) -> int:
        """How many messages it has."""
        ...

    @property
    def stored(self) -> asyncio.Future[None]:
        """Done when it is durable, when it failed, or when its caller left."""
        ...


Item = TypeVar("Item", bound=Storable)


class GroupCommit(ABC, Generic[Item]):
    """Stores the items of one queue, first come, first served. What was stored and is stored again does no harm."""

    def __init__(self, queue: str, *, batch_size: int, observe: Observer) -> None:
        self._queue = queue
        self._batch_size = batch_size
        self._observe = observe
        self._outage = Outage(f"storing for {queue}", DATABASE, observe)
        self._waiting: list[Item] = []  # until they have an end
        self._writing: asyncio.Task[None] | None = None

    def store(self, item: Item) -> asyncio.Future[None]:
        """Done when the item is durable. If it fails, it may be nevertheless."""
        self._waiting.append(item)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(), name=f"outbox storing of {self._queue}")
        return item.stored

    async def close(self) -> None:
        """Write no more."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])

    async def _write(self) -> None:
        while batch := self._next():
            try:
                receipt = await self._receive(batch)
            except Exception as error:  # noqa: BLE001 - drivers throw what they like
                # Whether it was committed is unknown, so it counts as not stored. When it comes again, that is known.
                await self._failed(batch, error)
            else:
                self._outage.over()
                self._conclude(batch, receipt)
        self._writing = None  # a task keeps its event loop alive

    def _next(self) -> list[Item]:
        """What the next transaction writes: whole items, at least one, and no more messages than fit in a batch."""
        self._waiting = [item for item in self._waiting if not item.stored.done()]
        count = size = 0
        for item in self._waiting:
            size += item.size
            if count and size > self._batch_size:
                break
            count += 1
        return self._waiting[:count]

    def _tell(self, batch: Sequence[Item], receipt: Receipt) -> None:
        """Tell observers how many messages were stored, and how many were known."""
        stored, size = len(receipt.stored), sum(item.size for item in batch)
        self._observe(Received(self._queue, stored, duplicates=size - stored - len(receipt.refused)))

    @abstractmethod
    async def _receive(self, batch: Sequence[Item]) -> Receipt:
        """Store a batch in one transaction."""

    @abstractmethod
    async def _failed(self, batch: Sequence[Item], error: Exception) -> None:
        """The database did not take a batch. Items without an end are in the next one."""

    @abstractmethod
    def _conclude(self, batch: Sequence[Item], receipt: Receipt) -> None:
        """Give the items of a batch their end. Those without one are in the next batch."""
