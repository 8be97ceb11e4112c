"""Sessions that are set to look elsewhere: a schema for each tenant, another database, two connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, Table, create_engine, event, insert, make_url, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from outbox import Outbox, TransactionError, WrongDatabase, listen
from outbox.adapters import sync_url
from outbox.core.attempt import Dead, Done, RetryIn
from outbox.core.events import LeaseWasLost
from outbox.inbound import inbox
from outbox.testing import emitted
from tests.support.outboxes import MakeOutbox, emit
from tests.walk.strategies import Watch


@pytest.fixture
def database_url(postgresql_url: str) -> str:
    """PostgreSQL alone has schemas."""
    return postgresql_url.replace("postgresql://", "postgresql+asyncpg://", 1)


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """An engine of the application's own."""
    engine = create_async_engine(database_url)
    yield engine
    await engine.dispose()


@pytest.fixture
def plain_engine(database_url: str) -> Iterator[Engine]:
    """The same without an event loop."""
    engine = create_engine(sync_url(make_url(database_url)))
    yield engine
    engine.dispose()


@pytest.fixture
async def tenant(engine: AsyncEngine, outbox: Outbox, table_name: str) -> AsyncIterator[str]:
    """A tenant's schema that has tables of the same names, as migrations for each tenant would leave them."""
    name = f"{table_name}_tenant"
    async with engine.begin() as connection:
        await connection.execute(text(f"CREATE SCHEMA {name}"))
        await set_path(connection, name)
        await connection.run_sync(outbox.tables.metadata.create_all)
        await connection.execute(text(f"CREATE TABLE {name}.effects (n int)"))
    yield name
    async with engine.begin() as connection:
        await connection.execute(text(f"DROP SCHEMA {name} CASCADE"))


@pytest.fixture
async def other_database(engine: AsyncEngine, table_name: str) -> AsyncIterator[AsyncEngine]:
    """Another database of the same server."""
    own = engine.execution_options(isolation_level="AUTOCOMMIT")
    async with own.connect() as connection:
        await connection.execute(text(f"CREATE DATABASE {table_name}_other"))
    other = create_async_engine(engine.url.set(database=f"{table_name}_other"))
    yield other
    await other.dispose()
    async with own.connect() as connection:
        await connection.execute(text(f"DROP DATABASE {table_name}_other WITH (FORCE)"))


async def set_path(connection: AsyncConnection | AsyncSession, schema: str, local: str = "LOCAL") -> None:
    await connection.execute(text(f"SET {local} search_path TO {schema}, public"))


async def count(engine: AsyncEngine, table: str) -> int:
    async with engine.connect() as connection:
        return int(await connection.scalar(text(f"SELECT count(*) FROM {table}")) or 0)


async def tables_of(engine: AsyncEngine) -> int:
    return await count(engine, "pg_tables WHERE schemaname = 'public'")


# Producers


@pytest.mark.parametrize(
    ("configured", "way"),
    [
        *((True, way) for way in ("map", "search_path", "engine", "plain map", "plain search_path")),
        *((False, way) for way in ("map", "search_path", "plain search_path")),
    ],
)
async def test_a_message_is_stored_in_the_tables_of_the_outbox_wherever_its_session_looks(
    make_outbox: MakeOutbox,
    outbox: Outbox,
    engine: AsyncEngine,
    plain_engine: Engine,
    tenant: str,
    table_name: str,
    way: str,
    configured: bool,
) -> None:
    await outbox.create_tables()
    producer = make_outbox() if configured else Outbox(table_name=table_name)
    if way == "map":
        async with AsyncSession(engine.execution_options(schema_translate_map={None: tenant})) as session:
            await producer.emit(session, "order.created", 1)
            await session.commit()
    elif way == "search_path":
        async with AsyncSession(engine) as session:
            await set_path(session, tenant)
            await producer.emit(session, "order.created", 1)
            await session.commit()
    elif way == "engine":
        elsewhere = create_async_engine(engine.url)
        event.listen(elsewhere.sync_engine, "connect", lambda dbapi, _: set_for_all(dbapi, tenant))
        async with AsyncSession(elsewhere) as session:
            await producer.emit(session, "order.created", 1)
            await session.commit()
        await elsewhere.dispose()
    else:
        options = {"schema_translate_map": {None: tenant}} if way == "plain map" else {}
        with Session(plain_engine.execution_options(**options)) as plain:
            if way == "plain search_path":
                plain.execute(text(f"SET LOCAL search_path TO {tenant}, public"))
            producer.emit_sync(plain, "order.created", 1)
            plain.commit()
    assert [stored.message.body for stored in await outbox.messages()] == [b"1"]
    assert await count(engine, f"{tenant}.{table_name}") == 0
    await producer.close()


def set_for_all(dbapi: Any, schema: str) -> None:
    """As SQLAlchemy's documentation sets another path for all connections of an engine."""
    cursor = dbapi.cursor()
    cursor.execute(f"SET SESSION search_path TO {schema}, public")
    cursor.close()
    dbapi.commit()


async def test_tables_that_are_missing_are_made_where_the_outbox_looks_for_them(
    make_outbox: MakeOutbox, engine: AsyncEngine, table_name: str
) -> None:
    schema = f"{table_name}_tenant"
    async with engine.begin() as connection:
        await connection.execute(text(f"CREATE SCHEMA {schema}"))
    try:
        outbox = make_outbox(db_engine=engine)
        async with AsyncSession(engine) as session:
            await set_path(session, schema)
            await outbox.emit(session, "order.created", 1)
            await session.commit()
        assert await count(engine, f"pg_tables WHERE schemaname = '{schema}'") == 0
        assert len(await make_outbox().messages()) == 1
    finally:
        async with engine.begin() as connection:
            await connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))


async def test_what_a_transaction_has_emitted_is_seen_wherever_its_session_looks(
    outbox: Outbox, engine: AsyncEngine, tenant: str
) -> None:
    await outbox.create_tables()
    async with AsyncSession(engine.execution_options(schema_translate_map={None: tenant})) as session:
        await outbox.emit(session, "order.created", 1)
        assert len(await emitted(session)) == 1
        await session.rollback()


# Listeners


@pytest.mark.parametrize("kind", ["async", "plain", "batch"])
async def test_a_listener_that_looks_elsewhere_completes_its_message_in_the_tables_of_the_outbox(
    make_outbox: MakeOutbox, engine: AsyncEngine, tenant: str, kind: str
) -> None:
    watch = Watch()
    outbox = make_outbox(observers=[watch])
    effect = "INSERT INTO effects VALUES (1)"

    @listen("#", queue="async")
    async def listener(body: int, session: AsyncSession) -> None:
        await set_path(session, tenant)
        await session.execute(text(effect))

    @listen("#", queue="plain")
    def plain(body: int, session: Session) -> None:
        session.execute(text(f"SET LOCAL search_path TO {tenant}, public"))
        session.execute(text(effect))

    @listen("#", queue="batch", batch=10)
    async def batch(bodies: list[int], session: AsyncSession) -> None:
        await set_path(session, tenant)
        await session.execute(text(effect))

    await outbox.create_tables()
    served = {"async": listener, "plain": plain, "batch": batch}[kind]
    async with outbox.running(listeners=[served]):
        await emit(outbox, 1)
        assert [type(outcome) for outcome in await watch.outcomes(1)] == [Done]
    assert await count(engine, f"{tenant}.effects") == 1
    assert await outbox.messages() == []


async def test_an_on_error_that_looks_elsewhere_ends_its_attempt_in_the_tables_of_the_outbox(
    make_outbox: MakeOutbox, tenant: str
) -> None:
    watch = Watch()
    outbox = make_outbox(observers=[watch])

    async def on_error(error: BaseException, message: Any, session: AsyncSession, attempt: Any) -> None:
        await set_path(session, tenant)

    @listen("#", queue="q", on_error=on_error, retry_delays=())
    async def listener(body: int) -> None:
        raise ValueError("it is wrong")

    await outbox.create_tables()
    async with outbox.running(listeners=[listener]):
        await emit(outbox, 1)
        assert [type(outcome) for outcome in await watch.outcomes(1)] == [Dead]
    assert len(await outbox.dead_letters.list()) == 1


async def test_a_listener_whose_row_is_hidden_from_it_does_not_run_again_at_once(make_outbox: MakeOutbox) -> None:
    watch, runs = Watch(), 0
    outbox = make_outbox(observers=[watch])

    @listen("#", queue="q")
    async def listener(body: int, session: AsyncSession) -> None:
        nonlocal runs
        runs += 1
        await session.execute(text(f"DELETE FROM {outbox.tables.messages.name}"))  # the completion finds no row

    await outbox.create_tables()
    async with outbox.running(listeners=[listener]):
        await emit(outbox, 1)
        await watch.wait_for(LeaseWasLost, 1)
        async with asyncio.timeout(30):
            while not [stored for stored in await outbox.messages() if stored.leased_until is None]:
                await asyncio.sleep(0.02)
        [stored] = await outbox.messages()
        assert runs == 1
        assert stored.due_at - stored.message.created_at > inbox.LEASE_LOST_PAUSE * 0.9


# Another database


async def test_a_session_on_another_database_is_refused_and_no_tables_are_made_there(
    outbox: Outbox, other_database: AsyncEngine
) -> None:
    await outbox.create_tables()
    async with AsyncSession(other_database) as session:
        with pytest.raises(WrongDatabase, match="_other"):
            await outbox.emit(session, "order.created", 1)
    plain = create_engine(sync_url(other_database.url))
    with Session(plain) as session, pytest.raises(WrongDatabase):
        outbox.emit_sync(session, "order.created", 1)
    plain.dispose()
    assert await tables_of(other_database) == 0
    assert await outbox.messages() == []


async def test_a_plain_engine_tells_where_the_tables_are(
    outbox: Outbox, plain_engine: Engine, engine: AsyncEngine, other_database: AsyncEngine, tenant: str, table_name: str
) -> None:
    """An application without an event loop gives no other."""
    await outbox.create_tables()
    producer = Outbox(db_engine=plain_engine, table_name=table_name)
    other = create_engine(sync_url(other_database.url))
    with Session(other) as session, pytest.raises(WrongDatabase, match="_other"):
        producer.emit_sync(session, "order.created", 1)
    other.dispose()
    async with AsyncSession(other_database) as session:
        with pytest.raises(WrongDatabase, match="_other"):
            await producer.emit(session, "order.created", 1)
    assert await tables_of(other_database) == 0
    elsewhere = create_engine(plain_engine.url)
    event.listen(elsewhere, "connect", lambda dbapi, _: set_for_all(dbapi, tenant))
    for each in (elsewhere, plain_engine):
        with Session(each) as session:
            producer.emit_sync(session, "order.created", 1)
            session.commit()
    elsewhere.dispose()
    assert await count(engine, f"{tenant}.{table_name}") == 0
    assert len(await outbox.messages()) == 2


async def test_a_listener_with_sessions_on_another_database_has_no_effect_there(
    make_outbox: MakeOutbox, other_database: AsyncEngine
) -> None:
    watch = Watch()
    outbox = make_outbox(observers=[watch])
    async with other_database.begin() as connection:
        await connection.execute(text("CREATE TABLE effects (n int)"))

    @listen("#", queue="q", session_factory=async_sessionmaker(other_database), retry_delays=())
    async def listener(body: int, session: AsyncSession) -> None:
        await session.execute(text("INSERT INTO effects VALUES (1)"))

    async with outbox.running(listeners=[listener]):
        await emit(outbox, 1)
        [outcome] = await watch.outcomes(1)
    assert isinstance(outcome, Dead)
    assert "WrongDatabase" in outcome.error
    assert await count(other_database, "effects") == 0
    assert await tables_of(other_database) == 1


async def test_a_server_that_was_started_again_is_still_the_same_one(outbox: Outbox, engine: AsyncEngine) -> None:
    await outbox.create_tables()
    async with AsyncSession(engine) as session:
        await outbox.emit(session, "order.created", 1)
        await session.commit()
    places: Any = outbox.store.runner.places  # type: ignore[attr-defined]
    places._own = type(places._own)("postgres of before", places._own.schema)  # as if it had been asked then
    later = create_async_engine(engine.url)
    async with AsyncSession(later) as session:
        await outbox.emit(session, "order.created", 2)
        await session.commit()
    await later.dispose()
    assert len(await outbox.messages()) == 2


async def test_how_a_session_writes_numbers_makes_no_other_database_of_its_own(
    outbox: Outbox, database_url: str
) -> None:
    await outbox.create_tables()
    engine = create_async_engine(database_url, connect_args={"server_settings": {"extra_float_digits": "-5"}})
    async with AsyncSession(engine) as session, session.begin():
        await outbox.emit(session, "order.created", 1)
    await engine.dispose()
    assert len(await outbox.messages()) == 1


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_another_file_of_sqlite_is_another_database(tmp_path: Path, kind: str) -> None:
    own, other = tmp_path / "own.db", tmp_path / "other.db"
    outbox = Outbox(db_engine_url=f"sqlite+aiosqlite:///{own}")
    await outbox.create_tables()
    (tmp_path / "same.db").symlink_to(own)
    if kind == "async":
        for path in (other, tmp_path / "same.db"):
            engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
            async with AsyncSession(engine) as session, session.begin():
                with pytest.raises(WrongDatabase) if path == other else nullcontext():
                    await outbox.emit(session, "order.created", 1)
            await engine.dispose()
    else:
        with Session(create_engine(f"sqlite:///{other}")) as plain, pytest.raises(WrongDatabase, match="other"):
            outbox.emit_sync(plain, "order.created", 1)
    assert len(await outbox.messages()) == (1 if kind == "async" else 0)
    await outbox.close()


def test_another_file_of_sqlite_is_another_database_than_that_of_a_plain_engine(tmp_path: Path) -> None:
    own = create_engine(f"sqlite:///{tmp_path / 'own.db'}")
    outbox = Outbox(db_engine=own)
    other = create_engine(f"sqlite:///{tmp_path / 'other.db'}")
    with Session(other) as session, pytest.raises(WrongDatabase, match="other"):
        outbox.emit_sync(session, "order.created", 1)
    with Session(own) as session:
        outbox.emit_sync(session, "order.created", 1)
        session.commit()


async def test_a_database_of_another_kind_is_another_database(outbox: Outbox) -> None:
    with create_engine("sqlite://").connect() as connection, pytest.raises(WrongDatabase, match="sqlite"):
        outbox.emit_sync(connection, "order.created", 1)


async def test_a_map_of_schemas_moves_nothing_on_sqlite(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'own.db'}")
    outbox = Outbox(db_engine=engine)
    await outbox.create_tables()
    mapped = engine.execution_options(schema_translate_map={None: "tenant"})
    async with AsyncSession(mapped) as session, session.begin():
        await outbox.emit(session, "order.created", 1)
    assert len(await outbox.messages()) == 1
    await outbox.close()
    await engine.dispose()


# Two connections


@pytest.fixture
async def orders(engine: AsyncEngine, table_name: str) -> Table:
    table = Table(f"{table_name}_orders", MetaData(), Column("id", Integer, primary_key=True))
    async with engine.begin() as connection:
        await connection.run_sync(table.create)
    return table


@pytest.mark.parametrize("first", ["data", "message"])
async def test_data_and_message_on_two_connections_are_refused(
    outbox: Outbox, engine: AsyncEngine, orders: Table, first: str
) -> None:
    await outbox.create_tables()
    second = create_async_engine(engine.url)
    async with AsyncSession(engine, binds={orders: second}) as session:
        if first == "data":
            await session.execute(insert(orders).values(id=1))
            with pytest.raises(TransactionError, match="two connections"):
                await outbox.emit(session, "order.created", 1)
        else:
            await outbox.emit(session, "order.created", 1)
            for _ in range(2):  # also if the first refusal was caught
                with pytest.raises(TransactionError, match="two connections"):
                    await session.execute(insert(orders).values(id=1))
            assert second.pool.checkedout() == 0  # type: ignore[attr-defined]
        await session.rollback()
        await outbox.emit(session, "order.created", 2)  # the next transaction has one
        await session.commit()
    await second.dispose()
    assert [stored.message.body for stored in await outbox.messages()] == [b"2"]


async def test_a_connection_of_the_session_can_be_named_where_there_are_several(
    outbox: Outbox, engine: AsyncEngine, orders: Table
) -> None:
    await outbox.create_tables()
    second = create_async_engine(engine.url)
    async with AsyncSession(engine, binds={orders: second}) as session:
        await session.execute(text("SELECT 1"))
        await session.execute(insert(orders).values(id=1))
        where = await session.connection(bind_arguments={"clause": orders.select()})
        await outbox.emit(where, "order.created", 1)
        await session.commit()
    await second.dispose()
    assert len(await outbox.messages()) == 1


async def test_a_listener_cannot_write_on_a_second_connection_of_its_session(
    make_outbox: MakeOutbox, engine: AsyncEngine, orders: Table
) -> None:
    watch = Watch()
    outbox = make_outbox(observers=[watch])
    second = create_async_engine(engine.url)
    sessions = async_sessionmaker(engine, binds={orders: second})

    @listen("#", queue="q", session_factory=sessions, retry_delays=(0.01,))
    async def listener(body: int, session: AsyncSession) -> None:
        await session.execute(insert(orders).values(id=1))

    async with outbox.running(listeners=[listener]):
        await emit(outbox, 1)
        outcomes = await watch.outcomes(2)
    await second.dispose()
    assert [type(outcome) for outcome in outcomes] == [RetryIn, Dead]
    assert isinstance(outcomes[1], Dead)
    assert "two connections" in outcomes[1].error
    assert await count(engine, orders.name) == 0
