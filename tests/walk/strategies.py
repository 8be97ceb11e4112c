"""What the tests of strategies share: an observer to wait on, and rows that listeners write."""

from __future__ import annotations

import asyncio
from typing import Any

from sqlalchemy import Column, Integer, MetaData, String, Table, insert, select

from outbox import Outbox
from outbox.core.attempt import Outcome
from outbox.core.events import Handled
from tests.support.observing import PATIENCE, Recorder


class Watch(Recorder):
    """An observer that tests wait on."""

    async def outcomes(self, count: int) -> list[Outcome]:
        """How attempts ended, as soon as that many have."""
        return [event.outcome for event in await self.wait_for(Handled, count)]


class Effects:
    """A table without a unique constraint, so that a second effect would be seen."""

    def __init__(self, outbox: Outbox, table_name: str) -> None:
        self._outbox = outbox
        self.table = Table(
            f"{table_name}_effects",
            MetaData(),
            Column("id", Integer, primary_key=True, autoincrement=True),
            Column("what", String(64)),
            Column("n", Integer),
        )

    async def create(self) -> None:
        async with self._outbox.engines.asynchronous.begin() as connection:
            await connection.run_sync(self.table.metadata.create_all)

    def write(self, what: str, n: int = 0) -> Any:
        return insert(self.table).values(what=what, n=n)

    async def all(self) -> list[str]:
        async with self._outbox.engines.asynchronous.connect() as connection:
            found = await connection.execute(select(self.table.c.what).order_by(self.table.c.id))
            return list(found.scalars())


async def reached(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE):
        await event.wait()
