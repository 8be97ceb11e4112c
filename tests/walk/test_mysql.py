"""What only MariaDB and MySQL do: locks beside the rows that are meant, transactions that end by themselves, texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.util import await_only

from outbox import ConfigurationError, Outbox, Reject, TransactionError, listen
from outbox.core.attempt import Done, Outcome, RetryIn
from outbox.core.binding import Binding
from outbox.core.message import NOW, Schedule
from outbox.core.store import Selection
from outbox.stores.mysql.runner import MysqlRunner
from outbox.testing.sql import sql_store
from outbox.testing.store.cases import LEASE, claimed, emit, message, queued
from tests.support.commands import SOON, Command, until
from tests.support.outboxes import MakeOutbox

AT_ONCE = 8.0  # seconds: less than a statement of ours waits for a lock

BOTH_NAMES = pytest.mark.parametrize("database_url", ["mariadb+asyncmy", "mysql+asyncmy"], indirect=True)
ONE_NAME = pytest.mark.parametrize("database_url", ["mariadb+asyncmy"], indirect=True)


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database_url)
    yield engine
    await engine.dispose()


async def stop_renewing(claim: Any) -> None:
    """Let a claim renew its leases no more."""
    await claim.renew_once([each.id for each in claim.attempts], timedelta(0))


@BOTH_NAMES
async def test_a_small_table_is_not_read_as_a_whole_by_what_ends_attempts(
    engine: AsyncEngine, outbox: Outbox, table_name: str
) -> None:
    """It would wait for the producer, as long as its transaction is open."""
    store = outbox.store
    await queued(engine, store, *(message(body=str(n).encode()) for n in range(4)))
    async with engine.connect() as producer:
        await producer.run_sync(store.writing.write, *store.writing.insert([message()], NOW))
        async with (
            asyncio.timeout(AT_ONCE),
            store.feed.claim(Selection(limit=4, lease=LEASE, destination="q")) as claim,
        ):
            first, second, third, fourth = claim.attempts
            await claim.renew_once([each.id for each in claim.attempts], LEASE)
            outcomes: dict[int, Outcome] = {
                first.id: Done(),
                second.id: Done(),
                third.id: RetryIn(timedelta(hours=1), "later"),
            }
            assert await claim.settle(outcomes) == frozenset()
            async with engine.begin() as listener:
                left = await listener.run_sync(store.queues.complete, [claim.lease_on(fourth)])
            assert left == {fourth.id}
        await producer.rollback()


@ONE_NAME
async def test_a_claim_searches_its_index_and_sorts_nothing(engine: AsyncEngine, outbox: Outbox) -> None:
    store = outbox.store
    await store.open()
    asked: list[tuple[str, Any]] = []

    def note(_: Connection, __: object, statement: str, parameters: Any, *___: object) -> None:
        if "SKIP LOCKED" in statement:
            asked.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        await emit(engine, store, *(message() for _ in range(3)))
        await store.queues.bind([Binding("q", "#")])
        assert (await store.queues.route(100, {})).taken == 3
        assert len(await claimed(store)) == 3
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    claims = [each for each in asked if "due_at" in each[0] and "LIMIT" in each[0]]
    assert claims
    async with engine.connect() as connection:
        for statement, parameters in claims:
            plan = (await connection.exec_driver_sql(f"EXPLAIN {statement}", parameters)).mappings().first()
            assert plan is not None
            assert (plan["type"], plan["key"]) == ("range", f"{outbox.tables.messages.name}_claim")
            assert "filesort" not in plan["Extra"] and "temporary" not in plan["Extra"]


@ONE_NAME
async def test_after_a_deadlock_nothing_of_the_transaction_is_committed(
    engine: AsyncEngine, outbox: Outbox, table_name: str
) -> None:
    """The server has rolled back all of it, and the next statement would begin another one."""
    async with engine.begin() as connection:
        await connection.execute(text(f"CREATE TABLE {table_name}_pair (id INT PRIMARY KEY, n INT) ENGINE=InnoDB"))
        await connection.execute(text(f"INSERT INTO {table_name}_pair SELECT seq, 0 FROM seq_1_to_200"))
    await outbox.create_tables()

    async def change(connection: AsyncConnection | AsyncSession, row: str) -> None:
        await connection.execute(text(f"UPDATE {table_name}_pair SET n = n + 1 WHERE id {row}"))

    with pytest.raises(TransactionError, match="keeps nothing"):
        async with outbox.transaction() as session, engine.connect() as other:
            await outbox.emit(session, "order.created", {})
            await change(session, "= 1")
            await change(other, "BETWEEN 2 AND 200")  # who has changed less is rolled back
            waits = asyncio.create_task(change(session, "= 2"))
            await asyncio.sleep(0.5)
            await change(other, "= 1")
            with pytest.raises(DBAPIError, match="1213"):
                await waits
            await other.rollback()
            await change(session, "= 3")
    async with engine.connect() as connection:
        assert await connection.scalar(text(f"SELECT SUM(n) FROM {table_name}_pair")) == 0
    assert (await outbox.store.inspection.backlog()).waiting == 0


@BOTH_NAMES
async def test_the_first_emit_commits_nothing_of_its_transaction(
    engine: AsyncEngine, make_outbox: MakeOutbox, table_name: str
) -> None:
    """To make tables on the caller's connection would."""
    async with engine.begin() as connection:
        await connection.execute(text(f"CREATE TABLE {table_name}_mine (id INT PRIMARY KEY) ENGINE=InnoDB"))
    outbox = make_outbox()
    async with AsyncSession(engine) as session:
        await session.execute(text(f"INSERT INTO {table_name}_mine VALUES (1)"))
        await outbox.emit(session, "order.created", {})
        await session.rollback()
    async with engine.connect() as connection:
        assert await connection.scalar(text(f"SELECT COUNT(*) FROM {table_name}_mine")) == 0
    assert (await outbox.store.inspection.backlog()).waiting == 0


@BOTH_NAMES
async def test_texts_are_compared_byte_by_byte_with_their_spaces(engine: AsyncEngine, outbox: Outbox) -> None:
    store = outbox.store
    await store.open()
    async with engine.begin() as connection:
        for name in ("a", "a ", "A", "ä", "a\u0308"):
            assert await connection.run_sync(store.writing.write, *store.inbox.remember("q", name)) == 1
            assert await connection.run_sync(store.writing.write, *store.inbox.remember("q", name)) == 0
            new = await connection.run_sync(store.inbox.remember_all, f"{name}q", [name, f"{name} "])
            assert new == {name, f"{name} "}
    timer = timedelta(hours=1)
    for name in ("t", "t ", "T"):
        assert await emit(engine, store, message(), schedule=Schedule(due=timer, timer_id=name)) == 1
        assert await emit(engine, store, message(), schedule=Schedule(due=timer, timer_id=name)) == 0


@pytest.mark.parametrize("zone", ["+05:30", "SYSTEM", "-11:00"])
@ONE_NAME
async def test_times_are_utc_whatever_the_sessions_time_zone_is(database_url: str, outbox: Outbox, zone: str) -> None:
    elsewhere = create_async_engine(database_url, connect_args={"init_command": f"SET time_zone = '{zone}'"})
    await emit(elsewhere, outbox.store, message(body=b"now"))
    await emit(elsewhere, outbox.store, message(body=b"later"), schedule=Schedule(due=timedelta(minutes=5)))
    assert [each.message.body for each in await claimed(outbox.store, destination=None)] == [b"now"]
    first, second = await outbox.store.inspection.list_messages()
    assert timedelta(minutes=4, seconds=50) < second.due_at - first.due_at < timedelta(minutes=5, seconds=50)
    async with outbox.store.feed.claim(Selection(limit=1, lease=LEASE)) as claim, elsewhere.begin() as connection:
        leases = [claim.lease_on(each) for each in claim.attempts]
        assert len(await connection.run_sync(outbox.store.queues.complete, leases)) == 1
    await elsewhere.dispose()


@pytest.mark.parametrize("found_rows", [True, False])
@ONE_NAME
async def test_counted_rows_mean_the_same_whatever_the_connection_counts(
    database_url: str, make_outbox: MakeOutbox, found_rows: bool
) -> None:
    from asyncmy.constants import CLIENT

    flags = CLIENT.MULTI_STATEMENTS | (CLIENT.FOUND_ROWS if found_rows else 0)
    engine = create_async_engine(database_url, connect_args={"client_flag": flags})
    store = make_outbox(db_engine=engine).store
    timer = Schedule(due=timedelta(hours=1), timer_id="t")
    assert [await emit(engine, store, message(), schedule=timer) for _ in range(2)] == [1, 0]
    async with engine.begin() as connection:
        assert [await connection.run_sync(store.writing.cancel_timer, "t") for _ in range(2)] == [True, False]
        assert [await connection.run_sync(store.writing.write, *store.inbox.remember("q", "1")) for _ in "ab"] == [1, 0]
    await queued(engine, store, message())
    async with store.feed.claim(Selection(limit=1, lease=LEASE, destination="q")) as claim:
        assert await claim.settle({each.id: RetryIn(timedelta(0), "") for each in claim.attempts}) == frozenset()
    await engine.dispose()


@ONE_NAME
async def test_another_engine_is_refused(engine: AsyncEngine, outbox: Outbox, table_name: str) -> None:
    await outbox.create_tables()
    async with engine.begin() as connection:
        await connection.execute(text(f"ALTER TABLE {table_name} ENGINE=Aria"))
    [difference] = await outbox.check_tables()
    assert "Aria" in difference.what and difference.breaks
    with pytest.raises(ConfigurationError, match="Aria"):
        await outbox.create_tables()
    async with engine.begin() as connection:
        await connection.exec_driver_sql(difference.mend)
    assert await outbox.check_tables() == []


@ONE_NAME
async def test_connections_that_the_server_has_ended_are_replaced(engine: AsyncEngine, outbox: Outbox) -> None:
    """As it does after `wait_timeout`; the next piece of work finds out."""
    store = outbox.store
    await emit(engine, store, message())
    assert len(await claimed(store, destination=None)) == 1
    async with engine.begin() as connection:
        own = await connection.scalar(text("SELECT CONNECTION_ID()"))
        others = await connection.execute(text("SELECT ID FROM information_schema.PROCESSLIST WHERE USER = 'outbox'"))
        for (id,) in others.all():
            if id != own:
                with suppress(DBAPIError):  # it has gone by itself
                    await connection.exec_driver_sql(f"KILL {id}")
    assert len(await claimed(store, destination=None)) == 1


@ONE_NAME
async def test_a_deadlock_of_the_stores_own_is_run_again(outbox: Outbox) -> None:
    await outbox.store.open()
    runner: Any = sql_store(outbox.store).runner
    assert isinstance(runner, MysqlRunner)
    tries: list[int] = []

    def work(connection: Connection) -> int:
        tries.append(1)
        if len(tries) < 3:
            number = (1213, 1205)[len(tries) - 1]
            connection.exec_driver_sql(f"SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = {number}, MESSAGE_TEXT = 'lost'")
        return len(tries)

    assert await runner.transact(work) == 3


@ONE_NAME
async def test_a_server_that_refuses_writes_is_named(engine: AsyncEngine, outbox: Outbox) -> None:
    await outbox.create_tables()
    async with engine.connect() as connection:
        await connection.exec_driver_sql("SET SESSION TRANSACTION READ ONLY")
        await connection.commit()
        with pytest.raises(TransactionError, match="takes no writes"):
            await outbox.emit(connection, "order.created", {})
        await connection.rollback()
        await connection.exec_driver_sql("SET SESSION TRANSACTION READ WRITE")


@ONE_NAME
async def test_everything_works_under_the_rights_of_its_role(
    mariadb_database: str, command: Command, table_name: str
) -> None:
    url = f"mariadb+asyncmy://{mariadb_database.partition('://')[2]}"
    kinds = ("producer", "relay", "worker", "operator")
    all_rights = Outbox(db_engine_url=url, table_name=table_name)
    await all_rights.create_tables()
    ran = await command.run("tables", "sql", "--roles", "--role-prefix", table_name)
    users = {kind: f"{table_name}_{kind}_user" for kind in kinds}
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        bare = "\n".join(line for line in ran.stdout.splitlines() if not line.startswith("--"))
        logins = [
            f"CREATE USER {user}@'%' IDENTIFIED BY 'u'; GRANT {table_name}_{kind} TO {user}@'%'; "
            f"SET DEFAULT ROLE {table_name}_{kind} FOR {user}@'%'"
            for kind, user in users.items()
        ]
        for statement in filter(str.strip, ";".join([bare, *logins]).split(";")):
            await connection.execute(text(statement))
    of_role = {
        kind: Outbox(
            db_engine_url=make_url(url).set(username=user, password="u").render_as_string(hide_password=False),
            table_name=table_name,
            poll_interval=0.2,
        )
        for kind, user in users.items()
    }
    handled: asyncio.Queue[Any] = asyncio.Queue()

    @listen("order.*", queue="ledger", retry_delays=(0.05,))
    async def ledger(body: int, session: AsyncSession) -> None:
        await handled.put(body)

    @listen("order.refused", queue="bills")
    async def bills(body: int) -> None:
        raise Reject("never")

    async with of_role["worker"].running(listeners=[ledger, bills]):
        async with of_role["producer"].transaction() as session:
            await of_role["producer"].emit(session, "order.created", 1)
            await of_role["producer"].emit(session, "order.refused", 2)
        assert {await asyncio.wait_for(handled.get(), SOON) for _ in range(2)} == {1, 2}
        [letter] = await until(of_role["operator"].dead_letters.list)
    assert letter.queue == "bills"
    assert await of_role["operator"].dead_letters.replay([letter.id]) == 1
    assert await of_role["operator"].check_tables() == []
    assert (await of_role["relay"].store.queues.route(10, {})).taken == 0
    with pytest.raises(DBAPIError, match="denied"):
        async with of_role["producer"].transaction() as session:
            await session.execute(text(f"DELETE FROM {table_name}"))
    for outbox in (*of_role.values(), all_rights):
        await outbox.close()
    async with engine.begin() as connection:
        for kind, user in users.items():
            await connection.execute(text(f"DROP USER {user}@'%'"))
            await connection.exec_driver_sql(f"DROP ROLE {table_name}_{kind}")
    await engine.dispose()


@ONE_NAME
async def test_a_settlement_that_waited_for_a_lock_beyond_its_lease_writes_nothing(
    engine: AsyncEngine, outbox: Outbox, table_name: str
) -> None:
    """The server's time of a statement is that of its beginning; the lease ends by the clock."""
    store = outbox.store
    await queued(engine, store, message())
    selection = Selection(limit=1, lease=timedelta(seconds=2), destination="q")
    async with store.feed.claim(selection) as claim, engine.connect() as foreign:
        ids = [each.id for each in claim.attempts]
        await stop_renewing(claim)
        await foreign.execute(text(f"SELECT id FROM {table_name} FOR UPDATE"))
        settling = asyncio.create_task(claim.settle({id: Done() for id in ids}))
        await asyncio.sleep(2.5)
        await foreign.rollback()
        assert await settling == frozenset(ids)
    assert len(await store.inspection.list_messages()) == 1


@ONE_NAME
async def test_a_claim_that_looks_for_more_holds_up_no_producer(engine: AsyncEngine, outbox: Outbox) -> None:
    """At a stricter level of isolation it would lock the gap behind the last message, where others are inserted."""
    store: Any = outbox.store
    await emit(engine, store, *(message() for _ in range(3)))
    selecting = store.feed.selecting

    def work(connection: Connection) -> int:
        found = selecting.search(connection, selecting.due, Selection(limit=10, lease=LEASE))
        await_only(asyncio.wait_for(emit(engine, store, message()), AT_ONCE))
        return len(found)

    assert await store.runner.transact(work) == 3


@ONE_NAME
async def test_many_messages_take_few_statements(engine: AsyncEngine, outbox: Outbox) -> None:
    store = outbox.store
    await queued(engine, store, message())
    await claimed(store)
    sent: list[str] = []

    def note(_: Connection, __: object, statement: str, *___: object) -> None:
        sent.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    await emit(engine, store, *(message(body=str(n).encode()) for n in range(200)))
    assert len(sent) == 1, "one INSERT"
    sent.clear()
    assert (await store.queues.route(500, {})).taken == 200
    assert len(sent) <= 3, "find and lock, read the bindings, move"
    sent.clear()
    async with store.feed.claim(Selection(limit=200, lease=LEASE, destination="q")) as claim:
        assert len(sent) == 3, "find and lock, lease, read"
        sent.clear()
        assert await claim.settle({each.id: Done() for each in claim.attempts}) == frozenset()
    assert len(sent) == 2, "lock, delete"
    event.remove(Engine, "before_cursor_execute", note)
