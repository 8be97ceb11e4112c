"""Sessions that are joined to a transaction of their connection, as most fixtures for tests do it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from outbox import Outbox, TransactionError, listen
from outbox.adapters import sync_url
from outbox.core.events import Handled
from outbox.sqlite import prepare
from tests.support.databases import on_asyncpg
from tests.support.outboxes import MakeOutbox

from .strategies import Watch

MODES = ("conditional_savepoint", "create_savepoint", "rollback_only")


@pytest.fixture(params=["sqlite", "postgresql+asyncpg"])
def database_url(request: pytest.FixtureRequest, postgresql_url: str, tmp_path: Any) -> str:
    """Savepoints are the databases', their drivers differ in nothing here."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'outbox.db'}"
    return postgresql_url.replace("postgresql://", f"{request.param}://", 1)


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """An engine of the application's own."""
    engine = create_async_engine(database_url)
    if engine.dialect.name == "sqlite":
        prepare(engine)
    yield engine
    await engine.dispose()


@pytest.fixture
async def outbox(make_outbox: MakeOutbox) -> Outbox:
    """An outbox with its tables."""
    outbox = make_outbox()
    await outbox.create_tables()
    return outbox


@pytest.fixture
def told(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done because something had committed, in its order: announcements, and hooks that append to it."""
    told: list[str] = []
    announce = outbox.store.queues.announce

    def announced(*destinations: str | None) -> None:
        told.append("announced")
        announce(*destinations)

    monkeypatch.setattr(outbox.store.queues, "announce", announced)
    return told


async def place(outbox: Outbox, session: AsyncSession, told: list[str], what: str = "hook") -> None:
    await outbox.emit(session, "order.placed", 1)
    outbox.after_commit(session, lambda: told.append(what))


@pytest.mark.parametrize(
    ("database_url", "mode", "ending"),
    [
        *(("sqlite", mode, ending) for mode in MODES for ending in ("commit", "rollback")),
        *(("postgresql+asyncpg", "create_savepoint", ending) for ending in ("commit", "rollback", "close")),
    ],
    indirect=["database_url"],
)
async def test_what_waits_for_a_commit_waits_for_the_outer_one(
    outbox: Outbox, engine: AsyncEngine, told: list[str], mode: Any, ending: str
) -> None:
    async with engine.connect() as connection:
        outer = await connection.begin()
        async with AsyncSession(connection, join_transaction_mode=mode) as session:
            await place(outbox, session, told)
            await session.commit()
            await place(outbox, session, told, "second hook")
            await session.commit()
        assert told == []
        await getattr(outer, ending)()
        expected = ["announced", "announced", "hook", "second hook"] if ending == "commit" else []
        assert told == expected
        await connection.rollback()
    assert told == expected
    assert len(await outbox.messages()) == (2 if ending == "commit" else 0)


async def test_a_session_that_controls_the_outer_transaction_commits_it(
    outbox: Outbox, engine: AsyncEngine, told: list[str]
) -> None:
    async with engine.connect() as connection:
        await connection.begin()
        async with AsyncSession(connection, join_transaction_mode="control_fully") as session:
            await place(outbox, session, told)
            await session.commit()
        assert told == ["announced", "hook"]


async def test_a_savepoint_around_the_session_takes_its_hooks_with_it_and_no_others(
    outbox: Outbox, engine: AsyncEngine, told: list[str]
) -> None:
    async def joined(what: str) -> None:
        async with AsyncSession(connection) as session:
            await place(outbox, session, told, what)
            await session.commit()

    async with engine.connect() as connection:
        outer = await connection.begin()
        first = await connection.begin_nested()  # nothing waits yet
        await joined("in the first")
        await first.rollback()
        await joined("outside")
        second = await connection.begin_nested()
        third = await connection.begin_nested()
        await joined("in the third")
        await third.commit()
        await second.rollback()
        fourth = await connection.begin_nested()
        await joined("in the fourth")
        await fourth.commit()
        await outer.commit()
    assert told == ["announced", "announced", "outside", "in the fourth"]
    assert len(await outbox.messages()) == 2


async def test_a_session_that_rolls_back_takes_its_hooks_with_it(
    outbox: Outbox, engine: AsyncEngine, told: list[str]
) -> None:
    async with engine.connect() as connection:
        outer = await connection.begin()
        async with AsyncSession(connection, join_transaction_mode="create_savepoint") as session:
            await place(outbox, session, told, "committed")
            await session.commit()
            await place(outbox, session, told, "rolled back")
            await session.rollback()
        await outer.commit()
    assert told == ["announced", "committed"]


@on_asyncpg
async def test_an_outer_commit_that_the_database_refuses_calls_nothing(
    outbox: Outbox, engine: AsyncEngine, told: list[str], table_name: str
) -> None:
    unique_later = f"CREATE TABLE {table_name}_orders (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)"
    async with engine.begin() as connection:
        await connection.execute(text(unique_later))
    async with engine.connect() as connection:
        outer = await connection.begin()
        async with AsyncSession(connection) as session:
            await session.execute(text(f"INSERT INTO {table_name}_orders VALUES (1), (1)"))
            await place(outbox, session, told)
            await session.commit()
        with pytest.raises(IntegrityError):
            await outer.commit()
    assert told == []
    assert await outbox.messages() == []


@on_asyncpg
async def test_an_error_that_was_swallowed_on_the_outer_connection_calls_nothing(
    outbox: Outbox, engine: AsyncEngine, told: list[str]
) -> None:
    with pytest.raises(TransactionError, match="begin_nested"):
        async with engine.connect() as connection, connection.begin():
            async with AsyncSession(connection, join_transaction_mode="create_savepoint") as session:
                await place(outbox, session, told)
                await session.commit()
            with pytest.raises(DBAPIError):
                await connection.execute(text("SELECT nothing FROM nowhere"))
    assert told == []
    assert await outbox.messages() == []


async def test_on_a_connection_others_are_told_after_its_commit_and_not_before(
    outbox: Outbox, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    async with engine.connect() as connection:
        await outbox.emit(connection, "order.placed", 1)
        monkeypatch.setattr(
            type(engine.sync_engine.dialect), "do_commit", lambda self, dbapi: (told.append("commit"), dbapi.commit())
        )
        await connection.commit()
        monkeypatch.undo()
    assert told == ["commit", "announced"]
    assert len(await outbox.messages()) == 1


@on_asyncpg
async def test_a_connection_that_listeners_sessions_were_given_stays_open(
    make_outbox: MakeOutbox, outbox: Outbox, engine: AsyncEngine, database_url: str
) -> None:
    watch = Watch()
    plain_engine = create_engine(sync_url(make_url(database_url)))
    async with engine.connect() as connection, connection.begin():
        with plain_engine.connect() as plain, plain.begin():
            joined = async_sessionmaker(connection, join_transaction_mode="create_savepoint")
            plainly_joined = sessionmaker(plain, join_transaction_mode="create_savepoint")

            async def fails(body: int, session: AsyncSession) -> None:
                raise ValueError

            def in_thread(body: int, session: Session) -> None:
                session.execute(text("SELECT 1"))

            listeners = [
                listen("#", queue="loop", session_factory=joined, retry_delays=())(fails),
                listen("#", queue="thread", session_factory=plainly_joined)(in_thread),
            ]
            working = make_outbox(observers=[watch])
            async with working.transaction() as session:
                await working.emit(session, "order.placed", 1)
            async with working.running(relay=True, listeners=listeners):
                await watch.wait_for(Handled, 2)
            assert not connection.closed and not plain.closed
            assert await connection.scalar(text("SELECT 1")) == plain.scalar(text("SELECT 1")) == 1
    plain_engine.dispose()
