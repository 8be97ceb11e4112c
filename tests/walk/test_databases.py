"""What an application's own database setup may look like."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import MetaData, create_engine, event, inspect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

from outbox import ConfigurationError, Outbox, SnapshotConflict, listen
from outbox.core.events import CleanedUp, Handled
from outbox.core.store import Selection
from outbox.sqlite import prepare
from outbox.testing.sql import sql_store
from tests.support.databases import on_postgresql, on_sqlite
from tests.support.observing import PATIENCE
from tests.support.outboxes import MakeOutbox
from tests.walk.strategies import Watch


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database_url)
    yield engine
    await engine.dispose()


async def emitted(outbox: Outbox) -> list[bytes]:
    return [stored.message.body for stored in await outbox.messages()]


# Making tables.


@on_postgresql
async def test_a_full_pool_does_not_keep_the_first_emit_from_making_tables(
    database_url: str, make_outbox: MakeOutbox
) -> None:
    engine = create_async_engine(database_url, pool_size=1, max_overflow=0, pool_timeout=PATIENCE)
    outbox = make_outbox(db_engine=engine)
    async with AsyncSession(engine) as session, session.begin():
        await session.execute(text("SELECT 1"))
        await outbox.emit(session, "a", 1)
    assert await emitted(outbox) == [b"1"]
    await engine.dispose()


@on_postgresql
async def test_the_first_emit_of_a_transaction_that_rolls_back_leaves_it_usable_and_no_message(
    engine: AsyncEngine, make_outbox: MakeOutbox
) -> None:
    outbox = make_outbox(db_engine=engine)
    async with AsyncSession(engine) as session:
        await outbox.emit(session, "a", 1)
        await session.execute(text("SELECT 1"))
        await session.rollback()
        await outbox.emit(session, "a", 2)
        await session.commit()
    assert await emitted(outbox) == [b"2"]


@on_postgresql
async def test_a_role_that_may_not_create_is_fine_when_the_tables_exist(
    database_url: str, engine: AsyncEngine, make_outbox: MakeOutbox, table_name: str
) -> None:
    await make_outbox().create_tables()
    role = f"role_{table_name}"
    async with engine.begin() as connection:
        await connection.execute(text(f"CREATE ROLE {role} LOGIN"))
        await connection.execute(text(f"GRANT INSERT ON {table_name} TO {role}"))
    restricted = create_async_engine(engine.url.set(username=role))
    outbox = make_outbox(db_engine=restricted)
    async with AsyncSession(restricted) as session, session.begin():
        assert await outbox.emit(session, "a", 1) is not None
    async with AsyncSession(restricted) as session:
        assert await outbox.emit(session, "a", 2, eta=timedelta(hours=1), timer_id="t") is not None
        assert await outbox.emit(session, "a", 3, eta=timedelta(hours=1), timer_id="t") is None
        await session.rollback()
    assert await emitted(make_outbox()) == [b"1"]
    await restricted.dispose()
    async with engine.begin() as connection:
        await connection.execute(text(f"DROP OWNED BY {role}"))
        await connection.execute(text(f"DROP ROLE {role}"))


@on_postgresql
async def test_postgresql_tables_are_tuned_for_a_queues_life(
    engine: AsyncEngine, make_outbox: MakeOutbox, table_name: str
) -> None:
    await make_outbox().create_tables()
    async with engine.connect() as connection:
        options = await connection.scalar(
            text("SELECT reloptions FROM pg_class WHERE oid = CAST(:name AS regclass)"), {"name": table_name}
        )
    assert "fillfactor=45" in options
    assert any(option.startswith("autovacuum_vacuum_scale_factor=") for option in options)


@on_postgresql
async def test_a_lease_is_written_in_place_without_touching_an_index(
    engine: AsyncEngine, make_outbox: MakeOutbox, table_name: str
) -> None:
    """HOT updates: no index holds what a claim, a renewal or a release changes."""
    outbox = make_outbox()

    @listen("#", queue="q")
    async def nothing(body: object) -> None: ...

    await outbox.store.queues.bind([nothing.binding])
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "a", range(20))
    await outbox.store.queues.route(100, {})
    for _ in range(3):
        async with outbox.store.feed.claim(Selection(limit=20, lease=timedelta(seconds=30), destination="q")) as claim:
            assert len(claim.attempts) == 20
    await outbox.close()  # a connection's statistics are told when it ends
    query = text("SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = :name")
    updates = hot = 0
    async with asyncio.timeout(PATIENCE):
        while updates < 20 + 3 * 2 * 20:  # the routing, and each claim and its giving back
            async with engine.connect() as connection:
                updates, hot = (await connection.execute(query, {"name": table_name})).one()
            await asyncio.sleep(0.05)
    assert updates == 20 + 3 * 2 * 20
    assert hot > 0.8 * 3 * 2 * 20  # all but those that found their page full; with an index in the way it is none


async def test_several_outboxes_share_a_database(make_outbox: MakeOutbox, table_name: str) -> None:
    first, second = make_outbox(table_name=f"{table_name}_a"), make_outbox(table_name=f"{table_name}_b")
    async with first.transaction() as session:
        await first.emit(session, "a", "first")
    async with second.transaction() as session:
        await second.emit(session, "a", "second")
        await second.emit(session, "a", "third")
    assert await emitted(first) == [b'"first"']
    assert await emitted(second) == [b'"second"', b'"third"']


@on_postgresql
async def test_tables_live_in_the_schema_they_are_told_to(
    engine: AsyncEngine, make_outbox: MakeOutbox, table_name: str
) -> None:
    schema = f"s_{table_name}"
    async with engine.begin() as connection:
        await connection.execute(text(f"CREATE SCHEMA {schema}"))
    outbox = make_outbox(schema=schema)
    handled = asyncio.Event()

    @listen("a", queue="q")
    async def listener(body: int) -> None:
        handled.set()

    async with outbox.running(listeners=[listener]):
        async with outbox.transaction() as session:
            await outbox.emit(session, "a", 1)
        await asyncio.wait_for(handled.wait(), PATIENCE)
    async with engine.connect() as connection:
        names = await connection.run_sync(lambda c: inspect(c).get_table_names(schema=schema))
    suffixes = ("", "_bindings", "_circuits", "_dead_letters", "_inbox", "_owners", "_state")
    assert sorted(names) == sorted(table_name + suffix for suffix in suffixes)
    assert (await outbox.backlog()).rows_written == 1


async def test_alembic_sees_the_tables_and_no_difference_once_they_are_there(
    engine: AsyncEngine, make_outbox: MakeOutbox, table_name: str
) -> None:
    outbox = make_outbox()
    application = MetaData()

    def ours(item: Any, name: str | None, kind: str, reflected: bool, compared: Any) -> bool:
        return kind != "table" or str(name).startswith(table_name)

    def differences(connection: Any) -> list[Any]:
        context = MigrationContext.configure(connection, opts={"include_object": ours})
        return compare_metadata(context, outbox.metadata)

    async with engine.begin() as connection:
        missing = await connection.run_sync(differences)
    assert {difference[1].name for difference in missing if difference[0] == "add_table"} == {
        table.name for table in outbox.metadata.sorted_tables
    }
    await outbox.create_tables()
    async with engine.begin() as connection:
        assert await connection.run_sync(differences) == []
    assert application.tables == {}


# Engines.


@pytest.mark.parametrize("pool", [{"poolclass": NullPool}, {"pool_pre_ping": True}])
async def test_an_engine_of_the_applications_own_does_all_the_work(
    database_url: str, make_outbox: MakeOutbox, pool: dict[str, Any]
) -> None:
    engine = create_async_engine(database_url, **pool)
    outbox = make_outbox(db_engine=engine)
    handled: asyncio.Queue[int] = asyncio.Queue()

    @listen("a", queue="q")
    async def listener(body: int, session: AsyncSession) -> None:
        await handled.put(body)

    async with outbox.running(listeners=[listener]):
        async with AsyncSession(engine) as session, session.begin():
            await outbox.emit(session, "a", 1)
        async with engine.begin() as connection:
            await outbox.emit(connection, "a", 2)
        assert sorted([await asyncio.wait_for(handled.get(), PATIENCE) for _ in range(2)]) == [1, 2]
    await engine.dispose()


async def test_an_outbox_outlives_an_event_loop(database_url: str, table_name: str) -> None:
    """A script may call asyncio.run more than once with the same outbox."""
    outbox = Outbox(db_engine_url=database_url, table_name=table_name)

    async def once(body: int) -> list[bytes]:
        async with outbox.transaction() as session:
            await outbox.emit(session, "a", body)
        found = await emitted(outbox)
        await outbox.close()
        return found

    assert await asyncio.to_thread(asyncio.run, once(1)) == [b"1"]
    assert await asyncio.to_thread(asyncio.run, once(2)) == [b"1", b"2"]


def test_a_plain_engine_is_enough_to_emit(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'plain.db'}")
    outbox = Outbox(db_engine=engine)
    with engine.begin() as connection:
        outbox.emit_sync(connection, "a", 1)
        outbox.emit_many_sync(connection, "a", [2, 3])
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM outbox_table")) == 3
    with pytest.raises(ConfigurationError, match="AsyncEngine"):
        asyncio.run(outbox.message_relay())
    engine.dispose()


def test_tables_that_another_process_makes_at_the_same_moment_are_no_error_of_the_first_emit(tmp_path: Path) -> None:
    engine, elsewhere = (create_engine(f"sqlite:///{tmp_path / 'plain.db'}") for _ in range(2))
    outbox, other = Outbox(db_engine=engine), Outbox(db_engine=elsewhere)
    created: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def create_elsewhere(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "CREATE TABLE" in statement and not created:
            created.append(statement)
            with elsewhere.begin() as at_the_same_moment:
                other.emit_sync(at_the_same_moment, "a", 0)

    with engine.begin() as connection:
        outbox.emit_sync(connection, "a", 1)
        assert created
        assert connection.scalar(text("SELECT count(*) FROM outbox_table")) == 2
    engine.dispose()
    elsewhere.dispose()


@on_postgresql
async def test_the_database_being_away_is_survived(
    database_url: str, make_outbox: MakeOutbox, engine: AsyncEngine
) -> None:
    """Every connection of the worker is cut while it works; nothing is lost and nothing happens twice."""
    outbox = make_outbox(lease=5)
    handled: list[int] = []

    @listen("a", queue="q")
    async def listener(body: int, session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))
        handled.append(body)

    async def cut() -> None:
        async with engine.connect() as connection:
            await connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE pid <> pg_backend_pid() AND datname = current_database()"
                )
            )

    async def emit(bodies: range) -> None:
        while True:
            try:
                async with outbox.transaction() as session:
                    await outbox.emit_many(session, "a", bodies)
                return
            except DBAPIError:
                await asyncio.sleep(0.05)

    async with outbox.running(listeners=[listener]):
        for start in range(0, 60, 20):
            await emit(range(start, start + 20))
            await cut()
        async with asyncio.timeout(PATIENCE):
            while set(handled) != set(range(60)) or (await _left(outbox)):
                await asyncio.sleep(0.1)
    assert await outbox.dead_letters.list() == []


async def _left(outbox: Outbox) -> int:
    try:
        backlog = await outbox.backlog()
    except DBAPIError:
        return 1
    return backlog.waiting + sum(queue.open for queue in backlog.queues)


# SQLite.


@on_sqlite
async def test_a_transaction_that_read_before_somebody_wrote_is_told_what_to_do(
    engine: AsyncEngine, make_outbox: MakeOutbox
) -> None:
    other = make_outbox()
    await other.create_tables()
    outbox = make_outbox(db_engine=engine)
    async with engine.connect() as connection:
        await connection.exec_driver_sql("BEGIN")
        await connection.exec_driver_sql(f"SELECT count(*) FROM {outbox.tables.messages.name}")
        async with other.transaction() as session:
            await other.emit(session, "a", 1)
        with pytest.raises(SnapshotConflict, match=r"transaction\(\).*prepare"):
            await outbox.emit(connection, "a", 2)


@on_sqlite
async def test_a_prepared_engine_loses_no_update(engine: AsyncEngine) -> None:
    prepare(engine)
    async with engine.begin() as connection:
        await connection.exec_driver_sql("CREATE TABLE counter (n INTEGER)")
        await connection.exec_driver_sql("INSERT INTO counter VALUES (0)")

    async def count() -> None:
        async with engine.begin() as connection:
            n = (await connection.exec_driver_sql("SELECT n FROM counter")).scalar_one()
            await asyncio.sleep(0.001)
            await connection.exec_driver_sql("UPDATE counter SET n = ?", (n + 1,))

    await asyncio.gather(*(count() for _ in range(10)))
    async with engine.begin() as connection:
        assert (await connection.exec_driver_sql("SELECT n FROM counter")).scalar_one() == 10


@pytest.fixture(params=["url", "engine"])
def memory(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    url = "sqlite+aiosqlite:///:memory:"
    yield {"db_engine_url": url} if request.param == "url" else {"db_engine": create_async_engine(url)}


async def test_a_database_in_memory_keeps_every_promise_of_one_process(memory: dict[str, Any]) -> None:
    outbox = Outbox(poll_interval=0.05, **memory)
    handled: asyncio.Queue[int] = asyncio.Queue()
    open_transactions = 0

    @listen("a", queue="q")
    async def listener(body: int, session: AsyncSession) -> None:
        nonlocal open_transactions
        open_transactions += 1
        assert open_transactions == 1, "one connection, one transaction"
        await session.execute(text("SELECT 1"))
        await outbox.emit(session, "b", body)
        await asyncio.sleep(0.001)
        open_transactions -= 1

    @listen("b", queue="follow")
    async def follow(body: int) -> None:
        await handled.put(body)

    async with outbox.running(listeners=[listener, follow]):
        for n in range(30):
            async with outbox.transaction() as session:
                await outbox.emit(session, "a", n)
            with pytest.raises(ZeroDivisionError):
                async with outbox.transaction() as session:
                    await outbox.emit(session, "a", -1)
                    await asyncio.sleep(0.001)
                    raise ZeroDivisionError
        assert sorted([await asyncio.wait_for(handled.get(), PATIENCE) for _ in range(30)]) == list(range(30))
        await asyncio.sleep(0.2)
        assert handled.empty()
    await outbox.close()
    if "db_engine" in memory:
        await memory["db_engine"].dispose()


async def test_work_of_a_store_in_memory_is_no_transaction_of_a_session_beside_it(memory: dict[str, Any]) -> None:
    """While the store works, the one connection says that a transaction is open. It is not the session's own: its end
    is no rollback."""
    outbox = Outbox(poll_interval=0.05, **memory)
    store = sql_store(outbox.store)
    runs, ended = [], asyncio.Event()

    @listen("a", queue="q")
    async def listener(body: int, session: AsyncSession) -> None:
        runs.append(body)
        for _ in range(3):
            before = asyncio.create_task(store.runner.look(lambda _: time.sleep(0.06)))
            await asyncio.sleep(0.02)
            executing = asyncio.create_task(session.execute(text("SELECT 1")))
            await asyncio.sleep(0.02)
            behind = asyncio.create_task(store.runner.look(lambda _: time.sleep(0.04)))  # when SELECT has its cursor
            await asyncio.gather(before, executing, behind)
            await session.execute(text("SELECT 2"))
        await outbox.emit(session, "unroutable", body)
        ended.set()

    async with outbox.running(listeners=[listener]):
        async with outbox.transaction() as session:
            await outbox.emit(session, "a", 1)
        await asyncio.wait_for(ended.wait(), PATIENCE)
    assert len(runs) == 1
    assert await emitted(outbox) == [b"1"]
    await outbox.close()
    if "db_engine" in memory:
        await memory["db_engine"].dispose()


# Cleaning up.


async def test_done_messages_are_cleaned_up_while_nothing_flows(make_outbox: MakeOutbox) -> None:
    watch = Watch()
    outbox = make_outbox(clean_up_after=timedelta(milliseconds=300), poll_interval=0.05, observers=[watch])

    @listen("a", queue="q")
    async def listener(body: int) -> None: ...

    async with outbox.running(listeners=[listener]):
        began = time.monotonic()
        async with outbox.transaction() as session:
            await outbox.emit(session, "a", 1)
        assert await watch.wait_for(CleanedUp) == [CleanedUp("sent", 1)]
        assert time.monotonic() - began > 0.295  # SQLite's clock counts in milliseconds
    assert len(watch.of(Handled)) == 1
    assert await outbox.messages() == []


async def test_a_message_that_nobody_takes_expires_while_nothing_flows(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox(poll_interval=0.05)

    @listen("a", queue="q")
    async def listener(body: int) -> None: ...

    async with outbox.running(listeners=[listener]):
        async with outbox.transaction() as session:
            await outbox.emit(session, "lonely", 1, expiration=0.2)
        async with asyncio.timeout(PATIENCE):
            while not await outbox.dead_letters.list():
                await asyncio.sleep(0.05)
    [letter] = await outbox.dead_letters.list()
    assert (letter.reason, letter.queue) == ("expired", None)
