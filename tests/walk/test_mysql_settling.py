"""How attempts end on MariaDB and MySQL: the statement that changes a row looks at its lease, whatever came before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from outbox import Outbox
from outbox.core.attempt import Dead, Done, Outcome, Reason, Released, RetryIn
from outbox.core.store import Selection
from outbox.testing.store.cases import LEASE, claimed, emit, message, queued
from tests.support.databases import url_on

LATE = timedelta(seconds=2)

pytestmark = pytest.mark.servers


@pytest.fixture
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """MariaDB alone."""
    return url_on(request, "mysql+asyncmy", tmp_path)


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database_url)
    yield engine
    await engine.dispose()


async def rows(engine: AsyncEngine, table: str, which: str = "TRUE") -> set[int]:
    async with engine.connect() as connection:
        return set((await connection.execute(text(f"SELECT id FROM {table} WHERE {which}"))).scalars())


OUTCOMES: list[tuple[Outcome, str]] = [
    (Done(), "FALSE"),
    (RetryIn(timedelta(hours=1), "later"), "attempts = 1 AND lease_token IS NULL"),
    (Released(), "attempts = 0 AND lease_token IS NULL"),
    (Released(timedelta(hours=1)), "attempts = 0 AND lease_token IS NULL AND first_due_at IS NOT NULL"),
    (Dead(Reason.REJECTED, "no"), "FALSE"),
]


@pytest.mark.parametrize(("outcome", "settled"), OUTCOMES, ids=["done", "retry", "released", "postponed", "dead"])
async def test_of_a_batch_whose_leases_ended_in_part_the_rest_is_settled_and_no_more(
    engine: AsyncEngine, outbox: Outbox, table_name: str, outcome: Outcome, settled: str
) -> None:
    store = outbox.store
    await queued(engine, store, *(message(body=str(n).encode()) for n in range(5)))
    async with store.feed.claim(Selection(limit=5, lease=LEASE, destination="q")) as claim:
        first, second, third, *others = ids = [each.id for each in claim.attempts]
        async with engine.begin() as connection:
            ended = f"UPDATE {table_name} SET lease_until = '2001-01-01' WHERE id IN ({first}, {third})"
            await connection.execute(text(ended))
        assert await claim.settle(dict.fromkeys(ids, outcome)) == {first, third}
    left = await rows(engine, table_name, f"NOT ({settled})")
    assert left == {first, third}
    assert len(await store.dead_letters.list()) == (3 if isinstance(outcome, Dead) else 0)
    assert {second, *others} == set(ids) - left


async def test_a_message_whose_lease_ends_while_it_is_copied_to_the_dead_letters_stays_where_it_is(
    engine: AsyncEngine, outbox: Outbox, table_name: str
) -> None:
    store: Any = outbox.store
    await queued(engine, store, message())
    selection = Selection(limit=1, lease=LATE, destination="q")
    async with store.feed.claim(selection) as claim, engine.connect() as foreign:
        [id] = [each.id for each in claim.attempts]
        await claim.renew_once([id], timedelta(0))  # and no more
        await foreign.execute(text(f"SELECT id FROM {table_name}_dead_letters FOR UPDATE"))
        settling = asyncio.create_task(claim.settle({id: Dead(Reason.REJECTED, "no")}))
        await asyncio.sleep(LATE.total_seconds() + 0.5)
        await foreign.rollback()
        assert await settling == {id}
    assert await store.dead_letters.list() == []
    assert await rows(engine, table_name) == {id}


async def test_large_messages_are_claimed_beside_small_ones(engine: AsyncEngine, outbox: Outbox) -> None:
    bodies = [b"small", b"x" * 2_000_000, b"small too"]
    await emit(engine, outbox.store, *map(_with_body, bodies))
    assert [each.message.body for each in await claimed(outbox.store, destination=None)] == bodies


def _with_body(body: bytes) -> Any:
    return message(body=body)


async def test_a_transaction_that_was_begun_on_the_driver_does_not_outlive_its_connection(
    outbox: Outbox, engine: AsyncEngine, table_name: str
) -> None:
    """Nothing is rolled back behind a commit, unless the server says that something is open."""
    async with engine.begin() as connection:
        await connection.execute(text(f"CREATE TABLE {table_name}_mine (id INT PRIMARY KEY) ENGINE=InnoDB"))
    own = outbox.engines.asynchronous
    async with own.connect() as connection:
        await connection.execute(text("SELECT 1"))
        await connection.commit()
        driver: Any = (await connection.get_raw_connection()).driver_connection
        await driver.query(f"INSERT INTO {table_name}_mine VALUES (1)")
    async with own.begin() as connection:
        await connection.execute(text("SELECT 1"))
    assert await rows(engine, f"{table_name}_mine") == set()
