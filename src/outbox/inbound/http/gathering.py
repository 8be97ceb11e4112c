"""Gathering: what several requests bring for one queue is stored together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from outbox.core.events import Observer, Received
from outbox.core.message import Message
from outbox.core.outage import DATABASE, Outage
from outbox.core.store import Receipt, Seal, Store
from outbox.core.webhooks import ID
from outbox.inbound.http.answer import Declined, not_now

AGAIN = 5  # seconds after which a sender may try again what the database did not take

_READ_OTHERWISE = (
    f"a request with this {ID} was taken before in another mode, at another path, or with another type or source: "
    "those are not signed, so each message needs an id of its own"
)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one request brings for the queue."""

    messages: Sequence[Message]
    seal: Seal | None = None
    stored: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def fail(self, error: Declined) -> None:
        if not self.stored.done():  # whoever waited may have left
            self.stored.set_exception(error)

    def succeed(self) -> None:
        if not self.stored.done():
            self.stored.set_result(None)


class Gathering:
    """Stores messages of one queue, as many in a transaction as came while the last one was written."""

    def __init__(self, store: Callable[[], Store], queue: str, *, batch_size: int, observe: Observer) -> None:
        self._store = store
        self._queue = queue
        self._batch_size = batch_size
        self._observe = observe
        self._storing = Outage(f"storing for {queue}", DATABASE, observe)
        self._waiting: list[_Part] = []  # first come, first served
        self._writing: asyncio.Task[None] | None = None

    async def add(self, messages: Sequence[Message], seal: Seal | None = None) -> None:
        """Ends when they are durable. If it raises, they may be nevertheless: storing them again does no harm."""
        part = _Part(messages, seal)
        self._waiting.append(part)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(), name=f"outbox storing of {self._queue}")
        await part.stored

    async def _write(self) -> None:
        while batch := self._next():
            try:
                receipt = await self._receive(batch)
            except Exception as error:  # noqa: BLE001 - drivers throw what they like
                # Whether it was committed is unknown, so nobody hears that it was: it is sent again, and known then.
                self._storing.struck(error, timedelta(seconds=AGAIN))
                for part in batch:
                    part.fail(not_now("the database does not answer", AGAIN))
            else:
                self._storing.over()
                self._tell(batch, receipt)
        self._writing = None  # a task keeps its event loop alive

    async def _receive(self, batch: Sequence[_Part]) -> Receipt:
        messages = [each for part in batch for each in part.messages]
        seals = [part.seal for part in batch if part.seal is not None]
        return await self._store().receive(self._queue, messages, seals=seals)

    def _next(self) -> list[_Part]:
        """What the next transaction writes: whole requests, at least one, and no more than fit in a batch."""
        waiting = [part for part in self._waiting if not part.stored.done()]
        count = size = 0
        for part in waiting:
            size += len(part.messages)
            if count and size > self._batch_size:
                break
            count += 1
        self._waiting = waiting[count:]
        return waiting[:count]

    def _tell(self, batch: Sequence[_Part], receipt: Receipt) -> None:
        if receipt.broken:
            self._waiting[:0] = [part for part in batch if part.seal not in receipt.broken]  # nothing was stored
            for part in batch:
                if part.seal in receipt.broken:
                    part.fail(Declined(409, _READ_OTHERWISE))
            return
        for part in batch:
            refused = [message for message in part.messages if message.id in receipt.refused]
            if refused:
                part.fail(Declined(422, f"the database here cannot hold {refused[0].routing_key!r}"))
            else:
                part.succeed()
        stored, size = len(receipt.stored), sum(len(part.messages) for part in batch)
        self._observe(Received(self._queue, stored, duplicates=size - stored - len(receipt.refused)))
