"""LostClaims: what a claim may have leased although its answer never came is given back by the claim's token."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy import Integer, String, Uuid, bindparam, case, null, select, update

from outbox.core.pace import Pace
from outbox.stores.claims import one_less

if TYPE_CHECKING:
    from outbox.stores.sql import SqlStore

AGAIN = 0.1, 5.0  # seconds between two tries, doubling, until the lease has run out anyway
READ_AT_MOST = 20_000  # rows: what was claimed is near the front of its queue, and a backlog may have millions


class LostClaims:
    """Gives back in the background, as soon as the database answers: a start that was not made is no crash."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()

    def give_back(self, token: UUID, apart: UUID, destination: str, lease: timedelta) -> None:
        """Release whatever bears this token. The statement may reach the server late, so an empty try is no end."""
        task = asyncio.create_task(
            self._give_back({"token": token, "apart": apart, "wanted": destination}, lease.total_seconds()),
            name="outbox claim without an answer",
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Leave what is not given back yet to the end of its lease."""
        tasks = [task for task in self._tasks if task.get_loop() is asyncio.get_running_loop()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _give_back(self, claim: Mapping[str, Any], lease: float) -> None:
        loop, again = asyncio.get_running_loop(), Pace(AGAIN[1], AGAIN[0])
        lease_ends = loop.time() + lease
        parameters = {**claim, "most": READ_AT_MOST}
        while loop.time() < lease_ends:
            with suppress(Exception):  # drivers throw what they like when their database is away
                released = await self._store.apply(
                    lambda connection: connection.execute(self._release, parameters).rowcount
                )
                if released:
                    self._store.announce(claim["wanted"])
                    return
            await asyncio.sleep(again.pause())

    @cached_property
    def _release(self) -> Any:
        columns = self._store.messages.c
        front = (
            select(columns.id, columns.lease_token)
            .where(
                columns.destination == bindparam("wanted", type_=String),
                columns.done_at.is_(None),
                columns.due_at <= self._store.now(),
            )
            .order_by(columns.due_at, columns.id)
            .limit(bindparam("most", type_=Integer))
            .subquery("front")
        )
        token, apart = bindparam("token", type_=Uuid), bindparam("apart", type_=Uuid)
        chosen = columns.id.in_(select(front.c.id).where(front.c.lease_token.in_([token, apart])))
        held = columns.lease_token.in_([token, apart]) & (columns.lease_until > self._store.clock())
        starts = case((columns.lease_token == token, one_less(columns.starts)), else_=columns.starts)
        return (
            update(self._store.messages)
            .where(chosen, held)
            .values(starts=starts, lease_token=null(), lease_until=null())
        )
