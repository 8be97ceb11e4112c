"""What a message costs the server's log over its life, by either feed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import text

from outbox import Message, Outbox
from outbox.core.events import SlotTaken
from outbox.stores.postgresql.wal.connection import as_position
from outbox.testing.servers import PostgreSQL
from tests.support.observing import Recorder, eventually

COUNT = 2000
BODY = 256  # bytes


@pytest.fixture
async def shops(table_name: str, recorder: Recorder) -> AsyncIterator[dict[str, Outbox]]:
    """An outbox for each feed, with tables of its own. Without copies of whole pages, whose number is chance."""

    async def publish(message: Message) -> None: ...

    with PostgreSQL(settings={"full_page_writes": "off", "autovacuum": "off"}) as server:
        url = server.url.replace("postgresql://", "postgresql+asyncpg://")
        shops = {
            feed: Outbox(
                db_engine_url=url,
                table_name=f"{table_name}_{feed}",
                transport=publish,
                relay_from=feed,
                poll_interval=0.2,
                observers=[recorder],
            )
            for feed in ("table", "wal")
        }
        for shop in shops.values():
            await shop.create_tables()
        await shops["wal"].wal.create()
        yield shops
        for shop in shops.values():
            await shop.close()


async def log_of(shop: Outbox) -> float:
    """Bytes of the log for each message, from its insert until it is gone."""
    async with shop.running(relay=True):
        await emit(shop, 1)  # what is made once is made
        before = await position(shop)
        for _ in range(COUNT // 20):
            await emit(shop, 20)
        await eventually(lambda: _is_empty(shop))
        return (await position(shop) - before) / COUNT


async def emit(shop: Outbox, count: int) -> None:
    async with shop.transaction() as session:
        await shop.emit_many(session, "order.created", [os.urandom(BODY) for _ in range(count)])


async def _is_empty(shop: Outbox) -> bool:
    return not await shop.messages(limit=1)


async def position(shop: Outbox) -> int:
    async with shop.transaction() as session:
        found: Any = await session.scalar(text("SELECT pg_current_wal_insert_lsn()::text"))
    return as_position(found)


async def test_a_message_from_the_log_costs_an_insert_and_a_deletion(
    shops: dict[str, Outbox], recorder: Recorder
) -> None:
    """The insert of the row is 443 bytes, that into two indexes 144, the deletion 76. Commits are shared by batches."""
    bytes_of = {feed: await log_of(shop) for feed, shop in shops.items()}
    assert recorder.of(SlotTaken)
    assert bytes_of["wal"] < 710, bytes_of
    assert bytes_of["wal"] < 0.6 * bytes_of["table"], bytes_of
