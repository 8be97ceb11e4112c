""" "Main application", "Emit inside database transaction", "Delayed execution" and the API of `emit()`.

The rulings on naive datetimes, bare numbers, content types, table creation and missing transactions are here too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel
from sqlalchemy import Engine, func, inspect, select
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import outbox as library
from outbox import (
    BodyNotJson,
    Message,
    NotAtomicWarning,
    Outbox,
    SnapshotConflict,
    TransactionError,
    emit,
    listen,
    setup,
)
from outbox.core.store import Selection
from outbox.sqlite import prepare
from tests.support.databases import ASYNCPG, on_every_driver, on_sqlite
from tests.support.observing import PATIENCE, Statements, arrival, routing_keys
from tests.support.outboxes import MakeOutbox

from .users import JOHN


class Profile(BaseModel):
    id: int
    username: str


@dataclasses.dataclass
class Address:
    street: str
    since: datetime.date


async def usernames(db_engine: AsyncEngine, user: Any) -> list[str]:
    async with AsyncSession(db_engine) as session:
        return list(await session.scalars(select(user.username).order_by(user.id)))


# Emit inside database transaction


@on_every_driver
async def test_data_and_message_are_stored_together(
    db_engine: AsyncEngine, singleton: Outbox, table_name: str, user_model: Any
) -> None:
    setup(db_engine=db_engine, table_name=table_name)

    async with AsyncSession(db_engine) as session, session.begin():
        session.add(user_model(id=123, username="johndoe"))
        await emit(session, "user.created", {"id": 123, "username": "johndoe"})
        # commit not needed because of `session.begin()`

    assert await usernames(db_engine, user_model) == ["johndoe"]
    [stored] = await singleton.messages()
    assert (stored.message.routing_key, stored.message.body) == ("user.created", b'{"id":123,"username":"johndoe"}')


@on_every_driver
async def test_data_and_message_fail_together(outbox: Outbox, db_engine: AsyncEngine, user_model: Any) -> None:
    await outbox.create_tables()
    with pytest.raises(ZeroDivisionError):
        async with AsyncSession(db_engine) as session, session.begin():
            session.add(user_model(id=123, username="johndoe"))
            await outbox.emit(session, "user.created", JOHN)
            raise ZeroDivisionError
    assert await usernames(db_engine, user_model) == []
    assert await outbox.messages() == []


async def test_data_that_the_database_refuses_takes_its_message_with_it(
    outbox: Outbox, db_engine: AsyncEngine, user_model: Any
) -> None:
    await outbox.create_tables()
    with pytest.raises(Exception, match=r"(?i)unique"):
        async with AsyncSession(db_engine) as session, session.begin():
            await session.execute(user_model.__table__.insert().values(JOHN))
            await outbox.emit(session, "user.created", JOHN)
            session.add(user_model(id=123, username="a second johndoe"))
    assert await usernames(db_engine, user_model) == []
    assert await outbox.messages() == []


@on_sqlite
async def test_a_session_that_begins_by_itself_and_commits_by_hand_stores_its_messages(
    outbox: Outbox, db_engine: AsyncEngine
) -> None:
    async with AsyncSession(db_engine) as session:
        await outbox.emit(session, "user.created", JOHN)
        await session.commit()
    assert await routing_keys(outbox) == ["user.created"]


async def test_nobody_sees_a_message_before_its_transaction_commits(outbox: Outbox, db_engine: AsyncEngine) -> None:
    assert await outbox.messages() == []
    async with AsyncSession(db_engine) as session, session.begin():
        await outbox.emit(session, "user.created", JOHN)
        assert await outbox.messages() == []
        async with outbox.store.feed.claim(Selection(limit=10, lease=datetime.timedelta(seconds=5))) as claim:
            assert not claim.attempts
    assert await routing_keys(outbox) == ["user.created"]


async def test_a_first_look_does_not_wait_for_a_transaction_that_has_emitted(
    outbox: Outbox, db_engine: AsyncEngine
) -> None:
    await outbox.create_tables()
    async with AsyncSession(db_engine) as session, session.begin():
        await outbox.emit(session, "user.created", JOHN)
        looking = asyncio.create_task(outbox.backlog())
        in_time, _ = await asyncio.wait([looking], timeout=PATIENCE / 4)
    backlog = await looking
    assert in_time
    assert backlog.waiting == 0


@on_every_driver
async def test_a_rollback_after_an_emit_that_was_the_first_statement_ever_leaves_no_message(
    outbox: Outbox, db_engine: AsyncEngine
) -> None:
    async with AsyncSession(db_engine) as session:
        await outbox.emit(session, "user.created", JOHN)
        await session.rollback()
        await outbox.emit(session, "user.deleted", JOHN)
        await session.commit()
    assert await routing_keys(outbox) == ["user.deleted"]


async def test_the_first_emit_ever_in_the_safe_transaction_can_roll_back(outbox: Outbox) -> None:
    with pytest.raises(ZeroDivisionError):
        async with outbox.transaction() as session:
            await outbox.emit(session, "user.created", JOHN)
            raise ZeroDivisionError
    async with outbox.transaction() as session:
        await outbox.emit(session, "user.deleted", JOHN)
    assert await routing_keys(outbox) == ["user.deleted"]


@on_every_driver
async def test_a_savepoint_that_rolls_back_takes_its_messages_with_it(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        await outbox.emit(session, "before", 1)
        with pytest.raises(ZeroDivisionError):
            async with session.begin_nested():
                await outbox.emit(session, "inside", 2)
                raise ZeroDivisionError
        async with session.begin_nested():
            await outbox.emit(session, "released", 3)
        await outbox.emit(session, "after", 4)
    assert await routing_keys(outbox) == ["before", "released", "after"]


async def test_a_savepoint_that_holds_the_first_emit_ever_can_roll_back(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        with pytest.raises(ZeroDivisionError):
            async with session.begin_nested():
                await outbox.emit(session, "inside", 1)
                raise ZeroDivisionError
        await outbox.emit(session, "after", 2)
    assert await routing_keys(outbox) == ["after"]


async def test_a_released_savepoint_is_taken_back_by_the_outer_rollback(outbox: Outbox) -> None:
    await outbox.create_tables()
    with pytest.raises(ZeroDivisionError):
        async with outbox.transaction() as session:
            async with session.begin_nested():
                await outbox.emit(session, "inside", 1)
            raise ZeroDivisionError
    assert await outbox.messages() == []


# Which sessions and connections can emit


@on_every_driver
async def test_an_async_connection_can_emit(outbox: Outbox, db_engine: AsyncEngine) -> None:
    async with db_engine.begin() as connection:
        await outbox.emit(connection, "user.created", JOHN)
    async with db_engine.connect() as connection:
        await outbox.emit(connection, "user.deleted", JOHN)
        await connection.rollback()
        await outbox.emit(connection, "user.updated", JOHN)
        await connection.commit()
    assert await routing_keys(outbox) == ["user.created", "user.updated"]


async def test_a_plain_session_can_emit(outbox: Outbox, sync_engine: Engine, user_model: Any) -> None:
    with Session(sync_engine) as session, session.begin():
        session.add(user_model(id=123, username="johndoe"))
        message = outbox.emit_sync(session, "user.created", JOHN)
    with pytest.raises(ZeroDivisionError), Session(sync_engine) as session, session.begin():
        session.add(user_model(id=456, username="maryjane"))
        outbox.emit_sync(session, "user.created", JOHN)
        raise ZeroDivisionError
    [stored] = await outbox.messages()
    assert stored.message == message
    with Session(sync_engine) as session:
        assert list(session.scalars(select(user_model.id))) == [123]


async def test_a_plain_connection_can_emit(outbox: Outbox, sync_engine: Engine) -> None:
    with sync_engine.begin() as connection:
        outbox.emit_sync(connection, "user.created", JOHN)
    with sync_engine.connect() as connection:
        outbox.emit_sync(connection, "user.deleted", JOHN)
        connection.rollback()
        outbox.emit_many_sync(connection, "user.imported", [1, 2])
        connection.commit()
    assert await routing_keys(outbox) == ["user.created", "user.imported", "user.imported"]


async def test_a_plain_session_rolls_back_to_its_savepoint(outbox: Outbox, sync_engine: Engine) -> None:
    if sync_engine.dialect.name == "sqlite":
        prepare(sync_engine)
    with Session(sync_engine) as session, session.begin():
        outbox.emit_sync(session, "before", 1)
        with pytest.raises(ZeroDivisionError), session.begin_nested():
            outbox.emit_sync(session, "inside", 2)
            raise ZeroDivisionError
    assert await routing_keys(outbox) == ["before"]


def test_an_application_without_an_event_loop_needs_none_to_emit(sync_engine: Engine, table_name: str) -> None:
    outbox = Outbox(db_engine=sync_engine, table_name=table_name)
    with Session(sync_engine) as session, session.begin():
        outbox.emit_sync(session, "user.created", JOHN)
        outbox.emit_sync(session, "user.reminded", JOHN, eta=datetime.timedelta(days=1), timer_id="reminder")
        assert outbox.cancel_timer_sync(session, "reminder")
    with sync_engine.connect() as connection:
        rows = connection.execute(select(outbox.tables.messages.c.routing_key)).scalars()
        assert list(rows) == ["user.created"]


async def test_emit_takes_plain_sessions_too_and_scoped_ones(
    outbox: Outbox, db_engine: AsyncEngine, sync_engine: Engine
) -> None:
    with Session(sync_engine) as plain, plain.begin():
        await outbox.emit(plain, "plain", 1)
    scoped = scoped_session(sessionmaker(sync_engine))
    outbox.emit_sync(scoped, "scoped", 2)
    scoped.commit()
    scoped.remove()
    async_scoped = async_scoped_session(async_sessionmaker(db_engine), asyncio.current_task)
    await outbox.emit(async_scoped, "async scoped", 3)
    await async_scoped.commit()
    await async_scoped.remove()
    assert await routing_keys(outbox) == ["plain", "scoped", "async scoped"]


@on_sqlite
async def test_what_cannot_carry_a_transaction_is_refused_with_advice(outbox: Outbox, db_engine: AsyncEngine) -> None:
    with pytest.raises(TransactionError, match="AsyncSession, Session"):
        await outbox.emit(db_engine, "user.created", JOHN)  # type: ignore[call-overload]
    async with AsyncSession(db_engine) as session:
        with pytest.raises(TransactionError, match="await emit"):
            outbox.emit_sync(session, "user.created", JOHN)  # type: ignore[call-overload]


# The body


@pytest.mark.parametrize(
    ("body", "stored", "content_type"),
    [
        (JOHN, b'{"id":123,"username":"johndoe"}', "application/json"),
        (Profile(id=123, username="johndoe"), b'{"id":123,"username":"johndoe"}', "application/json"),
        (b"\x00\xff not JSON", b"\x00\xff not JSON", "application/octet-stream"),
        (bytearray(b"abc"), b"abc", "application/octet-stream"),
        (Address("Main St", datetime.date(2024, 2, 29)), b'{"street":"Main St","since":"2024-02-29"}', None),
        ([Profile(id=1, username="a")], b'[{"id":1,"username":"a"}]', None),
        (UUID(int=7), b'"00000000-0000-0000-0000-000000000007"', None),
        (None, b"null", None),
        ("déjà vu", '"déjà vu"'.encode(), None),
    ],
    ids=["dict", "pydantic", "bytes", "bytearray", "dataclass", "models", "uuid", "none", "text"],
)
@on_sqlite
async def test_models_are_serialized_bytes_are_used_as_they_are_and_the_rest_is_json(
    outbox: Outbox, body: object, stored: bytes, content_type: str | None
) -> None:
    async with outbox.transaction() as session:
        await outbox.emit(session, "user.created", body)
    [found] = await outbox.messages()
    assert found.message.body == stored
    assert found.message.content_type == (content_type or "application/json")


@on_every_driver
async def test_bytes_of_every_value_survive_the_database(outbox: Outbox) -> None:
    every = bytes(range(256)) * 10
    async with outbox.transaction() as session:
        await outbox.emit(session, "image.uploaded", every)
    [found] = await outbox.messages()
    assert found.message.body == every


@on_sqlite
async def test_a_body_that_is_no_json_is_refused_by_name_and_leaves_the_transaction_usable(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        for body in (object(), {"amount": float("nan")}, {1, object()}, float("inf")):
            with pytest.raises(BodyNotJson, match=r"user\.created") as refused:
                await outbox.emit(session, "user.created", body)
            assert isinstance(refused.value, ValueError)
        await outbox.emit(session, "user.deleted", JOHN)
    assert await routing_keys(outbox) == ["user.deleted"]


@on_every_driver
async def test_emit_returns_the_message_as_a_listener_will_get_it(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[Message] = asyncio.Queue()

    @listen("user.created", queue="audit")
    async def audit(user: object, message: Message) -> None:
        await arrivals.put(message)

    async with outbox.running(listeners=[audit]):
        async with outbox.transaction() as session:
            emitted = await outbox.emit(session, "user.created", JOHN, key="123", headers={"tenant": "Ätna"})
        assert await arrival(arrivals) == emitted
    assert emitted is not None
    assert UUID(emitted.id).version == 7
    assert (emitted.key, emitted.headers) == ("123", {"tenant": "Ätna"})


# Delayed execution


@pytest.fixture
def local_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A place whose clocks differ from UTC by hours and minutes."""
    monkeypatch.setenv("TZ", "KTM-5:45")  # in full, because a machine may know no names of time zones
    time.tzset()
    assert time.timezone == -(5 * 60 + 45) * 60
    yield
    monkeypatch.undo()
    time.tzset()


FIVE_MINUTES = datetime.timedelta(minutes=5)
NEW_YORK = datetime.timezone(datetime.timedelta(hours=-5))


@on_every_driver
async def test_eta_is_a_datetime_a_timedelta_or_milliseconds(
    outbox: Outbox, db_engine: AsyncEngine, local_time: None
) -> None:
    etas: dict[str, Any] = {
        "naive datetime": datetime.datetime.now() + datetime.timedelta(minutes=5),  # noqa: DTZ005 - the project's words
        "aware datetime": datetime.datetime.now(NEW_YORK) + FIVE_MINUTES,
        "datetime in UTC": datetime.datetime.now(datetime.UTC) + FIVE_MINUTES,
        "timedelta": FIVE_MINUTES,
        "milliseconds": 300_000,
        "fractional milliseconds": 300_000.5,
    }
    due_at = datetime.datetime.now(datetime.UTC) + FIVE_MINUTES
    async with AsyncSession(db_engine) as session:
        for kind, eta in etas.items():
            await outbox.emit(session, kind, {"id": 123, "username": "johndoe"}, eta=eta)
        await session.commit()
    late = {stored.message.routing_key: abs(stored.due_at - due_at) for stored in await outbox.messages()}
    assert late.keys() == etas.keys()
    assert max(late.values()) < datetime.timedelta(seconds=10)


async def test_a_delayed_message_is_delivered_when_it_is_due_and_not_before(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[tuple[str, float]] = asyncio.Queue()

    @listen("user.*", queue="reminders")
    async def remind(user: object, routing_key: str) -> None:
        await arrivals.put((routing_key, time.monotonic()))

    async with outbox.running(listeners=[remind]):
        async with outbox.transaction() as session:
            await outbox.emit(session, "user.later", JOHN, eta=FIVE_MINUTES)
            await outbox.emit(session, "user.now", JOHN)
            await outbox.emit(session, "user.past", JOHN, eta=datetime.datetime.now(datetime.UTC) - FIVE_MINUTES)
        assert {(await arrival(arrivals))[0] for _ in range(2)} == {"user.now", "user.past"}
        emitted_at = time.monotonic()
        async with outbox.transaction() as session:
            await outbox.emit(session, "user.soon", JOHN, eta=200)
        name, arrived_at = await arrival(arrivals)
    assert name == "user.soon"
    assert arrived_at - emitted_at > 0.195  # SQLite's clock counts in milliseconds
    assert arrivals.empty()
    [waiting] = await outbox.messages(state="waiting")
    assert waiting.message.routing_key == "user.later"


@pytest.mark.parametrize(
    "eta", [True, float("nan"), float("inf"), "tomorrow", datetime.timedelta(days=100_000), 10**30]
)
@on_sqlite
async def test_an_eta_that_is_no_time_is_refused_before_anything_is_written(outbox: Outbox, eta: Any) -> None:
    await outbox.create_tables()
    async with outbox.transaction() as session:
        with pytest.raises(library.TimeInvalid):
            await outbox.emit(session, "user.created", JOHN, eta=eta)
    assert await outbox.messages() == []


# Expiration


async def test_expiration_is_in_seconds_and_overrides_the_default_of_setup(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox(expiration=60)
    async with outbox.transaction() as session:
        await outbox.emit(session, "default", 1)
        await outbox.emit(session, "own", 2, expiration=3.5)
        await outbox.emit(session, "timedelta", 3, expiration=datetime.timedelta(hours=1))
        await outbox.emit(session, "delayed", 4, expiration=5, eta=datetime.timedelta(days=1))
    lifetimes = {
        stored.message.routing_key: (stored.message.expires_at - stored.due_at).total_seconds()
        for stored in await outbox.messages()
        if stored.message.expires_at is not None
    }
    assert lifetimes == pytest.approx({"default": 60, "own": 3.5, "timedelta": 3600, "delayed": 5}, abs=0.002)


@on_sqlite
async def test_without_an_expiration_messages_wait_for_ever(outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        await outbox.emit(session, "user.created", JOHN)
    [stored] = await outbox.messages()
    assert stored.message.expires_at is None


async def test_a_delayed_message_does_not_expire_before_it_is_due(outbox: Outbox) -> None:
    hour_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    async with outbox.transaction() as session:
        await outbox.emit(session, "user.created", JOHN, eta=datetime.timedelta(hours=1), expiration=0.001)
        await outbox.emit(session, "user.deleted", JOHN, eta=hour_ago, expiration=0.001)
    assert await outbox.store.maintenance.expire(10) == 1
    assert await routing_keys(outbox) == ["user.created"]


# Tables without migrations


async def test_the_outbox_table_is_made_by_the_first_emit(
    outbox: Outbox, db_engine: AsyncEngine, table_name: str
) -> None:
    async with AsyncSession(db_engine) as session, session.begin():
        await outbox.emit(session, "user.created", JOHN)
    async with db_engine.connect() as connection:
        names = await connection.run_sync(lambda plain: inspect(plain).get_table_names())
    assert table_name in names


@on_sqlite
async def test_a_table_that_exists_is_used_as_it_is(make_outbox: MakeOutbox) -> None:
    for name in ("first", "second"):
        outbox = make_outbox()
        await outbox.create_tables()
        async with outbox.transaction() as session:
            await outbox.emit(session, name, JOHN)
    assert await routing_keys(outbox) == ["first", "second"]


@on_every_driver
async def test_two_first_emits_at_the_same_time_do_not_collide(make_outbox: MakeOutbox) -> None:
    async def first_emit(outbox: Outbox) -> None:
        async with outbox.transaction() as session:
            await outbox.emit(session, "user.created", JOHN)

    outboxes = [make_outbox() for _ in range(4)]
    await asyncio.gather(*(first_emit(outbox) for outbox in outboxes))
    assert await routing_keys(outboxes[0]) == ["user.created"] * 4


@pytest.mark.parametrize("database_url", [ASYNCPG], indirect=True)
async def test_the_first_uses_of_an_outbox_may_all_come_at_once(make_outbox: MakeOutbox) -> None:
    await make_outbox().create_tables()

    async def emit_and_commit(outbox: Outbox) -> None:
        async with outbox.transaction() as session:
            await outbox.emit(session, "user.created", JOHN)

    for _ in range(8):
        outbox = make_outbox()
        waiting = outbox.store.feed.wait(0.01)
        await asyncio.gather(waiting, outbox.backlog(), outbox.messages(), *(emit_and_commit(outbox) for _ in range(3)))
        await outbox.close()


@on_sqlite
async def test_a_transaction_that_is_open_in_a_fresh_file_is_waited_for(outbox: Outbox, sync_engine: Engine) -> None:
    async def emit_elsewhere() -> None:
        async with outbox.transaction() as session:
            await outbox.emit(session, "user.created", JOHN)

    with sync_engine.connect() as application:
        application.exec_driver_sql("BEGIN IMMEDIATE")
        emitting = asyncio.create_task(emit_elsewhere())
        await asyncio.wait([emitting], timeout=0.2)
        application.rollback()
    await emitting
    assert await routing_keys(outbox) == ["user.created"]


@on_every_driver
async def test_tables_are_made_beside_a_full_pool(make_outbox: MakeOutbox, database_url: str) -> None:
    engine = create_async_engine(database_url, pool_size=1, max_overflow=0, pool_timeout=PATIENCE)
    outbox = make_outbox(db_engine=engine)
    async with asyncio.timeout(PATIENCE), AsyncSession(engine) as session, session.begin():
        await session.execute(select(func.count()).select_from(select(1).subquery()))
        await outbox.emit(session, "user.created", JOHN)
    assert await routing_keys(outbox) == ["user.created"]
    await engine.dispose()


@on_sqlite
def test_setup_does_no_input_or_output_and_needs_no_event_loop(database_url: str, tmp_path: Path) -> None:
    outbox = Outbox(db_engine_url=database_url)
    assert list(tmp_path.iterdir()) == []
    asyncio.run(outbox.close())


def test_nothing_is_done_to_an_engine_that_is_given(sync_engine: Engine, table_name: str) -> None:
    outbox = Outbox(db_engine=sync_engine, table_name=table_name)
    before = {name: list(getattr(sync_engine.dispatch, name)) for name in ("begin", "before_cursor_execute", "commit")}
    connecting = list(sync_engine.pool.dispatch.connect)
    with sync_engine.begin() as connection:
        outbox.emit_sync(connection, "user.created", JOHN)
    after = {name: list(getattr(sync_engine.dispatch, name)) for name in before}
    assert after == before
    assert list(sync_engine.pool.dispatch.connect) == connecting


# Transactions that protect nothing


async def test_emitting_in_autocommit_warns_that_nothing_is_atomic(outbox: Outbox, database_url: str) -> None:
    engine = create_async_engine(database_url, isolation_level="AUTOCOMMIT")
    async with AsyncSession(engine) as session, session.begin():
        with pytest.warns(NotAtomicWarning, match="AUTOCOMMIT"):
            await outbox.emit(session, "user.created", JOHN)
    await engine.dispose()


@on_sqlite
async def test_a_session_that_is_closed_without_commit_after_an_emit_warns(
    outbox: Outbox, db_engine: AsyncEngine
) -> None:
    await outbox.create_tables()
    with pytest.warns(NotAtomicWarning, match="without commit"):
        async with AsyncSession(db_engine) as session:
            await outbox.emit(session, "user.created", JOHN)
    assert await outbox.messages() == []


@on_sqlite
async def test_neither_commit_nor_rollback_nor_a_failing_block_warns(outbox: Outbox, db_engine: AsyncEngine) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with AsyncSession(db_engine) as session:
            await outbox.emit(session, "user.created", JOHN)
            await session.commit()
            await outbox.emit(session, "user.created", JOHN)
            await session.rollback()
        with pytest.raises(ZeroDivisionError):
            async with AsyncSession(db_engine) as session, session.begin():
                await outbox.emit(session, "user.created", JOHN)
                raise ZeroDivisionError


@on_sqlite
async def test_sqlite_refuses_a_transaction_that_read_before_others_wrote_with_advice(
    outbox: Outbox, make_outbox: MakeOutbox, sync_engine: Engine, user_model: Any
) -> None:
    async with outbox.transaction() as session:
        await outbox.emit(session, "first", 1)
    with sync_engine.connect() as reading:
        reading.exec_driver_sql("BEGIN")
        reading.execute(select(func.count()).select_from(user_model)).all()
        async with outbox.transaction() as session:
            await outbox.emit(session, "second", 2)
        with pytest.raises(SnapshotConflict, match=r"transaction\(\).*outbox\.sqlite\.prepare"):
            outbox.emit_sync(reading, "third", 3)
        reading.rollback()
    assert await routing_keys(outbox) == ["first", "second"]


async def test_emit_is_one_statement_on_the_callers_connection(outbox: Outbox, db_engine: AsyncEngine) -> None:
    await outbox.create_tables()
    async with AsyncSession(db_engine) as session, session.begin():
        await outbox.emit(session, "warm up", 0)
        with Statements(db_engine.sync_engine) as statements:
            await outbox.emit(session, "user.created", JOHN)
    assert len(statements) == 1
    assert statements[0].startswith("INSERT INTO")
