"""RequestStorage: what several requests bring for one queue is stored together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from outbox.core.events import Observer
from outbox.core.message import Message
from outbox.core.store import Receipt, Seal, Store
from outbox.core.webhooks import ID
from outbox.inbound.group_commit import GroupCommit
from outbox.inbound.http.response import Declined, not_now

AFTER_OUTAGE = 5  # seconds after which a sender may try again what the database did not take

_READ_OTHERWISE = (
    f"a request with this {ID} was taken before in another mode, at another path, or with another type or source: "
    "those are not signed, so each message needs an id of its own"
)


@dataclass(frozen=True, slots=True)
class RequestPart:
    """What one request brings for the queue."""

    messages: Sequence[Message]
    seal: Seal | None = None
    stored: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def size(self) -> int:
        return len(self.messages)

    def fail(self, error: Declined) -> None:
        if not self.stored.done():  # its request may have ended
            self.stored.set_exception(error)

    def succeed(self) -> None:
        if not self.stored.done():
            self.stored.set_result(None)


class RequestStorage(GroupCommit[RequestPart]):
    """Stores the messages of one queue. What the database does not take is declined: its sender tries again."""

    def __init__(self, store: Callable[[], Store], queue: str, *, batch_size: int, observe: Observer) -> None:
        super().__init__(queue, batch_size=batch_size, observe=observe)
        self._store = store

    async def _receive(self, batch: Sequence[RequestPart]) -> Receipt:
        messages = [each for part in batch for each in part.messages]
        seals = [part.seal for part in batch if part.seal is not None]
        return await self._store().queues.receive(self._queue, messages, seals=seals)

    async def _failed(self, batch: Sequence[RequestPart], error: Exception) -> None:
        self._outage.struck(error, timedelta(seconds=AFTER_OUTAGE))
        for part in batch:
            part.fail(not_now("the database does not answer", AFTER_OUTAGE))

    def _conclude(self, batch: Sequence[RequestPart], receipt: Receipt) -> None:
        if receipt.broken:  # nothing was stored, and the others are tried again without them
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
        self._tell(batch, receipt)
