"""Event loops: one outbox serves one after another and several at once, each with connections of its own."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Connection, NullPool, create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Listener, Outbox, WrongEventLoop
from outbox.adapters import sync_url
from outbox.transports.memory import MemoryTransport
from tests.support.databases import on_asyncpg

WITHIN = 30.0  # seconds that no test takes


async def emitted(outbox: Outbox, number: int) -> None:
    async with outbox.transaction() as session:
        await session.execute(text("SELECT 1"))
        await outbox.emit(session, "order.created", number)


def collecting(seen: list[int], total: int) -> tuple[Listener, asyncio.Event]:
    """A listener with a session, and what tells that it has seen so many."""
    enough = asyncio.Event()

    async def on_order(number: int, session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))
        seen.append(number)
        if len(seen) >= total:
            enough.set()

    return Listener("order.*", on_order, queue="orders"), enough


async def worked_off(outbox: Outbox, seen: list[int], number: int) -> None:
    """Emit a message, and handle it and all before it."""
    listener, enough = collecting(seen, number + 1)
    async with outbox.running(listeners=[listener]):
        await emitted(outbox, number)
        await asyncio.wait_for(enough.wait(), WITHIN)


def test_one_outbox_serves_one_loop_after_another(database_url: str, table_name: str) -> None:
    outbox = Outbox(db_engine_url=database_url, table_name=table_name, poll_interval=0.2)
    seen: list[int] = []
    for number in range(3):
        asyncio.run(emitted(outbox, number))  # as a script or a task queue does: it closes nothing itself
    for number in range(3, 6):
        asyncio.run(worked_off(outbox, seen, number))
    assert sorted(seen) == list(range(6))
    gc.collect()  # what is not closed with its loop would warn now, and a warning is an error here


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql+asyncpg"], indirect=True)
def test_loops_of_several_threads_work_at_once(database_url: str, table_name: str) -> None:
    outbox = Outbox(db_engine_url=database_url, table_name=table_name, poll_interval=0.2)
    asyncio.run(outbox.create_tables())
    seen: list[int] = []

    async def in_a_thread(thread: int) -> None:
        listener, _ = collecting(seen, 10**6)
        async with outbox.running(listeners=[listener]):
            for number in range(10):
                await emitted(outbox, 10 * thread + number)
            async with asyncio.timeout(WITHIN):
                while len(seen) < 30:
                    await asyncio.sleep(0.02)

    with ThreadPoolExecutor(3) as threads:
        for each in [threads.submit(asyncio.run, in_a_thread(thread)) for thread in range(3)]:
            each.result(WITHIN)
    assert sorted(seen) == list(range(30))


async def in_another_loop(work: Callable[[], Awaitable[object]]) -> None:
    """Run something in a thread with a loop of its own, while this one goes on."""

    async def run() -> None:
        await work()

    await asyncio.to_thread(lambda: asyncio.run(run()))


@on_asyncpg
async def test_an_emit_in_one_loop_wakes_a_worker_in_another(database_url: str, table_name: str) -> None:
    outbox = Outbox(db_engine_url=database_url, table_name=table_name, poll_interval=2 * WITHIN)
    seen: list[int] = []
    listener, enough = collecting(seen, 1)
    async with outbox.running(listeners=[listener]):
        await asyncio.sleep(0.5)  # it has looked at the table and sleeps
        await in_another_loop(lambda: emitted(outbox, 1))
        await asyncio.wait_for(enough.wait(), WITHIN)
    await outbox.close()


@on_asyncpg
async def test_closing_lets_go_of_the_connections_of_that_loop_only(database_url: str, table_name: str) -> None:
    outbox = Outbox(db_engine_url=database_url, table_name=table_name)
    async with outbox.transaction() as session:
        mine = await session.scalar(text("SELECT pg_backend_pid()"))
        await in_another_loop(outbox.backlog)
        await in_another_loop(outbox.close)
        assert await session.scalar(text("SELECT pg_backend_pid()")) == mine
    async with outbox.transaction() as session:
        assert await session.scalar(text("SELECT pg_backend_pid()")) == mine
    await outbox.close()


@on_asyncpg
def test_a_given_engine_whose_pool_another_loop_uses_is_refused(database_url: str, table_name: str) -> None:
    engine = create_async_engine(database_url)
    outbox = Outbox(db_engine=engine, table_name=table_name)
    listener, _ = collecting([], 1)

    async def at_work() -> None:
        async with outbox.running(listeners=[listener]):
            pass

    async def first() -> None:
        await emitted(outbox, 1)
        with pytest.raises(WrongEventLoop, match="db_engine_url instead of db_engine"):
            await in_another_loop(lambda: emitted(outbox, 2))
        with pytest.raises(WrongEventLoop):
            await in_another_loop(at_work)
        await emitted(outbox, 3)
        await outbox.close()
        await engine.dispose()

    asyncio.run(first())

    async def second() -> None:
        await emitted(outbox, 4)  # SQLAlchemy's own rule: it may go on elsewhere once it was disposed of
        assert (await outbox.backlog()).waiting == 3
        await outbox.close()
        await engine.dispose()

    asyncio.run(second())


@on_asyncpg
def test_a_given_engine_without_a_pool_serves_every_loop(database_url: str, table_name: str) -> None:
    outbox = Outbox(db_engine=create_async_engine(database_url, poolclass=NullPool), table_name=table_name)
    for number in range(3):
        asyncio.run(emitted(outbox, number))
    assert asyncio.run(outbox.backlog()).waiting == 3


@on_asyncpg
def test_a_loop_that_was_closed_without_a_word_harms_no_other(database_url: str, table_name: str) -> None:
    outbox = Outbox(db_engine_url=database_url, table_name=table_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # its connections are nobody's
        for number in range(2):
            loop = asyncio.new_event_loop()
            loop.run_until_complete(emitted(outbox, number))
            loop.close()
        asyncio.run(emitted(outbox, 2))
        gc.collect()
    assert asyncio.run(outbox.backlog()).waiting == 3


async def test_a_transport_whose_connections_are_another_loops_is_refused(tmp_path: object) -> None:
    outbox = Outbox(db_engine_url=f"sqlite+aiosqlite:///{tmp_path}/outbox.db", transport=MemoryTransport())

    async def relaying() -> None:
        async with outbox.running(relay=True):
            pass

    async with outbox.running(relay=True):
        with pytest.raises(WrongEventLoop, match="an Outbox for each loop"):
            await in_another_loop(relaying)
    await in_another_loop(relaying)
    await outbox.close()


async def test_dead_letters_at_a_broker_are_refused_to_another_loop_while_a_worker_has_the_connection(
    tmp_path: object, rabbitmq_url: str
) -> None:
    outbox = Outbox(db_engine_url=f"sqlite+aiosqlite:///{tmp_path}/outbox.db", transport=rabbitmq_url)

    async def listed() -> None:
        assert await outbox.dead_letters.list(queue="orders") == []

    listener, _ = collecting([], 1)
    async with outbox.running(listeners=[listener]):
        await listed()
        with pytest.raises(WrongEventLoop, match="an Outbox for each loop"):
            await in_another_loop(listed)
        await listed()
    await in_another_loop(listed)
    await outbox.close()


def test_a_database_in_memory_outlives_its_loop_and_serves_one_at_a_time() -> None:
    outbox = Outbox(db_engine_url="sqlite+aiosqlite:///:memory:")
    asyncio.run(emitted(outbox, 1))

    async def second() -> None:
        await emitted(outbox, 2)
        assert (await outbox.backlog()).waiting == 2
        with pytest.raises(WrongEventLoop):
            await in_another_loop(lambda: emitted(outbox, 3))
        await outbox.close()

    asyncio.run(second())


@pytest.mark.parametrize("database_url", ["postgresql+psycopg"], indirect=True)
def test_threads_without_a_loop_need_none(database_url: str, table_name: str) -> None:
    outbox = Outbox(db_engine_url=database_url, table_name=table_name)
    asyncio.run(outbox.create_tables())
    together = threading.Barrier(4)

    def emit(number: int) -> None:
        together.wait(WITHIN)
        with outbox.transaction_sync() as session:
            outbox.emit_sync(session, "order.created", number)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(emit, range(4)))
    assert asyncio.run(outbox.backlog()).waiting == 4
    asyncio.run(outbox.close())


async def test_commits_while_a_run_ends_leave_no_connection_behind(database_url: str, table_name: str) -> None:
    outbox = Outbox(db_engine_url=database_url, table_name=table_name, poll_interval=0.2)
    listener = Listener("order.*", lambda body: None, queue="orders")

    async def run() -> None:
        async with outbox.running(listeners=[listener]):
            await asyncio.sleep(0.05)

    for _ in range(5):
        running = asyncio.create_task(run())
        while not running.done():
            await emitted(outbox, 1)
        await running
    await outbox.close()
    gc.collect()  # a connection that nothing closed would warn now, and a warning is an error here


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql+psycopg"], indirect=True)
def test_a_thread_that_waits_for_a_connection_holds_up_no_other(database_url: str, table_name: str) -> None:
    outbox = Outbox(db_engine_url=database_url, table_name=table_name)
    asyncio.run(outbox.create_tables())
    engine = create_engine(sync_url(make_url(database_url)), pool_size=1, max_overflow=0, pool_timeout=5)
    waits = threading.Event()

    class WaitingSession(Session):
        def connection(self, *arguments: object, **options: object) -> Connection:
            waits.set()
            return super().connection(*arguments, **options)  # type: ignore[arg-type]

    def emit_when_there_is_a_connection() -> None:
        with WaitingSession(engine) as session, session.begin():
            outbox.emit_sync(session, "order.created", 2)

    with ThreadPoolExecutor(1) as threads:
        with Session(engine) as session, session.begin():
            session.execute(text("SELECT 1"))  # now it has the only one
            waiting = threads.submit(emit_when_there_is_a_connection)
            assert waits.wait(WITHIN)
            outbox.emit_sync(session, "order.created", 1)
            assert not waiting.done(), "this had to wait until the other one gave up"
        waiting.result(WITHIN)
    engine.dispose()
    assert len(asyncio.run(outbox.messages())) == 2
    asyncio.run(outbox.close())
