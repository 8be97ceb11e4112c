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
from outbox.testing.store_contract import StoreContract

from .stores import making


class TestPooledStores(StoreContract):
    wakes_other_processes = False  # no notification comes through a pooler

    @pytest.fixture
    async def engine(self, pgbouncer: PgBouncer) -> AsyncIterator[AsyncEngine]:
        engine = PostgresqlStore.make_engine(make_url(pgbouncer.url).set(drivername="postgresql+asyncpg"))
        yield engine
        await engine.dispose()

    @pytest.fixture
    async def make_store(self, engine: AsyncEngine, table_name: str) -> AsyncIterator[MakeStore]:
        async with making(PostgresqlStore, engine, table_name) as make_store:
            yield make_store

    async def test_what_another_process_has_stored_is_found_at_the_next_look(
        self, engine: AsyncEngine, store: Store, make_store: MakeStore
    ) -> None:
        waiting = asyncio.create_task(store.feed.wait(0.5))
        other = make_store()
        await emit(engine, other, message())
        other.queues.announce(None)
        async with asyncio.timeout(SOON):
            await waiting
        assert await claimed(store, destination=None)
