"""What the rig does to MariaDB: the proxy before it, and deadlocks, which are what they say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pymysql
import pytest
from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from tests.chaos import deadlocks
from tests.chaos.mysql_proxy import MysqlLink
from tests.support.mariadb import arguments, statement, url_through
from tests.support.proxy import Proxy

SOON = 30.0  # seconds


@pytest.fixture
def link(mariadb_database: str) -> Iterator[MysqlLink]:
    port = make_url(mariadb_database).port
    assert port is not None
    with Proxy() as proxy:
        yield proxy.opened(lambda loop: MysqlLink("worker-1", [port], loop))


@pytest.fixture
def through(link: MysqlLink, mariadb_database: str) -> Iterator[pymysql.Connection]:
    """A connection through the proxy, to a database with one table."""
    statement(mariadb_database, "CREATE TABLE fact (n INT) ENGINE=InnoDB")
    connection = pymysql.connect(**{**arguments(mariadb_database), "port": link.port})
    yield connection
    connection._force_close()


@pytest.mark.parametrize("command", ["COMMIT", "INSERT"])
def test_a_command_is_completed_and_its_client_does_not_hear_of_it(
    link: MysqlLink, through: pymysql.Connection, mariadb_database: str, command: str
) -> None:
    through.query("INSERT INTO fact VALUES (1)")
    link.trip_at((command,))
    with pytest.raises(pymysql.OperationalError):
        through.query("SELECT n FROM fact")
        through.query("INSERT INTO fact VALUES (2)")
        through.commit()
    assert link.tripped.wait(SOON)
    assert statement(mariadb_database, "SELECT n FROM fact") == ([(1,), (2,)] if command == "COMMIT" else [])


def test_a_command_that_failed_was_not_completed(link: MysqlLink, through: pymysql.Connection) -> None:
    link.trip_at(("INSERT",))
    with pytest.raises(pymysql.ProgrammingError):
        through.query("INSERT INTO nothing VALUES (1)")
    assert not link.tripped.is_set()


def test_large_questions_and_answers_come_through_whole(through: pymysql.Connection) -> None:
    with through.cursor() as cursor:
        cursor.execute("SELECT seq, REPEAT('x', 1000), %s FROM seq_1_to_2000", ["y" * 500_000])
        rows = cursor.fetchall()
    assert [row[0] for row in rows] == list(range(1, 2001))
    assert {row[1] for row in rows} == {"x" * 1000} and {len(row[2]) for row in rows} == {500_000}


def test_a_cut_ends_connections_and_the_next_one_works(
    link: MysqlLink, through: pymysql.Connection, mariadb_database: str
) -> None:
    assert link.cut() == 1
    with pytest.raises(pymysql.Error):
        while True:
            through.query("SELECT 1")
    pymysql.connect(**{**arguments(mariadb_database), "port": link.port}).close()


@pytest.fixture
async def session(mariadb_database: str) -> AsyncIterator[AsyncSession]:
    engine = create_async_engine(url_through(mariadb_database, "asyncmy"))
    async with engine.begin() as connection:
        await connection.run_sync(_make)
    async with AsyncSession(engine) as session:
        yield session
    await engine.dispose()


def _make(connection: Connection) -> None:
    deadlocks.metadata.create_all(connection)
    connection.execute(text("CREATE TABLE fact (n INT) ENGINE=InnoDB"))


async def test_a_deadlock_leaves_nothing_of_a_transaction_and_says_nothing(
    session: AsyncSession, mariadb_database: str
) -> None:
    await session.execute(text("INSERT INTO fact VALUES (1)"))
    async with asyncio.timeout(SOON):
        await deadlocks.run_into(session)
    await session.execute(text("INSERT INTO fact VALUES (2)"))
    await session.commit()
    assert statement(mariadb_database, "SELECT n FROM fact") == [(2,)]


async def test_so_does_one_of_a_plain_session(session: AsyncSession, mariadb_database: str) -> None:
    def work() -> None:
        engine = create_engine(url_through(mariadb_database, "pymysql"))
        with Session(engine) as plain:
            plain.execute(text("INSERT INTO fact VALUES (1)"))
            deadlocks.run_into_plainly(plain)
            plain.commit()
        engine.dispose()

    await asyncio.to_thread(work)
    assert statement(mariadb_database, "SELECT n FROM fact") == []
