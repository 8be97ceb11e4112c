"""PostgreSQL behind PgBouncer, which runs each transaction on any of its few connections, keeps the contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.store import Store
from outbox.stores.postgresql import PostgresqlStore
from outbox.testing.servers import PgBouncer
from outbox.testing.store.cases import SOON, MakeStore, claimed, emit, message

from . import test_stores


class TestPooledStores(test_stores.TestStores):
    @pytest.fixture
    async def engine(self, pgbouncer: PgBouncer) -> AsyncIterator[AsyncEngine]:
        engine = PostgresqlStore.make_engine(make_url(pgbouncer.url).set(drivername="postgresql+asyncpg"))
        yield engine
        await engine.dispose()

    async def test_a_wait_ends_when_another_process_has_work(
        self, engine: AsyncEngine, store: Store, make_store: MakeStore
    ) -> None:
        """Nobody can be woken through a pooler: the next look finds the work."""
        waiting = asyncio.create_task(store.wait(0.5))
        other = make_store()
        await emit(engine, other, message())
        other.announce(None)
        async with asyncio.timeout(SOON):
            await waiting
        assert await claimed(store, destination=None)
