"""The whole walk through PgBouncer in transaction mode, with fewer connections to PostgreSQL than listeners at work."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from urllib.parse import urlsplit

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import ConfigurationError, Message, Outbox, Reject, listen
from outbox.stores.postgresql.connection import UNPREPARED
from outbox.testing.servers import PgBouncer
from tests.support.commands import Command, until
from tests.support.outboxes import MakeOutbox

from .shops import Shop, effects, emptied, no_surprises

POOL_SIZE = 3
SOON = 60.0  # seconds


@pytest.fixture(params=["asyncpg", "psycopg"])
def driver(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def with_driver(pgbouncer: PgBouncer, driver: str) -> str:
    return pgbouncer.url.replace("postgresql", f"postgresql+{driver}", 1)


@pytest.fixture
def database_url(driver: str, pgbouncer: PgBouncer) -> str:
    """The pooler, where other tests have the database."""
    return with_driver(pgbouncer, driver)


@pytest.fixture
def own_pgbouncer(postgresql_url: str) -> Iterator[PgBouncer]:
    """A pooler that no other test has used or will use."""
    settings = {"stats_users": urlsplit(postgresql_url).username or ""}
    with PgBouncer(postgresql_url, pool_size=POOL_SIZE, settings=settings) as pooler:
        yield pooler


@pytest.fixture
async def engine(database_url: str, driver: str) -> AsyncIterator[AsyncEngine]:
    """An application's own engine, made as the documentation asks."""
    engine = create_async_engine(database_url, connect_args=dict(UNPREPARED[driver]))
    yield engine
    await engine.dispose()


async def held(engine: AsyncEngine, stack: AsyncExitStack) -> AsyncConnection:
    """One of the pooler's connections, taken for as long as the stack is open."""
    connection = await stack.enter_async_context(engine.connect())
    await connection.execute(text("SELECT 1"))
    return connection


# The walk.


async def test_more_listeners_than_connections_handle_every_message_once(
    make_outbox: MakeOutbox, table_name: str
) -> None:
    outbox = make_outbox(lease=60)
    seen: Counter[int] = Counter()
    async with outbox.transaction() as session:
        await session.execute(text(f"CREATE TABLE {table_name}_effects (body integer)"))

    @listen("order.*", queue="ledger", concurrency=10)
    async def ledger(body: int, session: AsyncSession) -> None:
        await session.execute(text(f"INSERT INTO {table_name}_effects VALUES (:body)"), {"body": body})
        await outbox.emit(session, "booked", body)

    @listen("order.*", queue="in_a_thread", concurrency=10)
    def in_a_thread(body: int, session: Session) -> None:
        session.execute(text(f"INSERT INTO {table_name}_effects VALUES (-1 - :body)"), {"body": body})

    @listen("booked", queue="journal")
    async def journal(body: int) -> None:
        seen[body] += 1

    async with outbox.running(listeners=[ledger, in_a_thread, journal]):
        for body in range(0, 60, 10):
            async with outbox.transaction() as session:
                await outbox.emit_many(session, "order.created", range(body, body + 10))
        await emptied(outbox)
    assert seen == Counter(dict.fromkeys(range(60), 1))
    async with outbox.transaction() as session:
        rows = await session.execute(text(f"SELECT body FROM {table_name}_effects"))
        assert sorted(rows.scalars()) == list(range(-60, 60))


async def test_failures_are_retried_then_dead_and_replayed(outbox: Outbox) -> None:
    mended = asyncio.Event()
    handled: Counter[int] = Counter()

    @listen("a", queue="q", retry_delays=(0.05,))
    async def listener(body: int, session: AsyncSession) -> None:
        handled[body] += 1
        if not mended.is_set():
            raise Reject("never") if body == 1 else ConnectionError("not now")

    async with outbox.running(listeners=[listener]):
        async with outbox.transaction() as session:
            await outbox.emit_many(session, "a", [1, 2])

        async def both_dead() -> bool:
            return len(await outbox.dead_letters.list()) == 2

        await until(both_dead)
        letters = {letter.message.body: letter for letter in await outbox.dead_letters.list()}
        assert (letters[b"1"].reason, letters[b"2"].reason) == ("rejected", "exhausted")
        assert handled == {1: 1, 2: 2}
        mended.set()
        await outbox.dead_letters.replay([letter.id for letter in letters.values()])
        await until(lambda: handled == {1: 2, 2: 3})
        await emptied(outbox)
    assert await outbox.dead_letters.list() == []


async def test_timers_wait_for_their_time_and_can_be_cancelled(outbox: Outbox) -> None:
    fired: list[str] = []

    @listen("timer", queue="q")
    async def listener(body: str) -> None:
        fired.append(body)

    async with outbox.running(listeners=[listener]):
        async with outbox.transaction() as session:
            later = timedelta(hours=1)
            assert await outbox.emit(session, "timer", "cancelled", eta=later, timer_id="a")
            assert await outbox.emit(session, "timer", "second", eta=later, timer_id="a") is None
            assert await outbox.emit(session, "timer", "due", eta=timedelta(seconds=0.5), timer_id="b")
        async with outbox.transaction() as session:
            assert await outbox.cancel_timer(session, "a")
        await until(lambda: fired)
        await emptied(outbox)
    assert fired == ["due"]
    assert await outbox.messages() == []


async def test_a_relay_publishes_each_message_once_and_cleans_up(make_outbox: MakeOutbox) -> None:
    published: list[int] = []

    async def publish(message: Message) -> None:
        published.append(int(message.body))

    outbox = make_outbox(transport=publish, clean_up_after=timedelta(milliseconds=300), poll_interval=0.05)
    async with outbox.running(relay=True):
        async with outbox.transaction() as session:
            await outbox.emit_many(session, "a", range(50))
        await until(lambda: len(published) >= 50)

        async def cleaned_up() -> bool:
            return not await outbox.messages()

        await until(cleaned_up)
    assert sorted(published) == list(range(50))


async def test_an_application_without_an_event_loop_emits(
    outbox: Outbox, pgbouncer: PgBouncer, table_name: str
) -> None:
    url = pgbouncer.url.replace("postgresql", "postgresql+psycopg", 1)
    plain = create_engine(url, connect_args=dict(UNPREPARED["psycopg"]))
    emitting = Outbox(db_engine=plain, table_name=table_name)
    for body in range(10):
        with Session(plain) as session, session.begin():
            emitting.emit_sync(session, "a", body)
    plain.dispose()
    assert (await outbox.backlog()).waiting == 10


# Processes.


@pytest.mark.parametrize("driver", ["asyncpg"], indirect=True)
@pytest.mark.parametrize("moment", ["listener", "after the claiming statement", "before routing"])
async def test_a_worker_killed_behind_the_pooler_loses_nothing_and_repeats_no_effect(
    moment: str,
    outbox: Outbox,
    shop: Shop,
) -> None:
    shop.run("produce", "0", "40", "10")
    doomed = shop.start("worker", DIE_AT=moment)
    assert await asyncio.to_thread(doomed.wait, SOON) == -signal.SIGKILL
    shop.start("worker")
    await emptied(outbox)
    assert await effects(outbox, shop) == Counter(dict.fromkeys(range(40), 1))
    assert set(shop.journalled()) == set(range(40))
    assert await outbox.dead_letters.list() == []


async def test_workers_behind_the_pooler_share_the_work_and_stop_in_good_order(
    outbox: Outbox,
    shop: Shop,
) -> None:
    workers = [shop.start("worker", "ledger", SHOP_LEASE="60") for _ in range(2)]
    shop.run("produce", "0", "200", "20")
    with no_surprises(shop):
        await emptied(outbox)
        shop.stop()
    assert [worker.returncode for worker in workers] == [0, 0]
    assert await effects(outbox, shop) == Counter(dict.fromkeys(range(200), 1))


async def test_a_pooler_that_crashes_and_comes_back_loses_nothing(
    driver: str, own_pgbouncer: PgBouncer, make_outbox: MakeOutbox
) -> None:
    outbox = make_outbox(db_engine_url=with_driver(own_pgbouncer, driver), lease=2)
    handled: Counter[int] = Counter()

    @listen("a", queue="q")
    async def listener(body: int, session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))
        handled[body] += 1

    async with outbox.running(listeners=[listener]):
        for first in range(0, 60, 20):
            async with outbox.transaction() as session:
                await outbox.emit_many(session, "a", range(first, first + 20))
            await until(lambda wanted=first + 1: len(handled) >= wanted)  # type: ignore[misc]
            own_pgbouncer.kill()
            own_pgbouncer.start()
        await until(lambda: set(handled) == set(range(60)))
        await emptied(outbox)
    assert await outbox.dead_letters.list() == []


async def test_the_command_line_works_behind_the_pooler(command: Command, outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        await outbox.emit(session, "a", 1)
    ran = await command.run("status", "--json")
    assert (ran.code, ran.document["waiting"]) == (0, 1)


# What a pooler cannot carry.


async def test_nothing_is_left_on_the_connections_that_others_use_next(
    make_outbox: MakeOutbox, own_pgbouncer: PgBouncer, driver: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = with_driver(own_pgbouncer, driver)
    outbox = make_outbox(db_engine_url=url)
    handled: list[int] = []

    @listen("a", queue="q", retry_delays=(0.05,))
    async def listener(body: int, session: AsyncSession) -> None:
        if body not in handled:
            handled.append(body)
            raise ConnectionError("once more")

    with caplog.at_level(logging.INFO, "outbox"):
        async with outbox.running(listeners=[listener]):
            async with outbox.transaction() as session:
                await outbox.emit_many(session, "a", range(20))
            await until(lambda: "wake-ups do not come through the pooler" in caplog.text)
            await emptied(outbox)
        await outbox.close()
    assert len(handled) == 20
    engine = create_async_engine(url, connect_args=dict(UNPREPARED[driver]))
    async with AsyncExitStack() as stack:
        connections = [await held(engine, stack) for _ in range(POOL_SIZE)]
        found = [(await connection.execute(text(TRACES))).one()._asdict() for connection in connections]
    await engine.dispose()
    assert len({traces.pop("server") for traces in found}) == POOL_SIZE
    assert [any(traces.values()) for traces in found] == [False] * POOL_SIZE, found


# The pooler itself sets the encoding that a client asked for.
TRACES = """
    SELECT pg_backend_pid() AS server,
        (SELECT count(*) FROM pg_listening_channels()) AS listening,
        (SELECT count(*) FROM pg_prepared_statements) AS prepared,
        (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()) AS locks,
        (SELECT count(*) FROM pg_settings WHERE source = 'session' AND name <> 'client_encoding') AS settings,
        (SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema()) AS temporary
"""


async def test_a_message_of_another_process_is_found_by_polling(make_outbox: MakeOutbox) -> None:
    worker, emitter = make_outbox(), make_outbox()
    handled: list[int] = []

    @listen("a", queue="q")
    async def listener(body: int) -> None:
        handled.append(body)

    async with worker.running(listeners=[listener]):
        for body in range(3):
            async with emitter.transaction() as session:
                await emitter.emit(session, "a", body)
            await until(lambda wanted=body + 1: len(handled) == wanted)  # type: ignore[misc]


async def test_a_process_without_the_pooler_is_woken_by_one_behind_it(
    driver: str, postgresql_url: str, make_outbox: MakeOutbox
) -> None:
    emitter = make_outbox()
    direct = make_outbox(db_engine_url=postgresql_url.replace("postgresql", f"postgresql+{driver}", 1))
    await direct.create_tables()
    for _ in range(2):  # the first may end because whoever begins to listen looks once
        waiting = asyncio.create_task(direct.store.feed.wait(600))
        async with asyncio.timeout(SOON):
            while not waiting.done():
                async with emitter.transaction() as session:
                    await emitter.emit(session, "a", 1)
                await asyncio.sleep(0.1)


# Engines of the application's own.


async def test_an_engine_made_as_the_documentation_asks_does_all_the_work(
    make_outbox: MakeOutbox, engine: AsyncEngine
) -> None:
    outbox = make_outbox(db_engine=engine, lease=60)
    handled: Counter[int] = Counter()

    @listen("a", queue="q")
    async def listener(body: int, session: AsyncSession) -> None:
        handled[body] += 1

    async def emit(body: int) -> None:
        async with AsyncSession(engine) as session, session.begin():
            await outbox.emit(session, "a", body)

    async with outbox.running(listeners=[listener]):
        await asyncio.gather(*map(emit, range(30)))
        await emptied(outbox)
    assert handled == Counter(dict.fromkeys(range(30), 1))


async def test_an_engine_that_keeps_prepared_statements_is_told_what_to_set(
    make_outbox: MakeOutbox, own_pgbouncer: PgBouncer, driver: str
) -> None:
    await make_outbox().create_tables()
    careless = create_async_engine(with_driver(own_pgbouncer, driver))
    careful = create_async_engine(with_driver(own_pgbouncer, driver), connect_args=dict(UNPREPARED[driver]))
    outbox = make_outbox(db_engine=careless)

    async def emit_on_every_connection() -> None:
        async with AsyncExitStack() as stack:
            for connection in [await held(careful, stack) for _ in range(POOL_SIZE)]:
                await connection.rollback()  # this one is free now, and no other
                for _ in range(10):  # psycopg prepares what it has executed five times
                    async with AsyncSession(careless) as session, session.begin():
                        await outbox.emit(session, "a", 1)
                await connection.execute(text("SELECT 1"))

    if version_of(own_pgbouncer) >= (1, 21):  # it knows by itself which connection knows which statement
        await emit_on_every_connection()
    else:
        with pytest.raises(ConfigurationError) as raised:
            await emit_on_every_connection()
        assert f"connect_args={dict(UNPREPARED[driver])}" in str(raised.value)
    await careless.dispose()
    await careful.dispose()


def version_of(pgbouncer: PgBouncer) -> tuple[int, ...]:
    with psycopg.connect(f"{pgbouncer.url.rpartition('/')[0]}/pgbouncer", autocommit=True) as console:
        row = console.execute("SHOW VERSION").fetchone()
    assert row is not None
    return tuple(map(int, row[0].removeprefix("PgBouncer ").split(".")[:2]))


async def test_first_emits_need_no_further_connection_where_the_tables_exist(
    make_outbox: MakeOutbox, engine: AsyncEngine
) -> None:
    await make_outbox().create_tables()
    outbox = make_outbox(db_engine=engine)
    async with AsyncExitStack() as stack:
        connections = [await held(engine, stack) for _ in range(POOL_SIZE)]
        for connection in connections:
            await outbox.emit(connection, "a", 1)
        for connection in connections:
            await connection.commit()
    assert (await make_outbox().backlog()).waiting == POOL_SIZE
