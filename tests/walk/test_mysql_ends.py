"""Ends that nobody announced on MariaDB: a COMMIT on the driver's own connection, and DDL, which commits by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Outbox, TransactionError, listen
from tests.support.databases import url_on
from tests.support.observing import eventually
from tests.support.outboxes import MakeOutbox, emit

from .strategies import Effects


@pytest.fixture
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """MariaDB alone."""
    return url_on(request, "mysql+asyncmy", tmp_path)


@pytest.fixture
async def outbox(make_outbox: MakeOutbox) -> AsyncIterator[Outbox]:
    outbox = make_outbox()
    await outbox.create_tables()
    yield outbox


async def by_query(session: AsyncSession) -> None:
    await (await _driver(session)).query("COMMIT")


async def by_method(session: AsyncSession) -> None:
    await (await _driver(session)).commit()


async def _driver(session: AsyncSession) -> Any:
    return (await (await session.connection()).get_raw_connection()).driver_connection


WAYS = [by_query, by_method]


@pytest.mark.parametrize("commit", WAYS)
async def test_what_a_listener_commits_on_its_driver_does_not_count_as_handled(
    outbox: Outbox, effects: Effects, commit: Callable[[AsyncSession], Any]
) -> None:
    @listen("#", queue="q", retry_delays=(0, 0))
    async def listener(body: int, session: AsyncSession) -> None:
        await session.execute(effects.write(str(body)))
        await commit(session)

    await emit(outbox, 1)
    async with outbox.running(listeners=[listener]):
        await eventually(lambda: _letters(outbox))
    assert await effects.all() == ["1"]


async def _letters(outbox: Outbox) -> bool:
    return len(await outbox.dead_letters.list()) == 1


@pytest.mark.parametrize("commit", WAYS)
async def test_a_callers_transaction_that_was_committed_on_its_driver_does_not_return(
    outbox: Outbox, effects: Effects, commit: Callable[[AsyncSession], Any]
) -> None:
    with pytest.raises(TransactionError):
        async with outbox.transaction() as session:
            await session.execute(effects.write("1"))
            await commit(session)
            await outbox.emit(session, "a", 1)
    assert await outbox.messages() == []


async def test_so_does_one_of_pymysql(outbox: Outbox, effects: Effects, database_url: str) -> None:
    def work() -> None:
        engine = create_engine(database_url.replace("asyncmy", "pymysql"))
        with pytest.raises(TransactionError), Session(engine) as session, session.begin():
            outbox.emit_sync(session, "a", 1)
            driver: Any = session.connection().connection.driver_connection
            driver.query("COMMIT")
            outbox.emit_sync(session, "a", 2)
        engine.dispose()

    await asyncio.to_thread(work)
    assert len(await outbox.messages()) == 1  # the first one was committed, by its own doing


@pytest.mark.parametrize(
    "ddl",
    [
        "CREATE TABLE {name} (id INT)",
        "create  or replace view {name} AS SELECT 1",
        "/* why */ ALTER TABLE {name} ADD n INT",
        "TRUNCATE {name}",
        "DROP TABLE IF EXISTS {name}",
        "OPTIMIZE LOCAL TABLE {name}",
    ],
    ids=["create", "view", "alter", "truncate", "drop", "optimize"],
)
async def test_ddl_in_the_middle_of_a_transaction_is_refused_before_it_commits(
    outbox: Outbox, table_name: str, ddl: str
) -> None:
    with pytest.raises(TransactionError, match="would commit this transaction"):
        async with outbox.transaction() as session:
            await outbox.emit(session, "a", 1)
            await session.execute(text(ddl.format(name=f"{table_name}_other")))
    assert await outbox.messages() == []


async def test_a_temporary_table_commits_nothing(outbox: Outbox, table_name: str) -> None:
    async with outbox.transaction() as session:
        await outbox.emit(session, "a", 1)
        await session.execute(text(f"CREATE TEMPORARY TABLE {table_name}_other (id INT)"))
        await session.execute(text(f"DROP TEMPORARY TABLE {table_name}_other"))
    assert len(await outbox.messages()) == 1


async def test_ddl_at_the_beginning_harms_nothing(outbox: Outbox, table_name: str) -> None:
    async with outbox.transaction() as session:
        await session.execute(text(f"CREATE TABLE {table_name}_other (id INT) ENGINE=InnoDB"))
        await session.execute(text(f"INSERT INTO {table_name}_other VALUES (1)"))
        await outbox.emit(session, "a", 1)
    assert len(await outbox.messages()) == 1
