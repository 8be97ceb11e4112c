"""Both stores, through every driver, keep the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from outbox.adapters import store_class
from outbox.stores.sqlite import prepare
from outbox.testing.store_contract import MakeStore, StoreContract

from .stores import making


class TestStores(StoreContract):
    @pytest.fixture
    async def engine(self, database_url: str) -> AsyncIterator[AsyncEngine]:
        engine = create_async_engine(database_url)
        if engine.dialect.name == "sqlite":
            prepare(engine)
            self.writes_side_by_side = False
        self.wakes_other_processes = engine.dialect.name not in ("mysql", "mariadb")
        yield engine
        await engine.dispose()

    @pytest.fixture
    async def make_store(self, engine: AsyncEngine, table_name: str) -> AsyncIterator[MakeStore]:
        async with making(store_class(make_url(engine.url).get_backend_name()), engine, table_name) as make_store:
            yield make_store
