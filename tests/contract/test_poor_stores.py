"""The shared statements alone keep the contract, on a database that knows neither RETURNING nor partial indexes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from outbox.core.attempt import Done
from outbox.core.store import Selection, Store
from outbox.stores.sqlite import prepare
from outbox.testing.store.cases import LEASE, MakeStore, message, queued
from outbox.testing.store_contract import StoreContract

from .poor import STORES, forbidding
from .stores import making

MANY = 200


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql+asyncpg"], indirect=True)
class TestPoorStores(StoreContract):
    @pytest.fixture(autouse=True)
    def _poor(self) -> Iterator[None]:
        with forbidding():
            yield

    @pytest.fixture
    async def engine(self, database_url: str) -> AsyncIterator[AsyncEngine]:
        engine = create_async_engine(database_url)
        if engine.dialect.name == "sqlite":
            prepare(engine)
            self.writes_side_by_side = False
        yield engine
        await engine.dispose()

    @pytest.fixture
    async def make_store(self, engine: AsyncEngine, table_name: str) -> AsyncIterator[MakeStore]:
        async with making(STORES[make_url(engine.url).get_backend_name()], engine, table_name) as make_store:
            yield make_store

    async def test_two_claimers_at_once_settle_every_message_once(
        self, engine: AsyncEngine, store: Store, make_store: MakeStore
    ) -> None:
        await queued(engine, store, *(message(body=str(n).encode()) for n in range(MANY)))
        handled: list[bytes] = []

        async def work(own: Store) -> None:
            while len(handled) < MANY:
                async with own.feed.claim(Selection(limit=7, lease=LEASE, destination="q")) as claim:
                    assert not await claim.settle({attempt.id: Done() for attempt in claim.attempts})
                    handled.extend(attempt.message.body for attempt in claim.attempts)

        async with asyncio.timeout(60):
            await asyncio.gather(work(store), work(make_store()))
        assert sorted(handled) == sorted(str(n).encode() for n in range(MANY))


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql+asyncpg"], indirect=True)
async def test_what_a_poor_database_does_not_know_is_noticed(database_url: str) -> None:
    engine = create_async_engine(database_url)
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE poor_proof (id INTEGER)"))
        for statement in (
            "INSERT INTO poor_proof VALUES (1) RETURNING id",
            "CREATE INDEX poor_proof_some ON poor_proof (id) WHERE id > 1",
            "UPDATE poor_proof SET id = 2 WHERE id IN (SELECT id FROM poor_proof LIMIT 1)",
        ):
            with pytest.raises(AssertionError, match="poor"), forbidding():
                await connection.execute(text(statement))
        await connection.execute(text("DROP TABLE poor_proof"))
    await engine.dispose()
