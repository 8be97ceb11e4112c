"""PostgreSQL behind PgBouncer, which runs each transaction on any of its few connections, keeps the contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.durations import IMMEDIATELY
from outbox.core.store import Store
from outbox.stores.postgresql import PostgresqlStore
from outbox.stores.tables import Tables
from outbox.testing.servers import PgBouncer
from outbox.testing.store.cases import SOON, MakeStore, claimed, emit, message
from outbox.testing.store_contract import StoreContract


class TestPooledStores(StoreContract):
    @pytest.fixture
    async def engine(self, pgbouncer: PgBouncer) -> AsyncIterator[AsyncEngine]:
        engine = PostgresqlStore.make_engine(make_url(pgbouncer.url).set(drivername="postgresql+asyncpg"))
        yield engine
        await engine.dispose()

    @pytest.fixture
    async def make_store(self, engine: AsyncEngine, table_name: str) -> AsyncIterator[MakeStore]:
        made: list[Store] = []

        def make(clean_up_after: Any = IMMEDIATELY) -> Store:
            made.append(PostgresqlStore(Tables.named(table_name), engine, clean_up_after))
            return made[-1]

        yield make
        for store in made:
            await store.close()

    async def test_a_wait_ends_when_another_process_has_work(
        self, engine: AsyncEngine, store: Store, make_store: MakeStore
    ) -> None:
        """Nobody can be woken through a pooler: the next look finds the work."""
        waiting = asyncio.create_task(store.feed.wait(0.5))
        other = make_store()
        await emit(engine, other, message())
        other.queues.announce(None)
        async with asyncio.timeout(SOON):
            await waiting
        assert await claimed(store, destination=None)
