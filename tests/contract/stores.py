"""Stores: as the contract makes them, on one engine, and closed at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.durations import IMMEDIATELY
from outbox.core.store import Store
from outbox.testing.store_contract import MakeStore


@asynccontextmanager
async def making(store_class: Any, engine: AsyncEngine, table_name: str) -> AsyncIterator[MakeStore]:
    made: list[Store] = []

    def make(clean_up_after: Any = IMMEDIATELY) -> Store:
        made.append(store_class(store_class.tables_named(table_name), engine, clean_up_after))
        return made[-1]

    yield make
    for store in made:
        await store.close()
