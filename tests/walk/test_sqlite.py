"""SQLite: one writes at a time, in a file that may be replaced under a running process."""

from __future__ import annotations

import asyncio
import sqlite3
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Binding, DatabaseReplaced, Listener, Outbox
from outbox.core.events import Failed, LeaseWasLost
from outbox.core.store import Selection
from tests.support.databases import on_sqlite
from tests.support.observing import PATIENCE, Recorder, let_leases_run_out
from tests.support.outboxes import MakeOutbox

pytestmark = on_sqlite

MANY = 24  # listeners that wait for each other
EACH, LEASE = 0.12, 1.5  # seconds: all of them together take longer than a lease


async def test_leases_are_renewed_while_listeners_wait_for_each_other(make_outbox: MakeOutbox) -> None:
    recorder, runs, all_done = Recorder(), list[int](), asyncio.Event()
    outbox = make_outbox(lease=LEASE, observers=[recorder])

    async def on_order(number: int, session: AsyncSession) -> None:
        runs.append(number)
        await session.execute(text("SELECT 1"))
        await asyncio.sleep(EACH)
        if set(runs) == set(range(MANY)):
            all_done.set()

    async with outbox.transaction() as session:
        await outbox.emit_many(session, "order.created", range(MANY))
    async with outbox.running(listeners=[Listener("order.*", on_order, queue="orders", concurrency=MANY)]):
        await asyncio.wait_for(all_done.wait(), PATIENCE)
    assert sorted(runs) == list(range(MANY))
    assert not recorder.of(LeaseWasLost)


async def test_the_lease_of_a_run_that_waits_to_be_alone_is_renewed_while_others_wait_to_write(
    make_outbox: MakeOutbox,
) -> None:
    outbox = make_outbox()
    store = outbox.store
    await store.queues.bind([Binding("q", "q")])
    async with outbox.transaction() as session:
        await outbox.emit(session, "q", "suspected")
    await store.queues.route(1, {})
    async with store.feed.claim(Selection(limit=1, lease=timedelta(hours=1), destination="q")):
        await let_leases_run_out(outbox)

    async def write() -> None:
        async with store.transactions.turn():
            await asyncio.sleep(EACH)

    async with store.feed.claim(
        Selection(limit=1, lease=timedelta(seconds=LEASE), destination="q", isolated_at=1)
    ) as claim:
        [attempt] = claim.attempts
        assert attempt.isolated
        async with asyncio.TaskGroup() as writing:
            for _ in range(MANY):
                writing.create_task(write())
        assert await claim.start(attempt)


def file_of(database_url: str) -> Path:
    return Path(database_url.partition("///")[2])


def replace(file: Path) -> None:
    """Put a copy of a database in its place, as a restore does."""
    with sqlite3.connect(file) as connection:
        connection.execute("VACUUM INTO ?", [f"{file}.copy"])
    connection.close()
    Path(f"{file}.copy").replace(file)
    for beside in ("-wal", "-shm"):
        Path(f"{file}{beside}").unlink(missing_ok=True)


async def test_a_worker_ends_when_its_database_was_replaced(make_outbox: MakeOutbox, database_url: str) -> None:
    recorder = Recorder()
    outbox = make_outbox(observers=[recorder])
    seen: asyncio.Queue[int] = asyncio.Queue()
    listener = Listener("order.*", seen.put, queue="orders")

    async def emit(number: int) -> None:
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", number)

    with pytest.raises(DatabaseReplaced, match="another file now"):
        async with asyncio.timeout(PATIENCE), outbox.running(listeners=[listener]):
            await emit(1)
            assert await seen.get() == 1
            replace(file_of(database_url))
            await asyncio.Event().wait()
    assert isinstance(recorder.of(Failed)[0].error, DatabaseReplaced)
    with pytest.raises(DatabaseReplaced):
        await emit(2)  # nothing is written to the file that was opened
    await outbox.close()
    async with asyncio.timeout(PATIENCE), outbox.running(listeners=[listener]):
        await emit(3)
        assert await seen.get() == 3


async def test_nothing_is_committed_to_a_file_that_was_replaced_meanwhile(outbox: Outbox, database_url: str) -> None:
    await outbox.create_tables()
    with pytest.raises(DatabaseReplaced):
        async with outbox.transaction() as session:
            await session.execute(text("SELECT 1"))
            replace(file_of(database_url))
    file_of(database_url).unlink()
    with pytest.raises(DatabaseReplaced, match="gone"):
        await outbox.backlog()
    assert not file_of(database_url).exists()
