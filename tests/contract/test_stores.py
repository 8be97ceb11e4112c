"""Both stores, through every driver, keep the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from outbox.adapters import store_class
from outbox.core.durations import IMMEDIATELY
from outbox.core.store import Store
from outbox.stores.sqlite import prepare
from outbox.testing.store_contract import MakeStore, StoreContract


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
        made: list[Store] = []

        def make(clean_up_after: Any = IMMEDIATELY) -> Store:
            store = store_class(make_url(engine.url).get_backend_name())
            made.append(store(store.tables_named(table_name), engine, clean_up_after))
            return made[-1]

        yield make
        for store in made:
            await store.close()
