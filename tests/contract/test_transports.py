"""The memory transport and the database transport, on both stores, keep the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from outbox.adapters import store_class
from outbox.core.durations import IMMEDIATELY
from outbox.core.store import Store
from outbox.stores.tables import Tables
from outbox.testing.transport_contract import MakeTransport, TransportContract
from outbox.transports.database import DatabaseTransport
from outbox.transports.memory import MemoryTransport


class TestMemoryTransport(TransportContract):
    @pytest.fixture
    def make_transport(self) -> MakeTransport:
        transport = MemoryTransport()  # what it holds lives in the object, so there is only one
        return lambda: transport


class TestDatabaseTransport(TransportContract):
    @pytest.fixture
    async def make_transport(self, database_url: str, table_name: str) -> AsyncIterator[MakeTransport]:
        engine = create_async_engine(database_url)
        made: list[Store] = []

        def make() -> DatabaseTransport:
            dialect = make_url(database_url).get_backend_name()
            store = store_class(dialect)(Tables.named(table_name), engine, IMMEDIATELY)
            made.append(store)
            return DatabaseTransport(store, lease=timedelta(seconds=30), poll_interval=0.1, observe=lambda event: None)

        yield make
        for store in made:
            await store.close()
        await engine.dispose()
