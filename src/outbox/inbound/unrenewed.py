"""Unrenewed: leases that are not renewed while a listener's transaction is open that could not complete them then."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from typing import Any, Self

from sqlalchemy import Connection
from sqlalchemy.util import await_only

from outbox.core.store import Claim, Store
from outbox.core.transport import Delivery
from outbox.inbound.batches import Batch
from outbox.inbound.inbox import NotStarted


class Leases:
    """Makes them for the transactions of a worker."""

    def __init__(self, store: Store, grace: timedelta) -> None:
        self._store = store
        self._grace = grace

    def of(self, delivery: Delivery, limit: timedelta) -> Unrenewed:
        """Those of a transaction that may take so long, and its end the grace beside that."""
        return Unrenewed(self._store, delivery, limit + self._grace)


class Unrenewed:
    """The leases on the deliveries of one transaction.

    A transaction that keeps the snapshot of its first statement cannot delete a row that was written since. So the
    leases are renewed once, right before that statement, for as long as the transaction may take.
    """

    def __init__(self, store: Store, delivery: Delivery, lease: timedelta) -> None:
        self._store = store
        self._deliveries: Sequence[Delivery] = delivery.deliveries if isinstance(delivery, Batch) else (delivery,)
        self._lease = lease
        self._loop = asyncio.get_running_loop()
        self._claims: dict[Claim, list[int]] = {}

    def begin(self, connection: Connection) -> None:
        """Called on the connection of the transaction, before anything is sent on it, in whatever thread."""
        if _claim_of(self._deliveries[0]) is None:
            return
        try:
            if self._store.keeps_snapshot(connection):
                self._wait_for(self._renew())
        except Exception as error:
            raise NotStarted("the lease could not be renewed") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """The transaction is over: they are renewed with all others again. Called by the event loop."""
        for claim, ids in self._claims.items():
            claim.renew_again(ids)

    async def _renew(self) -> None:
        for delivery in self._deliveries:
            claim = _claim_of(delivery)
            if claim is not None:
                self._claims.setdefault(claim, []).append(delivery.attempt.id)
        for claim, ids in self._claims.items():
            await claim.renew_once(ids, self._lease)

    def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # a plain function's thread
            asyncio.run_coroutine_threadsafe(work, self._loop).result()
        else:
            await_only(work)


def _claim_of(delivery: Delivery) -> Claim | None:
    """The claim that renews its lease, if it is out of one."""
    return getattr(delivery, "claim", None)
