"""LostClaims: what a claim may have leased although its answer never came is given back by the claim's token."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import BindParameter, Connection, Integer, Select, String, bindparam, case, null, select

from outbox.core.backoff import Backoff
from outbox.core.kept_property import kept_property
from outbox.stores.dialect import SqlDialect
from outbox.stores.leases import one_less, set_in_order
from outbox.stores.runner import Runner
from outbox.stores.selecting import Tokens
from outbox.stores.tables import Tables
from outbox.stores.wakeup import Wakeup

AGAIN = 0.1, 5.0  # seconds between two tries, doubling, until the lease has run out anyway
READ_AT_MOST = 20_000  # rows: what was claimed is near the front of its queue, and a backlog may have millions


class LostClaims:
    """Gives back in the background, as soon as the database answers: a start that was not made is no crash."""

    def __init__(self, tables: Tables, dialect: SqlDialect, runner: Runner, wakeup: Wakeup) -> None:
        self._messages = tables.messages
        self._dialect = dialect
        self._runner = runner
        self._wakeup = wakeup
        self._tasks: set[asyncio.Task[None]] = set()

    def give_back(self, tokens: Tokens, destination: str, lease: timedelta) -> None:
        """Release whatever bears these tokens. The statement may reach the server late, so an empty try is no end."""
        task = asyncio.create_task(
            self._give_back(tokens, destination, lease.total_seconds()), name="outbox claim without an answer"
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

    async def _give_back(self, tokens: Tokens, destination: str, lease: float) -> None:
        loop, again = asyncio.get_running_loop(), Backoff(AGAIN[1], AGAIN[0])
        lease_ends = loop.time() + lease
        while loop.time() < lease_ends:
            with suppress(Exception):  # drivers throw what they like when their database is away
                if await self._runner.apply(lambda connection: self._release(connection, tokens, destination)):
                    self._wakeup.announce(destination)
                    return
            await asyncio.sleep(again.pause())

    def _release(self, connection: Connection, tokens: Tokens, destination: str) -> int:
        bearing = {"token": tokens.token, "apart": tokens.apart}
        front = {"wanted": destination, "most": READ_AT_MOST, **bearing}
        ids = connection.execute(self._leased, front).scalars().all()
        if not ids:
            return 0
        return connection.execute(self._released, {"ids": self._dialect.listed(ids), **bearing}).rowcount

    @kept_property
    def _leased(self) -> Select[Any]:
        columns = self._messages.c
        front = (
            select(columns.id, columns.lease_token)
            .where(
                columns.destination == bindparam("wanted", type_=String),
                columns.done_at.is_(None),
                columns.due_at <= self._dialect.now(),
            )
            .order_by(columns.due_at, columns.id)
            .limit(bindparam("most", type_=Integer))
            .subquery("front")
        )
        return select(front.c.id).where(front.c.lease_token.in_(self._tokens))

    @kept_property
    def _released(self) -> Any:
        columns = self._messages.c
        held = columns.lease_token.in_(self._tokens) & (columns.lease_until > self._dialect.clock())
        started = columns.lease_token == bindparam("token", type_=columns.lease_token.type)
        released = self._dialect.update(self._messages).where(self._dialect.among(columns.id, "ids"), held)
        starts = case((started, one_less(columns.starts)), else_=columns.starts)
        return set_in_order(released, starts=starts, lease_token=null(), lease_until=null())

    @property
    def _tokens(self) -> list[BindParameter[UUID]]:
        type = self._messages.c.lease_token.type
        return [bindparam("token", type_=type), bindparam("apart", type_=type)]
