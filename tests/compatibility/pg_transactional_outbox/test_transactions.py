""" "Message processing client strategy" and "Message processing Transaction level strategy".

The rulings: a client is a session, given by `session_factory`; what was made for a worker is closed with it, and an
engine of one's own is closed by whoever made it. A level that SQLite does not have is the only one it has.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from outbox import ConfigurationError, Message, Outbox, listen, sqlite
from outbox.core.attempt import Dead, Done
from outbox.core.events import Handled
from tests.compatibility.pg_transactional_outbox.movies import Shelf, tell
from tests.support.databases import on_both_stores, on_postgresql, on_sqlite
from tests.support.logins import as_superuser, login
from tests.support.observing import Recorder, eventually

# Message processing client strategy


@pytest.fixture
async def elevated(outbox: Outbox, published_movies: Shelf, database_url: str, table_name: str) -> AsyncIterator[str]:
    """The URL of a login that may publish movies and end messages, and nothing else."""
    await outbox.create_tables()
    table = published_movies.table.name
    rights = (
        f"SELECT (id, lease_token, lease_until), DELETE ON {outbox.tables.messages.name}",
        f"SELECT (id), INSERT ON {table}",
        f"USAGE ON SEQUENCE {table}_id_seq",
    )
    async with login(database_url, f"{table_name}_elevated", *rights) as url:
        yield url


@on_postgresql
async def test_some_messages_are_handled_with_the_login_that_they_require(
    outbox: Outbox, published_movies: Shelf, recorder: Recorder, database_url: str, elevated: str
) -> None:
    users: dict[str, str] = {}

    def get_client(message: Message) -> str | None:
        return elevated if message.routing_key == "movie.ABC" else None

    @listen("movie.*", queue="movies", session_factory=get_client, retry_delays=())
    async def handle(movie: dict[str, str], session: AsyncSession, routing_key: str) -> None:
        users[routing_key] = await session.scalar(text("SELECT current_user")) or ""
        await session.execute(published_movies.put(movie["title"]))

    async with outbox.running(listeners=[handle]):
        await tell(outbox, "secret", routing_key="movie.ABC")
        await tell(outbox, "public", routing_key="movie.other")
        ended = await recorder.wait_for(Handled, 2)
    assert all(isinstance(event.outcome, Done) for event in ended), ended
    role = make_url(elevated).username
    assert users["movie.ABC"] == role != users["movie.other"]
    assert sorted(await published_movies.titles()) == ["public", "secret"]
    await outbox.close()
    connected = f"SELECT pid FROM pg_stat_activity WHERE usename = '{role}'"

    async def nobody_is_connected() -> bool:
        return not await as_superuser(database_url, connected)

    await eventually(nobody_is_connected)


@on_both_stores
async def test_a_client_may_come_from_a_pool_of_ones_own_which_stays_open(
    outbox: Outbox, database_url: str, published_movies: Shelf, recorder: Recorder
) -> None:
    pool = await own_pool(database_url)
    clients = async_sessionmaker(pool)
    of_the_pool: dict[str, bool] = {}

    @listen("movie.*", queue="movies", session_factory=lambda message: clients if message.key == "pool" else None)
    async def handle(movie: dict[str, str], session: AsyncSession, letter: Message) -> None:
        of_the_pool[movie["title"]] = session.bind is pool
        await session.execute(published_movies.put(movie["title"]))

    async with outbox.running(listeners=[handle]):
        await tell(outbox, "some movie", key="pool")
        await tell(outbox, "another one")
        await recorder.wait_for(Handled, 2)
    await outbox.close()
    assert of_the_pool == {"some movie": True, "another one": False}
    assert sorted(await published_movies.titles()) == ["another one", "some movie"]
    async with clients() as session:
        assert await session.scalar(text("SELECT 1")) == 1
    await pool.dispose()


async def own_pool(database_url: str) -> AsyncEngine:
    """An engine that the application made, with what SQLite needs for transactions of its own."""
    pool = create_async_engine(database_url)
    if pool.dialect.name == "sqlite":
        sqlite.prepare(pool)
    return pool


@on_sqlite
async def test_a_client_that_cannot_be_had_is_a_failed_attempt(outbox: Outbox, recorder: Recorder) -> None:
    def get_client(message: Message) -> str:
        raise PermissionError("no login for this message")

    @listen("movie.*", queue="movies", session_factory=get_client, retry_delays=())
    async def handle(movie: object, session: AsyncSession) -> None: ...

    async with outbox.running(listeners=[handle]):
        await tell(outbox, "some movie")
        [ended] = await recorder.wait_for(Handled)
    assert isinstance(ended.outcome, Dead)
    assert "no login for this message" in ended.outcome.error


# Message processing transaction level strategy


@pytest.mark.parametrize("store_first", [False, True])
@on_postgresql
async def test_the_level_of_isolation_depends_on_the_message_and_is_the_databases_own_by_default(
    rabbitmq_outbox: Outbox, recorder: Recorder, store_first: bool
) -> None:
    chosen = {"movie.ABC": "READ COMMITTED", "movie.strict": "SERIALIZABLE", "movie.other": "REPEATABLE READ"}
    levels: dict[str, str] = {}

    def level(message: Message) -> str | None:
        return chosen.get(message.routing_key)

    @listen("movie.*", queue="movies", isolation_level=level, store_first=store_first)
    async def handle(movie: object, session: AsyncSession, routing_key: str) -> None:
        levels[routing_key] = await session.scalar(text("SHOW transaction_isolation")) or ""

    async with rabbitmq_outbox.running(relay=True, listeners=[handle]):
        for routing_key in (*chosen, "movie.default"):
            await tell(rabbitmq_outbox, "some movie", routing_key=routing_key)
        await recorder.wait_for(Handled, 4)
    assert levels == {
        "movie.ABC": "read committed",
        "movie.strict": "serializable",
        "movie.other": "repeatable read",
        "movie.default": "read committed",
    }


@on_sqlite
async def test_every_level_is_kept_by_a_database_that_has_but_the_strictest(
    outbox: Outbox, recorder: Recorder, published_movies: Shelf
) -> None:
    levels = ["READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]

    @listen("movie.*", queue="movies", isolation_level=lambda message: message.key, retry_delays=())
    async def handle(movie: dict[str, str], session: AsyncSession) -> None:
        await session.execute(published_movies.put(movie["title"]))

    async with outbox.running(listeners=[handle]):
        for level in levels:
            await tell(outbox, level, key=level)
        ended = await recorder.wait_for(Handled, 4)
    assert all(isinstance(event.outcome, Done) for event in ended), ended
    assert sorted(await published_movies.titles()) == sorted(levels)


def test_a_level_that_would_not_be_a_transaction_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        listen("movie.*", queue="movies", isolation_level="AUTOCOMMIT")(print)
