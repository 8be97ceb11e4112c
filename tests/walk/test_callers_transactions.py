"""Nothing counts as committed that the database did not commit: `transaction()`, `@transactional`, hooks and emit."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import NotAtomicWarning, Outbox, TransactionError
from outbox.adapters import sync_url
from outbox.sqlite import prepare
from tests.support.databases import on_postgresql, on_sqlite

from .strategies import Effects


@pytest.fixture
async def effects(outbox: Outbox, table_name: str) -> Effects:
    effects = Effects(outbox, table_name)
    await effects.create()
    await outbox.create_tables()
    return effects


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """One of the application's own."""
    engine = create_async_engine(database_url)
    yield engine
    await engine.dispose()


async def fail(session: AsyncSession) -> None:
    """A statement fails, and the caller goes on."""
    with pytest.raises(DBAPIError):
        await session.execute(text("SELECT nothing FROM nowhere"))


def fail_plainly(session: Session) -> None:
    with pytest.raises(DBAPIError):
        session.execute(text("SELECT nothing FROM nowhere"))


async def nothing(outbox: Outbox, effects: Effects) -> bool:
    return not await effects.all() and not await outbox.messages()


@on_postgresql
async def test_a_transaction_in_which_an_error_was_swallowed_does_not_return(outbox: Outbox, effects: Effects) -> None:
    called: list[str] = []

    @outbox.transactional
    async def in_loop(session: AsyncSession) -> None:
        await outbox.emit(session, "order.created", 1)
        outbox.after_commit(session, lambda: called.append("hook"))
        await session.execute(effects.write("order"))
        await fail(session)

    @outbox.transactional
    def in_thread(session: Session) -> None:
        outbox.emit_sync(session, "order.created", 1)
        outbox.after_commit(session, lambda: called.append("hook"))
        fail_plainly(session)

    with pytest.raises(TransactionError, match=r"nowhere.* does not exist.*session\.begin_nested\(\)"):
        await in_loop()
    with pytest.raises(TransactionError, match="begin_nested"):
        in_thread()
    with pytest.raises(TransactionError, match="begin_nested"):
        async with outbox.transaction() as session:
            await session.execute(effects.write("order"))
            await fail(session)
    assert await nothing(outbox, effects) and called == []


@on_postgresql
async def test_an_aborted_transaction_takes_no_message(outbox: Outbox, effects: Effects) -> None:
    with pytest.raises(TransactionError, match="begin_nested"):
        async with outbox.transaction() as session:
            await fail(session)
            await outbox.emit(session, "order.created", 1)
    assert await nothing(outbox, effects)


async def test_an_error_in_a_savepoint_leaves_the_rest_of_a_transaction(outbox: Outbox, effects: Effects) -> None:
    called: list[str] = []
    async with outbox.transaction() as session:
        outbox.after_commit(session, lambda: called.append("hook"))
        with suppress(DBAPIError):
            async with session.begin_nested():
                await session.execute(effects.write("gone"))
                await session.execute(text("SELECT nothing FROM nowhere"))
        await session.execute(effects.write("kept"))
        await outbox.emit(session, "order.created", 1)
    assert await effects.all() == ["kept"] and len(await outbox.messages()) == 1 and called == ["hook"]


@on_postgresql
async def test_the_applications_own_sessions_and_connections_are_told_too(
    outbox: Outbox, effects: Effects, engine: AsyncEngine
) -> None:
    called: list[str] = []
    async with AsyncSession(engine) as session:
        await outbox.emit(session, "order.created", 1)
        outbox.after_commit(session, lambda: called.append("hook"))
        await fail(session)
        with pytest.raises(TransactionError, match="begin_nested"):
            await session.commit()
    async with AsyncSession(engine) as session:
        await session.execute(effects.write("order"))
        outbox.after_commit(session, lambda: called.append("hook"))
        await fail(session)
        with pytest.raises(TransactionError, match="begin_nested"):
            await session.commit()
        await session.rollback()
        await session.execute(effects.write("the next transaction is another one"))
        await session.commit()
    async with engine.connect() as connection:
        await outbox.emit(connection, "order.created", 1)
        with pytest.raises(DBAPIError):
            await connection.execute(text("SELECT nothing FROM nowhere"))
        with pytest.raises(TransactionError, match="begin_nested"):
            await connection.commit()
    assert called == [] and not await outbox.messages()
    assert await effects.all() == ["the next transaction is another one"]


async def driver_of(session: AsyncSession) -> Any:
    return (await (await session.connection()).get_raw_connection()).driver_connection


@on_postgresql
async def test_an_error_that_was_swallowed_on_the_drivers_own_connection_calls_nothing_either(
    outbox: Outbox, effects: Effects, engine: AsyncEngine
) -> None:
    called: list[str] = []

    async def fail_on_driver(session: AsyncSession) -> None:
        with pytest.raises(Exception, match="division by zero"):
            await (await driver_of(session)).execute("SELECT 1 / 0")

    @outbox.transactional
    async def decorated(session: AsyncSession) -> None:
        await fail_on_driver(session)

    with pytest.raises(TransactionError, match="begin_nested"):
        async with outbox.transaction() as session:
            await session.execute(effects.write("order"))
            await outbox.emit(session, "order.created", 1)
            outbox.after_commit(session, lambda: called.append("hook"))
            await fail_on_driver(session)
    with pytest.raises(TransactionError, match="begin_nested"):
        async with outbox.transaction() as session:
            await session.execute(effects.write("order"))
            await fail_on_driver(session)
            with suppress(DBAPIError, TransactionError):
                await outbox.emit(session, "order.created", 1)
    async with AsyncSession(engine) as session:
        await session.execute(effects.write("order"))
        await outbox.emit(session, "order.created", 1)
        outbox.after_commit(session, lambda: called.append("hook"))
        await fail_on_driver(session)
        with pytest.raises(TransactionError, match="begin_nested"):
            await session.commit()
    async with engine.connect() as connection:
        await outbox.emit(connection, "order.created", 1)
        with pytest.raises(Exception, match="division by zero"):
            await (await connection.get_raw_connection()).driver_connection.execute("SELECT 1 / 0")  # type: ignore[union-attr]
        with pytest.raises(TransactionError, match="begin_nested"):
            await connection.commit()
    assert await nothing(outbox, effects) and called == []


@on_postgresql
async def test_what_succeeds_on_the_drivers_own_connection_commits(outbox: Outbox, effects: Effects) -> None:
    called: list[str] = []
    async with outbox.transaction() as session:
        await session.execute(effects.write("order"))
        await outbox.emit(session, "order.created", 1)
        outbox.after_commit(session, lambda: called.append("hook"))
        await (await driver_of(session)).execute("SELECT 1")
    assert await effects.all() == ["order"] and len(await outbox.messages()) == 1 and called == ["hook"]


@on_postgresql
async def test_a_connection_whose_commit_was_refused_can_be_used_again(
    outbox: Outbox, effects: Effects, engine: AsyncEngine
) -> None:
    async with engine.connect() as connection:
        with pytest.raises(TransactionError, match="begin_nested"):
            async with connection.begin():
                await outbox.emit(connection, "order.created", 1)
                with pytest.raises(DBAPIError):
                    await connection.execute(text("SELECT nothing FROM nowhere"))
        async with connection.begin():
            await outbox.emit(connection, "order.created", 2)
    assert [stored.message.body for stored in await outbox.messages()] == [b"2"]


# Ended without SQLAlchemy.


async def _roll_back_by_text(session: AsyncSession) -> None:
    await session.execute(text("ROLLBACK"))


async def _roll_back_by_driver_text(session: AsyncSession) -> None:
    await session.run_sync(lambda plain: plain.connection().exec_driver_sql("/* undo */ rollback"))


async def _roll_back_in_the_pool(session: AsyncSession) -> None:
    await session.run_sync(lambda plain: plain.connection().connection.rollback())


async def _roll_back_by_adapter(session: AsyncSession) -> None:
    await session.run_sync(lambda plain: plain.connection().connection.dbapi_connection.rollback())  # type: ignore[union-attr]


async def _roll_back_on_the_driver(session: AsyncSession) -> None:
    await (await driver_of(session)).execute("ROLLBACK")


async def _close_the_adapter(session: AsyncSession) -> None:
    await session.run_sync(lambda plain: plain.connection().connection.dbapi_connection.close())  # type: ignore[union-attr]


async def _commit_by_text(session: AsyncSession) -> None:
    await session.execute(text("COMMIT"))


ENDS = [
    _roll_back_by_text,
    _roll_back_by_driver_text,
    _roll_back_in_the_pool,
    _roll_back_by_adapter,
    _roll_back_on_the_driver,
    _close_the_adapter,
    _commit_by_text,
]


@on_postgresql
@pytest.mark.parametrize("goes_on", [False, True], ids=["returns", "goes on"])
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__.strip("_").replace("_", " "))
async def test_a_transaction_that_was_ended_without_sqlalchemy_does_not_return(
    outbox: Outbox,
    effects: Effects,
    engine: AsyncEngine,
    end: Callable[[AsyncSession], Awaitable[None]],
    goes_on: bool,
) -> None:
    """A refusal, or the error of a connection that was closed: whatever it is, nothing is stored and nothing called."""
    called: list[str] = []

    async def work(session: AsyncSession) -> None:
        await session.execute(effects.write("order"))
        await outbox.emit(session, "order.created", 1)
        outbox.after_commit(session, lambda: called.append("hook"))
        with suppress(TransactionError):
            with suppress(DBAPIError):
                await session.execute(text("SELECT 1 / 0"))
            await end(session)
        if goes_on:
            with suppress(DBAPIError, TransactionError):
                await session.execute(effects.write("in another transaction"))

    @outbox.transactional
    async def decorated(session: AsyncSession) -> None:
        await work(session)

    with pytest.raises((TransactionError, SQLAlchemyError)):
        async with outbox.transaction() as session:
            await work(session)
    with pytest.raises((TransactionError, SQLAlchemyError)):
        await decorated()
    async with AsyncSession(engine) as session:
        await work(session)
        with pytest.raises((TransactionError, SQLAlchemyError)):
            await session.commit()
        await session.rollback()
    assert await nothing(outbox, effects) and called == []


@on_postgresql
async def test_text_that_would_end_a_transaction_in_which_something_waits_for_the_commit_is_refused(
    outbox: Outbox, effects: Effects, engine: AsyncEngine
) -> None:
    """It is not sent, so the transaction goes on."""
    async with AsyncSession(engine) as session:
        await outbox.emit(session, "order.created", 1)
        for ending in ("COMMIT", "ROLLBACK", "-- at last\nend", "ABORT", "PREPARE TRANSACTION 'a'"):
            with pytest.raises(TransactionError, match=r"would end a transaction.*commit\(\) or rollback\(\)"):
                await session.execute(text(ending))
        for harmless in ("SAVEPOINT a", "ROLLBACK TO SAVEPOINT a", "SET LOCAL search_path = public"):
            await session.execute(text(harmless))
        await session.execute(effects.write("kept"))
        await session.commit()
    assert await effects.all() == ["kept"] and len(await outbox.messages()) == 1


@on_postgresql
async def test_a_transaction_that_is_followed_by_another_one_on_its_connection_is_not_taken_for_ended(
    outbox: Outbox, effects: Effects, engine: AsyncEngine
) -> None:
    async with engine.connect() as connection:
        for number in range(3):
            await outbox.emit(connection, "order.created", number)
            await connection.execute(effects.write(str(number)))
            await (connection.rollback() if number == 1 else connection.commit())
        await outbox.emit(connection, "order.created", 3)
        await connection.invalidate()
        await connection.rollback()
        await outbox.emit(connection, "order.created", 4)
        await connection.commit()
    async with AsyncSession(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        with pytest.warns(NotAtomicWarning):
            await outbox.emit(session, "order.created", 5)
        for statement in ("BEGIN", "SELECT 1", "COMMIT"):
            await session.execute(text(statement))
        await session.commit()
    assert await effects.all() == ["0", "2"]
    assert [stored.message.body for stored in await outbox.messages()] == [b"0", b"2", b"4", b"5"]


# SQLite.


@pytest.fixture
async def rolls_back(outbox: Outbox, effects: Effects) -> str:
    """A statement at which SQLite rolls the whole transaction back by itself, as it does when the disk is full."""
    name = effects.table.name
    raising = f"BEFORE INSERT ON {name} WHEN NEW.n = 13 BEGIN SELECT RAISE(ROLLBACK, 'full'); END"
    async with outbox.transaction() as session:
        await session.execute(text(f"CREATE TRIGGER {name}_full {raising}"))
    return f"INSERT INTO {name} (what, n) VALUES ('none', 13)"


@on_sqlite
async def test_sqlite_that_rolls_back_by_itself_leaves_neither_data_nor_message(
    outbox: Outbox, effects: Effects, rolls_back: str
) -> None:
    called: list[str] = []
    with pytest.raises(TransactionError, match=r"full.*begin_nested"):
        async with outbox.transaction() as session:
            await session.execute(effects.write("order"))
            outbox.after_commit(session, lambda: called.append("hook"))
            with pytest.raises(DBAPIError):
                await session.execute(text(rolls_back))
    with pytest.raises(TransactionError, match="begin_nested"):
        async with outbox.transaction() as session:
            await session.execute(effects.write("order"))
            with pytest.raises(DBAPIError):
                await session.execute(text(rolls_back))
            await outbox.emit(session, "order.created", 1)
    with pytest.raises(ZeroDivisionError):
        async with outbox.transaction() as session:
            await session.execute(effects.write("order"))
            with pytest.raises(DBAPIError):
                await session.execute(text(rolls_back))
            with pytest.raises(TransactionError, match="begin_nested"):  # it would be committed by itself
                await session.execute(effects.write("a row that comes after"))
            raise ZeroDivisionError
    assert await nothing(outbox, effects) and called == []


@on_sqlite
async def test_sqlite_that_rolls_back_at_a_statement_of_its_driver_leaves_nothing_either(
    outbox: Outbox, effects: Effects, rolls_back: str, engine: AsyncEngine
) -> None:
    called: list[str] = []
    with pytest.raises(TransactionError, match="begin_nested"):
        async with outbox.transaction() as session:
            await session.execute(effects.write("order"))
            outbox.after_commit(session, lambda: called.append("hook"))
            with pytest.raises(sqlite3.Error):
                await (await driver_of(session)).execute(rolls_back)
    async with AsyncSession(engine) as session:
        await session.execute(effects.write("order"))
        await outbox.emit(session, "order.created", 1)
        outbox.after_commit(session, lambda: called.append("hook"))
        with pytest.raises(sqlite3.Error):
            await (await driver_of(session)).execute(rolls_back)
        with pytest.raises(TransactionError, match="begin_nested"):
            await session.commit()
    assert await nothing(outbox, effects) and called == []
    async with AsyncSession(engine) as session:  # a commit of the caller's own is none
        await session.execute(effects.write("order"))
        await outbox.emit(session, "order.created", 1)
        await session.execute(text("COMMIT"))
        await session.commit()
    assert await effects.all() == ["order"] and len(await outbox.messages()) == 1


@on_sqlite
async def test_what_sqlite_rolled_back_at_a_statement_of_its_driver_stays_so_when_the_session_goes_on(
    outbox: Outbox, effects: Effects, rolls_back: str, engine: AsyncEngine, database_url: str
) -> None:
    """The driver of an engine that nobody has prepared begins another transaction with the next statement."""
    called: list[str] = []
    async with AsyncSession(engine) as session:
        await session.execute(effects.write("order"))
        await outbox.emit(session, "order.created", 1)
        outbox.after_commit(session, lambda: called.append("hook"))
        with pytest.raises(sqlite3.Error):
            await (await driver_of(session)).execute(rolls_back)
        await session.execute(effects.write("after it"))
        with pytest.raises(TransactionError, match="begin_nested"):
            await session.commit()
        await session.rollback()
    plain = create_engine(sync_url(make_url(database_url)))
    with Session(plain) as in_thread:
        in_thread.execute(effects.write("order"))
        outbox.emit_sync(in_thread, "order.created", 1)
        outbox.after_commit(in_thread, lambda: called.append("hook"))
        driver: Any = in_thread.connection().connection.driver_connection
        with pytest.raises(sqlite3.Error):
            driver.execute(rolls_back)
        in_thread.execute(effects.write("after it"))
        with pytest.raises(TransactionError, match="begin_nested"):
            in_thread.commit()
        in_thread.rollback()
        in_thread.execute(effects.write("in the next transaction"))
        outbox.emit_sync(in_thread, "order.created", 2)
        in_thread.commit()
    plain.dispose()
    assert called == [] and await effects.all() == ["in the next transaction"]
    assert [stored.message.body for stored in await outbox.messages()] == [b"2"]


async def fill_the_disk(session: AsyncSession, effects: Effects) -> None:
    pages = await session.scalar(text("PRAGMA page_count"))
    await session.execute(text(f"PRAGMA max_page_count = {pages}"))
    try:
        await session.execute(text(f"INSERT INTO {effects.table.name} (what, n) VALUES (zeroblob(1000000), 1)"))
    finally:
        await session.execute(text("PRAGMA max_page_count = 1000000"))


async def interrupt(session: AsyncSession, effects: Effects) -> None:
    driver: Any = (await (await session.connection()).get_raw_connection()).driver_connection
    counting = "WITH RECURSIVE many(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM many LIMIT 100000000)"
    writing = session.execute(text(f"INSERT INTO {effects.table.name} (what, n) {counting} SELECT 'one', n FROM many"))
    stop = threading.Timer(0.2, driver._conn.interrupt)
    stop.start()
    try:
        await writing
    finally:
        stop.cancel()


@on_sqlite
@pytest.mark.parametrize("how", [fill_the_disk, interrupt])
async def test_what_a_full_disk_or_an_interrupt_rolled_back_is_not_taken_for_committed(
    outbox: Outbox, effects: Effects, how: Callable[[AsyncSession, Effects], Awaitable[None]]
) -> None:
    with pytest.raises(TransactionError, match=r"(full|interrupted).*begin_nested"):
        async with outbox.transaction() as session:
            await session.execute(effects.write("order"))
            await outbox.emit(session, "order.created", 1)
            with pytest.raises(DBAPIError, match=r"full|interrupted"):
                await how(session, effects)
    assert await nothing(outbox, effects)
    async with outbox.transaction() as session:
        await outbox.emit(session, "order.created", 2)
    assert [stored.message.body for stored in await outbox.messages()] == [b"2"]


@on_sqlite
@pytest.mark.parametrize("prepared", [False, True], ids=["as it is", "prepared"])
async def test_emit_on_a_given_engine_refuses_what_sqlite_has_rolled_back(
    outbox: Outbox, effects: Effects, rolls_back: str, database_url: str, prepared: bool
) -> None:
    plain = create_engine(sync_url(make_url(database_url)))
    if prepared:
        prepare(plain)
    with Session(plain) as session, pytest.raises(TransactionError, match="begin_nested"):
        session.execute(effects.write("order"))
        with pytest.raises(DBAPIError):
            session.execute(text(rolls_back))
        outbox.emit_sync(session, "order.created", 1)
    with Session(plain) as session:  # a statement that failed and rolled nothing back is no reason
        fail_plainly(session)
        outbox.emit_sync(session, "order.created", 2)
        session.commit()
    plain.dispose()
    assert [message.message.body for message in await outbox.messages()] == [b"2"]


@on_sqlite
async def test_a_transaction_that_a_prepared_engine_is_about_to_begin_is_no_reason_for_a_warning(
    outbox: Outbox, effects: Effects, engine: AsyncEngine
) -> None:
    prepare(engine)
    async with engine.connect() as connection:
        await outbox.emit(connection, "order.created", 1)
        await connection.rollback()
    assert not await outbox.messages()


@on_sqlite
async def test_a_savepoint_that_comes_first_on_a_given_engine_is_warned_of(
    outbox: Outbox, effects: Effects, engine: AsyncEngine
) -> None:
    async with AsyncSession(engine) as session, session.begin(), session.begin_nested():
        with pytest.warns(NotAtomicWarning, match=r"outbox\.sqlite\.prepare"):
            await outbox.emit(session, "order.created", 1)
    async with AsyncSession(engine) as session, session.begin():
        await session.execute(effects.write("first"))
        async with session.begin_nested():
            await outbox.emit(session, "order.created", 2)
    prepare(engine)
    await engine.dispose()
    with suppress(ZeroDivisionError):
        async with AsyncSession(engine) as session, session.begin():
            async with session.begin_nested():
                await outbox.emit(session, "order.created", 3)
            raise ZeroDivisionError
    assert [message.message.body for message in await outbox.messages()] == [b"1", b"2"]


# AUTOCOMMIT.

AUTOCOMMIT = {
    "sqlite": {"connect_args": {"isolation_level": None}},
    "postgresql+asyncpg": {"isolation_level": "AUTOCOMMIT"},
    "postgresql+psycopg": {"connect_args": {"autocommit": True}},
    "mariadb+asyncmy": {"connect_args": {"autocommit": True}},
}


async def test_emit_warns_of_the_drivers_own_autocommit(outbox: Outbox, effects: Effects, database_url: str) -> None:
    kind = make_url(database_url).drivername.removesuffix("+aiosqlite")
    engine = create_async_engine(database_url, **AUTOCOMMIT[kind])  # type: ignore[arg-type]
    async with AsyncSession(engine) as session:
        with pytest.warns(NotAtomicWarning, match="AUTOCOMMIT"):
            await outbox.emit(session, "order.created", 1)
        await session.rollback()
    await engine.dispose()
    assert len(await outbox.messages()) == 1
